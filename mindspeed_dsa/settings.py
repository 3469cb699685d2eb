"""Resolution of flags: values from API calls, environment, command line and defaults, with their origin."""

from __future__ import annotations

import argparse
import difflib
import functools
import itertools
import numbers
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, get_args

from mindspeed_dsa.feature import AUTO, ENV_PREFIX, Flag, Platform
from mindspeed_dsa.patches.errors import SettingsError

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")
_KINDS: dict[Any, type] = {int: numbers.Integral, float: numbers.Real}
"""Types that an API keyword accepts for a flag of a number type."""

MEGATRON_ROOT = Flag(
    "--megatron-root",
    "Top-level package that replaces 'megatron' in an in-house fork, e.g. corp_megatron.",
    kind="value",
    default="megatron",
)
PLATFORM = Flag(
    "--mindspeed-platform",
    "Device to run on; 'auto' selects the first available of NPU, GPU and CPU.",
    kind="value",
    default="auto",
    choices=("auto", *get_args(Platform)),
)
REPORT_DIR = Flag(
    "--mindspeed-report-dir",
    "Folder for mindspeed_dsa.json, the record of features and patch sites; default: next to the "
    "TensorBoard logs or the checkpoints, if the job has them.",
    kind="value",
)
ACCEPT_MINDSPEED = Flag(
    "--accept-mindspeed-flags",
    "Take a command line that was written for MindSpeed or MindSpeed-LLM: flags that are called otherwise "
    "now are translated, needless ones are dropped, and unserved ones that change results are refused.",
)
GENERAL_FLAGS = (PLATFORM, MEGATRON_ROOT, REPORT_DIR, ACCEPT_MINDSPEED)
_REPAIRS = (
    "local-provider",
    "spec-dispatch",
    "hadamard",
    "loss-gate",
    "loss-scale",
    "loss-tracker",
    "cp-loss-grads",
    "core-attention-recompute",
    "indexer-tp-grads",
    "rotary-key-tp-grads",
)
"""Repairs of Megatron's DSA that used to have their own switches."""
REMOVED = {
    "--dsa-cpu-bf16": "CPUs widen bf16 to fp32 for every product; omit it",
    "--host-profile": "torch.profiler shows what the host does (docs/tuning.md); omit it",
    "--host-profile-step": "torch.profiler shows what the host does (docs/tuning.md); omit it",
    **{
        f"--dsa-{name}": f"the repair is on wherever DSA is; --no-dsa-repairs {name} leaves it out"
        for name in _REPAIRS
    },
    **{f"--no-dsa-{name}": f"use --no-dsa-repairs {name}" for name in _REPAIRS},
}
"""Flags that this release no longer accepts, with the replacement."""


@dataclass(frozen=True)
class Setting:
    """Value of one flag, with its origin (API, environment, command line or default)."""

    value: Any
    source: str
    """``API``, ``environment``, ``argv``, ``default``, or ``imports`` (from the imported Megatron)."""
    detail: str = ""
    """Variable or flag, as the user wrote it."""

    @property
    def who(self) -> str:
        """Origin as text, for example ``environment (MINDSPEED_DSA_X=1)``."""
        return f"{self.source} ({self.detail})" if self.detail else self.source


class Settings:
    """Resolved switches, read as attributes by their ``dest``.

    Two attributes are not switches: ``platform`` (``cpu``, ``cuda`` or ``npu``), and ``features_on``, the
    names of the features found active so far.
    """

    def __init__(
        self,
        values: Mapping[str, Setting],
        mentioned: Sequence[str] = (),
        overruled: Mapping[str, str] | None = None,
    ) -> None:
        self._values = dict(values)
        self.overruled = dict(overruled or {})
        """Command line flags overridden by another value, with the environment variable that sets it."""
        self.mentioned = tuple(mentioned)
        """Our own flags, misspelt versions of them, and help requests on the command line."""
        self.platform = ""
        self.features_on: tuple[str, ...] = ()

    def __getattr__(self, dest: str) -> Any:
        if dest.startswith("_"):
            raise AttributeError(dest)
        try:
            return self._values[dest].value
        except KeyError:
            raise AttributeError(f"there is no switch {dest!r}") from None

    def setting(self, dest: str) -> Setting:
        """Return value and origin of one switch."""
        return self._values[dest]

    def chosen(self) -> dict[str, Setting]:
        """Return only the switches that were set explicitly."""
        return {dest: s for dest, s in self._values.items() if s.source != "default"}


