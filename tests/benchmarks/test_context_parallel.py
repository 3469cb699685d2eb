"""Shares of work that the benchmark counts, and how it turns times into fractions."""

from __future__ import annotations

import pytest

from benchmarks.context_parallel import CELLS, balance, hiding, run


@pytest.mark.parametrize("ranks", balance.RANKS)
def test_blocks_balance_what_megatrons_rows_do_not(ranks):
    """Rows below topk are short, and all in the first chunks: 1 / (1 - (K - 1) / 2S) whatever the ranks."""
    found = balance.of_sequences(16_384, ranks)
    assert found["indexer zigzag"] == found["indexer blocks"] == pytest.approx(1, abs=1e-6)
    assert found["selected zigzag"] == pytest.approx(1 / (1 - 2047 / 32_768), abs=1e-4)
    assert found["selected blocks"] == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("mean", balance.DOCUMENTS.values())
def test_dealt_rows_balance_packs(mean):
    found = balance.of_packs(mean, 4, packs=2)
    assert found["worst dealt"] <= 1.02 < 1.3 < found["indexer zigzag"]


def test_an_image_of_rows(tmp_path):
    balance.draw(tmp_path / "rows.png")
    assert (tmp_path / "rows.png").stat().st_size > 5000


@pytest.mark.parametrize(("alone", "hidden"), [(0.09, 0.5), (0.05, None), (0.2, None)])
def test_hidden_fractions_of_transfers_about_as_long_as_what_hides_them(monkeypatch, alone, hidden):
    seconds = {"together": 0.2 + alone / 2, "alone": alone, "work": 0.2, "cover": 0.1}
    monkeypatch.setattr(hiding, "timed", lambda problem, rounds: seconds)
    found = hiding.fitted(lambda size: None, 64, rounds=1)
    if hidden is None:
        assert found["hidden"].startswith("not measured: the transfer took")
    else:
        assert found["hidden"] == pytest.approx(hidden)


def test_an_unknown_cell_is_refused():
    with pytest.raises(ValueError, match=f"no cell steps; use {', '.join(CELLS)}"):
        run("cpu", only="steps")
