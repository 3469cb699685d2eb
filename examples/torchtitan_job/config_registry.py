"""DeepSeek-V3.2 with sequences of 32k on 128 devices, for TorchTitan 0.3.

Start it from this repository's folder with ``--module examples.torchtitan_job --config deepseek_v32``.
"""

from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.models.deepseek_v3 import model_registry
from torchtitan.trainer import Trainer

from mindspeed_dsa.integrations.torchtitan import build, npu_swap_optimizer

CONVERTERS = ["npu_dsa", "npu_rms_norm", "npu_permute", "npu_gmm", "npu_rope"]


def deepseek_v32() -> Trainer.Config:
    """Return the job."""
    options = {"topk": 2048, "index_heads": 64, "index_dim": 128, "loss_coeff": 0.01}
    spec = model_registry("671B", converters=build(CONVERTERS, **options))
    return Trainer.Config(
        model_spec=spec,
        hf_assets_path="tokenizer",
        loss=CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(spec)),
        dataloader=HuggingFaceTextDataLoader.Config(dataset="c4_test", dataset_path="corpus"),
        optimizer=npu_swap_optimizer(
            default_adamw(lr=1e-5, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.01), times=16
        ),
        lr_scheduler=LRSchedulersContainer.Config(
            warmup_steps=2000, decay_ratio=0.8, decay_type="cosine", min_lr_factor=0.01
        ),
        training=TrainingConfig(
            local_batch_size=16, seq_len=32768, max_norm=1.0, steps=10000, disable_cuda_graphs=True
        ),
        parallelism=ParallelismConfig(
            spmd_backend="partial_dtensor",
            fsdp_reshard_after_forward="always",
            tensor_parallel_degree=4,
            pipeline_parallel_degree=2,
            pipeline_parallel_schedule="Interleaved1F1B",
            context_parallel_degree=16,
            expert_parallel_degree=64,
        ),
        activation_checkpoint=FullAC.Config(),
        checkpoint=CheckpointManager.Config(enable=True, interval=10000, last_save_model_only=True),
    )
