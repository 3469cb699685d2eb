"""A warm process differs from a fresh interpreter only by its imports."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from tests.support import warm

TELL = """
import os, sys
print(sys.argv, [path for path in sys.path if path], __name__, os.getcwd(), os.environ.get("MINE"))
print("to stderr", file=sys.stderr)
assert not any(name.startswith(("megatron", "mindspeed_dsa", "tests")) for name in sys.modules)
"""


@pytest.mark.parametrize("how", ["script", "module", "code"])
def test_a_program_sees_what_it_sees_in_a_fresh_interpreter(tmp_path, how):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "tell.py").write_text(TELL)
    words = {"script": ["folder/tell.py"], "module": ["-m", "folder.tell"], "code": ["-c", TELL]}[how]
    environ = {**os.environ, "PYTHONPATH": f"{tmp_path}:/nowhere", "MINE": how}
    options = {"capture_output": True, "text": True, "cwd": tmp_path, "env": environ}
    fresh, ours = (run([sys.executable, *words, "--flag"], **options) for run in (subprocess.run, warm.run))
    assert (ours.returncode, ours.stdout, ours.stderr) == (0, fresh.stdout, fresh.stderr)


@pytest.mark.parametrize(
    ("code", "status", "said"),
    [
        ("import sys; sys.exit(3)", 3, ""),
        ("raise SystemExit('no')", 1, "no\n"),
        ("1 / 0", 1, "ZeroDivisionError: division by zero\n"),
        ("import atexit, sys; atexit.register(lambda: print('bye', file=sys.stderr))", 0, "bye\n"),
        ("import sys; assert 'torch' in sys.modules", 0, ""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM, ""),
    ],
)
def test_how_it_ends(code, status, said):
    done = warm.run([sys.executable, "-c", code])
    assert done.returncode == status
    assert done.stderr.endswith(said)
    assert bool(done.stderr) == bool(said)


def test_pipes_and_time():
    code = "import sys; print(sys.stdin.readline().upper(), end='', flush=True); input()"
    with_pipes = warm.popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with_pipes.stdin.write("hello\n")
    with_pipes.stdin.flush()
    assert with_pipes.stdout.readline() == "HELLO\n"
    with pytest.raises(subprocess.TimeoutExpired):
        with_pipes.wait(0.1)
    assert with_pipes.wait() == -signal.SIGKILL
    with_pipes.communicate()
