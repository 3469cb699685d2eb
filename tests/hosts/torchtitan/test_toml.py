"""TorchTitan 0.2's own trainer with the configuration of its page, and each of its converters."""

from __future__ import annotations

import pytest

from tests.hosts.torchtitan import jobs

pytestmark = pytest.mark.skipif(not jobs.OLD.is_dir(), reason="TorchTitan 0.2: make test-hosts")
CALLED = {
    "npu_dsa": {"deepseek_sparse_attention"},
    "rms_norm": {"rms_norm"},
    "npu_permute": {"permute", "unpermute"},
    "grouped_matmul": {"grouped_matmul"},
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
    ours = jobs.by_model(folder, 2, converters=["npu_dsa", "npu_rms_norm", "npu_permute", "npu_gmm"], **SMALL)
    assert set(ours.calls) == set().union(*CALLED.values())
    assert len(ours.indexer_losses) == 8
    assert all(loss > 0 for loss in ours.indexer_losses)


def test_tensor_parallel_ranks(folder):
    stock = jobs.by_model(folder, 2, *TP, converters=[], **DENSE)
    ours = jobs.by_model(folder, 2, *TP, converters=["npu_dsa", "npu_rms_norm"], **DENSE)
    assert ours.steps == [pytest.approx(step, rel=1e-5) for step in stock.steps]


@pytest.mark.parametrize(
    ("converters", "arguments", "message"),
    [
        (["npu_dsa"], ("--model.flavor", "tiny_flex"), "npu_dsa: layers.0.attention has attn_type 'flex'"),
        (["npu_dsa"], ("--model.name", "llama3", "--model.flavor", "debugmodel"), "has no latent attention"),
        (["npu_gmm", "grouped_matmul"], (), "listed twice"),
    ],
)
def test_what_is_refused(folder, converters, arguments, message):
    (folder / "job.toml").write_text(jobs.toml(converters, SMALL))
    given = ["--job.config_file", "job.toml", *arguments]
    done = jobs.start(folder, 1, given, PYTHONPATH=str(jobs.OLD))
    assert done.returncode != 0
    assert message in done.stdout + done.stderr
