"""The static case of the kernels: its model, its committed result, and the page made from it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

# First, so that kernels are interpreted in this process, whichever test imports them next.
pytest.importorskip("tests.ops.triton_backend")

from benchmarks.kernels import model, page, selection
from tests.ops.test_triton_compile import GOOD
from tests.ops.triton_backend import hopper
from tests.support import warm

MEASURED = page.RESULT.with_name("gpu-h100.json")
H200 = model.GPUS["H200"]
FORWARD = replace(GOOD, constants={"BLOCK_H": 64, "BLOCK_N": 64, "WITH_OUT": True})
BACKWARD = replace(GOOD, name="backward_keys_kernel", constants={"BLOCK_H": 32, "BLOCK_N": 64})


def fraction(kernel, work, gpu=H200):
    return work.useful / model.seconds(kernel, work, gpu) / gpu.flops


def test_products_are_fed_from_shared_memory():
    """A product of 64 x 32 x 16 takes 16 cycles; reading its 3 KiB from shared memory takes 24."""
    assert model.operand_rate({"n32k16 from memory": 4}) == pytest.approx(2 / 3)
    assert model.operand_rate({"n64k16 from memory": 1}) == 1
    assert model.operand_rate({"n32k16 from registers": 1}) == 1
    # FP8 has twice as many inner numbers, of half the size, at twice the rate.
    assert model.operand_rate({"n32k32 from memory": 4}) == pytest.approx(2 / 3)
    mixed = model.operand_rate({"n32k16 from memory": 8, "n256k16 from registers": 1})
    assert mixed == pytest.approx((8 * 16 + 128) / (8 * 24 + 128))


def test_traffic_of_the_attention():
    """Bytes by hand: 2048 keys of 576 numbers for 64 heads, and all heads' rows for a tile of keys."""
    work = model.attention(FORWARD, 128, 2048)
    keys, outer = 2048 * 576 * 2, 128 * (576 + 512) * 2
    assert (work.programs, work.l2, work.memory) == (2, 2 * keys + outer, outer)
    assert work.flops == work.useful == 2 * 128 * 2048 * 1088
    work = model.attention(BACKWARD, 128, 2048)
    assert work.l2 == 32 * outer + 3 * keys + 128 * 2048 * 2
    assert work.useful == 4 * 128 * 2048 * 1088
    assert 60 < work.useful / work.l2 < 75
    padded = model.attention(FORWARD, 16, 2048)
    assert padded.flops == 4 * padded.useful


def test_scores_and_selection_are_bound_one_after_the_other():
    tiles = {"HEADS": 64, "DIM": 128, "BLOCK_N": 256, "BLOCK_Q": 32}
    scores = replace(GOOD, shared=115712, registers=107, constants=tiles, products={"n64k16 from memory": 16})
    milliseconds = selection.bounds({"": scores, selection.in_fp8(""): scores}, {"": (64, 128)}, H200)
    assert len(milliseconds) == 2 * len(selection.LENGTHS)
    for ms in milliseconds.values():
        assert ms["both"] == pytest.approx(ms["scores"] + ms["selection"], abs=2e-3)
        assert 0 < ms["selection"] < ms["scores"]
    pairs = 8192 * 8193 / 2
    assert milliseconds["S8192, 64 x 128, bf16"]["scores"] == pytest.approx(
        pairs * 16384 / 989e12 * 1e3, abs=1e-3
    )
    half = milliseconds["S8192, 64 x 128, fp8"]["scores"] / milliseconds["S8192, 64 x 128, bf16"]["scores"]
    assert half == pytest.approx(0.5, abs=0.01)


def test_kernels_for_hopper_alone():
    """Their heads are no constants of the kernel; in the kernel of the sum all heads share each key."""
    for name, heads in (("hopper_forward_kernel", 64), ("hopper_few_heads_forward_kernel", 16)):
        plain = replace(FORWARD, constants={**FORWARD.constants, "BLOCK_H": heads})
        work = model.attention(replace(plain, name=name, constants={}), 16, 2048)
        assert work == model.attention(plain, 16, 2048)
    work = model.attention(
        replace(GOOD, name="hopper_attention_sum_kernel", constants={"HEADS": 128}), 128, 2048
    )
    assert (work.programs, work.l2) == (1, 2048 * 576 * 2 + 128 * 576 * 2)
    # The softmax of one group runs during the products of the other.
    work = model.attention(FORWARD, 128, 2048)
    assert fraction(replace(FORWARD, name="hopper_forward_kernel"), work) > fraction(FORWARD, work)


