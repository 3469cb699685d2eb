"""Every kernel, compiled for Hopper by the assembler that comes with Triton; needs no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed; it comes with the extra 'test' on Linux")

# What one multiprocessor of compute capability 9.0 grants a program.
SHARED_MEMORY = 227 * 1024
# Bytes per thread. Some spilling costs little; accumulators that do not stay in registers cost thousands.
SPILLED = {"bf16": 768, "fp16": 768, "fp32": 1536}


def compiled(folder, *command, timeout):
    """What the compiler made of kernels, compiled in a process of its own and found in no cache."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(folder), "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        env=environment,
        cwd=Path(__file__).parents[2],
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_the_hottest_kernel_overlaps_its_products(tmp_path):
    """The assembler says C7515 and the like where it lets the tensor cores do one product at a time."""
    code = (
        "import torch; from tests.ops import compile_kernels as ck; "
        "ck.compile_instead(90, 'backward_keys_kernel', str); ck.run_backward(torch.bfloat16, 128, 576, 512)"
    )
    (kernel,) = compiled(tmp_path, "-c", code, timeout=150)
    assert kernel["wgmma"] == 44
    assert kernel["advisories"] == []


def test_kernels_of_the_permutation_stay_in_registers(tmp_path):
    code = (
        "import torch; from tests.ops import compile_kernels as ck; "
        "ck.compile_instead(90, None, str); ck.run_permutation(torch.bfloat16)"
    )
    found = compiled(tmp_path, "-c", code, timeout=150)
    assert {kernel["kernel"] for kernel in found} == {
        "list_rows_kernel",
        "gather_kernel",
        "add_up_kernel",
        "weighted_gather_kernel",
        "scatter_probs_kernel",
    }
    assert all(kernel["spilled"] == 0 and kernel["advisories"] == [] for kernel in found), found


def test_kernels_of_grouped_experts_run_on_the_tensor_cores(tmp_path):
    """Both layouts of the weights, and weight gradients added in fp32 or written as they are."""
    code = (
        "import torch; from tests.ops import compile_kernels as ck; "
        "ck.compile_instead(90, None, str); ck.run_grouped(torch.bfloat16)"
    )
    found = compiled(tmp_path, "-c", code, timeout=150)
    assert [kernel["kernel"] for kernel in found] == ["multiply_kernel"] * 2 + ["weight_gradient_kernel"] * 2
    for kernel in found:
        assert kernel["spilled"] == 0, kernel
        assert kernel["advisories"] == [], kernel
        assert kernel["wgmma"] > 0, kernel
        assert kernel["async_copies"] > 0, kernel


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_kernels_fit_a_hopper_gpu(dtype, tmp_path):
    found = compiled(tmp_path, "-m", "tests.ops.compile_kernels", dtype, timeout=580)
    for kernel in found:
        assert kernel["advisories"] == [], kernel
        assert kernel["shared"] <= SHARED_MEMORY, kernel
        assert kernel["spilled"] <= SPILLED[dtype], kernel
    names = {kernel["kernel"] for kernel in found}
    assert len(names) == 22, names
    if dtype == "fp32":
        return

    def all_of(name, heads=""):
        chosen = [k for k in found if k["kernel"] == name and heads in k["case"]]
        assert chosen, name
        return chosen

    # With 64 heads and more the products run on the warp group instructions, fed by asynchronous copies.
    for name, heads in (
        ("forward_kernel", "64 heads"),
        ("attention_sum_kernel", "32 heads"),
        ("backward_keys_kernel", "32 heads"),
        ("backward_query_kernel", "64 heads"),
        ("score_slab_kernel", "64 x 128"),
        ("score_gradients_kernel", "64 x 128"),
        ("dense_lse_kernel", ""),
        ("dense_sum_kernel", ""),
    ):
        assert all(kernel["wgmma"] > 0 for kernel in all_of(name, heads)), name
    for name in ("forward_kernel", "backward_query_kernel", "score_slab_kernel", "score_gradients_kernel"):
        assert all(kernel["async_copies"] > 0 for kernel in all_of(name)), name
    # Neither warp group repeats the work of the other: 32 + 4 products of 16 numbers per tile of scores.
    (forward,) = all_of("forward_kernel", "64 heads")
    assert forward["wgmma"] == 32 + 4 + 4
    # Gradients of keys are added four at a time.
    for name in ("backward_keys_kernel", "score_gradients_kernel"):
        atomics = [k for k in all_of(name) if "deterministic" not in k["case"] and "rope" not in k["case"]]
        assert sum(kernel["vector_atomics"] > 0 for kernel in atomics) >= 4, name
