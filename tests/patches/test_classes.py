"""Methods are patched in place on their class, keep their kind of descriptor, and are restored."""

from __future__ import annotations

import inspect
import pickle

import pytest

from mindspeed_dsa.patches import PatchError
from tests.patches.house import assert_identical, load, patch, snapshot, states


def calls():
    return load("house_impl").CALLS


@pytest.mark.parametrize(
    ("target", "use", "expected"),
    [
        ("Room.paint", lambda core: core.Room(2).paint("red"), "red room of 2"),
        ("Room.unit", lambda core: core.Room.unit(4), 4),
        ("Room.unit", lambda core: core.Room().unit(x=4), 4),
        ("Room.build", lambda core: (core.Room.build(5).size, type(core.Kitchen.build())), (5, "Kitchen")),
        ("Room.door", lambda core: core.Room().door, "closed"),
        ("Room.__init__", lambda core: core.Room(size=3).size, 3),
        ("Kitchen.paint", lambda core: core.Kitchen().paint(), "green room of 1 with a stove"),
    ],
)
@pytest.mark.parametrize("imported_first", [True, False])
def test_every_kind_of_method(house, target, use, expected, imported_first):
    core = load("house.core") if imported_first else None
    manager = house.armed(patch(f"core:{target}"))
    core = core or load("house.core")
    # The class exists only once the module is imported.
    if target == "Room.build":
        expected = (5, core.Kitchen)
    name, attribute = target.split(".")
    raw = vars(getattr(core, name))[attribute]
    assert use(core) == expected
    assert calls()
    assert set(calls()) == {target}
    (site,) = manager.report()
    assert site.state == "applied"
    manager.undo()
    restored = vars(getattr(core, name))[attribute]
    assert type(restored) is type(raw)
    # `raw` was read while the patch was in place.
    assert restored is not raw
    del calls()[:]
    assert use(core) == expected
    assert calls() == []


def test_the_very_same_descriptors_come_back(house):
    load("house.core")
    before = snapshot()
    names = ("paint", "unit", "build", "door", "__init__")
    manager = house.armed(*(patch(f"core:Room.{name}") for name in names), patch("core:Plan.draw"))
    changed = snapshot()
    assert all(changed["house.core.Room", name] is not before["house.core.Room", name] for name in names)
    manager.undo()
    assert_identical(before, snapshot())


def test_property_keeps_setter_and_doc(house):
    core = load("house.core")
    house.armed(patch("core:Room.door", impl="house_impl:mark_a"))
    room = core.Room()
    room.door = 9
    assert (room.size, room.door, core.Room.door.__doc__) == (9, "a(closed)", "The door.")


def test_instances_and_subclasses_from_before_are_reached(house):
    core = load("house.core")
    room, kitchen = core.Room(), core.Kitchen()
    house.armed(patch("core:Room.paint", impl="house_impl:mark_a"))
    assert room.paint() == "a(white room of 1)"
    assert kitchen.paint() == "a(green room of 1) with a stove", "through super()"


def test_a_subclass_that_overrides_without_super_is_not_touched(house):
    house.write(
        {"guest.py": "from house.core import Room\nclass Tent(Room):\n    def paint(self): return 'no'"}
    )
    guest = load("guest")
    house.armed(patch("core:Room.paint", impl="house_impl:mark_a"))
    assert guest.Tent().paint() == "no"


def test_inherited_method_is_patched_in_the_subclass_alone(house):
    core = load("house.core")
    before = snapshot()
    manager = house.armed(patch("core:Kitchen.sweep", impl="house_impl:mark_a"))
    manager.finalize()  # the base class still holds the original, as it should
    assert core.Kitchen().sweep() == "a(swept)"
    assert core.Room().sweep() == "swept"
    function = core.Kitchen.sweep
    assert function.__qualname__ == "Kitchen.sweep"
    assert pickle.loads(pickle.dumps(function)) is function
    manager.undo()
    assert "sweep" not in vars(core.Kitchen)
    assert_identical(before, snapshot())


@pytest.mark.parametrize("base_first", [True, False])
@pytest.mark.parametrize("imported_first", [True, False])
def test_patches_of_base_and_inherited_method_nest_in_any_order(house, base_first, imported_first):
    if imported_first:
        load("house.core")
    before = snapshot()
    rows = [
        patch("core:Room.sweep", impl="house_impl:mark_a"),
        patch("core:Kitchen.sweep", impl="house_impl:mark_b"),
    ]
    manager = house.armed(*(rows if base_first else rows[::-1]))
    core = load("house.core")
    assert core.Room().sweep() == "a(swept)"
    assert core.Kitchen().sweep() == "b(a(swept))"
    manager.finalize()
    assert core.Kitchen().sweep() == "b(a(swept))"
    house.write({"guest.py": "from house.core import Kitchen\nsweep = Kitchen.sweep"})
    guest = load("guest")
    manager.undo()
    assert guest.sweep is core.Room.sweep
    assert core.Kitchen().sweep() == "swept"
    if imported_first:
        assert_identical(before, snapshot())


