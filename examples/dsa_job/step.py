"""One training step and one evaluation, through Megatron's pipeline schedules."""

from __future__ import annotations

import argparse
import contextlib
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import megatron.core
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.moe.moe_utils import clear_aux_losses_tracker
from megatron.core.utils import get_batch_on_this_cp_rank
from packaging.version import Version

from dsa_job.data import Batch
from dsa_job.distributed import any_rank, max_over_ranks
from dsa_job.errors import NonFiniteLossError
from dsa_job.model import accepted
from mindspeed_dsa import platforms
from mindspeed_dsa.feature import Megatron
from mindspeed_dsa.features.dsa.indexer_loss import indexer_loss
from mindspeed_dsa.platforms.host_pool import upload

_COUNTS_SEQUENCES = Version(megatron.core.__version__) < Version("0.13")
"""Whether Megatron divides by the token count of whole sequences instead of a context parallel rank's."""

LossAndCount = tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]


def loss_function(loss_mask: torch.Tensor, losses: torch.Tensor) -> LossAndCount:
    """Return the sum of a microbatch's token losses, the number of tokens, and both for the report.

    Both arguments are ``[micro_batch_size, seq_length]``; losses are cross entropy in nats.
    """
    total = torch.sum(losses.float() * loss_mask)
    tokens = loss_mask.sum().to(torch.int)
    report = {"sums": torch.stack([total.detach(), tokens.float()])}
    # These releases divide by this count, so it must cover the whole sequence, not only this rank's part.
    if _COUNTS_SEQUENCES and parallel_state.get_context_parallel_world_size() > 1:
        tokens = tokens.clone()
        dist.all_reduce(tokens, group=parallel_state.get_context_parallel_group())
    return total, tokens, report


def forward_step(
    data: Iterator[Batch], model: Any, return_schedule_plan: bool = False
) -> tuple[Any, Callable[[torch.Tensor], LossAndCount]]:
    """Run one microbatch's forward, or return its plan, as Megatron's schedules request."""
    device = platforms.current().device
    batch = {name: upload(tensor, device) for name, tensor in next(data).items()}
    # Without a group 0.19.2 counts all ranks as context parallel. Since 0.18 it takes whether sequences have
    # their own groups.
    options = accepted(
        get_batch_on_this_cp_rank, cp_group=parallel_state.get_context_parallel_group(), is_hybrid_cp=False
    )
    batch = get_batch_on_this_cp_rank(batch, **options)
    forward = model.build_schedule_plan if return_schedule_plan else model
    output = forward(
        batch["tokens"], batch["position_ids"], None, labels=batch["labels"], loss_mask=batch["loss_mask"]
    )
    return output, partial(loss_function, batch["loss_mask"])


