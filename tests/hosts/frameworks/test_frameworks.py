"""Frameworks that build Megatron's models, and libraries that change Megatron, with their real packages.

``requirements.txt`` lists them; tests of missing packages are skipped.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from tests.support.ports import free_port

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
STEP = re.compile(r"iteration +(\d+)/ +4 .*?lm loss: (\S+) .*?grad norm: (\S+)")


def needs(distribution):
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return pytest.mark.skip(reason=f"{distribution} is not installed")
    return pytest.mark.timeout(600)


def started(script, *arguments, **variables):
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    env = {**os.environ, "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": "", **variables}
    return subprocess.Popen(
        [sys.executable, str(HERE / script), *arguments],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process):
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err[-3000:]
    return out, err


def ended_on_ranks(ranks, script, *arguments):
    """Run a script on ranks of one job, and return the output and errors of each."""
    port = str(free_port())
    jobs = [
        started(
            script,
            *arguments,
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(ranks),
            LOCAL_WORLD_SIZE=str(ranks),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=port,
        )
        for rank in range(ranks)
    ]
    return [ended(job) for job in jobs]


def trained(switches, ranks):
    """Return loss and gradient norm of each step, and the whole output."""
    outputs = ended_on_ranks(ranks, "bridge_job.py", json.dumps(switches))
    said = "".join(text for output in outputs for text in output)
    steps = {int(step): (float(loss), float(norm)) for step, loss, norm in STEP.findall(said)}
    assert sorted(steps) == [1, 2, 3, 4], said[-3000:]
    return steps, said


@needs("megatron-bridge")
@pytest.mark.parametrize("ranks", [1, 2])
def test_megatron_bridge_trains_with_and_without_fused_dsa(ranks):
    stock, alone = trained({}, ranks)
    fused, said = trained({"use_fused_dsa": True}, ranks)
    assert "fused-dsa" not in alone
    assert re.search(r"fused-dsa +API \(use_fused_dsa=True\).* 3 applied", said)
    assert "sparse_flash_attention runs on the cpu backend" in said
    for step, (loss, norm) in stock.items():
        assert fused[step] == (pytest.approx(loss, rel=1e-4), pytest.approx(norm, rel=1e-2))
    assert stock[4][0] < stock[1][0]


MTP_FORWARD = "megatron.core.transformer.multi_token_prediction:MultiTokenPredictionBlock.forward"


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize(
    ("library", "shared"),
    [
        # Liger-Kernel replaces classes that our replaced functions do not call: no place is shared.
        pytest.param("liger", {}, marks=needs("liger-kernel")),
        pytest.param("mcore_bridge", {"mcore_bridge": MTP_FORWARD}, marks=needs("mcore-bridge")),
    ],
)
def test_a_library_is_named_where_it_shares_a_place_and_drops_no_required_patch(library, shared, order):
    out, err = ended(started("beside_job.py", library, order))
    answer = json.loads(out.splitlines()[-1])
    rows = [{"library": package, "places": [place], "dropped": []} for package, place in shared.items()]
    assert answer["beside"] == rows
    notes = [f"note: {package} has changed {place}" for package, place in shared.items()]
    assert re.findall(r"note: \S+ has changed .*", err) == notes
    assert "failed" not in answer["states"].values()
    assert "applied" in answer["states"].values()
