"""A deliberate hang per kind of group: the report names the missing rank, the layer and the purpose."""

from __future__ import annotations

import argparse
import re
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from mindspeed_dsa.__main__ import main
from mindspeed_dsa.features.diagnostics.collectives.feature import check_recording
from mindspeed_dsa.features.diagnostics.collectives.recorder import Recorder
from mindspeed_dsa.parallel.names import Pass
from mindspeed_dsa.runs import collectives as files
from tests.features.diagnostics.collectives import late_ranks
from tests.features.diagnostics.collectives.late_ranks import FEW, JOBS
from tests.support import model
from tests.support.contexts import running
from tests.support.model import losses_of

FULL = pytest.mark.full
QUICK = ("EP, halves",)


@pytest.mark.parametrize("case", [pytest.param(case, marks=() if case in QUICK else FULL) for case in JOBS])
def test_the_missing_rank_is_named(pool, tmp_path, capsys, case):
    job, what = JOBS[case]
    kind, late = late_ranks.kind_of(case), late_ranks.LATE
    ranks = late_ranks.ranks_of(case)
    # A rank beside the late one, in its group or chain.
    other = {"EDP": "3"}.get(kind, "0" if ranks == 2 else "[02]")
    pool.run(
        "tests.features.diagnostics.collectives.late_ranks:train",
        ranks,
        folder=str(tmp_path),
        kind=kind,
        what=what,
        **job,
    )
    assert main(["hang", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    print(text)
    assert f"Look at rank {late} first" in text
    assert f"rank {late} wrote because of: SIGUSR1" in text
    waits = [wait for wait in text.split("\n\n") if " of ranks " in wait.partition("\n")[0]]
    in_group = [wait for wait in waits if re.search(rf"\b{kind}\b", wait.partition(" of ")[0])]
    of_call = [wait for wait in in_group if what in wait.partition("\n")[0]]
    # Ranks of a chain that wait for others than the late one have waits of their own.
    wait = next(wait for wait in of_call if re.search(rf"rank {late} has not: .*oversleep", wait))
    assert re.search(rf"rank {other} has come: .*\[.*\] float32", wait), wait


@pytest.mark.full
def test_the_step_is_the_same(pool, tmp_path):
    """Bit for bit: the hooks on layer outputs change no gradient."""
    for layout in ({"pp": 2, **FEW}, {"switches": {"moe_alltoall_overlap_comm": True}, "ep": 2}):
        switches = layout.pop("switches", {})
        ours, theirs = (
            pool.run("tests.support.model:run", 2, switches={**switches, **more}, **layout)
            for more in ({"record_collectives": str(tmp_path)}, {})
        )
        for with_records, without in zip(ours, theirs, strict=True):
            assert losses_of(with_records) == losses_of(without)
            for name, gradient in without["gradients"].items():
                assert with_records["gradients"][name].equal(gradient), name


def other_thread(folder: str) -> str:
    """Return a call's name in a thread without the main thread's names. Runs in the pool's workers."""
    model.start({"record_collectives": folder}, pp=1)
    recorder = running("record-collectives").state(Recorder)
    recorder.passes = (Pass("backward", 3),)
    with ThreadPoolExecutor(1) as thread, mock.patch.object(files.Calls, "start") as start:
        thread.submit(dist.all_reduce, torch.ones(1)).result()
    return start.call_args.args[-1].rstrip(b"\0").decode()


def test_collectives_of_a_device_thread_have_the_microbatch(pool, tmp_path):
    """Autograd runs a device's backward in a thread of its own."""
    (text,) = pool.run(f"{__name__}:other_thread", 1, folder=str(tmp_path))
    assert "microbatch 3, backward" in text


@pytest.mark.parametrize(
    ("name", "value"), [("distributed_timeout_minutes", 2), ("distributed_timeout_seconds_after_init", 100)]
)
def test_a_time_out_before_the_records_is_refused(tmp_path, name, value):
    """120 seconds is our default."""
    flag = f"--{name.replace('_', '-')} {value}"
    args = argparse.Namespace(
        record_collectives=tmp_path, record_collectives_after=None, cuda_graph_impl="none", **{name: value}
    )
    (problem,) = check_recording(args, None)
    assert flag in problem
    setattr(args, name, 600)
    assert not list(check_recording(args, None))
