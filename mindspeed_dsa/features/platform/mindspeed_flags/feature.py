"""A command line of MindSpeed's: translated by the one-liner, and completed with what MindSpeed would do."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from mindspeed_dsa.feature import Feature
from mindspeed_dsa.features.platform.gradient_fusion import feature as gradient_fusion
from mindspeed_dsa.settings import ACCEPT_MINDSPEED

_FUSIONS = {
    "gradient_accumulation_fusion": gradient_fusion.EXTENSION,
    "masked_softmax_fusion": "scaled_masked_softmax_cuda",
    "apply_rope_fusion": "transformer_engine",
}
"""Arguments, and the modules without which Megatron stops; MindSpeed has operators of NPUs in their place."""


def switch_off_missing_fusions(args: Any) -> Sequence[str]:
    """Switch off what cannot run here; ``Feature.rewrite``. The results are the same."""
    missing = [
        (name, module)
        for name, module in _FUSIONS.items()
        if getattr(args, name, False) and find_spec(module) is None
        if not (module == gradient_fusion.EXTENSION and gradient_fusion.serves(args))
    ]
    for name, _ in missing:
        setattr(args, name, False)
    return [f"{name} is switched off: {module} is not installed" for name, module in missing]


FEATURE = Feature(
    name="accept-mindspeed-flags",
    summary="Takes a command line that was written for MindSpeed or MindSpeed-LLM, and switches off fusions "
    "whose modules are missing, as MindSpeed does not need them.",
    flags=(ACCEPT_MINDSPEED,),
    rewrite=switch_off_missing_fusions,
    doc="accept-mindspeed-flags.md",
)
