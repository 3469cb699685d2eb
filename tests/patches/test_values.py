"""Patches of constants, classes, shared replacements and dictionary items."""

from __future__ import annotations

import copy
import pickle

import pytest

from mindspeed_dsa.patches import PatchError
from tests.patches.house import assert_identical, load, patch, snapshot, states

SHARED = (
    patch("core:area", "value", "house_impl:noop"),
    patch("core:volume", "value", "house_impl:noop"),
)


def test_a_constant(house):
    core = load("house.core")
    before = snapshot()
    manager = house.armed(patch("core:HEIGHT", "value", "house_impl:NUMBER"))
    manager.finalize()
    assert core.HEIGHT == 7
    manager.undo()
    assert_identical(before, snapshot())


def test_a_constant_does_not_drag_equal_constants_along(house):
    house.write(
        {"house/core.py": "ON = None\nOFF = None\n", "house/__init__.py": "", "guest.py": "NOTHING = None"}
    )
    guest, core = load("guest"), load("house.core")
    house.armed(patch("core:ON", "value", "house_impl:NUMBER"))
    assert (core.ON, core.OFF, guest.NOTHING) == (7, None, None)


@pytest.mark.parametrize("imported_first", [True, False])
def test_one_stand_in_for_two_functions_is_undone_for_each(house, imported_first):
    house.write({"guest.py": "from house.core import area, area as surface, volume as content"})
    core = load("house.core")
    before = snapshot()
    if imported_first:
        load("guest")
    manager = house.armed(*SHARED)
    guest = load("guest")
    assert (guest.area(1), guest.surface(1), guest.content(1), core.volume(1)) == (None,) * 4
    assert load("house_impl").noop(1) is None
    stand_in = load("house_impl").noop
    manager.undo()
    assert (guest.area, guest.surface, guest.content) == (core.area, core.area, core.volume)
    assert guest.content(2, height=3) == 6
    assert load("house_impl").noop is stand_in, "the stand-in's own module keeps it"
    assert_identical(before, snapshot())


def test_a_stand_in_is_pickled_as_what_it_stands_for(house):
    house.armed(*SHARED)
    core = load("house.core")
    for function in (core.area, core.volume):
        assert pickle.loads(pickle.dumps(function)) is copy.deepcopy(function) is function


CLASSES = {
    "house_impl.py": """
        class StillRoom:
            pass

        class Room:
            pass
        """,
    "guest.py": "from house.core import Room\nfrom house_impl import StillRoom",
}


@pytest.mark.parametrize("imported_first", [True, False])
def test_a_class_takes_the_place_of_a_class(house, imported_first):
    house.write(CLASSES)
    core = load("house.core")
    original = core.Room
    if imported_first:
        load("guest")
    # The subclass Kitchen keeps the original as its base. By default that is an error.
    manager = house.armed(patch("core:Room", "value", "house_impl:StillRoom", stale="report"))
    guest, still_room = load("guest"), load("house_impl").StillRoom
    assert core.Room is guest.Room is still_room
    manager.undo()
    assert core.Room is guest.Room is original
    assert guest.StillRoom is load("house_impl").StillRoom is still_room


def test_a_class_of_the_same_name_cannot_be_told_from_its_own_imports(house):
    house.write(CLASSES)
    house.write({"guest.py": "from house_impl import Room"})
    manager = house.armed(patch("core:Room", "value", "house_impl:Room", stale="report"))
    load("house.core")
    guest, own = load("guest"), load("house_impl").Room
    manager.undo()
    assert guest.Room is load("house_impl").Room is own, "it came from its own module, not from the target"


def test_a_class_that_is_subclassed_is_stale(house):
    house.write(CLASSES)
    manager = house.armed(patch("core:Room", "value", "house_impl:StillRoom"))
    load("house.core")
    with pytest.raises(PatchError, match=r"held by house\.core\.Kitchen \(a subclass\);"):
        manager.finalize()


