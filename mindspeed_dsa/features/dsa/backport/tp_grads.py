"""The mean over tensor parallel ranks for gradients that are complete on each of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from mindspeed_dsa.feature import Context
from mindspeed_dsa.features.dsa.backport.feature import Options


def average_marked_gradients(original: Callable[..., None], context: Context[Options]) -> Callable[..., None]:
    """Decorate ``_allreduce_layernorm_grads``: then average the gradients that later releases average.

    The copies of the indexer start equal and get equal gradients; with nondeterministic kernels these differ
    by rounding, and without the mean the copies would drift apart.
    """

    def _allreduce_layernorm_grads(model: list[Any], *args: Any, **kwargs: Any) -> None:
        original(model, *args, **kwargs)
        group = context.megatron("core.parallel_state").get_tensor_model_parallel_group()
        if group.size() == 1:
            return
        for chunk in model:
            for name, parameter in chunk.named_parameters():
                if not getattr(parameter, "average_gradients_across_tp_domain", False):
                    continue
                gradient = getattr(parameter, "main_grad", parameter.grad)
                if gradient is None:  # not trained
                    continue
                if "q_layernorm" not in name:  # already summed, because of its name
                    dist.all_reduce(gradient, group=group)
                gradient /= group.size()

    return _allreduce_layernorm_grads
