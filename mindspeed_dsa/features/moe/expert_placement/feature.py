"""Placement of experts on expert parallel ranks that balances the ranks' loads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_dsa.feature import Feature, Flag, Requires
from mindspeed_dsa.features.moe import numbering
from mindspeed_dsa.megatron.configuration import argument, hybrid_flag
from mindspeed_dsa.megatron.expert_parallel import layers_with_experts, number_of_experts
from mindspeed_dsa.megatron.low_precision import check_stored
from mindspeed_dsa.patches.spec import Patch
from mindspeed_dsa.runs import expert_placement
from mindspeed_dsa.runs.expert_placement import Placement
from mindspeed_dsa.runs.files import RunError

FLAG = "--moe-expert-placement"
AUTO = "auto"


@dataclass(frozen=True)
class Options:
    """Options of ``--moe-expert-placement``.

    Attributes:
        file: placement file, or ``None`` to compute the placement from a load report.
        reports: folders searched for the load report; the first one found is used.
    """

    file: Path | None
    reports: tuple[Path, ...] = ()

    @classmethod
    def of(cls, settings: Any) -> Options:
        """Build from resolved settings."""
        wanted = getattr(settings, "moe_expert_placement", None) or AUTO
        if wanted != AUTO:
            return cls(Path(wanted))
        folders = [getattr(settings, "moe_router_load_report", None)]
        for checkpoints in (getattr(settings, "load", None), getattr(settings, "save", None)):
            folders += [checkpoints, checkpoints and Path(checkpoints).parent]
        return cls(None, tuple(Path(folder) for folder in folders if folder))


_UNNUMBERED = {
    "moe_use_upcycling": "--moe-use-upcycling, which fills experts by their place",
    "use_megatron_fsdp": "--use-megatron-fsdp, whose checkpoints know experts by their place",
    "use_custom_fsdp": "--use-custom-fsdp, whose checkpoints know experts by their place",
    "use_torch_fsdp2": "--use-torch-fsdp2, whose checkpoints know experts by their place",
    "moe_routing_trace_path": "--moe-routing-trace-path, which would record places for experts",
    "init_model_with_meta_device": "--init-model-with-meta-device, whose initial weights come later",
}


def check_expert_placement(args: Any, options: Any) -> Sequence[str]:
    """Report a placement file that does not fit the model, and unsupported combinations."""
    problems = [*_formats(args), *_combinations(args)]
    problems += check_stored(args, FLAG, "their master weights would come from the experts before")
    if hybrid := hybrid_flag(args):
        problems.append(
            f"{FLAG} numbers the layers of GPT models alone, not those of {hybrid}; omit one of them"
        )
    if not number_of_experts(args):
        problems.append(f"{FLAG}: this model has no experts; set --num-experts or omit the flag")
    elif args.moe_expert_placement != AUTO:
        file = Path(args.moe_expert_placement)
        try:
            problems += _misfits(file, expert_placement.read(file), args)
        except RunError as error:
            problems.append(f"{FLAG}: {error}")
    return problems


def _misfits(file: Path, placement: Placement, args: Any) -> Iterator[str]:
    layers = argument(args, "num_layers")
    last = None if layers is None else layers + (argument(args, "mtp_num_layers") or 0)
    wrong = list(
        misfits(
            placement,
            number_of_experts(args),
            argument(args, "expert_model_parallel_size") or 1,
        )
    )
    beyond = [layer for layer in placement.orders if last is not None and not 1 <= layer <= last]
    if beyond:
        wrong.append(f"layers {beyond}, and --num-layers (with --mtp-num-layers) makes {last}")
    missing = [layer for layer in layers_with_experts(args) if layer not in placement.orders]
    if missing:
        wrong.append(f"no layers {missing}, which --num-layers and --moe-layer-freq give experts")
    if wrong:
        yield f"{FLAG} {file} is of another model: it has {'; '.join(wrong)}"


def misfits(placement: Placement, experts: int, ranks: int) -> Iterator[str]:
    """Yield each size of a placement that differs from the model's."""
    if placement.experts != experts:
        yield f"{placement.experts} experts, and --num-experts is {experts}"
    if placement.ranks != ranks:
        yield f"{placement.ranks} expert parallel ranks, and --expert-model-parallel-size is {ranks}"


