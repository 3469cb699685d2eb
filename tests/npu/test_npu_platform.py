"""Megatron's calls of CUDA, answered on tensors of the stand-in device."""

from __future__ import annotations

import pytest

from tests.npu.device import launch


def run(tmp_path, code, ranks=1, **variables):
    script = tmp_path / "script.py"
    script.write_text(code)
    return launch.run(script, ranks=ranks, variables=variables).require_success().output


ONE = """
import torch
import mindspeed_dsa
from tests.npu.device import counts

mindspeed_dsa.enable()
from mindspeed_dsa import session
assert session.current().settings.platform == "npu"

# Names of types
weight = torch.nn.Parameter(torch.ones(3, device="cuda", dtype=torch.bfloat16))
assert weight.device.type == "npu"
assert weight.type() in ["torch.cuda.HalfTensor", "torch.cuda.BFloat16Tensor"]
assert weight.data.float().type() == "torch.cuda.FloatTensor"
assert torch.ones(1).type() != "torch.cuda.FloatTensor"
assert weight.type("torch.cuda.HalfTensor").dtype == torch.float16
assert weight.type(weight.data.float().type()).dtype == torch.float32

# NVIDIA's libraries
used = torch.cuda.device_memory_used()
assert isinstance(used, int) and used >= torch.cuda.memory_allocated() > 0
with torch.cuda.nvtx.range("pairs"):
    pass
assert torch.cuda.get_device_capability() == (8, 0)

# Functions that a compiler would get, and the kernel of the softmax
from megatron.core.fusions.fused_bias_swiglu import swiglu
from megatron.core.fusions.fused_softmax import FusedScaleMaskSoftmax
from megatron.core.transformer.enums import AttnMaskType
assert not hasattr(swiglu, "_torchdynamo_orig_callable")
softmax = FusedScaleMaskSoftmax(
    input_in_fp16=False, input_in_bf16=True, attn_mask_type=AttnMaskType.causal,
    scaled_masked_softmax_fusion=True, mask_func=None, softmax_in_fp32=True, scale=None,
)
scores = torch.randn(2, 2, 64, 64, device="npu", dtype=torch.bfloat16)
softmax.mask_func = lambda scores, mask: scores.masked_fill(mask, -10000.0)
mask = torch.ones(64, 64, device="npu", dtype=torch.bool).triu(1)
assert softmax(scores, mask).float().sum(-1).sub(1).abs().max().item() < 0.02

# The norm of all gradients
from megatron.core.optimizer import clip_grads
grads = [torch.full((n, 2), 1.0, device="npu") for n in (1, 3, 4)]
buffer = torch.zeros(1, device="npu", dtype=torch.int32)
before = counts.waits()
with counts.counted() as found:
    norm, _ = clip_grads.l2_norm_impl(2048 * 32, buffer, [grads], False)
assert counts.waits() == before
assert found.of("pageable") == found.of("fallback") == 0, found.table()
assert norm.device.type == "npu" and norm.tolist() == [4.0]
mindspeed_dsa.disable()
before = counts.waits()
theirs, _ = clip_grads.l2_norm_impl(2048 * 32, buffer, [grads], False)
assert counts.waits() > before + len(grads)  # torch.tensor reads below the dispatcher: no event of counted()
assert torch.equal(norm, theirs)
assert weight.type() == "torch.npu.BFloat16Tensor"
"""


def test_one_rank(tmp_path):
    run(tmp_path, ONE)


TWO = """
import os
import torch
import torch.distributed as dist
import mindspeed_dsa
from mindspeed_dsa.features.platform.npu.hccl import device_of_hccl
from tests.npu.device import counts

rank = int(os.environ["RANK"])
mindspeed_dsa.enable()
torch.cuda.set_device(rank)
dist.init_process_group("nccl", rank=rank, world_size=2)
assert dist.get_backend() == "hccl"

# Times, as Megatron-LM reduces them
for dtype in (torch.float64, torch.float32):
    started = torch.tensor([1.7e9 + 0.25 + rank], dtype=dtype, device="cuda")
    dist.all_reduce(started, op=dist.ReduceOp.MIN)
    assert started.item() == torch.tensor(1.7e9 + 0.25, dtype=dtype).item()
    numbers = torch.tensor([[1.0, 2], [3, 4]], dtype=dtype, device="cuda") * (rank + 1)
    work = dist.all_reduce(numbers, async_op=True)
    work.wait()
    assert numbers.tolist() == [[3, 6], [9, 12]]

# The device of --exit-signal-handler
assert device_of_hccl(None)() == torch.device("npu", rank)

# Groups of high priority
from megatron.core import parallel_state
parallel_state.initialize_model_parallel(high_priority_stream_groups=["dp", "dp_cp", "ep_dp"])
group = parallel_state.get_data_parallel_group()
one = torch.ones(1, device="cuda")
dist.all_reduce(one, group=group)
assert one.item() == 2
parallel_state.destroy_model_parallel()

# Masks of vocabulary parallel layers
from megatron.core.tensor_parallel import VocabParallelEmbedding, vocab_parallel_cross_entropy
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
model_parallel_cuda_manual_seed(3)
config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, tensor_model_parallel_size=2)
embedding = VocabParallelEmbedding(16, 8, init_method=torch.nn.init.normal_, config=config)
tokens = torch.arange(16, device="cuda").view(2, 8)

def step():
    embedding.weight.grad = None
    rows = embedding(tokens)
    vocab_parallel_cross_entropy(rows.float() * 2, tokens % 16).sum().backward()
    return embedding.weight.grad.clone()

with counts.counted() as found:
    ours = step()
assert found.of("wait") == 0, found.table()
with mindspeed_dsa.enabled(fused_operators=["none"]), counts.counted() as found:
    theirs = step()
assert found.of("wait") > 0
assert torch.equal(ours, theirs)
parallel_state.destroy_model_parallel()

# Steps of the distributed optimizer, resumed
from tests.features.platform.optimizer_resume.test_step_counts import train_and_resume
mindspeed_dsa.disable()
for layout in ("dp_zero", "dp_reshardable"):
    found = train_and_resume(layout, platform="npu")
    assert {step.item() for step in found["steps"]} == {4.0}
    assert found["resumed"][0].device.type == "npu"
    assert all(map(torch.equal, found["unbroken"], found["resumed"]))
"""


@pytest.mark.parametrize("lazy", [False, pytest.param(True, marks=pytest.mark.full)])
def test_two_ranks(tmp_path, lazy):
    run(tmp_path, TWO, ranks=2, **({"STAND_IN_NPU_LAZY": "1"} if lazy else {}))
