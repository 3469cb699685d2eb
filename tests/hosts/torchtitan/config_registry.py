"""A DeepSeek-V3 of some ten thousand weights for TorchTitan 0.3, stock and with converters."""

from __future__ import annotations

import json
import os

from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import (
    LRSchedulersContainer,
    default_adamw,
    register_moe_load_balancing_hook,
)
from torchtitan.config import CompileConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC, MemoryBudgetAC, SelectiveAC
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
from torchtitan.models import deepseek_v3
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.deepseek_v3.state_dict_adapter import DeepSeekV3StateDictAdapter
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer

from examples.torchtitan_job import config_registry
from mindspeed_dsa.integrations.torchtitan import build

DIM, VOCABULARY = 64, 512
WIDTHS = {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}


def model() -> deepseek_v3.DeepSeekV3Model.Config:
    """Return the model.

    ``$TITAN_WIDTHS`` (JSON) overrides :data:`WIDTHS`. ``$TITAN_DENSE`` is the number of layers without
    experts, ``$TITAN_ATTENTION`` the inner attention.
    """
    widths = {**WIDTHS, **json.loads(os.environ.get("TITAN_WIDTHS", "{}"))}
    layers = deepseek_v3._build_dsv3_layers(
        n_layers=4,
        n_dense_layers=int(os.environ.get("TITAN_DENSE", "1")),
        dim=DIM,
        n_heads=4,
        q_lora_rank=48,
        **widths,
        mscale=0.7,
        dense_hidden_dim=96,
        moe_hidden_dim=32,
        num_experts=4,
        num_shared_experts=1,
        router_top_k=2,
        router_score_func="sigmoid",
        attn_backend="flex",
        moe_comm_backend="standard",
        non_blocking_capacity_factor=None,
        rope=ComplexRoPE.Config(
            dim=widths["qk_rope_head_dim"], max_seq_len=4096, scaling="yarn", rope_factor=40.0
        ),
    )
    for layer in layers:
        # FlexAttention has no backward on CPUs, and variable lengths no forward.
        if os.environ.get("TITAN_ATTENTION", "sdpa") == "sdpa":
            layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return deepseek_v3.DeepSeekV3Model.Config(
        vocab_size=VOCABULARY,
        dim=DIM,
        tok_embeddings=Embedding.Config(
            num_embeddings=VOCABULARY, embedding_dim=DIM, param_init=deepseek_v3._EMBEDDING_INIT
        ),
        norm=RMSNorm.Config(normalized_shape=DIM, param_init=deepseek_v3._NORM_INIT),
        lm_head=Linear.Config(
            in_features=DIM, out_features=VOCABULARY, param_init=deepseek_v3._output_linear_init(DIM)
        ),
        layers=layers,
        mtp_layers=[],
    )


COMPILER = os.environ.get("TITAN_COMPILER")
RECOMPUTATION = {
    "none": None,
    "selective": SelectiveAC.Config(),
    "full": FullAC.Config(),
    "memory_budget": MemoryBudgetAC.Config(memory_budget=0.2),
}


def tiny() -> Trainer.Config:
    """Return a job; ``$TITAN_RECOMPUTATION`` and ``$TITAN_COMPILER`` choose what their names say."""
    return Trainer.Config(
        compile=CompileConfig(enable=bool(COMPILER), backend=COMPILER or "inductor"),
        activation_checkpoint=RECOMPUTATION[os.environ.get("TITAN_RECOMPUTATION", "selective")],
        loss=CrossEntropyLoss.Config(global_vocab_size=VOCABULARY),
        hf_assets_path="tokenizer",
        metrics=MetricsProcessor.Config(log_freq=1),
        model_spec=ModelSpec(
            name="deepseek_v3",
            flavor="tiny",
            model=model(),
            parallelize_fn=deepseek_v3.parallelize_deepseekv3,
            pipelining_fn=pipeline_llm,
            post_optimizer_build_fn=register_moe_load_balancing_hook,
            state_dict_adapter=DeepSeekV3StateDictAdapter,
        ),
        dataloader=HuggingFaceTextDataLoader.Config(dataset="c4_test", dataset_path="corpus"),
        # With a smaller epsilon, Adam's first steps follow the signs of gradients, including rounding errors.
        optimizer=default_adamw(lr=3e-3, eps=1e-3),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=1),
        training=TrainingConfig(
            local_batch_size=2,
            seq_len=64,
            steps=4,
            disable_cuda_graphs=True,
            mixed_precision_param="float32",
        ),
        checkpoint=CheckpointManager.Config(interval=2, last_save_model_only=False),
    )


def converted() -> Trainer.Config:
    """Return ``tiny`` with the converters and options of ``$TITAN_CONVERTERS`` (JSON)."""
    requested = json.loads(os.environ["TITAN_CONVERTERS"])
    config = tiny()
    for converter in build(requested.pop("names"), **requested):
        config.model_spec.model = converter.build().convert(config.model_spec.model)
    return config


SMALL = {"topk": 8, "index_heads": 4, "index_dim": 32}


def article() -> Trainer.Config:
    """Return the example's job for eight ranks, with the small model, its data and ten steps."""
    config, small = config_registry.deepseek_v32(), tiny()
    for converter in build(config_registry.CONVERTERS, **SMALL):
        small.model_spec.model = converter.build().convert(small.model_spec.model)
    for name in ("model_spec", "loss", "dataloader", "metrics"):
        setattr(config, name, getattr(small, name))
    config.lr_scheduler.warmup_steps = 1
    training, parallelism = config.training, config.parallelism
    training.local_batch_size, training.seq_len, training.steps = 4, 64, 10
    parallelism.tensor_parallel_degree = parallelism.context_parallel_degree = 2
    parallelism.expert_parallel_degree = 4
    # Four layers in four stages: a stage without layers cannot be context parallel.
    parallelism.pipeline_parallel_first_stage_less_layers = 0
    parallelism.pipeline_parallel_last_stage_less_layers = 0
    config.checkpoint.interval, config.checkpoint.last_save_model_only = 5, False
    return config
