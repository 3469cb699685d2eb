"""Training steps with Megatron's own CUDA graphs, on the stand-in; run in the worker pool."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tests.support import cuda_graphs
from tests.support import model as job

SAMPLES = 2
SIZES = {"num_layers": 2, "dsa_indexer_n_heads": 2, "dsa_indexer_topk": 6}


def train(
    graphs: str = "",
    modules: tuple[str, ...] = (),
    switches: Mapping[str, Any] | None = None,
    overrides: Mapping[str, Any] | None = None,
    microbatches: int = 2,
    steps: int = 3,
) -> dict[str, Any]:
    """Run training steps with other data each, and a change of the weights after each.

    Args:
        graphs: ``--cuda-graph-impl``; empty without graphs.
        modules: ``--cuda-graph-modules``.
        switches: switches of this library.
        overrides: fields of the configuration.
        microbatches: number of microbatches of a step.
        steps: number of steps. Megatron captures graphs at the end of the first, or in the second.

    Returns:
        ``losses``, ``indexer losses`` and ``gradients`` of each step, and for each graph the names of its
        ``operators``.
    """
    job.start(switches)
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    options = {"cuda_graph_impl": graphs, "cuda_graph_modules": list(modules), "cuda_graph_warmup_steps": 1}
    with cuda_graphs.in_place_of_cuda() if graphs else nullcontext([]) as made:
        cfg = job.config(
            **{**job.WITHOUT_EXPERTS, **SIZES, **(options if graphs else {}), **(overrides or {})}
        )
        get_cuda_rng_tracker().is_inference_rng_tracker = True  # which Megatron's graphs accept
        found = list(_steps(cfg, graphs, microbatches, steps))
        return {
            "losses": [one[0] for one in found],
            "indexer losses": [one[1] for one in found],
            "gradients": [one[2] for one in found],
            "operators": [graph.operators for graph in made],
        }


def _steps(
    cfg: Any, graphs: str, microbatches: int, steps: int
) -> Iterator[tuple[list[Tensor], float, dict[str, Tensor]]]:
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.full_cuda_graph import FullCudaGraphWrapper
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    chunk = job.gpt_model(cfg)
    get_cuda_rng_tracker().states_.clear()  # nothing is drawn from here on, and the host's are no generators
    wrapped = DistributedDataParallel(cfg, DistributedDataParallelConfig(grad_reduce_in_fp32=True), chunk)
    cfg.finalize_model_grads_func = finalize_model_grads
    forward_backward = get_forward_backward_func()
    if graphs == "full_iteration":
        forward_backward = FullCudaGraphWrapper(forward_backward, cuda_graph_warmup_steps=1)
    for step in range(steps):
        wrapped.zero_grad_buffer()
        for parameter in chunk.parameters():
            parameter.grad = None
        losses = forward_backward(
            forward_step_func=partial(_forward_step, cfg),
            data_iterator=iter(list(_batches(step, microbatches))),
            model=[wrapped],
            num_microbatches=microbatches,
            seq_length=job.SEQUENCE,
            micro_batch_size=SAMPLES,
            forward_only=False,
        )
        gradients = job.gradients([chunk])
        yield [entry["lm loss"].clone() for entry in losses], _logged(microbatches), gradients
        with torch.no_grad():
            for name, parameter in job.global_names(chunk).items():
                parameter -= 0.1 * gradients[name]


def _batches(step: int, microbatches: int) -> Iterator[dict[str, Tensor]]:
    samples = job.samples(microbatches * SAMPLES, seed=step)
    positions = torch.arange(job.SEQUENCE).expand(SAMPLES, -1).contiguous()
    for part in samples.view(microbatches, SAMPLES, -1):
        yield {
            "tokens": part[:, :-1].contiguous(),
            "labels": part[:, 1:].contiguous(),
            "positions": positions.clone(),
            "loss mask": torch.ones(SAMPLES, job.SEQUENCE),
        }


def _forward_step(cfg: Any, iterator: Any, model: Any, *unused: Any) -> Any:
    batch = next(iterator)
    output = model(batch["tokens"], batch["positions"], None, labels=batch["labels"])
    return output, partial(job.loss_of, cfg, batch["loss mask"])


def _logged(microbatches: int) -> float:
    """Return the step's indexer loss as Megatron logs it, and reset the log."""
    from tests.matrix.model import logged_indexer_loss

    loss = logged_indexer_loss(microbatches)
    assert loss is not None
    return loss
