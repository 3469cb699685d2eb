"""The example's job in both releases: its settings, and small models trained on eight ranks."""

from __future__ import annotations

import ast
import dataclasses
import re
from typing import Any

import pytest

pytest.importorskip("tomllib", reason="Python 3.11 or later")
pytest.importorskip("torchtitan.config.override", reason="TorchTitan 0.3: make test-hosts")

import tomllib
from torchtitan.distributed.activation_checkpoint import FullAC

from examples.torchtitan_job import config_registry
from mindspeed_dsa.integrations.torchtitan.config_converters import SwappedOptimizers
from mindspeed_dsa.tools.planner import torchtitan
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


def rows_of(page: str) -> list[list[str]]:
    """Return the rows of the page's table with the job's settings, without its head."""
    text = (jobs.ROOT / "docs" / page / "torchtitan.md").read_text(encoding="utf-8")
    lines = text[text.index("| recipe |") :].partition("\n\n")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    head, rule, *rest = rows
    assert [re.findall("`([^`]*)`", cell) for cell in head] == [[], [TOML.name], ["config_registry.py"]]
    assert rule == ["---"] * 3
    assert {len(row) for row in rest} == {3}
    return rest


def code_of(cell: str) -> list[str]:
    return re.findall("`([^`]*)`", cell)


def numbers_of(cell: str) -> list[float]:
    """Return the numbers in a cell's words: 16 of ``16 parts``, 4 of ``four``, but none of ``FSDP2``."""
    words = re.sub("`[^`]*`|\\([^)]*\\)", "", cell)
    for number, names in {4: ("four", "四个"), 5: ("all five", "五个")}.items():
        for name in names:
            words = words.replace(name, str(number))
    found = re.findall(r"(?<![A-Za-z0-9_.])\d[\d,]*(?:\.\d+)?(?:e-\d+)?", words)
    return [float(number.replace(",", "")) for number in found]


def settings_of_file() -> dict[str, list[Any]]:
    """Return the values of the TOML file by key; sections may have the same key."""
    values: dict[str, list[Any]] = {}
    for section in tomllib.loads(TOML.read_text()).values():
        for key, value in section.items():
            values.setdefault(key, []).append(value)
    return values


def settings_of_configuration() -> dict[str, list[Any]]:
    """Return the values of the configuration by name, and the arguments of the functions in the table."""
    config = config_registry.deepseek_v32()
    (group,) = config.optimizer.param_groups
    values: dict[str, list[Any]] = {key: [value] for key, value in group.optimizer_kwargs.items()}
    for section in (config.parallelism, config.training, config.lr_scheduler):
        for key, value in dataclasses.asdict(section).items():
            values.setdefault(key, []).append(value)
    values["times"] = [config.optimizer.times]
    values["model_registry"] = [(config.model_spec.flavor,)]
    values["npu_swap_optimizer"] = [()] * isinstance(config.optimizer, SwappedOptimizers.Config)
    values["FullAC.Config"] = [()] * isinstance(config.activation_checkpoint, FullAC.Config)
    return values


def written_in_python(code: str) -> tuple[str, Any]:
    """Return name and value of ``name=value``, or function and arguments of ``name(arguments``."""
    if "=" in code:
        name, _, value = code.partition("=")
        return name, ast.literal_eval(value)
    call = ast.parse(code if code.endswith(")") else f"{code})", mode="eval").body
    assert isinstance(call, ast.Call)
    return ast.unparse(call.func), tuple(map(ast.literal_eval, call.args))


