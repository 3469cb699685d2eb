"""Rotary embeddings of TorchTitan 0.3 computed by our operator, compared with its own."""

from __future__ import annotations

import dataclasses

import pytest
import torch

pytest.importorskip("torchtitan.config.override", reason="TorchTitan 0.3: make test-hosts")

from torchtitan.models import llama3
from torchtitan.models.common.rope import ComplexRoPE, CosSinRoPE

from mindspeed_dsa.integrations.torchtitan import build, config_layers
from mindspeed_dsa.integrations.torchtitan.config_converters import replace_configs
from mindspeed_dsa.ops.rotary import backends
from tests.hosts.torchtitan.config_registry import model

BATCH, ROWS, HEADS, DIM = 2, 12, 3, 16
KINDS = {ComplexRoPE: config_layers.PairsRotary, CosSinRoPE: config_layers.HalvesRotary}
POSITIONS = {
    "none": None,
    "one row": torch.arange(ROWS).flip(0)[None],
    "packs": torch.tensor([[*range(5), *range(ROWS - 5)], [*range(ROWS)]]),
}


def run(rope, dtype: torch.dtype, positions: torch.Tensor | None) -> list[torch.Tensor]:
    """Return rotated query and key, and the gradients of both."""
    generator = torch.Generator().manual_seed(0)
    leaves = [
        torch.randn(BATCH, ROWS, heads, DIM, generator=generator).to(dtype).requires_grad_()
        for heads in (HEADS, 1)
    ]
    rotated = rope(*leaves, positions)
    sum((x.float().sin() * (1 + number)).sum() for number, x in enumerate(rotated)).backward()
    return [*rotated, *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_rotated_states_and_gradients_are_bitwise_those_of_stock(kind, dtype, positions):
    options = {"dim": DIM, "max_seq_len": ROWS, "scaling": "yarn", "rope_factor": 4.0}
    stock, ours = (each.Config(**options).build() for each in (kind, KINDS[kind]))
    expected = run(stock, dtype, POSITIONS[positions])
    for found, wanted in zip(run(ours, dtype, POSITIONS[positions]), expected, strict=True):
        assert found.dtype is wanted.dtype is dtype
        assert found.equal(wanted)


def test_the_operator_rotates(monkeypatch):
    rope = config_layers.PairsRotary.Config(dim=DIM, max_seq_len=ROWS).build()
    monkeypatch.setattr(backends.Cpu, "forward", lambda self, tensor, *tables: torch.zeros_like(tensor))
    assert not any(x.any() for x in run(rope, torch.float32, None)[:2])


def test_every_embedding_of_a_model_is_replaced():
    for config in (model(), llama3.model_registry("debugmodel").model):
        (converter,) = build(["npu_rope"])
        converted = converter.build().convert(config)
        kinds = {type(each) for _, each, _, _ in converted.traverse(ComplexRoPE.Config)}
        assert kinds == {config_layers.PairsRotary.Config}


def test_an_embedding_of_another_class():
    class Other(ComplexRoPE):
        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config(ComplexRoPE.Config):
            pass

    config = model()
    options = {"dim": DIM, "max_seq_len": ROWS}
    replace_configs(config, ComplexRoPE.Config, lambda name, rope: Other.Config(**options))
    (converter,) = build(["npu_rope"])
    with pytest.raises(ValueError, match=r"npu_rope: .*rope is .*Other.Config, where it takes"):
        converter.build().convert(config)
