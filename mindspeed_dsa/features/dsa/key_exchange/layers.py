"""DSA's layers on context parallel ranks: accepted, marked, and attending to keys that arrive and are freed.

Imports nothing of Megatron: fetched while Megatron is being imported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from mindspeed_dsa.features.dsa.key_exchange.exchange import ATTRIBUTE, KeyExchange


def accept_context_parallel_dsa(original: Callable[..., None]) -> Callable[..., None]:
    """Decorate ``TransformerConfig.__post_init__``, which asserts one context parallel rank for DSA."""

    def __post_init__(self: Any, *args: Any, **kwargs: Any) -> None:
        ranks = self.context_parallel_size
        if self.experimental_attention_variant == "dsa":
            self.context_parallel_size = 1
        try:
            original(self, *args, **kwargs)
        finally:
            self.context_parallel_size = ranks

    return __post_init__


def mark_gradients_of_own_rows(original: Callable[..., None]) -> Callable[..., None]:
    """Decorate ``DSAIndexer.__init__``: under sequence parallelism, mark parameters that see own rows only.

    Their gradients are parts, to be summed over tensor parallel ranks; the other parameters see all rows.
    """

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        groups = self.pg_collection
        if groups.cp.size() > 1 and self.config.sequence_parallel and groups.tp.size() > 1:
            sum_gradients_of_own_rows(self)

    return __init__


def sum_gradients_of_own_rows(indexer: Any) -> None:
    """Mark the parameters of key and weights, for Megatron's sum over tensor parallel ranks."""
    for module in (indexer.linear_wk, indexer.k_norm, indexer.linear_weights_proj):
        for parameter in module.parameters():
            parameter.average_gradients_across_tp_domain = False
            parameter.sequence_parallel = True


def wait_before_recompute(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Decorate ``DSAttention.forward`` outside of its checkpoint: wait for the key there.

    A key that was handed over is a graph's node, which recomputation cannot make again.
    """

    def forward(self: Any, query: Tensor, key: Tensor, *rest: Any, **kw: Any) -> Tensor:
        exchange = vars(self).get(ATTRIBUTE)
        if exchange is None or not recomputes(self.config):
            return original(self, query, key, *rest, **kw)
        return with_whole_key(exchange, key, lambda whole: original(self, query, whole, *rest, **kw))

    return forward


def with_whole_key(exchange: KeyExchange, key: Tensor, attend: Callable[[Tensor], Tensor]) -> Tensor:
    """Call ``attend`` with the layer's whole key, which is freed until backward."""
    gathered = exchange.take()
    if not gathered:
        return attend(key)
    (whole,) = gathered  # two are for layers without recomputation
    return exchange.free(attend(whole.wait(key)), gathered)


def recomputes(config: Any) -> bool:
    """Return whether core attentions are recomputed in backward."""
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
