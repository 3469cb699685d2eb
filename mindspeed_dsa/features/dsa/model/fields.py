"""Fields of DSA in Megatron's configurations: taken by constructors that lack them, filled in from settings.

Imports nothing of Megatron: fetched while Megatron is being imported.
"""

# No `from __future__ import annotations`: Megatron-LM makes flags of fields, and reads their types.

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, Optional

from mindspeed_dsa.feature import Context, Flag
from mindspeed_dsa.features.dsa.model.feature import (
    FLAGS,
    NORMALISED_QUERY,
    ROPE_FIRST,
    Options,
    check_model,
    sets,
)
from mindspeed_dsa.megatron.configuration import require
from mindspeed_dsa.megatron.dsa import MODEL_SIZES, uses_dsa
from mindspeed_dsa.patches.errors import SettingsError


def field_of(flag: Flag, default: Any = None) -> "dataclasses.Field[Any]":
    """Make the ``dataclasses.Field`` of a flag's value.

    Megatron-LM 0.16 and later derive a flag from it, with the names and the help in its metadata.

    Args:
        flag: of a field.
        default: in place of the flag's.
    """
    default = flag.default if default is None else default
    if flag.kind == "auto":
        kind: Any = bool
        default = bool(default)
    else:
        kind = flag.type if default is not None else Optional[flag.type]  # noqa: UP045
    names = [flag.name, *flag.aliases]
    if default is True:
        names = ["--no-" + flag.name[2:], "--disable-" + flag.name[2:]]
    meta = {"argparse_meta": {"arg_names": names, "help": flag.help.replace("%", "%%")}}
    made = dataclasses.make_dataclass(
        "OneField", [(flag.dest, kind, dataclasses.field(default=default, metadata=meta))]
    )
    return dataclasses.fields(made)[0]


FIELDS = SimpleNamespace(**{flag.dest: field_of(flag) for flag in FLAGS})
"""Fields by name; in a class's ``__dataclass_fields__`` they are found by code that copies arguments to
fields, replaces fields, or derives a dataclass."""
NATIVE = SimpleNamespace(**{flag.dest: field_of(flag, True) for flag in (ROPE_FIRST, NORMALISED_QUERY)})
"""Fields of releases that do natively what they say."""

_NAMES = tuple(flag.dest for flag in FLAGS)


def take_fields(original: Callable[..., None], context: Context[Options]) -> Callable[..., None]:
    """Decorate a configuration's ``__init__``, which was generated without some fields.

    An argument decides about a DSA model's field, then a setting, then the default; None is no argument.
    """
    taken = inspect.signature(original).parameters

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        known = {field.name: field for field in dataclasses.fields(self) if field.init}
        if kwargs.get("experimental_attention_variant") == "dsa":
            given = {name: kwargs[name] for name in _NAMES if kwargs.get(name) is not None}
            refuse(context, self, _contradictions(given, context.options))
            chosen = {name: setting.value for name, setting in context.options.chosen.items()}
            if context.options.model is not None:
                sizes = MODEL_SIZES[context.options.model]
                chosen |= {name: size for name, size in sizes.items() if kwargs.get(name) is None}
            filled = {name: value for name, value in chosen.items() if name in known and name not in given}
            kwargs |= filled
            if context.options.model is not None and (said := sets(context.options.model, filled)):
                context.log.info("%s", said, once=True)
        for name in (name for name in known if name not in taken):
            value = kwargs.pop(name, None)
            setattr(self, name, known[name].default if value is None else value)
        original(self, *args, **kwargs)

    return __init__


def settle_fields(original: Callable[..., None], context: Context[Options]) -> Callable[..., None]:
    """Decorate ``TransformerConfig.__post_init__``: settings reach configurations with other constructors."""

    def __post_init__(self: Any, *args: Any, **kwargs: Any) -> None:
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        chosen = {}
        if uses_dsa(self):
            chosen = {name: setting.value for name, setting in context.options.chosen.items()}
        given = {}
        for name in _NAMES:
            default = defaults.get(name, getattr(FIELDS, name).default)
            value = getattr(self, name, default)
            if value not in (None, default):
                given[name] = value
            setattr(self, name, chosen.get(name, value) if value in (None, default) else value)
        if chosen:
            refuse(context, self, _contradictions(given, context.options))
        if uses_dsa(self):
            require(context, check_model, self)
        original(self, *args, **kwargs)

    return __post_init__


def _contradictions(given: dict[str, Any], options: Options) -> Iterator[str]:
    for name, setting in options.chosen.items():
        if given.get(name, setting.value) != setting.value:
            chosen = "no value" if setting.value is None else repr(setting.value)
            yield (
                f"{name}={given[name]!r} is passed to it, and {chosen} is chosen by {setting.who}: "
                "pass the same value, or omit one of them"
            )


def refuse(context: Context[Any], config: Any, problems: Iterator[str]) -> None:
    """Refuse a configuration's arguments.

    Raises:
        SettingsError: there is a problem.
    """
    found = list(problems)
    if found:
        raise SettingsError(f"mindspeed_dsa: {context.feature}: {type(config).__name__}: " + "; ".join(found))
