"""Limits of torch_npu's operators that differ between Ascend's products, in one table.

From the operators' manuals. A device tells its product by its name; one that is not in the table gets the
narrowest limits. Importing this loads no torch.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Product:
    """A family of devices for which one set of limits holds."""

    name: str
    devices: tuple[str, ...]
    """Beginnings of what ``torch.npu.get_device_name()`` says."""
    indexer_heads: tuple[int, ...]
    """Heads that ``npu_lightning_indexer`` takes."""
    indexer_gradient: bool
    """Whether ``npu_lightning_indexer_grad`` runs."""
    loss_index_heads: tuple[int, ...]
    """Index heads that ``npu_sparse_lightning_indexer_grad_kl_loss`` takes."""
    loss_sequences: int
    """Sequences of one call of it."""
    fused_ranks: tuple[int, ...]
    """Ranks of a group of MC2's operators."""
    norm_weight_in_fp32: bool
    """Whether ``npu_rms_norm`` takes a weight in fp32 beside an input in 16 bits."""

    def limits(self) -> dict[str, str]:
        """Return the lines that ``doctor`` prints."""
        heads = self.indexer_heads
        whole = heads == tuple(range(1, heads[-1] + 1))
        return {
            "indexer heads": f"up to {heads[-1]}" if whole else ", ".join(map(str, heads)),
            "indexer gradient": "fused" if self.indexer_gradient else "PyTorch in chunks",
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
    # No manual seen names ranks for it.
    fused_ranks=A2.fused_ranks,
    norm_weight_in_fp32=False,
)
PRODUCTS = (A2, A3, A950)


def _in_all(field: str) -> tuple[int, ...]:
    first, *others = (getattr(product, field) for product in PRODUCTS)
    return tuple(each for each in first if all(each in other for other in others))


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
    """The product of a device, or :data:`UNKNOWN` with its narrowest limits.

    Args:
        device_name: what ``torch.npu.get_device_name()`` says, such as ``"Ascend910B3"``.
    """
    return next((product for product in PRODUCTS if device_name.startswith(product.devices)), UNKNOWN)
