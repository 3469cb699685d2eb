"""Greedy search on patterns, and the files that let it go on after an interruption."""

from __future__ import annotations

import itertools
import json
import math
import re
from types import SimpleNamespace

import pytest

from mindspeed_dsa.features.dsa.selection_search.feature import SELECTION_SEARCH, Options
from mindspeed_dsa.features.dsa.selection_search.greedy import (
    RESULTS,
    Request,
    Results,
    evaluations,
    for_engines,
    keep_problems,
    kept,
    letters_of,
    removable,
    resumed,
    search,
    uniform,
)
from mindspeed_dsa.megatron.selections import Sharing
from mindspeed_dsa.runs.files import RunError


def weigh(pattern: str) -> float:
    """Return a loss that depends on the distance to the source of each sharing layer."""
    loss, source = 0.0, 0
    for place, letter in enumerate(pattern):
        source = place if letter == "C" else source
        loss += (place - source) * (1 + (place * 7) % 5)
    return loss


@pytest.mark.parametrize(
    ("layers", "computing", "firsts", "pattern"),
    [
        (8, 2, [1], "CSSSCSSS"),
        (8, 3, [1], "CSCSSCSS"),
        (8, 4, [1], "CSCSCSCS"),
        (8, 8, [1], "CCCCCCCC"),
        (8, 4, [1, 5], "CSCSCSCS"),
        (8, 3, [1, 5], "CSCSCSSS"),
        (7, 3, [1, 3], "CSCSCSS"),
    ],
)
def test_uniform_patterns(layers, computing, firsts, pattern):
    assert uniform(layers, computing, firsts) == pattern
    assert kept(pattern) == computing


def test_patterns_of_models_and_engines():
    assert letters_of(Sharing(frequency=4, offset=3), 8) == "CCCSSSCS"
    assert letters_of(Sharing(pattern="FSFS"), 4) == "CSCS"
    assert for_engines("CSSC") == "FSSF"
    assert removable("CCSCC", [1, 4]) == [2, 5]


def test_each_step_keeps_the_best_of_all_candidates():
    seen = []

    def evaluate(pattern, layer):
        seen.append((pattern, layer))
        return weigh(pattern)

    steps = list(search("C" * 6, [1, 4], 3, evaluate))
    assert [step.kept for step in steps] == [6, 5, 4, 3]
    for before, step in itertools.pairwise(steps):
        candidates = {
            layer: before.pattern[: layer - 1] + "S" + before.pattern[layer:]
            for layer in removable(before.pattern, [1, 4])
        }
        assert step.loss == min(map(weigh, candidates.values()))
        assert step.pattern == candidates[step.removed]
        assert step.uniform_loss == weigh(step.uniform)
    assert len(seen) <= evaluations("C" * 6, [1, 4], 3) + 1, "the uniform pattern of the start is the start"
    tried = [layer for _, layer in seen if layer is not None]
    assert tried[:4] == [2, 3, 5, 6], "ascending"


def test_the_highest_of_equal_layers_is_removed():
    assert [step.removed for step in search("CCCC", [1], 2, lambda *_: 1.0)] == [None, 4, 3]


def test_a_loss_that_is_no_number_is_never_the_best():
    losses = {"CCC": 1.0, "CSC": 9.0, "CCS": math.nan}
    *_, last = search("CCC", [1], 2, lambda pattern, layer: losses[pattern])
    assert last.removed == 2


def test_a_job_that_shares_already_has_no_uniform_patterns():
    steps = list(search("CCSC", [1], 2, lambda pattern, layer: weigh(pattern)))
    assert [step.kept for step in steps] == [3, 2]
    assert all(step.uniform_loss is None for step in steps)


@pytest.mark.parametrize(
    ("layers_kept", "words"),
    [
        (1, "2 chunks, which begin with layers 1, 4.*nearest is --layers-kept 2, pattern CSSCSS"),
        (7, "6 of the 6 layers have an indexer"),
    ],
)
def test_numbers_that_no_pattern_has(layers_kept, words):
    (problem,) = keep_problems(layers_kept, "C" * 6, [1, 4])
    assert re.search(words, problem)
    assert not list(keep_problems(2, "C" * 6, [1, 4]))


def test_results_go_on_only_with_the_same_problem(tmp_path):
    identity = {"checkpoint": "a", "num_layers": 4}
    Results(identity, {"CCCC": 1.5}).write(tmp_path)
    assert resumed(tmp_path, identity).losses == {"CCCC": 1.5}
    with pytest.raises(RunError, match=r"it has checkpoint a and not b.*another folder"):
        resumed(tmp_path, {**identity, "checkpoint": "b"})
    assert resumed(tmp_path / "other", identity).losses == {}


@pytest.mark.parametrize("text", ["{", "[]", '{"losses": {}}', json.dumps({"identity": {}, "steps": [1]})])
def test_damaged_results_are_named(tmp_path, text):
    (tmp_path / RESULTS).write_text(text)
    with pytest.raises(RunError, match=r"search\.json.*delete it"):
        resumed(tmp_path, {})


DSA = {"experimental_attention_variant": "dsa", "num_layers": 8}


@pytest.mark.parametrize(
    ("request_", "arguments", "words"),
    [
        ((4, 8), {**DSA, "experimental_attention_variant": None}, "selects no keys"),
        ((4, 8), {**DSA, "dsa_stage": "warmup"}, "--dsa-stage warmup attends to all keys"),
        ((4, 8), {**DSA, "enable_cuda_graph": True}, "--enable-cuda-graph: a graph keeps the pattern"),
        ((9, 8), DSA, "8 of the 8 layers have an indexer"),
        ((1, 8), {**DSA, "pipeline_model_parallel_size": 2}, "begin with layers 1, 5"),
        ((4, 8), {**DSA, "mtp_num_layers": 2, "dsa_indexer_topk_freq": 2}, "no pattern has it"),
        (
            (4, 3),
            {**DSA, "pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 2},
            "--microbatches 3",
        ),
        (None, DSA, "there is no"),
    ],
    ids=["no DSA", "stage", "graph", "many", "few", "MTP", "interleaved", "no request"],
)
def test_refused_before_the_model_is_built(tmp_path, request_, arguments, words):
    if request_ is not None:
        Request("checkpoint", *request_).write(tmp_path)
    args = SimpleNamespace(**arguments, dsa_search_selections=str(tmp_path))
    (problem,) = SELECTION_SEARCH.problems(args)
    assert words in problem


def test_nothing_is_checked_without_the_flag():
    assert not SELECTION_SEARCH.problems(SimpleNamespace(**DSA, dsa_search_selections=None))
    assert Options.of(SimpleNamespace()) == Options()