def test_instances_annotations_and_own_methods_do_not_make_a_class_stale(house):
    house.write(
        {
            "house/odd.py": """
                from __future__ import annotations
                import dataclasses, inspect, typing

                class Base:
                    def __init__(self): super().__init__()
                    def f(self): return __class__

                def use(x: Base, y: typing.Optional[Base] = None) -> list[Base]: ...
                use.__annotations__ = {"x": Base, "y": typing.Optional[Base], "return": list[Base]}

                @dataclasses.dataclass
                class Holder:
                    base: Base = None
                Holder.__annotations__["base"] = Base
                INSTANCES = [Base(), Holder(), inspect.signature(use)]
                """,
            "house_impl.py": "class Other: pass",
        }
    )
    odd = load("house.odd")
    manager = house.armed(patch("odd:Base", "value", "house_impl:Other"))
    manager.finalize()
    assert odd.Base.__name__ == "Other"


FOREIGN = {
    "library.py": "def act(x): return x",
    "house/odd.py": "from library import act as ACT",
    "guest.py": "from house.odd import ACT\nfrom library import act",
}


@pytest.mark.parametrize("kind", ["wrap", "value"])
@pytest.mark.parametrize("imported_first", [True, False])
def test_a_name_for_another_packages_function_is_patched_alone(house, kind, imported_first):
    house.write(FOREIGN)
    library = load("library")
    original = library.act
    if imported_first:
        load("guest")
    manager = house.armed(
        patch("odd:ACT", kind, "house_impl:noop" if kind == "value" else "house_impl:mark_a")
    )
    odd, guest = load("house.odd"), load("guest")
    manager.finalize()
    assert odd.ACT(1) == (None if kind == "value" else "a(1)")
    assert library.act is guest.act is original
    assert guest.ACT is (original if imported_first else odd.ACT)
    manager.undo()
    assert odd.ACT is guest.ACT is original


def test_a_builtin_under_a_name_of_its_own_is_patched_alone(house):
    house.write({"house/odd.py": "LENGTH = len", "guest.py": "length = len"})
    guest = load("guest")
    load("house.odd")
    house.armed(patch("odd:LENGTH", impl="house_impl:counted"))
    assert load("house.odd").LENGTH is not len
    assert guest.length is len


class TestEntry:
    def rows(self, key="rooms", impl="house_impl:NUMBER", **kwargs):
        return patch("tables:LIMITS", "entry", impl, key=key, **kwargs)

    @pytest.mark.parametrize("imported_first", [True, False])
    def test_existing_and_new_items(self, house, imported_first):
        if imported_first:
            load("house.tables")
        before = snapshot()
        manager = house.armed(self.rows(), self.rows("stairs"))
        limits = load("house.tables").LIMITS
        assert limits == {"floors": 2, "rooms": 7, "stairs": 7}
        assert [site.target for site in manager.report()] == [
            "house.tables:LIMITS['rooms']",
            "house.tables:LIMITS['stairs']",
        ]
        manager.undo()
        assert list(limits.items()) == [("floors", 2), ("rooms", 9)]
        assert_identical(before, snapshot())

    def test_not_a_dictionary(self, house):
        load("house.core")
        with pytest.raises(PatchError, match=r"HEIGHT\['a'\] does not exist: its owner is a int"):
            house.manager(patch("core:HEIGHT", "entry", "house_impl:NUMBER", key="a")).check()

    def test_foreign_item_is_left_alone(self, house):
        limits = load("house.tables").LIMITS
        manager = house.armed(self.rows())
        limits["rooms"] = "theirs"
        assert states(manager) == ["foreign"]
        manager.undo()
        assert limits["rooms"] == "theirs"

    def test_a_new_dictionary_is_noticed(self, house):
        tables = load("house.tables")
        manager = house.armed(self.rows())
        tables.LIMITS = {"rooms": 1}
        assert states(manager) == ["foreign"]

    def test_two_rows_for_one_item_conflict(self, house):
        manager = house.manager(self.rows(), self.rows(impl="house_impl:noop"))
        with pytest.raises(PatchError, match=r"replaced by both f0 .* and f1"):
            manager.check()
