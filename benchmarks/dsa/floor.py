"""Time of each operator over the time of its required operations at the rate of a large matmul."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.dsa.problem import Sizes
from benchmarks.registry import Metrics
from mindspeed_dsa.ops.indexer_kl_loss import indexer_kl_loss
from mindspeed_dsa.ops.lightning_indexer import lightning_indexer
from mindspeed_dsa.ops.sparse_flash_attention import sparse_flash_attention

Call = Callable[[], object]
Table = dict[str, dict[str, float]]


def needed_flops(sizes: Sizes) -> Table:
    """Return the required floating point operations by operator and direction.

    The indexer multiplies all its heads for each visible pair; its backward takes three such products for
    each selected pair. Attention takes one product with the key and one with the value; its backward takes
    three and two. The loss takes one product with the key, and the indexer's backward.
    """
    key_dim = sizes.latent_dim + sizes.rope_dim
    index = 2 * sizes.index_heads * sizes.index_dim
    pairs = sizes.selected_pairs
    index_backward = 3 * index * pairs
    return {
        "lightning_indexer": {"forward": index * sizes.visible_pairs, "backward": index_backward},
        "sparse_flash_attention": attention_flops(sizes, pairs),
        "indexer_kl_loss": {"forward_backward": 2 * sizes.heads * key_dim * pairs + index_backward},
    }


def attention_flops(sizes: Sizes, pairs: int) -> dict[str, float]:
    """Return attention's required floating point operations by direction, for ``pairs`` of query and key."""
    key_dim, value_dim = sizes.latent_dim + sizes.rope_dim, sizes.latent_dim
    return {
        "forward": 2 * sizes.heads * (key_dim + value_dim) * pairs,
        "backward": 2 * sizes.heads * (3 * key_dim + 2 * value_dim) * pairs,
    }


def operator_calls(
    sizes: Sizes, dtype: torch.dtype, device: str, backend: str = "auto"
) -> dict[str, dict[str, Call]]:
    """Return a function for each entry of :func:`needed_flops` that runs it once."""
    generator = torch.Generator(device).manual_seed(0)
    length, heads, key_dim = sizes.length, sizes.heads, sizes.latent_dim + sizes.rope_dim

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        values = torch.randn(1, length, *shape, generator=generator, device=device) * scale
        return values.to(dtype).requires_grad_()

    scale = (sizes.index_heads * sizes.index_dim) ** -0.5
    index = (
        normal(sizes.index_heads, sizes.index_dim),
        normal(sizes.index_dim),
        normal(sizes.index_heads, scale=scale),
    )
    query, key_value = normal(heads, key_dim), normal(key_dim)

    def select() -> tuple[Tensor, Tensor]:
        return lightning_indexer(*index, sizes.topk, backend=backend)

    topk_indices, topk_scores = select()

    def attend() -> tuple[Tensor, Tensor, Tensor | None]:
        return sparse_flash_attention(
            query,
            key_value,
            topk_indices,
            sizes.softmax_scale,
            value_dim=sizes.latent_dim,
            backend=backend,
        )

    out, lse, _ = attend()
    grad_out = torch.randn(out.shape, generator=generator, device=device).to(out)
    grad_scores = torch.randn(topk_scores.shape, generator=generator, device=device).to(topk_scores)
    grad_scores.masked_fill_(topk_indices < 0, 0)

    def gradients(outputs: Tensor, inputs: tuple[Tensor, ...], grad: Tensor | None) -> object:
        return torch.autograd.grad(outputs, inputs, grad, retain_graph=True)

    def loss_and_gradients() -> object:
        loss = indexer_kl_loss(
            *index,
            query,
            key_value,
            topk_indices,
            sizes.softmax_scale,
            lse=lse,
            topk_scores=topk_scores,
            backend=backend,
        )
        return gradients(loss, index, None)

    return {
        "lightning_indexer": {
            "forward": select,
            "backward": lambda: gradients(topk_scores, index, grad_scores),
        },
        "sparse_flash_attention": {
            "forward": attend,
            "backward": lambda: gradients(out, (query, key_value), grad_out),
        },
        "indexer_kl_loss": {"forward_backward": loss_and_gradients},
    }


def matmul_call(size: int, dtype: torch.dtype, device: str) -> tuple[Call, float]:
    """Return a large ``torch.matmul`` and its floating point operations."""
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return lambda: torch.matmul(a, b), 2.0 * size**3


def floor_multiples(sizes: Sizes, dtype: torch.dtype, rounds: int, matmul_size: int) -> Metrics:
    """Time matmuls and operators on the CPU in interleaved rounds; return medians over rounds.

    Returns:
        ``multiple``, time over floor by operator and direction; ``multiple_onednn``, the same at the rate of
        PyTorch's oneDNN matmul if it differs; ``matmul_gflops``, the rates.
    """
    flops = needed_flops(sizes)
    calls = operator_calls(sizes, dtype, "cpu")
    matmuls = {"torch": matmul_call(matmul_size, dtype, "cpu")}
    if (onednn := _onednn_call(matmul_size, dtype)) is not None:
        matmuls["onednn"] = onednn
    rates: dict[str, list[float]] = {name: [] for name in matmuls}
    seconds: dict[tuple[str, str], list[float]] = {}
    for _ in range(rounds):
        for operator, directions in calls.items():
            for name, (call, work) in matmuls.items():
                rates[name].append(work / _seconds(call))
            for direction, call in directions.items():
                seconds.setdefault((operator, direction), []).append(_seconds(call))
    rate = {name: statistics.median(found) for name, found in rates.items()}

    def multiples(by: float) -> Table:
        return {
            operator: {
                direction: statistics.median(seconds[operator, direction]) * by / needed
                for direction, needed in directions.items()
            }
            for operator, directions in flops.items()
        }

    return {
        "multiple": multiples(rate["torch"]),
        **({"multiple_onednn": multiples(rate["onednn"])} if "onednn" in rate else {}),
        "matmul_gflops": {name: value / 1e9 for name, value in rate.items()},
    }


def _onednn_call(size: int, dtype: torch.dtype) -> tuple[Call, float] | None:
    """Return the same matmul by oneDNN. None if PyTorch lacks it, and for bf16, which uses oneDNN anyway."""
    namespace = torch.ops.mkldnn
    if dtype != torch.float32 or not hasattr(namespace, "_linear_pointwise"):
        return None
    a, b = (torch.randn(size, size, dtype=dtype) for _ in range(2))
    return lambda: namespace._linear_pointwise(a, b, None, "none", [], ""), 2.0 * size**3


def _seconds(call: Call) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started
