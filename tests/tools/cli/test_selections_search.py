"""``selections search``: the job that is run, the table, the files, and input that is refused."""

from __future__ import annotations

import json
import os
import sys
import textwrap
from pathlib import Path

import pytest

from mindspeed_dsa.__main__ import main
from mindspeed_dsa.features.dsa.selection_search.greedy import REQUEST, Results
from tests.support import warm

ROOT = Path(__file__).parents[3]
# A search of a job, without the job: layer 3 costs nothing, layer 2 more than the uniform pattern.
JOB = """
import sys
from pathlib import Path
from mindspeed_dsa.features.dsa.selection_search.greedy import Request, resumed, search

COST = [9.0, 0.02, 0.0, 0.01]
flags = sys.argv[1:]
folder = Path(flags[flags.index("--dsa-search-selections") + 1])
assert "--finetune" in flags and Path(flags[flags.index("--load") + 1]).is_absolute(), flags
(folder / "flags.txt").write_text(" ".join(flags))
request = Request.read(folder)
results = resumed(folder, {"checkpoint": request.checkpoint})
results.planned, results.firsts = 9, [1]

def evaluate(pattern, layer):
    if pattern not in results.losses:
        if "--fail" in flags and len(results.losses) == 3:
            sys.exit("no memory")
        results.losses[pattern] = 2 + sum(COST[n] for n in range(4) if pattern[n] == "S")
        results.write(folder)
    return results.losses[pattern]

for step in search("CCCC", results.firsts, request.layers_kept or 2, evaluate):
    results.steps.append(step)
results.is_done = "--unfinished" not in flags
results.write(folder)
"""


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "checkpoints"
    (folder / "iter_0000300").mkdir(parents=True)
    (folder / "latest_checkpointed_iteration.txt").write_text("300")
    return folder


@pytest.fixture
def search(tmp_path, checkpoint, monkeypatch):
    """Return a function that runs the command with the job and its flags; results are in ``found``."""
    job = tmp_path / "job.py"
    job.write_text(textwrap.dedent(JOB))
    monkeypatch.chdir(tmp_path)

    def run(*options: str, flags=()) -> int:
        words = ["selections", "search", str(checkpoint), "--output", str(tmp_path / "found"), *options]
        return main([*words, "--", sys.executable, str(job), *flags])

    return run


def test_table_pattern_json_and_picture(search, tmp_path, checkpoint, capsys):
    report, picture = tmp_path / "found.json", tmp_path / "found.png"
    options = ("--layers-kept", "2", "--json", str(report), "--picture", str(picture))
    assert search(*options, flags=("--out", "{out}/x")) == 0
    said = capsys.readouterr().out
    lines = [line.split() for line in said.splitlines()]
    assert ["4", "CCCC", "2.000000", "-", "CCCC", "2.000000"] in lines
    assert ["3", "CCSC", "2.000000", "3", "CCCS", "2.010000"] in lines
    assert ["2", "CCSS", "2.010000", "4", "CSCS", "2.030000"] in lines
    assert "flags: --dsa-indexer-topk-pattern CCSS" in said
    assert "index_topk_pattern FFSS" in said
    assert "chunks can begin with layers 1, 2" in said
    found = json.loads(report.read_text())
    assert (found["pattern"], found["index_topk_pattern"], found["layers_kept"]) == ("CCSS", "FFSS", 2)
    assert [step["removed"] for step in found["steps"]] == [None, 3, 4]
    assert picture.stat().st_size > 1000
    folder = tmp_path / "found"
    assert f"--out {folder}/x --load {checkpoint} --finetune" in (folder / "flags.txt").read_text()
    request = json.loads((folder / REQUEST).read_text())
    assert request == {"checkpoint": f"{checkpoint}/iter_0000300", "layers_kept": 2, "microbatches": 8}


def test_a_job_that_fails_is_shown_and_the_search_goes_on(search, tmp_path, capsys):
    assert search(flags=("--fail",)) == 1
    said = capsys.readouterr().err
    assert "the job ended with exit code 1" in said
    assert "no memory" in said
    before = Results.read(tmp_path / "found").losses
    assert len(before) == 3
    assert search() == 0
    assert Results.read(tmp_path / "found").losses.items() >= before.items()


def test_a_job_that_does_not_search_is_told(search, capsys):
    assert search() == 0
    # Its results are of the search before.
    assert search(flags=("--unfinished",)) == 1
    assert "import mindspeed_dsa.megatron_adaptor" in capsys.readouterr().err


def test_another_checkpoint_needs_another_folder(search, checkpoint, capsys):
    assert search() == 0
    (checkpoint / "latest_checkpointed_iteration.txt").write_text("400")
    assert search() == 1
    assert "iter_0000300 and not" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["no/such", "--", "false"], 2, "no/such: there is no latest_checkpointed_iteration.txt"),
        (["checkpoints"], 2, "give the command of the job behind --"),
        (["checkpoints", "--layers-kept", "0", "--", "false"], 2, "0 is not at least 1"),
        (["checkpoints", "--json", "no/a.json", "--", "false"], 2, "make the folder no first"),
        (["checkpoints", "--output", "job.py", "--", "false"], 2, "--output"),
        (["checkpoints", "--", "no-such-program"], 1, "cannot be started"),
    ],
)
def test_refused(search, checkpoint, tmp_path, capsys, words, status, message):
    try:
        ended = main(["selections", "search", *words])
    except SystemExit as exit:
        ended = exit.code
    assert ended == status
    assert message in capsys.readouterr().err


SMALL = (
    "--num-layers 3 --hidden-size 64 --seq-length 64 --num-attention-heads 4 --micro-batch-size 1 "
    "--global-batch-size 4"
)


@pytest.mark.full
def test_the_example_job_is_searched_and_saves_nothing(tmp_path, capsys, monkeypatch):
    text = tmp_path / "text"
    text.mkdir()
    for number in range(40):
        (text / f"{number}.txt").write_text(f"{number} is a number, and so is {number + 1}. " * 40)
    script = [sys.executable, str(ROOT / "examples" / "pretrain_dsa.py"), *SMALL.split(), "--data", str(text)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    made = [*script, "--train-iters", "0", "--save", "made", "--output-dir", "first"]
    done = warm.run(made, cwd=tmp_path, env=env, timeout=300)
    assert done.returncode == 0, done.stderr
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    words = ["selections", "search", "made", "--microbatches", "2", "--layers-kept", "2", "--", *script]
    for _ in range(2):  # the second one has nothing to evaluate
        assert main([*words, "--save", "{out}/saved", "--output-dir", "{out}/run"]) == 0
        assert "flags: --dsa-indexer-topk-pattern C" in capsys.readouterr().out
    results = Results.read(tmp_path / "runs" / "selections-search")
    assert [step.kept for step in results.steps] == [3, 2]
    assert not list(tmp_path.rglob("saved/iter_*"))
