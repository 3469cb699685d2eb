"""Operators of torch_npu that this package calls, with the first releases that have them, and product limits.

A release is given as torch_npu's branch (op-plugin's branches have the same names) and the CANN release that
the vendor's table pairs with it. Tests compare the operators with the schemas in published wheels. Limits
that differ between Ascend products are from the operators' manuals. Importing this module does not import
torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_dsa.platforms.npu_releases import V7_1, V7_2, V7_3, V26_0, Release


@dataclass(frozen=True)
class Operator:
    """Operator of torch_npu, with the first releases of torch_npu and CANN that have it."""

    name: str
    part: str
    """Features or layers that call it, for pages."""
    since: Release
    symbols: tuple[str, ...] = ()
    """Functions of CANN's operator library. torch_npu calls whichever is present. Empty if it has a fallback
    for a CANN without them."""


_INDEXER, _ATTENTION = "Lightning Indexer", "sparse flash attention"
_DENSE_PARTS = "dense latent attention"
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
        "npu_fusion_attention_v2",
        _DENSE_PARTS,
        V7_1,
        ("aclnnFlashAttentionVarLenScoreV3", "aclnnFlashAttentionScoreV4"),
    ),
    Operator(
        "npu_fusion_attention_grad_v2",
        _DENSE_PARTS,
        V7_1,
        ("aclnnFlashAttentionUnpaddingScoreGradV3", "aclnnFlashAttentionScoreGradV4"),
    ),
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
    """Return the releases that have an operator, for messages."""
    operator = BY_NAME.get(name)
    return f"{name} needs {operator.since}" if operator else f"no release of torch_npu has {name}"


INDEXER_GRADIENT_HEADS, INDEXER_GRADIENT_TOPK = 64, 2048
"""The only sizes that ``npu_lightning_indexer_grad`` supports, in all CANN releases that have it."""


@dataclass(frozen=True)
class Product:
    """Family of devices with the same limits."""

    name: str
    devices: tuple[str, ...]
    """Prefixes of ``torch.npu.get_device_name()``."""
    indexer_heads: tuple[int, ...]
    """Head counts that ``npu_lightning_indexer`` supports."""
    indexer_gradient: bool
    """Whether ``npu_lightning_indexer_grad`` is supported."""
    loss_index_heads: tuple[int, ...]
    """Index head counts that ``npu_sparse_lightning_indexer_grad_kl_loss`` supports."""
    loss_sequences: int
    """Largest number of sequences in one call of that operator."""
    fused_ranks: tuple[int, ...]
    """Group sizes that MC2's operators support."""
    norm_weight_in_fp32: bool
    """Whether ``npu_rms_norm`` takes an fp32 weight with a 16-bit input."""

    def limits(self) -> dict[str, str]:
        """Return a dict from limit to its value in words, for ``doctor``."""
        heads = self.indexer_heads
        whole = heads == tuple(range(1, heads[-1] + 1))
        fused = f"fused for {INDEXER_GRADIENT_HEADS} heads and topk {INDEXER_GRADIENT_TOPK}"
        return {
            "indexer heads": f"up to {heads[-1]}" if whole else ", ".join(map(str, heads)),
            "indexer gradient": f"{fused}, else PyTorch in chunks"
            if self.indexer_gradient
            else "PyTorch in chunks",
            "index heads of the sparse loss": ", ".join(map(str, self.loss_index_heads)),
            "sequences of the sparse loss": f"up to {self.loss_sequences}",
            "tensor parallel ranks of MC2": ", ".join(map(str, self.fused_ranks)),
            "fp32 weight of a 16-bit RMSNorm": "fused" if self.norm_weight_in_fp32 else "PyTorch",
        }


A2 = Product(
    "Atlas A2",
    ("Ascend910B",),
    indexer_heads=tuple(range(1, 65)),
    indexer_gradient=True,
    loss_index_heads=(8, 16, 32, 64),
    loss_sequences=256,
    fused_ranks=(2, 4, 8),
    norm_weight_in_fp32=True,
)
A3 = Product(
    "Atlas A3",
    ("Ascend910_93",),
    indexer_heads=A2.indexer_heads,
    indexer_gradient=True,
    loss_index_heads=A2.loss_index_heads,
    loss_sequences=256,
    fused_ranks=(2, 4, 8, 16, 32),
    norm_weight_in_fp32=True,
)
A950 = Product(
    "Ascend 950",
    ("Ascend950",),
    indexer_heads=(8, 16, 24, 32, 64),
    indexer_gradient=False,
    loss_index_heads=(32, 64),
    loss_sequences=128,
    # No known manual states group sizes for it.
    fused_ranks=A2.fused_ranks,
    norm_weight_in_fp32=False,
)
PRODUCTS = (A2, A3, A950)


def _in_all(field: str) -> tuple[int, ...]:
    first, *others = (getattr(product, field) for product in PRODUCTS)
    return tuple(size for size in first if all(size in other for other in others))


# The intersection of all limits, so that it is safe on every known product.
UNKNOWN = Product(
    "unknown product",
    (),
    indexer_heads=_in_all("indexer_heads"),
    indexer_gradient=all(product.indexer_gradient for product in PRODUCTS),
    loss_index_heads=_in_all("loss_index_heads"),
    loss_sequences=min(product.loss_sequences for product in PRODUCTS),
    fused_ranks=_in_all("fused_ranks"),
    norm_weight_in_fp32=all(product.norm_weight_in_fp32 for product in PRODUCTS),
)


def product_of(device_name: str) -> Product:
    """Return the product family of a device; for unknown names :data:`UNKNOWN`, with the narrowest limits.

    Args:
        device_name: result of ``torch.npu.get_device_name()``, such as ``"Ascend910B3"``.
    """
    return next((product for product in PRODUCTS if device_name.startswith(product.devices)), UNKNOWN)
