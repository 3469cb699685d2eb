"""Patches that add DSA fields to Megatron's configurations, and fill them from settings.

Does not import Megatron, because it is loaded while Megatron is being imported.
"""

# No `from __future__ import annotations`: Megatron-LM makes flags from fields and reads the types as objects.

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
    """Build the ``dataclasses.Field`` for a flag's value.

    Megatron-LM 0.16 and later derive a flag from the field, with the names and help text in the field's
    metadata.

    Args:
        flag: flag to make a field for.
        default: default of the field; None: the flag's default.
    """
    default = flag.default if default is None else default
    if flag.kind == "auto":
        kind: Any = bool
        default = bool(default)
    else:
        kind = flag.type if default is not None else Optional[flag.type]  # noqa: UP045
    names = [flag.name, *flag.aliases]
    # A field that is on by default gets the flags that turn it off.
    if default is True:
        names = ["--no-" + flag.name[2:], "--disable-" + flag.name[2:]]
    meta = {"argparse_meta": {"arg_names": names, "help": flag.help.replace("%", "%%")}}
    # dataclasses.field alone has neither name nor type: only a dataclass sets them.
    made = dataclasses.make_dataclass(
        "OneField", [(flag.dest, kind, dataclasses.field(default=default, metadata=meta))]
    )
    return dataclasses.fields(made)[0]


FIELDS = SimpleNamespace(**{flag.dest: field_of(flag) for flag in FLAGS})
"""Fields by name. Code that copies arguments to fields, replaces fields or derives a dataclass finds them in
the class's ``__dataclass_fields__``."""
NATIVE = SimpleNamespace(**{flag.dest: field_of(flag, True) for flag in (ROPE_FIRST, NORMALISED_QUERY)})
"""Fields with default True, for releases that always behave so."""

_NAMES = tuple(flag.dest for flag in FLAGS)


def take_fields(original: Callable[..., None], context: Context[Options]) -> Callable[..., None]:
    """Decorate ``__init__`` of a configuration class to accept the added DSA fields.

    A dataclass's ``__init__`` is generated before the fields are added, so it does not know them. The value
    of a field is the argument unless it is None, otherwise the setting, otherwise the default.
    """
    taken = inspect.signature(original).parameters

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        init_fields = {field.name: field for field in dataclasses.fields(self) if field.init}
        if kwargs.get("experimental_attention_variant") == "dsa":
            explicit = {name: kwargs[name] for name in _NAMES if kwargs.get(name) is not None}
            refuse(context, self, _contradictions(explicit, context.options))
            settings = {name: setting.value for name, setting in context.options.chosen.items()}
            if context.options.model is not None:
                sizes = MODEL_SIZES[context.options.model]
                settings |= {name: size for name, size in sizes.items() if kwargs.get(name) is None}
            filled = {
                name: value
                for name, value in settings.items()
                if name in init_fields and name not in explicit
            }
            kwargs |= filled
            if context.options.model is not None and (said := sets(context.options.model, filled)):
                context.log.info("%s", said, once=True)
        # Set here: the generated __init__ would reject them.
        for name in (name for name in init_fields if name not in taken):
            value = kwargs.pop(name, None)
            setattr(self, name, init_fields[name].default if value is None else value)
        original(self, *args, **kwargs)

    return __init__


def settle_fields(original: Callable[..., None], context: Context[Options]) -> Callable[..., None]:
    """Decorate ``TransformerConfig.__post_init__`` to apply settings to subclasses with own ``__init__``."""

    def __post_init__(self: Any, *args: Any, **kwargs: Any) -> None:
        # A subclass that was defined before the fields were added has only its base's fields.
        bases = (vars(each).get("__dataclass_fields__", {}) for each in reversed(type(self).__mro__))
        defaults = {name: field.default for fields in bases for name, field in fields.items()}
        settings = {}
        if uses_dsa(self):
            settings = {name: setting.value for name, setting in context.options.chosen.items()}
        explicit = {}
        for name in _NAMES:
            default = defaults.get(name, getattr(FIELDS, name).default)
            value = getattr(self, name, default)
            # An argument equal to the default cannot be told from an unset one: the setting replaces both.
            if value not in (None, default):
                explicit[name] = value
            setattr(self, name, settings.get(name, value) if value in (None, default) else value)
        if settings:
            refuse(context, self, _contradictions(explicit, context.options))
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
    """Raise if a configuration has problems.

    Raises:
        SettingsError: ``problems`` is not empty; its message lists all of them.
    """
    messages = list(problems)
    if messages:
        raise SettingsError(
            f"mindspeed_dsa: {context.feature}: {type(config).__name__}: " + "; ".join(messages)
        )
