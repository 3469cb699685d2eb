"""Compile all Triton kernels for a GPU that is not there, and say what the assembler makes of them.

    python -m tests.ops.compile_kernels [bf16 | fp16 | fp32 ...] [--capability 90] [--only KERNEL]

The operators run on meta tensors, so that kernels get the constants, tile sizes and alignments of real
calls, but launches stop after compilation. Prints one JSON object per kernel: bytes of shared memory,
registers per thread, bytes spilled to local memory, how often instructions of interest occur, and the numbers
of the assembler's advisories, which it gives where nothing comes from the compiler's cache.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from mindspeed_dsa.ops.grouped_matmul import Groups
from mindspeed_dsa.ops.grouped_matmul import triton as grouped
from mindspeed_dsa.ops.indexer_kl_loss import triton as kl_loss
from mindspeed_dsa.ops.lightning_indexer import triton as indexer
from mindspeed_dsa.ops.moe_permute import triton as permutation
from mindspeed_dsa.ops.sparse_flash_attention import triton as attention

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
ROWS, KEYS, TOPK = 64, 4096, 2048
_INSTRUCTIONS = {
    "wgmma": r"wgmma\.mma_async",
    "mma": r"\bmma\.sync",
    "async_copies": r"cp\.async\.c[ag]",
    "vector_atomics": r"\b(?:red|atom)\.[a-z0-9.]*v4\.f32",
}


class Absent:
    """What Triton asks of a driver before it launches."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


def compile_instead(capability: int, only: str | None, case: Any) -> None:
    """From now on launches compile for this GPU, and say what became of kernels not seen before.

    Args:
        capability: of the GPU, ten times its version.
        only: the kernel to compile, or None for all.
        case: called for the words that tell what is compiled.
    """
    driver.set_active(Absent(capability))
    knobs.nvidia.dump_ptxas_log = True
    launch, seen = JITFunction.run, set()

    def compile_only(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        if only not in (None, self.__name__):
            return None
        with contextlib.redirect_stdout(io.StringIO()) as log:
            kernel = launch(self, *args, grid=grid, warmup=True, **options)
        if kernel.hash not in seen:
            seen.add(kernel.hash)
            found = {"case": case(), "kernel": self.__name__, **_describe(kernel)}
            found["advisories"] = sorted(set(re.findall(r"\bC7\d{3}\b", log.getvalue())))
            print(json.dumps(found), flush=True)
        return kernel

    JITFunction.run = compile_only


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dtypes", nargs="*", default=[*DTYPES], help="of the operators' inputs")
    parser.add_argument("--capability", type=int, default=90, help="of the GPU, ten times its version")
    parser.add_argument("--only", help="the one kernel to compile")
    options = parser.parse_args()
    case = ""
    compile_instead(options.capability, options.only, lambda: case)
    for name in options.dtypes:
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
        case = f"{name}, 64 experts"
        run_permutation(dtype)
        run_grouped(dtype)


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


def run_backward(dtype: torch.dtype, heads: int, dim: int, value_dim: int) -> None:
    """The backward of the attention alone, without the sum for the loss."""
    query, key = _meta(1, ROWS, heads, dim, dtype=dtype), _meta(1, KEYS, dim, dtype=dtype)
    out, lse = _meta(1, ROWS, heads, value_dim, dtype=dtype), _meta(1, ROWS, heads, dtype=torch.float32)
    indices = _meta(1, ROWS, TOPK, dtype=torch.int32)
    attention.backward(out, query, key, indices, out, lse, 0.07, False)


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


def run_permutation(dtype: torch.dtype, hidden: int = 7168, experts: int = 64, topk: int = 8) -> None:
    """Every kernel of the permutation of tokens by expert, with probabilities in fp32."""
    tokens, routing_map = _meta(ROWS, hidden, dtype=dtype), _meta(ROWS, experts, dtype=torch.bool)
    probs, rows = _meta(ROWS, experts, dtype=torch.float32), ROWS * topk
    moved, moved_probs, row_map = permutation.permute(tokens, routing_map, probs, rows, topk)
    permutation.permute_gradients(moved, moved_probs, row_map, routing_map)
    permutation.unpermute(moved, row_map, ROWS, None, tokens)
    permutation.unpermute_gradients(tokens, row_map, rows, None, None)
    permutation.unpermute(moved, row_map, ROWS, probs, None)
    permutation.unpermute_gradients(tokens, row_map, rows, moved, probs)
    chunks = _meta(experts, dtype=torch.int64)
    permutation.sort_chunks([moved, moved_probs], chunks, chunks)


def run_grouped(dtype: torch.dtype, width_in: int = 2048, width_out: int = 1024, groups: int = 64) -> None:
    """The products of grouped experts in both layouts of their weights, and the weights' gradients."""
    rows, grad = _meta(ROWS, width_in, dtype=dtype), _meta(ROWS, width_out, dtype=dtype)
    weight = _meta(groups, width_in, width_out, dtype=dtype)
    by_group = Groups(_meta(groups, dtype=torch.int64))
    grouped.multiply(rows, weight, by_group)
    grouped.multiply(grad, weight.mT, by_group)
    for target in (torch.float32, dtype):
        into = _meta(groups, width_in, width_out, dtype=target)
        grouped.weight_gradient(rows, grad, by_group, into, accumulate=target == torch.float32)


if __name__ == "__main__":
    main()
