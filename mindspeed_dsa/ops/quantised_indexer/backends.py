"""FP8 key selection in plain PyTorch: a reference with all scores in memory, and slabs of rows.

The fast backends are in ``cpu.py`` and ``triton.py``.
"""

from __future__ import annotations

from torch import Tensor

from mindspeed_dsa.ops.backend import Backend, ShapeClass
from mindspeed_dsa.ops.lightning_indexer import chunked
from mindspeed_dsa.ops.lightning_indexer.reference import best_keys
from mindspeed_dsa.ops.quantised_indexer.arithmetic import QuantisedCall, exact_scores, quantise
from mindspeed_dsa.ops.row_ranges import Ranges

ON_NPUS = (
    "torch_npu's npu_quant_lightning_indexer takes int8 with factors in fp16 or, on Ascend 950, e4m3 that it "
    "sums in an order that is not documented, and NPUs have no fp64 to form exact sums in"
)
"""Reason why NPUs have no backend."""


class _InFp64(Backend):
    """Backend with exact dot products in fp64; declines devices without fp64."""

    def unsupported(self, shape: ShapeClass) -> str | None:
        """Return why the backend cannot take calls of this shape, or None."""
        return ON_NPUS if shape.device == "npu" else None


class Reference(_InFp64):
    """Backend that computes all scores at once and sorts them stably."""

    def select(self, call: QuantisedCall, topk: int, ranges: Ranges) -> Tensor:
        """Return the selected keys of each query, ``[batch, query_length, topk]`` int32."""
        query, of_query = quantise(call.query, call.powers_of_two)
        key, of_key = quantise(call.key, call.powers_of_two)
        weights = call.weights.float() * of_query
        return best_keys(exact_scores(query, key, weights, of_key, call.use_relu), topk, ranges)


class Chunked(_InFp64):
    """Backend that computes the reference's selection in slabs of rows of bounded size."""

    def select(self, call: QuantisedCall, topk: int, ranges: Ranges) -> Tensor:
        """Return the selected keys of each query, ``[batch, query_length, topk]`` int32."""
        key, of_key = quantise(call.key, call.powers_of_two)

        def score(b: int, rows: slice) -> Tensor:
            query, of_query = quantise(call.query[b, rows], call.powers_of_two)
            weights = call.weights[b, rows].float() * of_query
            return exact_scores(query, key[b], weights, of_key[b], call.use_relu)

        return chunked.select_by(call, topk, ranges, score)[0]
