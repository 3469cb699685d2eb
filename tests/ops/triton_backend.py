"""The Triton backends, imported so that their kernels run in Triton's interpreter on the CPU.

With TRITON_INTERPRET=0 they are compiled and run on the GPU; the tests stay the same.
"""

from __future__ import annotations

import os

import pytest

pytest.importorskip("triton", reason="triton is not installed; it comes with the extra 'test' on Linux")

_before = os.environ.get("TRITON_INTERPRET")
os.environ.setdefault("TRITON_INTERPRET", "1")
from mindspeed_dsa.ops.grouped_matmul import triton as grouped  # noqa: E402
from mindspeed_dsa.ops.indexer_kl_loss import triton as kl_loss  # noqa: E402
from mindspeed_dsa.ops.lightning_indexer import triton as indexer  # noqa: E402
from mindspeed_dsa.ops.moe_permute import triton as permutation  # noqa: E402
from mindspeed_dsa.ops.quantised_indexer import triton as quantised  # noqa: E402
from mindspeed_dsa.ops.sparse_flash_attention import hopper, shared_tiles  # noqa: E402
from mindspeed_dsa.ops.sparse_flash_attention import triton as attention  # noqa: E402
from mindspeed_dsa.ops.triton import common  # noqa: E402

if _before is None:
    del os.environ["TRITON_INTERPRET"]

DEVICE = "cpu" if common.interpreted() else "cuda"

__all__ = [
    "DEVICE",
    "attention",
    "common",
    "grouped",
    "hopper",
    "indexer",
    "kl_loss",
    "permutation",
    "quantised",
    "shared_tiles",
]
