"""Killed imports and exports do not block later ones, and several processes write one process's files."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from mindspeed_dsa.features.checkpoints.hugging_face.shard_files import Writer
from mindspeed_dsa.runs.files import RunError
from mindspeed_dsa.tools.weights import importing, job
from tests.support import warm
from tests.support.ports import free_port
from tests.tools.weights import models
from tests.tools.weights.models import done

pytest.importorskip("transformers", "5.20", reason="needs transformers >= 5.20: pip install '.[test]'")

ROOT = Path(__file__).parents[3]
PART = 100_000
SHARDS = ("--shard-size", PART)
PROGRAM = f"""
import os, signal, sys
from mindspeed_dsa.__main__ import main
from mindspeed_dsa.features.checkpoints.hugging_face.shard_files import Writer
from mindspeed_dsa.tools.weights import importing

importing._PART_BYTES = {PART}
left = int(sys.argv[1])

def counted(original):
    def call(*args):
        global left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args)
    return call

importing.read_piece = counted(importing.read_piece)
Writer.write = counted(Writer.write)
sys.exit(main(["weights", *sys.argv[2:]]))
"""
"""Program that is killed when it reads or writes the tensor of that number, from 1; 0 for never."""
KILLED_AT = 60


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.write("deepseek_v32", tmp_path_factory.mktemp("made") / "model", predictions=1)


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importing, "_PART_BYTES", PART)


@pytest.fixture
def program(tmp_path: Path) -> Path:
    (tmp_path / "program.py").write_text(PROGRAM)
    return tmp_path / "program.py"


def contents(folder: Path) -> dict[str, bytes]:
    """Return the bytes of all files below a folder, without torch's metadata, which has a random number."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != ".metadata"
    }


def environment() -> dict[str, str]:
    paths = filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


def killed(program: Path, *words: object) -> None:
    """Run the command until it is killed."""
    command = [sys.executable, str(program), str(KILLED_AT), *map(str, words)]
    ended = warm.run(command, env=environment())
    assert ended.returncode == -signal.SIGKILL, ended.stderr


def two(program: Path, *words: object) -> None:
    """Run the command in two processes of torch's launcher."""
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--master-addr=127.0.0.1"]
    port = f"--master-port={free_port()}"
    command = [sys.executable, *launcher, port, str(program), "0", *map(str, words)]
    ended = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr


class Interrupted(Exception):
    """Replacement for Ctrl-C."""


@contextmanager
def interrupted(owner: Any, name: str) -> Iterator[None]:
    """Let a function raise after :data:`KILLED_AT` calls, and require that it does."""
    original, calls = getattr(owner, name), iter(range(KILLED_AT))

    def call(*args: Any) -> Any:
        if next(calls, None) is None:
            raise Interrupted
        return original(*args)

    with mock.patch.object(owner, name, call), pytest.raises(Interrupted):
        yield


def test_an_interrupted_import_and_export_begin_anew(model: Path, tmp_path: Path) -> None:
    done("import", model, tmp_path / "whole")
    with interrupted(importing, "read_piece"):
        models.weights("import", model, tmp_path / "again", "--dtype", "float32")
    assert list((tmp_path / "again" / ".release.partial").iterdir())
    assert not (tmp_path / "again" / "release").exists()
    done("import", model, tmp_path / "again")
    assert contents(tmp_path / "again") == contents(tmp_path / "whole")

    done("export", tmp_path / "whole", tmp_path / "out", *SHARDS)
    with interrupted(Writer, "write"):
        models.weights("export", tmp_path / "whole", tmp_path / "other", "--fp8-blocks", *SHARDS)
    assert list((tmp_path / ".other.partial").iterdir())
    assert not (tmp_path / "other").exists()
    done("export", tmp_path / "whole", tmp_path / "other", *SHARDS)
    assert contents(tmp_path / "other") == contents(tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "other", "out", "whole"]


@contextmanager
def once_within(owner: Any, name: str, do: Callable[[], None]) -> Iterator[None]:
    """Call ``do`` at the :data:`KILLED_AT`-th call of a function, and require that it happens."""
    original, calls = getattr(owner, name), iter(range(KILLED_AT))

    def call(*args: Any) -> Any:
        result = original(*args)
        if next(calls, None) == KILLED_AT - 1:
            do()
        return result

    with mock.patch.object(owner, name, call):
        yield
    assert next(calls, None) is None


def test_a_second_writer_is_refused_and_the_first_ends_whole(model: Path, tmp_path: Path) -> None:
    """It would truncate a file that the first one has open, and the index would still look right."""
    done("import", model, tmp_path / "whole")
    said: list[str] = []

    def second(*words: object) -> None:
        status, text = models.weights(*words)
        assert status == 2
        said.append(text)

    words = ("import", model, tmp_path / "twice")
    with once_within(importing, "read_piece", lambda: second(*words, "--dtype", "float32")):
        done(*words)
    assert contents(tmp_path / "twice") == contents(tmp_path / "whole")
    words = ("export", tmp_path / "whole", tmp_path / "out")
    with once_within(Writer, "write", lambda: second(*words)):
        done(*words)
    assert models.same(models.tensors_of(tmp_path / "out"), models.tensors_of(model))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "twice", "whole"]
    for text, written in zip(said, ("twice/release", "out"), strict=True):
        assert f"{tmp_path / written} is being written by process {os.getpid()} on " in text


# -- ranks that see less than the first ------------------------------------------------------------


