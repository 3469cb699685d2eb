"""Objects that still hold an original are found and named; objects that only mention it are not."""

from __future__ import annotations

import dataclasses
import functools
import gc
import sys
import threading
import weakref

import pytest
import wrapt

from mindspeed_dsa.patches import PatchError
from tests.patches.house import assert_identical, load, patch, snapshot

# Code objects have had a qualified name since Python 3.11.
NAMED_CODE = sys.version_info >= (3, 11)

# By kind: source of the guest module, and the expected name of the holder.
HOLDERS = {
    "default": ("def g(x, f=area): return f(x)", "the default argument of guest.g (parameter f)"),
    "keyword default": ("def g(x, *, f=area): return f(x)", "the default argument of guest.g (parameter f)"),
    "lambda default": (
        "g = lambda x, y=1, f=area: f(x)",
        "the default argument of guest.<lambda> (parameter f)",
    ),
    "closure": (
        "def outer(f):\n    def inner(x): return f(x)\n    return inner\ng = outer(area)",
        "the closure of guest.outer.<locals>.inner (variable f)",
    ),
    "wraps": (
        "def outer(f):\n    @functools.wraps(f)\n    def inner(x): f(x)\n    return inner\ng = outer(area)",
        f"the closure of guest.{'outer.<locals>.' * NAMED_CODE}inner (variable f)",
    ),
    "dictionary": ("TABLE = {'area': area}", "guest.TABLE['area']"),
    "nested": ("TABLE = {'a': [(0, {'b': (area,)})]}", "guest.TABLE['a']"),
    "set": ("CALLBACKS = {area}", "guest.CALLBACKS"),
    "partial": ("g = functools.partial(area, 3)", "guest.g"),
    "partial in a list": ("g = [functools.partial(area, 3)]", "guest.g"),
    "class attribute": ("class Holder:\n    run = area", "guest.Holder.run"),
    "static method": ("class Holder:\n    run = staticmethod(area)", "guest.Holder.run"),
    "class table": ("class Holder:\n    TABLE = [area]", "guest.Holder.TABLE"),
    "instance": (
        "class Holder:\n    def __init__(self): self.run = area\nH = Holder()",
        "a guest.Holder",
    ),
    "instance table": (
        "class Holder: pass\nH = Holder()\nvars(H)['table'] = {'x': area}",
        "a guest.Holder",
    ),
    "slots": (
        "class Holder:\n    __slots__ = ('run',)\nH = Holder()\nH.run = area",
        "a guest.Holder",
    ),
    "function attribute": ("def g(): pass\ng.run = area", "guest.g.run"),
    "cache": ("g = functools.lru_cache(area)", "guest.g"),
    "dataclass default": (
        "import dataclasses\n@dataclasses.dataclass\nclass Config:\n    act: object = area",
        "guest.Config.act",
    ),
    "bound": ("import types\ng = types.MethodType(area, 3)", "guest.g"),
    "deep": ("TABLE = [[[[[[[[area]]]]]]]]", "a list, deep inside other containers"),
}


def guest(house, body):
    house.write({"guest.py": f"import functools\nfrom house.core import area, Room\n{body}\n"})
    return load("guest")


@pytest.mark.parametrize(("body", "holder"), HOLDERS.values(), ids=HOLDERS)
def test_holders_are_named(house, body, holder):
    guest(house, body)
    before = snapshot()
    manager = house.armed(patch("core:area", required=False))
    manager.finalize()
    (site,) = manager.report()
    assert holder in site.stale
    assert site.stale == sorted(site.stale), "the heap's order differs from one search to the next"
    assert site.state == "applied", "an optional site is only reported"
    manager.undo()

    manager = house.armed(patch("core:area"), patch("core:volume"))
    with pytest.raises(PatchError) as caught:
        manager.finalize()
    assert f"f0: house.core:area: the original is still held by {', '.join(site.stale)};" in str(caught.value)
    assert_identical(before, snapshot())

    house.armed(patch("core:area", stale="report")).finalize()


LEFT = []


def computes_later(original):
    """Decorate a function so that each call leaves a closure over the original, like a graph not yet run."""

    def run(*args):
        def again():
            return original(*args)

        LEFT.append(again)
        return original(*args)

    return run


def test_what_a_call_of_an_earlier_patch_has_left_is_no_holder(house):
    # The closure refers to an undone patch's original. A failed job's graph must not block later jobs.
    core = load("house.core")
    manager = house.armed(patch("core:area", impl=f"{__name__}:computes_later", kind="wrap"))
    manager.finalize()
    before = core.area(3)
    manager.undo()
    again = house.armed(patch("core:area"))
    again.finalize()
    (site,) = again.report()
    assert (site.state, site.stale) == ("applied", [])
    assert LEFT.pop()() == before


@pytest.mark.parametrize(
    "body",
    [
        "g = area",
        "TABLE = {area: 'key'}",
        "import weakref\nR = weakref.WeakSet([area])\nS = weakref.WeakKeyDictionary({area: 1})",
        "import weakref\nT = weakref.ref(area)",
        "def g(): pass\ng.__wrapped__ = area",
        "def g(x): pass\ng.__annotations__['x'] = area",
        "class C:\n    x: area",
        "import inspect\nS = inspect.signature(lambda f=area: f)\n",
        "@functools.lru_cache\ndef g(f): return 1\ng(area)",
        "@functools.lru_cache(None)\ndef g(f): return 1\ng(area)",
        "def g(): return area(1)\nCODE = g.__code__",
        "def loop():\n    held = area\n    yield held\nL = loop(); next(L)",
    ],
)
def test_mentions_are_no_holders(house, body):
    guest(house, body)
    manager = house.armed(patch("core:area"))
    manager.finalize()
    assert manager.report()[0].stale == []


