"""Selections of a rollout's requests go to their rows in a training step's pack; misfits are named."""

from __future__ import annotations

import base64
import contextlib
from unittest import mock

import numpy as np
import pytest
import torch

from mindspeed_dsa.features.dsa.selections.format import Header
from mindspeed_dsa.features.dsa.selections.replay import (
    HandedOver,
    SelectionError,
    decode,
    hand_over_requests,
    in_pack,
)
from mindspeed_dsa.megatron.selection_source import LayerRows, Microbatch, RowRun, current
from tests.support import model as job
from tests.support.contexts import running

TOPK = 4
HEADER = Header(TOPK, 5, 0, (1, 2, 4))
LENGTHS = (9, 3)
# Documents padded to multiples of four, and padding at the end.
PADDED = torch.tensor([0, 12, 16, 20], dtype=torch.int32)
SHARED = {3: 2, 5: 4}
"""Dict from a layer that shares a selection to the layer that computes it."""


def request(rows: int, layers: int = 5, seed: int = 0) -> np.ndarray:
    """Return an inference engine's record ``[rows, layers, topk]``, a column per decoder layer."""
    random = np.random.default_rng(seed + rows)
    out = np.full((rows, layers, TOPK), -1, np.int32)
    for row in range(rows):
        for layer in range(layers):
            count = min(TOPK, row + 1)
            out[row, layer, :count] = random.permutation(row + 1)[:count]
    for layer, source in SHARED.items():
        # Engines repeat a shared selection in each layer's column.
        if layer <= layers:
            out[:, layer - 1] = out[:, source - 1]
    return out


def test_base64_of_an_engine():
    expected = request(8)
    encoded = base64.b64encode(expected.tobytes()).decode("ascii")
    # An engine has no keys of the last token, which it never reads.
    assert np.array_equal(decode(encoded, 9, 5), expected)
    with pytest.raises(SelectionError, match="160 keys, which are not of 8 tokens in 7 layers"):
        decode(encoded, 9, 7)
    with pytest.raises(SelectionError, match="not of 0 tokens"):
        decode(encoded, 1, 5)


@pytest.mark.parametrize("kind", ["all layers", "layers that select", "tensors", "last rows too"])
def test_rows_are_attended_to_where_the_pack_has_them(kind):
    rows = LENGTHS if kind == "last rows too" else [length - 1 for length in LENGTHS]
    whole = [request(count) for count in rows]
    requests = whole
    if kind == "layers that select":
        # Columns of the layers 1, 2 and 4.
        requests = [array[:, [0, 1, 3]] for array in whole]
    if kind == "tensors":
        requests = [torch.from_numpy(array).long() for array in whole]
    source = HandedOver(HEADER, "refuse")
    current().microbatch = Microbatch(source)
    try:
        hand_over_requests(requests, LENGTHS, PADDED)
    finally:
        current().microbatch = None
    # Documents as the model sees them: padding belongs to the request before it.
    runs = [RowRun(a, b, a, b) for a, b in ((0, 12), (12, 16), (16, 20))]
    for layer in HEADER.computing:
        topk_indices = source.choose(LayerRows(layer, lambda: runs, 1, 20, 20, TOPK)).of_all_rows[0]
        for begin, array in zip((0, 12), whole, strict=True):
            for row, keys in enumerate(array[:, layer - 1]):
                expected = sorted(int(key) + begin for key in keys if key >= 0)
                assert [key for key in topk_indices[begin + row].tolist() if key >= 0] == expected
        # The last token and padding have no recorded keys; they get the keys right before them.
        assert topk_indices[11].tolist() == [8, 9, 10, 11]
        assert topk_indices[17].tolist() == [16, 17, -1, -1]
        if kind != "last rows too":
            assert topk_indices[8].tolist() == [5, 6, 7, 8]
            assert topk_indices[14].tolist() == [12, 13, 14, -1]


def test_multi_token_prediction_that_nobody_recorded_has_no_keys():
    header = Header(TOPK, 5, 1, (1, 2, 4, 6))
    packed = in_pack([request(8)], [9], torch.tensor([0, 12]), header)
    assert packed.shape == (12, 4, TOPK)
    assert (packed[:, 3] == -1).all()
    assert (packed[:, :3, 0] >= 0).all()


def test_tokens_that_the_engine_has_not_read_are_rows_without_keys():
    packed = in_pack([request(5)], [9], torch.tensor([0, 12]), HEADER)
    assert (packed[:5, :, 0] >= 0).all()
    assert (packed[5:8] == -1).all()
    assert packed[8, 0].tolist() == [8, 7, 6, 5]


def test_a_request_without_tokens_changes_no_other():
    bounds = torch.tensor([0, 12, 16, 20])
    with_it = in_pack([request(8), np.zeros((0, 3, TOPK), np.int32)], [9, 0], bounds, HEADER)
    assert torch.equal(with_it, in_pack([request(8)], [9], bounds, HEADER))


def test_an_engine_that_selects_fewer_keys():
    packed = in_pack([request(8)[..., :3]], [9], torch.tensor([0, 9]), HEADER)
    assert (packed[:8, :, 3] == -1).all()
    assert (packed[3:8, :, :3] >= 0).all()


