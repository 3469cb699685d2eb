"""TorchTitan 0.2's own trainer with the configuration of its page, and each of its converters."""

from __future__ import annotations

from functools import cache

import pytest

from tests.hosts.torchtitan import jobs

pytestmark = pytest.mark.skipif(not jobs.OLD.is_dir(), reason="TorchTitan 0.2: make test-hosts")
CALLED = {
    "npu_dsa": {"deepseek_sparse_attention"},
    "rms_norm": {"rms_norm"},
    "npu_permute": {"permute", "unpermute"},
    "grouped_matmul": {"grouped_matmul"},
    "npu_rope": {"rotate"},
}
SMALL = {"topk": 16, "index_heads": 4, "index_dim": 32}
DENSE = {**SMALL, "topk": 64, "loss_coeff": 0}
TP = ("--parallelism.tensor_parallel_degree", "2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return jobs.files(tmp_path_factory.mktemp("torchtitan-0.2"))


@pytest.fixture(scope="module")
def stock(folder):
    return jobs.by_model(folder, converters=[], **DENSE)


@pytest.mark.parametrize("name", CALLED)
def test_losses_with_each_converter_are_those_without(folder, stock, name):
    ours = jobs.by_model(folder, converters=[name], **DENSE)
    assert set(ours.calls) == CALLED[name]
    assert stock.calls == {}
    # Stock computes its experts in fp32 one by one, and in bf16 together.
    relative = 2e-3 if name == "grouped_matmul" else 1e-5
    assert len(stock.steps) == 4
    assert ours.steps == [pytest.approx(step, rel=relative) for step in stock.steps]


def test_the_pages_list_with_an_indexer_that_learns(folder):
    ours = jobs.by_model(folder, 2, converters=list(jobs.PAGE), **SMALL)
    assert set(ours.calls) == set().union(*CALLED.values())
    assert len(ours.indexer_losses) == 8
    assert all(loss > 0 for loss in ours.indexer_losses)


def test_tensor_parallel_ranks(folder):
    stock = jobs.by_model(folder, 2, *TP, converters=[], **DENSE)
    ours = jobs.by_model(folder, 2, *TP, converters=["npu_dsa", "npu_rms_norm"], **DENSE)
    assert ours.steps == [pytest.approx(step, rel=1e-5) for step in stock.steps]


PP = ("--parallelism.pipeline_parallel_degree", "2")
CP = ("--parallelism.context_parallel_degree", "2")
# Data parallel ranks get different documents: make all documents the same.
SAME = ("--training.local_batch_size", "1", "--training.dataset_path", "same")
CONTEXT_PARALLEL = {
    "cp": (2, ()),
    "cp-tp": (4, TP),
    "cp-fsdp": (4, SAME),
    "cp-pp": (4, PP),
}
"""Ranks, and arguments beside those of context parallelism."""
WITHOUT = {"cp-pp": (2, PP)}
"""Layouts that are compared with more than one process: with a pipeline 0.2 does not divide gradients."""


@pytest.fixture(scope="module")
def seeded(folder):
    """Return a cached function that runs a job from the same weights, on a model without experts."""
    chosen = {**SMALL, "topk": 8}
    (folder / "job.toml").write_text(jobs.toml(["npu_dsa"], chosen))
    given = ["--job.config_file", "job.toml", "--model.flavor", "tiny_dense", "--checkpoint.enable"]
    seed = [*given, "--checkpoint.create_seed_checkpoint", "--job.dump_folder", "seed"]
    done = jobs.start(folder, 1, seed, PYTHONPATH=str(jobs.OLD))
    assert done.returncode == 0, done.stderr[-4000:]

    @cache
    def run(ranks: int, coefficient: float, *arguments: str) -> jobs.Record:
        load = ("--checkpoint.enable", "--checkpoint.initial_load_path", f"{folder}/seed/checkpoint/step-0")
        dump = ("--job.dump_folder", f"dump-{len(list(folder.iterdir()))}", "--training.steps", "2")
        given = ("--model.flavor", "tiny_dense", *load, *dump, *arguments)
        return jobs.by_model(folder, ranks, *given, converters=["npu_dsa"], **chosen, loss_coeff=coefficient)

    return run


@pytest.mark.parametrize("name", jobs.quick_on_two(CONTEXT_PARALLEL))
def test_context_parallel_ranks_have_the_gradients_of_one_process(seeded, name):
    ranks, arguments = CONTEXT_PARALLEL[name]
    one_rank, others = WITHOUT.get(name, (1, SAME if arguments == SAME else ()))
    one, ours = seeded(one_rank, 1.0, *others), seeded(ranks, 1.0, *CP, *arguments)
    assert any(".indexer." in key for key in one.gradients)
    jobs.assert_one_process(ours, one)


def test_pipeline_ranks_have_the_gradients_of_one_process(seeded):
    """With a pipeline, TorchTitan sums losses over the tokens of a step, as does the indexer's."""
    one, ours = seeded(1, 1.0), seeded(2, 1.0, *PP)
    tokens = 2 * 64
    assert ours.gradients.keys() == one.gradients.keys()
    assert any(".indexer." in name for name in one.gradients)
    for name, gradient in one.gradients.items():
        error = (ours.gradients[name] / tokens - gradient).abs().max() / gradient.abs().max()
        # An indexer's gradient is a difference of two distributions, which are nearly equal here.
        assert error < (5e-5 if ".indexer." in name else 1e-5), f"{name}: {error}"


def test_context_parallel_transfers_are_those_of_the_formula(seeded):
    layers, steps, batch, length, ranks = 4, 2, 2, 64, 2
    # Latent, rotary dimensions and index key of a token, fp32. DeepSeek-V3.2: 512 + 64 + 128 = 704.
    tokens, keys, index_keys = layers * steps * batch * length * (ranks - 1) // ranks, 4 * (32 + 16), 4 * 32
    of_both = tokens * (keys + index_keys)
    assert seeded(2, 1.0, *CP).moved == {"keys": of_both, "keys again": of_both, "gradients": of_both}
    # Without the indexer's loss, backward does not read the index keys.
    of_keys = tokens * keys
    assert seeded(2, 0.0, *CP).moved == {"keys": of_both, "keys again": of_keys, "gradients": of_keys}


@pytest.mark.parametrize("order", [["npu_dsa", "npu_rope"], ["npu_rope", "npu_dsa"]])
def test_both_converters_of_attention_in_either_order(folder, stock, order):
    ours = jobs.by_model(folder, converters=order, **DENSE)
    assert set(ours.calls) == {"deepseek_sparse_attention", "rotate"}
    assert ours.steps == [pytest.approx(step, rel=1e-5) for step in stock.steps]


@pytest.mark.parametrize("mode", ["none", "full"])
def test_compiled_layers_have_no_graph_break(folder, mode):
    """TorchTitan compiles with `fullgraph`, so that a break would end the job."""
    compiled = ("--compile.enable", "--compile.backend", "aot_eager", "--activation_checkpoint.mode", mode)
    eager = jobs.by_model(folder, converters=list(jobs.PAGE), **SMALL)
    ours = jobs.by_model(folder, 1, *compiled, converters=list(jobs.PAGE), **SMALL)
    assert ours.parts[0]["graphs"] > 0 == ours.parts[0]["breaks"]
    assert ours.steps == [pytest.approx(step, rel=1e-5) for step in eager.steps]
    [learned], [expected] = (job.parts[0]["indexer_losses"] for job in (ours, eager))
    assert learned == pytest.approx(expected, rel=1e-3)  # under the layers' own names


SWAP = ("--optimizer.npu_swap_optimizer", "--optimizer.npu_swap_optimizer_times", "4")


def test_moments_on_the_host(folder):
    """Losses and checkpoints are those of TorchTitan's optimizer, and a job goes on from the other's."""

    def run(name: str, *arguments: str) -> jobs.Record:
        saving = ("--checkpoint.enable", "--checkpoint.interval", "2", "--job.dump_folder", name)
        return jobs.by_model(folder, 2, *saving, *arguments, converters=[], **DENSE)

    stock, ours = run("stock"), run("ours", *SWAP)
    assert ours.steps == stock.steps
    assert all(part["moments"]["device"] == 0 < part["moments"]["host"] for part in ours.parts)
    saved = [jobs.checkpoint(folder / name / "checkpoint" / "step-2") for name in ("ours", "stock")]
    assert any(name.endswith(".exp_avg_sq") for name in saved[1])
    jobs.assert_equal(*saved)
    for name, arguments in (("stock", SWAP), ("ours", ())):
        rest = run(name, "--checkpoint.load_step", "2", *arguments)
        assert rest.steps == stock.steps[2:]
        assert rest.weights == stock.weights


@pytest.mark.parametrize(
    ("converters", "arguments", "message"),
    [
        (["npu_dsa"], ("--model.flavor", "tiny_flex"), "npu_dsa: layers.0.attention has attn_type 'flex'"),
        (["npu_dsa"], ("--model.name", "llama3", "--model.flavor", "debugmodel"), "has no latent attention"),
        (["npu_gmm", "grouped_matmul"], (), "listed twice"),
        (
            ["npu_dsa"],
            (*CP, "--parallelism.context_parallel_load_balancer", "ptrr"),
            "'ptrr' deals out tokens",
        ),
        (["npu_dsa"], (*CP, "--compile.enable"), "leave 'model' out of compile.components"),
        ([], (*SWAP, "--optimizer.early_step_in_backward"), "leave out optimizer.early_step_in_backward"),
        ([], (*SWAP, "--training.dtype", "bfloat16"), "set training.dtype to float32"),
    ],
)
def test_what_is_refused(folder, converters, arguments, message):
    (folder / "job.toml").write_text(jobs.toml(converters, SMALL))
    given = ["--job.config_file", "job.toml", *arguments]
    done = jobs.start(folder, 2 if CP[0] in arguments else 1, given, PYTHONPATH=str(jobs.OLD))
    assert done.returncode != 0
    assert message in done.stdout + done.stderr
