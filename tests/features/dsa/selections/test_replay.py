"""Attention to keys selected elsewhere: agreement with fp64 formulas, and refused selections."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from mindspeed_dsa.context_parallel.layout import Zigzag
from mindspeed_dsa.features.dsa.operands import Operands
from mindspeed_dsa.features.dsa.problem import IndexInputs, LossOptions, Problem
from mindspeed_dsa.features.dsa.selections.format import Header, Key, Recording, Run, Writer
from mindspeed_dsa.features.dsa.selections.replay import (
    HandedOver,
    Recorded,
    SelectionError,
    hand_over,
)
from mindspeed_dsa.features.dsa.sparse_attention import attend_by_runs, sparse_attention
from mindspeed_dsa.megatron.selection_source import (
    Carrying,
    LayerRows,
    Microbatch,
    RowRun,
    SelectionSource,
    current,
    recomputing,
)
from mindspeed_dsa.ops import backend

LENGTH, TOPK, LAYER = 24, 5, 3
HEADS, LATENT, ROPE, VALUE, INDEX_HEADS, INDEX = 2, 8, 4, 6, 4, 8
HEADER = Header(TOPK, 4, 0, (1, 3))


def foreign(batch: int, lengths=(LENGTH,), seed: int = 0) -> np.ndarray:
    """Return a random valid selection ``[batch, tokens, 2, topk]``, keys in any order."""
    random = np.random.default_rng(seed)
    out = np.full((batch, sum(lengths), 2, TOPK), -1, np.int32)
    for tokens in out.reshape(batch, -1, 2, TOPK):
        for layer in range(2):
            # Each document begins at position 0 again.
            offset = 0
            for length in lengths:
                for row in range(length):
                    count = min(TOPK, row + 1)
                    tokens[offset + row, layer, :count] = random.permutation(row + 1)[:count]
                offset += length
    return out


def tensors(batch: int):
    noise = torch.Generator().manual_seed(1)

    def random(*shape):
        return torch.randn(shape, generator=noise, dtype=torch.float64)

    query, key = random(LENGTH, batch, HEADS, LATENT + ROPE), random(LENGTH, batch, 1, LATENT + ROPE)
    value, index_query = random(HEADS, VALUE, LATENT), random(batch, LENGTH, INDEX_HEADS, INDEX)
    index_key, weights = random(batch, LENGTH, INDEX), random(batch, LENGTH, INDEX_HEADS)
    leaves = [x.requires_grad_() for x in (query, key, value, index_query, index_key, weights)]
    return Operands(query, key, value, 0.3), IndexInputs(index_query, index_key, weights), leaves


def formulas(operands: Operands, index: IndexInputs, chosen: torch.Tensor):
    """Return output and loss of attention to the keys of ``chosen``, a bool mask ``[b, s, s]``, by
    definition.
    """
    scores = torch.einsum("sbhd,tbd->bhst", operands.query, operands.key[:, :, 0]) * operands.softmax_scale
    probs = scores.masked_fill(~chosen[:, None], -torch.inf).softmax(-1)
    latent = torch.einsum("bhst,tbc->sbhc", probs, operands.key[:, :, 0, :LATENT])
    out = torch.einsum("sbhc,hdc->sbhd", latent, operands.value).flatten(2)
    products = torch.einsum("bshd,btd->bsht", index.query, index.key).relu()
    index_scores = torch.einsum("bsht,bsh->bst", products, index.weights).masked_fill(~chosen, -torch.inf)
    target = probs.detach().mean(1)
    log_ratio = torch.where(chosen, target.clamp_min(1e-300).log() - index_scores.log_softmax(-1), 0.0)
    return out, (target * log_ratio).sum(-1).mean()


def runs_of(length: int = LENGTH) -> list[RowRun]:
    return [RowRun(0, length, 0, length)]


def asked(batch: int, runs=None, layer: int = LAYER) -> LayerRows:
    return LayerRows(layer, lambda: runs or runs_of(), batch, LENGTH, LENGTH, TOPK)


def handed(array, missing: str = "refuse") -> HandedOver:
    source = HandedOver(HEADER, missing)
    source.give(torch.from_numpy(array))
    return source


@pytest.mark.parametrize("by_runs", [False, True])
def test_output_loss_and_gradients_are_those_of_the_formulas(by_runs):
    batch, array = 2, foreign(2)
    replayed = handed(array).choose(asked(batch))
    mask = torch.zeros(batch, LENGTH, LENGTH + 1, dtype=torch.bool)
    # Column 1 belongs to layer 3.
    keys = torch.from_numpy(array[:, :, 1]).long()
    # Missing keys go to an additional column, which is dropped.
    visible = mask.scatter(-1, keys.masked_fill(keys < 0, LENGTH), True)[..., :LENGTH]
    results = []
    for ours in (True, False):
        operands, index, leaves = tensors(batch)
        if ours:
            loss = LossOptions(1.0, on_chosen_keys=True)
            problem = Problem(operands, TOPK, loss=loss, backend="reference", given=replayed)
            assert not problem.is_dense
            if by_runs:
                result = attend_by_runs(problem, index, list(map(tuple, runs_of())), LENGTH * batch)
            else:
                result = sparse_attention(problem, index)
            out, value = result.out, result.loss
        else:
            out, value = formulas(operands, index, visible)
        # Factors that differ per element, so that errors do not cancel out.
        ((out * torch.arange(1.0, out.numel() + 1).view_as(out).sin()).sum() + value).backward()
        results.append([out.detach(), value.detach(), *(leaf.grad for leaf in leaves)])
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-11)


def test_without_a_loss_no_indexer_is_asked():
    replayed = handed(foreign(1)).choose(asked(1))
    operands, _, _ = tensors(1)
    problem = Problem(operands, TOPK, backend="reference", given=replayed)
    assert not problem.needs_index
    before = backend.calls()
    result = sparse_attention(problem, None)
    assert torch.equal(result.topk_indices[0], replayed.of_all_rows)
    assert {operator for operator, _ in backend.calls() - before} == {"sparse_flash_attention"}


def test_rows_of_packs_and_of_context_parallel_ranks():
    array = foreign(1, (9, 1, 10))[:, :20]
    runs = [RowRun(0, 9, 0, 9), RowRun(9, 10, 9, 10), RowRun(10, 20, 10, 20), RowRun(20, 24, 0, 0)]
    replayed = handed(array).choose(asked(1, runs))
    got = replayed.of_all_rows[0].numpy()
    low = np.repeat([0, 9, 10], [9, 1, 10])[:, None]
    expected = np.sort(np.where(array[0, :, 1] >= 0, array[0, :, 1] + low, 99), axis=1)
    # 99 stands for a missing key, behind all positions.
    assert np.array_equal(np.where(got[:20] < 0, 99, got[:20]), expected)
    assert (got[20:] == -1).all()

    whole = foreign(1)
    layout = Zigzag(2)
    for rank in range(2):
        positions = layout.rows_of_rank(rank, LENGTH).numpy()
        half = len(positions) // 2
        # A zigzag rank has two runs, one from each half of the sequence.
        runs = [RowRun(at, at + half, 0, int(positions[at + half - 1]) + 1) for at in (0, half)]
        rows = LayerRows(LAYER, lambda runs=runs: runs, 1, len(positions), LENGTH, TOPK)
        got = handed(whole).choose(rows).of_all_rows[0].numpy()
        ordered = np.sort(np.where(whole[0, positions, 1] >= 0, whole[0, positions, 1], 99), axis=1)
        assert np.array_equal(np.where(got < 0, 99, got), ordered)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda a: a.__setitem__((0, 7, 1, 0), 8), "row 7 lists key 8 and sees 8 keys; this is no selection"),
        (lambda a: a.__setitem__((0, 9, 1), 4), "row 9 lists key 4 more than once"),
        (lambda a: a.__setitem__((0, 6, 1, 2), -1), "row 6 has 4 keys, and 5 of the 7 it sees are used"),
        (lambda a: a.__setitem__((0, 11, 1), -1), "row 11 has no selection"),
        (lambda a: a.__setitem__((0, 9, 1, 0), 2**32 + 1), "row 9 lists key 4294967297 and sees 10 keys"),
        (
            lambda a: a.__setitem__((0, 9, 1, 0), 1 - 2**32),
            "row 9 has 4 keys, and 5 of the 10 it sees are used",
        ),
    ],
    ids=["beyond the row", "twice", "short", "missing", "64 bits", "64 bits below"],
)
def test_a_wrong_row_is_named(change, words):
    array = foreign(1).astype(np.int64)
    change(array)
    with pytest.raises(SelectionError, match=rf"sequence 0 of the microbatch, layer 3: {words}"):
        handed(array).choose(asked(1))


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.uint16, np.uint32, np.int64, np.uint64])
def test_any_integer_type_is_taken(dtype):
    array = foreign(1)[..., :1]  # one key per row, because unsigned types have no -1
    expected = handed(array, "select").choose(asked(1)).of_all_rows
    assert torch.equal(handed(array.astype(dtype), "select").choose(asked(1)).of_all_rows, expected)


def test_another_topk_and_another_number_of_layers_are_named():
    wide = np.concatenate([foreign(1)] * 2, axis=-1)
    wide[..., TOPK:] = -1
    assert handed(wide).choose(asked(1)).of_all_rows.shape == (1, LENGTH, TOPK)
    wide[0, 20, 1] = np.arange(2 * TOPK)
    with pytest.raises(SelectionError, match="row 20 has 10 keys, and the model selects 5"):
        handed(wide).choose(asked(1))
    with pytest.raises(SelectionError, match=r"selections are \[24, 3, 5\]; hand over \[tokens, 2, topk\]"):
        handed(np.zeros((24, 3, 5), np.int32))
    with pytest.raises(SelectionError, match="2 sequences were handed over, and the microbatch has 3"):
        handed(foreign(2)).choose(asked(3))
    with pytest.raises(SelectionError, match="24 tokens were handed over, which are not those of 5"):
        handed(foreign(1)[0]).choose(asked(5))
    with pytest.raises(SelectionError, match="keys of 25 tokens were handed over, and the sequence has"):
        handed(foreign(1, (LENGTH, 1))).choose(asked(1))
    # Rows beyond the sequence are padding without keys.
    longer = np.pad(foreign(1), ((0, 0), (0, 9), (0, 0), (0, 0)), constant_values=-1)
    assert handed(longer).choose(asked(1)).of_all_rows.shape == (1, LENGTH, TOPK)
    with pytest.raises(SelectionError, match=r"selections are torch\.float64; hand over positions"):
        handed(np.zeros((LENGTH, 2, TOPK)))


def test_rows_without_a_selection_get_the_indexers():
    array = foreign(2)
    array[0, 11, 1], array[1, 6, 1, 2] = -1, -1
    replayed = handed(array, "select").choose(asked(2))
    assert replayed.missing.nonzero().tolist() == [[0, 11], [1, 6]]
    operands, index, _ = tensors(2)
    loss = LossOptions(1.0, on_chosen_keys=True)
    by_indexer = sparse_attention(
        Problem(operands, TOPK, loss=loss, backend="reference"), index
    ).topk_indices[0]
    problem = Problem(operands, TOPK, loss=loss, backend="reference", given=replayed)
    mixed = sparse_attention(problem, index).topk_indices[0]
    missing = replayed.missing
    assert torch.equal(mixed[missing], by_indexer[missing])
    assert torch.equal(mixed[~missing], replayed.of_all_rows[~missing])
    assert not torch.equal(by_indexer[~missing], replayed.of_all_rows[~missing])
    # Without a loss, the indexer runs for these rows only.
    assert Problem(operands, TOPK, backend="reference", given=replayed).needs_index


def test_nothing_handed_over_is_refused_or_selected():
    with pytest.raises(SelectionError, match="row 0 has no selection"):
        HandedOver(HEADER, "refuse").choose(asked(1))
    assert HandedOver(HEADER, "select").choose(asked(1)).missing.all()


# -- recordings ----------------------------------------------------------------------------------


def recorded(folder, positions=(0, LENGTH), tokens=None, **options):
    writer = Writer(folder, 0, HEADER)
    first, end = positions
    keys = foreign(1)[0, first:end, 1]
    writer.append(Key(2, 3, LAYER), [Run(0, first, end - first)], keys, tokens=tokens)
    writer.close()
    return Recorded(Recording.open(folder), step=2, place=3, missing=options.get("missing", "refuse"))


def test_a_recording_is_found_by_step_and_sequence(tmp_path):
    replayed = recorded(tmp_path).choose(asked(1))
    assert torch.equal(replayed.of_all_rows, handed(foreign(1)).choose(asked(1)).of_all_rows)


def test_rows_that_were_not_recorded(tmp_path):
    source = recorded(tmp_path, positions=(0, 20))
    with pytest.raises(SelectionError, match="step 2, sequence 3, layer 3: row 20 has no selection; record"):
        source.choose(asked(1))
    source = Recorded(Recording.open(tmp_path), step=9, place=0, missing="refuse")
    with pytest.raises(SelectionError, match="step 9, sequence 0, layer 3: row 0 has no selection"):
        source.choose(asked(1))


def test_rows_of_another_document(tmp_path):
    source = recorded(tmp_path)
    runs = [RowRun(0, 12, 0, 12), RowRun(12, LENGTH, 12, LENGTH)]
    with pytest.raises(
        SelectionError, match="row 12 belongs to a document that begins at 12, and at 0 where"
    ):
        source.choose(asked(1, runs))


def test_rows_of_other_tokens(tmp_path):
    tokens = np.arange(LENGTH, dtype=np.int64) + 70_000
    source = recorded(tmp_path, tokens=tokens)
    same = replace(asked(1), tokens=torch.from_numpy(tokens)[None])
    assert source.choose(same).of_all_rows.shape == (1, LENGTH, TOPK)
    tokens = tokens.copy()
    tokens[13] += 1
    other = replace(asked(1), tokens=torch.from_numpy(tokens)[None])
    again = Recorded(Recording.open(tmp_path), step=2, place=3, missing="select")
    with pytest.raises(SelectionError, match="row 13 has another token than it had when its selection was"):
        again.choose(other)
    # Later pipeline stages have no tokens to compare.
    assert again.choose(asked(1)).missing is None


@pytest.mark.parametrize("missing", ["refuse", "select"])
def test_a_damaged_record_is_a_missing_one(tmp_path, missing):
    source = recorded(tmp_path, missing=missing)
    (path,) = tmp_path.iterdir()
    data = bytearray(path.read_bytes())
    # The last byte belongs to the only record.
    data[-1] ^= 1
    path.write_bytes(bytes(data))
    if missing == "select":
        assert source.choose(asked(1)).missing.all()
        return
    with pytest.raises(SelectionError, match=r"layer 3 is damaged.*let the indexer select there by"):
        source.choose(asked(1))


# -- the microbatch ------------------------------------------------------------------------------


def test_handing_over_needs_a_microbatch_that_waits_for_it():
    with pytest.raises(SelectionError, match="outside of a microbatch's forward, or without"):
        hand_over(torch.zeros(1, 2, TOPK))
    current().microbatch = Microbatch()
    try:
        with pytest.raises(SelectionError, match="--dsa-replay-selections batch"):
            hand_over(torch.zeros(1, 2, TOPK))
    finally:
        current().microbatch = None


def test_a_recomputation_replays_and_does_not_record():
    class Nowhere(SelectionSource):
        def took(self, *arguments):
            raise AssertionError("recorded twice")

    source = handed(foreign(1))
    with recomputing(None, Microbatch(source, Nowhere())):
        again = current().microbatch
        assert again.source is source
        # A sink would record the rows a second time.
        assert again.sink is None
    with recomputing(None, Microbatch(None, Nowhere())):
        assert current().microbatch is None


def test_a_second_recomputation_would_select_and_is_refused():
    carrying, source = Carrying(lambda: current().microbatch.source), handed(foreign(1))
    current().microbatch = Microbatch(source)
    try:
        # The first run, during forward.
        assert carrying() is source
    finally:
        current().microbatch = None
    assert carrying() is source
    with pytest.raises(RuntimeError, match="share or replay a selection were recomputed twice"):
        carrying()
