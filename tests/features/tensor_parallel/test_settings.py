"""What is switched on, and every combination that cannot be, told before training starts."""

from __future__ import annotations

from argparse import Namespace

import pytest

from mindspeed_dsa.features.tensor_parallel.overlap import COC
from mindspeed_dsa.patches.errors import SettingsError
from mindspeed_dsa.session import resolve

TP2 = Namespace(tensor_model_parallel_size=2, sequence_parallel=True)


@pytest.mark.parametrize(
    ("argv", "count"),
    [
        ("--use-ascend-coc", None),
        ("--use-ascend-coc --coc-parallel-num 4", 4),
        ("--tp-comm-overlap-chunks 8", 8),
        ("--tp-comm-overlap-chunks 0", 0),
        ("", "off"),
        ("--use-ascend-coc --coc-parallel-num 1", "off"),
        ("--tp-comm-overlap-chunks 1", "off"),
        ("--coc-recompute-all-gather", "off"),
    ],
)
def test_switches(argv, count):
    settings, active = resolve({}, argv.split())
    assert (COC in active) == (count != "off")
    if count != "off":
        assert settings.coc_parallel_num == count


@pytest.mark.parametrize("count", ["3", "-1", "16", "many"])
def test_chunk_counts_that_cannot_be(count):
    with pytest.raises(SettingsError, match=r"coc-parallel-num.*invalid"):
        resolve({}, ["--use-ascend-coc", "--coc-parallel-num", count])
    with pytest.raises(SettingsError, match=r"coc.parallel.num"):
        resolve({"coc_parallel_num": 3}, [])


def test_one_rank_has_nothing_to_hide():
    (problem,) = COC.validate(Namespace(tensor_model_parallel_size=1, sequence_parallel=False))
    assert "--use-ascend-coc: with --tensor-model-parallel-size 1 there is no communication" in problem
    assert list(COC.validate(TP2)) == []
