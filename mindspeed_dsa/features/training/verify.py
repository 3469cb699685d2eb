"""The last look before training: every patch site is verified when the first model is built."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspeed_dsa.features.base import Feature
from mindspeed_dsa.patches.spec import Patch


def verify_first(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``LanguageModule.__init__``, which every Megatron-core model with a vocabulary runs."""
    from mindspeed_dsa import session

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        session.finalize_once()
        original(self, *args, **kwargs)

    return __init__


FEATURES = (
    Feature(
        name="verify-before-model",
        summary="Verifies all patch sites, prints the table of features and writes it as JSON, once, when "
        "the first model is built.",
        active=lambda settings: bool(settings.features_on),
        companion=True,
        doc="verify-before-model.md",
        patches=(
            Patch(
                "megatron.core.models.common.language_module.language_module:LanguageModule.__init__",
                "wrap",
                "mindspeed_dsa.features.training.verify:verify_first",
                "a failed or stale patch stops the run before the model is built",
            ),
        ),
    ),
)
