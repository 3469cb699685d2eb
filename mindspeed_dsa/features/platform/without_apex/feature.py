"""Declarations for Megatron without Transformer Engine and Apex, as on every NPU and CPU.

The features cover Adam's fused step, resume of its state, gradient norms, gradient accumulation fusion, and
Megatron's own modules. They also accept command lines written for MindSpeed, which replaces those libraries
by its own operators.

tests: tests/features/platform/fused_adam, tests/features/platform/gradient_fusion
tests: tests/features/platform/optimizer_resume, tests/features/platform/gradient_norm
tests: tests/matrix/test_local_modules.py, tests/tools/migrate/test_accept.py
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import Any

from mindspeed_dsa import platforms
from mindspeed_dsa.feature import Conflict, Feature, Flag
from mindspeed_dsa.megatron import across_layouts, without_engine
from mindspeed_dsa.megatron.configuration import argument
from mindspeed_dsa.megatron.graphs import OPTIMIZER, refuse_graphs
from mindspeed_dsa.patches.spec import Patch
from mindspeed_dsa.settings import ACCEPT_MINDSPEED, PLATFORM

_HERE = "mindspeed_dsa.features.platform.without_apex.functions"

# -- Adam's step ---------------------------------------------------------------------------------

_OTHERS = ("swap_optimizer", "virtual_optimizer", "use_torch_fsdp2")
"""Features with their own optimizer step, for moments elsewhere or parameters that are not plain tensors."""


def adam_wanted(settings: Any) -> bool:
    """Return whether the fused Adam step is on; default: on NPUs, if no other feature replaces the step."""
    if settings.fused_adam is not None:
        return bool(settings.fused_adam)
    return settings.platform == "npu" and not any(getattr(settings, name, False) for name in _OTHERS)


def check_adam(args: Any, options: Any) -> Iterator[str]:
    """Yield a problem if the optimizer's step is captured, or the optimizer has no part of torch's Adam."""
    yield from refuse_graphs(args, "--fused-adam", "the host counts the steps", {OPTIMIZER})
    if not argument(args, "fused_adam"):  # on by default, where it serves some of the optimizers
        return
    optimizer = argument(args, "optimizer")
    if optimizer in ("sgd", "lion"):  # Muon has Adam for embeddings and norms
        yield f"--fused-adam: --optimizer {optimizer} has another step; use adam, or omit --fused-adam"
    for name in ("optimizer_cpu_offload", "use_precision_aware_optimizer"):
        if argument(args, name):
            yield (
                f"--fused-adam cannot be used with --{name.replace('_', '-')}, which has a step of its own; "
                "omit one of them"
            )


FUSED_ADAM = Feature(
    name="fused-adam",
    summary="Adam's step in one operator where Megatron has torch's optimizer.",
    flags=(
        Flag(
            "--fused-adam",
            "Make Adam's step one operator, without Transformer Engine and Apex. Default: on on NPUs.",
            kind="auto",
        ),
        PLATFORM,
    ),
    conflicts=tuple(
        Conflict(
            name, f"{name} runs a step of its own, on moments that are not on the device; omit --fused-adam"
        )
        for name in ("swap-optimizer", "virtual-optimizer")
    ),
    patches=tuple(
        Patch(
            f"megatron.core.optimizer.optimizer:{name}.step_with_ready_grads",
            "wrap",
            f"{_HERE}:step_in_one_operator",
            "torch's Adam makes temporary tensors as large as all weights, one operation after another",
        )
        for name in ("MixedPrecisionOptimizer", "FP32Optimizer")
    ),
    active=adam_wanted,
    check=check_adam,
    doc="fused-adam.md",
)


# -- resume of the distributed optimizer ------------------------------------------------------------

_STEP_COUNTS = "mindspeed_dsa.features.platform.without_apex.step_counts"
_OPTIMIZER = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"

RESUME_ROWS = (
    Patch(
        f"{_OPTIMIZER}.state_dict",
        "wrap",
        f"{_STEP_COUNTS}:start_state",
        "an Adam without a step gets the step count 0; Megatron asserts that there is one",
    ),
    Patch(
        f"{_OPTIMIZER}.load_state_dict",
        "wrap",
        f"{_STEP_COUNTS}:separate_step_counts",
        "each parameter gets its own step count; a shared one is incremented once per parameter",
        params=("state_dict",),
    ),
    Patch(
        f"{_OPTIMIZER}._set_main_param_and_optimizer_states",
        "wrap",
        f"{_STEP_COUNTS}:keep_step_count",
        "no format of the moments has a valid step count; float32 weights require gradients",
        params=("model_param", "tensors"),
    ),
    Patch(
        f"{_OPTIMIZER}.get_parameter_state_dp_reshardable",
        "wrap",
        f"{_STEP_COUNTS}:leave_out_step_counts",
        "the format takes the step count for a slice of the buffer, and the first save fails",
        versions=">=0.15,<0.16",
    ),
    *across_layouts.ROWS,
)
"""Rows that fix step counts of torch's Adam in the distributed optimizer's checkpoints."""


def has_torch_adam(settings: Any) -> bool:
    """Return whether Megatron's Adam is torch's, as without Transformer Engine and Apex."""
    missing = find_spec("transformer_engine") is None and find_spec("apex") is None
    return settings.platform in ("cpu", "npu") or missing


# -- the norm of gradients --------------------------------------------------------------------------


def has_no_norm_kernel(settings: Any) -> bool:
    """Return whether gradient norms use Megatron's own code, as without Transformer Engine and Apex."""
    return find_spec("transformer_engine") is None and find_spec("amp_C") is None


