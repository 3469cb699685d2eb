"""The example's job in both releases: its settings, and small models trained on eight ranks."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

pytest.importorskip("tomllib", reason="Python 3.11 or later")
pytest.importorskip("torchtitan.config.override", reason="TorchTitan 0.3: make test-hosts")

import tomllib

from examples.torchtitan_job import config_registry
from tests.hosts.torchtitan import jobs

EXAMPLE = jobs.ROOT / "examples" / "torchtitan_job"
TOML = EXAMPLE / "deepseek_v32.toml"
SMALL = {"topk": 8, "index_heads": 4, "index_dim": 32}
RANKS = 8
LAYOUT = {
    "tensor_parallel_degree": 2,
    "pipeline_parallel_degree": 2,
    "context_parallel_degree": 2,
    "expert_parallel_degree": 4,
    # Four layers in four stages: a stage without layers cannot be context parallel.
    "pipeline_parallel_first_stage_less_layers": 0,
    "pipeline_parallel_last_stage_less_layers": 0,
}


def words(section: str, **settings: Any) -> list[str]:
    return [word for name, value in settings.items() for word in (f"--{section}.{name}", str(value))]


def test_both_releases_have_the_same_settings():
    old, new = tomllib.loads(TOML.read_text()), config_registry.deepseek_v32()
    for section in ("parallelism", "training", "lr_scheduler", "checkpoint"):
        theirs = dataclasses.asdict(getattr(new, section))
        # 0.3 has no tensor parallelism of experts, and its data loader is another section.
        only_old = {"expert_tensor_parallel_degree", "dataset", "dataset_path"}
        ours = {name: value for name, value in old[section].items() if name not in only_old}
        assert {**theirs, **ours} == theirs
    (group,) = new.optimizer.param_groups
    given = group.optimizer_kwargs
    assert (given["lr"], given["betas"][1], given["eps"], given["weight_decay"]) == tuple(
        old["optimizer"][name] for name in ("lr", "beta2", "eps", "weight_decay")
    )
    missing = set(config_registry.CONVERTERS) - set(old["model"]["converters"])
    assert missing == {"npu_permute"}


@pytest.mark.parametrize("page", ["hosts", "zh"])
def test_the_pages_columns_are_in_the_files(page):
    text = (jobs.ROOT / "docs" / page / "torchtitan.md").read_text(encoding="utf-8")
    table = text.partition("| recipe |")[2].partition("\n\n")[0]
    rows = [line.strip("|").split("|") for line in table.splitlines()[2:]]
    files = [TOML.read_text(), (EXAMPLE / "config_registry.py").read_text()]
    for column, file in enumerate(files, start=1):
        cells = [
            cell for row in rows for cell in re.findall("`([^`]*)`", row[column]) if cell != "npu_permute"
        ]
        assert len(cells) > 10
        for cell in cells:
            assert cell in file, f"{cell} of the page's table is not in the file"


def assert_trained_and_resumed(whole: jobs.Record, rest: jobs.Record, functions: set[str]) -> None:
    assert [step for step, _, _ in whole.steps] == [*range(1, 11)]
    assert whole.steps[-1][1] < whole.steps[0][1]
    assert set(whole.calls) == functions
    assert whole.moved["keys"] > 0, "context parallel ranks gather keys"
    assert all(part["moments"]["device"] == 0 < part["moments"]["host"] for part in whole.parts)
    assert whole.indexer_losses
    assert all(loss > 0 for loss in whole.indexer_losses)
    assert rest.steps == [pytest.approx(step, rel=1e-5) for step in whole.steps[5:]]
    assert rest.weights == pytest.approx(whole.weights, rel=1e-5)


FUNCTIONS = {"deepseek_sparse_attention", "rms_norm", "grouped_matmul", "rotate"}


@pytest.mark.full
def test_the_configuration_trains_on_eight_ranks_and_resumes(tmp_path):
    folder = jobs.files(tmp_path)
    given = ["--module", "tests.hosts.torchtitan", "--config", "article", "--debug.seed", "7"]
    whole = jobs.train(folder, RANKS, given)
    rest = jobs.train(folder, RANKS, [*given, "--checkpoint.load_step", "5"])
    assert_trained_and_resumed(whole, rest, FUNCTIONS | {"permute", "unpermute"})


@pytest.mark.full
@pytest.mark.skipif(not jobs.OLD.is_dir(), reason="TorchTitan 0.2: make test-hosts")
def test_the_file_trains_on_eight_ranks_and_resumes(tmp_path):
    folder = jobs.files(tmp_path)
    given = [
        *("--job.config_file", str(TOML), "--model.flavor", "tiny", "--debug.seed", "7"),
        *words("dsa", **SMALL),
        *words("training", local_batch_size=4, seq_len=64, steps=10, mixed_precision_param="float32"),
        *words("parallelism", **LAYOUT),
        *words("lr_scheduler", warmup_steps=1),
        *words("metrics", log_freq=1),
        *words("checkpoint", interval=5),
        "--checkpoint.no-last_save_model_only",
    ]
    whole = jobs.train(folder, RANKS, given, PYTHONPATH=str(jobs.OLD))
    rest = jobs.train(folder, RANKS, [*given, "--checkpoint.load_step", "5"], PYTHONPATH=str(jobs.OLD))
    assert_trained_and_resumed(whole, rest, FUNCTIONS)
