from __future__ import annotations

import json
from pathlib import Path

import pytest
from dsa_job import folders

MINE = {"lr": 0.1, "num_layers": 2}


def newest(step: int | None):
    return lambda folder: step


def start(
    output: Path, settings: dict | None = None, step: int | None = None, new_run: bool = False
) -> folders.Run:
    run = folders.open_run(output, settings or MINE, newest(step), new_run)
    run.release()
    return run


def test_the_first_run_takes_the_folder_itself(tmp_path: Path) -> None:
    run = start(tmp_path / "a" / "quick")
    assert (run.folder, run.resumed) == (tmp_path / "a" / "quick", False)
    assert run.why == f"new run in {run.folder}"
    assert json.loads((run.folder / "run.json").read_text())["settings"] == MINE


def test_an_unfinished_run_goes_on(tmp_path: Path) -> None:
    start(tmp_path / "quick")
    run = start(tmp_path / "quick", step=40)
    assert (run.folder, run.resumed) == (tmp_path / "quick", True)
    assert run.why == f"resuming the unfinished run in {run.folder} from step 40"


@pytest.mark.parametrize(
    ("settings", "step", "finished", "new_run", "why"),
    [
        (MINE, 40, True, False, "finished"),
        (MINE, 40, False, True, "unfinished, but --new-run was given"),
        (MINE, None, False, False, "unfinished, without a checkpoint"),
        (
            {**MINE, "lr": 0.2},
            40,
            False,
            False,
            "unfinished, with other settings: lr 0.1 -> 0.2; to continue from it: --load {checkpoints}",
        ),
    ],
)
def test_what_cannot_go_on_is_left_alone(
    tmp_path: Path, settings: dict, step: int | None, finished: bool, new_run: bool, why: str
) -> None:
    output = tmp_path / "quick"
    start(output)
    (output / "metrics.jsonl").write_text("kept")
    if finished:
        (output / "summary.json").write_text("{}")
    before = {path: path.read_bytes() for path in output.iterdir()}
    run = start(output, settings, step, new_run)
    assert (run.folder, run.resumed) == (tmp_path / "quick-2", False)
    assert (
        run.why == f"new run in {run.folder} ({output} is {why.format(checkpoints=output / 'checkpoints')})"
    )
    assert {path: path.read_bytes() for path in output.iterdir()} == before
    # The newest run decides about the next one.
    following = start(output, settings, step=None)
    assert following.folder == tmp_path / "quick-3"


@pytest.mark.parametrize(
    "content",
    [b"[]", b"7", b'{"settings": []}', b"{}", b"\xff\xfe", b"", b"[" * 100_000],
    ids=["list", "number", "list of settings", "no settings", "binary", "empty", "deep"],
)
def test_a_damaged_record_of_a_run_begins_a_new_one_and_says_how_to_go_on(
    tmp_path: Path, content: bytes
) -> None:
    output = tmp_path / "quick"
    start(output)
    (output / "run.json").write_bytes(content)
    run = start(output, step=40)
    assert (run.folder, run.resumed) == (tmp_path / "quick-2", False)
    assert run.why == (
        f"new run in {run.folder} ({output} is unfinished, and its run.json is damaged; to continue from it: "
        f"--load {output / 'checkpoints'})"
    )
    assert (output / "run.json").read_bytes() == content


@pytest.mark.parametrize("digit", ["\u00b2", "\u0663"], ids=["superscript", "another script"])
def test_a_name_with_digits_that_no_run_has_is_none_of_ours(tmp_path: Path, digit: str) -> None:
    start(tmp_path / "quick")
    (tmp_path / f"quick-{digit}").mkdir()
    (tmp_path / f"quick-{digit}" / "run.json").write_text("{}")
    assert start(tmp_path / "quick", step=40).resumed


def test_a_run_in_progress_is_not_joined(tmp_path: Path) -> None:
    output = tmp_path / "quick"
    running = folders.open_run(output, MINE, newest(40), False)
    other = start(output, step=40)
    assert other.folder == tmp_path / "quick-2"
    assert f"({output} is in use by another process)" in other.why
    running.release()


def test_a_folder_of_somebody_else_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "quick").mkdir()
    (tmp_path / "quick" / "thesis.tex").write_text("years of work")
    assert start(tmp_path / "quick").folder == tmp_path / "quick-2"
    assert [path.name for path in (tmp_path / "quick").iterdir()] == ["thesis.tex"]


def test_a_folder_with_nothing_but_the_data_cache_is_free(tmp_path: Path) -> None:
    (tmp_path / "quick" / "data-cache").mkdir(parents=True)
    assert start(tmp_path / "quick").folder == tmp_path / "quick"


def test_names_are_taken_literally(tmp_path: Path) -> None:
    start(tmp_path / "a-2")
    start(tmp_path / "ab-7")
    assert start(tmp_path / "a*").folder == tmp_path / "a*"
    assert start(tmp_path / "a").folder == tmp_path / "a-3"