KEYS = {
    "model": (["flavor"], ["model_registry"]),
    "converters": ([], []),
    "moments": (["npu_swap_optimizer", "npu_swap_optimizer_times"], ["npu_swap_optimizer", "times"]),
    "optimizer": (["lr", "decay_type"], ["lr", "decay_type"]),
    "batch": (["local_batch_size", "seq_len"], ["local_batch_size", "seq_len"]),
    "tp": (["tensor_parallel_degree"], ["tensor_parallel_degree"]),
    "pp": (["pipeline_parallel_schedule"], ["pipeline_parallel_schedule"]),
    "cp": (["context_parallel_degree"], ["context_parallel_degree", "spmd_backend"]),
    "ep": (["expert_parallel_degree", "expert_tensor_parallel_degree"], ["expert_parallel_degree"]),
    "fsdp": (["fsdp_reshard_after_forward"], ["fsdp_reshard_after_forward"]),
    "recomputation": (["mode"], ["FullAC.Config"]),
    "weights": ([], []),
    "gradients": ([], []),
}
"""Settings in the second and third column of the page's table, by row."""


@pytest.mark.parametrize("page", ["hosts", "zh"])
def test_the_pages_cells_are_the_jobs_settings(page):
    rows, file, configuration = rows_of(page), settings_of_file(), settings_of_configuration()
    for row, (old, new) in zip(rows, KEYS.values(), strict=True):
        if row is rows[1]:
            continue  # names of converters, see below
        in_file = [next(iter(tomllib.loads(code).items())) for code in code_of(row[1])]
        in_python = [written_in_python(code) for code in code_of(row[2])]
        assert ([key for key, _ in in_file], [key for key, _ in in_python]) == (old, new), row
        for pairs, values in ((in_file, file), (in_python, configuration)):
            for key, value in pairs:
                assert values[key] == [value], row
        assert numbers_of(row[1]) == numbers_of(row[2]) == [], row


@pytest.mark.parametrize("page", ["hosts", "zh"])
def test_the_pages_converters_and_weights_are_the_jobs(page):
    rows, file = rows_of(page), settings_of_file()
    recipe, old, new = rows[list(KEYS).index("converters")]
    assert code_of(recipe) == config_registry.CONVERTERS
    assert {*code_of(recipe)} - {*code_of(old)} == {*file["converters"][0]}
    assert (code_of(new), numbers_of(new)) == ([], [len(config_registry.CONVERTERS)])
    # From random numbers: neither file names a checkpoint to begin with.
    assert "initial_load_path" not in file
    assert config_registry.deepseek_v32().checkpoint.initial_load_path is None


@pytest.mark.parametrize("page", ["hosts", "zh"])
def test_the_recipes_numbers_are_those_of_the_plan(page):
    job = torchtitan.job_of([str(TOML)], 128, None, None)
    layout, training = job.layout, job.training
    numbers = {
        "moments": [job.features.swap_parts],
        "optimizer": settings_of_file()["lr"],
        "batch": [training.batch, training.sequence],
        "tp": [layout.tp],
        "pp": [layout.pp, len(layout.stages)],
        "cp": [layout.cp],
        "ep": [layout.ep],
        "fsdp": [job.shards],
    }
    found = {name: numbers_of(row[0]) for name, row in zip(KEYS, rows_of(page), strict=True)}
    assert found == {name: numbers.get(name, []) for name in KEYS}
    # The last row: torch is not changed, so that gradients stay whole until the last microbatch.
    assert job.sharding is not None
    assert job.sharding.whole


def assert_trained_and_resumed(
    whole: jobs.Record, rest: jobs.Record, functions: set[str], relative: float = 0.0
) -> None:
    assert [step for step, _, _ in whole.steps] == [*range(1, 11)]
    assert whole.steps[-1][1] < whole.steps[0][1]
    assert set(whole.calls) == functions
    assert whole.moved["keys"] > 0, "context parallel ranks gather keys"
    assert all(part["moments"]["device"] == 0 < part["moments"]["host"] for part in whole.parts)
    assert whole.indexer_losses
    assert all(loss > 0 for loss in whole.indexer_losses)
    assert rest.steps == [pytest.approx(step, rel=relative, abs=0) for step in whole.steps[5:]]
    assert rest.weights == pytest.approx(whole.weights, rel=relative, abs=0)


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
    # Gradient norms of the two differ by a rounding error.
    assert_trained_and_resumed(whole, rest, FUNCTIONS, relative=1e-5)
