"""Every kernel, compiled for GPUs that need not be present, stays within its budgets."""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed; it comes with the extra 'test' on Linux")

from benchmarks.kernels.compiled import Kernel
from tests.ops import compile_kernels
from tests.support import warm

ROOT = Path(__file__).parents[2]
(BUDGETED,) = re.findall(r"^TRITON := (\S+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
"""Triton release for which the budgets are valid."""
HOPPER_KERNELS = {
    *("hopper_forward_kernel", "hopper_few_heads_forward_kernel", "hopper_attention_sum_kernel"),
    *(
        "hopper_backward_rows_kernel",
        "hopper_backward_few_heads_kernel",
        "hopper_backward_keys_kernel",
        "find_shared_kernel",
        "reorder_kernel",
        "list_tasks_kernel",
    ),
}
KERNELS = {
    *("row_lengths_kernel", "add_rows_by_key_kernel"),
    *("forward_kernel", "attention_sum_kernel", "delta_kernel"),
    *HOPPER_KERNELS,
    *("backward_keys_kernel", "backward_query_kernel"),
    *("score_slab_kernel", "select_kernel", "scores_at_kernel", "score_gradients_kernel"),
    "quantise_kernel",
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


@pytest.fixture(scope="module")
def compile_cases(request, tmp_path_factory):
    """Return a function that compiles kernels in another process, with a cache in pytest's folder."""
    if (installed := version("triton")) != BUDGETED:
        pytest.skip(f"budgets are those of Triton {BUDGETED}, and {installed} is installed")
    keeper = getattr(request.config, "cache", None)
    folder = keeper.mkdir("kernels") if keeper is not None else tmp_path_factory.mktemp("kernels")

    def run(*options, timeout=280):
        done = warm.run(
            [sys.executable, "-m", "tests.ops.compile_kernels", *options],
            env={**os.environ, "TRITON_CACHE_DIR": str(folder), "TRITON_INTERPRET": "0"},
            cwd=ROOT,
            timeout=timeout,
        )
        kernels = [json.loads(line) for line in done.stdout.splitlines()]
        wrong = any(kernel["problems"] for kernel in kernels)
        assert done.returncode == int(wrong), done.stderr[-3000:]
        return kernels

    return run


ONE_OF_EACH = ("--target", "90", "--dtype", "bf16", "--quick")


@pytest.fixture(scope="module")
def on_hopper(compile_cases):
    """Return one case per kernel, by name; recorded kernels are not compiled again."""
    cases = {}
    for kernel in compile_cases(*ONE_OF_EACH, "--recorded"):
        cases.setdefault(kernel["name"], []).append(kernel)
    return cases


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


def test_forms_in_a_fixed_order_have_a_budget_of_their_own(monkeypatch):
    form = replace(GOOD, name="hopper_backward_rows_kernel", spilled=104, waits=0)
    forms = [("", replace(form, constants={"ORDERED": ordered})) for ordered in (True, False)]
    monkeypatch.setattr(compile_kernels, "compiled", lambda *_: forms)
    found = [problems for *_, problems in compile_kernels.checked(90, "bf16", ())]
    assert found == [[], ["it spills 104 bytes, and 48 are budgeted"]]


def test_what_the_check_lets_pass():
    """Small tiles and other targets need no warp groups, and fp32 has no half-precision products."""
    on_warps = replace(GOOD, wgmma=0, waits=0, mma=68, shared=56704)
    assert compile_kernels.problems(replace(on_warps, constants={"BLOCK_H": 32}), "bf16", None) == []
    assert compile_kernels.problems(replace(on_warps, target=120), "bf16", None) == []
    assert compile_kernels.problems(on_warps, "fp32", None) == []
    assert compile_kernels.problems(on_warps, "fp16", None) != []


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", sorted(KERNELS - {"add_rows_by_key_kernel"}))
def test_a_kernel_keeps_its_budget_on_hopper(on_hopper, name):
    assert [kernel["problems"] for kernel in on_hopper[name] if kernel["problems"]] == []


def test_every_kernel_has_a_case(on_hopper):
    assert on_hopper.keys() == KERNELS - {"add_rows_by_key_kernel"}


ONE_KERNEL = """
import json
import torch, triton, triton.language as tl
from benchmarks.kernels.compiled import compiled, without
from mindspeed_dsa.ops.triton.launch import meta, on_grid

@triton.jit
def copy_kernel(source, target, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at))

def calls(*blocks):
    tensor = meta(64, dtype=torch.float32)
    return [("copy", lambda b=block: on_grid(copy_kernel, 1)(tensor, tensor, BLOCK=b)) for block in blocks]

with without(()) as known:
    list(compiled(90, calls(32)))
with without(known) as found:
    again = [kernel.constants["BLOCK"] for _, kernel in compiled(80, calls(32))]
    copy_kernel.device_caches.clear()
    again += [kernel.constants["BLOCK"] for _, kernel in compiled(90, calls(32, 64))]
print(json.dumps([list(known.values()), again, len(found)]))
"""


@pytest.mark.full
def test_a_kernel_that_passed_is_compiled_again_only_if_it_changes(tmp_path):
    file = tmp_path / "one_kernel.py"
    file.write_text(ONE_KERNEL)
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    done = warm.run([sys.executable, file], env={**environment, "PYTHONPATH": str(ROOT)}, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    # Another target or another size makes another kernel.
    assert json.loads(done.stdout.splitlines()[-1]) == [["copy_kernel"], [32, 64], 3]


@pytest.mark.full
@pytest.mark.timeout(600)
def test_the_record_is_of_kernels_that_pass_today(compile_cases):
    kernels = compile_cases(*ONE_OF_EACH, timeout=580)
    assert [kernel["problems"] for kernel in kernels if kernel["problems"]] == []
    again = compile_cases(*ONE_OF_EACH, "--recorded")
    assert {kernel["case"] for kernel in again} == {"as recorded"}, "run it with --quick --write"
    # Key gradients are added with 128-bit atomics, four floats at a time.
    for name in ("backward_keys_kernel", "hopper_backward_keys_kernel", "score_gradients_kernel"):
        assert any(kernel["vector_atomics"] > 0 for kernel in kernels if kernel["name"] == name), name


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
    """Checks all tile choices, with and without determinism."""
    kernels = compile_cases("--target", str(target), "--dtype", dtype, timeout=1780)
    wrong = [(kernel["name"], kernel["case"], kernel["problems"]) for kernel in kernels if kernel["problems"]]
    assert not wrong, wrong
    assert any(kernel["name"] == "add_rows_by_key_kernel" for kernel in kernels), "deterministic ones"
    elsewhere = target != 90 or dtype == "fp32"
    assert {kernel["name"] for kernel in kernels} == KERNELS - (HOPPER_KERNELS if elsewhere else set())
    if elsewhere:
        return
    # Warp groups do not repeat each other's work: 32 + 4 products of 16 numbers per tile of scores.
    forward = [k for k in kernels if k["name"] == "forward_kernel" and k["constants"]["BLOCK_H"] == 64]
    assert {kernel["wgmma"] for kernel in forward if kernel["constants"]["WITH_OUT"]} == {32 + 4 + 4}