@pytest.mark.parametrize(
    ("requests", "lengths", "words"),
    [
        ([request(8, 4)], [9], "request 0 has 4 layers, and the model 5, of which 3 select"),
        ([np.zeros((8, 3, 6), np.int32)], [9], "up to 6 keys for a row, and the model selects 4"),
        ([request(10)], [9], "has 10 rows and 9 tokens, in a document of 12; give the length"),
        ([request(12)], [13], "has 12 rows and 13 tokens, in a document of 12"),
        (
            [request(8).astype(np.int64) + 2**32],
            [9],
            "request 0 has 9 tokens and lists int64 up to 429496730",
        ),
        ([request(8) * 1.5], [9], "lists float64 up to 10.5; give positions in it"),
        ([request(8)], [9, 3], "1 requests, 2 lengths and 3 documents"),
        ([request(2)] * 4, [3] * 4, "4 requests, 4 lengths and 3 documents"),
    ],
)
def test_what_does_not_fit_is_named(requests, lengths, words):
    with pytest.raises(SelectionError, match=words):
        in_pack(requests, lengths, PADDED, HEADER)


def test_numbers_of_64_bits_below_all_positions_are_no_keys():
    array = request(8).astype(np.int64)
    packed = in_pack([np.where(array < 0, 1 - 2**32, array)], [9], torch.tensor([0, 9]), HEADER)
    assert torch.equal(packed, in_pack([request(8)], [9], torch.tensor([0, 9]), HEADER))


def test_it_needs_a_microbatch_that_waits():
    with pytest.raises(SelectionError, match="outside of a microbatch's forward"):
        hand_over_requests([request(8)], [9], PADDED)


def step_of_a_job(asks: bool, forward_only: bool) -> None:
    """Hand over a microbatch's keys inside Megatron's schedule."""
    from mindspeed_dsa.features.dsa import core_attention
    from mindspeed_dsa.features.dsa.selections.replay import hand_over

    forward_step, train_step = job.forward_step, job.train_step

    def handing_over(*arguments):
        keys = torch.arange(job.SEQUENCE)[:, None, None] - torch.arange(6)
        # Each row lists itself and the five rows before it.
        hand_over(keys.clamp_min(-1).expand(2, -1, 2, -1))
        return forward_step(*arguments)

    def without_backward(cfg, chunks, microbatches, ddp):
        from megatron.core.pipeline_parallel import get_forward_backward_func

        get_forward_backward_func()(
            forward_step_func=lambda iterator, model: handing_over(cfg, iterator, model),
            data_iterator=iter(microbatches),
            model=chunks,
            num_microbatches=1,
            seq_length=job.SEQUENCE,
            micro_batch_size=2,
            forward_only=True,
        )
        return []

    elsewhere = (
        # Without sources, attention asks for no keys.
        contextlib.nullcontext() if asks else mock.patch.object(core_attention, "sources_of", return_value=[])
    )
    with (
        mock.patch.object(job, "forward_step", handing_over),
        mock.patch.object(job, "train_step", without_backward if forward_only else train_step),
        mock.patch.object(job, "gradients", return_value={}),
        elsewhere,
    ):
        switches = {"use_fused_dsa": True, "dsa_replay_selections": "batch"}
        job.run(switches, {"dsa_indexer_loss_coeff": 0.0}, micro_batch_size=2)


@pytest.mark.parametrize("forward_only", [False, True])
@pytest.mark.parametrize("asks", [True, False])
def test_keys_that_no_layer_asks_for_end_the_step(pool, asks, forward_only):
    case = {"case": f"{__name__}:step_of_a_job", "asks": asks, "forward_only": forward_only}
    (error,) = pool.run("tests.support.model:error_of", 1, **case)
    assert bool(error) != asks, error
    assert asks or "no layer of this rank has asked for the keys" in error


def recorded_step(folder: str, brings: bool) -> int:
    """Train a step that records; return the number of written records."""
    from mindspeed_dsa.features.dsa import core_attention
    from mindspeed_dsa.features.dsa.selections.record import Steps

    elsewhere = (
        contextlib.nullcontext()
        if brings
        else mock.patch.object(core_attention, "sources_of", return_value=[])
    )
    with elsewhere:
        job.run({"use_fused_dsa": True, "dsa_record_selections": folder}, {}, micro_batch_size=2)
    recorder = Steps.of(running("dsa-recorded-selections")).recorder
    recorder.close()
    return recorder.records


def test_a_recording_to_which_no_layer_brings_anything_ends_the_step(pool, tmp_path):
    (records,) = pool.run(f"{__name__}:recorded_step", 1, folder=str(tmp_path / "a"), brings=True)
    assert records > 0
    case = {"case": f"{__name__}:recorded_step", "folder": str(tmp_path / "b"), "brings": False}
    (error,) = pool.run("tests.support.model:error_of", 1, **case)
    assert "--dsa-record-selections: no layer of this rank has brought the keys that it selects" in error
