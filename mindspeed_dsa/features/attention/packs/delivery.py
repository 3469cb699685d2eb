"""Delivery of document boundaries to every pipeline stage and tensor parallel rank, for packed batches.

Before a step, the first stage reads all microbatches of the step and broadcasts their document boundaries. It
does so once per step, because a message per microbatch would synchronize the stages. Each model chunk then
gets the ``packed_seq_params`` of its microbatch, even if the training script passes none. Megatron's own
attention runs document by document.

Imports Megatron only when called, because these functions are loaded while Megatron is being imported.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from torch import Tensor

from mindspeed_dsa import platforms
from mindspeed_dsa.context_parallel.layout import split
from mindspeed_dsa.context_parallel.packs import Pack, PackRows, layout_of
from mindspeed_dsa.context_parallel.padding import Padding
from mindspeed_dsa.feature import Context, Megatron
from mindspeed_dsa.features.attention.packs.feature import Options, cut_by_megatron
from mindspeed_dsa.ops.documents import attend_by_documents
from mindspeed_dsa.patches import versions

_LENGTHS = ("cu_seqlens", "cu_seqlens_padded", "max_seqlen")
"""Batch entries to remove, because Megatron's own scripts would read some of them incorrectly."""

_Batch = Mapping[str, Any]


@dataclass
class _Running:
    """Microbatch whose forward is running."""

    pack: Pack
    params: Any
    is_dealt: bool = False
    """Whether :func:`deal_rows` has sliced the batch for this context parallel rank."""


class Step:
    """Session state: the microbatch whose forward is running, or ``None``."""

    def __init__(self, context: Context[Options]) -> None:
        self.running: _Running | None = None


def deliver_packs(original: Callable[..., Any], context: Context[Options]) -> Callable[..., Any]:
    """Decorate ``get_forward_backward_func`` to return a schedule that delivers packs.

    The schedule reads the packs of all microbatches first, and sets the current pack before each forward.
    """
    release = versions.of_megatron(context.megatron.root) or "0"

    def get_forward_backward_func(*args: Any, **kwargs: Any) -> Any:
        schedule = original(*args, **kwargs)

        def forward_backward(*inner: Any, **step: Any) -> Any:
            if context.megatron("core.parallel_state").get_context_parallel_world_size() > 1:
                # All chunks of a rank have the same configuration.
                chunks = step["model"]
                model = chunks[0] if isinstance(chunks, list) else chunks
                config = context.megatron("core.utils").get_model_config(model)
                for problem in cut_by_megatron(release, config, context.options.fused):
                    raise ValueError(f"pack-documents: {problem}")
            data, packs = packs_of_step(step["data_iterator"], step["num_microbatches"], context.megatron)
            packs = [_padded(pack, context.options.padding) for pack in packs]
            step["data_iterator"] = data
            step["forward_step_func"] = _with_its_pack(step["forward_step_func"], packs, context)
            return schedule(*inner, **step)

        return forward_backward

    return get_forward_backward_func


def with_pack(original: Callable[..., Any], context: Context[Options]) -> Callable[..., Any]:
    """Decorate ``GPTModel.forward`` to supply ``packed_seq_params`` if the caller passes none.

    Raises:
        ValueError: raised in forward under context parallelism, if the script has sliced the microbatch by
            itself and the tokens differ from those on other pipeline stages.
    """
    step = context.state(Step)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        running, described = step.running, kwargs.get("packed_seq_params")
        if running is not None:
            ranks = context.megatron("core.parallel_state").get_context_parallel_world_size()
            if ranks > 1:
                _check_rows(
                    running, described, [*args[:1], kwargs.get("input_ids"), kwargs.get("labels")], ranks
                )
            if described is None:
                kwargs["packed_seq_params"] = running.params
        return original(self, *args, **kwargs)

    return forward


def _check_rows(running: _Running, described: Any, batch: list[Any], ranks: int) -> None:
    """Raise ``ValueError`` if the script itself has sliced a microbatch for context parallel ranks."""
    if described is not None and not getattr(described, "dealt_block_rows", 0):
        raise ValueError(
            "pack-documents: the script passes packed_seq_params of documents that it has cut for "
            f"{ranks} context parallel ranks itself, and --pack-documents deals out their rows by "
            "work; pass none, or omit --pack-documents"
        )
    # Stages between the first and the last have no tokens or labels to check.
    if not running.is_dealt and any(isinstance(one, Tensor) for one in batch):
        raise ValueError(
            f"pack-documents: no rows were dealt out to the {ranks} context parallel ranks in this step, so "
            "that the script must have cut the batch itself, or before the step; call "
            "megatron.core.utils.get_batch_on_this_cp_rank on the whole batch in the forward step function"
        )


