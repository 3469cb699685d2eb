"""Shares of work and bytes that the benchmark counts, and its conversion of times into fractions."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from unittest import mock

import pytest

from benchmarks.context_parallel import CELLS, balance, hiding, run, trace, volume


@pytest.mark.parametrize("ranks", balance.RANKS)
def test_blocks_balance_what_megatrons_rows_do_not(ranks):
    """Rows below topk are short and in the first chunks: 1 / (1 - (K - 1) / 2S) for any ranks."""
    result = balance.of_sequences(16_384, ranks)
    assert result["indexer zigzag"] == result["indexer blocks"] == pytest.approx(1, abs=1e-6)
    assert result["selected zigzag"] == pytest.approx(1 / (1 - 2047 / 32_768), abs=1e-4)
    assert result["selected blocks"] == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("mean", balance.DOCUMENTS.values())
def test_dealt_rows_balance_packs(mean):
    found = balance.of_packs(mean, 4, packs=2)
    assert found["worst dealt"] <= 1.02 < 1.3 < found["indexer zigzag"]


def test_an_image_of_rows(tmp_path):
    balance.draw(tmp_path / "rows.png")
    assert (tmp_path / "rows.png").stat().st_size > 5000


@pytest.mark.parametrize(("fits_at", "begin"), [(448, 448), (100, 1088), (1500, 64), (10, 64)])
def test_sizes_are_fitted_until_transfers_take_as_long_as_what_hides_them(monkeypatch, fits_at, begin):
    """The covering work grows faster than the size; below the least size nothing fits."""

    def timed(size, rounds, names):
        cover = (size / fits_at) ** 1.5
        return {"alone": 1.0, "work": 2 * cover, "cover": cover, "together": 0.5 + 2 * cover}

    monkeypatch.setattr(hiding, "timed", timed)
    result = hiding.fitted(lambda size: size, begin, hiding.Sizes(rounds=1))
    if fits_at == 10:
        assert result["hidden"].startswith("not measured: the transfer took 0.49 of what hides it")
    else:
        assert hiding.ALLOWED[0] <= result["transfer_over_cover"] <= hiding.ALLOWED[1]
        assert result["hidden"] == pytest.approx(0.5 / min(1, 1 / result["transfer_over_cover"]))
        assert len(result["tried"]) <= 6
    assert result["tried"][result["size"]] == result["transfer_over_cover"]


def test_an_unknown_cell_is_refused():
    with pytest.raises(ValueError, match=f"no cell steps; use {', '.join(CELLS)}"):
        run("cpu", only="steps")


def received_over_formula() -> dict[str, dict[str, float]]:
    """Return the bytes of the collectives' arguments over the formula's, without a link to count on."""
    with mock.patch.object(volume, "_DEVICE", SimpleNamespace(read_text=lambda: "0")):
        measured = volume.measure(volume.QUICK)
    return {name: {way: of["collective"] for way, of in ways.items()} for name, ways in measured.items()}


def test_algorithms_send_the_bytes_of_their_formulas(pool):
    for rank in pool.run(f"{__name__}:received_over_formula", 2):
        assert len(rank) == 6
        assert all(ways == {"forward": 1, "backward": 1} for ways in rank.values()), rank


def recorded_transfers() -> dict[str, int]:
    """Return how many transfers of a step are recorded, by name."""
    spans = trace.record(trace.QUICK)["CP2"]
    return Counter(span.name for span in spans if span.lane != "matmul")


@pytest.mark.full
def test_a_trace_has_the_transfers_of_a_step(pool):
    """Two keys are gathered, gathered again in backward, and their gradients reduced."""
    assert pool.run(f"{__name__}:recorded_transfers", 2) == [{"all-gather": 4, "reduce-scatter": 2}] * 2
