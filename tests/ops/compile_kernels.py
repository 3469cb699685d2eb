"""Compile all Triton kernels for Hopper without a GPU, and say what the assembler makes of them.

    python -m tests.ops.compile_kernels [bf16 | fp16 | fp32 ...]

The operators run on meta tensors, so that kernels get the constants, tile sizes and alignments of real
calls, but launches stop after compilation. Prints one JSON object per kernel: bytes of shared memory,
registers per thread, bytes spilled to local memory, and how often instructions of interest occur.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from mindspeed_dsa.ops.indexer_kl_loss import triton as kl_loss
from mindspeed_dsa.ops.lightning_indexer import triton as indexer
from mindspeed_dsa.ops.sparse_flash_attention import triton as attention

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
ROWS, KEYS, TOPK = 64, 4096, 2048
_INSTRUCTIONS = {
    "wgmma": r"wgmma\.mma_async",
    "mma": r"\bmma\.sync",
    "async_copies": r"cp\.async\.c[ag]",
    "vector_atomics": r"\b(?:red|atom)\.[a-z0-9.]*v4\.f32",
}


class Hopper:
    """What Triton asks of a driver before it launches."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


def main(names: list[str]) -> None:
    driver.set_active(Hopper())
    launch, seen = JITFunction.run, set()

    def compile_only(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = launch(self, *args, grid=grid, warmup=True, **options)
        if kernel.hash not in seen:
            seen.add(kernel.hash)
            print(json.dumps({"case": case, "kernel": self.__name__, **_describe(kernel)}), flush=True)
        return kernel

    JITFunction.run = compile_only
    for name in names or DTYPES:
        dtype = DTYPES[name]
        for heads in (1, 16, 32, 64, 128):
            for deterministic in (False, True):
                torch.use_deterministic_algorithms(deterministic)
                case = f"{name}, {heads} heads" + (", deterministic" if deterministic else "")
                run_attention(dtype, heads, 576, 512)
        case = f"{name}, 16 heads, no rope"
        run_attention(dtype, 16, 128, 128)
        for heads, dim in ((64, 128), (32, 128), (8, 64), (128, 256)):
            for deterministic in (False, True):
                torch.use_deterministic_algorithms(deterministic)
                case = f"{name}, {heads} x {dim}" + (", deterministic" if deterministic else "")
                run_indexer(dtype, heads, dim)
        for heads, dim, shared in ((128, 576, True), (16, 192, False), (16, 576, False)):
            case = f"{name}, {heads} heads, {dim} {'shared' if shared else 'per head'}"
            run_loss(dtype, heads, dim, shared)


def _describe(kernel: Any) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(kernel.asm["cubin"])
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        command = [tool, "--dump-resource-usage", path]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    # The kernels declare no arrays of their own: what lies on the stack did not fit into registers.
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage
    return {
        "shared": kernel.metadata.shared,
        "registers": int(found[1]),
        "spilled": int(found[2]),
        "warps": kernel.metadata.num_warps,
        **{name: len(re.findall(pattern, kernel.asm["ptx"])) for name, pattern in _INSTRUCTIONS.items()},
    }


def _meta(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def run_attention(dtype: torch.dtype, heads: int, dim: int, value_dim: int) -> None:
    query, key = _meta(1, ROWS, heads, dim, dtype=dtype), _meta(1, KEYS, dim, dtype=dtype)
    indices = _meta(1, ROWS, TOPK, dtype=torch.int32)
    out, lse, _ = attention.forward(query, key, indices, 0.07, value_dim, True)
    for with_sum in (True, False):
        attention.backward(out, query, key, indices, out, lse, 0.07, with_sum)


def _index_inputs(dtype: torch.dtype, heads: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    query, key = _meta(1, ROWS, heads, dim, dtype=dtype), _meta(1, KEYS, dim, dtype=dtype)
    return query, key, _meta(1, ROWS, heads, dtype=dtype)


def run_indexer(dtype: torch.dtype, heads: int, dim: int) -> None:
    inputs = _index_inputs(dtype, heads, dim)
    bound = _meta(1, ROWS, dtype=torch.int32)
    for use_relu in (True, False):
        indices, scores = indexer.select(*inputs, TOPK, bound, bound, use_relu)
        indexer.scores_at(*inputs, indices, use_relu)
        indexer.score_gradients(scores, *inputs, indices, use_relu)


def run_loss(dtype: torch.dtype, heads: int, dim: int, shared: bool) -> None:
    query = _meta(1, ROWS, heads, dim, dtype=dtype)
    key = _meta(1, KEYS, *(() if shared else (heads,)), dim, dtype=dtype)
    bound, weights = _meta(1, ROWS, dtype=torch.int32), _meta(1, ROWS, dtype=torch.float32)
    inputs = _index_inputs(dtype, 64, 128)
    kl_loss.dense_loss_and_gradients(*inputs, query, key, 0.07, bound, bound, weights, None, True, True)
    if shared:
        kl_loss.attention_sum(query, key, _meta(1, ROWS, TOPK, dtype=torch.int32), None, 0.07)
        entries = [_meta(1, ROWS, TOPK, dtype=kind) for kind in (torch.float32, torch.float32, torch.bool)]
        kl_loss.divergence_and_gradient(*entries, weights, True)


if __name__ == "__main__":
    main(sys.argv[1:])
