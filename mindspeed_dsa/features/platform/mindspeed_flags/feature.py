"""A command line of MindSpeed's: translated by the one-liner, and completed with what MindSpeed would do."""

from __future__ import annotations

from mindspeed_dsa.feature import Feature
from mindspeed_dsa.features.platform.mindspeed_flags.arguments import switch_off_missing_fusions
from mindspeed_dsa.settings import ACCEPT_MINDSPEED

FEATURE = Feature(
    name="accept-mindspeed-flags",
    summary="Takes a command line that was written for MindSpeed or MindSpeed-LLM, and switches off fusions "
    "whose modules are missing, as MindSpeed does not need them.",
    flags=(ACCEPT_MINDSPEED,),
    rewrite=switch_off_missing_fusions,
    doc="accept-mindspeed-flags.md",
)