def _formats(args: Any) -> Iterator[str]:
    saved = argument(args, "ckpt_format")
    if saved not in (None, "torch_dist", "zarr"):
        yield f"{FLAG}: --ckpt-format {saved} knows experts by their place on a rank; use torch_dist"
    converted = argument(args, "ckpt_convert_format")
    if converted not in (None, "torch_dist"):
        yield f"{FLAG}: --ckpt-convert-format {converted} knows experts by their place on a rank; omit it"
    if argument(args, "non_persistent_ckpt_type") == "local":
        yield f"{FLAG}: --non-persistent-ckpt-type local knows experts by their place on a rank; use global"
    if not argument(args, "use_distributed_optimizer"):
        return
    keeps = (argument(args, "save") and not argument(args, "no_save_optim")) or (
        argument(args, "load") and not argument(args, "no_load_optim")
    )
    if keeps and argument(args, "dist_ckpt_optim_fully_reshardable") is False:
        yield (
            f"{FLAG}: the distributed optimizer's state is saved as dp_reshardable, by places in a rank's "
            "buffers, so it would be given to other experts when the placement changes; add "
            "--dist-ckpt-optim-fully-reshardable"
        )
    has_flag = hasattr(args, "dist_ckpt_optim_fully_reshardable")
    if keeps and not has_flag and argument(args, "ckpt_fully_parallel_save") is False:
        yield (
            f"{FLAG}: with --no-ckpt-fully-parallel-save the distributed optimizer's state is saved by "
            "places in a rank's buffers; omit that"
        )


def _combinations(args: Any) -> Iterator[str]:
    for name, what in _UNNUMBERED.items():
        if argument(args, name):
            yield f"{FLAG} cannot be combined with {what}; omit one of them"


_HERE = "mindspeed_dsa.features.moe.expert_placement"
_RANGE = ">=0.13,<0.21"

FEATURE = Feature(
    name="moe-expert-placement",
    summary="Holds each expert on the rank that a recorded load asks for; checkpoints stay as they are.",
    flags=(
        Flag(
            "--moe-expert-placement",
            "Assign experts to ranks by the placement in FILE. 'auto' computes a placement from the load "
            "report in the folder of --moe-router-load-report, --load or --save.",
            kind="value",
            metavar="FILE",
        ),
        Flag("--load", "Megatron's own flag; 'auto' looks for a report here.", kind="value", megatron=True),
        Flag("--save", "Megatron's own flag; 'auto' looks for a report here.", kind="value", megatron=True),
    ),
    patches=(
        Patch(
            "megatron.core.transformer.moe.router:TopKRouter.forward",
            "wrap",
            f"{_HERE}.placing:route_to_slots",
            "turns the router's experts into slots, which the dispatcher sends tokens to",
            params=("input",),
            versions=_RANGE,
            priority=10,
        ),
        Patch(
            "megatron.core.transformer.moe.experts:SequentialMLP.sharded_state_dict",
            "wrap",
            f"{_HERE}.placing:number_experts",
            "saves and loads experts by their numbers, wherever they are held",
            params=("prefix", "sharded_offsets", "metadata"),
            versions=_RANGE,
        ),
        Patch(
            "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.sharded_state_dict",
            "wrap",
            f"{_HERE}.placing:refuse_buckets",
            "refuses formats of optimizer state that know no experts, only places in a rank's buffers",
            params=("is_loading", "sharding_type", "metadata"),
            versions=_RANGE,
        ),
        Patch(
            "megatron.training.checkpointing:_load_base_checkpoint",
            "wrap",
            f"{_HERE}.placing:refuse_files_of_ranks",
            "refuses checkpoints that are not distributed: they know no experts, only places on a rank",
            versions=_RANGE,
            required=False,
        ),
        *numbering.rows(
            f"{_HERE}.placing",
            "gives the layer's experts their slots, and moves their initial weights there",
            _RANGE,
        ),
    ),
    requires=Requires(versions={"megatron-core": _RANGE}),
    options=Options.of,
    check=check_expert_placement,
    doc="moe-expert-placement.md",
)
