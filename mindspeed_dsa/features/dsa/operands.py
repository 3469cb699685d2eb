"""Operands of the main attention, in absorbed or per-head form, and runs of contiguous tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Operands:
    """Query, key and value of the main attention in Megatron's layout, and the softmax scale.

    Under context parallelism, ``query`` has this rank's tokens, and ``key`` has the whole sequence in order.

    Attributes:
        query: queries, ``[s, b, heads, dim]`` per head, or ``[s, b, heads, latent + rope]`` absorbed.
        key: keys, ``[s, b, heads, dim]`` per head, or ``[s, b, 1, latent + rope]`` absorbed.
        value: values ``[s, b, heads, value_dim]`` per head. In absorbed form, the up-projection ``[heads,
            value_dim, latent]``, which is applied to the attention output.
        softmax_scale: factor of the attention scores.
        key_receiver: tensor for which backward returns the absorbed key's gradient in fp32; None: for
            ``key``.
        epilog: compiled function for the value's up-projection; None for PyTorch's einsum.
        query_rope: rotary dimensions of an absorbed query, ``[s, b, heads, rope]``. ``query`` then has the
            latent dimensions only. None: ``query`` has both.
        key_rope: rotary dimensions of an absorbed key, ``[s, b, 1, rope]``. Set only if ``query_rope`` is
            set. None: ``key`` has both.
        key_rope_receiver: gradient receiver of ``key_rope``, like ``key_receiver``.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    softmax_scale: float
    key_receiver: Tensor | None = None
    epilog: Callable[[Tensor, Tensor], Tensor] | None = None
    query_rope: Tensor | None = None
    key_rope: Tensor | None = None
    key_rope_receiver: Tensor | None = None

    def whole(self) -> Operands:
        """Return operands with latent and rotary dimensions concatenated in query and key."""
        if self.query_rope is None:
            return self
        # [s, b, heads, latent + rope]
        whole = replace(self, query=torch.cat([self.query, self.query_rope], dim=-1), query_rope=None)
        if self.key_rope is None:
            return whole
        # Receivers are dropped: a joint one would be another buffer of the gradient's size.
        key = torch.cat([self.key, self.key_rope], dim=-1)  # [s, b, 1, latent + rope]
        return replace(whole, key=key, key_receiver=None, key_rope=None, key_rope_receiver=None)

    def first(self, rows: int) -> Operands:
        """Return operands of the first ``rows`` query tokens and keys."""
        value = self.value if self.absorbed else self.value[:rows]  # the up-projection has no tokens
        rope = None if self.query_rope is None else self.query_rope[:rows]
        return replace(self._with_keys(slice(rows)), query=self.query[:rows], query_rope=rope, value=value)

    def by_runs(self, runs: Sequence[Run]) -> list[Operands]:
        """Split absorbed operands into one set per run: the run's query tokens and the keys they see.

        Args:
            runs: runs that cover all query tokens, in their order.
        """
        queries = split_by_runs(self.query, runs, 0)  # [end - first, b, heads, dim] each
        ropes = [None] * len(runs) if self.query_rope is None else split_by_runs(self.query_rope, runs, 0)
        return [
            replace(self._with_keys(slice(low, high)), query=query, query_rope=rope)
            for query, rope, (_, _, low, high) in zip(queries, ropes, runs, strict=True)
        ]

    def _with_keys(self, keys: slice) -> Operands:
        receiver, rope, rope_receiver = (
            None if one is None else one[keys]
            for one in (self.key_receiver, self.key_rope, self.key_rope_receiver)
        )
        return replace(
            self, key=self.key[keys], key_receiver=receiver, key_rope=rope, key_rope_receiver=rope_receiver
        )

    @property
    def absorbed(self) -> bool:
        """Return whether the operands are in absorbed form (``value`` is the up-projection)."""
        return self.value.dim() == 3

    @property
    def latent(self) -> int:
        """Number of latent dimensions of an absorbed key, which are also its value."""
        return self.value.shape[-1]

    def up_projected(self, latent_out: Tensor) -> Tensor:
        """Apply the value's up-projection: ``[b, s, heads, latent]`` to ``[s, b, heads * value_dim]``."""
        if self.epilog is not None:
            return self.epilog(latent_out, self.value)
        # heads keeps its order, so that flatten gives Megatron's head-major output
        return torch.einsum("bshc,hdc->sbhd", latent_out, self.value).flatten(2)  # [s, b, heads * value_dim]

    def detached(self) -> tuple[Tensor, Tensor]:
        """Return query ``[b, s, heads, dim]`` and key ``[b, s, dim]`` (or per head), detached."""
        key = self.key.detach().transpose(0, 1)  # [b, s, 1 or heads, dim]
        # [b, s, heads, dim]; an absorbed key has one head, which is squeezed
        return self.query.detach().transpose(0, 1), key.squeeze(2) if self.absorbed else key

    def ropes(self) -> dict[str, Tensor | None]:
        """Return keyword arguments for operators that take rotary dimensions separately."""
        query, key = self.query_rope, self.key_rope
        return {
            "query_rope": None if query is None else query.transpose(0, 1),  # [b, s, heads, rope]
            "key_rope": None if key is None else key.squeeze(2).transpose(0, 1),  # [b, s, rope]
        }


