"""Declaration of a feature: everything about one switch that needs no torch."""

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
"""What a tri-state switch with these choices may be followed by."""
Platform = Literal["cpu", "cuda", "npu"]


@dataclass(frozen=True)
class Flag:
    """One command line flag; rows drive argparse, environment names, API keywords and ``--help``.

    ``kind`` ``bool`` is a ``store_true`` switch; ``auto`` is a tri-state switch
    (``--name`` / ``--no-name``, default ``None``: the feature decides); with :data:`WORDS` as its
    ``choices`` it may also be followed by ``on``, ``off`` or ``auto``, whose value is the word itself.
    ``value`` takes an argument of ``type``. ``megatron`` marks a flag that belongs to Megatron: it is read
    (argv, environment, API) to decide what to switch on, and never added to a parser. ``field`` marks one
    whose value is a field of the model's configuration, Megatron's own in some releases: parsers get what
    they lack of it, and where the settings leave it open, a job's arguments decide. ``negations`` are
    spellings of ``--no-name`` besides that.
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
        """Environment variable: ``MINDSPEED_DSA_USE_FUSED_DSA``."""
        return ENV_PREFIX + self.dest.upper()

    @property
    def unset(self) -> Any:
        """The value when nobody sets the flag."""
        return False if self.kind == "bool" and self.default is None else self.default

    def same_as(self, other: Flag) -> bool:
        """Return whether two declarations are of one flag; the help of Megatron's own may differ."""
        if self.megatron and other.megatron:
            return replace(self, help="") == replace(other, help="")
        return self == other


@dataclass(frozen=True)
class Requires:
    """Requirements on the machine, to be met before a feature may be switched on."""

    versions: Mapping[str, str] = field(default_factory=dict)
    """Distribution name to PEP 440 range, e.g. ``{"megatron-core": ">=0.16,<0.19"}``."""
    platforms: tuple[Platform, ...] = ("cpu", "cuda", "npu")
    features: tuple[str, ...] = ()
    """Names of features that must be on as well."""
    packages: Mapping[str, str] = field(default_factory=dict)
    """Importable top-level package to the command that installs it."""


@dataclass(frozen=True)
class Conflict:
    """Another feature that cannot be on at the same time, with the reason and the way out.

    Attributes:
        feature: its name.
        why: a sentence.
        switch: name of the setting that they conflict with, if it is not the whole feature that declares it.
    """

    feature: str
    why: str
    switch: str | None = None


Check = Callable[[Any, Any], Iterable[str]]
"""Problems of a job's arguments, or of Megatron's configuration, with a feature's options."""


def _no_problems(args: Any, options: Any) -> Iterable[str]:
    return ()


def nothing_to_rewrite(args: Any) -> Sequence[str]:
    """Change nothing; the default of ``Feature.rewrite``."""
    return ()


def _switch_is_on(name: str) -> Callable[[Any], bool]:
    return lambda settings: bool(getattr(settings, name, False))


