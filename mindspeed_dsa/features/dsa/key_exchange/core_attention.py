"""The moments around DSA's core attention at which keys arrive and are gathered again.

Imports nothing of Megatron: fetched while Megatron is being imported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from mindspeed_dsa.features.dsa.key_exchange.exchange import ATTRIBUTE, KeyExchange


def wait_before_recompute(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Decorate ``DSAttention.forward`` outside of its checkpoint: a key that was handed over is a graph's
    node, which recomputation cannot make again.
    """

    def forward(
        self: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *rest: Any,
        **kw: Any,
    ) -> Tensor:
        exchange = vars(self).get(ATTRIBUTE)
        if exchange is None or not recomputes(self.config):
            return original(self, query, key, value, attention_mask, *rest, **kw)
        return with_whole_key(
            exchange, key, lambda whole: original(self, query, whole, value, attention_mask, *rest, **kw)
        )

    return forward


def with_whole_key(exchange: KeyExchange, key: Tensor, attend: Callable[[Tensor], Tensor]) -> Tensor:
    """Call ``attend`` with the layer's whole key, which is freed until backward."""
    gathered = exchange.take()
    if gathered is None:
        return attend(key)
    return exchange.free(attend(gathered.wait(key)), [gathered])


def recomputes(config: Any) -> bool:
    """Whether core attentions are recomputed in backward."""
    modules = getattr(config, "recompute_modules", None) or ()
    return config.recompute_granularity == "selective" and "core_attn" in modules


def gather_again_early(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``MultiLatentAttention.forward``: the backward of its output projection hides the gather."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        exchange = vars(self.core_attention).get(ATTRIBUTE)
        if exchange is not None:
            exchange.start_again_with(result[0] if isinstance(result, tuple) else result)
        return result

    return forward
