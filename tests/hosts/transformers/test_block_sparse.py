"""Attention of MiniMax-M3 on the operators: blocks of keys, selected separately for every key-value head."""

from __future__ import annotations

import pytest
import torch

from mindspeed_dsa.ops import dsa
from tests.hosts.transformers.models import close

pytestmark = pytest.mark.full

ROWS, BLOCK, KV_HEADS, GROUP = 41, 4, 2, 3
NAME = "operators in groups"


def attend_in_groups(module, query, key, value, mask, scaling, dropout=0.0, block_indices=None, **kwargs):
    """Attend with the heads of each key-value head to the keys of its blocks."""
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    outputs = []
    for head in range(KV_HEADS):
        listed = dsa.keys_of_pools(block_indices[:, head], BLOCK, ROWS)
        heads = query[:, :, head * GROUP : (head + 1) * GROUP]
        operands = heads, key[:, :, head : head + 1], value[:, :, head : head + 1]
        outputs.append(dsa.sparse_attention_by_head(*operands, listed, scaling)[0])
    return torch.cat(outputs, dim=2), None


def test_a_layer_is_eager_s():
    modeling = pytest.importorskip("transformers.models.minimax_m3_vl.modeling_minimax_m3_vl")
    from transformers import AttentionInterface, MiniMaxM3VLTextConfig

    config = MiniMaxM3VLTextConfig(
        hidden_size=24,
        num_hidden_layers=1,
        num_attention_heads=KV_HEADS * GROUP,
        num_key_value_heads=KV_HEADS,
        head_dim=8,
        rotary_dim=4,
        index_n_heads=KV_HEADS,
        index_head_dim=8,
        index_block_size=BLOCK,
        index_topk_blocks=3,
        layer_types=["minimax_m3_sparse"],
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    layer = modeling.MiniMaxM3VLAttention(config, 0)
    hidden, position = torch.randn(2, ROWS, 24), torch.arange(ROWS)
    angles = modeling.MiniMaxM3VLRotaryEmbedding(config)(hidden, position[None])
    mask = torch.full((ROWS, ROWS), torch.finfo().min).triu(1).expand(2, 1, -1, -1)
    results = []
    for name in ("eager", NAME):
        AttentionInterface.register(NAME, attend_in_groups)
        config._attn_implementation = name
        layer.zero_grad()
        out, _ = layer(hidden, angles, mask, position_ids=position[None])
        out.square().sum().backward()
        trained = {key: x.grad for key, x in layer.named_parameters() if x.grad is not None}
        results.append((out.detach(), trained))
    (expected, theirs), (out, ours) = results
    assert close(out, expected)
    assert ours.keys() == theirs.keys()
    assert [key for key in theirs if not close(ours[key], theirs[key])] == []
