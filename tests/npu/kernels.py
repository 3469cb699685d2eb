"""CPU kernels of torch_npu's operators, written from the manuals and not from our backend.

They are registered under the real operators. A call first goes through the schemas of other releases
(``schemas.py``) and through torch_npu's own; its result is compared with torch_npu's meta kernel. Documented
limits raise. Like the device's kernels, these take the first ``min(topk, visible)`` entries of a row of
indices; a -1 among them raises here.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor

from tests.npu import (
    attention_kernels,
    collective_kernels,
    dense_kernels,
    grouped_kernels,
    loss_kernels,
    permutation_kernels,
    schemas,
    small_kernels,
)

_library: torch.library.Library | None = None
called: list[str] = []
"""Operators that our code has called, through either of their names."""


def register() -> None:
    """Register the kernels behind torch_npu's operators, once per process."""
    global _library, called
    if _library is not None:
        return
    import torch_npu  # noqa: F401

    _library = torch.library.Library("npu", "IMPL")
    for kernel in (
        attention_kernels.npu_lightning_indexer,
        attention_kernels.npu_lightning_indexer_grad,
        attention_kernels.npu_sparse_flash_attention,
        attention_kernels.npu_sparse_flash_attention_grad,
        loss_kernels.npu_sparse_lightning_indexer_grad_kl_loss,
        loss_kernels.npu_dense_lightning_indexer_softmax_lse,
        loss_kernels.npu_dense_lightning_indexer_grad_kl_loss,
        dense_kernels.npu_fusion_attention,
        dense_kernels.npu_fusion_attention_grad,
        collective_kernels.npu_all_gather_base_mm,
        collective_kernels.npu_mm_reduce_scatter_base,
        grouped_kernels.npu_grouped_matmul,
        grouped_kernels.npu_grouped_matmul_add_,
        permutation_kernels.npu_moe_token_permute_with_routing_map,
        permutation_kernels.npu_moe_token_permute_with_routing_map_grad,
        permutation_kernels.npu_moe_finalize_routing,
        small_kernels.npu_rms_norm,
        small_kernels.npu_rms_norm_backward,
        small_kernels.npu_swiglu,
        small_kernels.npu_swiglu_backward,
        small_kernels.npu_rotary_mul,
    ):
        _library.impl(kernel.__name__, _held_against_meta(kernel), "CPU")
    for kernel in (
        # torch_npu's shape functions assume other layouts, and the gradient's does not run.
        dense_kernels.npu_fusion_attention_v2,
        dense_kernels.npu_fusion_attention_grad_v2,
    ):
        _library.impl(kernel.__name__, kernel, "CPU")
    called = schemas.hold_calls()


def torch_npu_is(release: str) -> bool:
    """Return whether torch_npu is of this release or later, or not installed."""
    # Without torch_npu, tests are collected and then left out.
    return find_spec("torch_npu") is None or Version(version("torch_npu")) >= Version(release)


def _held_against_meta(kernel: Callable[..., Any]) -> Callable[..., Any]:
    operator = getattr(torch.ops.npu, kernel.__name__)
    if operator is torch.ops.npu.npu_fusion_attention and not torch_npu_is("2.10"):
        return kernel  # its shape function assumes values as wide as queries; the operator does not

    def run(*args: Any, **kwargs: Any) -> Any:
        results = kernel(*args, **kwargs)
        to_meta = torch.utils._pytree.tree_map_only(Tensor, lambda x: x.to("meta"), (args, kwargs))
        try:
            expected = operator(*to_meta[0], **to_meta[1])
        except RuntimeError as error:
            if "not support pytorch compile" not in str(error):
                raise
            return results  # torch_npu 2.9 has no shapes of scores and statistics
        each = [(one,) if isinstance(one, Tensor) else one for one in (results, expected)]
        facts = [[(tuple(x.shape), x.dtype) if isinstance(x, Tensor) else x for x in one] for one in each]
        assert facts[0] == facts[1], f"{kernel.__name__}: {facts[0]}, by torch_npu's meta kernel {facts[1]}"
        return results

    return run
