"""What runs inside the pool's workers: DDP and FSDP2 side by side, and checkpoints from one to the other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor

from mindspeed_dsa.parallel.local_shards import local_of
from mindspeed_dsa.patches.errors import SettingsError
from tests.support.model import DSA_ON, gpt_model, start
from tests.support.optimizer_job import PLAIN, assemble, load_from, master_value, save_to, state, step

WAY = "fully_reshardable"
# A router of six rows, which have no quarters, and norms of nineteen weights, which have no halves.
ODD = {"num_moe_experts": 6, "kv_lora_rank": 19, "num_layers": 1, "moe_layer_freq": 1}
JOB: dict[str, Any] = {"ep": 2, "overrides": ODD}


def life(
    folder: str, sharding_size: int | None, ep: int = 2, num_experts: int = 6, **switches: Any
) -> dict[str, Any]:
    """Steps of both, a checkpoint of DDP's into FSDP2, on from there, back into DDP, and resumed."""
    start({"use_torch_fsdp2": True, "fsdp2_sharding_size": sharding_size, **switches}, ep=ep)
    job = _job(ep, switches)
    job["overrides"]["num_moe_experts"] = num_experts
    ddp, sharded = assemble(**job), assemble(**job, fsdp2=True)
    records = [(step(ddp, 0), step(sharded, 0))]
    from_ddp, from_fsdp2 = (_made(Path(folder, name)) for name in ("ddp", "fsdp2"))
    save_to(ddp, PLAIN, from_ddp)
    step(sharded, 7)  # everything is something else before it is loaded
    load_from(sharded, PLAIN, from_ddp)
    unequal = {"ddp to fsdp2": differing(ddp, sharded)}
    records.append((step(ddp, 1), step(sharded, 1)))
    save_to(sharded, PLAIN, from_fsdp2)
    step(ddp, 7)
    load_from(ddp, PLAIN, from_fsdp2)
    unequal["fsdp2 to ddp"] = differing(ddp, sharded)
    resumed = assemble(**job, fsdp2=True)
    load_from(resumed, PLAIN, from_fsdp2)
    unequal["resumed"] = [] if step(resumed, 2) == step(sharded, 2) else ["record"]
    unequal["resumed"] += differing(resumed, sharded)
    whole, pieces = zip(*pairs(ddp, sharded), strict=True)
    experts = [each for name, each in sharded.model.named_parameters() if ".experts." in name]
    dense = [
        piece for piece in pieces if isinstance(piece, DTensor) and not any(piece is each for each in experts)
    ]
    return {
        "records": records,
        "unequal": unequal,
        "contents": [_contents(folder) for folder in (from_ddp, from_fsdp2)],
        "share": sum(each._local_tensor.numel() for each in dense) / sum(each.numel() for each in dense),
        "dims": {each.placements[-1].dim for each in dense},
        "experts": {_cut(each) for each in experts},
        "bytes of experts": sum(local_of(each).nbytes for each in experts)
        / sum(each.nbytes for each in experts),
        "whole": sum(not isinstance(piece, DTensor) for piece in pieces),
        "of": len(whole),
        "units": [type(each).__name__ for each in sharded.model.modules() if isinstance(each, FSDPModule)],
    }


def _cut(parameter: Any) -> tuple[int, int]:
    """Dimension and number of pieces; of what is whole, of none."""
    from mindspeed_dsa.parallel.local_shards import cut_of

    if not isinstance(parameter, DTensor):
        return (-1, 1)
    cut = cut_of(parameter)
    return cut.dim, cut.pieces


def _job(ep: int, switches: Mapping[str, Any]) -> dict[str, Any]:
    grouped = bool(switches.get("moe_grouped_gemm"))
    return {"ep": ep, "overrides": {**ODD, "moe_grouped_gemm": grouped}}


def idle_experts(**switches: Any) -> dict[str, Any]:
    """Two steps of both, in the first of which all tokens go to the same two experts; EP2 on four ranks."""
    start({"use_torch_fsdp2": True, **switches}, ep=2)
    job = _job(2, switches)
    both = assemble(**job, clip=0.1), assemble(**job, clip=0.1, fsdp2=True)
    for each in both:
        for name, parameter in each.model.named_parameters():
            if "router.weight" in name:
                local_of(parameter.detach()).zero_()
        each.optimizer.reload_model_params()  # master weights are copies
    first = [step(each, 0) for each in both]
    _, experts = both[1].parts
    moments = [local_of(each["exp_avg"]).count_nonzero().item() for each in experts.optimizer.state.values()]
    return {"records": [first, [step(each, 1) for each in both]], "moments": moments}


