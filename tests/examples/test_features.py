"""Features of mindspeed_dsa that the job enables, and its report on them at the end."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from dsa_job.app import enable_features
from dsa_job.arguments import parse_args

import mindspeed_dsa
from mindspeed_dsa import log, session

from .conftest import JobServer, records

VARIABLE = "MINDSPEED_DSA_USE_FUSED_DSA"


def enabled(*argv: str) -> tuple[bool, bool, str]:
    """Return whether fused DSA is on by the library and by the job, and the source of the decision."""
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
    "flags",
    [
        pytest.param("--expert-model-parallel-size 2 --balanced-moe-experts", marks=pytest.mark.full),
        "--expert-model-parallel-size 2 --moe-batch-overlap",
        pytest.param(
            "--tensor-model-parallel-size 2 --sequence-parallel --use-ascend-coc", marks=pytest.mark.full
        ),
    ],
    ids=["rates", "halves", "chunks"],
)
def test_what_is_measured_is_refused_before_anything_is_built(flags: str) -> None:
    """On a CPU the job is deterministic by default, and features know that when they check."""
    with pytest.raises(mindspeed_dsa.SettingsError, match="which --deterministic-mode rules out"):
        enabled(*flags.split())
    enabled(*flags.split(), "--no-deterministic-mode")


@pytest.mark.full
@pytest.mark.parametrize(
    ("stage", "before", "after"),
    [
        (
            "dense",
            "dense attention: nothing reads or trains 8 index heads\n",
            "dense attention: 8 calls in 2 layers on rank 0; fused: nothing\n",
        ),
        (
            "warmup",
            "dense attention: 8 index heads learn to choose 8 of up to 32 keys\n",
            "dense attention: 8 calls in 2 layers on rank 0; fused: indexer loss\n",
        ),
        (
            "frozen",
            "sparse attention: 8 index heads, which are not trained, choose 8 of up to 32 keys\n",
            "fused: absorbed MLA, Lightning Indexer, Sparse Flash Attention\n",
        ),
    ],
)
def test_a_job_says_what_attends_in_its_stage(
    jobs: JobServer, tmp_path: Path, stage: str, before: str, after: str
) -> None:
    short = ["--train-iters", "2", "--eval-iters", "0", "--no-save"]
    finished = jobs.run(tmp_path / "run", *short, "--dsa-stage", stage, "--dsa-indexer-loss-coeff", "1")
    assert finished.code == 0, finished.output
    assert before in finished.output
    assert after in finished.output


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
    # Shares of the cost by part.
    times = re.search(r"time of operators on rank 0, of (\S+) s: (.*)\n", after)
    assert (times is not None) == (not flags)
    if times is not None:
        taken = dict(re.findall(r"(\w+) (\S+) s \(\d+ %\)", times[2]))
        assert set(taken) == {"indexer_kl_loss", "lightning_indexer", "sparse_flash_attention"}
        assert sum(float(seconds) for seconds in taken.values()) <= float(times[1]) + 0.1
    assert "at work" not in after, "a patched place may pass every call on"
    (line,) = (line for line in after.splitlines() if " features on; places patched: " in line)
    assert (" fused-dsa (" in line) == (not flags)
    assert " dsa-repairs (" in line
    assert len(records(tmp_path / "run")) == 2


def test_variables_for_megatrons_own_flags_reach_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the library would report a feature as on, and the job would train without it."""
    monkeypatch.setenv("MINDSPEED_DSA_USE_TORCH_FSDP2", "1")
    monkeypatch.setenv("MINDSPEED_DSA_RECOMPUTE_MODULES", "mlp moe_act")
    args = parse_args([])
    assert args.use_torch_fsdp2 is True
    assert args.recompute_modules == ["mlp", "moe_act"]
    enable_features(args)
    running = session.current()
    assert running is not None
    assert "fsdp2" in {feature.name for feature in running.features}


def test_a_variable_outranks_megatrons_own_flag(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MINDSPEED_DSA_USE_TORCH_FSDP2", "0")
    argv = ["--use-torch-fsdp2"]
    log.forget()
    session.enable_from_argv(argv)
    told = "MINDSPEED_DSA_USE_TORCH_FSDP2=0 outranks --use-torch-fsdp2 of the command line"
    assert told in capsys.readouterr().err
    args = parse_args(argv)
    enable_features(args)
    assert args.use_torch_fsdp2 is False
    running = session.current()
    assert running is not None
    assert "fsdp2" not in {feature.name for feature in running.features}


def test_a_variable_that_the_job_does_not_read_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINDSPEED_DSA_MULTI_LATENT_ATTENTION", "0")
    with pytest.raises(mindspeed_dsa.SettingsError, match="this job does not read; unset MINDSPEED_"):
        parse_args([])


def test_the_environment_outranks_our_own_flag_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINDSPEED_DSA_DSA_STAGE", "sparse")
    argv = ["--dsa-stage", "warmup"]
    session.enable_from_argv(argv)
    args = parse_args(argv)
    enable_features(args)
    assert args.dsa_stage == "sparse"


def test_the_api_cannot_say_what_the_job_does_not_do() -> None:
    args = parse_args([])
    mindspeed_dsa.enable(use_torch_fsdp2=True)
    with pytest.raises(mindspeed_dsa.SettingsError, match=r"use_torch_fsdp2=False, .* the same value"):
        enable_features(args)


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        ("moe_act", "--recompute-modules moe_act is for experts in one grouped GEMM; add --moe-grouped-gemm"),
        ("moe_axt", "Megatron refuses this model: Invalid choices for recompute_modules: {'moe_axt'}"),
    ],
)
def test_modules_that_cannot_be_recomputed_are_refused_in_one_message(
    jobs: JobServer, tmp_path: Path, modules: str, message: str
) -> None:
    flags = ["--recompute-granularity", "selective", "--recompute-modules", modules]
    done = jobs.run(tmp_path / "run", *flags)
    assert done.code == 2
    assert f"pretrain_dsa.py: {message}" in done.output
    assert "Traceback" not in done.output
    assert "a process group" not in done.output
