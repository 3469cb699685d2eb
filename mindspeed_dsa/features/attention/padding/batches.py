"""Padding of batches after the data, and exclusion of the padding from losses.

Does not import Megatron, because it is loaded while Megatron is being imported.
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
"""Padding value of batch entries by name, if not 0. In Megatron's masks, true means masked."""


def keep_length_of_data(original: Callable[..., None], context: Context[Options]) -> Callable[..., None]:
    """Decorate ``BlendedMegatronDatasetConfig.__post_init__`` to restore the unpadded sequence length."""
    padding = context.options.padding

    def __post_init__(self: Any, *args: Any, **kwargs: Any) -> None:
        if self.sequence_length == padding.length:
            self.sequence_length = padding.tokens
        original(self, *args, **kwargs)

    return __post_init__


def pad_batches(original: Callable[..., Any], context: Context[Options]) -> Callable[..., Any]:
    """Decorate ``get_forward_backward_func`` to return a schedule that pads batches.

    Under context parallelism, it also averages the loss over the data tokens of all ranks.
    """
    padding = context.options.padding

    def get_forward_backward_func(*args: Any, **kwargs: Any) -> Any:
        schedule = original(*args, **kwargs)

        def forward_backward(*inner: Any, **step: Any) -> Any:
            data = step["data_iterator"]
            if isinstance(data, list):
                step["data_iterator"] = [_padded(iterator, padding) for iterator in data]
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
    if data is None:  # this rank reads no data
        return None
    ends = object()
    # Megatron-LM's own iterator only has __next__; iter(callable, sentinel) makes it iterable.
    return (pad(batch, padding) for batch in iter(lambda: next(data, ends), ends))


def pad(batch: Any, padding: Padding) -> dict[str, Any]:
    """Append padding to a batch.

    Args:
        batch: dict of tensors ``[batch, tokens, ...]``, masks ``[batch, 1, tokens, tokens]`` and other
            values.
        padding: number of tokens to append to each sequence.

    Raises:
        ValueError: the batch is not a mapping, is not for a causal model, or has an unexpected sequence
            length.
    """
    if not isinstance(batch, Mapping):
        raise ValueError(
            f"pad-sequences: a batch is a {type(batch).__name__}, and rows of padding are put behind tensors "
            f"that have names; let the data iterator return a dictionary, or {INSTEAD}"
        )
    if "tokens" not in batch:  # models other than GPT, whose tokens may attend to padding
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
        # mask: pad the last two dimensions
        return F.pad(value, (0, padding.rows, 0, padding.rows), value=FILL.get(name, 0))
    if value.size(1) != padding.tokens:
        return value
    # [batch, tokens, ...]: pad dimension 1. F.pad lists dimensions from the last one.
    return F.pad(value, (*[0, 0] * (value.dim() - 2), 0, padding.rows), value=FILL.get(name, 0))


def _averaged(forward_step: Callable[..., Any], group: Any) -> Callable[..., Any]:
    """Wrap a forward step to average the loss over the tokens of all context parallel ranks."""

    # Megatron divides a rank's loss sum by the rank's own number of tokens and adds up the shares. Tokens on
    # ranks with fewer tokens would weigh more.
    def forward_one(*args: Any, **kwargs: Any) -> Any:
        output, loss_of = forward_step(*args, **kwargs)

        def averaged(result: Any, *others: Any, **options: Any) -> Any:
            losses = loss_of(result, *others, **options)
            # A tuple of three: sum of losses, number of tokens, report. Others are averaged by the script.
            if not isinstance(losses, tuple) or len(losses) != 3:
                return losses
            total, tokens, report = losses
            # Megatron divides by `tokens` next: total / tokens * (tokens / mean) = total / mean.
            return total * (tokens / mean_over(tokens, group).clamp_min(1e-9)), tokens, report

        return output, averaged if callable(loss_of) else loss_of

    return forward_one


def mean_over(count: Tensor, group: Any) -> Tensor:
    """All-reduce a count to its mean over the ranks, as a float tensor. Collective over the group."""
    mean = count.detach().float().clone()
    dist.all_reduce(mean, group=group)
    return mean.div_(group.size())


def roll_data(original: Callable[..., Any], context: Context[Options]) -> Callable[..., Any]:
    """Decorate MTP's ``roll_tensor`` to zero the tokens after the data, as if there were no padding.

    Also averages the returned mask sum over context parallel ranks, because Megatron divides the loss by it.
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
        # True for tokens with a next token of data: before=1 excludes the last one.
        followed = counted_rows(padding, tensor.size(dims), group.rank(), before=1)
        if shifts != -1 or followed is None or padding.is_pack:
            return result, total
        shape = [1] * tensor.dim()
        shape[dims] = -1
        result = result.masked_fill(upload(~followed.view(shape), tensor.device), 0)
        total = result.sum()
        if padding.ranks > 1:  # for token sums too, which are unused; they cannot be told from integer masks
            total = mean_over(total, group)
        return result, total.masked_fill(total == 0, 1)  # it divides a loss that is 0 if all rows are masked

    return roll_tensor
