"""A deliberate hang per kind of group: the report names the missing rank, the layer and the purpose."""

from __future__ import annotations

import re

import pytest

from mindspeed_dsa.__main__ import main
from tests.features.diagnostics.collectives import late_ranks
from tests.features.diagnostics.collectives.late_ranks import FEW, JOBS
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
