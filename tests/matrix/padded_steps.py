"""Training steps on sequences that ranks do not divide evenly; they run inside the pool's workers."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from mindspeed_dsa import session
from mindspeed_dsa.context_parallel.padding import Padding
from tests.matrix import model as tiny
from tests.matrix.record import at_work
from tests.matrix.steps import job_of_any_release
from tests.support import model as job

TOKENS = 19
MODEL = {
    "dsa_indexer_n_heads": 16,
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_aux_loss_coeff": 0.1,
    "moe_z_loss_coeff": 0.1,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
}
"""Settings that depend on the number of tokens: the indexer loss, and router losses and biases."""
GARBAGE = {"tokens": 61, "labels": 7, "position_ids": 3, "attention_mask": 1}


class _Batch(dict[str, Tensor]):
    """A data loader's microbatch."""

    def size(self, dim: int) -> int:
        return self["tokens"].size(dim)


def step(
    overrides: Mapping[str, Any] | None = None,
    switches: Mapping[str, Any] | None = None,
    garbage: bool = False,
    by_run: bool = False,
    cp: int = 1,
    **layout: Any,
) -> dict[str, Any]:
    """Run :func:`tiny.one_step`; add the sum of a rank's losses and the tokens of each expert.

    Args:
        overrides: configuration overrides.
        switches: features beyond fused DSA and the layout.
        garbage: whether padding rows hold arbitrary tokens.
        by_run: whether operators process one contiguous run of rows at a time, as on Ascend.
        cp: context parallel size.
        **layout: other parallel sizes.
    """
    from mindspeed_dsa.features.dsa import core_attention

    sizes = {
        "context_parallel_size": cp,
        "tensor_model_parallel_size": layout.get("tp", 1),
        "sequence_parallel": layout.get("tp", 1) > 1,
    }
    switches = {"use_fused_dsa": True, "seq_length": TOKENS, **sizes, **(switches or {})}
    runs = mock.patch.object(core_attention, "in_runs", return_value=by_run)
    told = {**MODEL, **({"cp_comm_type": "allgather"} if cp > 1 else {}), **(overrides or {})}
    _forget_losses()
    with job_of_any_release(cp, 0), _batches(), _filled(garbage), runs, _experts() as tokens:
        result = tiny.one_step(switches, told, cp=cp, num_microbatches=2, micro_batch_size=2, **layout)
        return {**result, "tokens": [each.tolist() for each in tokens], "at work": at_work()}


def _forget_losses() -> None:
    """Clear losses logged by models with fewer layers, whose lists have other lengths."""
    from megatron.core.transformer.moe import moe_utils

    tracker = getattr(moe_utils, "get_moe_metrics_tracker", None)
    logged = moe_utils.get_moe_layer_wise_logging_tracker() if tracker is None else tracker().metrics
    logged.clear()


@contextlib.contextmanager
def _batches() -> Iterator[None]:
    """Make batches as a data loader does, and run steps at the padded length."""
    samples, train_step = job.samples, job.train_step

    def dictionaries(cfg: Any, chunks: list[Any], microbatches: list[Tensor], *rest: Any) -> Any:
        running = session.current()
        assert running is not None
        with mock.patch.object(job, "SEQUENCE", Padding.of(running.settings).length):
            return train_step(cfg, chunks, [_batch(each) for each in microbatches], *rest)  # type: ignore[misc]

    with (
        mock.patch.object(job, "SEQUENCE", TOKENS),
        mock.patch.object(job, "samples", samples),
        mock.patch.object(job, "train_step", dictionaries),
        mock.patch.object(job, "forward_step", forward_step),
    ):
        yield


def _batch(tokens: Tensor) -> _Batch:
    inputs = tokens[:, :-1]
    return _Batch(
        tokens=inputs,
        labels=tokens[:, 1:],
        loss_mask=torch.ones(inputs.shape),
        position_ids=torch.arange(inputs.size(1)).expand_as(inputs),
    )


def forward_step(cfg: Any, iterator: Any, model: Any) -> Any:
    """Run a microbatch as ``pretrain_gpt.py`` does."""
    from megatron.core import parallel_state
    from megatron.core.utils import get_batch_on_this_cp_rank

    # Later releases need these arguments; by default they would use all ranks as the group.
    told = {"is_hybrid_cp": False, "cp_group": parallel_state.get_context_parallel_group()}
    parameters = inspect.signature(get_batch_on_this_cp_rank).parameters
    told = {name: value for name, value in told.items() if name in parameters}
    batch = get_batch_on_this_cp_rank(dict(next(iterator)), **told)
    output = model(
        batch["tokens"],
        batch["position_ids"],
        None,
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
    )
    return output, partial(_loss, batch["loss_mask"])


def _loss(loss_mask: Tensor, output: Tensor) -> Any:
    total = (output.float() * loss_mask).sum()
    return total, loss_mask.sum().to(torch.int), {"lm loss": total.detach().clone()}


@contextlib.contextmanager
def _filled(garbage: bool) -> Iterator[None]:
    from mindspeed_dsa.features.attention.padding import batches

    with mock.patch.object(batches, "FILL", GARBAGE if garbage else batches.FILL):
        yield


@contextlib.contextmanager
def _experts() -> Iterator[list[Tensor]]:
    """Record the tokens per expert that update the experts' biases."""
    from megatron.core.distributed import finalize_model_grads as module

    tokens: list[Tensor] = []
    names = inspect.getmodule(module)
    update = names.get_updated_expert_bias  # type: ignore[union-attr]

    def updated(counts: Any, *rest: Any, **kwargs: Any) -> Any:
        result = update(counts, *rest, **kwargs)
        tokens.append(counts.clone())  # summed over all ranks by then
        return result

    with mock.patch.object(names, "get_updated_expert_bias", updated):
        yield tokens
