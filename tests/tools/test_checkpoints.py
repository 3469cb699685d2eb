"""``python -m mindspeed_dsa checkpoints``: listing, deletion and refusals."""

from __future__ import annotations

from pathlib import Path

import pytest

from mindspeed_dsa import __main__ as commands
from mindspeed_dsa.runs import manifest
from tests.features.checkpoints.whole.folders import SHARD, checkpoint, track


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with five checkpoints; the last one is truncated."""
    for iteration in range(1, 6):
        checkpoint(tmp_path, iteration)
    track(tmp_path, 5)
    (tmp_path / "iter_0000005" / "__0_0.distcp").write_bytes(b"")
    return tmp_path


def there(folder: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in folder.glob("*iter_*"))


def test_it_lists(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint(folder, 6, listed=False)
    content = bytearray((folder / "iter_0000002" / "__1_0.distcp").read_bytes())
    content[7] ^= 1
    (folder / "iter_0000002" / "__1_0.distcp").write_bytes(content)
    assert commands.main(["checkpoints", str(folder)]) == 1
    rows = capsys.readouterr().out.splitlines()
    assert [row.split()[0] for row in rows] == [
        "checkpoint",
        *(f"iter_000000{n}" for n in (6, 5, 4, 3, 2, 1)),
    ]
    assert "unknown: it has no manifest" in rows[1]
    assert f"damaged: __0_0.distcp has 0 bytes of {SHARD}, the latest" in rows[2]
    assert rows[5].endswith("whole")
    assert commands.main(["checkpoints", str(folder), "--verify"]) == 1
    rows = capsys.readouterr().out.splitlines()
    assert rows[3].endswith("whole, all files read")
    assert rows[5].endswith("damaged: __1_0.distcp has another content than was written")


def test_it_keeps_the_newest_whole_ones(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "iter_0000003" / "common.pt").unlink()
    commands.main(["checkpoints", str(folder), "--keep", "2"])
    assert there(folder) == [2, 3, 4, 5]
    assert "iter_0000001 is deleted" in capsys.readouterr().out
    commands.main(["checkpoints", str(folder), "--keep", "1"])
    assert there(folder) == [4, 5]  # the latest is damaged, and 4 the newest whole one
    commands.main(["checkpoints", str(folder), "--keep", "1"])
    assert there(folder) == [4, 5]
    assert "nothing is deleted" in capsys.readouterr().out


def test_what_is_kept_has_been_read(folder: Path) -> None:
    """Sizes do not show a flipped bit, and the other checkpoints are about to be deleted."""
    content = bytearray((folder / "iter_0000004" / "__1_0.distcp").read_bytes())
    content[7] ^= 1
    (folder / "iter_0000004" / "__1_0.distcp").write_bytes(content)
    commands.main(["checkpoints", str(folder), "--keep", "1"])
    assert there(folder) == [3, 4, 5]


def test_what_the_tracker_names_stays(folder: Path) -> None:
    track(folder, 2)
    commands.main(["checkpoints", str(folder), "--keep", "1"])
    assert there(folder) == [2, 4, 5]


@pytest.mark.parametrize("case", ["stock", "foreign", "link"])
def test_it_deletes_nothing_beside_what_it_does_not_understand(
    case: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder / "iter_0000002"
    if case == "stock":
        (path / manifest.NAME).unlink()
    elif case == "foreign":
        (path / "notes.txt").write_text("mine")
    else:
        path.rename(folder / "elsewhere")
        path.symlink_to(folder / "elsewhere")
    assert commands.main(["checkpoints", str(folder), "--keep", "1"]) == 2
    assert there(folder) == [1, 2, 3, 4, 5]
    error = capsys.readouterr().err
    assert str(path) in error
    assert "nothing was deleted" in error


def test_a_folder_without_checkpoints_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "iter_12").mkdir()
    assert commands.main(["checkpoints", str(tmp_path), "--keep", "1"]) == 2
    assert "holds no checkpoints" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [tmp_path / "iter_12"]
    with pytest.raises(SystemExit):
        commands.main(["checkpoints", str(tmp_path), "--keep", "0"])
