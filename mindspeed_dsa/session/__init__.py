"""One session: settings -> features -> plan -> check -> arm, and the way back.

:func:`enable` keeps one session for the process. The class itself has no shared state: two sessions for two
Megatron packages in one process are independent.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from mindspeed_dsa import features, log, platforms, settings
from mindspeed_dsa.feature import Context, Feature, Megatron
from mindspeed_dsa.megatron import forks, job
from mindspeed_dsa.patches import (
    Claim,
    MindSpeedDSAError,
    PatchError,
    PatchManager,
    SettingsError,
    SiteReport,
    versions,
)
from mindspeed_dsa.patches.site import load
from mindspeed_dsa.session import checks, parsers, start_report
from mindspeed_dsa.settings import Settings


class Session:
    """Resolved settings, the features they enable, and the engine that holds their patches.

    Args:
        resolved: the settings.
        active: the enabled features, in the order in which their wrappers nest.

    Attributes:
        contexts: by feature name, the context of each feature's patches.
        superseded: whether :func:`enable` or :func:`disable` has ended this session.
        log_folder: where the job keeps its logs, once its arguments are known.
    """

    def __init__(self, resolved: Settings, active: Sequence[Feature]) -> None:
        self.settings = resolved
        self.features = list(active)
        self.log_folder: str | None = None
        self.superseded = False
        root = resolved.megatron_root
        self.contexts = {
            feature.name: Context(
                feature=feature.name,
                options=_ask(feature, feature.options, resolved) if feature.options else None,
                megatron=Megatron(root),
                log=log.get(feature.name, root),
            )
            for feature in active
        }
        self._manager = PatchManager(
            root=root,
            version_of=functools.cache(lambda package: versions.of_package(package, root)),
            static_check=checks.static_check(root),
        )
        self._finalized = False
        # Whether the job's arguments have got what API and environment say about Megatron's own flags.
        self._told = False
        # What finalize() raised: every patch is undone, and no model may be built.
        self._refused: PatchError | None = None
        # After a refusal: keeps the patch that lets every further model raise it again.
        self._guard: PatchManager | None = None

    def arm(self) -> None:
        """Plan, check and apply every patch; modules that are not imported yet are patched at their import.

        Raises:
            PatchError: a required patch cannot be applied; nothing stays patched.
        """
        claims = [
            Claim(feature.name, patch, order, self.contexts[feature.name], feature.label)
            for order, feature in enumerate(self.features)
            for patch in feature.patches
        ]
        self._manager.plan([*claims, *self._services()])
        self._manager.check()
        self._manager.arm()

    def _services(self) -> list[Claim]:
        """The session's own rows; without an active feature or a flag of ours nothing is patched."""
        overruled = bool(checks.for_megatron(self.settings))  # with every feature off, too
        wanted = {
            "megatron-arguments": bool(self.settings.mentioned or self.features) or overruled,
            "verify-before-model": bool(self.features) or overruled,
        }
        return [
            Claim(service.name, patch, len(self.features), self)
            for service in job.SERVICES
            if wanted[service.name]
            for patch in service.patches
        ]

    def undo(self) -> None:
        """Remove every patch of this session."""
        self._manager.undo()
        if self._guard is not None:
            self._guard.undo()

    def end(self) -> None:
        """:meth:`undo`, because another session, or none, takes this one's place."""
        self.superseded = True
        self.undo()

    def finalize(self, report_dir: str | None = None) -> None:
        """Verify every patch site; see the module's :func:`finalize`."""
        missing = checks.missing_features(self.features, self.settings)
        missing += [] if self._told else checks.not_passed_on(self.settings)
        if missing:
            raise SettingsError(_listed("no model can be built:", missing))
        try:
            self._require_alone()
            self._manager.finalize()
        except PatchError as error:
            self._stay_refused(error)
            raise
        for feature in self.features:
            if feature.on_finalize:
                load(feature.on_finalize)(self.contexts[feature.name])
        self._finalized = True
        folder = report_dir or self.settings.mindspeed_report_dir or self.log_folder
        start_report.publish(self.settings, self.features, self.report(), folder)

    def _require_alone(self) -> None:
        """MindSpeed may have come after us: its replacements drop ours, and flags of both act twice."""
        problem = checks.mindspeed() if self.features else None
        if problem is not None:
            self._manager.undo()
            raise PatchError([problem], "no model can be built, all patches were undone")

    def _stay_refused(self, error: PatchError) -> None:
        """Everything is undone, and a retry must not quietly build its model on stock Megatron."""
        self._refused = error
        self._guard = PatchManager(root=self.settings.megatron_root)
        verify = [claim for claim in self._services() if claim.feature == job.VERIFY_BEFORE_MODEL.name]
        self._guard.plan(verify)
        self._guard.arm()

    def finalize_once(self) -> None:
        """:meth:`finalize`, unless it has been done since the patches were armed.

        Raises:
            PatchError: also for every later model of a session that was refused.
        """
        if self._finalized:
            return
        if self._refused is not None:
            raise self._refused
        self._finalized = True  # a model built by a finalize hook must not come back here
        try:
            self.finalize()
        except BaseException:
            self._finalized = False
            raise

    def verify(self) -> None:
        """Verify every site, including harmless holders of originals; prints and writes nothing.

        Raises:
            PatchError: as :meth:`finalize` does.
        """
        self._require_alone()
        self._manager.finalize(thorough=True)

    def report(self) -> list[SiteReport]:
        """The state of every patch site."""
        return self._manager.report()

    def add_arguments(self, parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add the flags of all features; see :func:`mindspeed_dsa.session.parsers.add_arguments`."""
        return parsers.add_arguments(parser)

    def write_back(self, namespace: argparse.Namespace) -> None:
        """Make a job's argument namespace agree with the settings: API and environment override argv.

        A flag of Megatron's that the namespace lacks is left to :meth:`validate`: nobody would read it.
        A job whose own argument provider calls :func:`enable` replaces the session while its parser runs; the
        namespace then agrees with the new one.
        """
        running = _current if self.superseded else self
        if running is None:
            return
        _put(running.settings, namespace, ("API", "environment"))
        running._told = True

    def carry_on(self, previous: Session) -> None:
        """Take over what the session before this one has told the job's arguments, if it is still true."""
        ours, theirs = checks.for_megatron(self.settings), checks.for_megatron(previous.settings)
        self._told = previous._told and ours == theirs

    def rewrite(self, args: Any) -> None:
        """Let every active feature change the job's arguments, and say what it has changed."""
        for feature in self.features:
            for change in _ask(feature, feature.rewrite, args):
                self.contexts[feature.name].log.info("%s", change)

    def validate(self, args: Any) -> None:
        """Let every active feature change and check a job's arguments; see the module's :func:`validate`."""
        self.rewrite(args)
        self.log_folder = getattr(args, "tensorboard_dir", None) or getattr(args, "save", None)
        problems = [
            *checks.unheard(args, self.settings, self._told),
            *checks.missing_features(self.features, self.settings),
            *self.problems(args),
        ]
        if problems:
            raise SettingsError(_listed("these arguments cannot be used:", problems))
        self._told = True

    def problems(self, args: Any) -> list[str]:
        """Problems that the features find in these arguments, each with the feature's name.

        A job's own namespace may lack our switches, or values from the environment: in the view that features
        get, our switches have the values of the settings.
        """
        seen = checks.with_own_switches(args, self.settings)
        return [f"{f.label}: {text}" for f in self.features for text in _ask(f, f.problems, seen)]


_lock = threading.RLock()
_current: Session | None = None
_api: dict[str, Any] = {}
_argv: tuple[str, ...] = ()
_fork: str | None = None
"""The root of Megatron that the job has imported, where nobody has named one."""
_watch: forks.Watch | None = None


def enable(**switches: Any) -> None:
    """Switch features on from code, for launchers that own the command line (Ray, Hydra, verl).

    Args:
        **switches: flags by their ``dest`` names, e.g. ``use_fused_dsa=True`` or
            ``experimental_attention_variant="dsa"``; they override environment and command line, and
            add to what earlier calls set.

    Raises:
        SettingsError: unknown switch, invalid value, or an invalid combination; the previous state
        is kept.
        PatchError: a required patch cannot be applied; nothing stays patched.
    """
    with _lock:
        _start({**_api, **switches}, _argv)


def enable_from_argv(argv: Sequence[str]) -> None:
    """Enable what environment and command line say, as ``import mindspeed_dsa.megatron_adaptor`` does.

    Raises as :func:`enable` does.

    A feature that another one needs may still follow from code, as in a job that names its model itself:
    :func:`validate` and :func:`finalize` refuse it if it does not.
    A flag that looks like a misspelt one of ours is only reported: it might belong to the job's own parser,
    which decides whether to refuse it.
    """
    with _lock:
        _start(_api, tuple(argv), complete=False)
    start_report.warn_of_near_misses(settings.near_misses(argv, features.all_flags()))


def disable() -> None:
    """Undo every patch and reset every switch."""
    global _current, _api, _argv, _fork
    with _lock:
        if _current is not None:
            _current.end()
        _await_no_fork()
        _current, _api, _argv, _fork = None, {}, (), None


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
                _start(api, argv, complete=False)


def apply_environment(args: Any) -> None:
    """Give a job's arguments the values that environment variables set, which outrank the command line.

    For jobs with a parser of their own, which call it when they have parsed; in Megatron's parser it is done.

    Raises:
        SettingsError: a variable is unknown, has an invalid value, or is for a flag of Megatron's that these
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
        raise SettingsError(_listed("these variables cannot be used:", lacking))
    _put(resolved, args, ("environment",))


def _put(resolved: Settings, args: Any, sources: Sequence[str]) -> None:
    """Write what these sources have set into a job's arguments; Megatron's flags only where it has them."""
    megatron = {flag.dest for flag in features.all_flags() if flag.megatron}
    for dest, setting in resolved.chosen().items():
        if setting.source in sources and (dest not in megatron or hasattr(args, dest)):
            setattr(args, dest, setting.value)


def current() -> Session | None:
    """The running session, if any."""
    return _current


def resolve(
    api: Mapping[str, Any], argv: Sequence[str], complete: bool = True
) -> tuple[Settings, list[Feature]]:
    """Settings and active features; imports torch only to detect the platform.

    Args:
        api: values by ``dest``.
        argv: the command line.
        complete: whether everything is said, so that a feature that another one needs is on, or missing.

    Raises:
        SettingsError: as :func:`enable`.
    """
    known = features.all_features()
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
        raise SettingsError(_listed("features cannot be switched on:", lost))
    resolved.platform = _platform(resolved.mindspeed_platform)
    active: list[Feature] = []
    for feature in known:
        if _ask(feature, feature.is_active, resolved):
            active.append(feature)
            resolved.features_on = (*resolved.features_on, feature.name)
    problems = checks.problems(active, resolved)
    problems += checks.missing_features(active, resolved) if complete else []
    if problems:
        raise SettingsError(_listed("features cannot be switched on:", problems))
    return resolved, active


def _ask(feature: Feature, function: Callable[[Any], Any], of: Any) -> Any:
    """Call a feature's own function; an exception from it is attributed to the feature.

    Raises:
        SettingsError: the function raises.
    """
    try:
        return function(of)
    except MindSpeedDSAError:
        raise
    except Exception as error:
        name = getattr(function, "__qualname__", repr(function))
        raise SettingsError(f"mindspeed_dsa: {feature.label}: its {name} raises {error!r}") from error


def _platform(requested: str) -> str:
    """Detected once per session: once the CPU platform replaces a GPU, torch no longer reports it."""
    if _current is not None and _current.settings.mindspeed_platform == requested:
        return _current.settings.platform
    return platforms.detect(requested)


def _start(api: Mapping[str, Any], argv: Sequence[str], complete: bool = True) -> None:
    global _current, _api, _argv, _fork, _watch
    _fork = _fork or forks.imported()
    resolved, active = resolve(api, argv, complete)  # raises before the old session is changed
    if active and (problem := checks.mindspeed()) is not None:
        raise SettingsError(problem)
    previous = _current
    if previous is not None:
        previous.end()
        _current = None
    try:
        platforms.prepare(resolved.platform, needed=bool(active))
        started = Session(resolved, active)
        started.arm()
    except Exception:
        if previous is not None:
            _current = Session(previous.settings, previous.features)
            _current.log_folder = previous.log_folder
            _current.arm()
        raise
    if previous is not None:
        started.log_folder = previous.log_folder
        started.carry_on(previous)
    _current = started
    _api, _argv = dict(api), tuple(argv)
    for plugin in features.broken_plugins():
        log.get().warning("%s", plugin.message, once=True)
    start_report.announce_platform(resolved)
    if active:
        start_report.warn_of_untried_torch()
    start_report.warn_of_overruled(resolved.overruled)
    _await_no_fork()
    if active and resolved.setting(settings.MEGATRON_ROOT.dest).source == "default":
        _watch = forks.Watch(_adopt)


def _await_no_fork() -> None:
    global _watch
    if _watch is not None:
        _watch.end()
        _watch = None


def _adopt(root: str) -> None:
    """The job imports a fork: start again with its root, before any module of it is executed."""
    global _fork
    with _lock:
        _fork = root
        _start(_api, _argv, complete=False)
    log.get().info("this job's Megatron is %s; --megatron-root %s says so from the beginning", root, root)


def finalize(report_dir: str | None = None) -> None:
    """Verify every patch site; call it before the model is built.

    Jobs that build a Megatron-core language model need not: the first model does it.

    Args:
        report_dir: folder for ``mindspeed_dsa.json``; default: the setting, or the job's log folder.

    Raises:
        PatchError: lists every failed required site; everything has been undone.
    """
    with _lock:
        if _current is not None:
            _current.finalize(report_dir)


def report() -> list[dict[str, Any]]:
    """The state of every patch site, as plain data."""
    return [] if _current is None else [site.as_dict() for site in _current.report()]


def validate(args: Any) -> None:
    """Let every active feature change and check the job's full arguments, before process groups start.

    Raises:
        SettingsError: all problems of all features in one message.
    """
    if _current is not None:
        _current.validate(args)


def _listed(headline: str, problems: Sequence[str]) -> str:
    return "mindspeed_dsa: " + "\n  - ".join([headline, *problems])
