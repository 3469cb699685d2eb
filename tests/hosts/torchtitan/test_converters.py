"""Converters of TorchTitan 0.3 on configurations only: replacements and refusals."""

from __future__ import annotations

import dataclasses

import pytest
import torch

pytest.importorskip("torchtitan.config.override", reason="TorchTitan 0.3: make test-hosts")

from torchtitan.models import deepseek_v3, llama3
from torchtitan.models.common import Linear
from torchtitan.models.common.attention import FlexAttention
from torchtitan.models.common.nn_modules import RMSNorm

from mindspeed_dsa.integrations.torchtitan import build, by_config, config_converters, converters
from mindspeed_dsa.integrations.torchtitan.latent_attention import document_starts, index_operands
from tests.hosts.torchtitan import jobs
from tests.hosts.torchtitan.config_registry import model, tiny

SMALL = {"topk": 16, "index_heads": 4, "index_dim": 32}


def convert(config, *names, **options):
    for converter in build(names, **options):
        config = converter.build().convert(config)
    return config


def test_a_misspelt_name():
    with pytest.raises(ValueError, match="no converter 'npu_dsaa', did you mean 'npu_dsa'") as refused:
        build(["npu_dsaa"])
    assert "npu_gmm or grouped_matmul" in str(refused.value)


def test_one_converter_under_two_names():
    with pytest.raises(ValueError, match="listed twice"):
        build(["npu_gmm", "grouped_matmul"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 3}, "no option 'top_k'; it has topk"),
        ({"topk": 0, "loss_coeff": -1}, "topk is 0.*loss_coeff is -1"),
        ({"stage": "dense"}, "stage is 'dense'.*sparse, warmup"),
        ({"index_dim": 8}, "index_dim is 8, less than the model's 16 rotary dimensions"),
    ],
)
def test_options_that_do_not_fit(options, message):
    with pytest.raises(ValueError, match=message):
        convert(model(), "npu_dsa", **{**SMALL, **options})


def test_options_without_their_converter():
    with pytest.raises(ValueError, match="topk are options of npu_dsa"):
        build(["npu_gmm"], topk=4)


@pytest.mark.parametrize(
    ("name", "wanted"), [("npu_dsa", "latent attention"), ("npu_gmm", "mixture of experts")]
)
def test_a_model_without_the_layers(name, wanted):
    with pytest.raises(ValueError, match=rf"{name}: .*has no .*{wanted}"):
        convert(llama3.model_registry("debugmodel").model, name)


@pytest.mark.parametrize("name", jobs.PAGE)
def test_a_device_without_a_backend(monkeypatch, name):
    monkeypatch.setattr(by_config if name == "npu_dsa" else config_converters, "device_type", "xpu")
    with pytest.raises(
        ValueError, match=rf"{name}: .*no backend for 'xpu' devices; they run on cpu, cuda, npu"
    ):
        convert(model(), name)


def test_quantised_weights():
    class Quantised(Linear):
        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config(Linear.Config):
            pass

    config = model()
    attention = config.layers[0].attention
    attention.wkv_b = by_config.derive(attention.wkv_b, Quantised.Config)
    with pytest.raises(
        ValueError, match=r"attention.wkv_b is .*Quantised.Config, where it takes Linear.Config"
    ):
        convert(config, "npu_dsa", **SMALL)
    config = convert(model(), "npu_dsa", **SMALL, loss_coeff=0)
    attention = config.layers[0].attention
    attention.wkv_b = by_config.derive(attention.wkv_b, Quantised.Config)
    with pytest.raises(ValueError, match=r"takes Linear.Config.*list LoRA after"), torch.device("meta"):
        config.build()


def test_norms_that_compute_something_else_stay():
    class Centred(RMSNorm):
        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config(RMSNorm.Config):
            gain_center: float = 1.0

    config = model()
    config.norm = by_config.derive(config.norm, Centred.Config)
    config = convert(config, "npu_rms_norm")
    assert type(config.norm) is Centred.Config
    assert type(config.layers[0].attention.kv_norm) is config_converters.FusedRMSNorm.Config
    for _, norm, parent, attribute in [*config.traverse(config_converters.FusedRMSNorm.Config)]:
        other = by_config.derive(norm, Centred.Config)
        if isinstance(parent, list):
            parent[attribute] = other
        else:
            setattr(parent, attribute, other)
    with pytest.raises(ValueError, match="has no plain RMSNorm"):
        convert(config, "npu_rms_norm")


