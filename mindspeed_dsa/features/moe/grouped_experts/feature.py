"""Feature for ``--moe-grouped-gemm`` without Transformer Engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal

from mindspeed_dsa.feature import Feature, Flag, Requires
from mindspeed_dsa.megatron.configuration import argument, check_cached_saves
from mindspeed_dsa.megatron.graphs import EXPERTS, refuse_graphs
from mindspeed_dsa.megatron.low_precision import low_precision
from mindspeed_dsa.patches.spec import Patch

_LAYOUTS: dict[str, Literal["kn", "nk"]] = {"npu": "kn"}
"""Default layout per platform. Other platforms read both equally fast; ``nk`` is the checkpoint layout."""


@dataclass(frozen=True)
class Options:
    """Options of ``--moe-grouped-gemm``.

    Attributes:
        layout: layout of each expert's matrix, ``kn`` for ``[in, out]`` or ``nk`` for ``[out, in]``.
        has_checkpoint: whether Megatron's ``CheckpointWithoutOutput`` works on this platform.
    """

    layout: Literal["kn", "nk"]
    has_checkpoint: bool

    @classmethod
    def of(cls, settings: Any) -> Options:
        """Build from resolved settings or job arguments; arguments do not contain the platform."""
        layout: Literal["kn", "nk"] | None = getattr(settings, "gemm_weight_layout", None)
        if layout not in ("kn", "nk"):
            layout = _LAYOUTS.get(getattr(settings, "platform", ""), "nk")
        has_checkpoint = "recompute-outputs" in getattr(settings, "features_on", ()) or bool(
            find_spec("transformer_engine")
        )
        return cls(layout=layout, has_checkpoint=has_checkpoint)


_FLAG = "--moe-grouped-gemm"
ALIGNMENT = 64
"""Alignment of parameters in the distributed optimizer's buffers, in entries."""
_WHAT_FITS = (
    "use the format fully_reshardable (--ckpt-format torch_dist --dist-ckpt-optim-fully-reshardable; before "
    "0.15 --ckpt-format torch_dist with --ckpt-fully-parallel-save), or --no-save-optim and --no-load-optim"
)
SLICES = (
    "in this format of the distributed optimizer's state, dp_reshardable or fully_sharded_bucket_space, each "
    "rank has slices of buffers, in which stacked experts lie in another order than single ones; "
    f"{_WHAT_FITS}"
)
GAPS = (
    "--ckpt-format torch saves whole buffers of the distributed optimizer, with gaps behind parameters whose "
    f"number of entries is no multiple of {ALIGNMENT}, and single experts have them elsewhere; {_WHAT_FITS}"
)
LEGACY = (
    "a checkpoint in the format before February 2024 holds buckets, which end elsewhere with single experts; "
    "convert it without --moe-grouped-gemm first"
)


def wanted(settings: Any) -> bool:
    """Return whether to group Megatron's local layers. Transformer Engine has its own grouped layers."""
    grouped = bool(getattr(settings, "moe_grouped_gemm", False))
    return grouped and getattr(settings, "transformer_impl", None) in (None, "local")


def check_arguments(args: Any, options: Options) -> Iterator[str]:
    """Yield a problem for each job argument that is incompatible with the feature."""
    if argument(args, "transformer_impl") not in (None, "local"):
        return
    yield from check_experts(args, options)
    yield from refuse_graphs(args, _FLAG, "the dispatcher's counts of rows are copied to the host", {EXPERTS})
    yield from _check_optimizer_format(args)
    if options.layout == "kn":
        yield from check_cached_saves(args, f"{_FLAG} in the layout kn", "matrices of experts")
    for name in ("use_megatron_fsdp", "use_custom_fsdp"):
        if argument(args, name):
            flag = "--" + name.replace("_", "-")
            yield (
                f"{_FLAG}: {flag} cuts parameters into pieces whose place in a checkpoint it reads from the "
                f"names of single experts, which a stack does not have; drop one of them"
            )
    optimizer = str(argument(args, "optimizer"))
    if any(name in optimizer for name in ("muon", "soap")):
        yield (
            f"{_FLAG}: --optimizer {optimizer} works on matrices, and would treat a stack of them as if it "
            f"were none; drop {_FLAG} or use another optimizer"
        )