def test_a_base_that_changes_later_is_still_under_the_patch(house):
    # A circular import can complete the subclass's module before the base's.
    house.write(
        {
            "house/base.py": """
                class Base:
                    def run(self): return "run"
                from house import derived
                """,
            "house/derived.py": "from house.base import Base\nclass Derived(Base): pass",
        }
    )
    manager = house.armed(
        patch("base:Base.run", impl="house_impl:mark_a"),
        patch("derived:Derived.run", impl="house_impl:mark_b"),
    )
    base = load("house.base")
    manager.finalize()
    derived = load("house.derived").Derived
    assert derived().run() == "b(a(run))"
    manager.undo()
    assert "run" not in vars(derived)
    assert derived().run() == base.Base().run() == "run"


def test_special_methods_reach_the_type_slots(house):
    house.write(
        {
            "house/odd.py": """
                class Caller:
                    def __call__(self, x): return x
                    def __len__(self): return 3
                class Heir(Caller): pass
                """
        }
    )
    core = load("house.odd")
    manager = house.armed(patch("odd:Caller.__call__"), patch("odd:Heir.__len__"))
    assert (core.Caller()(2), len(core.Heir()), len(core.Caller())) == (2, 3, 3)
    assert calls() == ["Caller.__call__", "Caller.__len__"]
    manager.undo()
    assert (core.Heir()(2), len(core.Heir())) == (2, 3)
    assert len(calls()) == 2


def test_abstract_methods_stay_abstract(house):
    core = load("house.core")
    manager = house.armed(patch("core:Plan.draw"))
    with pytest.raises(TypeError, match="abstract"):
        type("Sketch", (core.Plan,), {})()
    done = type("Sketch", (core.Plan,), {"draw": lambda self: super(done, self).draw()})
    assert done().draw() is None
    assert calls() == ["Plan.draw"]
    manager.undo()


def test_nested_class_and_object_attribute(house):
    house.write(
        {
            "house/odd.py": """
                class Outer:
                    class Inner:
                        def f(self): return "inner"
                OBJECT = Outer.Inner()
                """
        }
    )
    core = load("house.odd")
    before = snapshot()
    manager = house.armed(
        patch("odd:Outer.Inner.f", impl="house_impl:mark_a"), patch("odd:OBJECT.f", impl="house_impl:mark_b")
    )
    assert core.Outer.Inner().f() == "a(inner)"
    assert core.OBJECT.f().startswith("b(")
    manager.undo()
    assert vars(core.OBJECT) == {}
    assert_identical(before, snapshot())


def test_a_module_level_name_for_a_method_follows_it(house):
    house.write({"guest.py": "from house.core import Room\npaint = Room.paint\nunit = Room.unit"})
    guest = load("guest")
    before = snapshot()
    manager = house.armed(patch("core:Room.paint"), patch("core:Room.unit"))
    manager.finalize()
    assert guest.paint is load("house.core").Room.paint
    assert guest.unit is load("house.core").Room.unit
    manager.undo()
    assert_identical(before, snapshot())


def test_a_function_that_a_class_borrows_does_not_drag_its_module_along(house):
    house.write(
        {
            "guest.py": """
                from house.core import area

                class Box:
                    area = area
                """
        }
    )
    guest = load("guest")
    manager = house.armed(patch("guest:Box.area"))
    manager.finalize()
    assert guest.area is load("house.core").area
    assert guest.area.__module__ == "house.core"
    guest.area(1)
    assert calls() == []


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("core:Room", "patch its methods"),
        ("core:HEIGHT", "use kind 'value'"),
        ("builtin:KEYS", "no function can wrap"),
        ("builtin:Frozen.f", "cannot be patched"),
    ],
)
def test_what_cannot_be_patched_is_refused_and_nothing_changes(house, target, words):
    house.write(
        {
            "house/builtin.py": """
                KEYS = ("a",)

                class Refusing(type):
                    def __setattr__(cls, name, value):
                        raise TypeError("read only")

                class Frozen(metaclass=Refusing):
                    def f(self): return 1
                """
        }
    )
    load("house.core"), load("house.builtin")
    before = snapshot()
    manager = house.manager(patch("core:area"), patch(target))
    with pytest.raises(PatchError, match=words):
        manager.arm()
    assert_identical(before, snapshot())


def test_an_owner_that_does_not_keep_what_is_assigned(house):
    house.write(
        {
            "house/odd.py": """
                class Forgetful(type):
                    def __setattr__(cls, name, value): pass
                class Room(metaclass=Forgetful):
                    def paint(self): return 1
                """
        }
    )
    load("house.odd")
    manager = house.manager(patch("odd:Room.paint"))
    with pytest.raises(PatchError, match="does not keep"):
        manager.arm()


def test_signature_of_bound_methods(house):
    core = load("house.core")
    before = {name: inspect.signature(getattr(core.Room(), name)) for name in ("paint", "unit", "build")}
    house.armed(*(patch(f"core:Room.{name}") for name in before))
    assert {name: inspect.signature(getattr(core.Room(), name)) for name in before} == before
    assert states(house.managers[0]) == ["applied"] * 3