def export_where_rank_1_sees(what: str, checkpoints: str, target: str) -> str:
    """Export as two ranks; return the error's message, or an empty string."""
    options = Namespace(
        checkpoint=Path(checkpoints),
        target=Path(target),
        like=None,
        dtype=None,
        shard_size=PART,
        fp8_blocks=False,
        dsa_indexer_topk_pattern=None,
    )
    with contextlib.ExitStack() as patched:
        if dist.get_rank() == 1 and what == "no tracker":
            patched.enter_context(mock.patch.object(job, "newest", lambda folder: folder))
        elif dist.get_rank() == 1:
            plan_of = job.plan_of
            earlier = Path(checkpoints).with_name("earlier") / "release"
            patched.enter_context(
                mock.patch.object(
                    job,
                    "plan_of",
                    lambda options: plan_of(Namespace(**{**vars(options), "checkpoint": earlier})),
                )
            )
        try:
            job.export(options, lambda total: lambda done: None)
        except RunError as error:
            return str(error)
    return ""


@pytest.mark.full
def test_the_first_rank_says_which_checkpoint_is_the_newest(model: Path, tmp_path: Path, pool: Any) -> None:
    done("import", model, tmp_path / "whole")
    done("export", tmp_path / "whole", tmp_path / "alone", *SHARDS)
    words = {"what": "no tracker", "checkpoints": str(tmp_path / "whole"), "target": str(tmp_path / "out")}
    assert pool.run(f"{__name__}:export_where_rank_1_sees", 2, timeout_s=120, **words) == ["", ""]
    assert contents(tmp_path / "out") == contents(tmp_path / "alone")


@pytest.mark.full
def test_ranks_that_see_two_trainings_of_a_step_write_nothing(model: Path, tmp_path: Path, pool: Any) -> None:
    """All files would be there, some with the weights of the earlier one."""
    for name in ("whole", "earlier"):
        done("import", model, tmp_path / name)
    words = {"what": "earlier", "checkpoints": str(tmp_path / "whole"), "target": str(tmp_path / "out")}
    said = pool.run(f"{__name__}:export_where_rank_1_sees", 2, timeout_s=120, **words)
    assert all("ranks 1 see another checkpoint at " in text for text in said), said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["earlier", "whole"]


@pytest.mark.parametrize(
    "text",
    [pytest.param("", marks=pytest.mark.full), "seven", pytest.param("1" * 50, marks=pytest.mark.full)],
)
def test_a_damaged_tracker_is_named(model: Path, tmp_path: Path, text: str) -> None:
    done("import", model, tmp_path / "whole")
    (tmp_path / "whole" / "latest_checkpointed_iteration.txt").write_text(text)
    status, said = models.weights("export", tmp_path / "whole", tmp_path / "out")
    assert status == 2
    assert "latest_checkpointed_iteration.txt " in said
    assert "name the folder of a checkpoint in it" in said


STALLED = """
import errno, fcntl, sys
from mindspeed_dsa.__main__ import main
from mindspeed_dsa.features.checkpoints.hugging_face.shard_files import Writer
from mindspeed_dsa.tools.weights import importing

def flock(*args):
    raise OSError(errno.ENOLCK, "No locks available")

def stalled(original):
    def call(*args):
        global stalls
        if stalls:
            stalls = False
            print("writes", flush=True)
            sys.stdin.readline()
        return original(*args)
    return call

stalls, fcntl.flock = True, flock
importing.read_piece = stalled(importing.read_piece)
Writer.write = stalled(Writer.write)
sys.exit(main(["weights", *sys.argv[1:]]))
"""
"""Program on a file system without locks, which waits for a line before it writes the first tensor."""


@pytest.mark.full
def test_without_locks_two_writers_do_not_meet(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one would delete the first one's unfinished files."""

    def none(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", none)
    done("import", model, tmp_path / "whole")
    for words in (("export", tmp_path / "whole", tmp_path / "out"), ("import", model, tmp_path / "twice")):
        command = [sys.executable, "-c", STALLED, *map(str, words)]
        first = warm.popen(command, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert first.stdin is not None
        assert first.stdout is not None
        try:
            assert first.stdout.readline() == "writes\n"
            others = ("--shard-size", PART) if words[0] == "export" else ("--dtype", "float32")
            status, text = models.weights(*words, *others)
            first.stdin.write("go on\n")
            first.stdin.close()
            said = first.stdout.read()
            assert first.wait(120) == 0, said
        finally:
            first.kill()
        assert status == 2
        assert f"is being written by process {first.pid} on " in text
    assert models.same(models.tensors_of(tmp_path / "out"), models.tensors_of(model))
    assert contents(tmp_path / "twice" / "release").keys() >= {"metadata.json"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "twice", "whole"]
    assert len(list((tmp_path / "twice").iterdir())) == len(list((tmp_path / "whole").iterdir()))


@pytest.mark.full
def test_two_processes_write_what_one_does_also_after_a_killed_one(
    model: Path, tmp_path: Path, program: Path
) -> None:
    done("import", model, tmp_path / "whole")
    done("export", tmp_path / "whole", tmp_path / "out", *SHARDS)
    killed(program, "import", model, tmp_path / "two")
    assert not (tmp_path / "two" / "release").exists()
    two(program, "import", model, tmp_path / "two")
    assert contents(tmp_path / "two") == contents(tmp_path / "whole")

    killed(program, "export", tmp_path / "two", tmp_path / "out of two", *SHARDS)
    assert not (tmp_path / "out of two").exists()
    two(program, "export", tmp_path / "two", tmp_path / "out of two", *SHARDS)
    assert contents(tmp_path / "out of two") == contents(tmp_path / "out")