@dataclass(frozen=True)
class Feature:
    """One switchable change to Megatron.

    Attributes:
        name: kebab-case identity, as doctor and the documentation print it.
        summary: one line.
        flags: the first one is the switch, unless ``active`` says otherwise; Megatron's flags that
            ``active`` or ``check`` read are listed too.
        patches: rows for the engine.
        rows: selects from ``patches`` for given settings; by default all of them apply.
        requires, conflicts: declared, checked before anything is mutated.
        active: decides from the settings (attribute access by ``dest``, ``platform``) whether the
            feature is on; by default: the first flag is true.
        options: makes of the settings (attribute access by ``dest``, ``platform``, ``features_on``) the
            frozen options that the feature's implementations find in their context.
        rewrite: changes a job's arguments in place before Megatron derives others from them, and returns a
            sentence for each change. Called again it finds nothing left to do; what it cannot change it
            leaves to ``check``.
        check: gets Megatron's full argument namespace, in which our own switches read as the settings say,
            and the options of that namespace (``None`` without ``options``); yields every problem, each
            naming who, what, and what to do.
        doc: page under ``docs/features/``.
        platform_support: true for redirections without which Megatron does not run on the platform at
            all; doctor and the benchmarks count them apart from features that a user switched on.
        on_finalize: lazy ``"module:function"``; called with the feature's context right before the model
            is built, after all sites are verified.
        when: of a feature without a switch of its own: what it is on for, in words.
        supplies: names of features whose effect a backport, or hooks into newer releases, have in the
            releases that they serve; doctor and the compatibility table say so.
        overlaps: what the feature sends while something is computed, in words, as "the gather of weights";
            checks of the environment look for what takes such transfers their cover.
        environment: checks of a job's surroundings that are the feature's own.
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
    rewrite: Callable[[Any], Sequence[str]] = nothing_to_rewrite
    check: Check = _no_problems
    doc: str = ""
    platform_support: bool = False
    on_finalize: str = ""
    when: str = ""
    supplies: tuple[str, ...] = ()
    overlaps: str = ""
    environment: tuple[EnvironmentCheck, ...] = ()
    distribution: str = ""

    @property
    def label(self) -> str:
        """The name as messages print it, with the plug-in that a user may have to report to."""
        return f"{self.name} (plug-in {self.distribution})" if self.distribution else self.name

    def problems(self, args: Any) -> list[str]:
        """Return what ``check`` finds in a job's arguments."""
        return list(self.check(args, self.options(args) if self.options else None))

    def patches_for(self, settings: Any) -> Sequence[Patch]:
        """Return the patches that these settings switch on, in order."""
        return self.patches if self.rows is None else self.rows(settings)

    def conflicting(self, names: Container[str], settings: Any) -> Iterator[Conflict]:
        """Yield the conflicts with features that are on.

        Args:
            names: of them.
            settings: by which they are.
        """
        for conflict in self.conflicts:
            chosen = conflict.switch is None or _switch_is_on(conflict.switch)(settings)
            if chosen and conflict.feature in names:
                yield conflict

    def is_active(self, settings: Any) -> bool:
        """Return whether these settings switch the feature on."""
        if self.active is not None:
            return self.active(settings)
        return bool(self.flags) and _switch_is_on(self.flags[0].dest)(settings)


EXPERIMENTAL_ATTENTION_VARIANT = Flag(
    "--experimental-attention-variant",
    "Megatron's own flag; 'dsa' switches on the repairs that DeepSeek Sparse Attention needs.",
    kind="value",
    megatron=True,
)


def on_platform(*platforms: Platform) -> Callable[[Any], bool]:
    """Activation rule of a redirection: on wherever the job runs on one of ``platforms``."""

    def active(settings: Any) -> bool:
        return settings.platform in platforms

    return active


Options = TypeVar("Options")
State = TypeVar("State")


@dataclass(frozen=True)
class Megatron:
    """Megatron's modules, below the package that replaces ``megatron`` in this session.

    Implementations must not write ``import megatron``: in a fork with another root that would load a
    second Megatron, or none.

    Attributes:
        root: the top-level package, ``corp_megatron`` in a fork.
    """

    root: str = "megatron"

    def __call__(self, name: str) -> ModuleType:
        """Import Megatron's module ``name``, such as ``core.parallel_state``."""
        return import_module(f"{self.root}.{name}")


@dataclass(frozen=True)
class Context(Generic[Options]):
    """Everything that a feature's implementations know of their session; made when it arms its patches.

    A ``wrap`` factory that takes ``(original, context)``, and every ``factory`` row, gets the context of
    the feature that claims the site. Implementations read settings nowhere else. What they have to remember
    between calls lies in :meth:`state`; the other attributes never change.

    Attributes:
        feature: the feature's name.
        options: the result of ``Feature.options``.
        megatron: this session's Megatron.
        log: the feature's logger, of this session alone: contexts of two sessions are never equal.
    """

    feature: str
    options: Options
    megatron: Megatron
    log: Log
    _states: list[tuple[Any, Any]] = field(default_factory=list, init=False, repr=False, compare=False)

    def state(self, factory: Callable[[Context[Options]], State]) -> State:
        """Return the object in which the feature remembers things in this session, made on first use.

        All implementations of the feature that ask get the same object. It lives as long as the context,
        which ends with its session; a copy made with ``dataclasses.replace`` has a state of its own.

        Args:
            factory: a class, or function of a module, that makes the object from the context.

        Raises:
            TypeError: the object has been made by another factory.
        """
        if not self._states:
            self._states.append((factory, factory(self)))
        known, state = self._states[0]
        if known is not factory:
            raise TypeError(f"{self.feature}: its state is made by {known!r}, not by {factory!r}")
        return cast(State, state)
