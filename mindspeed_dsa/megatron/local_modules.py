"""Plain PyTorch norms and linear layers, for modules that Megatron offers only with Transformer Engine.

Constructor arguments, parameter names and parameter attributes match the Transformer Engine modules, so that
specs, gradient synchronization and checkpoints work unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from operator import attrgetter
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from mindspeed_dsa.feature import Context, Megatron
from mindspeed_dsa.ops.precision import normalize
from mindspeed_dsa.parallel.weight_gradients import deferred_gradient_of, linear_later
from mindspeed_dsa.patches.compose import depends_on

# -- norms, also with sequence parallelism or fused into linear layers ----------------------------


class SequenceParallelLayerNorm(torch.nn.LayerNorm):
    """LayerNorm whose weights Megatron reduces over tensor parallel ranks under sequence parallelism."""

    def __init__(self, config: Any, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size, eps=eps)
        self.zero_centered_gamma = _prepare_norm(self, config)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Normalise ``[..., hidden_size]``; keeps shape and dtype."""
        # The stored weight is gamma - 1, see _prepare_norm().
        weight = self.weight + 1 if self.zero_centered_gamma else self.weight
        return normalize(F.layer_norm, hidden_states, weight, self.bias, self.eps)


class SequenceParallelRMSNorm(torch.nn.RMSNorm):
    """RMSNorm whose weight Megatron reduces over tensor parallel ranks under sequence parallelism."""

    def __init__(self, config: Any, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size, eps=eps)
        self.zero_centered_gamma = _prepare_norm(self, config)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Normalise ``[..., hidden_size]``; keeps shape and dtype."""
        weight = self.weight + 1 if self.zero_centered_gamma else self.weight
        return normalize(F.rms_norm, hidden_states, weight, self.eps)


def _prepare_norm(norm: torch.nn.Module, config: Any) -> bool:
    """Mark parameters for sequence parallelism; if the weight stores gamma - 1, zero it and return True."""
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    zero_centered = bool(config.layernorm_zero_centered_gamma)
    if zero_centered:
        torch.nn.init.zeros_(norm.weight)  # type: ignore[arg-type]
    return zero_centered


RMSNorm = Callable[[Tensor, Tensor, float], Tensor]
"""Function of ``[..., hidden]``, the weight ``[hidden]`` and epsilon; returns ``[..., hidden]``."""
_RMS_NORM = "rms_norm"


def normalize_with(layer: Any, rms_norm: RMSNorm) -> None:
    """Make a layer with a fused RMSNorm compute the norm with ``rms_norm``."""
    setattr(layer, _RMS_NORM, rms_norm)


def _rms_norm_of_torch(hidden_states: Tensor, weight: Tensor, eps: float) -> Tensor:
    return normalize(F.rms_norm, hidden_states, weight, eps)


def norm_of_fused_layer(layer: Any, hidden_states: Tensor, config: Any) -> Tensor:
    """Apply only the norm of a fused norm and linear layer, ours or Transformer Engine's.

    Args:
        layer: layer with ``layer_norm_weight`` and, for LayerNorm, ``layer_norm_bias``, both ``[hidden]``.
        hidden_states: ``[..., hidden]``.
        config: Megatron's configuration; ``normalization`` is ``"RMSNorm"`` or ``"LayerNorm"``.

    Returns:
        Normalised hidden states, ``[..., hidden]``.
    """
    # zero_centered_gamma stores gamma - 1.
    weight = layer.layer_norm_weight
    if config.layernorm_zero_centered_gamma:
        weight = weight + 1
    if config.normalization == "RMSNorm":
        rms_norm: RMSNorm = getattr(layer, _RMS_NORM, _rms_norm_of_torch)
        return rms_norm(hidden_states, weight, config.layernorm_epsilon)
    return normalize(F.layer_norm, hidden_states, weight, layer.layer_norm_bias, config.layernorm_epsilon)


_NORMS = {"LayerNorm": SequenceParallelLayerNorm, "RMSNorm": SequenceParallelRMSNorm}


def torch_norm(config: Any, hidden_size: int, eps: float) -> torch.nn.Module | None:
    """Build the norm for a configuration, or ``None`` if PyTorch has no such norm."""
    norm = _NORMS.get(config.normalization)
    if norm is None or config.memory_efficient_layer_norm:
        return None
    return norm(config, hidden_size, eps)


def norm_for_every_setting(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``WrappedTorchNorm.__new__``: also build norms for settings that Megatron's class rejects."""

    def __new__(
        cls: type, config: Any, hidden_size: int, eps: float = 1e-5, *args: Any, **kwargs: Any
    ) -> Any:
        refused = (
            config.sequence_parallel or config.persist_layer_norm or config.layernorm_zero_centered_gamma
        )
        norm = torch_norm(config, hidden_size, eps) if refused else None
        return original(cls, config, hidden_size, eps, *args, **kwargs) if norm is None else norm

    return __new__