def test_local_variables_are_no_holders(house):
    load("house.core")
    area = load("house.core").area
    table, call, iterator = {"a": [area]}, functools.partial(area), iter([area])
    running, done = threading.Event(), threading.Event()

    def wait():
        held = [load("house.core").area]
        running.set()
        done.wait(30)
        assert held

    thread = threading.Thread(target=wait)
    thread.start()
    running.wait(30)
    manager = house.armed(patch("core:area"))
    manager.finalize()
    done.set()
    thread.join(30)
    assert manager.report()[0].stale == []
    assert (table["a"][0], call.func, next(iterator)) == (area,) * 3


def test_garbage_is_no_holder(house):
    guest(house, "class Holder: pass")
    holder = load("guest").Holder()
    holder.run, holder.me = load("guest").area, holder
    gone = weakref.ref(holder)
    gc.disable()
    try:
        manager = house.armed(patch("core:area"))
        del holder
        assert gone() is not None
        manager.finalize()
    finally:
        gc.enable()


def test_what_the_patch_itself_holds_is_no_holder(house):
    house.write(
        {
            "house_impl.py": """
                import functools

                class Caller:
                    def __init__(self, function):
                        self.function = function

                def hoarding(original):
                    state = Caller(original)
                    table = {"original": [original]}
                    def helper():
                        return table["original"][0]
                    @functools.wraps(original)
                    def wrapper(*args, keep=original):
                        assert helper() is keep is state.function
                        return keep(*args)
                    wrapper.original = original
                    return wrapper
                """
        }
    )
    core = load("house.core")
    rows = [patch(f"core:{name}", impl="house_impl:hoarding") for name in ("area", "Room.unit", "Room.build")]
    manager = house.armed(*rows)
    manager.finalize()
    assert (core.area(2), core.Room.unit(2)) == (4, 2)


def test_a_patch_named_after_its_original_is_no_holder_below_another(house):
    house.write(
        {
            "house_impl.py": """
                import functools

                def named(original):
                    @functools.wraps(original)
                    def wrapper(*args):
                        return original(*args) + 1
                    return wrapper

                def around(original):
                    def wrapper(*args):
                        return 10 * original(*args)
                    return wrapper
                """
        }
    )
    core = load("house.core")
    inner, outer = (patch("core:area", impl=f"house_impl:{name}") for name in ("named", "around"))
    house.armed(inner, dataclasses.replace(outer, priority=1)).finalize()
    assert core.area(2) == 50


def test_a_function_that_refers_to_itself_is_no_holder(house):
    house.write(
        {
            "house/odd.py": """
                def make():
                    def count(n): return n and 1 + count(n - 1)
                    return count
                count = make()

                class Node:
                    def f(self): return super().__repr__()
                """
        }
    )
    odd = load("house.odd")
    manager = house.armed(patch("odd:count"), patch("odd:Node.f"))
    manager.finalize()
    assert odd.count(3) == 3


def test_methods(house):
    body = """
room = Room()
HANDLERS = [room.paint]

class Tent(Room):
    repaint = Room.paint
"""
    guest(house, body)
    manager = house.armed(patch("core:Room.paint", required=False), patch("core:Room.sweep"))
    manager.finalize()
    paint, sweep = manager.report()
    assert sorted(paint.stale) == ["guest.HANDLERS", "guest.Tent.repaint"]
    assert sweep.stale == []


def test_a_holder_in_a_module_that_left_sys_modules(house):
    module = guest(house, "TABLE = [area]")
    del sys.modules["guest"]
    manager = house.armed(patch("core:area", required=False))
    manager.finalize()
    stale = manager.report()[0].stale
    assert "guest.TABLE (of a module that is not in sys.modules)" in stale
    assert module.TABLE


def test_the_message_names_a_few_of_many_holders(house):
    guest(house, "\n".join(f"T{i} = [area]" for i in range(9)))
    manager = house.armed(patch("core:area"))
    with pytest.raises(PatchError, match=r"guest\.T\d and 4 more; import mindspeed_dsa"):
        manager.finalize()


def test_earlier_managers_and_their_sites_are_no_holders(house):
    load("house.core")
    kept = [house.armed(patch("core:area", impl="house_impl:mark_a")) for _ in range(2)]
    for manager in reversed(kept):
        manager.undo()
    last = house.armed(patch("core:area"))
    last.finalize()
    inner = house.armed(patch("core:volume"))
    outer = house.armed(patch("core:volume"))
    outer.finalize()
    assert inner.report()[0].state == "foreign"


def test_proxies_are_asked_nothing(house):
    class Lazy(wrapt.ObjectProxy):
        @property
        def __class__(self):
            raise AssertionError("woken")

    module = guest(house, "")
    module.LAZY = Lazy([module.area])
    manager = house.armed(patch("core:area", required=False))
    manager.finalize()
    manager.undo()
