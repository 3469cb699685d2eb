"""Megatron's local modules without Transformer Engine and Apex, on any release, with no feature on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.support import model as job
from tests.support.model import assert_same_gradients, put_together
from tests.support.releases import FULL_HERE

pytestmark = pytest.mark.releases(">=0.12.1", quick=True)

LAYER_NORM = {"normalization": "LayerNorm", "persist_layer_norm": True}
RMS_NORM = {"normalization": "RMSNorm", "layernorm_zero_centered_gamma": True, "add_bias_linear": False}


@pytest.mark.parametrize(
    "norm", [pytest.param(LAYER_NORM, marks=FULL_HERE), RMS_NORM], ids=["LayerNorm", "RMSNorm"]
)
def test_a_dense_model_trains_with_sequence_parallelism(pool, norm):
    (alone,) = pool.run(f"{__name__}:step", 1, norm=norm)
    ranks = pool.run(f"{__name__}:step", 2, tp=2, norm=norm)
    assert ranks[0]["losses"] == pytest.approx(alone["losses"], rel=1e-5)
    assert_same_gradients(put_together(ranks), alone["gradients"])
    weights = put_together([{**rank, "gradients": rank["weights"]} for rank in ranks])
    for name, weight in alone["weights"].items():
        assert (weights[name] - weight).abs().max() < 1e-6, name


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        ("get_gpt_layer_with_transformer_engine_spec", {}),
        ("get_gpt_decoder_block_spec", {"use_transformer_engine": True}),
    ],
)
def test_a_model_that_needs_transformer_engine_says_so(pool, function, arguments):
    (error,) = pool.run(
        "tests.support.model:error_of",
        1,
        case=f"{__name__}:transformer_engine",
        name=function,
        **arguments,
    )
    assert error == (
        "SettingsError: local-modules: --transformer-impl transformer_engine (Megatron's default) needs "
        "Transformer Engine, which is not installed; add --transformer-impl local"
    )


# -- functions that the ranks run -----------------------------------------------------------------


def step(tp: int = 1, norm: dict[str, Any] = LAYER_NORM) -> dict[str, Any]:
    """Return losses, gradients and weights of a training step with the distributed optimizer."""
    _start(tp)
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        gated_linear_unit=True,
        activation_func=F.silu,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=tp,
        sequence_parallel=tp > 1,
        params_dtype=torch.float32,
        pipeline_dtype=torch.float32,
        **norm,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(normalization=config.normalization),
        vocab_size=job.VOCABULARY,
        max_sequence_length=job.SEQUENCE,
        position_embedding_type="rope",
    )
    job.fill_by_name(model)
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
    chunk = DistributedDataParallel(config, ddp, model)
    # A step as smooth as this does not depend on the sign of gradients near zero.
    settings = OptimizerConfig(optimizer="adam", lr=1e-2, adam_eps=1e-2, use_distributed_optimizer=True)
    optimizer = get_megatron_optimizer(settings, [chunk])
    config.finalize_model_grads_func = finalize_model_grads
    losses = get_forward_backward_func()(
        forward_step_func=lambda iterator, model: job.forward_step(config, iterator, model),
        data_iterator=iter(job.samples(4).split(2)),
        model=chunk,
        num_microbatches=2,
        seq_length=job.SEQUENCE,
        micro_batch_size=2,
        forward_only=False,
    )
    gradients = job.gradients([model])
    successful, _, _ = optimizer.step()
    assert successful
    return {
        "losses": [float(each["lm loss"]) for each in losses],
        "gradients": gradients,
        "weights": {name: parameter.detach().clone() for name, parameter in model.named_parameters()},
        "split": job.split_dimensions([model]),
    }


def transformer_engine(name: str, **arguments: Any) -> None:
    """Build a spec whose modules are not installed."""
    _start()
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.transformer.transformer_config import TransformerConfig

    if arguments:
        arguments["config"] = TransformerConfig(num_layers=2, hidden_size=32, num_attention_heads=4)
    getattr(gpt_layer_specs, name)(**arguments)


def _start(tp: int = 1) -> None:
    import mindspeed_dsa

    mindspeed_dsa.enable()
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
    tensor_parallel.model_parallel_cuda_manual_seed(1234)
