"""A required patch that other code replaces is an error; a patch that other code wraps is not."""

from __future__ import annotations

import functools
from importlib import import_module

import pytest

from mindspeed_dsa.patches import PatchError
from tests.patches.house import patch


class Keeper:
    """Wrapper that keeps the patched function in an attribute, as MindSpeed's engine does."""

    def __init__(self, wrapped):
        self.final_patch_func = wrapped

    def __call__(self, *args):
        return self.final_patch_func(*args)


def in_a_closure(ours):
    def theirs(x):
        return ours(x)

    return theirs


def with_wraps(ours):
    @functools.wraps(ours)
    def theirs(*args):
        return vars(theirs)["__wrapped__"](*args)

    return theirs


def in_a_default(ours):
    return lambda x, _original=ours: _original(x)


def in_a_list(ours):
    chain = [print, ours]
    return lambda x: chain[-1](x)


def under_a_name(ours):
    global _kept
    _kept = ours

    def theirs(x):
        return (lambda: _kept(x))()

    return theirs


def as_an_attribute(ours):
    Keeper.kept = staticmethod(ours)
    return lambda x: Keeper.kept(x)


WRAPPERS = (
    in_a_closure,
    with_wraps,
    in_a_default,
    in_a_list,
    under_a_name,
    as_an_attribute,
    lambda ours: functools.partial(ours),
    Keeper,
    lambda ours: in_a_closure(with_wraps(Keeper(ours))),
)


@pytest.fixture(autouse=True)
def _forget():
    yield
    globals().pop("_kept", None)
    vars(Keeper).get("kept") and delattr(Keeper, "kept")


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_code_that_wraps_ours_stays(house, wrap):
    manager = house.armed(patch("core:area", impl="house_impl:mark_a"))
    core = import_module("house.core")
    core.area = wrap(core.area)
    manager.finalize()
    assert core.area(1) == "a(2)"
    assert [site.state for site in manager.report()] == ["foreign"]


def stock(x, factor=2):
    """Another library's replacement of the function, which never calls the original."""
    return x * factor


@pytest.mark.parametrize("how", [lambda: stock, lambda: Keeper(stock), lambda: in_a_closure(stock)])
def test_code_that_drops_ours_is_refused(house, how):
    manager = house.armed(patch("core:area", impl="house_impl:mark_a"))
    core = import_module("house.core")
    core.area = how()
    assert core.area(1) == 2, "training would go on without the feature"
    with pytest.raises(PatchError, match=r"house\.core:area: other code .* does not call what it replaced"):
        manager.finalize()


def test_a_method_that_is_replaced(house):
    manager = house.armed(patch("core:Room.sweep", impl="house_impl:mark_a"))
    room = import_module("house.core").Room
    ours = room.sweep
    room.sweep = lambda self: ours(self)
    manager.finalize()
    room.sweep = lambda self: "swept"
    with pytest.raises(PatchError, match=r"Room\.sweep.*does not call what it replaced"):
        manager.finalize()


def test_a_patch_that_callers_may_pass_may_be_replaced(house):
    # Patches of torch's own functions are declared this way, because several libraries redirect them.
    manager = house.armed(patch("core:area", impl="house_impl:mark_a", stale="report"))
    import_module("house.core").area = stock
    manager.finalize()
    assert [site.state for site in manager.report()] == ["foreign"]


def test_an_optional_patch_may_be_replaced(house):
    manager = house.armed(patch("core:area", impl="house_impl:mark_a", required=False))
    import_module("house.core").area = stock
    manager.finalize()
    assert "does not call what it replaced" in manager.report()[0].reason