NORM_ROWS = (
    Patch(
        "megatron.core.utils:local_multi_tensor_l2_norm",
        "wrap",
        f"{_HERE}:norm_on_device",
        "Megatron makes a tensor of the norms of all parameters, and reads each of them for it",
        params=("chunk_size", "noop_flag", "tensor_lists", "per_tensor"),
    ),
)
"""Patch that computes gradient norms on the device; Megatron waits for the norm of each parameter."""


# -- gradient accumulation fusion -----------------------------------------------------------------

EXTENSION = "fused_weight_gradient_mlp_cuda"
"""Apex's module with the kernels, which is used if it is installed."""
_UNBUFFERED = ("use_torch_fsdp2", "use_megatron_fsdp", "use_custom_fsdp")
"""Kinds of data parallelism without gradient buffers to accumulate in."""


def fusion_wanted(settings: Any) -> bool:
    """Return whether gradient accumulation fusion is on; default: on NPUs with ``main_grad`` buffers."""
    return _serves(settings, settings.platform)


def serves(args: Any) -> bool:
    """Return whether gradient accumulation fusion is on for these arguments, on this process's platform."""
    return _serves(args, platforms.current().name)


def _serves(source: Any, platform: str) -> bool:
    if find_spec(EXTENSION) is not None:
        return False
    choice = getattr(source, "gemm_gradient_accumulation_fusion", None)
    if choice is not None:
        return bool(choice)
    return platform == "npu" and not any(getattr(source, name, False) for name in _UNBUFFERED)


def check_gradient_fusion(args: Any, options: Any) -> Iterator[str]:
    """Yield a problem if ``--defer-embedding-wgrad-compute`` would import Apex's missing module."""
    if argument(args, "gradient_accumulation_fusion") and argument(args, "defer_embedding_wgrad_compute"):
        yield (
            f"--defer-embedding-wgrad-compute has Megatron import {EXTENSION}, which is not installed; omit "
            "it"
        )


_LAYERS = "megatron.core.tensor_parallel.layers"

GRADIENT_FUSION = Feature(
    name="gradient-accumulation-fusion",
    summary="Megatron's linear layers add weight gradients to main_grad themselves, without Apex.",
    flags=(
        Flag(
            "--gemm-gradient-accumulation-fusion",
            "Have Megatron's gradient accumulation fusion where Apex' extension is not installed. "
            "Default: on on NPUs, without FSDP2.",
            kind="auto",
        ),
        PLATFORM,
    ),
    patches=(
        Patch(
            f"{_LAYERS}:__dict__",
            "entry",
            f"{_HERE}:Kernels",
            "linear layers call these kernels in backward, and Apex' extension is for CUDA",
            key=EXTENSION,
        ),
        Patch(
            f"{_LAYERS}:_grad_accum_fusion_available",
            "value",
            "builtins:True",
            "linear layers refuse the fusion unless the module has been imported",
        ),
    ),
    active=fusion_wanted,
    check=check_gradient_fusion,
    doc="gradient-accumulation-fusion.md",
)


