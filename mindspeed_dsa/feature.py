"""Declarations of features, flags and requirements. Imports neither torch nor Megatron."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from types import ModuleType
from typing import Any, Generic, Literal, TypeVar, cast

from mindspeed_dsa.environment import EnvironmentCheck
from mindspeed_dsa.log import Log
from mindspeed_dsa.patches.spec import Patch

ENV_PREFIX = "MINDSPEED_DSA_"
AUTO = "auto"
WORDS = (AUTO, "on", "off")
"""Arguments of a tri-state flag that is declared with ``choices=WORDS``."""
Platform = Literal["cpu", "cuda", "npu"]


@dataclass(frozen=True)
class Flag:
    """One command line flag. argparse, environment names, API keywords and ``--help`` are derived from it.

    Attributes:
        kind: ``bool`` is a ``store_true`` switch. ``auto`` is a tri-state switch (``--name`` / ``--no-name``,
            default ``None``: the feature decides); with ``choices=WORDS`` it also takes ``on``, ``off`` or
            ``auto`` as an argument. ``value`` takes an argument of ``type``.
        megatron: whether the flag belongs to Megatron. It is read from argv, environment and API to decide
            which features are on, and is never added to a parser.
        field: whether the value is a field of the model's configuration, for which some Megatron releases
            have their own flag. Only spellings that a parser lacks are added. Without an explicit setting,
            the value in the job's arguments counts.
        negations: further spellings of ``--no-name``.
    """

    name: str
    help: str
    kind: Literal["bool", "auto", "value"] = "bool"
    type: Callable[[str], Any] = str
    default: Any = None
    choices: tuple[Any, ...] | None = None
    nargs: str | int | None = None
    metavar: str | None = None
    aliases: tuple[str, ...] = ()
    megatron: bool = False
    field: bool = False
    negations: tuple[str, ...] = ()

    @property
    def dest(self) -> str:
        """API keyword and argparse destination: ``use_fused_dsa``."""
        return self.name.lstrip("-").replace("-", "_")

    @property
    def env(self) -> str:
        """Name of the environment variable: ``MINDSPEED_DSA_USE_FUSED_DSA``."""
        return ENV_PREFIX + self.dest.upper()

    @property
    def unset(self) -> Any:
        """Value of a flag that is not set."""
        return False if self.kind == "bool" and self.default is None else self.default

    def same_as(self, other: Flag) -> bool:
        """Return whether two declarations describe one flag. Megatron's own flags may differ in ``help``."""
        if self.megatron and other.megatron:
            # Several features may declare the same Megatron flag, each with its own help text.
            return replace(self, help="") == replace(other, help="")
        return self == other


@dataclass(frozen=True)
class Requires:
    """Requirements that the machine must meet before a feature can be switched on."""

    versions: Mapping[str, str] = field(default_factory=dict)
    """Distribution name to PEP 440 range, e.g. ``{"megatron-core": ">=0.16,<0.19"}``."""
    platforms: tuple[Platform, ...] = ("cpu", "cuda", "npu")
    features: tuple[str, ...] = ()
    """Names of other features that must be on."""
    packages: Mapping[str, str] = field(default_factory=dict)
    """Top-level package that must be importable, to the command that installs it."""


@dataclass(frozen=True)
class Conflict:
    """Another feature that cannot be on together with the declaring feature, with reason and remedy.

    Attributes:
        feature: name of the other feature.
        why: reason and remedy, as a sentence.
        switch: dest of the only conflicting flag of the declaring feature; ``None`` if all of it conflicts.
    """

    feature: str
    why: str
    switch: str | None = None


Check = Callable[[Any, Any], Iterable[str]]
"""Function of a job's arguments (or Megatron's configuration) and a feature's options; yields problems."""


def _switch_is_on(name: str) -> Callable[[Any], bool]:
    return lambda settings: bool(getattr(settings, name, False))


