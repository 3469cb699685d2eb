"""DeepSeek Sparse Attention as a library: a stable interface, with or without Megatron.

Exports of this module keep their names, parameters and meaning within one major number of :data:`INTERFACE`.
A new parameter has a default and raises the minor number. Everything else below ``mindspeed_dsa.ops`` may
change with any release. docs/hosts/operators.md documents this interface.
"""

from mindspeed_dsa.ops.backend import BackendName, BackendUnavailable
from mindspeed_dsa.ops.checks import set_debug_checks
from mindspeed_dsa.ops.dsa.attention import DSAOutput, Stage, deepseek_sparse_attention
from mindspeed_dsa.ops.dsa.module import DeepSeekSparseAttention, Indexer, IndexerOperands
from mindspeed_dsa.ops.dsa.selections import keys_of_pools, with_window
from mindspeed_dsa.ops.indexer_kl_loss import (
    dense_indexer_kl_loss,
    divergence_and_score_gradient,
    indexer_kl_loss,
)
from mindspeed_dsa.ops.lightning_indexer import IndexerOutput, lightning_indexer, selected_scores
from mindspeed_dsa.ops.quantised_indexer import quantised_indexer
from mindspeed_dsa.ops.row_ranges import RowForm
from mindspeed_dsa.ops.sparse_flash_attention import SparseAttentionOutput, sparse_flash_attention
from mindspeed_dsa.ops.sparse_flash_attention.by_head import is_faster_by_head, sparse_attention_by_head

INTERFACE = (1, 3)
"""Major and minor number of this interface."""

__all__ = [
    "INTERFACE",
    "BackendName",
    "BackendUnavailable",
    "DSAOutput",
    "DeepSeekSparseAttention",
    "Indexer",
    "IndexerOperands",
    "IndexerOutput",
    "RowForm",
    "SparseAttentionOutput",
    "Stage",
    "deepseek_sparse_attention",
    "dense_indexer_kl_loss",
    "divergence_and_score_gradient",
    "indexer_kl_loss",
    "is_faster_by_head",
    "keys_of_pools",
    "lightning_indexer",
    "quantised_indexer",
    "selected_scores",
    "set_debug_checks",
    "sparse_attention_by_head",
    "sparse_flash_attention",
    "with_window",
]
