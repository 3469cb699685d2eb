"""Switches of the features, and combinations that are refused before training."""

from __future__ import annotations

from argparse import Namespace

import pytest
import torch

from mindspeed_dsa.features.tensor_parallel.overlap import symmetric
from mindspeed_dsa.features.tensor_parallel.overlap.feature import COC, MC2
from mindspeed_dsa.patches.errors import SettingsError
from mindspeed_dsa.session import Session, resolve

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
        ("--use-ascend-coc --no-coc-recompute-all-gather", None),
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
    (problem,) = COC.problems(Namespace(tensor_model_parallel_size=1, sequence_parallel=False))
    assert "--use-ascend-coc: with --tensor-model-parallel-size 1 there is no communication" in problem
    assert list(COC.problems(TP2)) == []


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        ("--coc-recompute-all-gather", "--coc-recompute-all-gather has no effect without --use-ascend-coc"),
        ("--no-coc-recompute-all-gather", "--no-coc-recompute-all-gather has no effect without"),
        (
            "--no-coc-recompute-all-gather --use-ascend-coc --coc-parallel-num 1",
            "--coc-parallel-num 1, which",
        ),
        ("--coc-fused-kernel --coc-parallel-num 4", "--coc-parallel-num 4 has no effect with --coc-fused"),
        ("--coc-fused-kernel --coc-parallel-num 1", "--coc-parallel-num 1 has no effect with --coc-fused"),
    ],
)
def test_options_without_effect_are_refused(argv, problem):
    settings, active = resolve({}, argv.split())
    assert COC in active
    (found,) = Session(settings, active).problems(TP2)
    assert found.startswith("ascend-coc: ")
    assert problem in found


@pytest.mark.parametrize(
    "argv",
    [
        "--use-ascend-coc --no-coc-recompute-all-gather",
        "--coc-fused-kernel --coc-parallel-num 0",
        "--coc-parallel-num 2 --coc-recompute-all-gather",
    ],
)
def test_options_with_effect_are_not_refused(argv):
    settings, active = resolve({}, argv.split())
    assert COC in active
    assert Session(settings, active).problems(TP2) == []


def test_keeping_the_gathered_input_is_an_option_of_mc2_too():
    assert not COC.active(Namespace(use_ascend_mc2=True, coc_recompute_all_gather=False))


@pytest.mark.parametrize(("count", "refused"), [(None, True), (0, True), (4, False)])
def test_deterministic_training_takes_no_measured_count(count, refused):
    args = Namespace(**vars(TP2), deterministic_mode=True, use_ascend_coc=True, coc_parallel_num=count)
    problems = list(COC.problems(args))
    assert len(problems) == refused
    assert all("fix it, for example with --coc-parallel-num 4" in problem for problem in problems)


def test_chunks_and_mc2_do_not_combine_and_mc2_needs_an_npu():
    with pytest.raises(SettingsError) as refused:
        resolve({}, ["--use-ascend-coc", "--use-ascend-mc2"])
    assert "ascend-mc2 (switched on by argv (--use-ascend-mc2)) cannot be combined with ascend-coc" in str(
        refused.value
    )
    assert "runs on npu, but this is platform cpu; switch it off here" in str(refused.value)


@pytest.mark.parametrize(("feature", "flag"), [(COC, "--coc-fused-kernel"), (MC2, "--use-ascend-mc2")])
def test_fused_operators_need_sequence_parallelism(feature, flag):
    without = Namespace(tensor_model_parallel_size=2, sequence_parallel=False, coc_fused_kernel=True)
    (problem,) = feature.problems(without)
    assert problem.startswith(f"{flag}: ")
    assert "add --sequence-parallel" in problem


@pytest.mark.parametrize(("feature", "flag"), [(COC, "--use-ascend-coc"), (MC2, "--use-ascend-mc2")])
def test_transformer_engine_is_unchanged_and_that_is_logged(feature, flag, capsys, monkeypatch):
    args = Namespace(**vars(TP2), transformer_impl="transformer_engine")
    assert list(feature.problems(args)) == []
    assert f"{flag} does not change Transformer Engine's layers" in capsys.readouterr().err
    monkeypatch.setenv("RANK", "1")
    feature.problems(args)
    feature.problems(TP2)
    assert capsys.readouterr().err == ""


def test_symmetric_memory_operators_are_called_as_they_are_declared():
    # The operators run on GPUs only, but their schemas exist everywhere.
    weight = torch.empty(4, 4)
    assert symmetric.declines(weight, None) == "they compute on CUDA, not on cpu"
    assert symmetric.declines(torch.empty(4, 4, dtype=torch.float64, device="meta"), None)
    operators = symmetric._operators()
    gather = operators.fused_all_gather_matmul.default._schema
    scatter = operators.fused_matmul_reduce_scatter.default._schema
    assert [argument.name for argument in gather.arguments][:4] == ["A", "Bs", "gather_dim", "group_name"]
    assert [argument.name for argument in scatter.arguments] == [
        "A",
        "B",
        "reduce_op",
        "scatter_dim",
        "group_name",
    ]
