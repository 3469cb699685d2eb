"""Hopper kernels compile with the environment's Triton; size budgets apply to one Triton release."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests.support import warm

pytestmark = pytest.mark.releases(">=0.12.1")


@pytest.mark.timeout(300)
def test_kernels_for_hopper_compile(tmp_path: Path) -> None:
    """If one kernel fails, attention never runs on Triton: a backend has all of its kernels or none."""
    pytest.importorskip("triton", minversion="3.7", reason="kernels for Hopper need Triton 3.7")
    done = warm.run(
        [sys.executable, "-m", "tests.ops.compile_kernels", "--target", "90", "--dtype", "bf16", "--quick"],
        env={**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"},
        cwd=Path(__file__).parents[2],
        timeout=280,
    )
    assert "DoesNotCompile" not in done.stderr, done.stderr[-2000:]
    assert done.stdout, f"nothing was compiled, exit status {done.returncode}: {done.stderr[-2000:]}"
    compiled = {json.loads(line)["name"] for line in done.stdout.splitlines()}
    ways = ("backward_rows", "backward_few_heads", "backward_keys")
    for direction in ("forward", "few_heads_forward", "attention_sum", *ways):
        assert f"hopper_{direction}_kernel" in compiled
