"""Public functions that switch features on and off in this process, for launchers and jobs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mindspeed_dsa import features, log, platforms, settings
from mindspeed_dsa.feature import Feature
from mindspeed_dsa.patches import SettingsError
from mindspeed_dsa.session import beside, checks, forks, start_report
from mindspeed_dsa.session.session import Session, add_arguments, ask, listed, put
from mindspeed_dsa.settings import Settings

__all__ = [
    "Session",
    "add_arguments",
    "apply_environment",
    "current",
    "disable",
    "enable",
    "enable_from_argv",
    "enabled",
    "finalize",
    "report",
    "resolve",
    "validate",
]

_lock = threading.RLock()
_current: Session | None = None
_api: dict[str, Any] = {}
_argv: tuple[str, ...] = ()
_fork: str | None = None
"""Root package of the Megatron that the job has imported, if no setting names one."""
_watch: forks.Watch | None = None


def enable(**switches: Any) -> None:
    """Switch features on from code, for launchers that own the command line (Ray, Hydra, verl).

    Args:
        **switches: flags by their ``dest`` names, e.g. ``use_fused_dsa=True`` or
            ``experimental_attention_variant="dsa"``. They override environment and command line, and add to
            the switches of earlier calls.

    Raises:
        SettingsError: unknown switch, invalid value, or invalid combination; the previous state is kept.
        PatchError: a required patch cannot be applied; nothing stays patched.
    """
    with _lock:
        _start({**_api, **switches}, _argv)


def enable_from_argv(argv: Sequence[str]) -> None:
    """Enable the features of environment and command line, as ``import mindspeed_dsa.megatron_adaptor`` does.

    A feature that another feature requires may be off at this point, because the job may switch it on later
    from code. :func:`validate` and :func:`finalize` raise if it is still off. A flag that resembles one of
    ours is only reported, because it may be a flag of the job's own parser.

    Raises:
        SettingsError, PatchError: see :func:`enable`.
    """
    with _lock:
        _start(_api, tuple(argv), complete=False)
    start_report.warn_of_near_misses(settings.near_misses(argv, features.all_flags()))


def disable() -> None:
    """Undo every patch and reset every switch."""
    global _current, _api, _argv, _fork
    with _lock:
        if _current is not None:
            _current.end(current)
        _await_no_fork()
        _current, _api, _argv, _fork = None, {}, (), None


@contextlib.contextmanager
def enabled(**switches: Any) -> Iterator[None]:
    """Call :func:`enable` for a ``with`` block, and restore the previous session afterwards."""
    with _lock:
        was_on, api, argv = _current is not None, _api, _argv
    enable(**switches)
    try:
        yield
    finally:
        with _lock:
            disable()
            if was_on:
                # The restored session may also have been waiting for a required feature.
                _start(api, argv, complete=False)


def apply_environment(args: Any) -> None:
    """Write values from environment variables into a job's arguments; they override the command line.

    Jobs with a parser of their own call this after parsing. With Megatron's parser it happens automatically.

    Raises:
        SettingsError: a variable is unknown or has an invalid value, or belongs to a Megatron flag that these
            arguments do not have.
    """
    flags = [*settings.GENERAL_FLAGS, *features.all_flags()]
    resolved = settings.read(flags)
    lacking = [
        checks.without_effect(flag, resolved.setting(flag.dest))
        for flag in flags
        if flag.megatron and flag.dest in resolved.chosen() and not hasattr(args, flag.dest)
    ]
    if lacking:
        raise SettingsError(listed("these variables cannot be used:", lacking))
    put(resolved, args, ("environment",))


def current() -> Session | None:
    """Return the running session, if any."""
    return _current


def resolve(
    api: Mapping[str, Any], argv: Sequence[str], complete: bool = True
) -> tuple[Settings, list[Feature]]:
    """Return the settings and the active features; imports torch only to detect the platform.

    Args:
        api: values by ``dest``.
        argv: command line.
        complete: whether all settings are known, so that a missing required feature is an error.

    Raises:
        SettingsError: see :func:`enable`.
    """
    all_features = features.all_features()
    broken = features.broken_plugins()
    resolved = settings.read(
        [*settings.GENERAL_FLAGS, *features.all_flags()],
        api=api,
        argv=argv,
        unavailable=[plugin.message for plugin in broken],
        fork=_fork,
    )
    lost = [
        f"{', '.join(typed)}: {plugin.message}"
        for plugin in broken
        if (typed := settings.mentions(argv, plugin.flags, features.all_flags()))
    ]
    if lost:
        raise SettingsError(listed("features cannot be switched on:", lost))
    resolved.platform = _platform(resolved.mindspeed_platform)
    active: list[Feature] = []
    for feature in all_features:
        if ask(feature, feature.is_active, resolved):
            active.append(feature)
            # The `active` rules of later features may depend on earlier features.
            resolved.features_on = (*resolved.features_on, feature.name)
    problems = checks.problems(active, resolved)
    # Later code may still switch a required feature on, unless everything is known.
    problems += checks.missing_features(active, resolved) if complete else []
    if problems:
        raise SettingsError(listed("features cannot be switched on:", problems))
    return resolved, active


def _platform(requested: str) -> str:
    """Return the platform; cached, because torch reports no GPU once the CPU platform is prepared."""
    if _current is not None and _current.settings.mindspeed_platform == requested:
        return _current.settings.platform
    return platforms.detect(requested)


def _start(api: Mapping[str, Any], argv: Sequence[str], complete: bool = True) -> None:
    global _current, _api, _argv, _fork, _watch
    # Keep the first answer: the job uses this Megatron for good.
    _fork = _fork or forks.imported()
    resolved, active = resolve(api, argv, complete)  # raises before the old session is changed
    if (problem := beside.refusal(bool(active), resolved)) is not None:
        raise SettingsError(problem)
    previous = _current
    if previous is not None:
        # `current` is a function: the old session asks it later for the session in its place.
        previous.end(current)
        _current = None
    try:
        platforms.prepare(resolved.platform, needed=bool(active))
        started = Session(resolved, active)
        started.arm()
    except Exception:
        if previous is not None:
            # The previous session's patches were undone above; arm them again.
            _current = Session(previous.settings, previous.features)
            _current.follow(previous)
            _current.arm()
        raise
    if previous is not None:
        started.follow(previous)
        started.carry_on(previous)
    _current = started
    _api, _argv = dict(api), tuple(argv)
    for plugin in features.broken_plugins():
        log.get().warning("%s", plugin.message, once=True)
    start_report.announce_platform(resolved)
    if active:
        start_report.warn_of_untried_torch()
    start_report.warn_of_overruled(resolved.overruled)
    # Only the latest session may be waiting for a fork.
    _await_no_fork()
    if active and resolved.setting(settings.MEGATRON_ROOT.dest).source == "default":
        _watch = forks.Watch(_adopt)


def _await_no_fork() -> None:
    global _watch
    if _watch is not None:
        _watch.end()
        _watch = None


def _adopt(root: str) -> None:
    """Replace the session by one for the fork ``root``, before any module of the fork is executed."""
    global _fork
    with _lock:
        _fork = root
        _start(_api, _argv, complete=False)
    log.get().info("this job's Megatron is %s; --megatron-root %s says so from the beginning", root, root)


def finalize(report_dir: str | None = None) -> None:
    """Verify every patch. Call it before the model is built.

    Jobs that build a Megatron-core language model need not call it: building the first model does.

    Args:
        report_dir: folder for ``mindspeed_dsa.json``; default: the setting, or the job's log folder.

    Raises:
        PatchError: a required patch failed; the message lists all, and everything has been undone.
    """
    with _lock:
        if _current is not None:
            _current.finalize(report_dir)


def report() -> list[dict[str, Any]]:
    """Return the state of every patch site, as plain data."""
    return [] if _current is None else [site.as_dict() for site in _current.report()]


def validate(args: Any) -> None:
    """Let every active feature change and check the job's full arguments, before process groups are created.

    Raises:
        SettingsError: a feature reports problems; one message lists all.
    """
    if _current is not None:
        _current.validate(args)
