"""The tables of CUDA graphs: every feature has a place, and the page shows what the checks refuse."""

from __future__ import annotations

import pytest

from mindspeed_dsa import features
from mindspeed_dsa.megatron.graphs import OPTIMIZER
from tests.combinations.graphs import CAPTURED, GRAPHS, PAGE, PLACES, WITHOUT_GRAPHS, cells, page, refusals


def test_every_feature_has_a_place():
    names = {feature.name for feature in features.built_in()}
    assert names == PLACES.keys() | set(WITHOUT_GRAPHS)


def test_the_page_shows_the_checks():
    assert PAGE.read_text(encoding="utf-8") == page()


@pytest.mark.parametrize(
    ("feature", "columns"),
    [
        ("dsa-recorded-selections", ["`attn`", "layers", "iteration"]),
        # TransformerLayer.forward, which sets the masks of padding, is not called around any graph.
        ("pack-documents", [column for column in GRAPHS if column != "optimizer"]),
        ("pad-sequences", [column for column in GRAPHS if column not in ("`mlp`", "optimizer")]),
        ("fused-linear-cross-entropy", ["iteration"]),
        ("moe-grouped-gemm", ["`moe`", "layers", "iteration"]),
        ("swap-optimizer", ["iteration", "optimizer"]),
        ("two-streams", [column for column in GRAPHS if column != "optimizer"]),
        ("fused-swiglu", []),
    ],
)
def test_a_feature_refuses_the_parts_that_it_cannot_be_in(feature, columns):
    assert list(refusals(feature)) == columns


def test_only_features_of_the_optimizer_act_in_its_step():
    acts = {feature for feature in PLACES if cells(feature)[-1]}
    assert acts == {feature for feature, parts in PLACES.items() if OPTIMIZER in parts}


def test_what_is_captured_is_not_refused():
    for feature, columns in CAPTURED.items():
        by_column = dict(zip(GRAPHS, cells(feature), strict=True))
        assert {column for column in columns if by_column[column] == "captured"} == columns
