"""The operators of torch_npu that this package calls, and the releases that have them first.

The first releases are those of torch_npu's branches (op-plugin's branches have the same names), with the CANN
that the vendor's table pairs with each. Tests hold them against the schemas in published wheels. Importing
this loads no torch.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Release:
    """A release of Ascend's extension, which is built for several releases of PyTorch."""

    cann: str
    torch_npu: tuple[str, ...]
    """Its first wheel for each PyTorch."""

    def __str__(self) -> str:
        *most, last = self.torch_npu
        wheels = f"{', '.join(most)} or {last}" if most else last
        return f"torch_npu {wheels} with CANN {self.cann}, or newer ones"


V7_1 = Release("8.2.RC1", ("2.6.0",))
V7_2 = Release("8.3.RC1", ("2.6.0.post3", "2.7.1", "2.8.0"))
V7_3 = Release("8.5.0", ("2.6.0.post5", "2.7.1.post2", "2.8.0.post2", "2.9.0"))
V26_0 = Release("9.0.0", ("2.7.1.post4", "2.8.0.post4", "2.9.0.post2", "2.10.0"))


@dataclass(frozen=True)
class Operator:
    """One operator."""

    name: str
    part: str
    """Callers, for pages."""
    since: Release
    symbols: tuple[str, ...] = ()
    """Functions of CANN's operator library of which torch_npu calls one, whichever is there; empty where
    torch_npu has another way for a CANN without them."""


_INDEXER, _ATTENTION = "Lightning Indexer", "sparse flash attention"
_LOSS, _DENSE_LOSS = "indexer loss, sparse", "indexer loss, dense (warm-up)"
_EXPERTS, _PERMUTE, _LINEAR = "grouped experts", "permutation of tokens", "tensor parallel linear layers"

OPERATORS: tuple[Operator, ...] = (
    Operator("npu_lightning_indexer", _INDEXER, V7_3, ("aclnnLightningIndexer",)),
    Operator("npu_lightning_indexer_grad", _INDEXER, V7_3, ("aclnnLightningIndexerGrad",)),
    Operator(
        "npu_sparse_flash_attention",
        _ATTENTION,
        V7_3,
        ("aclnnSparseFlashAttention", "aclnnSparseFlashAttentionV2"),
    ),
    Operator("npu_sparse_flash_attention_grad", _ATTENTION, V7_3, ("aclnnSparseFlashAttentionGrad",)),
    Operator(
        "npu_sparse_lightning_indexer_grad_kl_loss",
        _LOSS,
        V7_3,
        ("aclnnSparseLightningIndexerGradKLLoss", "aclnnSparseLightningIndexerGradKLLossV2"),
    ),
    Operator(
        "npu_dense_lightning_indexer_softmax_lse",
        _DENSE_LOSS,
        V26_0,
        ("aclnnDenseLightningIndexerSoftmaxLse",),
    ),
    Operator(
        "npu_dense_lightning_indexer_grad_kl_loss",
        _DENSE_LOSS,
        V26_0,
        ("aclnnDenseLightningIndexerGradKLLoss",),
    ),
    Operator("npu_fusion_attention", "dense attention", V7_1),
    Operator("npu_fusion_attention_grad", "dense attention", V7_1),
    Operator(
        "npu_grouped_matmul",
        _EXPERTS,
        V7_1,
        ("aclnnGroupedMatmul", "aclnnGroupedMatmulV4", "aclnnGroupedMatmulV5"),
    ),
    Operator(
        "npu_grouped_matmul_add_",
        "grouped experts, weight gradients of linear layers",
        V7_1,
        ("aclnnGroupedMatmulAdd", "aclnnGroupedMatmulAddV2"),
    ),
    Operator(
        "npu_moe_token_permute_with_routing_map", _PERMUTE, V7_2, ("aclnnMoeTokenPermuteWithRoutingMap",)
    ),
    Operator(
        "npu_moe_token_permute_with_routing_map_grad",
        _PERMUTE,
        V7_2,
        ("aclnnMoeTokenPermuteWithRoutingMapGrad",),
    ),
    Operator(
        "npu_moe_finalize_routing",
        _PERMUTE,
        V7_1,
        ("aclnnMoeFinalizeRouting", "aclnnMoeFinalizeRoutingV2", "aclnnMoeFinalizeRoutingV4"),
    ),
    Operator("npu_all_gather_base_mm", _LINEAR, V7_1, ("aclnnAllGatherMatmul", "aclnnAllGatherMatmulV2")),
    Operator(
        "npu_mm_reduce_scatter_base",
        _LINEAR,
        V7_1,
        ("aclnnMatmulReduceScatter", "aclnnMatmulReduceScatterV2"),
    ),
    Operator("npu_rms_norm", "RMSNorm", V7_1),
    Operator("npu_rms_norm_backward", "RMSNorm", V7_1),
    Operator("npu_swiglu", "SwiGLU", V7_1),
    Operator("npu_swiglu_backward", "SwiGLU", V7_1),
    Operator("npu_rotary_mul", "rotary embedding", V7_1),
    Operator("npu_apply_adam_w", "virtual optimizer", V7_1),
    Operator("empty_with_swapped_memory", "virtual optimizer", V7_1),
)

BY_NAME: dict[str, Operator] = {operator.name: operator for operator in OPERATORS}


def needs(name: str) -> str:
    """Which releases have an operator, for messages."""
    operator = BY_NAME.get(name)
    return f"{name} needs {operator.since}" if operator else f"no release of torch_npu has {name}"
