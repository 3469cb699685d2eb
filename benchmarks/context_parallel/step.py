"""Memory and time of a DSA layer's step on context parallel ranks, relative to one rank."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.linkbed import LinkBed
from benchmarks.memory.measure import peak_bytes
from benchmarks.model import latent_layers
from benchmarks.moe.problem import timed
from benchmarks.registry import Metrics
from benchmarks.tp_overlap.cells import slowest

VOCABULARY = 128
# Sums over 16,384 rows in another order differ by less.
DEVIATION = 1e-4
Step = Callable[[], dict[str, Tensor]]
"""Forward and backward; returns the loss, and the whole sequence's gradients by name."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the measurement: one layer dominated by attention, as in training on long sequences."""

    length: int = 16_384  # of the whole sequence
    topk: int = 512  # keys of a row
    hidden: int = 256  # width of a token
    rounds: int = 2  # of each context parallel size


QUICK = Sizes(length=256, topk=32, hidden=64, rounds=1)
_TIMES, _PEAKS = (f"benchmarks.context_parallel.step:{name}" for name in ("times", "peaks"))


def run(link: str, quick: bool) -> Metrics:
    """Return the cell's entries."""
    sizes = QUICK if quick else Sizes()
    with LinkBed(2, link) as bed:
        timing = bed.run(_TIMES, sizes=sizes, timeout_s=900.0)[0]
    print(f"step: {timing}", file=sys.stderr, flush=True)
    # Peaks need neither a link nor free cores: four ranks share two cores.
    with LinkBed(4, None, cores=[0, 1, 0, 1]) as bed:
        found = bed.run(_PEAKS, sizes=sizes, timeout_s=900.0)
    peaks = {name: max(rank[name] for rank in found) for name in found[0]}
    return {
        "step_time_ratio_cp2": timing["CP2"]["wall"] / timing["CP1"]["wall"],
        "peak_memory_ratio_cp4": peaks["CP4"] / peaks["CP1"],
        "peak_memory_ratio_cp4_keys_kept": peaks["CP4, keys kept"] / peaks["CP1"],
        "step": timing,
        "peak_megabytes": {name: size / 1e6 for name, size in peaks.items()},
    }


def times(sizes: Sizes) -> dict[str, Any]:
    """Return the least seconds of a step, of two ranks together and of each alone; the two alternate.

    Each rank has one core.
    """
    timings: dict[str, Any] = {}
    whole: dict[str, Tensor] = {}
    for _ in range(sizes.rounds):
        for ranks in (1, 2):
            step = built(sizes, ranks)
            results = step()  # warmup, and the reference for deviation
            if ranks == 1:
                whole = results
            else:
                timings["deviation"] = deviation(results, whole)
            timing = timed(step)
            kept = timings.setdefault(f"CP{ranks}", {"wall": timing.wall, "processor": timing.processor})
            for name in kept:
                kept[name] = min(kept[name], getattr(timing, name))
            finish()
    return timings


def peaks(sizes: Sizes) -> dict[str, int]:
    """Return the peak bytes of a step above its weights and gradients."""
    extra_bytes = {}
    ranks = dist.get_world_size()
    for name, cp, keep in (("CP1", 1, False), ("CP4", ranks, False), ("CP4, keys kept", ranks, True)):
        step = built(sizes, cp, cp_keep_gathered=keep)
        # Run CP1 on one rank only: four whole sequences hardly fit into one machine.
        extra_bytes[name] = peak_bytes(step) if cp > 1 or dist.get_rank() == 0 else 0
        del step
        dist.barrier()
        finish()
    return extra_bytes


def built(sizes: Sizes, ranks: int, **switches: Any) -> Step:
    """Build a step of a model with random weights, equal on all ranks, and preallocated gradients."""
    import mindspeed_dsa

    switches = {**switches, "context_parallel_size": ranks, "experimental_attention_variant": "dsa"}
    mindspeed_dsa.enable(use_fused_dsa=True, **switches)
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt import experimental_attention_variant_module_specs as specs

    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel(context_parallel_size=ranks)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    cfg = _configuration(sizes, ranks)
    model = GPTModel(
        config=cfg,
        transformer_layer_spec=specs.get_transformer_block_with_experimental_attention_variant_spec(cfg),
        vocab_size=VOCABULARY,
        max_sequence_length=sizes.length,
        position_embedding_type="rope",
    )
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
    from mindspeed_dsa.context_parallel.layout import Zigzag

    # With a context parallel size of 1, every process has the whole sequence.
    rows = Zigzag(ranks).rows_of_rank(dist.get_rank() % ranks, sizes.length)
    tokens = torch.randint(VOCABULARY, (1, sizes.length + 1), generator=torch.Generator().manual_seed(0))
    places, inputs, labels = rows.unsqueeze(0), tokens[:, :-1][:, rows], tokens[:, 1:][:, rows]

    def step() -> dict[str, Tensor]:
        for weight in model.parameters():
            weight.grad.zero_()
        loss = model(inputs, places, None, labels=labels).float().sum() / sizes.length
        loss.backward()
        results = {"loss": loss.detach().clone()}
        results |= {name: weight.grad for name, weight in model.named_parameters()}
        # A rank has only its own rows' part of the loss and of the gradients.
        if ranks > 1:
            for value in results.values():
                dist.all_reduce(value)
        return results

    return step


def finish() -> None:
    """Undo :func:`built`, before a build with another context parallel size."""
    import mindspeed_dsa

    mindspeed_dsa.disable()
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    gc.collect()


def deviation(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """Return the largest relative difference over all ranks.

    Raises:
        RuntimeError: the difference exceeds 1e-4; all ranks raise it.
    """
    worst = max(float((ours[name] - value).norm() / value.norm()) for name, value in theirs.items())
    worst = slowest(worst)
    if not worst <= DEVIATION:
        raise RuntimeError(f"context-parallel: two ranks differ from one by {worst:.1e}; nothing is timed")
    return worst


def _configuration(sizes: Sizes, ranks: int) -> Any:
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    return MLATransformerConfig(
        **latent_layers(
            num_layers=1,
            hidden_size=sizes.hidden,
            num_attention_heads=4,
            ffn_hidden_size=2 * sizes.hidden,
            q_lora_rank=128,
            kv_lora_rank=128,
            qk_head_dim=64,
            qk_pos_emb_head_dim=32,
            v_head_dim=64,
            experimental_attention_variant="dsa",
            dsa_indexer_n_heads=4,
            dsa_indexer_head_dim=64,
            dsa_indexer_topk=sizes.topk,
            dsa_indexer_loss_coeff=0.01,
            dsa_indexer_use_sparse_loss=True,
            context_parallel_size=ranks,
            transformer_impl="local",
        )
    )
