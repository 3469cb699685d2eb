"""In every order of imports, the consumer's names end up bound to the patch, and the patch is called."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

import pytest

from mindspeed_dsa.patches import PatchError
from mindspeed_dsa.patches import hooks as hooks_module
from tests.patches.house import assert_identical, load, patch, snapshot, states

BOTH_ORDERS = pytest.mark.parametrize("imported_first", [True, False], ids=["imported-first", "armed-first"])


def calls():
    return load("house_impl").CALLS


@BOTH_ORDERS
def test_from_imports_aliases_and_re_exports(house, imported_first):
    if imported_first:
        load("guest"), load("house.consumer")
    manager = house.armed(patch("core:area"))
    guest, consumer, core = load("guest"), load("house.consumer"), load("house.core")
    assert consumer.area is consumer.surface is guest.area is load("house").area is core.area
    assert (consumer.use(3), guest.visit(3)) == (6, 6)
    assert calls() == ["area", "area"]
    # Four names besides the home's: one in house, one in guest, and two in house.consumer.
    (site,) = manager.report()
    assert site.rebound == (4 if imported_first else 0), "hooks fire before consumers bind"


@BOTH_ORDERS
def test_a_target_named_by_its_re_export_reaches_the_home(house, imported_first):
    if imported_first:
        load("guest")
    house.armed(patch("house:area"))
    load("guest")
    assert load("house.core").area is load("house").area is load("guest").area
    assert load("guest").visit(1) == 2
    assert calls() == ["area"]


@BOTH_ORDERS
def test_star_import(house, imported_first):
    house.write({"guest.py": "from house.core import *"})
    if imported_first:
        load("guest")
    house.armed(patch("core:volume"))
    assert load("guest").volume(2, height=2) == 4
    assert calls() == ["volume"]


@BOTH_ORDERS
def test_circular_import_binds_from_the_half_executed_module(house, imported_first):
    house.write(
        {
            "house/core.py": """
                def area(x, factor=2):
                    return x * factor

                from house import consumer

                def later(x):
                    return consumer.use(x)
                """
        }
    )
    if imported_first:
        load("house.core")
    manager = house.armed(patch("core:area"))
    assert load("house.core").later(3) == 6
    assert calls() == ["area"]
    assert load("house.consumer").area is load("house.core").area
    manager.finalize()


@pytest.mark.parametrize("armed_in", ["house/__init__.py", "house/core.py"])
def test_armed_from_inside_the_package_being_patched(house, armed_in):
    """Arming works at the top of the module that has the targets, and at the top of its package."""
    old = (house.folder / armed_in).read_text()
    # The file arms a manager in its first line.
    house.write({armed_in: "from house_switch import flip; flip()\n" + old})
    managers = []
    load("house_switch").ACTIONS.append(lambda: managers.append(house.armed(patch("core:area"))))
    guest = load("guest")
    managers[0].finalize()
    assert guest.area is load("house.core").area
    assert guest.visit(3) == 6
    assert calls() == ["area"]


def test_a_half_executed_module_is_left_alone(house):
    # The module's names do not exist yet. An early patch attempt would report them as missing targets.
    house.write({"house/core.py": "from house_switch import flip; flip()\ndef area(x): return x"})
    seen = []
    load("house_switch").ACTIONS.append(lambda: seen.append(house.armed(patch("core:area"))))
    load("house.core")
    assert states(seen[0]) == ["pending"]
    seen[0].finalize()
    assert states(seen[0]) == ["applied"]


@pytest.mark.parametrize("target", ["house:area", "house.core:area"])
@BOTH_ORDERS
def test_lazy_re_export_by_module_getattr(house, imported_first, target):
    house.write(
        {
            "house/__init__.py": """
                def __getattr__(name):
                    if name == "area":
                        from house.core import area
                        return area
                    raise AttributeError(name)
                """
        }
    )
    if imported_first:
        load("guest")
    before = snapshot()
    manager = house.armed(patch(target))
    assert load("guest").visit(2) == 4
    assert calls() == ["area"]
    manager.undo()
    assert "area" not in vars(load("house")), "what was lazy is lazy again"
    if imported_first:
        assert_identical(before, snapshot())


@BOTH_ORDERS
def test_module_loaded_by_lazy_loader(house, imported_first):
    load("house_impl")

    def lazily():
        spec = importlib.util.find_spec("guest")
        spec.loader = importlib.util.LazyLoader(spec.loader)
        module = importlib.util.module_from_spec(spec)
        sys.modules["guest"] = module
        spec.loader.exec_module(module)
        return module

    module = lazily() if imported_first else None
    manager = house.armed(patch("guest:visit"))
    module = module or lazily()
    assert module.visit(2) == 4
    assert calls() == ["visit"]
    manager.finalize()


def test_the_sweep_wakes_no_lazy_module(house):
    house.write(
        {
            "guest.py": """
                ASKED = []

                def __getattr__(name):
                    ASKED.append(name)
                    raise RuntimeError("do not touch")
                """
        }
    )
    spec = importlib.util.find_spec("house.consumer")
    loader = importlib.util.LazyLoader(spec.loader)
    spec.loader = loader
    lazy = importlib.util.module_from_spec(spec)
    sys.modules["house.consumer"] = lazy
    loader.exec_module(lazy)
    guest = load("guest")
    manager = house.armed(patch("core:area"))
    load("house.core")
    # These are all passes over sys.modules.
    manager.finalize()
    manager.undo()
    manager.report()
    assert guest.ASKED == []
    assert "use" not in hooks_module.namespace(lazy), "still not executed"


def test_strange_things_in_sys_modules(house, monkeypatch):
    class Slotted:
        __slots__ = ()

    class Hostile:
        def __getattribute__(self, name):
            raise RuntimeError(name)

    monkeypatch.setitem(sys.modules, "guest_slots", Slotted())
    monkeypatch.setitem(sys.modules, "guest_hostile", Hostile())
    monkeypatch.setitem(sys.modules, "guest_none", None)
    load("house.core")
    manager = house.armed(
        patch("core:area"),
        patch("guest_slots:f", required=False),
        patch("guest_hostile:f", required=False),
        patch("guest_none:f", required=False),
    )
    manager.finalize()
    assert states(manager) == ["applied", "skipped", "skipped", "pending"]
    manager.undo()


@BOTH_ORDERS
def test_a_module_that_put_an_object_in_its_place(house, imported_first):
    house.write(
        {
            "house/facade.py": """
                import sys, types

                class Facade(types.ModuleType):
                    pass

                facade = Facade(__name__)
                facade.paint = lambda colour: colour
                sys.modules[__name__] = facade
                """,
            "guest.py": "from house.facade import paint",
        }
    )
    if imported_first:
        load("guest")
    house.armed(patch("facade:paint"))
    assert load("guest").paint("red") == "red"
    assert len(calls()) == 1


def test_a_name_in_a_module_that_was_complete_before(house):
    # The target's module registers its function in an older module, so no import ever binds it there.
    house.write(
        {
            "library.py": "HANDLER = None",
            "house/core.py": """
                import library

                def area(x):
                    return x

                library.HANDLER = area
                """,
        }
    )
    load("library")
    manager = house.armed(patch("core:area"))
    load("house.core")
    manager.finalize()
    assert load("library").HANDLER is load("house.core").area


def test_a_name_in_a_module_that_began_before_and_is_half_executed(house):
    # The target's module binds the name while the consumer waits for its import; no finalize() is needed.
    house.write(
        {
            "house/consumer.py": "HANDLER = None\nfrom house import core",
            "house/__init__.py": "",
            "house/core.py": """
                import sys

                def area(x):
                    return x

                sys.modules["house.consumer"].HANDLER = area
                """,
        }
    )
    house.armed(patch("core:area"))
    consumer = load("house.consumer")
    assert consumer.HANDLER is load("house.core").area
    assert consumer.HANDLER(2) == 2
    assert calls() == ["area"]


def test_the_implementation_is_imported_first_and_imports_the_target(house):
    house.write(
        {
            "house_impl.py": """
                from house.core import Room
                CALLS = []

                def counted(original):
                    def wrapper(*args):
                        CALLS.append(Room)
                        return original(*args)
                    return wrapper
                """
        }
    )
    manager = house.armed(patch("core:area"))
    load("house_impl")
    manager.finalize()
    assert states(manager) == ["applied"]
    assert load("house.core").area(3) == 6
    assert len(calls()) == 1


def test_an_import_that_fails_at_first_is_patched_when_it_succeeds(house):
    house.write({"house/flaky.py": "import house_switch; house_switch.flip()\ndef f(): return 1"})
    manager = house.armed(patch("flaky:f"))

    def fail():
        raise RuntimeError("not yet")

    load("house_switch").ACTIONS.append(fail)
    with pytest.raises(RuntimeError, match="not yet"):
        load("house.flaky")
    # The second import succeeds.
    load("house_switch").ACTIONS.clear()
    assert load("house.flaky").f() == 1
    assert calls() == ["f"]
    assert states(manager) == ["applied"]


def test_failing_hooks_break_no_import_and_finalize_lists_all(house, caplog):
    house.write({"house_bad.py": "raise ImportError('no such accelerator')"})
    manager = house.manager(
        patch("core:area"),
        patch("core:nothing"),
        patch("core:volume", impl="house_bad:f"),
        patch("core:Room.sweep", impl="house_impl:NUMBER"),
        patch("core:HEIGHT"),
        patch("core:Room.paint", impl="house_impl:absent", required=False),
    )
    manager.arm()
    core = load("house.core")
    assert core.area(3) == 6
    assert "no such accelerator" in caplog.text, "a script that never finalizes is told as well"
    before = snapshot()
    with pytest.raises(PatchError) as caught:
        manager.finalize()
    assert len(caught.value.problems) == 4
    for words in (
        "f1: house.core:nothing",
        "no such accelerator",
        "house.core:Room.sweep",
        "house.core:HEIGHT",
    ):
        assert words in str(caught.value)
    # finalize() has undone the site that was patched, so the names are as before.
    assert_identical(before, snapshot())
    assert states(manager) == ["undone", "failed", "failed", "failed", "failed", "skipped"]
    assert calls() == []


def test_no_defect_of_ours_breaks_an_import(house, monkeypatch):
    manager = house.armed(patch("core:area"))

    def fail(*args, **kwargs):
        raise RuntimeError("a defect of the engine")

    monkeypatch.setattr(manager, "_apply", fail)
    assert load("house.core").area(1) == 2
    monkeypatch.undo()
    with pytest.raises(PatchError, match="a defect of the engine"):
        manager.finalize()


def test_a_module_that_does_not_exist_is_a_failure_of_finalize(house):
    manager = house.armed(patch("attic:f"), patch("cellar:f", required=False))
    manager.finalize()
    assert states(manager) == ["pending", "pending"], "its package is not imported: nobody can tell"
    load("house")
    with pytest.raises(PatchError, match=r"there is no module house\.attic"):
        manager.finalize()
    assert states(manager) == ["failed", "skipped"]


def test_pending_sites_pass_finalize_and_are_patched_later(house):
    manager = house.armed(patch("core:area"))
    manager.finalize()
    load("house.consumer").use(1)
    assert calls() == ["area"]
    assert isinstance(load("house.core"), ModuleType)


def test_implementations_load_modules_that_have_sites_of_their_own(house):
    """The import hooks are in place before the first implementation is imported."""
    house.write({"house_impl.py": (house.folder / "house_impl.py").read_text() + "\nimport guest"})
    load("house.core")
    manager = house.armed(patch("core:volume"), patch("guest:visit"))
    assert states(manager) == ["applied", "applied"]
    assert load("guest").visit(1) == 2
    assert calls() == ["visit"]
