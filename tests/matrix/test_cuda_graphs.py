"""Fused DSA in Megatron's own CUDA graphs, captured and replayed without a GPU (Megatron-core 0.19)."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.releases(">=0.19")

CASE = "tests.matrix.graph_steps:train"
# Bounded memory in plain PyTorch, as on GPUs without Triton.
FUSED = {"use_fused_dsa": True, "dsa_backend": "chunked"}
KERNELS = {**FUSED, "dsa_backend": "triton"}
SMALL = {"num_layers": 1, "dsa_indexer_topk": 3}
"""Overrides for Triton's interpreter."""
OTHERS = {
    "fused_operators": "all",
    "gemm_gradient_accumulation_fusion": True,
    "fused_linear_cross_entropy": True,
    "fused_linear_cross_entropy_gradient": "backward",
}


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")


def trained(pool, **arguments):
    (result,) = pool.run(CASE, 1, timeout_s=240, **arguments)
    return result


def same(result, expected, first_logged=0):
    assert len(result["losses"]) == len(expected["losses"]) == 3
    for name in ("losses", "gradients"):
        torch.testing.assert_close(result[name], expected[name], rtol=0, atol=0)
    assert result["indexer losses"][first_logged:] == expected["indexer losses"][first_logged:]
    assert len(set(expected["indexer losses"])) == 3
    assert result["operators"]
    assert not expected["operators"]


@pytest.mark.parametrize("sparse_loss", [True, False], ids=["sparse loss", "dense loss"])
def test_full_iteration(pool, sparse_loss):
    job = {"switches": FUSED, "overrides": {"dsa_indexer_use_sparse_loss": sparse_loss}}
    result = trained(pool, graphs="full_iteration", **job)
    same(result, trained(pool, **job))
    assert len(result["operators"]) == 1


@pytest.mark.parametrize("modules", [(), ("attn",)], ids=["whole layers", "attn"])
def test_layers(pool, modules):
    result = trained(pool, graphs="local", modules=modules, switches=FUSED)
    # At the end of the first step Megatron warms layers up with memory that nothing has filled, and its log
    # includes these losses.
    same(result, trained(pool, switches=FUSED), first_logged=1)
    assert len(result["operators"]) == 4  # forward and backward of two layers


def test_kernels(pool):
    job = {"switches": KERNELS, "overrides": SMALL, "microbatches": 1}
    result = trained(pool, graphs="full_iteration", **job)
    same(result, trained(pool, **job))
    (operators,) = result["operators"]
    assert {"score_slab_kernel", "select_kernel", "forward_kernel", "backward_keys_kernel"} <= {*operators}


def test_with_other_features(pool):
    job = {"switches": {**FUSED, **OTHERS}}
    same(trained(pool, graphs="full_iteration", **job), trained(pool, **job))