Run = tuple[int, int, int, int]
"""First query token, end of the query tokens, first and end of the last token's keys (equal in padding)."""


def split_by_runs(tensor: Tensor, runs: Sequence[Run], dim: int) -> Sequence[Tensor]:
    """Split a tensor's dimension of query tokens into runs."""
    # One split, so that backward concatenates the gradients of all runs once.
    sizes = [end - first for first, end, _, _ in runs]
    return tensor.split(sizes, dim)  # type: ignore[no-any-return]


def keeps_parts_apart(device: torch.device) -> bool:
    """Return whether this device's operators take latent and rotary dimensions as separate tensors."""
    return device.type == "npu"


def query_and_key(query: Tensor, query_rope: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Return absorbed query and key in the form that passes through Megatron's layer and checkpoint.

    If the device's operators take rotary dimensions separately, the query has only its latent dimensions. Its
    rotary dimensions of all heads are appended to the key: ``[s, b, 1, latent + rope + heads * rope]``.
    :func:`parts_of` undoes this.

    Args:
        query: latent dimensions of the query, ``[s, b, heads, latent]``.
        query_rope: rotary dimensions of the query, ``[s, b, heads, rope]``.
        key: absorbed key, ``[s, b, 1, latent + rope]``.
    """
    if keeps_parts_apart(query.device):
        # Contiguous here, so that Megatron's layer makes no copy: recomputation discards this tensor.
        # [s, b, heads, rope] -> [s, b, 1, heads * rope], next to the key's [s, b, 1, latent + rope]
        return query.contiguous(), torch.cat([key, query_rope.flatten(2).unsqueeze(2)], dim=-1)
    return torch.cat([query, query_rope], dim=-1), key  # [s, b, heads, latent + rope]


def parts_of(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor | None]:
    """Split a key made by :func:`query_and_key` into the key and the query's rotary dimensions.

    Args:
        query: query in any form; only its latent dimensions if the rotary ones are separate.
        key: key in any form.
        value: up-projection ``[heads, value_dim, latent]``, or per-head value.

    Returns:
        The key, and the query's rotary dimensions ``[s, b, heads, rope]``; None if ``query`` contains them.
    """
    latent, heads = value.shape[-1], query.shape[2]
    if value.dim() != 3 or query.shape[-1] != latent:
        return key, None
    # key width = latent + rope + heads * rope, e.g. 512 + 64 + 8 * 64 = 1088
    rope = (key.shape[-1] - latent) // (1 + heads)
    key, of_query = key.split([latent + rope, heads * rope], dim=-1)  # [keys, b, 1, ...]
    # With more keys than queries, the queries are the last tokens.
    return key, of_query[-query.shape[0] :].squeeze(2).unflatten(-1, (heads, rope))  # [s, b, heads, rope]