class Stepper:
    """Trainer of this rank's model chunks, one step at a time.

    It sets the hooks for gradient and parameter communication in Megatron's ``config``.
    """

    def __init__(
        self, args: argparse.Namespace, config: Any, model: list[Any], optimizer: Any, scheduler: Any
    ) -> None:
        self.args, self.config = args, config
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler
        # 8 sequences in microbatches of 1 on 2 data parallel ranks are 8 / (1 x 2) = 4 microbatches per rank.
        self.microbatches = args.global_batch_size // (
            args.micro_batch_size * parallel_state.get_data_parallel_world_size()
        )
        config.grad_scale_func = optimizer.scale_loss
        config.finalize_model_grads_func = finalize_model_grads
        if args.overlap_grad_reduce:
            config.no_sync_func = _per_chunk([chunk.no_sync for chunk in model])
            if args.align_grad_reduce:
                config.grad_sync_func = _per_chunk([chunk.start_grad_sync for chunk in model])
        if args.overlap_param_gather and args.align_param_gather:
            config.param_sync_func = _per_chunk([chunk.start_param_sync for chunk in model])

    def train_step(self, step: int, data: list[Iterator[Batch]]) -> tuple[float, float | None, float]:
        """Run one optimizer step.

        Returns:
            ``(lm loss, indexer loss, gradient norm)``, the same on every rank.

        Raises:
            NonFiniteLossError: on every rank; a loss that is not finite does not change the weights.
        """
        for chunk in self.model:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        clear_aux_losses_tracker()
        sums = self._forward_backward(data, forward_only=False)
        self._refuse_non_finite(step, sums)
        lm_loss = self._mean_loss(sums)
        _, grad_norm, _ = self.optimizer.step()
        # Megatron's schedules count samples, not steps.
        self.scheduler.step(increment=self.args.global_batch_size)
        indexer_loss = self._indexer_loss(step)
        norm = float("-inf") if grad_norm is None else float(grad_norm)  # None: no weights on this rank
        if any_rank(grad_norm is not None and not math.isfinite(norm)):
            # The norm is over all ranks; each rank's own gradients show where it comes from.
            ranks = _ranks_where(not self._gradients_are_finite())
            raise NonFiniteLossError(
                f"step {step}: the gradient norm is not a finite number"
                f"{f' (gradients of rank {ranks})' if ranks else ''}, the loss was {lm_loss}; lower --lr, or "
                "look at the data; the last checkpoint is older"
            )
        return lm_loss, indexer_loss, max_over_ranks(norm)

    def evaluate(self, data: list[Iterator[Batch]], rounds: int) -> float:
        """Return the mean loss in nats per token over ``rounds`` global batches; the model is unchanged."""
        for chunk in self.model:
            chunk.eval()
        with self.complete_parameters(), torch.no_grad():
            sums = [part for _ in range(rounds) for part in self._forward_backward(data, forward_only=True)]
        for chunk in self.model:
            chunk.train()
        return self._mean_loss(sums)

    @contextlib.contextmanager
    def complete_parameters(self) -> Iterator[None]:
        """Finish a parameter gather that would overlap the next forward pass, and start no other."""
        overlapped = self.model if self.args.overlap_param_gather else []
        for chunk in overlapped:
            chunk.disable_forward_pre_hook(param_sync=True)
        yield
        for chunk in overlapped:
            chunk.enable_forward_pre_hook()

    def release(self) -> None:
        """Drop the tensors of the last microbatch, which would keep the model alive."""
        # The token dispatchers hold the tensors, whose graph ends in data parallel hooks, which hold the
        # model: a cycle through autograd that Python's collector cannot see.
        for chunk in self.model:
            getattr(chunk, "grad_accs", []).clear()
            for module in chunk.modules():
                held = vars(getattr(module, "token_dispatcher", object)).items()
                for name in [name for name, value in held if isinstance(value, torch.Tensor)]:
                    setattr(module.token_dispatcher, name, None)

    def _forward_backward(self, data: list[Iterator[Batch]], forward_only: bool) -> list[torch.Tensor]:
        """Return loss sum and token count per microbatch, float32 ``[2]``; empty except on the last stage."""
        reports = get_forward_backward_func()(
            forward_step_func=forward_step,
            # An interleaved schedule takes an iterator per chunk, the other schedules a single one.
            data_iterator=data if len(self.model) > 1 else data[0],
            model=self.model,
            num_microbatches=self.microbatches,
            seq_length=self.args.seq_length,
            micro_batch_size=self.args.micro_batch_size,
            forward_only=forward_only,
        )
        return [report["sums"] for report in reports]

    def _refuse_non_finite(self, step: int, sums: list[torch.Tensor]) -> None:
        bad = not all(bool(torch.isfinite(part).all()) for part in sums)
        if any_rank(bad):
            raise NonFiniteLossError(
                f"step {step}: the loss is not a finite number on rank {_ranks_where(bad)}; this step did "
                "not change the weights; lower --lr, or look at the data; the last checkpoint is older"
            )

    def _gradients_are_finite(self) -> bool:
        parameters = (parameter for chunk in self.model for parameter in chunk.parameters())
        gradients = (getattr(parameter, "main_grad", None) for parameter in parameters)
        return all(bool(torch.isfinite(gradient).all()) for gradient in gradients if gradient is not None)

    def _mean_loss(self, sums: list[torch.Tensor]) -> float:
        """Return the mean over all tokens of all data parallel ranks, on every rank."""
        if not sums:  # only the last pipeline stage computes a loss
            # Minus infinity is neutral: the maximum over ranks is the loss of the last stage.
            return max_over_ranks(float("-inf"))
        total = torch.stack(sums).sum(dim=0)  # [2]: sum of losses, number of tokens
        dist.all_reduce(total, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
        return max_over_ranks(float(total[0] / total[1]))

    def _indexer_loss(self, step: int) -> float | None:
        """Return the indexer loss times its coefficient, mean over layers and microbatches, or None."""
        if not (self.args.experimental_attention_variant == "dsa" and self.args.dsa_indexer_loss_coeff):
            return None
        losses: dict[str, torch.Tensor] = {}
        # The tracker has sums over microbatches; the scale turns them into means.
        indexer_loss(Megatron()).tracker.track_indexer_metrics(
            loss_scale=1 / self.microbatches, iteration=step, writer=None, total_loss_dict=losses
        )
        return float(losses["indexer loss"]) if losses else None


def _ranks_where(verdict: bool) -> str:
    """Return ranks with a true verdict, separated by commas; a collective call."""
    verdicts: list[bool | None] = [None] * dist.get_world_size()
    dist.all_gather_object(verdicts, verdict)
    return ", ".join(str(rank) for rank, found in enumerate(verdicts) if found)


def _per_chunk(functions: list[Any]) -> Any:
    """Return a single function for one chunk, and a list for several, as Megatron expects."""
    return functions[0] if len(functions) == 1 else functions
