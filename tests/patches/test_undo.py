"""Undo restores the identical objects, whatever happened since patching."""

from __future__ import annotations

import gc
import importlib
import sys
import weakref

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mindspeed_dsa.patches import Claim, PatchError
from tests.patches.house import assert_identical, load, patch, snapshot, states

ROWS = [
    *(
        patch("core:area", impl=f"house_impl:mark_{x}", priority=p)
        for x, p in (("a", 0), ("b", 1), ("c", -1))
    ),
    patch("core:area", "replace", "house_impl:tenfold"),
    patch("house:area"),
    patch("core:volume"),
    patch("core:HEIGHT", "value", "house_impl:NUMBER"),
    *(patch(f"core:Room.{name}") for name in ("__init__", "paint", "unit", "build", "door", "sweep")),
    patch("core:Kitchen.sweep", impl="house_impl:mark_a"),
    patch("core:Kitchen.paint"),
    patch("core:Plan.draw"),
    patch("tables:LIMITS", "entry", "house_impl:NUMBER", key="rooms"),
    patch("tables:LIMITS", "entry", "house_impl:NUMBER", key="stairs"),
    patch("consumer:use"),
    patch("guest:visit"),
]
MODULES = ["house", "house.core", "house.consumer", "house.tables", "guest"]
STEPS = st.one_of(
    st.sampled_from(["finalize", "undo", "report"]),
    st.tuples(st.just("import"), st.sampled_from(MODULES)),
    st.tuples(st.just("enable"), st.lists(st.integers(0, len(ROWS) - 1), unique=True, max_size=8)),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(imported=st.lists(st.sampled_from(MODULES), unique=True), steps=st.lists(STEPS, max_size=8))
def test_any_history_returns_to_the_identical_objects(house, imported, steps):
    # One fixture serves all examples, so each begins by unloading the packages.
    house.close()
    for name in imported:
        load(name)
    before = snapshot()
    manager = house.manager()
    for step in steps:
        try:
            if step == "finalize":
                manager.finalize()
            elif step in ("undo", "report"):
                getattr(manager, step)()
            elif step[0] == "import":
                load(step[1])
            else:
                manager.undo()
                manager.plan(Claim(f"f{i}", ROWS[i], i) for i in step[1])
                manager.check()
                manager.arm()
        except PatchError:
            pass  # two spellings of one object: a failed arm() must leave nothing behind
    manager.undo()
    assert_identical(before, snapshot())
    # Modules imported meanwhile look as if imported without patches.
    core = load("house.core")
    assert load("house.consumer").surface is load("guest").area is load("house").area is core.area
    assert core.area.__code__.co_filename == core.__file__
    assert (core.area(3), core.HEIGHT, load("house.tables").LIMITS) == (6, 3, {"floors": 2, "rooms": 9})


def test_names_bound_after_patching(house):
    manager = house.armed(patch("core:area"), patch("core:Room.paint"))
    house.write({"guest.py": "from house.core import area as a, Room\npaint = Room.paint"})
    guest, core = load("guest"), load("house.core")
    assert guest.a is core.area
    manager.undo()
    assert guest.a is core.area
    assert guest.a.__code__.co_name == "area"
    assert guest.paint is core.Room.paint
    assert guest.paint.__code__.co_name == "paint"


def test_a_module_that_left_sys_modules_is_restored(house):
    guest = load("guest")
    original = guest.area
    manager = house.armed(patch("core:area"))
    assert guest.area is not original
    del sys.modules["guest"]
    manager.undo()
    assert guest.area is original


def test_a_second_plan_works_and_old_hooks_are_dead(house):
    manager = house.armed(patch("core:area", impl="house_impl:mark_a"))
    manager.undo()
    assert states(manager) == ["undone"]
    manager.plan([Claim("g", patch("core:area", impl="house_impl:mark_b"))])
    manager.check()
    manager.arm()
    core = load("house.core")
    assert core.area(1) == "b(2)"
    manager.undo()
    other = house.armed(patch("core:area", impl="house_impl:mark_c"))
    assert core.area(1) == "c(2)"
    other.finalize()
    other.undo()
    assert core.area(1) == 2


def test_undone_before_the_import_patches_nothing(house):
    manager = house.armed(patch("core:area"))
    manager.undo()
    assert load("house.core").area(1) == 2
    manager.finalize()
    assert "house_impl" not in sys.modules, "the old hook does not even import what it would have put there"


def test_two_managers_on_one_target(house):
    core = load("house.core")
    before = snapshot()
    inner = house.armed(patch("core:area", impl="house_impl:mark_a"))
    outer = house.armed(patch("core:area", impl="house_impl:mark_b"))
    assert core.area(1) == "b(a(2))"
    assert states(inner) == ["foreign"]
    outer.undo()
    assert states(inner) == ["applied"], "given back"
    inner.undo()
    assert_identical(before, snapshot())


def test_undo_forgets_the_patches(house):
    core = load("house.core")
    manager = house.armed(patch("core:area"), patch("core:Room.unit"))
    alive = [weakref.ref(core.area), weakref.ref(core.Room.unit)]
    manager.undo()
    gc.collect()
    assert [reference() for reference in alive] == [None, None]


def test_import_hooks_let_go_of_what_was_undone(house):
    manager = house.armed(patch("core:area"), patch("guest:visit"))
    manager.undo()
    house.managers.remove(manager)
    alive = weakref.ref(manager)
    del manager
    gc.collect()
    assert alive() is None
    assert load("guest").visit(1) == 2


def test_holders_of_a_patch_that_was_undone_are_reported(house):
    house.write({"guest.py": "from house.core import area\ndef visit(x, function=area): return function(x)"})
    manager = house.armed(patch("core:area"), patch("core:volume"))
    load("guest")
    manager.undo()
    area, volume = manager.report()
    assert (area.state, area.stale) == (
        "undone",
        ["the default argument of guest.visit (parameter function)"],
    )
    assert volume.stale == []


class TestForeign:
    """Other code patches the same place after us."""

    def test_left_alone_reported_and_given_back(self, house):
        core = load("house.core")
        before = snapshot()
        manager = house.armed(patch("core:area", impl="house_impl:mark_a"))
        ours = core.area
        core.area = lambda *args: f"theirs({ours(*args)})"
        theirs = core.area
        manager.finalize()
        (site,) = manager.report()
        assert site.state == "foreign"
        assert "other code re-patched it with" in site.reason
        manager.undo()
        assert core.area is theirs
        assert states(manager) == ["foreign"]
        core.area = ours  # they undo theirs, and bring our patch back after our undo
        manager.undo()
        assert_identical(before, snapshot())

    def test_given_back_before_the_next_plan(self, house):
        core = load("house.core")
        original = core.area
        manager = house.armed(patch("core:area"))
        ours, core.area = core.area, abs
        manager.undo()
        core.area = ours
        manager.plan([])
        assert core.area is original

    def test_a_saved_original_of_theirs_is_ours_undone(self, house):
        house.write(
            {"guest.py": "import house.core\nsaved = house.core.area\nhouse.core.area = lambda x: saved(x)"}
        )
        manager = house.armed(patch("core:area", impl="house_impl:mark_a"))
        guest = load("guest")
        assert load("house.core").area(1) == "a(2)"
        manager.undo()
        assert load("house.core").area(1) == 2
        assert guest.saved.__code__.co_name == "area"

    @pytest.mark.parametrize("required", [True, False])
    def test_the_original_put_back_switches_a_feature_off(self, house, required):
        core = load("house.core")
        original = core.area
        manager = house.armed(patch("core:area", required=required))
        core.area = original
        assert "restored the original" in manager.report()[0].reason
        if required:
            with pytest.raises(PatchError, match="restored the original"):
                manager.finalize()
        else:
            manager.finalize()

    def test_a_subclass_in_the_place_of_a_patched_class_is_ours_still(self, house):
        core = load("house.core")
        manager = house.armed(patch("core:Room.paint"))
        core.Room = type("Room", (core.Room,), {})
        assert states(manager) == ["applied"]
        core.Room = type("Room", (), {"paint": lambda self: None})
        assert states(manager) == ["foreign"]


class TestExecutedAgain:
    @pytest.mark.parametrize("how", ["reload", "import"])
    def test_finalize_patches_the_new_objects_and_undo_restores_both(self, house, how):
        core, consumer = load("house.core"), load("house.consumer")
        old_area, old_room = core.area, core.Room
        old_paint = vars(old_room)["paint"]
        manager = house.armed(patch("core:area", impl="house_impl:mark_a"), patch("core:Room.paint"))
        if how == "reload":
            importlib.reload(core)
        else:
            del sys.modules["house.core"]
            core = load("house.core")
        assert [site.state for site in manager.report()] == ["foreign", "foreign"]
        assert "was executed again" in manager.report()[0].reason
        fresh = vars(core.Room)["paint"]
        manager.finalize()
        assert states(manager) == ["applied", "applied"]
        assert (core.area(1), consumer.use(1)) == ("a(2)", "a(2)")
        core.Room().paint()
        assert load("house_impl").CALLS == ["Room.paint"]
        manager.undo()
        assert consumer.surface is old_area
        assert (vars(old_room)["paint"], vars(core.Room)["paint"]) == (old_paint, fresh)
        assert core.area(1) == 2
        manager.undo()
        assert states(manager) == ["undone", "undone"]

    def test_a_patch_over_a_reload_is_left_alone(self, house):
        core = load("house.core")
        manager = house.armed(patch("core:area", required=False))
        core.area = theirs = lambda x: x
        manager.finalize()
        assert core.area is theirs
