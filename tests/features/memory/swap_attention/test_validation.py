"""Settings that swapping attention refuses before training, and its host memory estimate."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mindspeed_dsa.features.memory.swap_attention.feature import FEATURE, Options, least_host_bytes
from mindspeed_dsa.platforms import host_pool

GIB = 1 << 30
LARGE = {
    "seq_length": 8192,
    "micro_batch_size": 2,
    "num_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "bf16": True,
}


@pytest.fixture(autouse=True)
def _enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_pool, "host_memory_free", lambda: 1 << 50)


def problems(**arguments: Any) -> list[str]:
    return list(FEATURE.problems(SimpleNamespace(**{"swap_attention": True, **arguments})))


def least(args: SimpleNamespace) -> int | None:
    return least_host_bytes(args, Options.of(args))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"recompute_granularity": "full", "recompute_method": "uniform"}, "nothing left to swap"),
        ({"cpu_offloading": True}, "--cpu-offloading-num-layers both take"),
        ({"fine_grained_activation_offloading": True}, "--fine-grained-activation-offloading both take"),
        ({"cuda_graph_impl": "local"}, "--cuda-graph-impl local: "),
        ({"enable_cuda_graph": True}, "--enable-cuda-graph: "),
        ({"overlap_moe_expert_parallel_comm": True}, "takes apart"),
        ({"use_megatron_fsdp": True}, "--use-megatron-fsdp: weights"),
        ({"fp8": "e4m3", "fp8_param_gather": True}, "omit --fp8-param-gather"),
        (
            {"swap_modules": "self_attention,mlp"},
            "'mlp' cannot be swapped; use names out of input_norm, self_",
        ),
        ({"swap_modules": "self_attentio"}, "'self_attentio' cannot be swapped"),
        ({"swap_attention": False, "swap_modules": "self_attention"}, "no effect without --swap-attention"),
        ({"swap_attention_min_bytes": -1}, "--swap-attention-min-bytes -1: use a number of bytes"),
        ({"swap_attention_num_layers": 5, "num_layers": 4}, "--swap-attention-num-layers 5: use a number"),
        ({"swap_attention": False, "swap_attention_num_layers": 2}, "has no effect without --swap-attention"),
    ],
)
def test_what_is_refused(arguments, says):
    (problem,) = problems(**arguments)
    assert says in problem


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"swap_modules": "input_norm,self_attention,post_attention_norm", "cuda_graph_impl": "none"},
        {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "layernorm", "mlp"]},
        {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
        {"recompute_activation_function": True, "recompute_norm": True, **LARGE},
        {"overlap_moe_expert_parallel_comm": True, "moe_fb_overlap": True},
        {"use_torch_fsdp2": True},
    ],
)
def test_what_goes_together(arguments):
    assert problems(**arguments) == []


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        # query, key, value and output: 8192 x 2 tokens x 4096 wide x 2 bytes each, in 32 layers
        ({}, 4 * 128 * 32 / 1024),
        ({"group_query_attention": True, "num_query_groups": 8}, 2.5 * 128 * 32 / 1024),
        ({"tensor_model_parallel_size": 4, "context_parallel_size": 2}, 4 * 128 * 32 / 1024 / 8),
        ({"swap_attention_num_layers": 3}, 4 * 128 * 3 / 1024),
        ({"bf16": False}, 8 * 128 * 32 / 1024),
        # blocks keep the layers behind the first 12 of each chunk
        (
            {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 12},
            4 * 128 * 20 / 1024,
        ),
        # a first stage of two layers
        (
            {
                "pipeline_model_parallel_size": 4,
                "decoder_first_pipeline_num_layers": 2,
                "global_batch_size": 32,
                "data_parallel_size": 2,
            },
            4 * 128 * 2 * 4 / 1024,
        ),
        # four stages of eight layers: four microbatches in flight, or all if there are fewer
        (
            {"pipeline_model_parallel_size": 4, "global_batch_size": 32, "data_parallel_size": 2},
            4 * 128 * 8 * 4 / 1024,
        ),
        (
            {"pipeline_model_parallel_size": 4, "global_batch_size": 8, "data_parallel_size": 2},
            4 * 128 * 8 * 2 / 1024,
        ),
        # a batch size ramp-up, whose largest step has four microbatches
        (
            {
                "pipeline_model_parallel_size": 4,
                "global_batch_size": 4,
                "data_parallel_size": 2,
                "step_batch_size_schedule": "0:8 1B:32",
            },
            4 * 128 * 8 * 4 / 1024,
        ),
        # query and output of 32 heads, 128 + 64 and 128 wide
        (
            {
                "multi_latent_attention": True,
                "qk_head_dim": 128,
                "qk_pos_emb_head_dim": 64,
                "v_head_dim": 128,
            },
            2.5 * 128 * 32 / 1024,
        ),
        (
            {
                "multi_latent_attention": True,
                "qk_head_dim": 128,
                "qk_pos_emb_head_dim": 64,
                "v_head_dim": 128,
                "recompute_modules": ["mla_up_proj"],
            },
            128 * 32 / 1024,
        ),
    ],
)
def test_host_memory_that_is_certainly_needed(monkeypatch, arguments, expected):
    args = SimpleNamespace(swap_attention=True, **{**LARGE, **arguments})
    assert least(args) == expected * GIB
    monkeypatch.setattr(host_pool, "host_memory_free", lambda: int(expected * GIB))
    assert FEATURE.problems(args) == []
    monkeypatch.setattr(host_pool, "host_memory_free", lambda: int(expected * GIB) - 1)
    (problem,) = FEATURE.problems(args)
    assert f"needs {expected:.2f} GiB of pinned host memory" in problem
    assert "--swap-attention-num-layers" in problem


@pytest.mark.parametrize(("world", "processes"), [(16, 4), (64, 8)])
def test_host_memory_is_asked_for_the_processes_of_the_first_stage(monkeypatch, world, processes):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.setenv("WORLD_SIZE", str(world))
    args = SimpleNamespace(swap_attention=True, **LARGE, pipeline_model_parallel_size=4)
    free = processes * (least(args) + host_pool.shared.figures().held)
    monkeypatch.setattr(host_pool, "_free_at_start", 0)
    monkeypatch.setattr(host_pool, "host_memory_free", lambda: free)
    assert FEATURE.problems(args) == []
    monkeypatch.setattr(host_pool, "host_memory_free", lambda: free - 1)
    (problem,) = FEATURE.problems(args)
    assert f"in {processes} processes on this host" in problem


@pytest.mark.parametrize("arguments", [{"swap_modules": "input_norm"}, {"seq_length": None}])
def test_nothing_is_said_of_host_memory_that_is_not_known(arguments):
    assert least(SimpleNamespace(**{**LARGE, **arguments})) is None


def test_a_model_without_megatrons_parser_is_refused_when_it_is_built(pool):
    (error,) = pool.run(
        "tests.support.model:error_of",
        1,
        case="tests.features.memory.swap_attention.counted_copies:train",
        switches={"swap_attention": True, "swap_modules": "attention"},
    )
    assert "'attention' cannot be swapped" in error
