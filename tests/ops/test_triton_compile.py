"""Every kernel, compiled for GPUs that are not there, stays within its budgets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed; it comes with the extra 'test' on Linux")

from benchmarks.kernels.compiled import Kernel
from tests.ops import compile_kernels

HOPPER_KERNELS = {
    *("hopper_forward_kernel", "hopper_few_heads_forward_kernel", "hopper_attention_sum_kernel"),
    "hopper_backward_keys_kernel",
}
KERNELS = {
    *("row_lengths_kernel", "add_rows_by_key_kernel"),
    *("forward_kernel", "attention_sum_kernel", "delta_kernel"),
    *HOPPER_KERNELS,
    *("backward_keys_kernel", "backward_query_kernel"),
    *("score_slab_kernel", "select_kernel", "scores_at_kernel", "score_gradients_kernel"),
    *("divergence_kernel", "dense_lse_kernel", "dense_sum_kernel", "dense_key_gradient_kernel"),
    *("list_rows_kernel", "gather_kernel", "add_up_kernel", "weighted_gather_kernel", "scatter_probs_kernel"),
    *("multiply_kernel", "weight_gradient_kernel"),
}
GOOD = Kernel(
    target=90,
    name="forward_kernel",
    constants={"BLOCK_H": 64, "BLOCK_N": 64},
    shared=230144,
    registers=255,
    spilled=0,
    warps=8,
    waits=3,
    wgmma=40,
    tcgen05=0,
    mma=0,
    async_copies=44,
    vector_atomics=0,
    products={"n32k16 from memory": 8},
    advisories=[],
)
BUDGET = {"spilled": 36, "waits": 0.1}


@pytest.fixture
def compile_cases(request, tmp_path):
    """What the check says of kernels, compiled in another process and kept where pytest keeps things."""
    keeper = getattr(request.config, "cache", None)
    folder = keeper.mkdir("kernels") if keeper is not None else tmp_path

    def run(*options, timeout=280):
        done = subprocess.run(
            [sys.executable, "-m", "tests.ops.compile_kernels", *options],
            capture_output=True,
            text=True,
            env={**os.environ, "TRITON_CACHE_DIR": str(folder), "TRITON_INTERPRET": "0"},
            cwd=Path(__file__).parents[2],
            timeout=timeout,
        )
        found = [json.loads(line) for line in done.stdout.splitlines()]
        wrong = [(k["name"], k["case"], k["problems"]) for k in found if k["problems"]]
        assert not wrong, wrong
        assert done.returncode == 0, done.stderr[-3000:]
        return found

    return run


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"advisories": ["C7510"]}, "its products run one at a time (C7510)"),
        ({"advisories": ["C7515"]}, "its products run one at a time (C7515)"),
        ({"shared": 232449}, "it needs 232449 bytes of shared memory, and there are 232448"),
        ({"target": 120}, "it needs 230144 bytes of shared memory, and there are 101376"),
        ({"spilled": 76}, "it spills 76 bytes, and 36 are budgeted"),
        ({"waits": 40}, "it waits 1.00 times for each product, and 0.10 are budgeted"),
        ({"mma": 128}, "128 of its products are of single warps, and its tiles allow warp groups"),
        ({"wgmma": 0, "waits": 0}, "0 of its products are of single warps, and its tiles allow warp groups"),
    ],
)
def test_what_the_check_finds(changes, problem):
    assert compile_kernels.problems(GOOD, "bf16", BUDGET) == []
    assert compile_kernels.problems(replace(GOOD, **changes), "bf16", BUDGET) == [problem]


def test_what_the_check_lets_pass():
    """Small tiles have no warp groups, nor have other targets; fp32 has no half precision to multiply in."""
    on_warps = replace(GOOD, wgmma=0, waits=0, mma=68, shared=56704)
    assert compile_kernels.problems(replace(on_warps, constants={"BLOCK_H": 32}), "bf16", None) == []
    assert compile_kernels.problems(replace(on_warps, target=120), "bf16", None) == []
    assert compile_kernels.problems(on_warps, "fp32", None) == []
    assert compile_kernels.problems(on_warps, "fp16", None) != []


@pytest.mark.timeout(300)
def test_each_kernel_keeps_its_budget_on_hopper(compile_cases):
    """One case of each."""
    found = compile_cases("--target", "90", "--dtype", "bf16", "--quick")
    assert {kernel["name"] for kernel in found} == KERNELS - {"add_rows_by_key_kernel"}
    # Gradients of keys are added four at a time.
    for name in ("backward_keys_kernel", "hopper_backward_keys_kernel", "score_gradients_kernel"):
        assert any(kernel["vector_atomics"] > 0 for kernel in found if kernel["name"] == name), name


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("target", "dtype"),
    [
        *((90, dtype) for dtype in ("bf16", "fp16", "fp32")),
        *((target, "bf16") for target in (80, 100, 120)),
    ],
)
def test_all_kernels_keep_their_budgets(compile_cases, target, dtype):
    found = compile_cases("--target", str(target), "--dtype", dtype, timeout=1780)
    elsewhere = target != 90 or dtype == "fp32"
    assert {kernel["name"] for kernel in found} == KERNELS - (HOPPER_KERNELS if elsewhere else set())
    if elsewhere:
        return
    # Neither warp group repeats the work of the other: 32 + 4 products of 16 numbers per tile of scores.
    forward = [k for k in found if k["name"] == "forward_kernel" and k["constants"]["BLOCK_H"] == 64]
    assert {kernel["wgmma"] for kernel in forward if kernel["constants"]["WITH_OUT"]} == {32 + 4 + 4}
