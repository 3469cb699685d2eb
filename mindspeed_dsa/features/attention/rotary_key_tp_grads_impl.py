"""The sum over tensor parallel ranks that the rotary key's gradient lacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup, all_reduce


class SumGradients(torch.autograd.Function):
    """Identity; in backward the sum over a group.

    Megatron's ``copy_to_tensor_model_parallel_region`` reduces a contiguous copy and returns the original,
    so that the sum is lost for a gradient that is a slice of a larger one, as it is here.
    """

    @staticmethod
    def forward(ctx: Any, activation: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return activation

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        all_reduce(gradient, group=ctx.group)
        return gradient, None


def sum_rotary_key_gradients(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``MLASelfAttention.__init__``.

    All heads share one rotary key. A rank's backward yields the gradient of its own heads; with sequence
    parallelism a reduce-scatter sums these parts, without it nothing does, and the copies of the projection
    drift apart.
    """

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        config, group = self.config, self.pg_collection.tp
        sizes = [config.kv_lora_rank, config.qk_pos_emb_head_dim]
        is_full_copy = self.linear_kv_down_proj.weight.size(0) == sum(sizes)
        if group.size() == 1 or config.sequence_parallel or not is_full_copy:
            return

        def sum_in_backward(module: Any, inputs: Any, output: Any) -> Any:
            # [s, b, kv_lora_rank + qk_pos_emb_head_dim]; the latent part is summed at its up projection.
            latent, rotary_key = output[0].split(sizes, dim=-1)
            rotary_key = SumGradients.apply(rotary_key, group)
            return (torch.cat([latent, rotary_key], dim=-1), *output[1:])

        self.linear_kv_down_proj.register_forward_hook(sum_in_backward)

    return __init__
