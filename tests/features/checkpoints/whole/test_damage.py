"""A damaged checkpoint is skipped for the newest complete one, or refused, with one line of explanation."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from mindspeed_dsa.runs import manifest
from mindspeed_dsa.runs.files import RunError
from mindspeed_dsa.runs.whole_checkpoints import TRACKER, UNCHECKED, choose, describe
from tests.features.checkpoints.whole.folders import SHARD, checkpoint, legacy, track

Damage = Callable[[Path], object]


def flip(path: Path, at: int = 100) -> None:
    """Flip one bit."""
    content = bytearray(path.read_bytes())
    content[at] ^= 4
    path.write_bytes(content)


def truncate(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def edit(path: Path, **changes: object) -> None:
    file = path / manifest.NAME
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def files_of(path: Path, **changes: object) -> None:
    edit(path, files={**json.loads((path / manifest.NAME).read_text())["files"], **changes})


# By name: the damage, the explanation, and whether it is only found by reading contents.
DAMAGE: dict[str, tuple[Damage, str, bool]] = {
    "truncated shard": (
        lambda path: truncate(path / "__1_0.distcp", 999),
        f"__1_0.distcp has 999 bytes of {SHARD}",
        False,
    ),
    "empty shard": (
        lambda path: truncate(path / "__1_0.distcp", 0),
        f"__1_0.distcp has 0 bytes of {SHARD}",
        False,
    ),
    "longer shard": (
        lambda path: (path / "__0_0.distcp").write_bytes(bytes(SHARD + 1)),
        f"__0_0.distcp has {SHARD + 1} bytes",
        False,
    ),
    "missing shard": (
        lambda path: (path / "__0_0.distcp").unlink(),
        "__0_0.distcp is missing",
        False,
    ),
    "flipped bit of a shard": (
        lambda path: flip(path / "__1_0.distcp"),
        "__1_0.distcp has another content than was written",
        True,
    ),
    "last bit of a shard": (
        lambda path: flip(path / "__0_0.distcp", -1),
        "__0_0.distcp has another content than was written",
        True,
    ),
    "shard of zeros": (
        lambda path: (path / "__0_0.distcp").write_bytes(bytes(SHARD)),
        "__0_0.distcp has another content than was written",
        True,
    ),
    "flipped bit of what ranks share": (
        lambda path: flip(path / "common.pt", 1),
        "common.pt has another content than was written",
        True,
    ),
    "no index of tensors": (lambda path: (path / ".metadata").unlink(), ".metadata is missing", False),
    "foreign metadata.json": (
        lambda path: (path / "metadata.json").write_text('{"not": "ours"}'),
        "metadata.json has 15 bytes",
        False,
    ),
    "a folder for a file": (
        lambda path: [(path / "common.pt").unlink(), (path / "common.pt").mkdir()],
        "common.pt has ",
        False,
    ),
    "truncated manifest": (
        lambda path: truncate(path / manifest.NAME, 60),
        f"{manifest.NAME} is not a manifest (",
        False,
    ),
    "empty manifest": (
        lambda path: truncate(path / manifest.NAME, 0),
        f"{manifest.NAME} is not a manifest (",
        False,
    ),
    "foreign JSON": (
        lambda path: (path / manifest.NAME).write_text('{"name": "package", "version": 1}'),
        f"{manifest.NAME} is not a manifest (it has no 'format')",
        False,
    ),
    "JSON that is no object": (
        lambda path: (path / manifest.NAME).write_text("[1, 2]"),
        f"{manifest.NAME} is not a manifest (",
        False,
    ),
    "binary manifest": (
        lambda path: (path / manifest.NAME).write_bytes(b"\xff\xfe\x00\x01"),
        f"{manifest.NAME} is not a manifest (",
        False,
    ),
    "manifest of a later format": (
        lambda path: edit(path, format="mindspeed_dsa.checkpoint/9"),
        "its format is 'mindspeed_dsa.checkpoint/9'",
        False,
    ),
    "manifest of another iteration": (
        lambda path: shutil.copy(path.parent / "iter_0000002" / manifest.NAME, path),
        f"{manifest.NAME} is that of iter_0000002",
        False,
    ),
    "manifest without files": (lambda path: edit(path, files={}), "it was not written to its end", False),
    "manifest without an end to a size": (
        lambda path: files_of(path, **{"common.pt": {"bytes": math.inf, "crc32": "0"}}),
        f"{manifest.NAME} is not a manifest (",
        False,
    ),
    "manifest of files that no file system has": (
        lambda path: files_of(path, **{"common\0.pt": {"bytes": 1, "crc32": "0"}}),
        "which names no file",
        False,
    ),
    "manifest of characters that no file system has": (
        lambda path: files_of(path, **{"common\ud800.pt": {"bytes": 1, "crc32": "0"}}),
        f"{manifest.NAME} is not a manifest (",
        False,
    ),
    "manifest of files elsewhere": (
        lambda path: files_of(path, **{"../../common.pt": {"bytes": 1, "crc32": "0"}}),
        "it lists '../../common.pt', which is elsewhere",
        False,
    ),
    "manifest with a word for a size": (
        lambda path: files_of(path, **{"common.pt": {"bytes": "many", "crc32": "0"}}),
        f"{manifest.NAME} is not a manifest (",
        False,
    ),
    "nothing left": (shutil.rmtree, "it is missing", False),
    "an empty folder": (
        lambda path: [shutil.rmtree(path), path.mkdir()],
        "it was not written to its end",
        False,
    ),
    "a file for the folder": (
        lambda path: [shutil.rmtree(path), path.write_text("")],
        "cannot be read",
        False,
    ),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_checkpoint_is_passed_over_or_refused_in_one_line(case: str, tmp_path: Path) -> None:
    damage, why, contents = DAMAGE[case]
    for iteration in (1, 2, 3):
        checkpoint(tmp_path, iteration)
    track(tmp_path, 3)
    damage(tmp_path / "iter_0000003")
    choice = choose(tmp_path, contents=contents)
    assert choice.state is not None
    assert choice.state.iteration == 2
    (passed,) = choice.passed
    assert passed.startswith("iter_0000003: ")
    assert why in passed
    said = describe(tmp_path, choice)
    assert passed in said
    assert "iter_0000002 is loaded: whole (5 files" in said
    assert "\n" not in said
    # A step that was asked for is never replaced by another one.
    with pytest.raises(RunError) as refused:
        choose(tmp_path, step=3, contents=contents)
    assert why in str(refused.value)
    assert "--ckpt-step" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_clocks_that_go_back_change_nothing(tmp_path: Path) -> None:
    """The newest checkpoint is the one of the latest iteration, whatever its files' timestamps."""
    for iteration, timestamp in ((1, 2 * 10**9), (2, 10**9), (3, 0)):
        for file in (written := checkpoint(tmp_path, iteration)).iterdir():
            os.utime(file, (timestamp, timestamp))
        os.utime(written, (timestamp, timestamp))
    track(tmp_path, 3)
    state = choose(tmp_path, contents=True).state
    assert state is not None
    assert state.iteration == 3
    # Also without the tracker, where iterations are compared.
    (tmp_path / TRACKER).unlink()
    state = choose(tmp_path).state
    assert state is not None
    assert state.iteration == 3


