"""Batch sizes from arguments: schedules, ramps, evaluations, and remedies that Megatron accepts."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest

from mindspeed_dsa.megatron import batches
from mindspeed_dsa.megatron.batches import Batches

GIVEN = {"global_batch_size": 8, "micro_batch_size": 1, "data_parallel_size": 2}


def of_training(**given: Any) -> Batches | None:
    return batches.of_training(Namespace(**{**GIVEN, **given}))


def of_evaluation(**given: Any) -> Batches | None:
    return batches.of_evaluation(Namespace(**{**GIVEN, **given}))


@pytest.mark.parametrize(
    ("given", "least", "most", "remedy"),
    [
        ({}, 8, 8, "--global-batch-size 12"),
        ({"rampup_batch_size": ["4", "4", "64"]}, 4, 8, "--rampup-batch-size 12 INCREMENT SAMPLES"),
        # Releases with schedules ignore ramps.
        ({"rampup_batch_size": ["4", "4", "64"], "step_batch_size_schedule": None}, 8, 8, "--global-b"),
        (
            # Megatron derives this batch size from the schedule, and accepts no other with a schedule.
            {"global_batch_size": 2, "step_batch_size_schedule": "0:4 250B:1K, 500B:16"},
            4,
            1000,
            "--step-batch-size-schedule '0:12 250B:1000 500B:16'",
        ),
    ],
)
def test_batches_of_steps(given: dict[str, Any], least: int, most: int, remedy: str) -> None:
    sizes = of_training(**given)
    assert sizes is not None
    assert (sizes.least, sizes.most) == (least, most)
    assert (sizes.microbatches, sizes.most_microbatches) == (least // 2, most // 2)
    assert sizes.enlarged(6).startswith(remedy)


@pytest.mark.parametrize("of_job", [of_training, of_evaluation])
def test_shards_of_weights_beyond_tensor_parallelism_have_samples_of_their_own(of_job: Any) -> None:
    """Megatron 0.19 leaves them out of ``data_parallel_size``, and counts microbatches with them."""
    sizes = of_job(gtp_weight_remat_size=2, eval_global_batch_size=8)
    assert sizes is not None
    assert (sizes.microbatches, sizes.enlarged(3).rpartition(" ")[2]) == (2, "12")


@pytest.mark.parametrize("schedule", ["768", "0:", ":4", "0:4 1B", "0:none", "0:0", ","])
def test_what_megatron_refuses_is_left_to_it(schedule: str) -> None:
    assert of_training(step_batch_size_schedule=schedule) is None
    with pytest.raises(ValueError, match=r"."):
        batches.entries_of(schedule)


def test_a_schedule_reads_as_megatron_reads_it() -> None:
    assert batches.entries_of("0:768 250B:1.5k,1T:3K") == (("0", 768), ("250B", 1500), ("1T", 3000))


@pytest.mark.parametrize("name", ["global_batch_size", "micro_batch_size", "data_parallel_size"])
def test_sizes_that_are_not_said(name: str) -> None:
    assert of_training(**{name: None}) is None
    assert of_evaluation(**{name: None}) is None


def test_batches_of_evaluations() -> None:
    assert of_evaluation() is None, "as before 0.18, those of training"
    sizes = of_evaluation(eval_micro_batch_size=2, eval_global_batch_size=None)
    assert sizes is not None
    assert sizes.microbatches == 2
    assert sizes.enlarged(3) == "--eval-global-batch-size 12"
    for without in ({"eval_iters": 0}, {"eval_iters": 0, "full_validation": False}):
        assert of_evaluation(eval_micro_batch_size=2, **without) is None
    # The whole data set.
    assert of_evaluation(eval_micro_batch_size=2, eval_iters=None, full_validation=True) is not None


@pytest.mark.parametrize(
    ("release", "layout", "refused"),
    [
        ("0.15.3", {"pipeline_model_parallel_size": 4}, False),
        ("0.16.1", {"pipeline_model_parallel_size": 2}, False),
        ("0.16.1", {"pipeline_model_parallel_size": 4}, True),
        ("0.16.1", {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}, True),
        ("0.16.1", {"pipeline_model_parallel_size": 2, "schedules_method": "dualpipev"}, True),
        ("0.17.1", {"pipeline_model_parallel_size": 4}, False),
        ("0.17.1", {"pipeline_model_parallel_size": 2, "tensor_model_parallel_size": 2}, True),
        ("0.17.1", {"tensor_model_parallel_size": 2}, False),
        ("0.18.0", {"pipeline_model_parallel_size": 4, "tensor_model_parallel_size": 2}, False),
        (None, {"pipeline_model_parallel_size": 4, "tensor_model_parallel_size": 2}, False),
    ],
)
@pytest.mark.parametrize("sft", [True, False])
def test_conversations_need_a_release_that_gives_them_to_all_ranks_of_a_pipeline(
    monkeypatch: pytest.MonkeyPatch, release: str | None, layout: dict[str, Any], refused: bool, sft: bool
) -> None:
    monkeypatch.setattr(batches.versions, "of_megatron", lambda root: release)
    problems = list(batches.check_conversations(Namespace(sft=sft, **layout), "--use-fused-dsa"))
    assert [f"Megatron-LM {release} gives" in problem for problem in problems] == [True] * (refused and sft)
    assert batches.delivers_conversations(Namespace(sft=sft)) is (sft and release != "0.15.3")
