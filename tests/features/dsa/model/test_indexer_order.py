from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.support import model
from tests.support.model import SEQUENCE

CASES = "tests.features.dsa.core_cases"


def rotated(x: Tensor, size: int, first: bool, interleaved: bool) -> Tensor:
    """Rotate ``size`` dimensions of ``[seq, ..., dim]`` by complex multiplication, in fp64.

    With ``interleaved``, neighbours are real and imaginary part; otherwise the two halves are.
    """
    x = x.double()
    rest = x.size(-1) - size
    rotary, plain = x.split([size, rest], -1) if first else x.split([rest, size], -1)[::-1]
    pairs = rotary.unflatten(-1, (size // 2, 2)) if interleaved else rotary.unflatten(-1, (2, size // 2)).mT
    frequency = 10000.0 ** (-torch.arange(0, size, 2).double() / size)
    angle = torch.arange(x.size(0)).double()[:, None, None, None] * frequency
    turned = torch.view_as_real(
        torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angle), angle)
    )
    # Megatron leaves dimensions de-interleaved, because scores do not depend on their order.
    result = turned.mT.flatten(-2)
    return torch.cat([result, plain] if first else [plain, result], -1)


@pytest.mark.parametrize(
    ("first", "interleaved"),
    [(False, False), (True, False), (True, True)],
    ids=["Megatron", "DeepSeek", "GLM"],
)
def test_rotary_dimensions(pool, first, interleaved):
    switches = {"dsa_indexer_rope_first": first, "dsa_indexer_rope_interleaved": interleaved}
    (case,) = pool.run(f"{CASES}:indexer_rotary", 1, seed=1, switches=switches)
    expected = rotated(case["input"], 8, first=first, interleaved=interleaved or not first)
    torch.testing.assert_close(case["output"].double(), expected, rtol=1e-5, atol=1e-5)


def test_the_two_layouts_differ(pool):
    (host,) = pool.run(f"{CASES}:indexer_rotary", 1, seed=1, switches={})
    (deepseek,) = pool.run(f"{CASES}:indexer_rotary", 1, seed=1, switches={"dsa_indexer_rope_first": True})
    assert not torch.allclose(host["output"], deepseek["output"], atol=0.1)


@pytest.mark.parametrize("normalization", ["RMSNorm", pytest.param("LayerNorm", marks=pytest.mark.full)])
@pytest.mark.parametrize("zero_centered", [False, True])
def test_the_indexer_reads_the_normalised_query(pool, normalization, zero_centered):
    overrides = {"normalization": normalization, "layernorm_zero_centered_gamma": zero_centered}
    (case,) = pool.run(
        f"{CASES}:indexer_input", 1, switches={"dsa_indexer_normalised_query": True}, overrides=overrides
    )
    latent = case["latent"].double()
    if normalization == "LayerNorm":
        latent = latent - latent.mean(-1, keepdim=True)
    weight = case["weight"].double() + zero_centered
    expected = latent / (latent.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    if case["bias"] is not None:
        expected = expected + case["bias"].double()
    torch.testing.assert_close(case["qr"].double(), expected, rtol=1e-5, atol=1e-5)


def test_by_default_it_reads_the_query_before_its_norm(pool):
    (case,) = pool.run(f"{CASES}:indexer_input", 1, switches={})
    assert torch.equal(case["qr"], case["latent"])


def test_the_norm_is_not_trained_by_the_indexer(pool):
    """Both models have the same loss except for the selection, so the norm's gradient is equal."""
    # Selects all keys, so the indexer cannot change the model.
    everything = {"dsa_indexer_topk": SEQUENCE}
    (host,) = pool.run(f"{CASES}:indexer_input", 1, switches={}, overrides=everything)
    (deepseek,) = pool.run(
        f"{CASES}:indexer_input", 1, switches={"dsa_indexer_normalised_query": True}, overrides=everything
    )
    assert torch.equal(host["gradient"], deepseek["gradient"])


def configured_too_early() -> None:
    """Build a model as slime does that loads our module by ``--spec``. Runs in the pool's workers."""
    cfg = model.config()
    model.start({})
    model.gpt_model(cfg)


def test_a_configuration_from_before_the_features_is_refused_in_words(pool):
    (error,) = pool.run("tests.support.model:error_of", 1, case=f"{__name__}:configured_too_early")
    assert "configuration was made before mindspeed_dsa.enable() was called" in error
