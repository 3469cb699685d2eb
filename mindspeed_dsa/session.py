"""One session: settings -> features -> plan -> check -> arm, and the way back.

There is at most one session a process, because there is one Megatron a process.
"""

from __future__ import annotations

import argparse
import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from mindspeed_dsa import checks, compat, features, platforms, settings, start_report, versions
from mindspeed_dsa.features.base import Feature
from mindspeed_dsa.features.host import use_root
from mindspeed_dsa.patches import Claim, PatchError, PatchManager, SettingsError
from mindspeed_dsa.patches.site import load
from mindspeed_dsa.settings import Settings


@dataclass
class Session:
    """Resolved settings, the features they switch on, and the engine that holds their patches."""

    settings: Settings
    features: list[Feature]
    manager: PatchManager
    finalized: bool = False
    log_folder: str | None = None
    """Where the job keeps its logs, once its arguments are known."""
    refused: PatchError | None = None
    """What :func:`finalize` raised; every patch is undone, and no model may be built."""
    guard: PatchManager | None = None
    """After a refusal: keeps the patch that lets every further model raise it again."""

    def undo(self) -> None:
        """Take every patch of this session away."""
        self.manager.undo()
        if self.guard is not None:
            self.guard.undo()


_lock = threading.RLock()
_current: Session | None = None
_api: dict[str, Any] = {}
_argv: tuple[str, ...] = ()


def enable(**switches: Any) -> None:
    """Switch features on from code, for launchers that own the command line (Ray, Hydra, verl).

    Args:
        **switches: flags by their ``dest`` names, e.g. ``use_fused_dsa=True`` or
            ``experimental_attention_variant="dsa"``; they outrank environment and command line, and
            add to what earlier calls set.

    Raises:
        SettingsError: unknown switch, value that does not fit, or a combination that cannot be; what
            was enabled before stays as it was.
        PatchError: a required patch cannot be applied; nothing stays patched.
    """
    with _lock:
        _start({**_api, **switches}, _argv)


def enable_from_argv(argv: Sequence[str]) -> None:
    """What ``import mindspeed_dsa.megatron_adaptor`` does; raises as :func:`enable` does.

    A flag that looks like a misspelt one of ours is told of: whether it is refused, the job's own
    parser decides, whose flag it might be.
    """
    with _lock:
        _start(_api, tuple(argv))
    start_report.warn_of_near_misses(settings.near_misses(argv, features.all_flags()))


def disable() -> None:
    """Undo every patch and forget every switch."""
    global _current, _api, _argv
    with _lock:
        if _current is not None:
            _current.undo()
        _current, _api, _argv = None, {}, ()


@contextlib.contextmanager
def enabled(**switches: Any) -> Iterator[None]:
    """:func:`enable` for the length of a ``with`` block; afterwards everything is as it was before."""
    with _lock:
        was_on, api, argv = _current is not None, _api, _argv
    enable(**switches)
    try:
        yield
    finally:
        with _lock:
            disable()
            if was_on:
                _start(api, argv)


def current() -> Session | None:
    """The running session, if any."""
    return _current


def resolve(api: Mapping[str, Any], argv: Sequence[str]) -> tuple[Settings, list[Feature]]:
    """Settings and active features; imports torch only to find out about the platform.

    Raises:
        SettingsError: as :func:`enable`.
    """
    known = features.all_features()
    resolved = settings.read([*settings.GENERAL_FLAGS, *features.all_flags()], api=api, argv=argv)
    resolved.platform = _platform(resolved.mindspeed_platform)
    active: list[Feature] = []
    for feature in known:
        if feature.is_active(resolved):
            active.append(feature)
            resolved.features_on = (*resolved.features_on, feature.name)
    problems = checks.problems(active, resolved)
    if problems:
        raise SettingsError("mindspeed_dsa: " + "\n  - ".join(["features cannot be switched on:", *problems]))
    return resolved, active


def _platform(requested: str) -> str:
    """Detected once a session: when the CPU stands in for a GPU, torch can no longer be asked."""
    if _current is not None and _current.settings.mindspeed_platform == requested:
        return _current.settings.platform
    return platforms.detect(requested)


def make_manager(resolved: Settings, active: Sequence[Feature]) -> PatchManager:
    """An engine with these features' patches planned and checked."""
    root = resolved.megatron_root
    manager = PatchManager(
        root=root,
        version_of=lambda package: versions.of_package(package, root),
        static_check=compat.static_check(root),
    )
    manager.plan(
        Claim(feature.name, patch, order) for order, feature in enumerate(active) for patch in feature.patches
    )
    manager.check()
    return manager


