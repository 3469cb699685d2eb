"""The protocol between Megatron's optimizers and features that store optimizer state elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from mindspeed_dsa.megatron.optimizer import (
    FLOAT16,
    Hook,
    OptimizerState,
    Place,
    is_sharded,
    rows,
    state_of,
)
from mindspeed_dsa.optimizers.integrity import StepIntegrity
from mindspeed_dsa.patches.errors import SettingsError
from mindspeed_dsa.patches.spec import Patch
from tests.support.contexts import context

MAIN = object()


class Recorded(OptimizerState):
    """State that records its calls in the optimizer, with its feature's name."""

    def __init__(self, optimizer: Any, feature: str) -> None:
        self.integrity, self.events, self.feature = StepIntegrity(feature), optimizer.events, feature

    @classmethod
    def check(cls, args: Any, options: Any) -> Iterator[str]:
        if getattr(args, "sharded_weights", False) or args.mode == options:
            yield f"{options} does not combine"

    @classmethod
    def built(cls, optimizer: Any, context: Any) -> Recorded | None:
        return cls(optimizer, context.feature) if optimizer.size else None

    def step(self, call: Callable[[], bool]) -> bool:
        self.events.append(f"{self.feature} begins")
        result = call()
        self.events.append(f"{self.feature} ends")
        return result

    def before_grads(self) -> None:
        self.events.append(f"{self.feature} before")

    def after_skip(self) -> None:
        self.events.append(f"{self.feature} skips")

    def set_parameter(self, place: Place, call: Callable[[], None]) -> None:
        assert place == (0, 1, MAIN)
        call()


def wrapped(cls: type, **contexts: Any) -> type:
    """Return ``cls`` with every method decorated, the first feature innermost."""
    decorators = {
        "__init__": "built",
        "prepare_grads": "before_grads",
        "step_with_ready_grads": "step",
        "state_dict": "state_dict",
        "load_state_dict": "load_state_dict",
        "_set_main_param_and_optimizer_states": "set_parameter",
    }
    methods = {}
    for name, hook in decorators.items():
        methods[name] = getattr(cls, name)
        for feature, options in contexts.items():
            decorate = getattr(Recorded, f"wrap_{hook}")
            methods[name] = decorate(methods[name], context(feature, options))
    return type(cls.__name__, (cls,), methods)


class Optimizer:
    """Stand-in for Megatron's optimizer, with one group of two parameters."""

    def __init__(self, optimizer: Any, config: Any, size: int = 1) -> None:
        self.events: list[str] = []
        self.size, self.skips, self.is_stub_optimizer = size, False, size < 0
        self.optimizer = SimpleNamespace(param_groups=[{"params": [object(), MAIN]}])
        self.model_param_group_index_map = {"weight": (0, 1)}

    def prepare_grads(self) -> bool:
        return self.skips

    def step_with_ready_grads(self) -> bool:
        self.events.append("update")
        return True

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: Any) -> None: ...

    def _set_main_param_and_optimizer_states(self, model_param: Any, tensors: Any) -> None: ...


class Sharded(Optimizer):
    """Optimizer with a state dict that omits the parameters' state."""

    shard_fp32_from_float16_groups = ()


CONFIG = SimpleNamespace(mode="usual")


def test_features_nest_and_keep_apart_what_they_keep():
    optimizer = wrapped(Optimizer, inner=None, outer=None)(None, CONFIG)
    assert optimizer.step_with_ready_grads() is True
    assert optimizer.events == ["outer begins", "inner begins", "update", "inner ends", "outer ends"]
    assert state_of(optimizer, "inner") is not state_of(optimizer, "outer")
    state_of(optimizer, "inner").integrity.mark_broken([MAIN])
    assert not state_of(optimizer, "outer").integrity.broken


@pytest.mark.parametrize("size", [0, -1], ids=["nothing to keep", "stub"])
def test_optimizers_without_state_are_megatrons(size):
    optimizer = wrapped(Optimizer, inner=None)(None, CONFIG, size)
    assert state_of(optimizer, "inner") is None
    assert (optimizer.prepare_grads(), optimizer.step_with_ready_grads()) == (False, True)
    assert optimizer.state_dict() == {}
    assert optimizer.events == ["update"]


def test_all_parts_of_a_chain_are_checked_before_the_first_of_them_begins():
    cls = wrapped(Optimizer, inner=None)
    parts = [cls(None, CONFIG), cls(None, CONFIG)]
    chain = SimpleNamespace(chained_optimizers=parts)
    prepare = Recorded.wrap_before_grads(lambda self: True, context("inner"))
    assert prepare(chain) is True
    assert [part.events for part in parts] == [["inner before", "inner skips"]] * 2
    state_of(parts[1], "inner").integrity.mark_broken([MAIN])
    with pytest.raises(RuntimeError, match="inner: a step of this optimizer failed in the middle"):
        prepare(chain)
    assert parts[0].events == ["inner before", "inner skips"]


@pytest.mark.parametrize("cls", [Optimizer, Sharded])
def test_torn_state_is_neither_updated_nor_saved_until_it_is_loaded(cls):
    optimizer = wrapped(cls, inner=None)(None, CONFIG)
    state = state_of(optimizer, "inner")
    state.integrity.mark_broken([MAIN])
    for refused in (optimizer.step_with_ready_grads, optimizer.state_dict, optimizer.prepare_grads):
        with pytest.raises(RuntimeError, match="load a state dict into the model"):
            refused()
    assert optimizer.events == []
    optimizer.load_state_dict({})
    assert state.integrity.broken == is_sharded(optimizer) == (cls is Sharded)
    optimizer._set_main_param_and_optimizer_states("weight", {})
    assert not state.integrity.broken
    assert optimizer.step_with_ready_grads()


def test_configurations_are_checked_before_and_after_the_constructor():
    class WithDdp(Optimizer):
        def __init__(self, optimizer: Any, config: Any) -> None:
            super().__init__(optimizer, config)
            self.ddp_config = SimpleNamespace(sharded_weights=True)

    with pytest.raises(SettingsError, match=r"^inner: odd does not combine$"):
        wrapped(Optimizer, inner="odd")(None, SimpleNamespace(mode="odd"))
    with pytest.raises(SettingsError, match=r"^inner: odd does not combine$"):
        wrapped(WithDdp, inner="odd")(None, CONFIG)
    wrapped(Optimizer, inner="odd")(None, CONFIG)


def test_rows_name_the_decorators_of_the_implementation():
    (row,) = rows("package.module:State", Hook("load_state_dict", "why", (FLOAT16,)))
    expected = "package.module:State.wrap_load_state_dict"
    assert row == Patch(f"{FLOAT16}.load_state_dict", "wrap", expected, "why", params=("state_dict",))
    assert len(rows("package.module:State", Hook("load_state_dict", "why"))) == 3