def read(
    flags: Iterable[Flag],
    *,
    api: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    argv: Sequence[str] = (),
    unavailable: Sequence[str] = (),
    fork: str | None = None,
) -> Settings:
    """Resolve every flag. The API overrides the environment, which overrides the command line.

    Args:
        flags: all known flags, including Megatron's own flags that features read.
        api: values by ``dest``.
        environ: environment variables; the process's own by default.
        argv: command line, including unrelated arguments.
        unavailable: messages about plug-ins that could not be loaded, added to other problems because an
            unknown switch may belong to one of them.
        fork: Megatron's root package as the job has imported it, unless a setting names another one.

    Raises:
        SettingsError: an API keyword or a variable with our prefix is unknown, or a value is invalid; one
            message lists all.
    """
    flags = unique(flags)
    api = dict(api or {})
    environ = os.environ if environ is None else environ
    problems = _removed(api, environ, argv) + _unknown(flags, api, environ)
    problems += unavailable if problems else ()
    from_argv, mentioned, argv_problems = _read_argv(flags, argv)
    problems += argv_problems
    values: dict[str, Setting] = {}
    overruled: dict[str, str] = {}
    for flag in flags:
        try:
            if flag.dest in api:
                value = _from_api(flag, api[flag.dest])
                values[flag.dest] = Setting(value, "API", f"{flag.dest}={api[flag.dest]!r}")
            elif flag.env in environ:
                text = environ[flag.env]
                values[flag.dest] = Setting(_from_text(flag, text), "environment", f"{flag.env}={text}")
                if from_argv.get(flag.dest, values[flag.dest].value) != values[flag.dest].value:
                    overruled[flag.name] = values[flag.dest].detail
            elif flag.dest in from_argv:
                values[flag.dest] = Setting(from_argv[flag.dest], "argv", flag.name)
            elif fork is not None and flag is MEGATRON_ROOT:
                values[flag.dest] = Setting(fork, "imports", f"{fork}.core")
            else:
                values[flag.dest] = Setting(flag.unset, "default")
        except ValueError as error:
            problems.append(str(error))
    if problems:
        raise SettingsError("mindspeed_dsa: " + "; ".join(problems))
    return Settings(values, mentioned, overruled)


def unique(flags: Iterable[Flag]) -> list[Flag]:
    """Return the flags without duplicates, in order; two features may read the same flag.

    Raises:
        SettingsError: two different flags share a name or an alias.
    """
    by_dest: dict[str, Flag] = {}
    for flag in flags:
        if not by_dest.setdefault(flag.dest, flag).same_as(flag):
            raise SettingsError(f"flag {flag.name} is declared twice with different meanings; rename one")
    owners: dict[str, Flag] = {}
    for flag in by_dest.values():
        for name in (flag.name, *flag.aliases):
            if (owner := owners.setdefault(name, flag)) is not flag:
                raise SettingsError(f"{name} is declared by {owner.name} and by {flag.name}; rename one")
    return list(by_dest.values())


def add_flags(parser: argparse.ArgumentParser, title: str, flags: Iterable[Flag]) -> None:
    """Add our own flags to a parser, except Megatron's flags and flags that the parser already has.

    If the parser has only some spellings of a configuration field, the missing ones are added.
    """
    taken = set(parser._option_string_actions)
    ours = [flag for flag in flags if not flag.megatron]
    missing = [f for f in ours if f.name not in taken or (f.field and not _spellings(f) <= taken)]
    if not missing:
        return
    group = parser.add_argument_group(title)
    for flag in missing:
        if flag.field and _spellings(flag) & taken:
            _add_spellings(group, flag, taken)
        else:
            _add_flag(group, flag)


def _spellings(flag: Flag) -> set[str]:
    """Return all spellings of a flag on a command line."""
    names = {flag.name, *flag.aliases}
    return names | {*_negations(flag)} if flag.kind == "auto" else names


def _negations(flag: Flag) -> list[str]:
    return ["--no-" + name[2:] for name in (flag.name, *flag.aliases)] + list(flag.negations)


def _add_spellings(group: argparse._ActionsContainer, flag: Flag, taken: set[str]) -> None:
    """Add the missing spellings of a flag, and keep the parser's default."""
    names = [name for name in (flag.name, *flag.aliases) if name not in taken]
    common: dict[str, Any] = {"dest": flag.dest, "default": argparse.SUPPRESS}
    if flag.kind == "value" and names:
        group.add_argument(*names, type=flag.type, choices=flag.choices, help=f"as {flag.name}", **common)
    elif flag.kind == "auto":
        negations = [name for name in _negations(flag) if name not in taken]
        if names:
            group.add_argument(*names, action="store_true", help=flag.help.replace("%", "%%"), **common)
        if negations:
            group.add_argument(*negations, action="store_false", help=f"{flag.name} off", **common)


def mentions(argv: Iterable[str], flags: Iterable[Flag], known: Iterable[Flag] = ()) -> list[str]:
    """Return our own flags on a command line as written there, without the flags in ``known``."""
    names = _own_names(flags) - _own_names(known)
    tokens = itertools.takewhile(lambda token: token != "--", argv)
    return [token for token in tokens if token.partition("=")[0] in names]