# -- Megatron's own modules -----------------------------------------------------------------------


def is_needed(settings: Any) -> bool:
    """Return whether Transformer Engine is missing and, on CUDA, ``--transformer-impl`` is set."""
    if find_spec("transformer_engine") is not None:
        return False
    return bool(settings.platform != "cuda" or settings.transformer_impl)


MODULE_ROWS = (
    without_engine.NORMS,
    without_engine.ROUTER,
    Patch(
        "megatron.core.fp8_utils:quantize_param_shard",
        "wrap",
        f"{_HERE}:unless_there_are_none",
        "the distributed optimizer quantises its fp8 weights, of which there are none, and fails",
        params=("model_params",),
        versions="<0.13",
    ),
    Patch(
        "megatron.core.tensor_parallel.inference_layers:is_inference_column_parallel_linear",
        "replace",
        f"{_HERE}:is_never_one",
        "layers of multi-token prediction ask for a class that is none without Transformer Engine",
        params=("module",),
        versions=">=0.20,<0.21",
    ),
    *(
        Patch(
            f"megatron.core.models.gpt.gpt_layer_specs:{name}",
            "wrap",
            f"{_HERE}:refuse_transformer_engine",
            "Megatron's NameError does not say that Transformer Engine is missing",
            versions=versions,
            required=False,
        )
        for name, versions in (
            ("get_gpt_layer_with_transformer_engine_spec", ""),
            ("get_gpt_layer_with_transformer_engine_submodules", ">=0.17"),
            ("get_gpt_decoder_layer_specs", ">=0.16"),
            ("get_gpt_decoder_block_spec", ""),
            ("get_gpt_mtp_block_spec", ""),
        )
    ),
)


def needed_rows(settings: Any) -> tuple[Patch, ...]:
    """Return the patches for the libraries that are not installed."""
    return (
        *(RESUME_ROWS if has_torch_adam(settings) else ()),
        *(NORM_ROWS if has_no_norm_kernel(settings) else ()),
        *(MODULE_ROWS if is_needed(settings) else ()),
    )


def lacks_libraries(settings: Any) -> bool:
    """Return whether any library with patches is not installed."""
    return bool(needed_rows(settings))


LOCAL_MODULES = Feature(
    name="local-modules",
    summary="Megatron's own modules, gradient norm and distributed optimizer work without Transformer Engine "
    "and Apex, and a model that needs Transformer Engine says so.",
    flags=(Flag("--transformer-impl", "Megatron's own flag.", kind="value", megatron=True),),
    patches=(*RESUME_ROWS, *NORM_ROWS, *MODULE_ROWS),
    rows=needed_rows,
    active=lacks_libraries,
    doc="local-modules.md",
    platform_support=True,
    when="where Transformer Engine or Apex is missing",
)


# -- command lines of MindSpeed --------------------------------------------------------------------

_FUSIONS = {
    "gradient_accumulation_fusion": EXTENSION,
    "masked_softmax_fusion": "scaled_masked_softmax_cuda",
    "apply_rope_fusion": "transformer_engine",
}
"""Dict from argument to the module without which Megatron stops; MindSpeed has its own NPU operators."""


def switch_off_missing_fusions(args: Any) -> Sequence[str]:
    """Switch off fusion arguments whose module is not installed; return messages for ``Feature.rewrite``."""
    missing = [
        (name, module)
        for name, module in _FUSIONS.items()
        if getattr(args, name, False) and find_spec(module) is None
        if not (module == EXTENSION and serves(args))
    ]
    for name, _ in missing:
        setattr(args, name, False)
    return [f"{name} is switched off: {module} is not installed" for name, module in missing]


MINDSPEED_FLAGS = Feature(
    name="accept-mindspeed-flags",
    summary="Takes a command line that was written for MindSpeed or MindSpeed-LLM, and switches off fusions "
    "whose modules are missing, as MindSpeed does not need them.",
    flags=(ACCEPT_MINDSPEED,),
    rewrite=switch_off_missing_fusions,
    doc="accept-mindspeed-flags.md",
)
