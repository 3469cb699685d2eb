"""Properties of recipes, and recomputation in FP8; jobs are in ``tests/distributed/test_fp8.py``."""

from __future__ import annotations

import contextlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from mindspeed_dsa.feature import Megatron
from mindspeed_dsa.megatron import low_precision as module
from mindspeed_dsa.megatron.low_precision import low_precision, run_again


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, None),
        ({"fp8": None, "fp8_recipe": "delayed", "fp4": None}, None),
        # The default since the first release with recipes.
        ({"fp8": "hybrid"}, ("fp8", "delayed", False, True, False)),
        ({"fp8": "e4m3", "fp8_recipe": "tensorwise"}, ("fp8", "tensorwise", False, False, True)),
        ({"fp8": "e4m3", "fp8_recipe": "blockwise"}, ("fp8", "blockwise", False, False, False)),
        (
            {"fp8": "e4m3", "fp8_recipe": "mxfp8", "fp8_param_gather": True},
            ("fp8", "mxfp8", True, False, False),
        ),
        ({"fp8": "hybrid", "fp8_recipe": "custom"}, ("fp8", "custom", False, True, True)),
        (
            {"fp8": "hybrid", "fp8_recipe": "of a later release"},
            ("fp8", "of a later release", False, True, True),
        ),
        ({"fp4": "e2m1"}, ("fp4", "nvfp4", False, False, True)),
        ({"fp4": "e2m1", "fp4_param": True}, ("fp4", "nvfp4", True, False, True)),
    ],
    ids=str,
)
def test_properties_of_a_job(given: dict[str, Any], expected: Any) -> None:
    found = low_precision(SimpleNamespace(**given))
    properties = found and (found.name, found.recipe, found.stored, found.history, found.rows_together)
    assert properties == expected


def test_every_recipe_of_megatron_has_properties() -> None:
    enums = Megatron()("core.enums")
    recipes = [recipe for kind in ("Fp8Recipe", "Fp4Recipe") for recipe in getattr(enums, kind, ())]
    names = {recipe.value for recipe in recipes}
    assert {"delayed", "tensorwise", "mxfp8"} <= names <= {*module._RECIPES, "custom"}
    # A configuration may hold the enum.
    (delayed,) = (recipe for recipe in recipes if recipe.value == "delayed")
    found = low_precision(SimpleNamespace(fp8="hybrid", fp8_recipe=delayed, fp8_param=True))
    assert found is not None
    assert (found.recipe, found.stored, found.history) == ("delayed", True, True)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Stand in for Transformer Engine; return the list of entered contexts."""
    entered: list[Any] = []

    @contextlib.contextmanager
    def noting(*args: Any, **kwargs: Any) -> Any:
        entered.append(kwargs)
        yield

    stand_in = module.Engine(lambda: True, lambda: "recipe", noting, noting)
    monkeypatch.setattr(module, "transformer_engine", lambda: stand_in)
    return entered


def test_a_second_call_is_a_recomputation(engine: list[Any]) -> None:
    run = run_again(lambda *args, **kwargs: (args, kwargs))
    assert run(1, a=2) == ((1,), {"a": 2})
    assert engine == [{"activation_recompute": True, "recompute_phase": False}]
    engine.clear()
    assert run(3) == ((3,), {})
    assert engine == [
        {"activation_recompute": True, "recompute_phase": True},
        {"enabled": True, "fp8_recipe": "recipe"},
    ]


def test_without_transformer_engine_a_function_stays_as_it_is() -> None:
    assert module.transformer_engine() is None
    assert run_again(test_properties_of_a_job) is test_properties_of_a_job


def test_transformer_engine_with_other_names_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function computed again without its scales would give other numbers."""
    for name in ("transformer_engine", "transformer_engine.pytorch"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    with pytest.raises(ImportError, match=r"transformer_engine\.pytorch"):
        module.transformer_engine()
