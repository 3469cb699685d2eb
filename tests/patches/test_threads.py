"""Other threads import modules while patches are armed: every target is patched, and no thread deadlocks."""

from __future__ import annotations

import importlib
import sys
import threading

import pytest

from mindspeed_dsa.patches import Patch
from tests.patches.house import load, patch, states

MODULES = 24
TIMEOUT = 30


def run(*functions):
    """Run functions in threads that start together; fail if one hangs or raises."""
    errors = []
    start = threading.Barrier(len(functions))

    def guarded(function):
        try:
            start.wait(TIMEOUT)
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(f,), daemon=True) for f in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT)
    assert not any(thread.is_alive() for thread in threads), "deadlock"
    assert errors == []


@pytest.mark.parametrize("round_", range(4))
def test_arming_while_other_threads_import(house, round_):
    files = {"house/__init__.py": ""}
    for i in range(MODULES):
        files[f"house/m{i}.py"] = "def f(x): return x\n"
        files[f"house/c{i}.py"] = f"from house.m{i} import f as g\ndef use(x): return g(x)\n"
    house.write(files)
    load("house")
    rows = [Patch(f"house.m{i}:f", "wrap", "house_impl:mark_a", "test") for i in range(MODULES)]
    manager = house.manager(*rows)
    switch_interval = sys.getswitchinterval()
    # Threads switch often, so that more interleavings occur.
    sys.setswitchinterval(1e-5)
    try:
        run(
            manager.arm,
            lambda: [importlib.import_module(f"house.c{i}") for i in range(MODULES)],
            lambda: [importlib.import_module(f"house.m{i}") for i in reversed(range(MODULES))],
        )
    finally:
        sys.setswitchinterval(switch_interval)
    manager.finalize()
    assert set(states(manager)) == {"applied"}
    assert [load(f"house.c{i}").use(1) for i in range(MODULES)] == ["a(1)"] * MODULES


def test_no_lock_is_held_while_a_decorator_runs(house):
    reached = threading.Event(), threading.Event()
    # Thread A prepares a patch whose decorator imports house.slow. Thread B is importing that module already,
    # and its import hook needs the engine. A lock held by A would deadlock.
    house.write(
        {
            "house/__init__.py": "",
            "house/core.py": "def area(x): return x",
            "house/slow.py": "import house_switch; house_switch.flip()\ndef f(): return 1",
            "house_impl.py": """
                import house_switch

                def importing(original):
                    house_switch.BEFORE()
                    import house.slow
                    return lambda *args: original(*args)

                def plain(original):
                    return lambda *args: original(*args)
                """,
        }
    )

    def module_body():
        reached[0].set()
        assert reached[1].wait(TIMEOUT)

    def before_import():
        assert reached[0].wait(TIMEOUT)
        reached[1].set()

    switch = load("house_switch")
    switch.ACTIONS.append(module_body)
    switch.BEFORE = before_import
    load("house.core")
    rows = [
        Patch("house.core:area", "wrap", "house_impl:importing", "test"),
        Patch("house.slow:f", "wrap", "house_impl:plain", "test"),
    ]
    manager = house.manager(*rows)
    late = threading.Event()

    def import_slow():
        assert late.wait(TIMEOUT)
        importlib.import_module("house.slow")

    def arm():
        original = manager._apply_loaded
        manager._apply_loaded = lambda: (late.set(), original())  # the import hooks are installed now
        manager.arm()

    house.managers.clear()  # a deadlock must not hold up the teardown as well
    run(arm, import_slow)
    manager.finalize()
    assert states(manager) == ["applied", "applied"]
    manager.undo()


def test_undo_while_another_thread_prepares(house):
    """A patch prepared before the undo is not installed after it."""
    manager = house.manager(patch("core:area", impl="house_impl:slow"))
    house.write(
        {
            "house_impl.py": """
                import house_switch

                def slow(original):
                    house_switch.flip()
                    return lambda *args: None
                """
        }
    )
    core = load("house.core")
    load("house_switch").ACTIONS.append(lambda: run(manager.undo))
    manager.arm()
    assert states(manager) == ["undone"]
    assert core.area(1) == 2


def test_undo_between_preparing_and_installing(house, monkeypatch):
    core = load("house.core")
    manager = house.manager(patch("core:area"))
    prepare = manager._prepare

    def prepare_then_undo(sites):
        ready = prepare(sites)
        run(manager.undo)
        return ready

    monkeypatch.setattr(manager, "_prepare", prepare_then_undo)
    manager.arm()
    assert states(manager) == ["undone"]
    assert core.area.__code__.co_name == "area"


def test_concurrent_managers_calls(house):
    for module in ("house.core", "guest"):
        load(module)
    manager = house.armed(patch("core:area"), patch("guest:visit"), patch("consumer:use"))
    run(
        lambda: [manager.report() for _ in range(50)],
        lambda: [manager.finalize() for _ in range(10)],
        lambda: load("house.consumer"),
    )
    assert states(manager) == ["applied"] * 3
