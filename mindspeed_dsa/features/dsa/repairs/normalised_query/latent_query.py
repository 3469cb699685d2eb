"""The latent query as the indexer reads it: after its norm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mindspeed_dsa.megatron.local_norms import norm_of_fused_layer


def normalise_latent_query(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``get_query_key_value_tensors``: its fourth result is only the indexer's input."""

    def get_query_key_value_tensors(self: Any, *args: Any, **kwargs: Any) -> Any:
        query, key, value, q_compressed, *rest = original(self, *args, **kwargs)
        config, up_projection = self.config, getattr(self, "linear_q_up_proj", None)
        # Without a fused norm it was applied before, or there is none.
        if config.experimental_attention_variant == "dsa" and hasattr(up_projection, "layer_norm_weight"):
            with torch.no_grad():  # the indexer detaches its inputs
                q_compressed = norm_of_fused_layer(up_projection, q_compressed, config)
        return query, key, value, q_compressed, *rest

    return get_query_key_value_tensors