# -- linear layers -----------------------------------------------------------------------------


def _same_on_every_tensor_parallel_rank(megatron: Megatron) -> AbstractContextManager[Any]:
    """Return a context in which all ranks of a tensor parallel group draw the same random numbers."""
    random = megatron("core.tensor_parallel.random")
    tracker = random.get_cuda_rng_tracker()
    if not tracker.is_initialized():
        return nullcontext()
    return tracker.fork(random.get_data_parallel_rng_tracker_name())  # type: ignore[no-any-return]


class DuplicatedLinear(torch.nn.Module):
    """Linear layer whose weight is replicated on every tensor parallel rank.

    Replaces ``TELinear(parallel_mode="duplicated")``. Checkpoints treat it as replicated. With sequence
    parallelism its input is one rank's part of the sequence, so its weight gradient is a partial sum. The
    weight is therefore marked for Megatron's reduction over tensor parallel ranks.

    Args:
        input_size, output_size: numbers of input and output features.
        config: Megatron's configuration; the weights get its ``params_dtype``.
        init_method: function that fills the weight in place.
        bias: whether to add a bias, initialized to zero.
        skip_bias_add: whether to return the bias instead of adding it.
        parallel_mode: must be ``"duplicated"``.
        tp_group, tp_comm_buffer_name, gather_output, is_expert, skip_weight_param_allocation, name: unused
            arguments of Megatron's call sites, rejected if they contradict replication.
    """

    megatron: ClassVar[Megatron] = Megatron()
    is_one_product: ClassVar[bool] = True
    """Marker for :mod:`~mindspeed_dsa.megatron.inlinable`: this class (not a subclass) is one matmul."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: Callable[[Tensor], Any],
        bias: bool = True,
        skip_bias_add: bool = False,
        parallel_mode: str = "duplicated",
        tp_group: Any = None,
        tp_comm_buffer_name: str | None = None,
        gather_output: bool = False,
        is_expert: bool = False,
        skip_weight_param_allocation: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__()
        if parallel_mode != "duplicated" or is_expert or skip_weight_param_allocation:
            raise ValueError(
                "DuplicatedLinear is replicated on every rank and owns its weight: got "
                f"parallel_mode={parallel_mode!r}, is_expert={is_expert}, "
                f"skip_weight_param_allocation={skip_weight_param_allocation}; use ColumnParallelLinear "
                "or RowParallelLinear for anything else"
            )
        self.config = config
        self.skip_bias_add = skip_bias_add
        place = {
            "device": None if config.use_cpu_initialization else torch.cuda.current_device(),
            "dtype": config.params_dtype,
        }
        self.weight = Parameter(torch.empty(output_size, input_size, **place))
        self.bias = Parameter(torch.zeros(output_size, **place)) if bias else None
        if config.perform_initialization:
            self._initialize(init_method)
        for parameter in self.parameters():
            # As in Megatron: allreduce marks a parameter that is not expert parallel.
            parameter.allreduce = True  # type: ignore[attr-defined]
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    @torch.no_grad()
    def _initialize(self, init_method: Callable[[Tensor], Any]) -> None:
        if self.config.use_cpu_initialization:
            # As Megatron's parallel layers do: draw in fp32 from the generator that all ranks share.
            master = torch.empty_like(self.weight, dtype=torch.float32)
            init_method(master)
            self.weight.copy_(master)
        else:
            with _same_on_every_tensor_parallel_rank(self.megatron):
                init_method(self.weight)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor | None]:
        """Project ``[..., input_size]`` to ``([..., output_size], bias or None)``."""
        added = None if self.skip_bias_add else self.bias
        deferred = deferred_gradient_of(self.weight)
        if deferred is None:
            output = F.linear(hidden_states, self.weight, added)
        else:
            # Another feature computes the weight gradient later.
            output = linear_later(hidden_states, added, deferred, self.megatron)
        return output, self.bias if self.skip_bias_add else None

    def backward_dw(self) -> None:
        """Do nothing: Megatron calls this for delayed weight gradients, which this layer never has."""


@cache
def duplicated_linear(megatron: Megatron) -> type[DuplicatedLinear]:
    """Return :class:`DuplicatedLinear` bound to this Megatron's random number generators."""
    if megatron == DuplicatedLinear.megatron:
        return DuplicatedLinear
    # A subclass of the same name with the fork's Megatron as a class attribute.
    return type("DuplicatedLinear", (DuplicatedLinear,), {"megatron": megatron, "__module__": __name__})


