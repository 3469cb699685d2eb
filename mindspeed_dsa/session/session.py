"""One session: settings -> features -> plan -> check -> arm, and the way back.

It has no shared state: two sessions for two Megatron packages in one process are independent.
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
    """Resolved settings, the features they enable, and the engine that holds their patches.

    Args:
        resolved: the settings.
        active: the enabled features, in the order in which their wrappers nest.

    Attributes:
        contexts: by feature name, the context of each feature's patches.
        arguments: the job's, once they are known.
        log_folder: where the job keeps its logs, once its arguments are known.
        checkpoint_size: returns the bytes of a checkpoint from the job's arguments, where the command line
            tells the model's sizes.
    """

    def __init__(self, resolved: Settings, active: Sequence[Feature]) -> None:
        self.settings = resolved
        self.features = list(active)
        self.arguments: Any = None
        self.log_folder: str | None = None
        self.checkpoint_size: Callable[[Any], float | None] = lambda args: None
        # Once this session has ended: returns the one in its place.
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
            for patch in feature.patches_for(self.settings)
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

    def end(self, running: Callable[[], Session | None]) -> None:
        """:meth:`undo`, because another session, or none, takes this one's place.

        Args:
            running: returns the session of the process, if any.
        """
        self._running = running
        self.undo()

    def finalize(self, report_dir: str | None = None) -> None:
        """Verify every patch site; see ``mindspeed_dsa.finalize``."""
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
                load(feature.on_finalize)(self.contexts[feature.name])
        self._finalized = True
        folder = report_dir or self.settings.mindspeed_report_dir or self.log_folder
        found = environment.at_start(self.settings, self.features, self.arguments, self.checkpoint_size)
        start_report.publish(
            self.settings, self.features, self.report(), folder, environment.records(found), self.beside()
        )

    def _require_alone(self) -> None:
        """MindSpeed may have come after us: its replacements drop ours, and flags of both act twice."""
        problem = beside.refusal(bool(self.features), self.settings)
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

    def beside(self) -> list[beside.Presence]:
        """Other libraries that have changed Megatron in this process."""
        return beside.present(self.settings.megatron_root, self._manager.covered())

    def report(self) -> list[SiteReport]:
        """The state of every patch site."""
        return self._manager.report()

    def add_arguments(self, parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add the flags of all features, on a parser of the job's own."""
        return add_arguments(parser)

    def write_back(self, namespace: argparse.Namespace) -> None:
        """Make a job's argument namespace agree with the settings: API and environment override argv.

        A flag of Megatron's that the namespace lacks is left to :meth:`validate`: nobody would read it.
        A job whose own argument provider calls ``enable`` replaces the session while its parser runs; the
        namespace then agrees with the new one.
        """
        running = self if self._running is None else self._running()
        if running is None:
            return
        put(running.settings, namespace, ("API", "environment"))
        running._told = True

    def follow(self, previous: Session) -> None:
        """Take over what the session before this one knows of the job."""
        self.arguments, self.log_folder = previous.arguments, previous.log_folder
        self.checkpoint_size = previous.checkpoint_size

    def carry_on(self, previous: Session) -> None:
        """Take over what the session before this one has told the job's arguments, if it is still true."""
        ours, theirs = checks.for_megatron(self.settings), checks.for_megatron(previous.settings)
        self._told = previous._told and ours == theirs

    def rewrite(self, args: Any) -> None:
        """Let every active feature change the job's arguments, and say what it has changed."""
        for feature in self.features:
            for change in ask(feature, feature.rewrite, args):
                self.contexts[feature.name].log.info("%s", change)

    def validate(self, args: Any) -> None:
        """Let every active feature change and check a job's arguments; see ``mindspeed_dsa.validate``."""
        problem = beside.refusal(bool(self.features), self.settings)
        if problem is not None:  # sooner than at the first model: before process groups start
            raise SettingsError(problem)
        unheard = list(checks.unheard(args, self.settings, self._told))
        self.rewrite(args)
        self.arguments = args
        self.log_folder = getattr(args, "tensorboard_dir", None) or getattr(args, "save", None)
        problems = [
            *unheard,
            *checks.missing_features(self.features, self.settings),
            *self.problems(args),
        ]
        if problems:
            raise SettingsError(listed("these arguments cannot be used:", problems))
        self.look_at_installation()
        self._told = True

    def look_at_installation(self) -> None:
        """Log what is wrong with what is installed; with nothing switched on nobody asks.

        Raises:
            SettingsError: no job starts so.
        """
        problems = environment.refused(self.settings, self.arguments) if self.features else []
        if problems:
            raise SettingsError(listed("no job starts here:", problems))

    def problems(self, args: Any) -> list[str]:
        """Problems that the features find in these arguments, each with the feature's name.

        A job's own namespace may lack our switches, or values from the environment: in the view that features
        get, our switches have the values of the settings.
        """
        seen = checks.with_own_switches(args, self.settings)
        return [f"{f.label}: {text}" for f in self.features for text in ask(f, _check_of(f), seen)]


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags of all features to any argparse parser, and suggestions for misspelt ones."""
    settings.add_flags(parser, "mindspeed_dsa", settings.GENERAL_FLAGS)
    for feature in features.all_features():
        settings.add_flags(parser, f"mindspeed_dsa: {feature.name}", feature.flags)
    known = features.all_flags()
    plain_error = parser.error

    def error(message: str) -> NoReturn:
        hints = settings.near_misses(message.split(), known)
        message += "".join(f" ({typed}: did you mean {meant}?)" for typed, meant in hints.items())
        if message.startswith("unrecognized"):
            message += "".join(f" ({plugin.message})" for plugin in features.broken_plugins())
        plain_error(message)

    parser.error = error  # type: ignore[method-assign]
    return parser


def put(resolved: Settings, args: Any, sources: Sequence[str]) -> None:
    """Write what these sources have set into a job's arguments; Megatron's flags only where it has them."""
    megatron = {flag.dest for flag in features.all_flags() if flag.megatron}
    for dest, setting in resolved.chosen().items():
        if setting.source in sources and (dest not in megatron or hasattr(args, dest)):
            setattr(args, dest, setting.value)


def _check_of(feature: Feature) -> Callable[[Any], list[str]]:
    """Return the feature's check as a function of arguments alone; messages name it as the check."""

    @functools.wraps(feature.check)
    def problems(args: Any) -> list[str]:
        return feature.problems(args)

    return problems


def ask(feature: Feature, function: Callable[[Any], Any], of: Any) -> Any:
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


def listed(headline: str, problems: Sequence[str]) -> str:
    """Write problems below a headline."""
    return "mindspeed_dsa: " + "\n  - ".join([headline, *problems])