def test_contents_of_large_files_are_read_only_when_asked(tmp_path: Path) -> None:
    flip(checkpoint(tmp_path, 3) / "__1_0.distcp")
    track(tmp_path, 3)
    state = choose(tmp_path).state
    assert state is not None
    assert state.iteration == 3
    # The file has its size, so only its content reveals the damage.
    with pytest.raises(RunError, match=r"no checkpoint in .* is whole .*another content"):
        choose(tmp_path, contents=True)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("", f"{TRACKER} is empty"),
        ('{"step": 3}', "says '{\"step\": 3}'"),
        ("\u0663", "says"),
        ("-3", "says '-3'"),
        ("9" * 5000, "says '999"),
        ("3\n2", "says '3\\n2'"),
    ],
    ids=["empty", "foreign", "another script", "negative", "endless", "two lines"],
)
def test_a_damaged_tracker_is_said_and_the_newest_is_taken(content: str, why: str, tmp_path: Path) -> None:
    for iteration in (2, 3):
        checkpoint(tmp_path, iteration)
    track(tmp_path, content)
    choice = choose(tmp_path)
    assert choice.state is not None
    assert choice.state.iteration == 3
    assert why in describe(tmp_path, choice)
    assert "\n" not in describe(tmp_path, choice)


def test_without_a_tracker_the_newest_with_a_manifest_is_taken(tmp_path: Path) -> None:
    # A job may be killed between writing the first manifest and the first tracker.
    checkpoint(tmp_path, 3, listed=False)
    assert choose(tmp_path).state is None
    checkpoint(tmp_path, 2)
    state = choose(tmp_path).state
    assert state is not None
    assert state.iteration == 2
    assert choose(tmp_path / "nowhere").state is None


def test_what_megatron_alone_has_written_is_taken_and_said(tmp_path: Path) -> None:
    for iteration in (1, 2):
        checkpoint(tmp_path, iteration, listed=False)
    legacy(tmp_path, 3, listed=False)
    track(tmp_path, 3)
    choice = choose(tmp_path)
    assert choice.state is not None
    assert (choice.state.iteration, choice.passed) == (3, ())
    assert UNCHECKED in describe(tmp_path, choice)


