"""Sparse attention on TorchTitan 0.3's context parallel ranks: one process's results, transfers, refusals."""

from __future__ import annotations

import json
from functools import cache
from types import SimpleNamespace

import pytest
import torch

from tests.hosts.torchtitan import jobs

pytest.importorskip("torchtitan.config.override", reason="TorchTitan 0.3: make test-hosts")

from torchtitan.models.common.attention import FlexAttention

from mindspeed_dsa.context_parallel import algorithms
from mindspeed_dsa.integrations.torchtitan import build, converters
from mindspeed_dsa.integrations.torchtitan.context import context_of
from tests.hosts.torchtitan import config_registry
from tests.hosts.torchtitan.context_cases import Ring, register_page

CASES = "tests.hosts.torchtitan.context_cases"
SPARSE = {"names": ["npu_dsa"], "topk": 8, "index_heads": 4, "index_dim": 32, "loss_coeff": 1.0}
CP = ("--parallelism.context_parallel_degree", "2")
TP = ("--parallelism.tensor_parallel_degree", "2")
PP = ("--parallelism.pipeline_parallel_degree", "2")
# Data parallel ranks get different documents: make all documents the same.
SAME = ("--training.local_batch_size", "1", "--dataloader.dataset_path", "same")
SHORT = ("--dataloader.dataset_path", "short")
LAYOUTS = {
    "cp": (2, CP, (), "sdpa"),
    "cp, consecutive rows": (2, (*CP, "--parallelism.context_parallel_load_balancer", "None"), (), "sdpa"),
    "cp, documents": (2, CP, SHORT, "flex"),
    "cp-tp": (4, (*CP, *TP), (), "sdpa"),
    "cp-fsdp": (4, CP, SAME, "sdpa"),
    "cp-pp": (4, (*CP, *PP), (), "sdpa"),
}
"""Ranks, arguments of the layout, those of the data, and inner attention of the model."""


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """Return a cached function that runs a job from the same weights.

    The model has no experts, unless converters are given. TorchTitan multiplies their tokens in bfloat16, so
    that sums over ranks round differently.
    """
    folder = jobs.files(tmp_path_factory.mktemp("torchtitan-cp"))
    start = ["--module", "tests.hosts.torchtitan", "--config", "converted", *jobs.BACKEND]
    start.append("--checkpoint.enable")

    @cache
    def seed(converters: str, dense: str) -> str:
        dump = f"seed-{dense}"
        given = [*start, "--checkpoint.create_seed_checkpoint", "--dump_folder", dump]
        done = jobs.start(folder, 1, given, TITAN_CONVERTERS=converters, TITAN_DENSE=dense)
        assert done.returncode == 0, done.stderr[-4000:]
        return f"{folder}/{dump}/checkpoint/step-0"

    @cache
    def run(
        ranks: int, attention: str, *arguments: str, names: tuple[str, ...] = ("npu_dsa",)
    ) -> jobs.Record:
        converters, dense = json.dumps({**SPARSE, "names": names}), "4" if len(names) == 1 else "1"
        load = ("--checkpoint.initial_load_path", seed(converters, dense), "--training.steps", "2")
        dump = ("--dump_folder", f"dump-{len(list(folder.iterdir()))}")
        environment = {"TITAN_CONVERTERS": converters, "TITAN_DENSE": dense, "TITAN_ATTENTION": attention}
        return jobs.train(folder, ranks, [*start, *load, *dump, *arguments], **environment)

    return run


@pytest.mark.parametrize("name", jobs.quick_on_two(LAYOUTS))
def test_losses_and_gradients_are_those_of_one_process(job, name):
    ranks, layout, data, attention = LAYOUTS[name]
    one, ours = job(1, attention, *data), job(ranks, attention, *layout, *data)
    assert any(".indexer." in key for key in one.gradients)
    jobs.assert_one_process(ours, one)


def test_all_converters_beside_expert_parallel_ranks(job):
    names = ("npu_dsa", "npu_rms_norm", "npu_permute", "npu_gmm")
    arguments = (*CP, "--parallelism.expert_parallel_degree", "2")
    one, ours = job(1, "sdpa", names=names), job(2, "sdpa", *arguments, names=names)
    assert ours.moved["keys"] > 0
    assert ours.steps == [pytest.approx(step, rel=1e-5) for step in one.steps]


def test_documents_change_the_gradients(job):
    """The comparison with documents would not notice if both jobs ignored them."""
    name = "layers.0.attention.wkv_b.weight"
    told, untold = (job(1, attention, *SHORT).gradients[name] for attention in ("flex", "sdpa"))
    assert (told - untold).abs().max() > 1e-2 * untold.abs().max()


