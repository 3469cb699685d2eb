"""The function behind Megatron's linear layers, where a port is open for the weight."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from mindspeed_dsa.feature import Context
from mindspeed_dsa.parallel import port
from mindspeed_dsa.patches.compose import depends_on


@depends_on(attrgetter("megatron"))
def use_port(original: Callable[..., Tensor], context: Context[Any]) -> Callable[..., Tensor]:
    """Decorate ``linear_with_grad_accumulation_and_async_allreduce``.

    Layers that communicate, defer the gradient themselves, or compute in another dtype are Megatron's own
    affair: their weights take their gradients as ever. Several features claim this row; the engine applies it
    once.
    """

    def linear(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        gradient_accumulation_fusion: bool,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        grad_output_buffer: list[Tensor] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        plain = (
            not (allreduce_dgrad or sequence_parallel)
            and grad_output_buffer is None
            and kwargs.get("gtp_remat_size", 1) == 1
            and _is_plain(input, weight)
        )
        found = port.port_of(weight) if plain else None
        if found is None:
            return original(
                input,
                weight,
                bias,
                gradient_accumulation_fusion,
                allreduce_dgrad,
                sequence_parallel,
                grad_output_buffer,
                *args,
                **kwargs,
            )
        return port.linear(input, found, bias, gradient_accumulation_fusion, context.megatron)

    return linear


def _is_plain(input: Tensor, weight: Tensor) -> bool:
    return (
        weight.dim() == 2
        and input.dtype == weight.dtype
        and not hasattr(weight, "__fsdp_param__")
        and not torch.is_autocast_enabled(input.device.type)
        and not torch.compiler.is_compiling()
    )
