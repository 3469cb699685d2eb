"""Session: resolves settings, selects features, and applies and undoes their patches.

Sessions share no state: two sessions for two Megatron packages in one process are independent.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from mindspeed_dsa import features, log, settings
from mindspeed_dsa.feature import Context, Feature, Megatron
from mindspeed_dsa.megatron import job
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
from mindspeed_dsa.session import beside, checks, environment, start_report
from mindspeed_dsa.settings import Settings


class Session:
    """Resolved settings, the features that they enable, and the patch manager of their patches.

    Args:
        resolved: resolved settings.
        active: enabled features, in the order in which their wrappers nest.

    Attributes:
        contexts: dict from feature name to the context of the feature's patches.
        arguments: job's arguments, once they are known.
        log_folder: job's log folder, once its arguments are known.
        checkpoint_size: function from the job's arguments to the size of a checkpoint in bytes, ``None`` if
            the command line does not determine the model's size.
    """

    def __init__(self, resolved: Settings, active: Sequence[Feature]) -> None:
        self.settings = resolved
        self.features = list(active)
        self.arguments: Any = None
        self.log_folder: str | None = None
        self.checkpoint_size: Callable[[Any], float | None] = lambda args: None
        # Set when this session ends: returns the session that has replaced it.
        self._running: Callable[[], Session | None] | None = None
        root = resolved.megatron_root
        self.contexts = {
            feature.name: Context(
                feature=feature.name,
                options=ask(feature, feature.options, resolved) if feature.options else None,
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
        # Whether values of Megatron's own flags from API and environment were written into the job's
        # arguments.
        self._told = False
        # Error that finalize() raised: every patch is undone, and no model may be built.
        self._refused: PatchError | None = None
        # After such an error: holds the patch that makes every further model raise it again.
        self._guard: PatchManager | None = None

    def arm(self) -> None:
        """Plan, check and apply every patch. Modules that are not imported yet are patched when imported.

        Raises:
            PatchError: a required patch cannot be applied; nothing stays patched.
        """
        claims = [
            Claim(feature.name, patch, order, self.contexts[feature.name], feature.label)
            for order, feature in enumerate(self.features)
            for patch in feature.patches_for(self.settings)
        ]
        # Services come last in the order, so their wrappers are outermost at equal priority.
        self._manager.plan([*claims, *self._services()])
        self._manager.check()
        self._manager.arm()

    def _services(self) -> list[Claim]:
        """Return the session's own patches (``megatron/job.py``); none without a feature or flag of ours."""
        # Values for Megatron's own flags need the argument patch even if every feature is off.
        overruled = bool(checks.for_megatron(self.settings))
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

    def end(self, running: Callable[[], Session | None]) -> None:
        """Undo the patches when the session ends or is replaced.

        Args:
            running: function that returns the process's current session, if any.
        """
        self._running = running
        self.undo()

    def finalize(self, report_dir: str | None = None) -> None:
        """Verify every patch; see ``mindspeed_dsa.finalize``."""
        missing = checks.missing_features(self.features, self.settings)
        missing += [] if self._told else checks.not_passed_on(self.settings)
        if missing:
            raise SettingsError(listed("no model can be built:", missing))
        try:
            self._require_alone()
            self._manager.finalize()
        except PatchError as error:
            self._stay_refused(error)
            raise
        for feature in self.features:
            if feature.on_finalize:
                # Only after every patch is verified: hooks may rely on all of them.
                load(feature.on_finalize)(self.contexts[feature.name])
        self._finalized = True
        folder = report_dir or self.settings.mindspeed_report_dir or self.log_folder
        found = environment.at_start(self.settings, self.features, self.arguments, self.checkpoint_size)
        start_report.publish(
            self.settings, self.features, self.report(), folder, environment.records(found), self.beside()
        )

    def _require_alone(self) -> None:
        """Raise if a library that patches the same functions was loaded after :meth:`arm`."""
        problem = beside.refusal(bool(self.features), self.settings)
        if problem is not None:
            self._manager.undo()
            raise PatchError([problem], "no model can be built, all patches were undone")

    def _stay_refused(self, error: PatchError) -> None:
        """Raise ``error`` again for every later model, so that no retry trains on stock Megatron."""
        self._refused = error
        self._guard = PatchManager(root=self.settings.megatron_root)
        verify = [claim for claim in self._services() if claim.feature == job.VERIFY_BEFORE_MODEL.name]
        self._guard.plan(verify)
        # The guard only patches the constructor of models, through verify-before-model.
        self._guard.arm()

    def finalize_once(self) -> None:
        """Call :meth:`finalize` at the first model after :meth:`arm`; later calls do nothing.

        Raises:
            PatchError: a required patch failed. Raised again for every later model of the session.
        """
        if self._finalized:
            return
        if self._refused is not None:
            raise self._refused
        if stray := checks.outside_training_loop(self.features, self.settings):
            raise SettingsError(listed("no model can be built:", stray))
        self._finalized = True  # a finalize hook may build a model, which must not call finalize() again
        try:
            self.finalize()
        except BaseException:
            self._finalized = False
            raise

    def verify(self) -> None:
        """Verify every patch, also those with ``stale="report"``, without writing a report.

        Raises:
            PatchError: see :meth:`finalize`.
        """
        self._require_alone()
        self._manager.finalize(thorough=True)

    def beside(self) -> list[beside.Presence]:
        """Return the other libraries that have changed Megatron in this process."""
        return beside.present(self.settings.megatron_root, self._manager.covered())

    def report(self) -> list[SiteReport]:
        """Return the state of every patch site."""
        return self._manager.report()

    def add_arguments(self, parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add the flags of all features to a job's own parser."""
        return add_arguments(parser)

    def write_back(self, namespace: argparse.Namespace) -> None:
        """Write settings from API and environment into a job's argument namespace; they override argv."""
        # A Megatron flag that the namespace lacks is not added, because no code would read it; validate()
        # reports it.
        # If a job's argument provider calls enable() while its parser runs, the new session's settings count.
        running = self if self._running is None else self._running()
        if running is None:
            return
        put(running.settings, namespace, ("API", "environment"))
        running._told = True

    def follow(self, previous: Session) -> None:
        """Copy the job's arguments, log folder and checkpoint size from the previous session."""
        self.arguments, self.log_folder = previous.arguments, previous.log_folder
        self.checkpoint_size = previous.checkpoint_size

    def carry_on(self, previous: Session) -> None:
        """Keep the previous session's record that the job's arguments contain the settings.

        The record is dropped if the settings for Megatron's own flags have changed.
        """
        ours, theirs = checks.for_megatron(self.settings), checks.for_megatron(previous.settings)
        self._told = previous._told and ours == theirs

    def rewrite(self, args: Any) -> None:
        """Let every active feature change the job's arguments, and log the changes."""
        for feature in self.features:
            for change in ask(feature, feature.rewrite, args):
                self.contexts[feature.name].log.info("%s", change)

    def validate(self, args: Any) -> None:
        """Let every active feature change and check a job's arguments; see ``mindspeed_dsa.validate``."""
        problem = beside.refusal(bool(self.features), self.settings)
        if problem is not None:  # report it now, before process groups are created
            raise SettingsError(problem)
        # Compare before features rewrite the arguments.
        unheard = list(checks.unheard(args, self.settings, self._told))
        self.rewrite(args)
        # Keep them for the report and the environment checks at the first model.
        self.arguments = args
        self.log_folder = getattr(args, "tensorboard_dir", None) or getattr(args, "save", None)
        problems = [
            *unheard,
            *checks.missing_features(self.features, self.settings),
            *self.problems(args),
        ]
        if problems:
            raise SettingsError(listed("these arguments cannot be used:", problems))
        for idle in checks.idle(self.features, self.settings):
            log.get().warning("%s", idle, once=idle)
        self.look_at_installation()
        self._told = True

    def look_at_installation(self) -> None:
        """Log problems of the installed software, if any feature is on.

        Raises:
            SettingsError: no job can start with this installation.
        """
        problems = environment.refused(self.settings, self.arguments) if self.features else []
        if problems:
            raise SettingsError(listed("no job starts here:", problems))

    def problems(self, args: Any) -> list[str]:
        """Return the problems that the features report for these arguments, prefixed by the feature's name.

        A job's namespace may lack our switches, or values from the environment. The features therefore get a
        view in which our switches have the values of the settings.
        """
        seen = checks.with_own_switches(args, self.settings)
        return [f"{f.label}: {text}" for f in self.features for text in ask(f, _check_of(f), seen)]


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags of all features to any argparse parser, and suggestions for misspelt flags."""
    settings.add_flags(parser, "mindspeed_dsa", settings.GENERAL_FLAGS)
    for feature in features.all_features():
        settings.add_flags(parser, f"mindspeed_dsa: {feature.name}", feature.flags)
    all_flags = features.all_flags()
    # argparse calls self.error(), so an instance attribute overrides the method.
    plain_error = parser.error

    def error(message: str) -> NoReturn:
        hints = settings.near_misses(message.split(), all_flags)
        message += "".join(f" ({typed}: did you mean {meant}?)" for typed, meant in hints.items())
        if message.startswith("unrecognized"):
            message += "".join(f" ({plugin.message})" for plugin in features.broken_plugins())
        plain_error(message)

    parser.error = error  # type: ignore[method-assign]
    return parser


def put(resolved: Settings, args: Any, sources: Sequence[str]) -> None:
    """Write settings with an origin in ``sources`` into a job's arguments.

    Megatron flags that the arguments lack are skipped.
    """
    megatron = {flag.dest for flag in features.all_flags() if flag.megatron}
    for dest, setting in resolved.chosen().items():
        if setting.source in sources and (dest not in megatron or hasattr(args, dest)):
            setattr(args, dest, setting.value)


def _check_of(feature: Feature) -> Callable[[Any], list[str]]:
    """Return the feature's check as a function of arguments only, keeping its name for messages."""

    @functools.wraps(feature.check)
    def problems(args: Any) -> list[str]:
        return feature.problems(args)

    return problems


def ask(feature: Feature, function: Callable[[Any], Any], of: Any) -> Any:
    """Call a feature's function, and turn an exception into an error that names the feature.

    Raises:
        SettingsError: the function raised.
    """
    try:
        return function(of)
    except MindSpeedDSAError:
        raise
    except Exception as error:
        name = getattr(function, "__qualname__", repr(function))
        raise SettingsError(f"mindspeed_dsa: {feature.label}: its {name} raises {error!r}") from error


def listed(headline: str, problems: Sequence[str]) -> str:
    """Format problems below a headline."""
    return "mindspeed_dsa: " + "\n  - ".join([headline, *problems])
