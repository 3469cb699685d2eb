"""Patches that connect a session to Megatron's argument parsing, argument checks and model construction.

They belong to no feature: the session applies them whenever a feature is on, and passes itself as the
context.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, Protocol

from mindspeed_dsa.feature import Feature
from mindspeed_dsa.patches.errors import SettingsError, show_without_traceback
from mindspeed_dsa.patches.spec import Patch

_HERE = "mindspeed_dsa.megatron.job"


class Session(Protocol):
    """Methods of a session that the patches below call."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add the flags of all features."""

    def write_back(self, namespace: argparse.Namespace) -> None:
        """Write the session's settings into a job's argument namespace."""

    def rewrite(self, args: Any) -> None:
        """Let features change a job's arguments."""

    def validate(self, args: Any) -> None:
        """Raise the problems that features find in a job's arguments."""

    def finalize_once(self) -> None:
        """Verify every patch at the first call."""


MEGATRON_ARGUMENTS = Feature(
    name="megatron-arguments",
    summary="Adds the features' flags to Megatron-LM's parser and their checks to its validation.",
    doc="megatron-arguments.md",
    patches=(
        Patch(
            "megatron.training.arguments:parse_args",
            "wrap",
            f"{_HERE}:parse_with_feature_flags",
            "feature flags appear in --help and in the argument namespace",
            params=("extra_args_provider",),
            required=False,
        ),
        Patch(
            "megatron.training.arguments:validate_args",
            "wrap",
            f"{_HERE}:validate_with_feature_checks",
            "impossible combinations are refused before any process group starts",
            params=("args",),
            required=False,
        ),
    ),
)
VERIFY_BEFORE_MODEL = Feature(
    name="verify-before-model",
    summary="Verifies all patch sites, prints the table of features and writes it as JSON, once, when "
    "the first model is built.",
    doc="verify-before-model.md",
    patches=(
        Patch(
            "megatron.core.models.common.language_module.language_module:LanguageModule.__init__",
            "wrap",
            f"{_HERE}:verify_before_model",
            "a failed or stale patch stops the run before the model is built",
        ),
    ),
)
SERVICES = (MEGATRON_ARGUMENTS, VERIFY_BEFORE_MODEL)
"""The session's own patches, declared like features so that reports and pages include them."""


def parse_with_feature_flags(original: Callable[..., Any], session: Session) -> Callable[..., Any]:
    """Decorate ``megatron.training.arguments.parse_args``, using its ``extra_args_provider``."""

    def parse_args(extra_args_provider: Any = None, *args: Any, **kwargs: Any) -> Any:
        def provider(parser: Any) -> Any:
            if extra_args_provider is not None:
                parser = extra_args_provider(parser)
            return session.add_arguments(parser)

        namespace = original(provider, *args, **kwargs)
        session.write_back(namespace)
        return namespace

    return parse_args


def validate_with_feature_checks(original: Callable[..., Any], session: Session) -> Callable[..., Any]:
    """Decorate ``megatron.training.arguments.validate_args``: run the features' rewrites and checks too."""
    # Features rewrite arguments before Megatron derives others from them, and check them afterwards. No
    # process group exists yet.

    def validate_args(args: Any, *rest: Any, **kwargs: Any) -> Any:
        session.rewrite(args)
        result = original(args, *rest, **kwargs)
        try:
            session.validate(args)
        except SettingsError:
            show_without_traceback()
            raise
        return result

    return validate_args


def verify_before_model(original: Callable[..., Any], session: Session) -> Callable[..., Any]:
    """Decorate ``LanguageModule.__init__``, the base class of language models: verify all patches first."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        session.finalize_once()
        original(self, *args, **kwargs)

    return __init__
