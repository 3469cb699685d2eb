"""Megatron functions under the CPU platform's redirections."""

from __future__ import annotations

import sys
import textwrap

import pytest
import torch

from tests.support import warm


@pytest.mark.full
def test_fused_functions_of_megatron_stay_eager():
    pytest.importorskip("megatron.core")
    code = """
    import mindspeed_dsa, torch
    compiled = torch.compile
    mindspeed_dsa.enable(mindspeed_platform="cpu")
    from megatron.core.fusions.fused_bias_swiglu import swiglu
    assert not hasattr(swiglu, "_torchdynamo_orig_callable"), "compiled"
    assert torch.compile is compiled
    import megatron.core.jit as jit
    mindspeed_dsa.finalize()
    assert torch.compile is compiled
    mindspeed_dsa.disable()
    assert jit.jit_fuser is compiled
    """
    done = warm.run([sys.executable, "-c", textwrap.dedent(code)])
    assert done.returncode == 0, done.stderr


def test_the_tracker_keeps_streams_of_random_numbers_apart(redirected, caplog):
    random = pytest.importorskip("megatron.core.tensor_parallel.random")
    tracker = random.CudaRNGStatesTracker()
    tracker.add("model", 7)
    torch.manual_seed(5)
    with tracker.fork("model"):
        inside = torch.rand(4)
    outside = torch.rand(4)
    with tracker.fork("model"):
        further = torch.rand(4)
    torch.manual_seed(5)
    assert torch.equal(outside, torch.rand(4))
    torch.manual_seed(7)
    assert torch.equal(torch.cat([inside, further]), torch.cat([torch.rand(4), torch.rand(4)]))
    assert "CPU RNG state changed" not in caplog.text
    with pytest.raises(ZeroDivisionError), tracker.fork("model"):
        1 / 0  # noqa: B018
    random.logging.getLogger(random.__name__).warning("CPU RNG state changed for another reason")
    assert "for another reason" in caplog.text


def test_recomputation_in_megatron_replays_dropout(redirected):
    random = pytest.importorskip("megatron.core.tensor_parallel.random")
    random.initialize_rng_tracker(force_reset=True)
    random.get_cuda_rng_tracker().add("model-parallel-rng", 9)
    x = torch.ones(64, requires_grad=True)

    def block(value: torch.Tensor) -> torch.Tensor:
        with random.get_cuda_rng_tracker().fork():
            value = torch.nn.functional.dropout(value, 0.5)
        return torch.nn.functional.dropout(value, 0.5) * value

    out = random.checkpoint(block, False, x)
    torch.rand(7)
    out.sum().backward()
    expected = torch.where(out == 0, 0.0, 2 * out.detach())
    assert torch.equal(x.grad, expected)
    assert 0 < int((out == 0).sum()) < 64


def test_softmax_takes_the_torch_path(redirected):
    softmax = pytest.importorskip("megatron.core.fusions.fused_softmax")
    from megatron.core.transformer.enums import AttnMaskType

    module = softmax.FusedScaleMaskSoftmax(
        input_in_fp16=False,
        input_in_bf16=True,
        attn_mask_type=AttnMaskType.causal,
        scaled_masked_softmax_fusion=True,
        mask_func=lambda scores, mask: scores.masked_fill(mask, -10000.0),
        softmax_in_fp32=True,
        scale=None,
    )
    scores = torch.zeros(1, 4, 32, 32, dtype=torch.bfloat16)  # batch, heads, queries, keys
    probabilities = module(scores, None)
    assert torch.allclose(probabilities[0, 0, 3, :5].float(), torch.tensor([0.25, 0.25, 0.25, 0.25, 0.0]))


def test_a_writer_of_checkpoints_is_forked_for_each_save(redirected):
    # A persistent writer needs a device, and training would change the tensors that it reads.
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue, TemporalAsyncCaller

    queue = AsyncCallsQueue(persistent=True)
    assert type(queue._get_async_caller()) is TemporalAsyncCaller
    assert queue._get_async_caller() is not queue._get_async_caller()
