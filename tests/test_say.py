"""Lines of ours come once, and from one rank."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from mindspeed_dsa.say import say, say_once


@pytest.mark.parametrize(("rank", "said"), [("0", "mindspeed_dsa: hello\n"), ("3", "")])
def test_the_launcher_tells_the_rank(monkeypatch, capsys, rank, said):
    monkeypatch.setenv("RANK", rank)
    say("hello")
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(("group", "said"), [(None, True), (0, True), (3, False)])
def test_or_else_the_process_group(monkeypatch, capsys, group, said):
    monkeypatch.delenv("RANK", raising=False)
    distributed = SimpleNamespace(
        is_available=lambda: True, is_initialized=lambda: group is not None, get_rank=lambda: group
    )
    monkeypatch.setitem(sys.modules, "torch.distributed", distributed)
    for _ in range(2):
        say_once(f"hello from {group}")
    assert capsys.readouterr().err == (f"mindspeed_dsa: hello from {group}\n" if said else "")