def _check_optimizer_format(args: Any) -> Iterator[str]:
    """Yield checkpoint format problems visible in the arguments; others show when state is loaded."""
    saves = argument(args, "save") and not argument(args, "no_save_optim")
    if not saves or not argument(args, "use_distributed_optimizer"):
        return
    if argument(args, "ckpt_format") == "torch":
        hidden = argument(args, "hidden_size") or 0
        width = argument(args, "moe_ffn_hidden_size") or argument(args, "ffn_hidden_size") or 0
        sizes = [hidden * (width // (argument(args, "expert_tensor_parallel_size") or 1))]
        if argument(args, "overlap_grad_reduce") and argument(args, "expert_model_parallel_size") in (
            None,
            1,
        ):
            # Without expert parallelism, norm weights share a buffer with the experts.
            sizes.append(hidden)
        if any(size % ALIGNMENT for size in sizes):
            yield f"{_FLAG}: {GAPS}"
    elif argument(args, "dist_ckpt_optim_fully_reshardable") is False:
        yield f"{_FLAG}: {SLICES}"
    elif argument(args, "non_persistent_ckpt_type") == "local":
        yield (
            f"{_FLAG}: --non-persistent-ckpt-type local saves slices of the distributed optimizer's buffers, "
            "in which stacked experts lie in another order than single ones; use global"
        )


def recomputes_activation(args: Any) -> bool:
    """Return whether recomputation of the experts' activation (``moe_act``) is requested."""
    selective = argument(args, "recompute_granularity") == "selective"
    return selective and "moe_act" in (argument(args, "recompute_modules") or ())


def check_model(args: Any, options: Options) -> Iterator[str]:
    """Yield a problem for each field of a model configuration that is incompatible with the feature."""
    yield from check_experts(args, options)
    if recomputes_activation(args) and not options.has_checkpoint:
        yield (
            f"{_FLAG}: what this release of Megatron recomputes activations with needs Transformer Engine; "
            "drop moe_act from --recompute-modules"
        )


def check_experts(args: Any, options: Options) -> Iterator[str]:
    """Yield a problem for each argument or field that the grouped matmul does not support."""
    if argument(args, "add_bias_linear"):
        yield f"{_FLAG}: a grouped matmul has no bias; add --disable-bias-linear"
    precision = low_precision(args)
    if precision is not None:
        yield (
            f"{_FLAG}: its operator has no {precision.name}; drop {precision.flag}, or use Transformer Engine"
        )


_IMPL = "mindspeed_dsa.features.moe.grouped_experts.experts"
_CHECKPOINT = "mindspeed_dsa.features.moe.grouped_experts.checkpoint"
_COUNTS = "mindspeed_dsa.features.moe.grouped_experts.counts"
_SAVE_BUFFERS = "save_buffers_of_single_experts"
_OPTIMIZERS = "megatron.core.optimizer"
_RANGE = ">=0.12.1,<0.21"

FEATURE = Feature(
    name="moe-grouped-gemm",
    summary="Stacks the experts' weights and multiplies all experts' rows by them in one operator.",
    flags=(
        Flag(
            "--moe-grouped-gemm",
            "Megatron's own flag; with --transformer-impl local the experts become one module.",
            megatron=True,
        ),
        Flag(
            "--gemm-weight-layout",
            "How each expert's matrix lies in memory: kn, [in, out]; nk, [out, in]; auto, the default: kn on "
            "NPUs, nk elsewhere. Checkpoints do not depend on it.",
            kind="value",
            choices=("auto", "kn", "nk"),
        ),
        Flag("--transformer-impl", "Megatron's own flag.", kind="value", type=str, megatron=True),
    ),
    patches=(
        Patch(
            "megatron.core.models.backends:LocalSpecProvider.grouped_mlp_modules",
            "wrap",
            f"{_IMPL}:provide_grouped_experts",
            "replaces Megatron's local modules, which need another package and bf16, or are sequential",
            params=("moe_use_grouped_gemm",),
            versions=">=0.13,<0.21",
        ),
        Patch(
            "megatron.core.models.gpt.moe_module_specs:get_moe_module_spec",
            "wrap",
            f"{_IMPL}:specify_grouped_experts",
            "replaces Megatron's local modules, which need another package and bf16",
            params=("use_te", "num_experts", "moe_grouped_gemm"),
            versions=">=0.12.1,<0.13",
        ),
        *(
            Patch(
                f"megatron.core.transformer.moe.{target}",
                "wrap",
                f"{_COUNTS}:{impl}",
                "keeps the numbers of the experts' rows on the device, where the products read them",
                versions=">=0.13,<0.21",
            )
            for target, impl in (
                ("moe_layer:MoELayer.__init__", "know_experts"),
                ("token_dispatcher:MoEAlltoAllTokenDispatcher.preprocess", "keep_counts"),
                ("token_dispatcher:MoEAlltoAllTokenDispatcher.dispatch_postprocess", "give_counts"),
            )
        ),
        Patch(
            "megatron.training.arguments:validate_args",
            "wrap",
            f"{_IMPL}:validate_on_every_device",
            "passes over Megatron's check of the GPU, which is for kernels not used here",
            params=("args",),
            required=False,
            priority=-1,
        ),
        *(
            Patch(
                f"{_OPTIMIZERS}.optimizer:ChainedOptimizer.{method}",
                "wrap",
                f"{_CHECKPOINT}:{impl}",
                "translates the numbers of parameters in the format torch between stacked and single experts",
                params=params,
                versions=_RANGE,
            )
            for method, impl, params in (
                ("state_dict", "save_single_experts", ()),
                ("load_state_dict", "load_single_experts", ("state_dict",)),
            )
        ),
        *(
            Patch(
                f"{_OPTIMIZERS}.{target}",
                "wrap",
                f"{_CHECKPOINT}:{impl}",
                "reorders whole buffers of optimizer state between stacked and single experts",
                params=params,
                versions=_RANGE,
            )
            for target, impl, params in (
                ("optimizer:ChainedOptimizer.save_parameter_state", _SAVE_BUFFERS, ()),
                ("distrib_optimizer:DistributedOptimizer.save_parameter_state", _SAVE_BUFFERS, ()),
                ("distrib_optimizer:DistributedOptimizer.sharded_param_state_dp_zero", _SAVE_BUFFERS, ()),
                (
                    "distrib_optimizer:DistributedOptimizer.load_parameter_state_from_dp_zero",
                    "load_buffers_of_single_experts",
                    ("state_dict",),
                ),
            )
        ),
        *(
            Patch(
                f"{_OPTIMIZERS}.distrib_optimizer:DistributedOptimizer.{method}",
                "wrap",
                f"{_CHECKPOINT}:refuse_slices_of_buffers",
                "refuses slices of buffers, which would silently lie in another order with stacked experts",
                versions=versions,
            )
            for method, versions in (
                ("sharded_param_state_fs_bucket_space", ">=0.12.1,<0.15"),
                ("sharded_param_state_dp_reshardable", ">=0.15,<0.21"),
            )
        ),
    ),
    requires=Requires(versions={"megatron-core": _RANGE}),
    active=wanted,
    options=Options.of,
    check=check_arguments,
    doc="moe-grouped-gemm.md",
)
