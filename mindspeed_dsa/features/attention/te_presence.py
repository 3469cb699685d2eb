"""Whether Megatron has found a Transformer Engine that it can use; import it once Megatron is there."""

from __future__ import annotations

from megatron.core.extensions.transformer_engine import HAVE_TE

TRANSFORMER_ENGINE_IS_USABLE: bool = HAVE_TE