def all_names(flags: Iterable[Flag]) -> set[str]:
    """Return all spellings of flags on a command line, negations included."""
    flags = list(flags)
    names = {name for flag in flags for name in (flag.name, *flag.aliases)}
    return names | {name for flag in flags for name in _negations(flag)}


def _own_names(flags: Iterable[Flag]) -> set[str]:
    return all_names(flag for flag in flags if not flag.megatron)


def near_misses(tokens: Iterable[str], flags: Iterable[Flag]) -> dict[str, str]:
    """Return misspelt flags of ours among command line tokens, with the flag that was meant."""
    names = frozenset(_own_names(flags))
    meant = {}
    for token in tokens:
        name = token.partition("=")[0]
        if name.startswith("--") and name not in names and (close := misspelt(name, names)):
            meant[name] = close
    return meant


def misspelt(name: str, names: frozenset[str]) -> str:
    """Return the flag that was meant by a misspelt one, or an empty string if it is another flag."""
    close = _closest(name, names)
    # If every word of the name is correct it is another flag, such as Megatron's --recompute-num-layers.
    return close if set(name.split("-")) - set(close.split("-")) else ""


@functools.lru_cache(maxsize=1024)  # every step of a job's start looks at the same command line
def _closest(name: str, names: frozenset[str]) -> str:
    """Return the name that resembles a misspelling, or an empty string."""
    return next(iter(difflib.get_close_matches(name, names, n=1, cutoff=0.85)), "")


def _add_flag(group: argparse._ActionsContainer, flag: Flag) -> None:
    names = (flag.name, *flag.aliases)
    text = flag.help.replace("%", "%%")
    if flag.kind == "bool":
        group.add_argument(*names, dest=flag.dest, action="store_true", default=flag.unset, help=text)
    elif flag.kind == "auto" and flag.choices:

        def word(given: str) -> bool | str:
            try:
                return _switched(flag, given, flag.name)
            except ValueError as error:
                raise argparse.ArgumentTypeError(str(error)) from None

        group.add_argument(
            *names,
            dest=flag.dest,
            type=word,
            nargs="?",
            const=True,
            default=flag.unset,
            metavar=f"{{{','.join(flag.choices)}}}",
            help=text,
        )
        negations = ["--no-" + name[2:] for name in names]
        group.add_argument(
            *negations, dest=flag.dest, action="store_false", default=flag.unset, help=f"{flag.name} off"
        )
    elif flag.kind == "auto":
        group.add_argument(
            *names, dest=flag.dest, action=argparse.BooleanOptionalAction, default=flag.unset, help=text
        )
        if flag.negations:
            group.add_argument(
                *flag.negations,
                dest=flag.dest,
                action="store_false",
                default=flag.unset,
                help=argparse.SUPPRESS,
            )
    else:
        group.add_argument(
            *names,
            dest=flag.dest,
            type=flag.type,
            default=flag.default,
            choices=flag.choices,
            nargs=flag.nargs,
            metavar=flag.metavar,
            help=text,
        )


