"""Replacements for Apex and Transformer Engine: Adam's step, norms, weight gradient kernels, clear errors.

Does not import Megatron, because Megatron is being imported when this module is loaded.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from mindspeed_dsa import log, platforms
from mindspeed_dsa.megatron.releases import takes
from mindspeed_dsa.ops.grouped_matmul.backends import add_product
from mindspeed_dsa.patches.errors import SettingsError
from mindspeed_dsa.patches.versions import private

# -- Adam's step ---------------------------------------------------------------------------------


def step_in_one_operator(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``step_with_ready_grads`` of Megatron's optimizers to use torch's fused Adam."""
    # Param groups are marked as fused during the step only, because state dicts contain them and must look
    # the same as in any other job.

    def step_with_ready_grads(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _fused(getattr(self, "optimizer", None)):
            return original(self, *args, **kwargs)

    return step_with_ready_grads


@contextmanager
def _fused(optimizer: Any) -> Iterator[None]:
    """Make torch's Adam or AdamW use its fused implementation inside the block; ignore other optimizers."""
    if _absent():
        log.get("fused-adam").warning(
            "--fused-adam: this torch_npu has no aten::_fused_adamw_; torch's step of many operators runs",
            once=True,
        )
        yield
        return
    if not isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)):
        yield
        return
    groups = [group for group in optimizer.param_groups if _can_be_fused(group)]
    before = [{name: group.get(name) for name in ("fused", "foreach")} for group in groups]
    try:
        for group in groups:
            group.update(fused=True, foreach=False)
            for parameter in group["params"]:
                _count_steps_on_device(optimizer, parameter)
        yield
    finally:
        for group, values in zip(groups, before, strict=True):
            group.update(values)


@cache
def _absent() -> bool:
    """Return whether this is an NPU with a torch_npu that lacks the fused Adam operators."""
    if platforms.current().name != "npu":
        return False
    has = private("torch._C:_dispatch_has_kernel_for_dispatch_key", "fused-adam")
    return not all(has(f"aten::{name}", "PrivateUse1") for name in ("_fused_adam_", "_fused_adamw_"))


def _can_be_fused(group: dict[str, Any]) -> bool:
    return not group.get("differentiable") and all(
        parameter.is_floating_point() and type(parameter.data) is torch.Tensor
        for parameter in group["params"]
    )


def _count_steps_on_device(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> None:
    """Move a loaded step count from the host to the device, where the fused operator reads it."""
    state = optimizer.state.get(parameter, {})
    count = state.get("step")
    if isinstance(count, torch.Tensor) and count.device != parameter.device:
        state["step"] = count.to(parameter.device, torch.float32)


# -- the norm of gradients --------------------------------------------------------------------------


def norm_on_device(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``local_multi_tensor_l2_norm`` to compute the norm, fp32 ``[1]``, on the device."""
    # Empty lists, and gradients on another device than the flag, are left to the original.

    def local_multi_tensor_l2_norm(
        chunk_size: int, noop_flag: Tensor, tensor_lists: Sequence[Sequence[Tensor]], *args: Any
    ) -> tuple[Tensor, None]:
        tensors = [tensor for tensors in tensor_lists for tensor in tensors]
        # The norm of gradients on the host would be on the host, where no device group could sum it.
        if {tensor.device for tensor in tensors} != {noop_flag.device}:
            result: tuple[Tensor, None] = original(chunk_size, noop_flag, tensor_lists, *args)
            return result
        # The norm of all gradients is the norm of their norms: sqrt(3^2 + 4^2) = 5.
        norms = torch.stack([norm.float() for norm in torch._foreach_norm(tensors)])
        return torch.linalg.vector_norm(norms).view(1), None

    return local_multi_tensor_l2_norm


# -- gradient accumulation fusion -----------------------------------------------------------------


class Kernels:
    """Replacement for Apex's ``fused_weight_gradient_mlp_cuda``, which Megatron's linear layers call."""

    @staticmethod
    def wgrad_gemm_accum_fp32(rows: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
        """Add ``grad_output.T @ rows`` to ``main_grad``.

        On NPUs one operator multiplies and accumulates in fp32. On other devices the product is rounded to 16
        bits before the addition, as without fusion.

        Args:
            rows: layer input ``[rows, in]``.
            grad_output: output gradient ``[rows, out]`` of the same dtype.
            main_grad: fp32 gradient buffer ``[out, in]``.
        """
        if not rows.size(0):
            return  # an expert without tokens
        if rows.dtype == main_grad.dtype:
            main_grad.addmm_(grad_output.t(), rows)
        elif not add_product(grad_output, rows, main_grad):
            main_grad.add_(grad_output.t().mm(rows))

    @staticmethod
    def wgrad_gemm_accum_fp16(rows: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
        """Add ``grad_output.T @ rows`` to a 16-bit ``main_grad`` of the dtype of ``rows``."""
        main_grad.addmm_(grad_output.t(), rows)


# -- Megatron's own modules -----------------------------------------------------------------------

_CHOICE = "use_transformer_engine"


def refuse_transformer_engine(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function that builds a Transformer Engine layer spec to raise a clear error."""
    may_choose = takes(original, _CHOICE)

    def specify(*args: Any, **kwargs: Any) -> Any:
        # Some functions have an argument that selects Megatron's own modules instead.
        if may_choose:
            bound = inspect.signature(original).bind_partial(*args, **kwargs)
            bound.apply_defaults()
            if not bound.arguments.get(_CHOICE):
                return original(*args, **kwargs)
        raise SettingsError(
            "local-modules: --transformer-impl transformer_engine (Megatron's default) needs Transformer "
            "Engine, which is not installed; add --transformer-impl local"
        )

    return specify


def unless_there_are_none(original: Callable[..., None]) -> Callable[..., None]:
    """Decorate ``quantize_param_shard``, which needs Transformer Engine, to return if its lists are empty."""

    def quantize_param_shard(model_params: Sequence[Any], *args: Any, **kwargs: Any) -> None:
        if model_params:
            original(model_params, *args, **kwargs)

    return quantize_param_shard


def is_never_one(module: object) -> bool:
    """Return false; replaces checks for layer types that only Transformer Engine has."""
    # Replaces `is_inference_column_parallel_linear`.
    return False
