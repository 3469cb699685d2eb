"""Patches that let DSA layers run under context parallelism with gathered keys.

Does not import Megatron, because it is loaded while Megatron is being imported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from mindspeed_dsa.context_parallel.key_exchange import KeyExchange
from mindspeed_dsa.features.dsa.key_exchange.exchange import ATTRIBUTE


def accept_context_parallel_dsa(original: Callable[..., None]) -> Callable[..., None]:
    """Decorate ``TransformerConfig.__post_init__``, which asserts that DSA has no context parallelism."""

    def __post_init__(self: Any, *args: Any, **kwargs: Any) -> None:
        ranks = self.context_parallel_size
        # Megatron's assertion passes with 1; the real value is restored below.
        if self.experimental_attention_variant == "dsa":
            self.context_parallel_size = 1
        try:
            original(self, *args, **kwargs)
        finally:
            self.context_parallel_size = ranks

    return __post_init__


def mark_gradients_of_own_rows(original: Callable[..., None]) -> Callable[..., None]:
    """Decorate ``DSAIndexer.__init__`` to mark parameters whose gradients are partial sums.

    Under sequence parallelism, the projections of key and head weights see only this rank's shard of the
    tokens. Their gradients must be summed over tensor parallel ranks. The other parameters see all tokens.
    """

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if projects_own_rows(self):
            sum_gradients(self)

    return __init__


def projects_own_rows(indexer: Any) -> bool:
    """Return whether gathered keys make each tensor parallel rank project its own shard of the tokens."""
    groups = indexer.pg_collection
    return bool(groups.cp.size() > 1 and groups.tp.size() > 1 and indexer.config.sequence_parallel)


def sum_gradients(indexer: Any, sums: bool = True) -> None:
    """Have Megatron sum or average gradients of key and weights parameters over tensor parallel ranks."""
    for module in (indexer.linear_wk, indexer.k_norm, indexer.linear_weights_proj):
        for parameter in module.parameters():
            parameter.average_gradients_across_tp_domain = not sums
            parameter.sequence_parallel = sums


def wait_before_recompute(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Decorate ``DSAttention.forward`` to wait for the gathered key before its checkpoint begins."""

    def forward(self: Any, query: Tensor, key: Tensor, *rest: Any, **kw: Any) -> Tensor:
        exchange = vars(self).get(ATTRIBUTE)
        if exchange is None or not recomputes(self.config):
            return original(self, query, key, *rest, **kw)
        # The gather is a node of the graph that recomputation cannot repeat: keep it out of the checkpoint.
        return with_whole_key(exchange, key, lambda whole: original(self, query, whole, *rest, **kw))

    return forward


def with_whole_key(exchange: KeyExchange, key: Tensor, attend: Callable[[Tensor], Tensor]) -> Tensor:
    """Call ``attend`` with the gathered key of the whole sequence, which is freed until backward."""
    gathered = exchange.take()
    if not gathered:
        return attend(key)
    (whole,) = gathered  # two parts only occur without recomputation
    return exchange.free(attend(whole.wait(key)), gathered)


def recomputes(config: Any) -> bool:
    """Return whether core attention is recomputed in backward."""
    modules = getattr(config, "recompute_modules", None) or ()
    return config.recompute_granularity == "selective" and "core_attn" in modules


def gather_again_early(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``MultiLatentAttention.forward``: its backward first starts to gather freed keys again."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        exchange = vars(self.core_attention).get(ATTRIBUTE)
        if exchange is not None:
            exchange.start_again_with(result[0] if isinstance(result, tuple) else result)
        return result

    return forward
