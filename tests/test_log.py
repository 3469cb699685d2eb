"""Log records come from the intended ranks, and only once if requested."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from mindspeed_dsa import log


@pytest.fixture(autouse=True)
def _nothing_seen() -> Iterator[None]:
    log.forget()
    yield
    log.forget()


def group_of(rank: int | None) -> SimpleNamespace:
    """Return a stub of ``torch.distributed`` with a process group, or without one."""
    return SimpleNamespace(
        is_available=lambda: True, is_initialized=lambda: rank is not None, get_rank=lambda: rank
    )


@pytest.mark.parametrize(("rank", "said"), [("0", "mindspeed_dsa: hello\n"), ("3", "")])
def test_the_launcher_tells_the_rank(monkeypatch, capsys, rank, said):
    monkeypatch.setenv("RANK", rank)
    log.get().info("hello")
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(("group", "said"), [(None, True), (0, True), (3, False)])
def test_or_else_the_process_group(monkeypatch, capsys, group, said):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setitem(sys.modules, "torch.distributed", group_of(group))
    for _ in range(2):
        log.get().info("hello from %s", group, once=True)
    assert capsys.readouterr().err == (f"mindspeed_dsa: hello from {group}\n" if said else "")


def test_all_ranks_may_speak(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "3")
    log.get("a-feature").warning("here, too", ranks="all")
    assert capsys.readouterr().err == "mindspeed_dsa: here, too\n"


@pytest.mark.parametrize(
    ("data_parallel", "tensor_parallel", "said"), [(0, 0, True), (0, 1, False), (1, 0, False)]
)
def test_one_rank_speaks_for_each_stage(monkeypatch, capsys, data_parallel, tensor_parallel, said):
    """This session's Megatron defines the stages, whatever the launcher's number."""
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setitem(sys.modules, "torch.distributed", group_of(5))
    state = SimpleNamespace(
        model_parallel_is_initialized=lambda: True,
        get_data_parallel_rank=lambda with_context_parallel: data_parallel,
        get_tensor_model_parallel_rank=lambda: tensor_parallel,
    )
    monkeypatch.setitem(sys.modules, "corp_megatron.core.parallel_state", state)
    log.get("a-feature", "corp_megatron").info("a stage", ranks="stage")
    assert bool(capsys.readouterr().err) == said


def test_before_megatron_has_groups_the_first_rank_speaks_for_all_stages(monkeypatch, capsys):
    for rank, said in ((0, "mindspeed_dsa: no stages yet\n"), (1, "")):
        monkeypatch.setitem(sys.modules, "torch.distributed", group_of(rank))
        log.get("a-feature", "corp_megatron").info("no stages yet", ranks="stage")
        assert capsys.readouterr().err == said


def test_once_goes_by_its_key_and_by_logger(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    for chunks in (2, 4):
        for layer in ("first", "second"):
            log.get("a-feature").info("%s: %d chunks", layer, chunks, once=layer)
    log.get("another").info("%s: %d chunks", "first", 8, once="first")
    assert capsys.readouterr().err.splitlines() == [
        "mindspeed_dsa: first: 2 chunks",
        "mindspeed_dsa: second: 2 chunks",
        "mindspeed_dsa: first: 8 chunks",
    ]


def test_the_application_decides_what_becomes_of_records(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append
    logger = logging.getLogger(log.NAME)
    monkeypatch.setattr(logger, "handlers", [handler])
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        log.get("a-feature").info("below the level")
        log.get("a-feature").warning("a feature speaks")
    finally:
        logger.setLevel(level)
    assert [(record.name, record.getMessage()) for record in records] == [
        ("mindspeed_dsa.a-feature", "a feature speaks")
    ]
    assert capsys.readouterr().err == ""
