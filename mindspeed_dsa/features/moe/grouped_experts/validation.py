"""What grouped experts do not combine with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mindspeed_dsa.features.moe.grouped_experts.options import Options
from mindspeed_dsa.megatron.configuration import argument

_FLAG = "--moe-grouped-gemm"
ALIGNMENT = 64
"""Entries: where Megatron begins parameters in the distributed optimizer's buffers."""
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
    """On for Megatron's own layers; Transformer Engine has grouped layers of its own."""
    grouped = bool(getattr(settings, "moe_grouped_gemm", False))
    return grouped and getattr(settings, "transformer_impl", None) in (None, "local")


def check_arguments(args: Any, options: Options) -> Iterator[str]:
    """What in a job's arguments does not combine with the feature."""
    if argument(args, "transformer_impl") not in (None, "local"):
        return
    yield from check_experts(args, options)
    yield from _check_optimizer_format(args)
    for name in ("use_megatron_fsdp", "use_custom_fsdp"):
        if argument(args, name):
            flag = "--" + name.replace("_", "-")
            yield (
                f"{_FLAG}: {flag} cuts parameters into pieces whose place in a checkpoint it reads from the "
                f"names of single experts, which a stack does not have; drop one of them"
            )
    if argument(args, "ckpt_format") == "torch_dcp":
        yield f"{_FLAG}: --ckpt-format torch_dcp numbers parameters, and stacks are fewer; use torch_dist"
    optimizer = str(argument(args, "optimizer"))
    if any(name in optimizer for name in ("muon", "soap")):
        yield (
            f"{_FLAG}: --optimizer {optimizer} works on matrices, and would treat a stack of them as if it "
            f"were none; drop {_FLAG} or use another optimizer"
        )


def _check_optimizer_format(args: Any) -> Iterator[str]:
    """What is known before a checkpoint is read; the rest is refused when its optimizer state is loaded."""
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
            sizes.append(hidden)  # of norms, in one buffer with the experts
        if any(size % ALIGNMENT for size in sizes):
            yield f"{_FLAG}: {GAPS}"
    elif argument(args, "dist_ckpt_optim_fully_reshardable") is False:
        yield f"{_FLAG}: {SLICES}"


def recomputes_activation(args: Any) -> bool:
    """Whether Megatron's own recompute of the experts' activation is asked for."""
    selective = argument(args, "recompute_granularity") == "selective"
    return selective and "moe_act" in (argument(args, "recompute_modules") or ())


def check_model(args: Any, options: Options) -> Iterator[str]:
    """What in a model's configuration does not combine with the feature."""
    yield from check_experts(args, options)
    if recomputes_activation(args) and not options.has_checkpoint:
        yield (
            f"{_FLAG}: what this release of Megatron recomputes activations with needs Transformer Engine; "
            "drop moe_act from --recompute-modules"
        )


def check_experts(args: Any, options: Options) -> Iterator[str]:
    """What in arguments, or in a model's configuration, does not combine with the feature."""
    if argument(args, "add_bias_linear"):
        yield f"{_FLAG}: a grouped matmul has no bias; add --disable-bias-linear"
    for name in ("fp8", "fp4"):
        if argument(args, name):
            yield f"{_FLAG}: its operator has no {name}; drop --{name}-format, or use Transformer Engine"
