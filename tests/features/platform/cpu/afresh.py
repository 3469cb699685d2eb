"""Programs in fresh interpreters."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap


def run(code: str, **environment: str) -> None:
    """Run a program in a fresh interpreter; if it fails, fail with its output."""
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)]
    result = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, **environment}
    )
    assert result.returncode == 0, result.stderr
