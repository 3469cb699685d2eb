"""Kernels that other projects publish for the sparse attention, where they are installed."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from benchmarks.dsa.floor import Call
from benchmarks.dsa.problem import Sizes
from mindspeed_dsa.ops.lightning_indexer import lightning_indexer
from mindspeed_dsa.ops.sparse_flash_attention import sparse_flash_attention

DEVIATION = 2e-2
"""Of results in bf16 by norm, theirs from ours; above it nothing is timed."""

Directions = dict[str, Call]


def rivals(sizes: Sizes, device: str) -> dict[str, Directions | str]:
    """By project its calls by direction, on the same keys as ours; or why there are none.

    Args:
        sizes: of the problem, computed in bf16.
        device: where.
    """
    inputs = cache(lambda: _Inputs(sizes, device))  # made only if somebody is there
    found: dict[str, Directions | str] = {}
    for name, build in {"flash_mla": _flash_mla, "tilelang": _tilelang}.items():
        try:
            found[name] = build(sizes, inputs)
        except ImportError as error:
            found[name] = f"not installed: {error}"
        except torch.cuda.OutOfMemoryError:
            found[name] = "does not fit into the memory of the device"
        except Exception as error:  # whatever is wrong with it must not cost our figures
            found[name] = f"{type(error).__name__}: {error}"[:300]
    return found


class _Inputs:
    """Queries, keys, the selection and what ours makes of them.

    Attributes:
        query: ``[1, length, heads, latent + rope]``.
        key_value: ``[1, length, latent + rope]``.
        indices: ``[1, length, topk]``, int32; -1 behind the last key of a row.
        grad_out: ``[1, length, heads, latent]``.
    """

    def __init__(self, sizes: Sizes, device: str) -> None:
        generator = torch.Generator(device).manual_seed(0)

        def normal(*shape: int) -> Tensor:
            values = torch.randn(1, sizes.length, *shape, generator=generator, device=device)
            return values.to(torch.bfloat16)

        dim = sizes.latent_dim + sizes.rope_dim
        self.query, self.key_value = normal(sizes.heads, dim), normal(dim)
        index = normal(1, sizes.index_dim), normal(sizes.index_dim), normal(1)
        self.indices, _ = lightning_indexer(*index, sizes.topk)
        self.grad_out = normal(sizes.heads, sizes.latent_dim)
        leaves = [tensor.clone().requires_grad_() for tensor in (self.query, self.key_value)]
        out, _, _ = sparse_flash_attention(
            *leaves, self.indices, sizes.softmax_scale, value_dim=sizes.latent_dim
        )
        self._out = out.detach()
        self._gradients = torch.autograd.grad(out, leaves, self.grad_out)

    def compare(self, out: Tensor, gradients: tuple[Tensor, ...] = ()) -> None:
        """Raise RuntimeError if another project's results are not ours."""
        ours = (self._out, *self._gradients)
        for name, theirs, expected in zip(
            ("out", "gradient of query", "gradient of key_value"), (out, *gradients), ours, strict=False
        ):
            expected = expected.flatten().float()
            difference = float((theirs.flatten().float() - expected).norm() / expected.norm())
            if not difference <= DEVIATION:
                raise RuntimeError(f"its {name} differs from ours by {difference:.1e}; nothing is timed")


def _flash_mla(sizes: Sizes, make: Callable[[], _Inputs]) -> Directions:
    """FlashMLA's kernel for prefill; it has no backward."""
    attend: Callable[..., Any] = import_module("flash_mla").flash_mla_sparse_fwd
    inputs = make()
    key_value, indices = inputs.key_value.transpose(0, 1), inputs.indices.transpose(0, 1).contiguous()

    def forward() -> Tensor:
        out: Tensor = attend(inputs.query[0], key_value, indices, sizes.softmax_scale)[0]
        return out

    inputs.compare(forward())
    return {"forward": forward}


def _tilelang(sizes: Sizes, make: Callable[[], _Inputs]) -> Directions:
    """``sparse_mla_fwd.py`` and ``sparse_mla_bwd.py`` of the folder ``examples/deepseek_v32``.

    The wheel does not contain them: the folder has to be on ``PYTHONPATH``.
    """
    import_module("tilelang")
    attend: Callable[..., Any] = import_module("sparse_mla_fwd").sparse_mla_fwd_interface
    parts = import_module("sparse_mla_bwd")
    length, heads, tail = sizes.length, sizes.heads, sizes.rope_dim
    if length <= sizes.topk:
        raise ValueError("its kernels need more keys than are chosen")
    inputs = make()
    # Its mask is "not after the row": in rows with less than topk keys the last key denotes none.
    indices = torch.where(inputs.indices < 0, length - 1, inputs.indices)[:, :, None].contiguous()
    key_value = inputs.key_value[:, :, None]

    def forward() -> Any:
        return attend(inputs.query, key_value, indices, sm_scale=sizes.softmax_scale)

    out, lse = forward()
    delta_of = parts.preprocess(1, length, heads, sizes.latent_dim)
    gradients_of = parts.bwd(
        1, length, length, heads, sizes.latent_dim, tail, sizes.topk, 1, sizes.softmax_scale
    )
    rounded = parts.postprocess(1, length, sizes.latent_dim, tail)

    def backward() -> tuple[Tensor, Tensor]:
        grad_key_value = torch.zeros_like(key_value, dtype=torch.float32)
        delta = delta_of(out, inputs.grad_out)
        grad_query = gradients_of(
            inputs.query, key_value, inputs.grad_out, indices, lse, delta, grad_key_value
        )
        return grad_query, rounded(grad_key_value)

    inputs.compare(out, backward())
    return {"forward": forward, "backward": backward}