@cache
def layer_norm_column_parallel_linear(megatron: Megatron) -> type:
    """Return a class for a norm fused with this Megatron's ``ColumnParallelLinear``."""
    base: Any = megatron("core.tensor_parallel.layers").ColumnParallelLinear

    class LayerNormColumnParallelLinear(base):
        """Norm and column parallel linear layer in one module, with Transformer Engine's parameter names.

        ``layer_norm_weight`` (and ``layer_norm_bias``) are replicated on every tensor parallel rank.
        ``weight`` is split along its output dimension. Takes the arguments of ``ColumnParallelLinear``.
        """

        is_norm_and_product: ClassVar[bool] = True

        def __init__(self, input_size: int, output_size: int, *, config: Any, **kwargs: Any) -> None:
            super().__init__(input_size, output_size, config=config, **kwargs)
            if config.normalization not in ("RMSNorm", "LayerNorm"):
                raise ValueError(
                    "LayerNormColumnParallelLinear has RMSNorm and LayerNorm, not "
                    f"{config.normalization!r}; set --normalization accordingly"
                )
            like = {"device": self.weight.device, "dtype": config.params_dtype}
            # Both start with gamma = 1.
            fill = torch.zeros if config.layernorm_zero_centered_gamma else torch.ones
            self.layer_norm_weight = Parameter(fill(input_size, **like))
            self.layer_norm_bias = (
                Parameter(torch.zeros(input_size, **like)) if config.normalization == "LayerNorm" else None
            )
            for parameter in (self.layer_norm_weight, self.layer_norm_bias):
                if parameter is not None:
                    parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

        def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            """Return ``[s, b, output_size / TP]`` for ``[s, b, input_size]``, and the bias."""
            return super().forward(norm_of_fused_layer(self, hidden_states, self.config), *args, **kwargs)

    return LayerNormColumnParallelLinear


def transformer_engine_is_usable(context: Context[Any]) -> bool:
    """Return whether Megatron has found a usable Transformer Engine."""
    return bool(context.megatron("core.extensions.transformer_engine").HAVE_TE)


# -- the router ----------------------------------------------------------------------------------


@depends_on(attrgetter("megatron"))
def gate_without_transformer_engine(
    original: Callable[..., Any], context: Context[Any]
) -> Callable[..., Any]:
    """Decorate ``router_gating_linear``: use a differentiable matmul without Transformer Engine's kernel."""
    # Several features claim this patch; the engine applies it once.

    def router_gating_linear(inp: Tensor, weight: Tensor, *rest: Any, **named: Any) -> Any:
        if context.megatron("core.extensions.transformer_engine").HAVE_TE:
            return original(inp, weight, *rest, **named)
        # From 0.15 on the signature has a bias before the dtype.
        # (dtype) before 0.15, (bias, dtype) since.
        *biases, router_dtype = *rest, *named.values()
        bias = biases[0] if biases else None
        # [tokens, hidden] x [experts, hidden]^T -> [tokens, experts]; gradients return in the inputs' dtypes.
        bias = None if bias is None else bias.to(router_dtype)
        return F.linear(inp.to(router_dtype), weight.to(router_dtype), bias)

    return router_gating_linear
