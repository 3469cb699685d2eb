"""Key selection by FP8 index scores, with the arithmetic of inference engines.

README.md in this folder has the mathematics, and says which backends agree bit for bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from mindspeed_dsa.ops.backend import Backend, choose, count_call, spent
from mindspeed_dsa.ops.checks import require
from mindspeed_dsa.ops.compiled import outside_graphs
from mindspeed_dsa.ops.lightning_indexer import check_operands, shape_class
from mindspeed_dsa.ops.precision import outside_autocast
from mindspeed_dsa.ops.quantised_indexer.arithmetic import MOST_DIMENSIONS, QuantisedCall
from mindspeed_dsa.ops.row_ranges import Ranges, RowForm, form_of, visible_ranges

OPERATOR = "quantised_indexer"


class Selector(Backend, Protocol):
    """Backend of the FP8 key selection."""

    def select(self, call: QuantisedCall, topk: int, ranges: Ranges, /) -> Tensor:
        """Return the selected keys of each query, ``[batch, query_length, topk]`` int32."""


if TYPE_CHECKING:  # mypy checks the modules against the protocol
    from mindspeed_dsa.ops.quantised_indexer import backends, cpu, triton

    BACKENDS: tuple[Selector, ...] = (backends.Reference(), backends.Chunked(), cpu, triton)


@outside_graphs
@outside_autocast
@torch.no_grad()
def quantised_indexer(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    topk: int,
    *,
    powers_of_two: bool = True,
    starts: Tensor | None = None,
    ends: Tensor | None = None,
    use_relu: bool = True,
    form: RowForm | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Select the ``topk`` visible keys with the highest FP8 index score for every query token.

    Each head of a query, and each key, is quantised to e4m3 numbers with one fp32 factor. The score is ::

        score[t, s] = (sum_j relu(q8[t, j] . k8[s]) * (weights[t, j] * q_factor[t, j])) * k_factor[s]

    Visible keys, ties and NaN follow the rules of
    :func:`mindspeed_dsa.ops.lightning_indexer.lightning_indexer`. Nothing here has a gradient. A loss uses
    the scores of the unquantised operands, see :func:`mindspeed_dsa.ops.lightning_indexer.selected_scores`.

    Args:
        query: ``[batch, query_length, heads, head_dim]``, any strides; fp32, bf16, fp16, or fp64, which is
            rounded to fp32 first. After the Hadamard rotation, if the model has one.
        key: ``[batch, key_length, head_dim]``, one key head.
        weights: ``[batch, query_length, heads]`` head weights of any sign, already multiplied with every
            scale.
        topk: number of keys to select per query, at least 1; the width of the result is
            ``min(topk, key_length)``.
        powers_of_two: whether factors are rounded up to powers of two (``ue8m0``). Otherwise the factor of a
            row is its largest magnitude / 448.
        starts: first visible key, as in :func:`lightning_indexer`.
        ends: one past the last visible key, as in :func:`lightning_indexer`.
        use_relu: whether the product of each head is clamped at zero.
        form: host-side description of the visible ranges, given with ``starts`` and ``ends`` or instead of
            them.
        cu_seqlens: ``[sequences + 1]`` int32, bounds of the whole batch's packed causal sequences, instead of
            ``starts``, ``ends`` and ``form``; see :meth:`.RowForm.of_cu_seqlens`.
        backend: name, see :data:`mindspeed_dsa.ops.backend.BackendName`.

    Returns:
        ``[batch, query_length, topk]`` int32, ascending key positions, -1 at the tail.

    Raises:
        ValueError: a shape, dtype or range does not fit.
        BackendUnavailable: the requested backend cannot take the call.

    Source: DeepSeek-V3.2-Exp, ``inference/kernel.py``, ``act_quant`` and ``fp8_index``.
    """
    check_operands(OPERATOR, query, key, weights)
    require(topk >= 1, OPERATOR, f"topk must be at least 1, got {topk}")
    head_dim = query.shape[3]
    require(
        head_dim <= MOST_DIMENSIONS, OPERATOR, f"head_dim must be at most {MOST_DIMENSIONS}, got {head_dim}"
    )
    (batch, query_length), key_length = query.shape[:2], key.shape[1]
    form = form_of(OPERATOR, cu_seqlens, form, batch, query_length, key_length, starts, ends)
    ranges = visible_ranges(OPERATOR, batch, query_length, key_length, starts, ends, query.device, form)
    if query.dtype == torch.float64:
        query, key = query.float(), key.float()
    implementation: Selector = choose(OPERATOR, backend, shape_class(query, topk))
    count_call(OPERATOR, implementation)
    topk = min(topk, key_length)
    if query.numel() == 0 or key_length == 0:
        return torch.empty(batch, query_length, topk, dtype=torch.int32, device=query.device)
    call = QuantisedCall(query, key, weights, use_relu, powers_of_two=powers_of_two)
    with spent(OPERATOR, query.device):
        return implementation.select(call, topk, ranges)
