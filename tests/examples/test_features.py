"""Which of mindspeed_dsa's features the job switches on, and what it says of them at its end."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from dsa_job.app import enable_features
from dsa_job.arguments import parse_args

import mindspeed_dsa
from mindspeed_dsa import session
from mindspeed_dsa.ops.cpu_products import has_bf16_product

from .conftest import JobServer, records

VARIABLE = "MINDSPEED_DSA_USE_FUSED_DSA"


def enabled(*argv: str) -> tuple[bool, bool, str]:
    """Whether fused DSA is on by the library's account and by the job's, and who decided it."""
    session.enable_from_argv(argv)  # as the one-liner does
    args = parse_args(argv)
    enable_features(args)
    running = session.current()
    assert running is not None
    on = "fused-dsa" in {feature.name for feature in running.features}
    return on, args.use_fused_dsa, running.settings.setting("use_fused_dsa").source


@pytest.mark.parametrize(
    ("argv", "variable", "expected"),
    [
        ([], None, (True, True, "API")),
        (["--use-fused-dsa"], None, (True, True, "argv")),
        (["--no-use-fused-dsa"], None, (False, False, "default")),
        ([], "0", (False, False, "environment")),
        (["--use-fused-dsa"], "0", (False, False, "environment")),
        (["--no-use-fused-dsa"], "1", (True, True, "environment")),
        (["--experimental-attention-variant", "none"], None, (False, False, "default")),
    ],
)
def test_fused_dsa_is_on_unless_somebody_says_no(
    monkeypatch: pytest.MonkeyPatch,
    argv: list[str],
    variable: str | None,
    expected: tuple[bool, bool, str],
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    if variable is not None:
        monkeypatch.setenv(VARIABLE, variable)
    assert enabled(*argv) == expected


def test_fused_dsa_in_a_model_without_dsa_is_refused() -> None:
    with pytest.raises(mindspeed_dsa.SettingsError, match="the model has none"):
        enabled("--use-fused-dsa", "--experimental-attention-variant", "none")


@pytest.mark.parametrize(
    ("flags", "way"),
    [
        (["--dsa-cpu-bf16", "native"], "as they are: as asked for"),
        ([], "widened to fp32: deterministic algorithms are on, which rule out a measured choice"),
        pytest.param(
            ["--no-deterministic-mode"], r"(as they are|widened to fp32): \S+ ms, and \S+ ms widened"
        ),
    ],
    ids=["native", "deterministic", "measured"],
)
def test_a_job_says_how_it_multiplies_bf16(
    jobs: JobServer, tmp_path: Path, flags: list[str], way: str
) -> None:
    if not has_bf16_product():
        pytest.skip("this PyTorch has no product of bf16 operands with a fp32 result")
    finished = jobs.run(
        tmp_path / "run", "--train-iters", "2", "--eval-iters", "0", "--no-save", "--bf16", *flags
    )
    assert finished.code == 0, finished.output
    text = "bf16 operands of products with many rows are multiplied "
    (line,) = (line for line in finished.output.splitlines() if text in line)
    assert re.search(way, line), line


@pytest.mark.parametrize(
    ("flags", "fused"),
    [
        ([], "absorbed MLA, Lightning Indexer, Sparse Flash Attention, indexer loss"),
        pytest.param(["--no-use-fused-dsa"], "nothing", marks=pytest.mark.full),
    ],
)
def test_a_job_says_at_its_end_what_the_library_did(
    jobs: JobServer, tmp_path: Path, flags: list[str], fused: str
) -> None:
    finished = jobs.run(tmp_path / "run", "--train-iters", "2", "--eval-iters", "0", "--no-save", *flags)
    assert finished.code == 0, finished.output
    _, _, after = finished.output.partition("step     2/2")
    # Two steps of two microbatches through two layers.
    assert f"sparse attention: 8 calls in 2 layers on rank 0; fused: {fused}\n" in after
    operators = "indexer_kl_loss 8 on cpu, lightning_indexer 8 on cpu, sparse_flash_attention 8 on cpu"
    assert (f"calls of operators on rank 0: {operators}\n" in after) == (not flags)
    assert ("calls of operators" in after) == (not flags)
    # Which part costs how much.
    times = re.search(r"time of operators on rank 0, of (\S+) s: (.*)\n", after)
    assert (times is not None) == (not flags)
    if times is not None:
        taken = dict(re.findall(r"(\w+) (\S+) s \(\d+ %\)", times[2]))
        assert set(taken) == {"indexer_kl_loss", "lightning_indexer", "sparse_flash_attention"}
        assert sum(float(seconds) for seconds in taken.values()) <= float(times[1]) + 0.1
    (line,) = (line for line in after.splitlines() if line.startswith("mindspeed_dsa:") and "at work" in line)
    assert (" fused-dsa (" in line) == (not flags)
    assert "dsa-hadamard (1 patched)" in line
    assert len(records(tmp_path / "run")) == 2
