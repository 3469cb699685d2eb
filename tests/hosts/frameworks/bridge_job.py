"""A small DSA model trained by Megatron-Bridge's own ``pretrain`` on CPUs: ``bridge_job.py SWITCHES`` (JSON).

Replaced are the parts that need CUDA: Transformer Engine and modelopt, which local layers do not call, and
Bridge's check for a GPU.
"""

from __future__ import annotations

import functools
import json
import os
import sys

import mindspeed_dsa

DSA = {"experimental_attention_variant": "dsa"}


def main(switches: dict[str, object]) -> None:
    """Train for four steps."""
    ranks = int(os.environ["WORLD_SIZE"])
    mindspeed_dsa.enable(**DSA, **switches)

    # Import Megatron first, which checks for Transformer Engine.
    import megatron.core.datasets.utils
    import megatron.core.models.gpt.gpt_layer_specs
    import megatron.core.models.mamba.mamba_layer_specs
    import megatron.core.optimizer
    import torch

    from tests.hosts.frameworks import stand_ins

    stand_ins.load(stand_ins.TRANSFORMER_ENGINE)
    stand_ins.load(stand_ins.MODELOPT)
    megatron.core.datasets.utils.compile_helpers = lambda: None  # the wheel has them compiled
    from megatron.bridge.models.mla_provider import MLAModelProvider
    from megatron.bridge.training import config, setup, train
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain
    from megatron.core.models.gpt import experimental_attention_variant_module_specs as specs

    setup.initialize_megatron = functools.partial(setup.initialize_megatron, allow_no_cuda=True)
    train.get_tensor_shapes_adjust_fn_for_distillation = lambda *args, **kwargs: None  # modelopt's
    model = MLAModelProvider(
        **DSA,
        dsa_indexer_n_heads=2,
        dsa_indexer_head_dim=32,
        dsa_indexer_topk=16,
        dsa_indexer_loss_coeff=0.01,
        transformer_layer_spec=lambda config, vp_stage=None: (
            specs.get_transformer_block_with_experimental_attention_variant_spec(config, vp_stage=vp_stage)
        ),
        transformer_impl="local",
        num_layers=2,
        hidden_size=64,
        ffn_hidden_size=128,
        num_attention_heads=4,
        q_lora_rank=32,
        kv_lora_rank=32,
        qk_head_dim=16,
        qk_pos_emb_head_dim=8,
        v_head_dim=16,
        rope_type="rope",
        multi_latent_attention=True,
        tensor_model_parallel_size=ranks,
        sequence_parallel=ranks > 1,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        vocab_size=512,
        seq_length=64,
        pipeline_dtype=torch.float32,
        params_dtype=torch.float32,
        attention_softmax_in_fp32=True,
        apply_rope_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        cross_entropy_loss_fusion=False,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
    )
    settings = config.ConfigContainer(
        model=model,
        train=config.TrainingConfig(
            train_iters=4, global_batch_size=2, micro_batch_size=1, eval_interval=100, eval_iters=0
        ),
        optimizer=megatron.core.optimizer.OptimizerConfig(
            optimizer="adam", lr=1e-3, min_lr=0.0, bf16=False, clip_grad=1.0, use_distributed_optimizer=False
        ),
        scheduler=config.SchedulerConfig(
            lr_decay_style="constant",
            lr_warmup_iters=0,
            lr_decay_iters=4,
            start_weight_decay=0.0,
            end_weight_decay=0.0,
            weight_decay_incr_style="constant",
        ),
        ddp=config.DistributedDataParallelConfig(
            use_distributed_optimizer=False, grad_reduce_in_fp32=True, overlap_grad_reduce=False
        ),
        dataset=config.MockGPTDatasetConfig(
            random_seed=1234,
            seq_length=64,
            reset_attention_mask=False,
            reset_position_ids=False,
            eod_mask_loss=False,
            num_dataset_builder_threads=1,
            dataloader_type="single",
            num_workers=0,
        ),
        dist=config.DistributedInitConfig(distributed_backend="gloo"),
        logger=config.LoggerConfig(log_interval=1),
        tokenizer=config.TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=511),
        checkpoint=config.CheckpointConfig(save=None, load=None, save_interval=1000),
        rng=config.RNGConfig(seed=1234),
    )
    pretrain(settings, forward_step)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]) if sys.argv[1:] else {})
