"""Sparse attention kernels published by other projects, called on the same tensors as ours."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from benchmarks.dsa.problem import Sizes
from benchmarks.dsa.selections import draw
from mindspeed_dsa.ops.sparse_flash_attention import sparse_flash_attention

Results = tuple[Tensor, ...]
Directions = dict[str, Callable[[], Results]]
"""Call by direction: ``forward`` returns the output, ``backward`` the gradients of query and key_value."""
OURS = "ours"
_ROWS = 4096
"""Rows that are compared at a time."""


class Problem:
    """Queries, keys and a selection, in bf16, with this library's results.

    Attributes:
        query: queries ``[1, length, heads, latent + rope]``.
        key_value: keys ``[1, length, latent + rope]``.
        indices: selected keys ``[1, length, topk]``, int32; -1 after a row's last key.
        grad_out: output's gradient ``[1, length, heads, latent]``.
        pairs: number of pairs of a row and a selected key.
        full: whether a row may select keys behind it.
        out: our output ``[1, length, heads, latent]``.
        lse: our log-sum-exp ``[1, length, heads]``, fp32, natural logarithm.
        gradients: our gradients of query and key_value.
    """

    def __init__(
        self,
        sizes: Sizes,
        device: str,
        shared: float | None = None,
        full: bool = False,
        ascending: bool = True,
    ) -> None:
        generator = torch.Generator(device).manual_seed(0)

        def normal(*shape: int) -> Tensor:
            kind = {"dtype": torch.bfloat16, "device": device}
            return torch.randn(1, sizes.length, *shape, generator=generator, **kind)

        dim = sizes.latent_dim + sizes.rope_dim
        self.sizes, self.full = sizes, full
        self.query, self.key_value = normal(sizes.heads, dim), normal(dim)
        self.grad_out = normal(sizes.heads, sizes.latent_dim)
        self.indices = draw(
            sizes.length, sizes.topk, shared=shared, full=full, ascending=ascending, device=device
        )
        self.pairs = int((self.indices >= 0).sum())
        self._leaves = [tensor.detach().requires_grad_() for tensor in (self.query, self.key_value)]
        self._graph, lse = self._attend()
        self.out, self.lse = self._graph.detach(), lse.detach().contiguous()
        self.gradients = self._backward()

    @cached_property
    def lengths(self) -> Tensor | None:
        """Number of keys per row, ``[length]``, int32; None if all rows have ``topk``."""
        return None if self.full else (self.indices[0] >= 0).sum(-1, dtype=torch.int32)

    @property
    def ours(self) -> Directions:
        """This library's calls."""
        return {"forward": lambda: self._attend()[:1], "backward": self._backward}

    def apart(self, direction: str, theirs: Results) -> float:
        """Return the largest distance from our results by norm, relative to the norm of ours, in fp32.

        Args:
            direction: direction of the call.
            theirs: the call's results; additional dimensions of size 1 do not matter.
        """
        ours = {"forward": (self.out,), "backward": self.gradients}[direction]
        return max(_apart(one.reshape(other.shape), other) for one, other in zip(theirs, ours, strict=True))

    def _attend(self) -> tuple[Tensor, Tensor]:
        sizes = self.sizes
        out, lse, _ = sparse_flash_attention(
            *self._leaves, self.indices, sizes.softmax_scale, value_dim=sizes.latent_dim
        )
        return out, lse

    def _backward(self) -> Results:
        return torch.autograd.grad(self._graph, self._leaves, self.grad_out, retain_graph=True)


def _apart(theirs: Tensor, ours: Tensor) -> float:
    # In pieces: fp32 copies of 32,768 rows x 128 heads x 512 would take 8 GiB each.
    squares = [
        torch.stack([(one.float() - other.float()).square().sum(), other.float().square().sum()])
        for one, other in zip(theirs[0].detach().split(_ROWS), ours[0].split(_ROWS), strict=True)
    ]
    off, whole = torch.stack(squares).double().sum(0).tolist()
    return math.sqrt(off / whole)


