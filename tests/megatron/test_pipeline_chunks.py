"""Layers of each chunk compared with Megatron's, and splits for layers that share selections."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace

import pytest

from mindspeed_dsa.features.dsa.selections.feature import SHARED_SELECTIONS
from mindspeed_dsa.megatron import pipeline_chunks
from mindspeed_dsa.megatron.pipeline_chunks import Split, check_chunks, layout_text, stages_of
from mindspeed_dsa.megatron.selections import Sharing

GLM = Sharing(frequency=4, offset=3)
GLM_ARGS = {
    "experimental_attention_variant": "dsa",
    "num_layers": 78,
    "dsa_indexer_topk_freq": 4,
    "dsa_indexer_skip_topk_offset": 3,
    "mtp_num_layers": 1,
}


def config(**given):
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(hidden_size=8, num_attention_heads=2, pipeline_dtype="bf16", **given)


def built(made, ranks: int, chunks: int, monkeypatch) -> list[list[tuple[int, ...]]]:
    """Return the numbers of the layers that Megatron builds, by rank and chunk."""
    from megatron.core import parallel_state
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    virtual = chunks if chunks > 1 else None
    monkeypatch.setattr(parallel_state, "_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE", virtual)
    layout, by_rank = made.pipeline_model_parallel_layout, []
    for rank in range(ranks):
        held = []
        for chunk in range(chunks):
            stage = chunk if chunks > 1 else None
            if layout is None:
                offset = get_transformer_layer_offset(made, stage, rank)
                count = get_num_layers_to_build(made, stage, rank)
            else:
                offset = layout.get_layer_offset(LayerType.decoder, stage, rank)
                count = layout.get_num_layers_to_build(LayerType.decoder, stage, rank)
            held.append(tuple(range(offset + 1, offset + count + 1)))
        by_rank.append(held)
    return by_rank


@pytest.mark.parametrize("layers", [6, 8, 11, 12, 24, 30])
def test_chunks_are_those_that_megatron_builds(layers, monkeypatch):
    compared = 0
    for ranks, chunks, embedding, loss, first, last in product(
        (1, 2, 3, 4), (1, 2, 3), (False, True), (False, True), (None, 1, 2, 4, 6), (None, 1, 2, 4, 6)
    ):
        if ranks == 1 and chunks > 1:
            continue
        fields = {
            "num_layers": layers,
            "pipeline_model_parallel_size": ranks,
            "virtual_pipeline_model_parallel_size": chunks if chunks > 1 else None,
            "num_layers_in_first_pipeline_stage": first,
            "num_layers_in_last_pipeline_stage": last,
            "account_for_embedding_in_pipeline_split": embedding,
            "account_for_loss_in_pipeline_split": loss,
        }
        split = Split.of(SimpleNamespace(**fields))
        if split.problem or (ranks == 1 and (embedding or loss or first or last)):
            continue
        made = config(**fields)
        assert split.by_rank == built(made, ranks, chunks, monkeypatch), fields
        assert Split.of(made) == split
        compared += 1
    assert compared > 3


@pytest.mark.parametrize(
    ("layout", "ranks"),
    [
        ("Ettt|ttt|tt|ttL", 2),
        ("Ettt|(tt|)*3,tL", 5),
        ("Et*3|t*3|t*3|mL", 4),
        ("E|t*5|(t*2|)*1t*2mL", 2),
        ([["embedding", "decoder"], ["decoder", "decoder"], ["decoder"], ["decoder", "mtp", "loss"]], 4),
    ],
)
def test_layouts_are_read_as_megatron_reads_them(layout, ranks, monkeypatch):
    stages = stages_of(layout)
    sizes = {"num_layers": "".join(stages).count("t"), "pipeline_model_parallel_size": ranks}
    mtp = "".join(stages).count("m")
    made = config(**sizes, mtp_num_layers=mtp or None, pipeline_model_parallel_layout=layout)
    split = Split.of(SimpleNamespace(**sizes, pipeline_model_parallel_layout=layout))
    assert split.by_rank == built(made, ranks, len(stages) // ranks, monkeypatch)
    assert Split.of(made) == split, "Megatron's object says the same as the text"
    again = layout_text([len(chunk) for chunk in split.in_order], mtp)
    assert Split.of(SimpleNamespace(**sizes, pipeline_model_parallel_layout=again)).in_order == split.in_order


@pytest.mark.parametrize(
    ("given", "chunks"),
    [
        ({"num_virtual_stages_per_pipeline_rank": 3}, 3),
        ({"num_layers_per_virtual_pipeline_stage": 2}, 3),
        ({"virtual_pipeline_model_parallel_size": 3, "num_layers_per_virtual_pipeline_stage": 2}, 3),
        ({}, 1),
    ],
)
def test_chunks_of_a_rank_are_read_from_any_of_their_flags(given, chunks):
    split = Split.of(SimpleNamespace(num_layers=12, pipeline_model_parallel_size=2, **given))
    assert split.chunks == chunks


def glm(**given) -> SimpleNamespace:
    return SimpleNamespace(**GLM_ARGS, pipeline_model_parallel_layout=given.pop("layout", None), **given)


@pytest.mark.parametrize(
    "given",
    [
        {},  # one rank
        # slime's split of GLM-5.2
        {
            "pipeline_model_parallel_size": 8,
            "decoder_first_pipeline_num_layers": 14,
            "decoder_last_pipeline_num_layers": 16,
        },
        {"pipeline_model_parallel_size": 2, "layout": "Et*38|t*40mL"},
    ],
)
def test_chunks_that_begin_with_a_computing_layer_pass(given):
    assert list(check_chunks(glm(**given))) == []


@pytest.mark.parametrize(
    ("ranks", "virtual", "counted"),
    [
        *((ranks, None, False) for ranks in (2, 3, 6, 26, 39)),
        *((ranks, None, True) for ranks in (4, 8, 16)),
        *((ranks, 2, True) for ranks in (2, 4, 8, 20)),
        (3, 2, False),
        (13, 3, False),
    ],
)
def test_a_refusal_names_the_layer_and_splits_that_work(ranks, virtual, counted):
    args = glm(
        pipeline_model_parallel_size=ranks,
        virtual_pipeline_model_parallel_size=virtual,
        account_for_embedding_in_pipeline_split=counted,
        account_for_loss_in_pipeline_split=counted,
    )
    split = Split.of(args)
    starts = [chunk[0] for chunk in split.in_order]
    computing = {1, 2, *range(3, 79, 4)}
    assert not set(starts) <= computing
    (problem,) = check_chunks(args)
    assert problem in SHARED_SELECTIONS.problems(args)
    assert f"layer {next(layer for layer in starts if layer not in computing)}," in problem
    chunks = ranks * (virtual or 1)
    named = list(pipeline_chunks.nearest(split, GLM, mtp_layers=1))
    if chunks > 21:
        assert "21 layers compute" in problem
        assert not named
        return
    assert named
    for proposed in named:
        assert len(proposed.in_order) == chunks
        assert {chunk[0] for chunk in proposed.in_order} <= computing
        assert sum(map(len, proposed.in_order)) == 78
        assert proposed.flags() in problem
        if proposed.stages:  # Megatron reads the printed layout back
            read = Split.of(glm(pipeline_model_parallel_size=ranks, layout=proposed.flags().split("'")[1]))
            assert read.in_order == proposed.in_order


def test_the_layout_named_is_the_most_even_one():
    """Compared with all splits of twelve layers into four chunks that begin with a computing layer."""
    sharing, layers = Sharing(pattern="CSCSSSCSSCSC"), 12
    every = [
        (a, b - a, c - b, layers - c)
        for a, b, c in product(range(1, layers), repeat=3)
        if a < b < c and all(sharing.computes(start + 1) for start in (a, b, c))
    ]
    smallest = min(max(sizes) for sizes in every)
    squares = min(sum(n * n for n in sizes) for sizes in every if max(sizes) == smallest)
    (layout,) = pipeline_chunks.nearest(Split(layers, 4), sharing)
    sizes = [len(chunk) for chunk in layout.in_order]
    assert (max(sizes), sum(n * n for n in sizes)) == (smallest, squares)


def test_a_release_without_layouts_is_not_told_of_them():
    args = SimpleNamespace(**GLM_ARGS, pipeline_model_parallel_size=2)
    (problem,) = check_chunks(args)
    assert "--pipeline-model-parallel-layout" not in problem
    assert "--decoder-last-pipeline-num-layers 40" in problem
    args = SimpleNamespace(**GLM_ARGS, pipeline_model_parallel_size=3, num_virtual_stages_per_pipeline_rank=2)
    (problem,) = check_chunks(args)
    assert "Megatron-core 0.14 or later" in problem


@pytest.mark.parametrize(
    "given",
    [
        {"dsa_indexer_topk_freq": 1},
        {"num_layers": None},
        {"num_layers": 79},  # which Megatron refuses
        {"experimental_attention_variant": None},
        {"dsa_indexer_topk_pattern": "CS"},  # wrong in every split
    ],
)
def test_what_others_refuse_or_nobody_shares_is_passed_over(given):
    args = SimpleNamespace(**{**GLM_ARGS, "pipeline_model_parallel_size": 2, **given})
    assert list(check_chunks(args)) == []