def test_the_bound_falls_with_whatever_is_short():
    work = model.attention(FORWARD, 128, 2048)
    bound = fraction(FORWARD, work)
    assert 0.3 < bound < 1
    for worse in ({"l2": 1e12}, {"memory": 1e10}, {"flops": 1e14}):
        assert model.seconds(FORWARD, work, replace(H200, **worse)) > model.seconds(FORWARD, work, H200)
    on_warps = replace(FORWARD, wgmma=0, mma=272)
    assert fraction(on_warps, work) < bound
    # Two programs on a multiprocessor hide each other's softmax.
    assert fraction(replace(FORWARD, shared=60000, registers=96), work) >= bound


def test_the_committed_result_and_the_page_made_of_it():
    metrics = json.loads(page.RESULT.read_text())["metrics"]
    assert metrics["serialised"] == 0
    assert metrics["over_limit"] == 0
    assert set(metrics["model_fraction_of_peak"]) == set(model.GPUS)
    for kernel in ("forward_kernel", "backward_keys_kernel", "score_slab_kernel", "dense_sum_kernel"):
        assert any(kernel in name for name in metrics["model_fraction_of_peak"]["H200"]), kernel
    for bounds in metrics["model_fraction_of_peak"].values():
        assert all(0 < bound <= 1 for bound in bounds.values())
    assert "backward, 32 heads, tiles shared" in metrics["model_fraction_of_peak"]["H200"]
    text = page.PAGE.read_text()
    assert page.page(text, metrics) == text, "run python -m benchmarks.kernels.page"


def test_of_the_ways_that_a_gpu_has_run_the_backward_takes_the_one_with_the_lowest_bound():
    """A GPU has run tiles for all numbers of heads, and rows where it has timed them: without determinism."""
    bounds = json.loads(page.RESULT.read_text())["metrics"]["backward_ms"]["H100"]
    assert list(bounds) == [f"{heads} heads" for heads in (128, 64, 32, 16)]
    timed = json.loads(MEASURED.read_text())["metrics"]["backward_by_rows"]
    run_by_rows = {name.split(", ")[1] for name in timed}
    for name, ms in bounds.items():
        for mode in ("", ", deterministic"):
            ways = {"by tiles", *(["by rows"] if name in run_by_rows and not mode else [])}
            lowest = min(ways, key=lambda way, ms=ms, mode=mode: ms[f"{way}{mode}"])
            by_rows = hopper.prefers_rows(int(name.split()[0]), bool(mode))
            assert by_rows == (lowest == "by rows"), (name, mode)
    # The measured times have the same order as the bounds.
    assert all(ms["rows_ms"] < ms["tiles_ms"] for ms in timed.values())


def test_a_row_reads_its_keys_and_adds_their_gradients_once_for_64_heads():
    """Two bytes are read and four added per number, with five products per pair of head and key."""
    many, few = (replace(GOOD, name=name, constants={}) for name in model.ROWS)
    one, two = (model.attention(many, heads, 2048) for heads in (40, 128))
    assert (one.programs, two.programs) == (1, 2)
    assert one.l2 == 2048 * 576 * (2 + 4) + 40 * (576 + 512 + 576) * 2
    assert two.l2 == 2 * 2048 * 576 * (2 + 4) + 128 * (576 + 512 + 576) * 2
    assert one.useful == 2 * 40 * 2048 * (3 * 576 + 2 * 512)
    assert one.flops / one.useful == 64 / 40
    third = model.attention(replace(few, constants={"HEADS": 32}), 20, 2048)
    assert third.l2 == 2048 * 576 * (2 + 4) + 20 * (576 + 512 + 576) * 2
    assert third.flops / third.useful == 32 / 20


@pytest.mark.full
def test_the_interpreter_is_refused():
    done = warm.run(
        [sys.executable, "-m", "benchmarks", "kernels-static", "--quick"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
    )
    assert done.returncode == 1
    assert "unset TRITON_INTERPRET" in done.stderr


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_quick_run(tmp_path):
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "benchmarks", "kernels-static", "--quick"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    metrics = json.loads(done.stdout)["metrics"]
    assert metrics["serialised"] == metrics["over_limit"] == 0
    elsewhere = {
        *("hopper_forward_kernel", "forward_kernel", "attention_sum_kernel", "backward_keys_kernel"),
        *model.ROWS,
    }
    assert set(metrics["spill_bytes"]) >= set(model.ATTENTION) - elsewhere
    assert set(metrics["model_fraction_of_peak"]) == {"H100", "H200"}
    assert 0 < metrics["model_fraction_of_peak"]["H200"]["backward, 16 heads"] < 1