@dataclass(frozen=True)
class Feature:
    """One switchable change to Megatron.

    Functions below get the settings: a namespace with one attribute per flag (its ``dest``) and ``platform``.

    Attributes:
        name: kebab-case identity, as doctor and the documentation print it.
        summary: one-line description.
        flags: flags of the feature, the first one being its switch unless ``active`` decides. Megatron's
            flags that ``active`` or ``check`` read are listed too.
        patches: patches for the engine.
        rows: function that returns the patches to apply under given settings; default: all of ``patches``.
        requires, conflicts: requirements and conflicts, checked before anything is modified.
        active: function that decides from the settings whether the feature is on; by default: the first flag
            is true.
        options: function from the settings (and ``features_on``) to the frozen options that the feature's
            implementations read from their context.
        rewrite: function that changes a job's arguments in place before Megatron derives others from them,
            and returns a sentence per change. A second call must change nothing. Arguments that it cannot
            change are left to ``check``.
        check: function of Megatron's full argument namespace, with our flags set to the resolved settings,
            and the options made from it (``None`` without ``options``). Yields every problem with cause and
            remedy.
        doc: page in ``docs/features/``.
        platform_support: whether Megatron cannot run on the platform at all without the feature. Doctor and
            the benchmarks list these apart from features that a user switched on.
        in_training_loop: whether the feature works only in Megatron-LM's own loop, ``megatron.training``.
        on_finalize: lazy ``"module:function"``, called with the feature's context right before the model is
            built, after all patches are verified.
        when: condition under which a feature without its own switch is on, in words.
        supplies: names of features whose effect this feature (a backport, or hooks into newer releases) also
            provides. Doctor and the compatibility table show them.
        overlaps: communication that the feature hides behind computation, in words, for example "the gather
            of weights". Environment checks look for settings that prevent the overlap.
        environment: environment checks of this feature.
        distribution: name and version of the plug-in that ships the feature; set when it is loaded.
    """

    name: str
    summary: str
    flags: tuple[Flag, ...] = ()
    patches: tuple[Patch, ...] = ()
    requires: Requires = field(default_factory=Requires)
    conflicts: tuple[Conflict, ...] = ()
    rows: Callable[[Any], Sequence[Patch]] | None = None
    active: Callable[[Any], bool] | None = None
    options: Callable[[Any], Any] | None = None
    rewrite: Callable[[Any], Sequence[str]] = lambda args: ()
    check: Check = lambda args, options: ()
    doc: str = ""
    platform_support: bool = False
    in_training_loop: bool = False
    on_finalize: str = ""
    when: str = ""
    supplies: tuple[str, ...] = ()
    overlaps: str = ""
    environment: tuple[EnvironmentCheck, ...] = ()
    distribution: str = ""

    @property
    def label(self) -> str:
        """Feature's name for messages, with the plug-in that ships it."""
        return f"{self.name} (plug-in {self.distribution})" if self.distribution else self.name

    def problems(self, args: Any) -> list[str]:
        """Return the problems that ``check`` reports for a job's arguments."""
        return list(self.check(args, self.options(args) if self.options else None))

    def patches_for(self, settings: Any) -> Sequence[Patch]:
        """Return the patches to apply under these settings, in their declared order."""
        return self.patches if self.rows is None else self.rows(settings)

    def conflicting(self, names: Container[str], settings: Any) -> Iterator[Conflict]:
        """Yield this feature's conflicts with features that are on.

        Args:
            names: names of the features that are on.
            settings: resolved settings.
        """
        for conflict in self.conflicts:
            applies = conflict.switch is None or _switch_is_on(conflict.switch)(settings)
            if applies and conflict.feature in names:
                yield conflict

    def is_active(self, settings: Any) -> bool:
        """Return whether these settings switch the feature on."""
        if self.active is not None:
            # Flags that only parametrize the feature do not switch it on.
            return self.active(settings)
        return bool(self.flags) and _switch_is_on(self.flags[0].dest)(settings)


EXPERIMENTAL_ATTENTION_VARIANT = Flag(
    "--experimental-attention-variant",
    "Megatron's own flag; 'dsa' switches on the repairs that DeepSeek Sparse Attention needs.",
    kind="value",
    megatron=True,
)


def on_platform(*platforms: Platform) -> Callable[[Any], bool]:
    """Return an ``active`` function: the feature is on whenever the job runs on one of ``platforms``."""

    def active(settings: Any) -> bool:
        return settings.platform in platforms

    return active


Options = TypeVar("Options")
State = TypeVar("State")


@dataclass(frozen=True)
class Megatron:
    """Importer of Megatron's modules under the root package of this session.

    Implementations must use it instead of ``import megatron``. In a fork with another root package, that
    import would load a second Megatron or fail.

    Attributes:
        root: top-level package, ``corp_megatron`` in a fork.
    """

    root: str = "megatron"

    def __call__(self, name: str) -> ModuleType:
        """Import Megatron's module ``name``, such as ``core.parallel_state``."""
        # "core.parallel_state" with the root corp_megatron: corp_megatron.core.parallel_state.
        return import_module(f"{self.root}.{name}")


@dataclass(frozen=True)
class Context(Generic[Options]):
    """Session data for a feature's implementations, built when the session arms its patches.

    A ``wrap`` decorator that takes ``(original, context)``, and every ``factory``, gets the context of the
    feature that declares the patch. Implementations read settings only from here, and keep mutable state in
    :meth:`state`; all other attributes are constant.

    Attributes:
        feature: feature's name.
        options: result of ``Feature.options``.
        megatron: this session's Megatron.
        log: feature's logger, unique to the session, so contexts of two sessions are never equal.
    """

    feature: str
    options: Options
    megatron: Megatron
    log: Log
    # A list, because attributes of a frozen dataclass cannot be assigned later.
    _states: list[tuple[Any, Any]] = field(default_factory=list, init=False, repr=False, compare=False)

    def state(self, factory: Callable[[Context[Options]], State]) -> State:
        """Return the feature's mutable state in this session, created on first use.

        All implementations of the feature share the object. It lives as long as the context, that is, as long
        as the session. A copy made with ``dataclasses.replace`` has its own state.

        Args:
            factory: class or module-level function that creates the state from the context.

        Raises:
            TypeError: another factory has created the state.
        """
        if not self._states:
            self._states.append((factory, factory(self)))
        creator, state = self._states[0]
        if creator is not factory:
            raise TypeError(f"{self.feature}: its state is made by {creator!r}, not by {factory!r}")
        return cast(State, state)
