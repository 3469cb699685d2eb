"""The benchmark's conversion of times into fractions."""

from __future__ import annotations

import pytest

from benchmarks import fsdp2


@pytest.mark.parametrize(
    ("gathers", "hidden"), [(0.1, {"without prefetch": 0.0, "with prefetch": 0.9}), (0.2, None)]
)
def test_hidden_share_of_gathers_about_as_long_as_the_work(monkeypatch, gathers, hidden):
    seconds = {"work": 0.1, "gathers": gathers, "without prefetch": 0.2, "with prefetch": 0.11}
    monkeypatch.setattr(fsdp2, "_forwards", lambda sizes, rounds: seconds)
    shares = fsdp2.hidden(fsdp2.QUICK)["gather_hidden_fraction"]
    if hidden is None:
        assert all(text.startswith("not measured: gathers took 2.00") for text in shares.values())
    else:
        assert shares == pytest.approx(hidden)