class _SilentParser(argparse.ArgumentParser):
    """Parser of our flags on a job's command line; raises instead of exiting."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            raise argparse.ArgumentError(action, _not_a_choice(value, action.choices))


def _read_argv(flags: list[Flag], argv: Sequence[str]) -> tuple[dict[str, Any], list[str], list[str]]:
    """Return ``(values set, our flags that were mentioned, problems)``."""
    if not argv:
        return {}, [], []  # adding a hundred flags to a parser takes longer than all the rest
    parser = _SilentParser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    for flag in flags:
        _add_flag(parser, flag)
    for action in parser._actions:
        action.default = argparse.SUPPRESS
    tokens = [token for token in itertools.takewhile(lambda t: t != "--", argv) if token.startswith("-")]
    ours = _own_names(flags)
    mentioned = [token for token in tokens if token.partition("=")[0] in ours or token in ("-h", "--help")]
    mentioned += near_misses(tokens, flags)
    try:
        namespace, _ = parser.parse_known_args(list(argv))
    except ValueError as error:
        return {}, mentioned, [f"{error}; see `python -m mindspeed_dsa features`"]
    return vars(namespace), mentioned, []


def _removed(api: Mapping[str, Any], environ: Mapping[str, str], argv: Sequence[str]) -> list[str]:
    """Return messages about flags that were removed in this release, set by API, environment or argv."""
    tokens = {token.partition("=")[0] for token in itertools.takewhile(lambda t: t != "--", argv)}
    removed = [
        name
        for name in REMOVED
        if name in tokens or (flag := Flag(name, "")).dest in api or flag.env in environ
    ]
    return way_out(removed)


def way_out(names: Iterable[str]) -> list[str]:
    """Return a message for each name of a flag that was removed, with the flag that replaces it."""
    flags = [name if name.startswith("--") else f"--{name}" for name in names]
    return [f"{flag} was removed: {REMOVED[flag]}" for flag in flags if flag in REMOVED]


def _unknown(flags: list[Flag], api: Mapping[str, Any], environ: Mapping[str, str]) -> list[str]:
    problems = []
    removed = [Flag(name, "") for name in REMOVED]
    accepted = {flag.dest for flag in (*flags, *removed)}
    for dest in api:
        if dest not in accepted:
            problems.append(f"there is no switch {dest!r}{_suggest(dest, accepted)}")
    accepted = {flag.env for flag in (*flags, *removed)}
    for name in environ:
        if name.startswith(ENV_PREFIX) and name not in accepted:
            problems.append(f"environment variable {name} is unknown{_suggest(name, accepted)}")
    return problems


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return ``; did you mean --seed?`` for a misspelt name, or an empty string."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f"; did you mean {close[0]}?" if close else ""


def _suggest(name: str, known: Iterable[str]) -> str:
    return (
        did_you_mean(name, known)
        + " (`python -m mindspeed_dsa features` lists all switches, `explain` their variables)"
    )


def _from_api(flag: Flag, value: Any) -> Any:
    """Convert an API keyword's value to the flag's type; launchers such as Hydra pass strings."""
    who = f"API keyword {flag.dest}"
    if flag is ACCEPT_MINDSPEED:
        raise ValueError(
            f"{who}: the one-liner translates the process's own command line; set {flag.env}=1 before it"
        )
    if flag.kind in ("bool", "auto"):
        if isinstance(value, str):
            return _switched(flag, value, who)
        if value is None and flag.kind == "auto":
            return None
        if not isinstance(value, bool) and value not in (0, 1):
            raise ValueError(f"{who}={value!r}: use True or False")
        return bool(value)
    if value is None:
        return flag.unset
    if isinstance(value, str):
        return _words(flag, value, who)
    several = isinstance(value, (list, tuple))
    if several != _takes_several(flag):
        raise ValueError(f"{who}={value!r}: use {'one value' if several else 'a list'}")
    for item in value if several else [value]:
        if isinstance(item, bool) or not isinstance(item, _KINDS.get(flag.type, object)):
            raise ValueError(f"{who}={value!r}: not a valid {flag.type.__name__}")
    _check_choice(flag, value, who)
    return value


def _takes_several(flag: Flag) -> bool:
    return flag.nargs not in (None, "?")


def _switched(flag: Flag, text: str, who: str) -> bool | str:
    if AUTO in (flag.choices or ()) and text.lower() == AUTO:
        return AUTO
    try:
        return truth(text, who)
    except ValueError as error:
        others = f", or {AUTO}" if AUTO in (flag.choices or ()) else ""
        raise ValueError(f"{error}{others}") from None


def truth(text: str, who: str) -> bool:
    """Return the truth value of a text such as ``yes`` or ``0``.

    Raises:
        ValueError: the text is neither a true nor a false word.
    """
    if text.lower() in _TRUE:
        return True
    if text.lower() in _FALSE:
        return False
    raise ValueError(f"{who}={text}: use one of {', '.join(_TRUE)} or {', '.join(_FALSE)}")


def _from_text(flag: Flag, text: str) -> Any:
    if flag.kind in ("bool", "auto"):
        return _switched(flag, text, flag.env)
    return _words(flag, text, flag.env)


def _words(flag: Flag, text: str, who: str) -> Any:
    """Convert a text to one value, or to a list if the flag takes several values."""
    words = text.split() if _takes_several(flag) else [text]
    try:
        converted = [flag.type(word) for word in words]
    except argparse.ArgumentTypeError as error:
        raise ValueError(f"{who}={text}: {error}") from None
    except (TypeError, ValueError):
        raise ValueError(f"{who}={text}: not a valid {getattr(flag.type, '__name__', 'value')}") from None
    value = converted if _takes_several(flag) else converted[0]
    _check_choice(flag, value, who)
    return value


def _check_choice(flag: Flag, value: Any, who: str) -> None:
    values = value if isinstance(value, (list, tuple)) else [value]
    for item in values:
        if flag.choices is not None and item not in flag.choices:
            raise ValueError(f"{who}={value!r}: {_not_a_choice(item, flag.choices)}")


def _not_a_choice(value: Any, choices: Iterable[Any]) -> str:
    names = [str(choice) for choice in choices]
    hint = did_you_mean(str(value), names) or ";"
    return f"invalid choice: {value!r}{hint} choose from {', '.join(names)}"
