"""A patched function is a plain function with the original's name, signature and documentation."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
import subprocess
import sys
from types import FunctionType

import pytest
import wrapt

from mindspeed_dsa.patches import PatchDeclarationError, PatchError
from mindspeed_dsa.patches.compose import compose, is_patch
from tests.patches.house import load, patch


def original(x: int, *, scale: float = 1.0) -> float:
    """Scale it."""
    return x * scale


def passing(function):
    def wrapper(*args, **kwargs):
        """Documentation of the wrapper."""
        return function(*args, **kwargs)

    return wrapper


def test_identity_of_the_original():
    patched = compose(original, None, [("passing", passing)])
    assert type(patched) is FunctionType
    for attribute in ("__module__", "__name__", "__qualname__", "__doc__"):
        assert getattr(patched, attribute) == getattr(original, attribute)
    assert inspect.signature(patched) == inspect.signature(original)
    assert patched(2, scale=3.0) == 6.0


def test_every_decorator_sees_the_targets_signature():
    seen = []

    def looking(function):
        seen.append(inspect.signature(function))
        return passing(function)

    def stand_in(*args, **kwargs):
        return original(*args, **kwargs)

    for replacement in (None, stand_in):
        compose(original, replacement, [("looking", looking), ("looking", looking)])
    assert seen == [inspect.signature(original)] * 4


def test_a_function_with_equal_code_elsewhere_is_no_patch():
    def made_in(file):
        namespace = {}
        exec(compile("def stand_in(x):\n    return x\n", file, "exec"), namespace)
        return namespace["stand_in"]

    ours, other = made_in("ours.py"), made_in("other.py")
    compose(original, ours, [])
    assert ours.__code__ == other.__code__
    assert is_patch(ours.__code__)
    assert not is_patch(other.__code__)


def test_a_missing_docstring_stays_missing():
    assert compose(lambda x: x, None, [("passing", passing)]).__doc__ is None


def test_attributes_are_kept_and_wrapped_is_not():
    @functools.wraps(original)
    def decorated(*args, **kwargs):
        return original(*args, **kwargs)

    decorated.mark = "kept"
    decorated._torchdynamo_inline = original
    patched = compose(decorated, None, [("passing", passing)])
    assert patched.mark == "kept"
    assert not hasattr(patched, "__wrapped__"), (
        "torch.jit.script and inspect.unwrap would go around the patch"
    )
    assert not hasattr(patched, "_torchdynamo_inline"), "torch.compile would go around the patch"
    assert inspect.signature(patched) == inspect.signature(original)


def test_the_implementation_keeps_its_own_identity():
    def stand_in(x, *, scale=2.0):
        return -x

    # A decorator may return an object that it did not make.
    shared = []

    def sharing(function):
        return shared[0]

    shared.append(stand_in)
    patched = compose(original, stand_in, [("sharing", sharing)])
    assert patched(1) == -1
    assert stand_in.__name__ == "stand_in"
    assert stand_in is not patched


def test_keyword_defaults_of_a_replacement_survive():
    def stand_in(x=5, *, scale=2.0):
        return x, scale

    assert compose(original, stand_in, [])() == (5, 2.0)


def test_signature_of_builtins_and_what_has_none():
    assert str(inspect.signature(compose(abs, None, [("passing", passing)]))) == str(inspect.signature(abs))
    assert compose(max, None, [("passing", passing)])(1, 2) == 2


@pytest.mark.parametrize(
    ("raw", "replacement", "decorators", "words"),
    [
        (original, functools.partial(original), [], "the replacement is a partial"),
        (
            original,
            None,
            [("proxy", lambda f: wrapt.FunctionWrapper(f, passing))],
            "result of the decorator proxy is a ",
        ),
        (original, None, [("cache", functools.lru_cache)], "lru_cache"),
        (original, None, [("nothing", lambda f: None)], "NoneType"),
        (original, int, [], "the replacement is a type"),
        (int, None, [("passing", passing)], "is a class"),
        (3, None, [("passing", passing)], "cannot be called"),
        (functools.cached_property(original), None, [("passing", passing)], "cannot be called"),
    ],
)
def test_only_plain_functions(raw, replacement, decorators, words):
    with pytest.raises(PatchDeclarationError, match=words):
        compose(raw, replacement, decorators)


def test_pickle_and_deepcopy(house):
    house.armed(
        patch("core:area"), patch("core:Room.paint"), patch("core:Room.unit"), patch("core:Room.build")
    )
    core = load("house.core")
    for thing in (core.area, core.Room.paint, core.Room.unit):
        assert pickle.loads(pickle.dumps(thing)) is thing
        assert copy.deepcopy(thing) is thing
    room = core.Room(4)
    for twin in (pickle.loads(pickle.dumps(room)), copy.deepcopy(room)):
        assert (type(twin), twin.size, twin.paint()) == (core.Room, 4, "white room of 4")
    # A bound method is pickled as its instance and its name.
    bound = pickle.loads(pickle.dumps(room.paint))
    assert bound("red") == "red room of 4"
    assert pickle.loads(pickle.dumps(core.Room.build))(2).size == 2


def test_pickled_functions_mean_whatever_the_reader_has(house):
    # Pickle stores functions by reference, so a process without patches loads the original.
    house.armed(patch("core:area", "replace", "house_impl:tenfold"))
    data = pickle.dumps(load("house.core").area)
    code = f"import sys, pickle; sys.path.insert(0, {str(house.folder)!r}); print(pickle.loads({data!r})(3))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "6\n"


def test_source_and_help_show_what_runs(house):
    house.armed(patch("core:area", "replace", "house_impl:tenfold"))
    area = load("house.core").area
    assert "10 * x" in inspect.getsource(area)
    assert inspect.unwrap(area) is area
    assert area.__doc__ == "The area."


def test_third_partys_proxy_around_a_method_can_be_wrapped(house):
    core = load("house.core")

    def tracing(wrapped, instance, args, kwargs):
        return f"traced {wrapped(*args, **kwargs)}"

    wrapt.wrap_function_wrapper(core, "Room.paint", tracing)
    proxy = vars(core.Room)["paint"]
    manager = house.armed(patch("core:Room.paint", impl="house_impl:mark_a"))
    assert core.Room().paint("red") == "a(traced red room of 1)"
    manager.undo()
    assert vars(core.Room)["paint"] is proxy


@pytest.mark.parametrize("name", ["unit", "build"])
def test_third_partys_proxy_around_a_descriptor_is_refused(house, name):
    core = load("house.core")
    wrapt.wrap_function_wrapper(core, f"Room.{name}", lambda wrapped, instance, args, kwargs: wrapped(*args))
    manager = house.manager(patch(f"core:Room.{name}"))
    with pytest.raises(PatchError, match=r"FunctionWrapper around a (static|class)method"):
        manager.arm()
