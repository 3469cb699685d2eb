"""Measured job: a bf16 GPT trained by Megatron's schedule, DDP and distributed optimizer on one rank."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.memory import copy_engine
from benchmarks.memory.measure import live_bytes, peak_bytes, storage_bytes
from benchmarks.model import ModelSizes, deterministic_layers
from mindspeed_dsa import platforms

_Reduce = Callable[[Tensor], tuple[Tensor, dict[str, Tensor]]]


@dataclass(frozen=True)
class Sizes(ModelSizes):
    """Sizes of the model, of a step and of a long step."""

    ffn: int
    long_sequences: int


FULL = Sizes(
    layers=3, hidden=1024, heads=16, vocabulary=2048, length=512, sequences=4, ffn=4096, long_sequences=16
)


class Job:
    """Model and optimizer, and the measured operations.

    Args:
        sizes: sizes of model and step.
        switches: arguments of ``mindspeed_dsa.enable``; if empty, nothing is enabled.
    """

    def __init__(self, sizes: Sizes, switches: Mapping[str, Any]) -> None:
        _start(switches)
        from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
        from megatron.core.transformer.module import Float16Module

        self._sizes = sizes
        config, ddp_config, optimizer_config = _configs(sizes)
        config.finalize_model_grads_func = finalize_model_grads
        self._before = live_bytes()
        model = Float16Module(config, _gpt(config, sizes)).to(platforms.current().device)
        self.model = DistributedDataParallel(config, ddp_config, model)
        from megatron.core.optimizer import get_megatron_optimizer

        self.optimizer = get_megatron_optimizer(optimizer_config, [self.model])
        self._number = 0

    @property
    def parameters(self) -> int:
        """Number of elements of all weights."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def step(self, sequences: int | None = None) -> dict[str, float]:
        """Run one training step; return its loss and gradient norm.

        Args:
            sequences: sequences of the step, in microbatches of ``sizes.sequences``; default: one microbatch.
        """
        loss = self.forward_backward((sequences or self._sizes.sequences) // self._sizes.sequences)
        return {"loss": loss, "norm": self.update()}

    def long_step(self) -> dict[str, float]:
        """Run a step of ``sizes.long_sequences``."""
        return self.step(self._sizes.long_sequences)

    def forward_backward(self, microbatches: int = 1) -> float:
        """Run forward and backward of a step; return the mean loss."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        results = get_forward_backward_func()(
            forward_step_func=_forward,
            data_iterator=iter([self._batch(place) for place in range(microbatches)]),
            model=self.model,
            num_microbatches=microbatches,
            seq_length=self._sizes.length,
            micro_batch_size=self._sizes.sequences,
            forward_only=False,
        )
        self._number += 1
        return sum(float(result["loss"]) for result in results) / microbatches

    def update(self) -> float:
        """Run the optimizer; return the gradient norm."""
        _, norm, _ = self.optimizer.step()
        platforms.current().synchronize()
        return float(norm)

    def state_bytes(self) -> int:
        """Return device bytes of weights and optimizer state: live storages except gradients and scratch."""
        from megatron.core import parallel_state

        buffers = (*self.model.buffers, *self.model.expert_parallel_buffers)
        gradients = [buffer.grad_data for buffer in buffers]
        # Buffer for attention scores, which is kept between steps.
        scratch = parallel_state.get_global_memory_buffer().buffer.values()
        return live_bytes() - self._before - storage_bytes([*gradients, *scratch])

    def update_peak(self) -> int:
        """Return peak device bytes of weights and optimizer state during the optimizer's step."""
        # gloo's threads free their buffers with a delay, possibly during the update: take the least of three.
        return min(
            self.state_bytes() + peak_bytes(self.update, lead_in=self.forward_backward) for _ in range(3)
        )

    def activation_peak(self) -> int:
        """Return peak bytes of forward and backward, without weights, optimizer state and gradients."""
        peak = peak_bytes(self.forward_backward)
        self.update()
        return peak

    def copied(self) -> int:
        """Return the bytes that side streams have copied so far, on a platform that counts them."""
        return int(getattr(platforms.current(), "copied", 0))

    def digest(self) -> str:
        """Return the SHA-256 digest of all weights."""
        digest = hashlib.sha256()
        for parameter in self.model.parameters():
            digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def _batch(self, place: int) -> Tensor:
        """Return the tokens of a microbatch of the next step, ``[sequences, length + 1]``."""
        shape = (self._sizes.sequences, self._sizes.length + 1)
        generator = torch.Generator().manual_seed(1000 * place + self._number)
        tokens = torch.randint(self._sizes.vocabulary, shape, generator=generator)
        return tokens.to(platforms.current().device)


def _start(switches: Mapping[str, Any]) -> None:
    """Enable the features, and create process groups of one rank."""
    import mindspeed_dsa

    if rate := os.environ.get(copy_engine.VARIABLE):
        platforms.PLATFORMS["cpu"] = copy_engine.CopyEnginePlatform(float(rate))
    # Without a feature only the platform is enabled, which Megatron needs.
    mindspeed_dsa.enable(**switches)
    from megatron.core import parallel_state, tensor_parallel

    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group(platforms.current().backend, store=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1234)
    torch.manual_seed(1234)


def _configs(sizes: Sizes) -> tuple[Any, Any, Any]:
    """Return Megatron's configurations of model, data parallelism and optimizer."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    model = TransformerConfig(
        **deterministic_layers(
            num_layers=sizes.layers,
            hidden_size=sizes.hidden,
            ffn_hidden_size=sizes.ffn,
            num_attention_heads=sizes.heads,
            bf16=True,
            params_dtype=torch.bfloat16,
            pipeline_dtype=torch.bfloat16,
            transformer_impl="local",
        )
    )
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
    optimizer = OptimizerConfig(
        optimizer="adam",
        lr=1e-3,
        weight_decay=0.1,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_distributed_optimizer=True,
        clip_grad=1.0,
    )
    return model, ddp, optimizer


def _gpt(config: Any, sizes: Sizes) -> Any:
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs

    return GPTModel(
        config=config,
        transformer_layer_spec=gpt_layer_specs.get_gpt_layer_local_spec(normalization=config.normalization),
        vocab_size=sizes.vocabulary,
        max_sequence_length=sizes.length,
        position_embedding_type="rope",
    )


def _forward(
    iterator: Any, model: Any
) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, dict[str, Tensor]]]]:
    """Run Megatron's forward step: return the losses of all tokens, and the function that reduces them."""
    tokens = next(iterator)  # [sequences, length + 1]
    length = tokens.size(1) - 1
    positions = torch.arange(length, device=tokens.device).expand(tokens.size(0), length)
    hidden = torch.ones(length, length, dtype=torch.bool, device=tokens.device).triu(1)[None, None]
    losses = model(tokens[:, :-1], positions, hidden, labels=tokens[:, 1:])
    return losses, lambda output: (output.mean(), {"loss": output.detach().mean()})
