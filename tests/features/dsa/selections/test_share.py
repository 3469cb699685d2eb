"""Shared selections: only the latest is kept, the last reader frees it, and recomputation reads its own."""

from __future__ import annotations

import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from mindspeed_dsa.features.dsa.model.feature import MODEL
from mindspeed_dsa.features.dsa.operands import Operands
from mindspeed_dsa.features.dsa.problem import IndexInputs, Problem
from mindspeed_dsa.features.dsa.selections.feature import SHARED_SELECTIONS
from mindspeed_dsa.features.dsa.selections.share import decoder_place, mtp_place
from mindspeed_dsa.features.dsa.sparse_attention import attend_by_runs
from mindspeed_dsa.megatron.selection_source import (
    PLACE,
    Carrying,
    Chosen,
    Selections,
    current,
    recomputing,
    sources_of,
)
from mindspeed_dsa.megatron.selections import Sharing

GLM = Sharing(frequency=4, offset=3)


def places(sharing: Sharing, layers: int) -> list:
    return [decoder_place(sharing, layer, layers) for layer in range(1, layers + 1)]


def test_places_of_a_decoder():
    decoder = places(GLM, 9)
    assert [place.source for place in decoder] == [f"layer {n}" for n in (1, 2, 3, 3, 3, 3, 7, 7, 7)]
    assert [n for n, place in enumerate(decoder, 1) if place.hands_on] == [3, 7]
    assert [n for n, place in enumerate(decoder, 1) if place.is_last] == [1, 2, 6, 9]


@pytest.mark.parametrize(
    ("sharing", "repeated", "sources", "repeats"),
    [
        (Sharing(), False, [1, 2, 3], False),
        (Sharing(frequency=2), False, [1, 1, 3], False),
        (Sharing(frequency=4, offset=3), False, [1, 2, 3], False),
        (Sharing(pattern="CSS"), False, [1, 2, 3], False),
        (Sharing(mtp_shares=True), False, [1, 1, 1], False),
        (Sharing(mtp_shares=True), True, [1], True),
    ],
    ids=["none", "rule", "offset", "pattern", "shared", "repeated"],
)
def test_places_of_multi_token_prediction(sharing, repeated, sources, repeats):
    config = SimpleNamespace(mtp_num_layers=3, mtp_use_repeated_layer=repeated)
    mtp = [mtp_place(sharing, layer, config) for layer in range(1, len(sources) + 1)]
    assert [place.source for place in mtp] == [f"layer {n} of multi-token prediction" for n in sources]
    assert all(place.repeats == repeats for place in mtp)
    if repeated:
        selections = Selections()
        assert not selections.is_shared_by(mtp[0])
        selections.store(mtp[0], torch.zeros(1))
        assert selections.is_shared_by(mtp[0])


def forward(selections: Selections, microbatch: int, found: list) -> list[int]:
    """Run the layers of one forward; return the microbatch of every selection that they read."""
    read = []
    for place in found:
        if place.computes:
            selections.store(place, torch.tensor(microbatch))
        else:
            (indices,) = selections.read(place).topk_indices
            selections.release(place)
            read.append(int(indices))
    return read


def test_nothing_is_left_after_the_last_reader():
    selections = Selections()
    assert forward(selections, 5, places(GLM, 9)) == [5] * 5
    assert selections.latest is None


def test_a_layer_names_the_one_that_has_not_run():
    _, _, _, fourth, *_ = decoder = places(GLM, 9)
    with pytest.raises(RuntimeError, match=r"layer 4 attends to the keys that layer 3 selects.*nothing has"):
        Selections().read(fourth)
    selections = Selections()
    forward(selections, 0, decoder[6:8])
    with pytest.raises(RuntimeError, match="which has not run before it; layer 7 has"):
        selections.read(fourth)


def test_a_recomputed_layer_reads_what_it_has_read_in_forward():
    decoder = places(GLM, 9)
    with recomputing(None):
        layers = {
            (microbatch, number): Carrying(lambda place=place, mb=microbatch: forward(current(), mb, [place]))
            for microbatch in range(3)
            for number, place in enumerate(decoder, 1)
        }
        for layer in layers.values():
            layer()
        # Backward: the last layer first, after all microbatches' forwards.
        for (microbatch, number), layer in reversed(layers.items()):
            assert layer() == ([] if decoder[number - 1].computes else [microbatch])
        assert current().latest is None


def test_what_no_layer_of_a_function_reads_is_not_carried():
    decoder = places(GLM, 9)
    with recomputing(None):
        group = Carrying(lambda: forward(current(), 1, decoder))
        forward(current(), 0, decoder[2:4])
        assert current().latest is not None
        group()
        assert group._read is None
        assert group() == [1] * 5


def test_a_selection_is_freed_when_its_last_reader_is_recomputed():
    # The graph keeps checkpointed functions alive until backward ends, so they must drop their selections.
    first, second = places(Sharing(frequency=2), 2)
    indices = torch.zeros(1)
    selected = weakref.ref(indices)
    with recomputing(None):
        current().store(first, indices)
        del indices
        sharing = Carrying(lambda: forward(current(), 0, [second]))
        sharing()
        assert selected() is not None
        sharing()
        assert selected() is None
        with pytest.raises(RuntimeError, match="recomputed twice"):
            sharing()


def test_a_layer_attends_run_by_run_to_the_selection_of_each_run():
    # Operators that take one run at a time select per run, with keys counted from the run's first key.
    noise = torch.Generator().manual_seed(0)
    shapes = ((24, 2, 2, 12), (24, 2, 1, 12), (2, 6, 8), (2, 24, 4, 8), (2, 24, 8), (2, 24, 4))
    query, key, value, *index = (torch.randn(*shape, generator=noise) for shape in shapes)
    problem = Problem(Operands(query, key, value, 0.3), 5, backend="reference")
    runs, computing, sharing = [(0, 10, 0, 10), (10, 24, 10, 24)], *places(Sharing(frequency=2), 2)
    selected = attend_by_runs(problem, IndexInputs(*index), runs, 48)
    layers = [SimpleNamespace(**{PLACE: place}) for place in (computing, sharing)]
    with recomputing(None):
        (source,) = sources_of(layers[0])
        assert source.choose(None) is None
        source.took(None, Chosen(selected.topk_indices, by_run=True), mass_of=None)
        (source,) = sources_of(layers[1])
        given = source.choose(None)
        assert current().latest is None, "its last reader has it"
    shared = attend_by_runs(replace(problem, given=given), None, runs, 48)
    assert torch.equal(shared.out, selected.out)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dsa_indexer_topk_freq": 0}, "--dsa-indexer-topk-freq 0"),
        ({"dsa_indexer_topk_pattern": "CSSC", "num_layers": 8}, "has 4 letters, and the model 8 layers"),
        ({"dsa_indexer_topk_pattern": "SCCC", "num_layers": 4}, "layer 1 shares"),
        ({"dsa_indexer_topk_freq": 2, "dsa_indexer_skip_topk_offset": 9, "num_layers": 8}, "beyond the 8"),
        (
            {"dsa_indexer_topk_freq": 4, "num_layers": 8, "pipeline_model_parallel_size": 4},
            "begins with layer 3, which shares the selection of layer 1",
        ),
    ],
    ids=["frequency", "length", "first", "offset", "chunk"],
)
def test_refused_before_training(arguments, message):
    args = SimpleNamespace(experimental_attention_variant="dsa", **arguments)
    problems = [*MODEL.problems(args), *SHARED_SELECTIONS.problems(args)]
    assert sum(message in problem for problem in problems) == 1
