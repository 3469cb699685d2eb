"""Our flags in Megatron-LM's own parser, and our checks beside Megatron's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspeed_dsa.features.base import Feature
from mindspeed_dsa.patches.spec import Patch


def with_feature_flags(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``megatron.training.arguments.parse_args`` through its own extension point."""
    from mindspeed_dsa import session

    def parse_args(extra_args_provider: Any = None, *args: Any, **kwargs: Any) -> Any:
        def provider(parser: Any) -> Any:
            if extra_args_provider is not None:
                parser = extra_args_provider(parser)
            return session.add_arguments(parser)

        namespace = original(provider, *args, **kwargs)
        session.write_back(namespace)
        return namespace

    return parse_args


def with_feature_checks(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``megatron.training.arguments.validate_args``.

    Ours come second, when Megatron has filled in what it derives; no process group exists yet.
    """
    from mindspeed_dsa import session
    from mindspeed_dsa.patches.errors import SettingsError, show_without_traceback

    def validate_args(args: Any, *rest: Any, **kwargs: Any) -> Any:
        result = original(args, *rest, **kwargs)
        try:
            session.validate(args)
        except SettingsError:
            show_without_traceback()
            raise
        return result

    return validate_args


def _wanted(settings: Any) -> bool:
    """With no feature on, only a command line that speaks of us (or asks for help) needs our flags."""
    return bool(settings.mentioned or settings.features_on)


FEATURES = (
    Feature(
        name="megatron-arguments",
        summary="Adds the features' flags to Megatron-LM's parser and their checks to its validation.",
        active=_wanted,
        companion=True,
        doc="megatron-arguments.md",
        patches=(
            Patch(
                "megatron.training.arguments:parse_args",
                "wrap",
                "mindspeed_dsa.features.training.arguments:with_feature_flags",
                "feature flags appear in --help and in the argument namespace",
                params=("extra_args_provider",),
                required=False,
            ),
            Patch(
                "megatron.training.arguments:validate_args",
                "wrap",
                "mindspeed_dsa.features.training.arguments:with_feature_checks",
                "impossible combinations are refused before any process group starts",
                params=("args",),
                required=False,
            ),
        ),
    ),
)
