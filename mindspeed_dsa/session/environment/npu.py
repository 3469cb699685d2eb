"""Checks of an NPU installation: matching releases, operators, and a device for every rank."""

from __future__ import annotations

from collections.abc import Iterator

from mindspeed_dsa.environment import EnvironmentCheck, Finding, Surroundings
from mindspeed_dsa.platforms import npu_releases
from mindspeed_dsa.platforms.npu_operators import OPERATORS, needs

_DSA = ("Lightning Indexer", "sparse flash attention")
_PARTS = {
    "fused-dsa": _DSA,
    "moe-grouped-gemm": ("grouped experts",),
    "moe-permute-fusion": ("permutation of tokens",),
    "fused-rmsnorm": ("RMSNorm",),
    "fused-swiglu": ("SwiGLU",),
    "fused-rotary-pos-emb": ("rotary embedding",),
    "ascend-mc2": ("tensor parallel linear layers",),
    "virtual-optimizer": ("virtual optimizer",),
}
"""Parts of the operator table (``npu_operators``) that each feature calls."""
_ALONE = ("ascend-mc2", "virtual-optimizer")
"""Features without a fallback for a missing operator."""


def find_releases(about: Surroundings) -> Iterator[Finding]:
    """Check for a torch_npu that was built for another torch, or that does not match the sourced CANN."""
    machine = about.machine
    yield from npu_releases.disagreements(machine.torch, machine.torch_npu, machine.cann)


def find_operators(about: Surroundings) -> Iterator[Finding]:
    """Check for operators of active features that torch_npu or CANN lacks."""
    for feature in sorted(about.features & _PARTS.keys()):
        parts = _PARTS[feature] + (_losses(about) if feature == "fused-dsa" else ())
        lacking = {
            each.name: about.machine.lacking[each.name]
            for each in OPERATORS
            if each.part in parts and each.name in about.machine.lacking
        }
        if not lacking:
            continue
        # With --dsa-backend npu the user has excluded the fallback.
        named = feature == "fused-dsa" and about.argument("dsa_backend") == "npu"
        ends = named or feature in _ALONE
        first, reason = next(iter(lacking.items()))
        more = f" and {len(lacking) - 1} more of it" if len(lacking) > 1 else ""
        runs = "and it has nothing else to run" if ends else "and PyTorch runs in its place, slower"
        yield Finding(
            "error" if ends else "warning",
            feature,
            f"{reason.partition('; ')[0]}{more}, {runs}",
            needs(first).replace(f"{first} needs", "install"),
        )


def _losses(about: Surroundings) -> tuple[str, ...]:
    """Return the name of the indexer loss operator that the job uses, or an empty tuple without the loss."""
    if not about.argument("dsa_indexer_loss_coeff"):
        return ()
    warm = about.argument("dsa_stage") == "warmup"
    sparse = about.argument("dsa_indexer_use_sparse_loss") and not warm
    return ("indexer loss, sparse",) if sparse else ("indexer loss, dense (warm-up)",)


def find_devices(about: Surroundings) -> Iterator[Finding]:
    """Check for more ranks than devices on this node."""
    devices, rank = about.machine.devices, about.variable("LOCAL_RANK")
    visible = "ASCEND_RT_VISIBLE_DEVICES" if about.platform == "npu" else "CUDA_VISIBLE_DEVICES"
    # Launchers other than torchrun, and wrapper scripts, may show each rank a single device and set
    # LOCAL_RANK=0 on all of them. If they set other ranks and there are too few devices, the higher ranks
    # report it.
    hidden = devices == 1 and rank == "0" and about.variable(visible)
    alone = hidden or (rank.isdigit() and not about.variable("TORCHELASTIC_RUN_ID"))
    # A rank on its own knows only its number: rank 3 needs at least 4 devices.
    ranks = int(rank) + 1 if alone else about.machine.local_ranks
    if devices is None or ranks <= devices:
        return
    limit = f" ({visible}={about.variable(visible)})" if about.variable(visible) else ""
    yield Finding(
        "error",
        f"{ranks} ranks on a node",
        f"they see {devices} device{'' if devices == 1 else 's'} there{limit}, and each takes the one of its "
        "number",
        f"torchrun --nproc-per-node {devices}, or more devices in {visible}; a wrapper that gives each rank "
        f"one device of its own sets {visible} to that device, and LOCAL_RANK=0",
    )


CHECKS = (
    EnvironmentCheck(
        "torch-npu-release",
        "torch, torch_npu, CANN",
        "torch_npu is of another release than torch, or goes with another CANN than the one whose "
        "`set_env.sh` was sourced; a warning where torch_npu is newer than its tables of August 2026 and "
        "CANN is not",
        "torch_npu, its tables of releases and of compatible ones",
        ("error", "warning"),
        find_releases,
        platforms=("npu",),
        early=True,
    ),
    EnvironmentCheck(
        "npu-operators",
        "torch_npu, CANN's library of operators",
        "a feature calls operators that one of both lacks; an error where nothing runs in their place",
        "torch_npu's schemas and CANN's functions, as they are installed",
        ("error", "warning"),
        find_operators,
        platforms=("npu",),
    ),
    EnvironmentCheck(
        "devices-for-ranks",
        "`LOCAL_WORLD_SIZE`, `LOCAL_RANK`, visible devices",
        "a node has more ranks than devices, and ranks do not see one each as their number 0; such a job is "
        "refused",
        "Megatron-LM 0.12.1 to 0.19, `training/initialize.py`: each rank takes the device of its number",
        ("error",),
        find_devices,
        platforms=("cuda", "npu"),
        early=True,
        stops=True,
    ),
)
