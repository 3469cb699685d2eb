"""``--init-norm-weight-in-fp32``: keeps norm weights in fp32 in a model with 16-bit weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mindspeed_dsa.feature import Feature, Flag, Requires
from mindspeed_dsa.megatron import releases
from mindspeed_dsa.megatron.configuration import argument
from mindspeed_dsa.megatron.optimizer import DISTRIBUTED, FLOAT16
from mindspeed_dsa.patches.spec import Patch

FLAG = "--init-norm-weight-in-fp32"
_SHARDS = "its units hold weights of one type"
_OWN_COPIES = "it makes copies of weights by rules of its own, which were not tried with weights in fp32"
_REFUSED = {
    "use_megatron_fsdp": _SHARDS,
    "use_custom_fsdp": _SHARDS,
    "use_precision_aware_optimizer": _OWN_COPIES,
    "optimizer_cpu_offload": _OWN_COPIES,
    "use_layer_wise_distributed_optimizer": _OWN_COPIES,
}
"""Dict from refused argument of Megatron to the reason."""
_OPTIMIZERS = ("adam", "sgd")


def check_arguments(args: Any, options: Any = None) -> Iterator[str]:
    """Yield problems with a job's arguments; modules are checked when the model is built."""
    implementation = argument(args, "transformer_impl")
    if implementation not in (None, "local"):
        yield (
            f"{FLAG} does not combine with --transformer-impl {implementation}: linear layers of Transformer "
            "Engine that hold a norm refuse weights of two types; use --transformer-impl local"
        )
    yield from check_norm_weights(args)


def check_norm_weights(args: Any, options: Any = None) -> Iterator[str]:
    """Yield arguments or model and optimizer settings that conflict with ``--init-norm-weight-in-fp32``."""
    # Without the attribute bf16 this is not Megatron's namespace, so its absence says nothing.
    if hasattr(args, "bf16") and not (args.bf16 or argument(args, "fp16")):
        yield f"{FLAG} has no effect where all weights are fp32; add --bf16, or omit it"
    for name, why in _REFUSED.items():
        if argument(args, name):
            yield f"{FLAG} does not combine with --{name.replace('_', '-')}: {why}; omit one of them"
    optimizer = argument(args, "optimizer")
    if optimizer is not None and optimizer not in _OPTIMIZERS:
        yield f"{FLAG}: --optimizer {optimizer} was not tried; use one of {', '.join(_OPTIMIZERS)}"


_IMPL = "mindspeed_dsa.features.operators.norm_weights"
_WHY_LOADED = "a rank reads the part that it updates, and the others have to learn its fp32 weights"

FEATURE = Feature(
    name="init-norm-weight-in-fp32",
    summary="Keeps the weights of all norms in fp32 in a model of 16 bits.",
    flags=(
        Flag(
            FLAG,
            "Keep the weights and biases of all norms in fp32 beside the other weights in bf16 or fp16.",
        ),
    ),
    patches=(
        Patch(
            "megatron.core.transformer.module:Float16Module.__init__",
            "wrap",
            f"{_IMPL}.modules:keep_norms_in_fp32",
            "Megatron converts the whole model to 16 bits here",
            params=("config", "module"),
            versions=releases.SERVED,
        ),
        Patch(
            "megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__",
            "wrap",
            f"{_IMPL}.modules:build_norm_for_wider_weights",
            "PyTorch's norms take an input of another type than the weight's on some devices alone",
            params=("config", "hidden_size", "eps"),
            versions=releases.SERVED,
        ),
        Patch(
            f"{FLOAT16}.__init__",
            "wrap",
            f"{_IMPL}.optimizers:count_fp32_weights_in",
            "weights in fp32 would be missing from its lists, by whose positions checkpoints are read",
            versions=releases.SERVED,
            priority=-100,  # inside of wrappers that move master weights
        ),
        Patch(
            f"{DISTRIBUTED}.__init__",
            "wrap",
            f"{_IMPL}.optimizers:check_distributed",
            "the optimizer's configuration may ask for what weights in fp32 do not go with",
            params=("optimizer", "config"),
            versions=releases.SERVED,
            priority=-100,
        ),
        Patch(
            f"{DISTRIBUTED}.load_state_dict",
            "wrap",
            f"{_IMPL}.optimizers:gather_when_loaded",
            _WHY_LOADED,
            params=("state_dict",),
            versions=releases.SERVED,
        ),
        Patch(
            f"{DISTRIBUTED}.load_parameter_state",
            "wrap",
            f"{_IMPL}.optimizers:gather_when_loaded",
            _WHY_LOADED,
            params=("filename",),
            versions=releases.SERVED,
        ),
    ),
    requires=Requires(versions={"megatron-core": releases.SERVED}),
    check=check_arguments,
    doc="init-norm-weight-in-fp32.md",
)
