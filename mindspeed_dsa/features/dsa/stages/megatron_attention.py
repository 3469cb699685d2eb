"""Dense stages of DSA training with ``DSAttention.forward`` of Megatron-core 0.19 and later.

Sparse attention that selects all keys is dense attention with the dense indexer loss. So Megatron's own
forward runs on a view of the module whose ``index_topk`` is the sequence length. Tensor and context
parallelism, packed documents and kernel backends then work as in sparse attention. Our backend
(:mod:`..kernel_hooks`) detects this case: it skips the selection, and computes the loss without an ``[s, s]``
buffer.

Does not import Megatron, because it is loaded while Megatron is being imported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mindspeed_dsa.feature import Context
from mindspeed_dsa.features.dsa.indexer_loss import coefficient
from mindspeed_dsa.features.dsa.stages import warmup
from mindspeed_dsa.megatron.attribute_override import AttributeOverride
from mindspeed_dsa.megatron.dsa import Options
from mindspeed_dsa.megatron.selection_source import place_of


def attend_by_stage(original: Callable[..., Tensor], context: Context[Options]) -> Callable[..., Tensor]:
    """Decorate ``DSAttention.forward`` to attend to all visible keys in the dense stages.

    Layers that share a selection also attend densely. They have a loss only with
    ``--dsa-indexer-loss-layers``, which our own attention computes.
    """
    if not context.options.attends_densely:
        return original

    def forward(
        self: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor | None,
        attention_mask: Tensor | None,
        x: Tensor,
        qr: Tensor,
        *args: Any,
        up_v_weight: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        if place_of(self) is not None and context.options.learns_served:
            # The view below would hide which layers share. Ours attends densely by the stage.
            ours: Tensor = original(
                self, query, key, value, attention_mask, x, qr, *args, up_v_weight=up_v_weight, **kwargs
            )
            return ours
        collects = warmup.attachments_of(self) is not None
        learns = collects and self.indexer is not None and coefficient(self.config) > 0
        dense = _dense_view(self, x, learns)
        if not learns:
            result: Tensor = original(
                dense, query, key, value, attention_mask, x, qr, *args, up_v_weight=up_v_weight, **kwargs
            )
            return result
        # Warmup: the layer runs under no_grad, but the indexer loss needs a graph. Detached inputs keep the
        # frozen model out of it.
        with torch.enable_grad():
            attended = original(
                dense,
                query.detach(),
                key.detach(),
                None if value is None else value.detach(),
                attention_mask,
                x.detach(),
                qr.detach(),
                *args,
                up_v_weight=None if up_v_weight is None else up_v_weight.detach(),
                **kwargs,
            )
        warmup.collect_graph(self, attended)
        return attended.detach()

    return forward


def _dense_view(layer: Any, x: Tensor, learns: bool) -> Any:
    """Return a view of a ``DSAttention`` that selects every key, also in layers that share selections."""
    groups, config = layer.pg_collection, layer.config
    parts = groups.tp.size() if config.sequence_parallel and groups.tp is not None else 1
    ranks = 1 if groups.cp is None else groups.cp.size()
    replaced = {} if learns else {"indexer": _NoIndexer(parts)}
    config = AttributeOverride(
        config,
        dsa_indexer_use_sparse_loss=False,
        dsa_indexer_loss_coeff=coefficient(config) if learns else 0.0,
    )
    # index_topk is the length of the whole sequence, e.g. 1024 local rows * 2 (tp) * 4 (cp) = 8192 keys.
    return AttributeOverride(
        layer,
        config=config,
        index_topk=x.size(0) * parts * ranks,
        index_share=False,
        skip_topk=False,
        source_layer=layer.layer_number,
        **replaced,
    )


class _NoIndexer(torch.nn.Module):
    """Stub indexer for layers without one: one head of dimension 1, with zero scores."""

    # A real indexer gathers the shards of sequence parallelism, so the stub returns `parts` times the tokens.
    def __init__(self, parts: int) -> None:
        super().__init__()
        self._parts = parts

    def forward_before_topk(self, x: Tensor, *unused: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Return query ``[s, b, 1, 1]``, key ``[s, b, 1]`` and weights ``[s, b, 1]``."""
        zeros = x.new_zeros(x.size(0) * self._parts, x.size(1), 1)  # [s, b, 1]
        return zeros.unsqueeze(-1), zeros, zeros