def late_gradients() -> str:
    """Return the error of a first step in which FSDP2 no longer reduces behind a unit's backward."""
    start({"use_torch_fsdp2": True}, ep=2)
    sharded = assemble(**JOB, fsdp2=True)
    with mock.patch.object(FSDPParamGroup, "post_backward"):
        try:
            step(sharded, 0)
        except SettingsError as error:
            return str(error)
    return "nothing"


def exchange(folder: str, precision: str, **switches: Any) -> dict[str, Any]:
    """The distributed optimizer's checkpoint in FSDP2, and that of FSDP2 in the distributed optimizer."""
    start({"use_torch_fsdp2": True, **switches}, ep=2)
    job = {**_job(2, switches), "precision": precision}
    whole, sharded = assemble(**job, distributed=True), assemble(**job, fsdp2=True)
    for number in range(2):
        step(whole, number)
        step(sharded, 7)  # everything is something else before it is loaded
    folders = [_made(Path(folder, name)) for name in ("first", "second", "third", "slices")]
    first, second, third, slices = folders
    save_to(whole, WAY, first)
    load_from(sharded, WAY, first)
    save_to(sharded, WAY, second)
    again = assemble(**job, distributed=True)
    load_from(again, WAY, second)
    save_to(again, WAY, third)
    before, refused = state(sharded), ""
    if not switches.get("moe_grouped_gemm"):  # which refuses to save it
        save_to(whole, "dp_reshardable", slices)
        try:
            load_from(sharded, "dp_reshardable", slices)
        except SettingsError as error:
            refused = str(error)
    assert state(sharded) == before, "nothing is touched by what is refused"
    return {
        "unequal": [_unequal(first, other) for other in (second, third)],
        "records": [step(job, 2) for job in (whole, again, sharded)],
        "states": [state(job) for job in (whole, again)],
        "steps": {float(each["step"]) for part in sharded.parts for each in part.optimizer.state.values()},
        "refused": refused,
    }


def stages(folder: str, precision: str, way: str, **switches: Any) -> dict[str, Any]:
    """Saved and resumed with two stages, of which the first has no experts; gradients are drawn."""
    start({"use_torch_fsdp2": True, **switches}, pp=2, ep=2)
    overrides = {
        "pipeline_model_parallel_size": 2,
        "moe_grouped_gemm": bool(switches.get("moe_grouped_gemm")),
    }
    options: dict[str, Any] = {"precision": precision, "ep": 2, "fsdp2": True, "overrides": overrides}
    unbroken, resumed = (assemble(**options) for _ in range(2))
    for number in range(2):
        _step_with_drawn_gradients(unbroken, number)
    save_to(unbroken, way, folder)
    load_from(resumed, way, folder)
    norms = [_step_with_drawn_gradients(job, 2) for job in (unbroken, resumed)]
    return {
        "numbers": [
            sum(len(group["params"]) for group in part.optimizer.param_groups) for part in resumed.parts
        ],
        "norms": norms,
        "states": [state(job) for job in (unbroken, resumed)],
    }


def stages_of_ddp(folder: str) -> list[str]:
    """The same of plain DDP's in a job without the feature, in FSDP2: what is not equal there."""
    import mindspeed_dsa

    start(pp=2, ep=2)
    options: dict[str, Any] = {"ep": 2, "overrides": {"pipeline_model_parallel_size": 2}}
    whole = assemble(**options)
    _step_with_drawn_gradients(whole, 0)
    save_to(whole, PLAIN, folder)
    mindspeed_dsa.disable()
    mindspeed_dsa.enable(**DSA_ON, use_torch_fsdp2=True)
    sharded = assemble(**options, fsdp2=True)
    load_from(sharded, PLAIN, folder)
    unequal = differing(whole, sharded)
    _step_with_drawn_gradients(sharded, 1)
    steps = {float(each["step"]) for part in sharded.parts for each in part.optimizer.state.values()}
    return [*unequal, *([] if steps == {2} else ["steps"])]


def _step_with_drawn_gradients(job: Any, number: int) -> float:
    from mindspeed_dsa.parallel.local_shards import like

    job.model.zero_grad_buffer()
    job.optimizer.zero_grad()
    generator = torch.Generator().manual_seed(number)
    for parameter in job.model.parameters():
        drawn = torch.randn(local_of(parameter).shape, generator=generator)
        if isinstance(parameter, DTensor):
            parameter.grad = like(drawn, parameter)
        else:
            parameter.main_grad.copy_(drawn)
    return float(job.optimizer.step()[1])


