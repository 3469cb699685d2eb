"""An error on one rank ends all ranks with the same message, and no rank waits for ever."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from mindspeed_dsa import log
from mindspeed_dsa.features.checkpoints.agreement import together
from mindspeed_dsa.features.checkpoints.hugging_face import loading, saving
from mindspeed_dsa.runs.files import RunError
from mindspeed_dsa.runs.whole_checkpoints import TRACKER
from tests.features.checkpoints.hugging_face import test_loading

HERE = "tests.features.checkpoints.test_agreement"
ERRORS = {
    "own": RunError("it is refused; name another"),
    "disk": OSError(28, "No space left on device"),
    "memory": MemoryError("3 GB"),
    "torch": RuntimeError("shape mismatch"),
}


def ended(kind: str) -> tuple[str, str]:
    """Raise on rank 1; return this rank's message and output."""

    def do() -> int:
        if dist.get_rank() == 1:
            raise ERRORS[kind]
        return 3

    printed = io.StringIO()
    with contextlib.redirect_stderr(printed), pytest.raises(RunError) as caught:
        together(do, "mindspeed_dsa weights")
    assert together(dist.get_rank, "mindspeed_dsa weights") == dist.get_rank()  # the group still works
    return str(caught.value), printed.getvalue()


def many(kinds: list[str]) -> list[tuple[str, str]]:
    """Call :func:`ended` for one kind after the other."""
    return [ended(kind) for kind in kinds]


def damaged(folder: str, what: str) -> str:
    """Load or export while torch fails on rank 1 only; return this rank's message."""

    def fails(*args: object) -> Any:
        if dist.get_rank() == 1:
            raise RuntimeError("shape mismatch")
        return weights_of(*args) if args else SimpleNamespace()

    weights_of = loading.weights_of
    do: Callable[[], Any] = partial(loading.load, [], Path(folder), test_loading.JOB, log.get())
    if what == "export":
        do = partial(saving.write_together, fails, SimpleNamespace, "mindspeed_dsa save-hf")
    with mock.patch.object(loading, "weights_of", fails), pytest.raises(RunError) as caught:
        do()
    return str(caught.value)


def test_what_one_rank_meets_is_raised_on_all(pool) -> None:
    first, second = pool.run(f"{HERE}:many", 2, timeout_s=60, kinds=list(ERRORS))
    for number, kind in enumerate(ERRORS):
        assert first[number][0] == second[number][0]
        assert first[number][1] == ""
        message, printed = second[number]
        assert ("Traceback" in printed) == (kind in ("memory", "torch"))
        if kind in ("memory", "torch"):
            what = f"{type(ERRORS[kind]).__name__}: {ERRORS[kind]}"
            assert f"mindspeed_dsa weights: rank 1 has met {what}" in message
            assert printed.rstrip().endswith(what)
        else:
            assert str(ERRORS[kind]) in message


@pytest.mark.parametrize("what", ["load", "export"])
def test_loads_and_exports_end_together(pool, tmp_path: Path, what: str) -> None:
    test_loading.write(tmp_path)
    first, second = pool.run(f"{HERE}:damaged", 2, timeout_s=60, folder=str(tmp_path), what=what)
    assert first == second
    assert "rank 1 has met RuntimeError: shape mismatch" in first


def seen(folder: str) -> list[object]:
    """Run an export and a resume while ranks see different trackers; return their decisions."""
    own_folder = str(Path(folder) / f"rank {dist.get_rank()}")
    job = SimpleNamespace(save=own_folder, load=own_folder)
    asked: list[object] = []

    def export(job: Any, iteration: int, *rest: object) -> None:
        asked.append(iteration)

    context: Any = SimpleNamespace(
        megatron=lambda name: SimpleNamespace(get_args=lambda: job), options=None, log=log.get()
    )
    with mock.patch.object(saving, "export", export):
        saving.export_at_the_end(lambda: None, context)()
    return [*asked, loading.goes_on(job)]


def test_the_first_rank_decides_for_all_what_is_there(pool, tmp_path: Path) -> None:
    # A rank that decided by its own view would leave the others in a collective.
    for rank in range(2):
        (tmp_path / f"rank {rank}").mkdir()
    (tmp_path / "rank 0" / TRACKER).write_text("3")
    assert pool.run(f"{HERE}:seen", 2, timeout_s=60, folder=str(tmp_path)) == [[3, True]] * 2
    (tmp_path / "rank 0" / TRACKER).rename(tmp_path / "rank 1" / TRACKER)
    assert pool.run(f"{HERE}:seen", 2, timeout_s=60, folder=str(tmp_path)) == [[False]] * 2


def test_a_process_alone_keeps_its_errors() -> None:
    def fails() -> None:
        torch.zeros(2).view(3)

    with pytest.raises(RuntimeError, match="invalid for input of size 2"):
        together(fails, "mindspeed_dsa weights")
