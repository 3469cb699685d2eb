"""Messages about stages before training: indexers in other layers, weight decay without a loss."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mindspeed_dsa.features.dsa.stages import feature, layers
from mindspeed_dsa.features.dsa.stages.feature import check_stage, drop_loss
from mindspeed_dsa.megatron.dsa import Options
from mindspeed_dsa.patches import SettingsError

CASES = "tests.features.dsa.stages.jobs_by_stage"
KEY = "decoder.layers.{}self_attention.core_attention.indexer.linear_wk.weight"


def context(stage: str, **config: Any) -> Any:
    """Return a fake session context whose model has six layers."""
    models = SimpleNamespace(config=SimpleNamespace(num_layers=6, **config))
    log = SimpleNamespace(info=lambda *args, **kwargs: None)
    return SimpleNamespace(options=SimpleNamespace(stage=stage), state=lambda factory: models, log=log)


def stored(*numbers: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes in a checkpoint in which these layers have an indexer."""
    named = {KEY.format(f"{number - 1}."): (4, 4) for number in numbers}
    return {"decoder.layers.0.mlp.linear_fc1.weight": (4, 4), **named}


@pytest.mark.parametrize(
    ("shapes", "config", "message"),
    [
        (stored(1, 2, 3, 4, 5, 6), {"dsa_indexer_topk_freq": 2}, "in layer 2, where this model has none"),
        ({KEY.format(""): (6, 4, 4)}, {"dsa_indexer_topk_freq": 3}, "shares the selection of layer 1"),
        (stored(1, 3, 5), {}, "no indexer in layer 2, which selects keys itself"),
        (stored(), {}, "begin with --dsa-stage warmup"),
    ],
)
def test_indexers_of_other_layers_are_refused(shapes: Any, config: Any, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        layers.checked({"model": {}}, "there", shapes, context("sparse", **config))


@pytest.mark.parametrize("shapes", [stored(1, 3, 5), stored(1, 3, 5) | {"optimizer.state.x": ()}])
def test_the_same_layers_are_accepted(shapes: Any) -> None:
    wanted: dict[str, Any] = {"model": {}}
    assert layers.checked(wanted, "there", shapes, context("sparse", dsa_indexer_topk_freq=2)) is wanted


@pytest.mark.parametrize("stage", ["dense", "frozen"])
def test_a_coefficient_is_taken_as_none(stage: str) -> None:
    args = SimpleNamespace(dsa_stage=stage, dsa_indexer_loss_coeff=0.1)
    (line,) = drop_loss(args)
    assert "--dsa-indexer-loss-coeff 0.1 is taken as 0" in line
    assert args.dsa_indexer_loss_coeff == 0.0
    assert not drop_loss(args)


def test_weight_decay_of_indexers_without_a_loss_is_said(pool: Any) -> None:
    (said,) = pool.run(f"{CASES}:lines_of_build", 1, coefficient=0.0)
    assert [line for line in said if "--dsa-stage frozen" in line and "shrinks them" in line]
    (silent,) = pool.run(f"{CASES}:lines_of_build", 1, coefficient=0.5)
    assert not any("--dsa-stage frozen" in line for line in silent)


def test_a_state_dict_with_an_indexer_too_many_is_refused(pool: Any) -> None:
    (error,) = pool.run(f"{CASES}:error_of_state_dict", 1)
    assert "no indexer in layer 2" in error


@pytest.mark.parametrize(
    ("release", "model", "refused"),
    [
        ("0.12.1", {"untie_embeddings_and_output_weights": False}, True),
        ("0.12.1", {"mtp_num_layers": 1}, True),
        ("0.12.1", {"untie_embeddings_and_output_weights": True}, False),
        ("0.12.1", {"mtp_num_layers": 1, "pipeline_model_parallel_size": 1}, False),
        ("0.13.0", {"mtp_num_layers": 1}, False),
    ],
)
def test_copies_of_a_frozen_embedding_need_a_release_that_sums_no_gradients(
    monkeypatch: pytest.MonkeyPatch, release: str, model: dict[str, Any], refused: bool
) -> None:
    monkeypatch.setattr(feature.versions, "of_megatron", lambda root: release)
    for stage, expected in (("warmup", refused), ("sparse", False)):
        args = SimpleNamespace(**{"dsa_stage": stage, "pipeline_model_parallel_size": 2, **model})
        problems = list(check_stage(args, Options.of(args)))
        assert any("sums the gradients of its copies" in problem for problem in problems) is expected
