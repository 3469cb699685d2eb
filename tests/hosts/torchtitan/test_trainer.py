"""TorchTitan 0.3's own trainer on CPU ranks, with and without converters: losses, gradients, checkpoints."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest

from tests.hosts.torchtitan import jobs

pytest.importorskip("torchtitan.config.override", reason="TorchTitan 0.3: make test-hosts")

DENSE = {"topk": 64, "index_heads": 4, "index_dim": 32, "loss_coeff": 0}
"""All keys are selected: sequences have 64 rows."""
SPARSE = {"topk": 4, "index_heads": 4, "index_dim": 32}
ALL = ["npu_dsa", "npu_rms_norm", "npu_permute", "npu_gmm", "npu_rope"]
CALLED = {
    "dsa": {"deepseek_sparse_attention"},
    "npu_rms_norm": {"rms_norm"},
    "permute": {"permute", "unpermute"},
    "npu_gmm": {"grouped_matmul"},
    "rope": {"rotate"},
}
LAYOUTS = {
    "fsdp": (2, ()),
    "tp": (2, ("--parallelism.tensor_parallel_degree", "2")),
    "ep": (2, ("--parallelism.expert_parallel_degree", "2")),
    "pp": (2, ("--parallelism.pipeline_parallel_degree", "2")),
    "fsdp-tp-ep": (
        4,
        ("--parallelism.tensor_parallel_degree", "2", "--parallelism.expert_parallel_degree", "2"),
    ),
    "fsdp-pp-ep": (
        4,
        ("--parallelism.pipeline_parallel_degree", "2", "--parallelism.expert_parallel_degree", "2"),
    ),
}


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    return jobs.files(tmp_path_factory.mktemp("torchtitan"))


@pytest.fixture(scope="session")
def stock(folder):
    """Return a cached function from a layout to the record of its stock job."""

    @cache
    def run(layout: str | None = None) -> jobs.Record:
        ranks, arguments = LAYOUTS[layout] if layout else (1, ())
        return jobs.by_config(folder, ranks, *arguments)

    return run


def assert_same(ours: jobs.Record, theirs: jobs.Record) -> None:
    assert len(theirs.steps) == 4
    begun, ended = (
        {name: value for name, value in weights.items() if ".indexer." not in name}
        for weights in (ours.initial, ours.weights)
    )
    assert begun == theirs.initial
    assert ours.steps == [pytest.approx(step, rel=1e-5) for step in theirs.steps]
    assert ended == pytest.approx(theirs.weights, rel=1e-5)


@pytest.mark.parametrize("name", CALLED)
def test_losses_with_each_converter_are_those_without(folder, stock, name):
    options = DENSE if name == "dsa" else {}
    ours = jobs.by_config(folder, converters={"names": [name], **options})
    assert set(ours.calls) == CALLED[name], "the operators of this converter are called, and no others"
    assert stock().calls == {}
    assert_same(ours, stock())


@pytest.mark.parametrize("layout", jobs.quick_on_two(LAYOUTS))
def test_losses_in_parallel_layouts_are_those_of_stock(folder, stock, layout):
    ranks, arguments = LAYOUTS[layout]
    ours = jobs.by_config(folder, ranks, *arguments, converters={"names": ALL, **DENSE})
    assert set(ours.calls) == set().union(*CALLED.values())
    assert_same(ours, stock(layout))


def test_the_indexer_learns_and_sparse_attention_is_another_function(folder, stock):
    still = jobs.by_config(folder, converters={"names": ["npu_dsa"], **SPARSE, "loss_coeff": 0})
    trained = jobs.by_config(folder, converters={"names": ["npu_dsa"], **SPARSE, "loss_coeff": 1.0})
    assert still.steps[0][1] != pytest.approx(stock().steps[0][1], rel=1e-5), "keys are left out"
    assert still.indexer_losses == []
    assert len(trained.indexer_losses) == 4
    assert all(loss > 0 for loss in trained.indexer_losses)
    # Before the first update the model's own loss does not depend on the indexer's loss.
    assert trained.steps[0][1] == still.steps[0][1]
    moved = [name for name in trained.weights if trained.weights[name] != still.weights[name]]
    assert [name for name in moved if ".indexer." in name]


@pytest.fixture(scope="session")
def seeded(folder):
    """Return a function that runs a job from the same weights; its indexer loss outweighs the model's."""
    converters = {"names": ["npu_dsa"], **SPARSE, "loss_coeff": 100.0}
    saving = ("--checkpoint.enable", "--checkpoint.create_seed_checkpoint", "--dump_folder", "seed")
    seed = ["--module", "tests.hosts.torchtitan", "--config", "converted", *saving]
    done = jobs.start(folder, 1, seed, TITAN_CONVERTERS=json.dumps(converters))
    assert done.returncode == 0, done.stderr[-4000:]

    @cache
    def norm(ranks: int, *arguments: str) -> float:
        job_arguments = (
            "--checkpoint.enable",
            "--checkpoint.initial_load_path",
            f"{folder}/seed/checkpoint/step-0",
        )
        job_arguments += (
            "--dump_folder",
            f"seeded-{len(list(folder.iterdir()))}",
            "--training.steps",
            "1",
            *arguments,
        )
        return jobs.by_config(folder, ranks, *job_arguments, converters=converters).steps[0][2]

    return norm


ONE_SEQUENCE = ("--training.local_batch_size", "1")
# Data parallel ranks get different documents: make all documents the same.
SAME = (*ONE_SEQUENCE, "--dataloader.dataset_path", "same")
STEPS = {
    "tp": ((1,), (2, *LAYOUTS["tp"][1])),
    "pp": ((1,), (2, *LAYOUTS["pp"][1])),
    "fsdp": ((1, *SAME), (2, *SAME)),
    "accumulated": ((1,), (1, *ONE_SEQUENCE, "--training.global_batch_size", "2")),
}


@pytest.mark.parametrize("case", STEPS)
def test_the_indexers_gradient_is_that_of_one_rank_and_one_pass(seeded, case):
    whole, parts = STEPS[case]
    assert seeded(*parts) == pytest.approx(seeded(*whole), rel=2e-3)


@pytest.mark.parametrize("layout", ["fsdp", "pp"])
def test_a_job_that_resumes_goes_on_as_one_that_was_not_interrupted(folder, layout):
    converters = {"names": ALL, **SPARSE}
    saving = ("--checkpoint.enable", "--dump_folder", f"saved-{layout}", *LAYOUTS[layout][1])
    whole = jobs.by_config(folder, 2, *saving, converters=converters)
    rest = jobs.by_config(folder, 2, *saving, "--checkpoint.load_step", "2", converters=converters)
    assert [step for step, _, _ in rest.steps] == [3, 4]
    assert rest.steps == whole.steps[2:]
    assert rest.weights == whole.weights
    assert any(".indexer.wk." in name for name in rest.weights)


def test_an_override_does_what_the_converters_do(folder):
    options = {**SPARSE, "loss_coeff": 0.5}
    converted = jobs.by_config(folder, converters={"names": ["dsa", "rms_norm"], **options})
    given = json.dumps({"names": ["dsa", "rms_norm"], "rows_per_step": 2 * 64, **options})
    overridden = jobs.by_config(
        folder, 1, "--override.imports", f"mindspeed_dsa.integrations.torchtitan.converters={given}"
    )
    assert overridden.steps == converted.steps
    assert overridden.weights == converted.weights
