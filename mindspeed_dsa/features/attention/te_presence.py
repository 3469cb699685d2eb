"""Whether Megatron has found a Transformer Engine that it can use; import it once Megatron is there."""

from __future__ import annotations

from mindspeed_dsa.features.host import host

TRANSFORMER_ENGINE_IS_USABLE: bool = host("core.extensions.transformer_engine").HAVE_TE