def deal_rows(original: Callable[..., Any], context: Context[Options]) -> Callable[..., Any]:
    """Decorate ``get_batch_on_this_cp_rank`` to slice packs by our layout, not Megatron's zigzag."""
    step = context.state(Step)

    def get_batch_on_this_cp_rank(batch: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        running, group = step.running, context.megatron("core.parallel_state").get_context_parallel_group()
        if running is None or group.size() == 1:
            return original(batch, *args, **kwargs)
        running.is_dealt = True
        layout = layout_of(running.params, running.pack, group.size())
        # Tensors of the batch are [1, tokens]: dimension 1 is dealt out.
        dealt = {
            name: split(whole, layout, group.rank(), 1)
            if isinstance(whole, Tensor) and whole.dim() == 2
            else whole
            for name, whole in batch.items()
        }
        batch.update(dealt)
        return batch

    return get_batch_on_this_cp_rank


def roll_in_documents(original: Callable[..., Any], context: Context[Options]) -> Callable[..., Any]:
    """Decorate MTP's ``roll_tensor``, which shifts tokens by one, to shift within each document.

    Megatron's version assumes two chunks per context parallel rank and no padding between documents. It does
    not zero padding tokens, so they would count in the loss.
    """

    def roll_tensor(
        tensor: Tensor,
        shifts: int = -1,
        dims: int = -1,
        cp_group: Any = None,
        packed_seq_params: Any = None,
        **others: Any,
    ) -> tuple[Tensor, Tensor]:
        if packed_seq_params is None:
            return original(tensor, shifts, dims, cp_group, packed_seq_params, **others)  # type: ignore[no-any-return]
        if shifts != -1 or any(value is not None for value in others.values()):
            raise ValueError(
                "pack-documents: multi-token prediction moves rows by one position here, and roll_tensor got "
                f"shifts={shifts} and {sorted(others)}; omit --pack-documents"
            )
        group = cp_group
        if group is None:
            group = context.megatron("core.parallel_state").get_context_parallel_group()
        dim = dims % tensor.dim()
        result = PackRows.of(packed_seq_params, tensor.size(dim), group).next_rows(tensor, dim, group)
        # Megatron 0.16 divides a loss by this sum, which is 0 where a rank has masked rows only.
        total = result.sum()
        return result, total.masked_fill(total == 0, 1)

    return roll_tensor


def packs_of_step(data: Any, microbatches: int, megatron: Megatron) -> tuple[Any, list[Pack]]:
    """Read a step's microbatches and broadcast their document boundaries to all ranks of the model.

    All tensor and pipeline parallel ranks of the model must call it.

    Args:
        data: ``data_iterator`` of a schedule: an iterator, a list with one per model chunk, or None on ranks
            without data.
        microbatches: number of microbatches of the step.
        megatron: Megatron with the process groups.

    Returns:
        The microbatches without length entries such as ``cu_seqlens``, as iterators like ``data``, and their
        packs.

    Raises:
        ValueError: on all ranks, if a microbatch is invalid.
    """
    state = megatron("core.parallel_state")
    group, first = state.get_model_parallel_group(), state.get_model_parallel_src_rank()
    # Every rank with an iterator reads ahead, so that all iterators stay at the same position.
    ahead = [_read(batches, microbatches) for batches in (data if isinstance(data, list) else [data])]
    told: list[Any] = [None]
    if dist.get_rank() == first:
        batches = next(batches for batches in ahead if batches is not None)
        told = [_packs(batches, megatron)]
    if group.size() > 1:
        dist.broadcast_object_list(told, src=first, group=group)
    if isinstance(told[0], str):
        raise ValueError(told[0])
    iterators = [None if batches is None else _without_lengths(batches) for batches in ahead]
    return iterators if isinstance(data, list) else iterators[0], told[0]


def _read(data: Iterator[_Batch] | None, microbatches: int) -> list[_Batch] | None:
    # Megatron-LM's own iterator only has __next__.
    return None if data is None else [next(data) for _ in range(microbatches)]


def _without_lengths(batches: list[_Batch]) -> Iterator[_Batch]:
    return iter([{key: value for key, value in batch.items() if key not in _LENGTHS} for batch in batches])


def _packs(batches: list[_Batch], megatron: Megatron) -> list[Pack] | str:
    """Return the packs of all microbatches, or an error message."""
    # Not raised here: the other ranks wait for the broadcast, and must raise as well.
    try:
        return [_pack(batch, megatron) for batch in batches]
    except ValueError as problem:
        return str(problem)


def _pack(batch: _Batch, megatron: Megatron) -> Pack:
    tokens = batch["tokens"]
    if tokens.dim() == 2 and tokens.size(0) != 1:
        raise ValueError(
            f"pack-documents: a microbatch holds {tokens.size(0)} rows of tokens and a pack is one; use "
            "--micro-batch-size 1, for evaluations too, and a longer --seq-length"
        )
    sums, padded = (
        # Ends of documents without and with padding, if the data loader gives them.
        [] if batch.get(name) is None else batch[name].flatten().tolist()
        for name in _LENGTHS[:2]
    )
    if sums:
        return Pack.of_prefix_sums(sums, padded or None, tokens.numel())
    return Pack.of_tokens(tokens, _end_of_document(megatron))


def _padded(pack: Pack, padding: Padding) -> Pack:
    """Return a copy of the pack with the length of the padded batch."""
    if padding.rows * padding.ranks > padding.length:
        raise ValueError(
            f"pack-documents: {padding.rows} rows of padding are more than one of {padding.ranks} context "
            f"parallel ranks has of {padding.length}; use a longer --seq-length, or one that ranks divide"
        )
    return replace(pack, length=pack.length + padding.rows)


def _end_of_document(megatron: Megatron) -> int:
    tokenizer = megatron("training.global_vars").get_tokenizer()
    end = getattr(tokenizer, "eod", None)
    if end is None:
        raise ValueError(
            "pack-documents: the batch has no cu_seqlens, and the tokenizer no end-of-document token (eod); "
            "put one of them in"
        )
    return int(end)


def _with_its_pack(
    forward_step: Callable[..., Any], packs: list[Pack], context: Context[Options]
) -> Callable[..., Any]:
    """Wrap the script's forward step: set the current pack. Each chunk runs the microbatches in order."""
    taken: Counter[int] = Counter()
    step, device = context.state(Step), platforms.current().device

    def forward_one(data: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        # Chunks of a virtual pipeline run the same microbatches, each at its own pace.
        pack = packs[taken[id(model)]]
        taken[id(model)] += 1
        params = pack.params(
            context.megatron, device, context.options.block_rows, context.options.padding.rows
        )
        before, step.running = step.running, _Running(pack, params)
        try:
            return forward_step(data, model, *args, **kwargs)
        finally:
            step.running = before

    return forward_one


# -- Megatron's own dense attention, DotProductAttention, the only one without Transformer Engine -----------


def attend_to_own_document(original: Callable[..., Tensor], context: Context[Any]) -> Callable[..., Tensor]:
    """Decorate ``DotProductAttention.forward``, which rejects packs, to attend document by document."""

    def forward(
        self: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
        **kwargs: Any,
    ) -> Tensor:
        # Under context parallelism, dense-context-parallel attends to the documents.
        if packed_seq_params is None or self.config.context_parallel_size > 1:
            keywords = {"attn_mask_type": attn_mask_type, "attention_bias": attention_bias}
            keywords |= {"packed_seq_params": packed_seq_params, **kwargs}
            return original(self, query, key, value, attention_mask, **keywords)
        _refuse_unsupported(self, attn_mask_type, attention_bias)
        # query, key and value are [t, heads, dim]
        pack = Pack.of(packed_seq_params, key.size(0))
        softmax = self.scale_mask_softmax

        def attend(dropout: float) -> Tensor:
            return attend_by_documents(
                # [t, heads, dim] -> [t, 1, heads, dim]
                query.unsqueeze(1),
                key.unsqueeze(1),
                value.unsqueeze(1),
                pack.starts,
                pack.ends,
                # With --apply-query-key-layer-scaling the softmax multiplies by the layer number again.
                self.softmax_scale * (softmax.scale or 1.0),
                dropout,
            )

        dropout = self.attention_dropout.p if self.training else 0.0
        # The choice of generator follows Megatron's own dropout in DotProductAttention.
        if dropout and not self.config.sequence_parallel:
            with context.megatron("core.tensor_parallel").get_cuda_rng_tracker().fork():
                out = attend(dropout)
        else:
            out = attend(dropout)
        return out.flatten(1)  # [t, heads * dim]

    return forward


def _refuse_unsupported(attention: Any, attn_mask_type: Any, attention_bias: Tensor | None) -> None:
    kind = getattr(attn_mask_type or attention.attn_mask_type, "name", "")
    unsupported = [] if kind in ("causal", "padding_causal") else [f"attn_mask_type {kind}"]
    if attention_bias is not None:
        unsupported.append("attention_bias")
    if getattr(attention.scale_mask_softmax, "window_size", None) is not None:
        unsupported.append("a sliding window")
    if getattr(attention.config, "softmax_type", "vanilla") != "vanilla":
        unsupported.append(f"softmax_type {attention.config.softmax_type}")
    if unsupported:
        raise ValueError(
            f"pack-documents: DotProductAttention got {', '.join(unsupported)}; packed documents have plain "
            "causal attention without Transformer Engine. Omit that, or do not pack"
        )
