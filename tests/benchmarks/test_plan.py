"""Plans compared with counted bytes, and the page written from plans."""

from __future__ import annotations

import pytest
import torch

from benchmarks.plan import counted, page
from benchmarks.plan.layouts import LAYOUTS, RANKS, flags_of
from mindspeed_dsa.tools.planner import arguments, memory

BOUNDS = {"weights": 0.02, "gradients": 0.02, "optimizer": 0.02, "activations": 0.1, "bytes": 0.02}


@pytest.mark.full
@pytest.mark.timeout(1800)  # four processes train 13 layouts: three minutes on two idle cores
def test_all_layouts_are_within_their_bounds():
    from benchmarks.plan import compared

    wrong = {
        (name, what): errors[what]
        for name, errors in compared(list(LAYOUTS)).items()
        for what, bound in BOUNDS.items()
        if errors[what] > bound
    }
    assert not wrong


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_counted_layout_can_be_planned(name):
    job = arguments.job_of(["pretrain_dsa.py", *flags_of(name)], RANKS)
    assert not any("not read" in note for note in job.notes)
    assert len(memory.of_job(job, 0.0)) == job.layout.pp


class Group:
    """Process group of four ranks, seen from the second."""

    def size(self):
        return 4

    def rank(self):
        return 1


def test_what_a_rank_receives_in_each_collective():
    row = torch.zeros(8, 2)  # 64 bytes
    sizes = counted._SIZES
    assert sizes["allreduce"](Group(), [row]) == 2 * 64 * 3 / 4
    assert sizes["all_gather_single"](Group(), row, row[:2]) == 64 * 3 / 4
    assert sizes["reduce_scatter_single"](Group(), row[:2], row) == 64 * 3 / 4
    assert sizes["all_to_all_single"](Group(), row, row) == 64 * 3 / 4
    assert sizes["all_to_all_single"](Group(), row, row, [1, 5, 1, 1], [2, 2, 2, 2]) == 3 * 8
    assert sizes["recv"](Group(), [row], 0, 0) == 64


def test_the_page_is_what_plans_say():
    for name, wanted in page.blocks().items():
        text = (page.DOCS / name).read_text(encoding="utf-8")
        assert page.filled(text, wanted) == text, "run python -m benchmarks.plan.page"
    assert page.planned("", page.GLM, "glm-5.2").fits