@dataclass(frozen=True)
class Project:
    """Kernels of another project.

    Attributes:
        modules: modules that must be importable.
        calls: function from a problem to its calls; raises ValueError if the kernels cannot run the problem.
    """

    modules: tuple[str, ...]
    calls: Callable[[Problem], Directions]

    @cached_property
    def absence(self) -> str | None:
        """Reason why the project cannot be imported, or None."""
        try:
            for name in self.modules:
                import_module(name)
        except ImportError as error:
            return f"not installed: {error}"
        except Exception as error:  # a broken project must not cost our figures
            return f"its import fails: {type(error).__name__}: {error}"[:300]
        return None


def _flash_mla(problem: Problem) -> Directions:
    """Return FlashMLA's prefill kernel; it has no backward."""
    attend: Callable[..., Any] = import_module("flash_mla").flash_mla_sparse_fwd
    key_value, indices = problem.key_value[0][:, None], problem.indices[0][:, None]

    def forward() -> Results:
        scale, lengths = problem.sizes.softmax_scale, problem.lengths
        return (attend(problem.query[0], key_value, indices, scale, topk_length=lengths)[0],)

    return {"forward": forward}


def _tilelang(problem: Problem) -> Directions:
    """Return the kernels of ``sparse_mla_fwd.py`` and ``sparse_mla_bwd.py``."""
    if problem.full:
        raise ValueError("its rows see no keys behind them")
    attend: Callable[..., Any] = import_module("sparse_mla_fwd").sparse_mla_fwd_interface
    differentiate: Callable[..., Any] = import_module("sparse_mla_bwd").sparse_mla_bwd
    # Their mask hides keys after the row: in rows with fewer than topk keys, the last key marks empty
    # entries.
    key_value, indices = problem.key_value[:, :, None], _masked_by_row(problem)
    # Their log-sum-exp has base 2.
    scale, lse = problem.sizes.softmax_scale, problem.lse / math.log(2)

    def backward() -> Results:
        gradients = differentiate(
            problem.query, key_value, problem.out, problem.grad_out, indices, lse, sm_scale=scale
        )
        return tuple(gradients)

    return {
        "forward": lambda: (attend(problem.query, key_value, indices, sm_scale=scale)[0],),
        "backward": backward,
    }


def _tilelang_pipelined(problem: Problem) -> Directions:
    """Return the kernel of ``sparse_mla_fwd_pipelined.py``, which takes the rows' offset."""
    attend: Callable[..., Any] = import_module("sparse_mla_fwd_pipelined").sparse_mla_fwd_interface
    key_value, indices = problem.key_value[:, :, None], _masked_by_row(problem)
    # Treated as the end of a longer sequence, all rows see every key.
    first, scale = problem.sizes.length if problem.full else 0, problem.sizes.softmax_scale
    return {"forward": lambda: (attend(problem.query, key_value, indices, first, 1, sm_scale=scale)[0],)}


def _masked_by_row(problem: Problem) -> Tensor:
    """Return TileLang's indices, ``[1, length, 1, topk]``."""
    length = problem.sizes.length
    if length <= problem.sizes.topk:
        raise ValueError("its kernels need more keys than are chosen")
    return torch.where(problem.indices < 0, length - 1, problem.indices)[:, :, None]


def _cudnn(problem: Problem) -> Directions:
    """Return the backward of cuDNN's frontend; its forward needs compute capability 10."""
    module = import_module("cudnn.deepseek_sparse_attention")
    differentiate: Callable[..., Any] = module.sparse_attention_backward_wrapper
    # A sink of minus infinity adds nothing to the softmax.
    no_sink = torch.full(problem.lse.shape[-1:], -math.inf, device=problem.lse.device)

    def backward() -> Results:
        gradients = differentiate(
            *(tensor[0] for tensor in (problem.query, problem.key_value, problem.out, problem.grad_out)),
            problem.lse[0],
            no_sink,
            problem.indices[0],
            softmax_scale=problem.sizes.softmax_scale,
            topk_length=problem.lengths,
        )
        return gradients["dq"], gradients["dkv"]

    return {"backward": backward}


PROJECTS = {
    "flash_mla": Project(("flash_mla",), _flash_mla),
    "tilelang": Project(("tilelang", "sparse_mla_fwd", "sparse_mla_bwd"), _tilelang),
    "tilelang_pipelined": Project(("tilelang", "sparse_mla_fwd_pipelined"), _tilelang_pipelined),
    "cudnn": Project(("cudnn.deepseek_sparse_attention",), _cudnn),
}
"""Projects by name. Modules of ``tilelang`` other than itself are files of its ``examples/deepseek_v32``."""
