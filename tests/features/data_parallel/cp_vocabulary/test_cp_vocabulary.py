"""A vocabulary divided among context parallel ranks: weights, embeddings, buffers, and refused settings.

``tests/distributed`` compares training and resumed jobs with the feature.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mindspeed_dsa.features.data_parallel.cp_vocabulary.feature import FEATURE
from tests.support import model as job

# -- functions that run in the pool's workers ------------------------------------------------------

ON = {"cp_shard_vocabulary": True, "fused_linear_cross_entropy": True, "use_fused_dsa": True}
ON_TWO = {"context_parallel_size": 2, "use_fused_dsa": True}
CASES = "tests.features.data_parallel.cp_vocabulary.test_cp_vocabulary"


def model_of(switches: Mapping[str, Any], cp: int) -> Any:
    """Build Megatron's model with its own initial weights."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt import experimental_attention_variant_module_specs as specs

    job.start(switches, cp=cp)
    config = job.config(context_parallel_size=cp, num_layers=1)
    spec = specs.get_transformer_block_with_experimental_attention_variant_spec(config)
    return GPTModel(config, spec, parallel_output=True, **job.ends())


def initial(switches: Mapping[str, Any], cp: int) -> dict[str, torch.Tensor]:
    """Return the initial weights."""
    return {name: each.detach().clone() for name, each in model_of(switches, cp).named_parameters()}


def looked_up(switches: Mapping[str, Any]) -> dict[str, Any]:
    """Return this rank's tokens, their embeddings, and the weight's gradient for known output gradients."""
    from megatron.core import parallel_state

    layer = model_of(switches, 2).embedding.word_embeddings
    rank = parallel_state.get_context_parallel_rank()
    tokens = torch.randint(job.VOCABULARY, (2, 6), generator=torch.Generator().manual_seed(rank))
    found = layer(tokens)
    found.backward(torch.arange(found.numel(), dtype=found.dtype).view(found.shape))
    return {"found": found.detach(), "gradient": layer.weight.grad}


def buffers(switches: Mapping[str, Any]) -> dict[str, Any]:
    """Return groups and scales of gradient buffers by parameter, and sizes of the optimizers."""
    model = model_of(switches, 2)
    # Only now are they patched.
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    ddp = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
    names = {parameter: name for name, parameter in model.named_parameters()}
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-3), [ddp])
    assert all(parameter.requires_grad for parameter in names)
    parts = [
        {names[each] for group in part.param_groups for each in group["params"]}
        for part in optimizer.chained_optimizers
    ]
    groups = {
        names[parameter]: (buffer.data_parallel_group.size(), bucket.gradient_scaling_factor)
        for buffer in ddp.buffers
        for bucket in buffer.buckets
        for parameter in bucket.params_list
    }
    ranks = [part.get_grad_stats_parallel_group().size() for part in optimizer.chained_optimizers]
    return {"groups": groups, "parts": parts, "ranks": ranks}


def logits_of(switches: Mapping[str, Any]) -> None:
    """Ask the output layer for logits."""
    model_of(switches, 2).output_layer(torch.zeros(4, 1, 32))


# -- tests ---------------------------------------------------------------------------------------

VOCABULARY = {"embedding.word_embeddings.weight", "output_layer.weight"}


def test_a_rank_has_its_part_of_the_weights_that_others_would_draw(pool):
    (whole,) = pool.baseline(f"{CASES}:initial", 1, switches={"use_fused_dsa": True}, cp=1)
    parts = pool.run(f"{CASES}:initial", 2, switches={**ON_TWO, **ON}, cp=2)
    for name, weight in whole.items():
        if name in VOCABULARY:
            assert torch.equal(torch.cat([part[name] for part in parts]), weight)
        else:
            assert all(torch.equal(part[name], weight) for part in parts)


def test_embeddings_have_the_same_bits_and_gradients_are_sums_over_ranks(pool):
    stock = pool.run(f"{CASES}:looked_up", 2, switches=ON_TWO)
    ours = pool.run(f"{CASES}:looked_up", 2, switches={**ON_TWO, **ON})
    for mine, theirs in zip(ours, stock, strict=True):
        assert torch.equal(mine["found"], theirs["found"])
    total = sum(rank["gradient"] for rank in stock)
    assert torch.equal(torch.cat([rank["gradient"] for rank in ours]), total)


def test_parts_have_buffers_and_an_optimizer_of_their_own(pool):
    for found in pool.run(f"{CASES}:buffers", 2, switches={**ON_TWO, **ON}):
        # Other gradients are averaged over both ranks. Those of parts are the sum of both already.
        for name, (ranks, scale) in found["groups"].items():
            assert (ranks, scale) == (1 if name in VOCABULARY else 2, 0.5)
        assert found["parts"][-1] == VOCABULARY
        assert not any(VOCABULARY & names for names in found["parts"][:-1])
        assert set().union(*found["parts"]) == found["groups"].keys()
        assert found["ranks"][-1] == 2  # the norm counts the parts of both ranks


def test_logits_are_refused_in_words(pool):
    case = {"case": f"{CASES}:logits_of", "switches": {**ON_TWO, **ON}}
    for error in pool.run("tests.support.model:error_of", 2, **case):
        assert "pass labels to get losses, or omit --cp-shard-vocabulary" in error


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"context_parallel_size": 1}, "add --context-parallel-size, or omit --cp-shard-vocabulary"),
        ({"padded_vocab_size": 129}, "set --make-vocab-size-divisible-by to a multiple of 2"),
        ({"padded_vocab_size": 130, "tensor_model_parallel_size": 2}, "among 2 tensor x 2 context"),
        ({"data_parallel_random_init": True}, "cannot be used with --data-parallel-random-init"),
        ({"optimizer_cpu_offload": True}, "cannot be used with --optimizer-cpu-offload"),
        ({"ckpt_format": "torch"}, "use torch_dist"),
        ({"fp16": True}, "adapts a loss scale for each of the two optimizers; add --loss-scale, or use"),
        ({"optimizer": "muon"}, "use adam or sgd"),
        ({"log_params_norm": True}, "add --use-distributed-optimizer, or omit --log-params-norm"),
        (
            {"save_wgrads_interval": 5, "use_distributed_optimizer": True, "overlap_grad_reduce": True},
            "omit --overlap-grad-reduce or --save-wgrads-interval",
        ),
        ({"num_distributed_optimizer_instances": 2}, "omit one of them"),
    ],
)
def test_refused_by_name(arguments, says):
    (problem,) = FEATURE.problems(SimpleNamespace(**{"context_parallel_size": 2, **arguments}))
    assert says in problem


def test_what_is_served():
    sharded = {"use_distributed_optimizer": True, "log_params_norm": True, "save_wgrads_interval": 5}
    served = {
        **sharded,
        "padded_vocab_size": 128,
        "tensor_model_parallel_size": 4,
        "ckpt_format": "torch_dist",
    }
    assert not FEATURE.problems(SimpleNamespace(context_parallel_size=2, optimizer="adam", **served))