def test_no_other_than_the_trackers_is_taken_unless_its_end_is_known(tmp_path: Path) -> None:
    checkpoint(tmp_path, 1)
    legacy(tmp_path, 2, listed=False)
    # Megatron writes metadata.json last.
    (checkpoint(tmp_path, 3, listed=False) / "metadata.json").unlink()
    track(tmp_path, 4)
    choice = choose(tmp_path)
    assert choice.state is not None
    assert choice.state.iteration == 1
    assert [passed.partition(":")[0] for passed in choice.passed] == [f"iter_000000{n}" for n in (4, 3, 2)]


# Files of a checkpoint, any of which may be deleted first.
LOST = ["__0_0.distcp", "__1_0.distcp", ".metadata", "metadata.json"]


@pytest.mark.parametrize("first", LOST)
def test_a_checkpoint_that_is_half_deleted_is_passed_over_for_the_newer_one(
    first: str, tmp_path: Path
) -> None:
    """A partly deleted checkpoint is skipped, although the tracker still names it."""
    # Its manifest is deleted first, then the other files in any order, and the deleting process was killed.
    checkpoint(tmp_path, 6)
    old = checkpoint(tmp_path, 3, listed=False)
    track(tmp_path, 3)
    state = choose(tmp_path).state
    assert state is not None
    assert state.iteration == 3, "it is whole"
    for name in (first, *(name for name in LOST if name != first), "common.pt"):
        (old / name).unlink()
        choice = choose(tmp_path)
        assert choice.state is not None
        assert choice.state.iteration == 6
    old.rmdir()
    shutil.rmtree(tmp_path / "iter_0000006")
    with pytest.raises(RunError, match=r"no checkpoint in .* is whole"):
        choose(tmp_path)


@pytest.mark.parametrize("lost", ["file", "folder"])
def test_a_half_deleted_checkpoint_of_the_format_torch_is_passed_over(lost: str, tmp_path: Path) -> None:
    checkpoint(tmp_path, 6)
    old = legacy(tmp_path, 3, listed=False)
    track(tmp_path, 3)
    (old / "mp_rank_00" / "model_optim_rng.pt").unlink()
    if lost == "folder":
        (old / "mp_rank_00").rmdir()
    choice = choose(tmp_path)
    assert choice.state is not None
    assert choice.state.iteration == 6
    assert choice.passed == (f"iter_0000003: mp_rank_00 is {'empty' if lost == 'file' else 'missing'}",)


def test_an_index_of_torchs_own_names_the_files_that_are_missing(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from torch.distributed import checkpoint as torch_checkpoint

    path = tmp_path / "iter_0000003"
    weights = {f"layer {number}": torch.zeros(8) for number in range(50)}
    torch_checkpoint.save(weights, checkpoint_id=path, no_dist=True)
    track(tmp_path, 3)
    state = choose(tmp_path).state
    assert state is not None
    (path / "__0_0.distcp").unlink()
    with pytest.raises(RunError, match=r"iter_0000003: __0_0.distcp is missing"):
        choose(tmp_path)


def test_a_tracker_that_was_set_back_is_followed_while_it_can_be(tmp_path: Path) -> None:
    for iteration in (2, 3, 4):
        checkpoint(tmp_path, iteration)
    track(tmp_path, 3)
    states = [choose(tmp_path).state]
    for gone in ("iter_0000003", "iter_0000002"):
        shutil.rmtree(tmp_path / gone)
        states.append(choose(tmp_path).state)
    # Once the tracker's checkpoint is gone, the newest one before it is taken, then any.
    assert [state and state.iteration for state in states] == [3, 2, 4]


def test_released_weights_are_checked_as_others(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, None)
    track(tmp_path, "release")
    state = choose(tmp_path).state
    assert state is not None
    assert state.path == path
    truncate(path / "common.pt", 1)
    with pytest.raises(RunError, match=r"release: common.pt has 1 bytes"):
        choose(tmp_path)


def test_nothing_whole_is_refused_in_one_line(tmp_path: Path) -> None:
    for iteration in range(1, 8):
        truncate(checkpoint(tmp_path, iteration) / "common.pt", 1)
    track(tmp_path, 7)
    with pytest.raises(RunError, match=r"no checkpoint in .* is whole \(iter_0000007: .*; and 4 more\)") as e:
        choose(tmp_path)
    assert "\n" not in str(e.value)
    assert len(str(e.value)) < 500


def test_a_folder_that_is_none_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"cannot be read .*name a folder"):
        choose(tmp_path / "file")


def test_files_of_folders_below_are_listed(tmp_path: Path) -> None:
    path = legacy(tmp_path, 3)
    listed = manifest.read(path)
    assert listed is not None
    assert sorted(listed.files) == [f"mp_rank_0{rank}/model_optim_rng.pt" for rank in range(2)]
    assert listed.size == 2 * SHARD
    truncate(path / "mp_rank_01" / "model_optim_rng.pt", 5)
    assert manifest.damage(path, listed) == f"mp_rank_01/model_optim_rng.pt has 5 bytes of {SHARD}"