def test_transfers_are_those_of_the_formula(job):
    """By default TorchTitan computes a layer again in backward, which gathers again once."""
    layers, steps, batch, length, ranks = 4, 2, 2, 64, 2
    # Latent, rotary dimensions and index key of a token. DeepSeek-V3.2: 512 + 64 + 128 = 704.
    width = config_registry.WIDTHS["kv_lora_rank"] + config_registry.WIDTHS["qk_rope_head_dim"]
    width += SPARSE["index_dim"]
    received = layers * steps * batch * length * (ranks - 1) // ranks * width * torch.float32.itemsize
    assert job(2, "sdpa", *CP).moved == {"keys": received, "keys again": received, "gradients": received}


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_keys_are_freed_and_gathered_again_once(pool, is_checkpointed):
    # Two keys, each in forward and in backward.
    assert pool.run(f"{CASES}:gathers", 2, is_checkpointed=is_checkpointed) == [(4, 0)] * 2


@pytest.mark.parametrize(
    "case",
    [
        {},
        {"balancer": None},
        {"documents": True},
        {"documents": True, "balancer": None},
        {"stage": "warmup"},
        {"topk": 24},
        {"loss_coeff": 0.0},
        {"algorithm": "whole_sequences"},
        {"algorithm": "whole_sequences", "loss_coeff": 0.0},
    ],
    ids=str,
)
def test_a_layer_has_the_results_of_one_process(pool, case):
    assert pool.run(f"{CASES}:compare", 2, **case) == [[], []]


def test_transfers_are_hidden_behind_the_projections_of_queries(pool):
    for forward, backward in pool.run(f"{CASES}:order", 2):
        # Of the latent key, of the index key.
        assert forward == ["start", "start", "indexer.wq_b", "wq_b", "wait", "wait", "wo"]
        # Freed keys are gathered again behind the output projection. Attention then finds them there.
        waits = ["again", "again"]
        assert backward[:5] == [*waits, "wo", *waits]
        assert backward[5:] == ["sum", "sum", "wq_b", "indexer.wq_b", "summed", "summed"]


# -- refusals ----------------------------------------------------------------------------------


def converted(**options):
    config = config_registry.tiny()
    config.parallelism.context_parallel_degree = 2
    config.parallelism.spmd_backend = "partial_dtensor"
    (converter,) = build(["npu_dsa"], **{name: x for name, x in SPARSE.items() if name != "names"} | options)
    config.model_spec.model.layers[0].attention.inner_attention = FlexAttention.Config()
    return config, converter.build().convert(config.model_spec.model)


def test_a_configuration_that_is_not_refused():
    config, model = converted()
    model.update_from_config(config=config)
    assert {layer.attention.load_balancer for layer in model.layers} == {"headtail"}


@pytest.mark.parametrize(
    ("section", "name", "value", "message"),
    [
        ("parallelism", "context_parallel_load_balancer", "ptrr", "'ptrr' deals out tokens by a mask"),
        ("parallelism", "spmd_backend", "spmd_types", "needs spmd_backend 'partial_dtensor'"),
        ("compile", "enable", True, "leave 'model' out of compile.components"),
    ],
)
def test_settings_that_are_refused(section, name, value, message):
    config, model = converted()
    setattr(getattr(config, section), name, value)
    with pytest.raises(ValueError, match=message):
        model.update_from_config(config=config)


def test_documents_with_a_strategy_of_ones_own():
    register_page()
    config, model = converted(context_parallel_algo="whole_sequences")
    with pytest.raises(ValueError, match="'whole_sequences' is not told of documents"):
        model.update_from_config(config=config)


def test_a_strategy_that_nobody_has_registered():
    with pytest.raises(ValueError, match=r"context_parallel_algo is 'ring'.*name of a registered strategy"):
        converted(context_parallel_algo="ring")


def test_a_strategy_that_attends_by_itself():
    algorithms.register("ring of ones own", Ring)
    try:
        with pytest.raises(ValueError, match="attends in several steps"):
            context_of(SimpleNamespace(size=lambda: 2), "headtail", "ring of ones own")
    finally:
        algorithms.unregister("ring of ones own")


def test_an_override_is_not_told_of_the_layout():
    options = {name: x for name, x in SPARSE.items() if name != "names"}
    model = converters(config_registry.model(), names=["npu_dsa"], rows_per_step=128, **options)
    with torch.device("meta"):
        attention = model.layers[0].attention.build()
    mesh = SimpleNamespace(size=lambda: 2)
    with pytest.raises(ValueError, match=r"context_parallel_degree 2: an override .*model_registry"):
        attention.parallelize(SimpleNamespace(cp_enabled=True, get_mesh=lambda name: mesh))


def test_sequences_that_were_split_by_somebody_else():
    config, model = converted(loss_coeff=0)
    model.update_from_config(config=config)
    attention = model.layers[0].attention.build()
    with pytest.raises(ValueError, match="32 tokens of sequences of 64, on 1 context parallel ranks"):
        attention(torch.randn(1, 32, config_registry.DIM))