def _start(api: Mapping[str, Any], argv: Sequence[str]) -> None:
    global _current, _api, _argv
    resolved, active = resolve(api, argv)  # raises before anything of the old session is touched
    previous = _current
    if previous is not None:
        previous.undo()
        _current = None
    try:
        platforms.prepare(resolved.platform, needed=bool(active))
        use_root(resolved.megatron_root)
        manager = make_manager(resolved, active)
        manager.arm()
    except Exception:
        if previous is not None:
            _rearm(previous)
        raise
    log_folder = previous.log_folder if previous is not None else None
    _current = Session(resolved, active, manager, log_folder=log_folder)
    _api, _argv = dict(api), tuple(argv)
    start_report.announce_platform(resolved)


def _rearm(session: Session) -> None:
    """Bring back what a refused :func:`enable` had to take away first."""
    global _current, _api, _argv
    api, argv = _api, _argv
    _api, _argv = {}, ()
    use_root(session.settings.megatron_root)
    manager = make_manager(session.settings, session.features)
    manager.arm()
    _current = Session(session.settings, session.features, manager, log_folder=session.log_folder)
    _api, _argv = api, argv


def finalize(report_dir: str | None = None) -> None:
    """Verify every patch site; call it before the model is built.

    Jobs that build a Megatron-core language model need not: the first model does it.

    Args:
        report_dir: folder for ``mindspeed_dsa.json``; default: the setting, or beside the job's logs.

    Raises:
        PatchError: lists every failed required site; everything has been undone.
    """
    with _lock:
        session = _current
        if session is None:
            return
        try:
            session.manager.finalize()
        except PatchError as error:
            _stay_refused(session, error)
            raise
        for feature in session.features:
            if feature.on_finalize:
                load(feature.on_finalize)()
        session.finalized = True
    folder = report_dir or session.settings.mindspeed_report_dir or session.log_folder
    start_report.publish(session.settings, session.features, session.manager.report(), folder)


def _stay_refused(session: Session, error: PatchError) -> None:
    """Everything is undone, and a retry must not quietly build its model on stock Megatron."""
    session.refused = error
    session.guard = PatchManager(root=session.settings.megatron_root)
    verifying = [feature for feature in session.features if feature.name == "verify-before-model"]
    session.guard.plan(Claim(feature.name, patch) for feature in verifying for patch in feature.patches)
    session.guard.arm()


def finalize_once() -> None:
    """:func:`finalize`, unless it has been done since the patches were armed.

    Raises:
        PatchError: also for every later model, until :func:`disable` or a new :func:`enable`.
    """
    session = _current
    if session is None or session.finalized:
        return
    if session.refused is not None:
        raise session.refused
    session.finalized = True  # a model built by a finalize hook must not come back here
    try:
        finalize()
    except BaseException:
        session.finalized = False
        raise


def report() -> list[dict[str, Any]]:
    """The state of every patch site, as plain data."""
    session = _current
    return [] if session is None else [site.as_dict() for site in session.manager.report()]


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags of all features to any argparse parser, and suggestions for misspelt ones."""
    settings.add_flags(parser, "mindspeed_dsa", settings.GENERAL_FLAGS)
    for feature in features.all_features():
        settings.add_flags(parser, f"mindspeed_dsa: {feature.name}", feature.flags)
    known = features.all_flags()
    plain_error = parser.error

    def error(message: str) -> NoReturn:
        hints = settings.near_misses(message.split(), known)
        plain_error(message + "".join(f" ({typed}: did you mean {meant}?)" for typed, meant in hints.items()))

    parser.error = error  # type: ignore[method-assign]
    return parser


def write_back(namespace: argparse.Namespace) -> None:
    """Make a job's argument namespace agree with the settings: API and environment outrank argv."""
    if _current is None:
        return
    for dest, setting in _current.settings.chosen().items():
        if setting.source in ("API", "environment"):
            setattr(namespace, dest, setting.value)


def _unheard(args: Any, armed: Settings) -> Iterator[str]:
    """Switches that a job's parser has read and the session has not: they would silently do nothing."""
    for flag in features.all_flags():
        wanted = getattr(args, flag.dest, flag.unset)
        if flag.host or wanted == flag.unset or wanted == getattr(armed, flag.dest):
            continue
        yield (
            f"the job's arguments have {flag.dest}={wanted!r}, and mindspeed_dsa was set up with "
            f"{getattr(armed, flag.dest)!r} ({armed.setting(flag.dest).who}). API and environment outrank "
            "the command line, which is the process's own; where the arguments come from elsewhere, call "
            f"mindspeed_dsa.enable({flag.dest}={wanted!r})"
        )


def validate(args: Any) -> None:
    """Ask every active feature about the job's full arguments; to be called before process groups start.

    Raises:
        SettingsError: all problems of all features in one message.
    """
    session = _current
    if session is None:
        return
    session.log_folder = getattr(args, "tensorboard_dir", None) or getattr(args, "save", None)
    problems = [*_unheard(args, session.settings)]
    problems += [f"{f.name}: {text}" for f in session.features for text in f.validate(args)]
    if problems:
        raise SettingsError("mindspeed_dsa: " + "\n  - ".join(["these arguments cannot be used:", *problems]))