def _unequal(one: str, other: str) -> list[str]:
    """Keys of tensors that two checkpoints do not have alike, bit for bit."""
    from megatron.core import dist_checkpointing

    first, second = (dist_checkpointing.load_plain_tensors(folder) for folder in (one, other))
    names = sorted(key for key, each in first.items() if isinstance(each, Tensor))
    assert len(names) > 20
    assert {key for key, each in second.items() if isinstance(each, Tensor)} == set(names)
    return [name for name in names if not torch.equal(first[name], second[name])]


def _made(folder: Path) -> str:
    folder.mkdir(exist_ok=True)
    return str(folder)


def _contents(folder: str) -> dict[str, tuple[int, ...]]:
    from megatron.core import dist_checkpointing

    return {key: each.global_shape for key, each in dist_checkpointing.load_tensors_metadata(folder).items()}


def pairs(one: Any, other: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Parameters of two jobs with the same model."""
    yield from zip(one.model.parameters(), other.model.parameters(), strict=True)


def differing(whole: Any, sharded: Any) -> list[str]:
    """Weights, master weights, moments and steps that are not, bit for bit, pieces of the others."""
    found = []
    for index, (theirs, ours) in enumerate(pairs(whole, sharded)):
        found += [f"weight {index}"] if not same(theirs, ours) else []
    for first, second in zip(whole.parts, sharded.parts, strict=True):
        mains = [
            [p for group in part.optimizer.param_groups for p in group["params"]] for part in (first, second)
        ]
        for index, (theirs, ours) in enumerate(zip(*mains, strict=True)):
            states = first.optimizer.state[theirs], second.optimizer.state[ours]
            # Where state is on the host, its tensors are this rank's pieces.
            pair = master_value(first, theirs), master_value(second, ours)
            found += [f"master {index}"] if not same(*pair, ours) else []
            assert states[0].keys() == states[1].keys()
            found += [f"{key} {index}" for key in states[0] if not same(states[0][key], states[1][key], ours)]
    return found


def same(whole: Tensor, piece: Tensor, parameter: Tensor | None = None) -> bool:
    """Whether ``piece`` is that of ``whole``; ``parameter`` is cut in the same way, if it has dimensions."""
    return torch.equal(local_of(piece), _piece(whole, piece if parameter is None else parameter))


def _piece(whole: Tensor, parameter: Tensor) -> Tensor:
    """This rank's piece of what is as large as a parameter, cut as the parameter is."""
    theirs = local_of(whole)
    if isinstance(parameter, DTensor) and theirs.shape == parameter.shape:
        from mindspeed_dsa.parallel.local_shards import cut_of

        cut = cut_of(parameter)
        theirs = theirs.chunk(cut.pieces, cut.dim)[cut.index]
    return theirs


def refusal(**switches: Any) -> str:
    """What building the wrapper says."""
    start({"use_torch_fsdp2": True, **switches})
    try:
        assemble(fsdp2=True)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def indexers_alone(stage: str, **switches: Any) -> dict[str, Any]:
    """Two steps of both, of a model of which layers are frozen beside their indexers.

    Args:
        stage: of DSA's training; in the warm-up it freezes all layers, else the embedding and the first one.
        **switches: of further features.
    """
    start({"use_torch_fsdp2": True, "dsa_stage": stage, **switches})

    def model(*args: Any, **kwargs: Any) -> Any:
        built = gpt_model(*args, **kwargs)
        if stage != "warmup":
            for part in (built.embedding, built.decoder.layers[0]):
                for name, parameter in part.named_parameters():
                    parameter.requires_grad_(".indexer." in name)
        return built

    with mock.patch("tests.support.optimizer_job.gpt_model", model):
        both = assemble(precision="fp32"), assemble(precision="fp32", fsdp2=True)
    before = [each.detach().clone() for each in both[0].model.parameters()]
    records = [[step(each, number) for each in both] for number in range(2)]
    changed = [
        name
        for (name, each), first in zip(both[0].model.named_parameters(), before, strict=True)
        if not torch.equal(each, first)
    ]
    unequal = [
        name
        for (name, theirs), ours in zip(
            both[0].model.named_parameters(), both[1].model.parameters(), strict=True
        )
        if not torch.allclose(local_of(ours), _piece(theirs, ours), rtol=1e-4, atol=1e-6)
    ]
    return {"records": records, "changed": changed, "unequal": unequal}
