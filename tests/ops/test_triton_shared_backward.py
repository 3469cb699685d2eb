"""The Hopper backward, chunk by chunk, with its Gluon kernel written in PyTorch.

All other code is real: the search for shared tiles, windows and chunks, the stored order of heads, the
product that forms query gradients, and the fixed-order sums.
"""

from __future__ import annotations

import pytest
import torch

from mindspeed_dsa.ops.sparse_flash_attention.protocol import AttentionCall
from tests.ops.random_inputs import drifting_indices
from tests.ops.triton_backend import DEVICE, attention, hopper, shared_tiles

TILE = shared_tiles.TILE
pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="on a GPU the kernel itself is tested")


def gradients_of_keys(inputs, results, tiles, first, softmax_scale, atomic):
    """Write the kernel's results, computed in PyTorch; entries that the kernel does not write become NaN."""
    query, key_value, grad_out, lse, delta = inputs
    grad_scores, summed, grad_keys = results
    indices, places, tasks, bounds = tiles
    rows, heads, keys, topk = *query.shape[1:3], key_value.shape[1], indices.shape[1]
    groups, in_row = hopper.backward_heads(heads) // 8, -(-topk // TILE)
    place = torch.arange(grad_scores.shape[2])
    # Heads of a group are interleaved in fours, as the kernel stores them.
    head = place // (4 * groups) * (4 * groups) + place % groups * 4 + place // groups % 4
    grad_scores.fill_(torch.nan)
    # Without atomics, sums are stored per entry, and added in a fixed order later.
    if not atomic:
        grad_keys.fill_(torch.nan)
    for task in tasks[bounds[0] : bounds[1]].tolist():
        # A task packs row, tile and number of sharers.
        sharers, row, entry = task % 8, task // 8 // in_row, task // 8 % in_row * TILE
        of_tile = slice(entry, min(entry + TILE, topk))
        index = indices[row, of_tile].long()
        valid = (index >= 0) & (index < keys)
        batch = (first + row) // rows
        # The kernel reads zeros instead of an invalid key.
        tile = torch.where(valid[:, None], key_value[batch, index.clamp(0, keys - 1)], 0)
        sums = torch.zeros_like(tile)
        for sharer in range(row, row + sharers):
            number = first + sharer
            of_row, of_grad = query[batch, number % rows], grad_out[batch, number % rows]
            probability = torch.exp(tile @ of_row.T * softmax_scale - lse.view(-1, heads)[number])
            probability = torch.where(valid[:, None], probability, 0)
            inner = tile[:, : of_grad.shape[1]] @ of_grad.T
            gradient = probability * (inner - delta.view(-1, heads)[number]) * softmax_scale
            stored = torch.zeros(len(tile), len(place))
            # Places of missing heads stay zero.
            stored[:, head < heads] = gradient[:, head[head < heads]]
            grad_scores[sharer, of_tile] = stored
            summed.view(-1, topk)[number, places[sharer, of_tile].long()] = probability.sum(1)
            sums += gradient @ of_row
            sums[:, : of_grad.shape[1]] += probability @ of_grad
        if atomic:
            grad_keys.index_add_(0, batch * keys + index[valid], sums[valid])
        else:
            grad_keys[row, of_tile][valid] = sums[valid]


@pytest.mark.parametrize("deterministic", [pytest.param(False, marks=pytest.mark.full), True])
@pytest.mark.parametrize(
    ("batch", "rows", "heads", "topk", "chunk", "shares"),
    [
        pytest.param(2, 13, 3, 90, 8, True, id="chunks-across-sequences", marks=pytest.mark.full),
        pytest.param(1, 9, 33, 90, 4, True, id="one-row-at-the-end"),
        pytest.param(3, 5, 17, 128, 3, False, id="chunks-too-small-to-share", marks=pytest.mark.full),
        pytest.param(2, 7, 40, 130, 12, True, id="rows-of-two-sequences", marks=pytest.mark.full),
        pytest.param(2, 3, 2, 10, 100, False, id="less-than-a-tile"),
    ],
)
def test_gradients(batch, rows, heads, topk, chunk, shares, deterministic, monkeypatch):
    torch.use_deterministic_algorithms(deterministic)
    # The stand-in itself marks unwritten entries with NaN.
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    generator = torch.Generator().manual_seed(0)
    keys = topk + 30
    query, key_value, grad_out = (
        torch.randn(*shape, generator=generator)
        for shape in ((batch, rows, heads, 576), (batch, keys, 576), (batch, rows, heads, 512))
    )
    call = AttentionCall(query, key_value, drifting_indices(batch, rows, keys, topk, drift=0.01), 0.05, 512)
    out, lse, _ = attention.forward(call, False)
    expected = attention.backward(call, grad_out, out, lse, True)

    windows, chunks = [], []
    real = attention.share_tiles

    def share_tiles(indices, lengths, first, *rest):
        shared = real(indices, lengths, first, *rest)
        windows.append(int(shared.ends.max()))
        return shared

    def counted(*given):
        chunks.append(given[3])
        gradients_of_keys(*given)

    # Heads are padded to complete groups.
    stored = -(-heads // hopper.backward_heads(heads)) * hopper.backward_heads(heads)
    # Bytes of a row: fp32 score gradients, and stored sums of 576 fp32 columns if deterministic.
    row_bytes = topk * (stored * 4 + (4 * 576 if deterministic else 0))
    monkeypatch.setattr(attention, "WORKSPACE_BYTES", chunk * row_bytes)
    monkeypatch.setattr(attention, "tile_bytes", lambda total: chunk * row_bytes)
    monkeypatch.setattr(attention, "share_tiles", share_tiles)
    monkeypatch.setattr(hopper, "takes_backward", lambda *_: True)
    monkeypatch.setattr(hopper, "gradients_of_keys", counted)
    found = attention.backward(call, grad_out, out, lse, True)
    for value, other in zip(found, expected, strict=True):
        assert (value - other).norm() < 1e-5 * other.norm()
    assert chunks == list(range(0, batch * rows, min(chunk, batch * rows)))
    # `ends` is positive where rows share tiles.
    assert (max(windows) > 0) == shares
    assert deterministic or heads > 3 or len(windows) == len(chunks)
