"""Two sessions for two Megatron packages in one process share no state."""

from __future__ import annotations

import dataclasses
import gc
import importlib
import sys
import weakref

import pytest

from mindspeed_dsa import Feature, Flag, Patch, settings
from mindspeed_dsa.session import Session
from tests.support import contexts, fork

ROOTS = ("corp_megatron", "other_megatron")
FEATURE = Feature(
    name="scaled",
    summary="Scales by what the session's settings say.",
    flags=(Flag("--scale-by", "factor", kind="value", type=int),),
    options=lambda resolved: resolved.scale_by,
    patches=(
        Patch("megatron.core.layers:scale", "wrap", f"{__name__}:scale_by_option", "takes context"),
        Patch(
            "megatron.core.consumer:ROOT_OF_SESSION",
            "value",
            f"{__name__}:root_of",
            "a factory",
            factory=True,
        ),
    ),
)


def scale_by_option(original, context):
    def scale(x, factor=2):
        # Looks Megatron up at call time, as implementations do.
        return context.megatron.root, original(x, context.options * factor)

    return scale


def root_of(context):
    return context.megatron("core.package_info").__name__


class Calls:
    """Number of calls of a session's patches; refers to its context, as most states do."""

    def __init__(self, context):
        self.context, self.count = context, 0


def scale_by_call(original, context):
    def scale(x, factor=2):
        calls = context.state(Calls)
        calls.count += 1
        return original(x, calls.count)

    return scale


@pytest.fixture
def forks(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    for root in ROOTS:
        fork.write(tmp_path, root)
        consumer = tmp_path / root / "core" / "consumer.py"
        consumer.write_text(consumer.read_text() + "\nROOT_OF_SESSION = ''\n")
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] in ROOTS]:
        del sys.modules[name]


@pytest.mark.parametrize("imported_first", [True, False])
def test_each_session_has_its_own_options_and_megatron(forks, imported_first):
    sessions = []
    if imported_first:
        for root in ROOTS:
            importlib.import_module(f"{root}.core.consumer")
    for factor, root in zip((3, 5), ROOTS, strict=True):
        api = {"scale_by": factor, "megatron_root": root}
        resolved = settings.read([*settings.GENERAL_FLAGS, *FEATURE.flags], api=api, environ={})
        resolved.platform = "cpu"
        sessions.append(Session(resolved, [FEATURE]))
        sessions[-1].arm()
    corp, other = (importlib.import_module(f"{root}.core.consumer") for root in ROOTS)
    assert corp.use(7) == ("corp_megatron", 42)
    assert other.use(7) == ("other_megatron", 70)
    assert corp.ROOT_OF_SESSION == "corp_megatron.core.package_info"
    assert other.ROOT_OF_SESSION == "other_megatron.core.package_info"
    sessions[0].undo()
    assert corp.use(7) == 14
    assert corp.ROOT_OF_SESSION == ""
    assert other.use(7) == ("other_megatron", 70), "the other session is as it was"
    sessions[1].undo()
    assert other.use(7) == 14


def scaled_by_calls(root: str) -> Session:
    patch = Patch("megatron.core.layers:scale", "wrap", f"{__name__}:scale_by_call", "remembers")
    counted = dataclasses.replace(FEATURE, name="counted", options=None, patches=(patch,))
    resolved = settings.read(settings.GENERAL_FLAGS, api={"megatron_root": root}, environ={})
    resolved.platform = "cpu"
    session = Session(resolved, [counted])
    session.arm()
    return session


def test_each_session_has_its_own_state(forks):
    sessions = [scaled_by_calls(root) for root in ROOTS]
    corp, other = (importlib.import_module(f"{root}.core.consumer") for root in ROOTS)
    assert [corp.use(7), corp.use(7), other.use(7)] == [7, 14, 7]
    states = [session.contexts["counted"].state(Calls) for session in sessions]
    assert [state.count for state in states] == [2, 1]
    for session in sessions:
        session.undo()


def test_the_state_of_an_ended_session_is_gone(forks):
    session = scaled_by_calls(ROOTS[0])
    consumer = importlib.import_module(f"{ROOTS[0]}.core.consumer")
    assert consumer.use(7) == 7
    state = weakref.ref(session.contexts["counted"].state(Calls))
    session.undo()
    assert consumer.use(7) == 14, "Megatron's own"
    del session
    gc.collect()
    assert state() is None
    again = scaled_by_calls(ROOTS[0])
    assert consumer.use(7) == 7, "counted from the start"
    again.undo()


def test_a_state_has_one_factory():
    context = contexts.context("counted")
    assert context.state(Calls) is context.state(Calls)
    assert dataclasses.replace(context).state(Calls) is not context.state(Calls)
    with pytest.raises(TypeError, match=r"counted: its state is made by .*Calls"):
        context.state(lambda _: Calls(context))
