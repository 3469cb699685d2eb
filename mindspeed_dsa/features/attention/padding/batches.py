"""Batches with rows of padding behind their data, and losses that do not count these.

Imports nothing of Megatron: fetched while Megatron is being imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from mindspeed_dsa.context_parallel.layout import counted_rows
from mindspeed_dsa.context_parallel.padding import Padding
from mindspeed_dsa.feature import Context
from mindspeed_dsa.features.attention.padding.feature import INSTEAD, Options
from mindspeed_dsa.platforms.host_pool import upload

FILL: Mapping[str, int] = {"attention_mask": 1}
"""Values of padding by the entry's name, where they are not 0: Megatron masks where it is true."""


def keep_length_of_data(original: Callable[..., None], context: Context[Options]) -> Callable[..., None]:
    """Decorate ``BlendedMegatronDatasetConfig.__post_init__``: scripts give it the padded length."""
    padding = context.options.padding

    def __post_init__(self: Any, *args: Any, **kwargs: Any) -> None:
        if self.sequence_length == padding.length:
            self.sequence_length = padding.tokens
        original(self, *args, **kwargs)

    return __post_init__


def pad_batches(original: Callable[..., Any], context: Context[Options]) -> Callable[..., Any]:
    """Decorate ``get_forward_backward_func``, whose schedules are called with keywords."""
    padding = context.options.padding

    def get_forward_backward_func(*args: Any, **kwargs: Any) -> Any:
        schedule = original(*args, **kwargs)

        def forward_backward(*inner: Any, **step: Any) -> Any:
            data = step["data_iterator"]
            if isinstance(data, list):
                step["data_iterator"] = [_padded(each, padding) for each in data]
            else:
                step["data_iterator"] = _padded(data, padding)
            chunks = step["model"]
            model = chunks[0] if isinstance(chunks, list) else chunks
            config = context.megatron("core.utils").get_model_config(model)
            if padding.ranks > 1 and not config.calculate_per_token_loss:
                group = context.megatron("core.parallel_state").get_context_parallel_group()
                step["forward_step_func"] = _averaged(step["forward_step_func"], group)
            return schedule(*inner, **step)

        return forward_backward

    return get_forward_backward_func


def _padded(data: Any, padding: Padding) -> Iterator[Any] | None:
    if data is None:  # this rank reads none
        return None
    ends = object()
    # Megatron-LM's own iterator has nothing but __next__.
    return (pad(batch, padding) for batch in iter(lambda: next(data, ends), ends))


def pad(batch: Any, padding: Padding) -> dict[str, Any]:
    """Append rows of padding to a batch.

    Args:
        batch: by name, tensors ``[batch, tokens, ...]``, masks ``[batch, 1, tokens, tokens]``, and others.
        padding: of its sequences.

    Raises:
        ValueError: it is no mapping, it is not of a causal model, or its sequences have another length.
    """
    if not isinstance(batch, Mapping):
        raise ValueError(
            f"pad-sequences: a batch is a {type(batch).__name__}, and rows of padding are put behind tensors "
            f"that have names; let the data iterator return a dictionary, or {INSTEAD}"
        )
    if "tokens" not in batch:  # of other models than GPT, whose rows may see those of padding
        raise ValueError(
            f"pad-sequences: a batch has {', '.join(map(str, batch))}, and no tokens: rows of padding are "
            f"put behind those of causal models alone; {INSTEAD}"
        )
    tokens = batch["tokens"]
    if batch.get("cu_seqlens") is not None and not padding.is_pack:
        raise ValueError(
            "pad-sequences: a batch has cu_seqlens, which say nothing of rows of padding; add "
            f"--pack-documents, which makes packs of whole documents, or {INSTEAD}"
        )
    if isinstance(tokens, Tensor) and tokens.size(-1) != padding.tokens:
        raise ValueError(
            f"pad-sequences: sequences of {padding.tokens} tokens are padded to {padding.length}, and a "
            f"batch has {tokens.size(-1)}; let data sets take the length of their GPTDatasetConfig instead "
            f"of args.seq_length, or {INSTEAD}"
        )
    return {name: _with_rows(value, name, padding) for name, value in batch.items()}


def _with_rows(value: Any, name: str, padding: Padding) -> Any:
    if not isinstance(value, Tensor) or value.dim() < 2:
        return value
    if value.dim() == 4 and value.shape[-2:] == (padding.tokens, padding.tokens):
        return F.pad(value, (0, padding.rows, 0, padding.rows), value=FILL.get(name, 0))
    if value.size(1) != padding.tokens:
        return value
    return F.pad(value, (*[0, 0] * (value.dim() - 2), 0, padding.rows), value=FILL.get(name, 0))


def _averaged(forward_step: Callable[..., Any], group: Any) -> Callable[..., Any]:
    """Have a microbatch's loss averaged over the tokens of all context parallel ranks.

    Megatron divides the sum of a rank's losses by the number of its own tokens and adds up the ranks'
    shares, so that a token would count the more, the fewer a rank has. Losses that a script has averaged
    itself, which come without a number, are left alone.
    """

    def forward_one(*args: Any, **kwargs: Any) -> Any:
        output, loss_of = forward_step(*args, **kwargs)

        def averaged(result: Any, *others: Any, **options: Any) -> Any:
            losses = loss_of(result, *others, **options)
            if not isinstance(losses, tuple) or len(losses) != 3:
                return losses
            total, tokens, report = losses
            return total * (tokens / mean_over(tokens, group).clamp_min(1e-9)), tokens, report

        return output, averaged if callable(loss_of) else loss_of

    return forward_one


def mean_over(count: Tensor, group: Any) -> Tensor:
    """Return the mean of a number over ranks, a float; a collective."""
    mean = count.detach().float().clone()
    dist.all_reduce(mean, group=group)
    return mean.div_(group.size())


def roll_data(original: Callable[..., Any], context: Context[Options]) -> Callable[..., Any]:
    """Decorate ``roll_tensor`` of multi-token prediction: behind the data come zeros, as without padding.

    Megatron divides by the number that comes back with a mask.
    """
    padding = context.options.padding

    def roll_tensor(
        tensor: Tensor | None,
        shifts: int = -1,
        dims: int = -1,
        cp_group: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        result, total = original(tensor, shifts, dims, cp_group, *args, **kwargs)
        if tensor is None:
            return result, total
        group = context.megatron("core.parallel_state").get_context_parallel_group()
        followed = counted_rows(padding, tensor.size(dims), group.rank(), before=1)
        if shifts != -1 or followed is None or padding.is_pack:
            return result, total
        shape = [1] * tensor.dim()
        shape[dims] = -1
        result = result.masked_fill(upload(~followed.view(shape), tensor.device), 0)
        total = result.sum()
        if padding.ranks > 1:  # of tokens, too: masks may be of integers, and nobody reads the tokens' sum
            total = mean_over(total, group)
        return result, total

    return roll_tensor