def test_a_dispatcher_that_permutes_by_itself():
    spec = deepseek_v3.model_registry(
        "debugmodel", moe_comm_backend="hybridep", non_blocking_capacity_factor=1.0
    )
    with pytest.raises(ValueError, match=r"npu_permute: .*HybridEPTokenDispatcher.*standard"):
        convert(spec.model, "npu_permute")


def test_an_override_has_to_be_told_the_rows_of_a_step():
    config = converters(model(), names=["npu_dsa"], **SMALL)
    with pytest.raises(ValueError, match='"rows_per_step"'), torch.device("meta"):
        config.build()


def test_rows_of_a_step_are_those_of_all_ranks(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    config = tiny()
    config.parallelism.tensor_parallel_degree = 2
    converted = convert(config.model_spec.model, "npu_dsa", **SMALL)
    converted.update_from_config(config=config)
    assert {layer.attention.rows for layer in converted.layers} == {2 * 64 * 4}
    config.training.global_batch_size = 24
    converted.update_from_config(config=config)
    assert {layer.attention.rows for layer in converted.layers} == {24 * 64}


def test_documents_are_told_apart_where_the_model_tells_them():
    config = model()
    config.layers[1].attention.inner_attention = FlexAttention.Config()
    layers = convert(config, "npu_dsa", **SMALL).layers
    assert [layer.attention.documents for layer in layers] == [False, True, False, False]
    positions = torch.tensor([[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]])
    assert document_starts(positions).tolist() == [[0, 0, 0, 3, 3, 5], [0] * 6]


def test_a_document_sees_nothing_of_the_one_before_it():
    """A document's output in a pack equals its output by itself."""
    config = model().layers[0].attention
    config.inner_attention = FlexAttention.Config()
    config.rope = dataclasses.replace(config.rope, max_seq_len=24)
    options = by_config.SparseOptions(**SMALL | {"topk": 8}, loss_coeff=0)
    attention = by_config.sparse(config, options, None).build()
    torch.manual_seed(0)
    attention.init_states()
    attention.eval()
    hidden = torch.randn(1, 24, 64)
    pack = torch.tensor([[*range(10), *range(14)]])
    together = attention(hidden, None, pack)
    alone = attention(hidden[:, 10:], None, pack[:, 10:])
    torch.testing.assert_close(together[:, 10:], alone, rtol=1e-4, atol=1e-6)
    assert not torch.allclose(attention(hidden, None, torch.arange(24)[None])[:, 10:], alone, atol=1e-4)


@pytest.mark.parametrize("layout", ["halves", "pairs"])
def test_the_indexers_rotary_embedding(layout):
    """Scores depend only on the distance of query and key, as in the formula."""
    config = model().layers[0].attention
    config.rope = dataclasses.replace(config.rope, max_seq_len=64, scaling="none")
    options = by_config.SparseOptions(**SMALL, rope_layout=layout, loss_coeff=0)
    attention = by_config.sparse(config, options, None).build()
    torch.manual_seed(0)
    attention.init_states()
    hidden, latent = torch.randn(1, 1, 64), torch.randn(1, 1, 48)

    def operands(at):
        def rotate(states):
            return attention.rope(states, states, torch.tensor([[at]]))[0]

        return index_operands(attention.indexer, hidden, latent, rotate, options, 16)

    def formula(x, at):
        x = x.detach().clone()
        angles = at * 10000.0 ** (-torch.arange(0, 16, 2) / 16)
        first, second = (x[..., :8], x[..., 8:16]) if layout == "halves" else (x[..., 0:16:2], x[..., 1:16:2])
        turned = first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()
        return torch.cat([*turned, x[..., 16:]], dim=-1)

    query, key = operands(5).query[0, 0], operands(2).keys.local[0, 0]
    plain_query = attention.indexer.wq_b(latent).unflatten(-1, (4, 32))[0, 0]
    plain_key = attention.indexer.k_norm(attention.indexer.wk(hidden))[0, 0]
    expected = formula(plain_query, 5) @ formula(plain_key, 2)
    torch.testing.assert_close(query @ key, expected, rtol=1e-4, atol=1e-5)


def test_indexers_learn_in_frozen_layers_that_fsdp2_gathers_for_backward(pool):
    for stage in ("warmup", "sparse"):
        assert pool.run("tests.hosts.torchtitan.sharded:compare", world_size=2, stage=stage) == [[], []]
