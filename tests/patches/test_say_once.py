"""Only one rank per machine prints the error that ends all of them."""

from __future__ import annotations

import pytest

from mindspeed_dsa.patches import errors


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch, tmp_path):
    """Make this process one rank of a separate job, and return a function that sets its local rank."""
    monkeypatch.setattr(errors.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(errors, "_PATIENCE_S", 0.3)

    def become(number: int) -> None:
        monkeypatch.setenv("LOCAL_RANK", str(number))

    return become


@pytest.mark.parametrize("launcher", ["torchrun", "another"])
def test_a_rank_that_fails_alone_is_heard(rank, capsys, monkeypatch, launcher):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    if launcher == "torchrun":
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "7")
    rank(3)
    errors.say_once("no memory")
    assert capsys.readouterr().err == "no memory\n"


def test_what_all_ranks_find_is_said_once(rank, capsys):
    for number in (0, 1, 2):
        rank(number)
        errors.say_once("no such flag")
    assert capsys.readouterr().err == "no such flag\n"


def test_the_word_of_an_earlier_job_silences_nobody(rank, capsys, monkeypatch):
    rank(0)
    errors.say_once("an earlier job")
    monkeypatch.setattr(errors, "_STARTED", errors.time.time() + 60)
    rank(1)
    errors.say_once("this job")
    assert capsys.readouterr().err == "an earlier job\nthis job\n"
