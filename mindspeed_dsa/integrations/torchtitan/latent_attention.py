"""Sparse attention in place of dense latent attention, shared by all TorchTitan releases.

The model's own layers project queries and latent keys. If these are DTensors, our operators get the local
tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Partial

from mindspeed_dsa.context_parallel.key_exchange import KeyExchange
from mindspeed_dsa.context_parallel.strategy import ContextParallelStrategy
from mindspeed_dsa.integrations.torchtitan.context import Context, Keys, Operands, exchanged
from mindspeed_dsa.integrations.torchtitan.in_graphs import call_in_graph, node, number, numbered
from mindspeed_dsa.integrations.torchtitan.names import SparseOptions
from mindspeed_dsa.ops.dsa import DSAOutput, deepseek_sparse_attention, is_faster_by_head
from mindspeed_dsa.ops.row_ranges import TO_LAST_KEY

_WRAPPED = ("_checkpoint_wrapped_module", "_orig_mod")
Rotate = Callable[[Tensor], Tensor]
"""Model's rotary embedding (adjacent pairs), a function of ``[..., heads, rope]`` or ``[..., 1, rope]``."""


class Projected(NamedTuple):
    """Queries and latent keys of a layer, for this rank's heads."""

    query: Tensor
    """``[batch, rows, heads, nope + rope]``, rotated."""
    keys: Keys
    """Latent, normalised, and rotary dimensions, rotated, that all heads share: ``rank + rope`` together."""
    up_projection: Tensor
    """``[heads * (nope + value), rank]``: projection of the latent to keys and values of each head."""
    softmax_scale: float
    value_dim: int


class IndexOperands(NamedTuple):
    """Indexer's queries, keys and weights; all heads are on every tensor parallel rank."""

    query: Tensor
    """``[batch, rows, index_heads, index_dim]``."""
    keys: Keys
    """Keys of ``index_dim``."""
    weights: Tensor
    """``[batch, rows, index_heads]`` fp32, with all scales applied."""


def shared_key(latent: Tensor, key_rope: Tensor) -> Tensor:
    """Concatenate the key's latent ``[..., rows, rank]`` and rotary dimensions ``[..., rows, rope]``."""
    return torch.cat([local(latent, shared=True), local(key_rope, shared=True)], dim=-1)


def index_operands(
    indexer: Any,
    hidden: Tensor,
    query_input: Tensor,
    rotate: Rotate,
    options: SparseOptions,
    rope_dim: int,
    start: Callable[[Tensor], Keys] = Keys,
) -> IndexOperands:
    """Project the indexer's operands, with DeepSeek-V3.2's names and shapes, the key first.

    Args:
        indexer: module with ``wq_b``, ``wk``, ``k_norm`` and ``weights_proj``.
        hidden: input of the attention, ``[..., rows, dim]``.
        query_input: normalised latent query ``[..., rows, q_lora_rank]``, or ``hidden`` without one.
        rotate: model's rotary embedding.
        options: options of sparse attention.
        rope_dim: number of rotated dimensions, the first ones of each head.
        start: function that starts to gather keys.
    """

    def rotated(x: Tensor) -> Tensor:
        rope, rest = x.split([rope_dim, options.index_dim - rope_dim], dim=-1)
        if options.rope_layout == "halves":
            # DeepSeek-V3.2 pairs dimension i with i + rope/2, and the model's embedding pairs 2i with 2i + 1.
            # Reordering query and key alike puts the pairs side by side: (0, 1, 2, 3) becomes (0, 2, 1, 3).
            # Their dot product does not depend on the order.
            rope = rope.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
        return local(torch.cat([rotate(rope), rest], dim=-1))

    keys = start(rotated(indexer.k_norm(indexer.wk(hidden)).unsqueeze(-2)).squeeze(-2))
    weights = indexer.weights_proj(hidden).float() * (options.index_heads * options.index_dim) ** -0.5
    query = indexer.wq_b(query_input).unflatten(-1, (options.index_heads, options.index_dim))
    return IndexOperands(rotated(query), keys, local(weights))


def local(x: Tensor, shared: bool = False) -> Tensor:
    """Return the local tensor of a DTensor; return a plain tensor unchanged.

    Args:
        x: any tensor.
        shared: whether the ranks' gradients of a replicated tensor are partial and must be summed.
    """
    if not isinstance(x, DTensor):
        return x
    if not shared:
        return x.to_local()
    return x.to_local(grad_placements=[Partial() if p.is_replicate() else p for p in x.placements])


@contextmanager
def own_random_numbers(device: torch.device) -> Iterator[None]:
    """Run the block with newly seeded random generators, and restore the generators' state afterwards."""
    # The seed is the next number of the device's generator. Ranks with equal generators therefore use equal
    # seeds, and each layer uses a different one. fork_rng always saves the CPU generator; `devices` are
    # additional ones.
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type="cuda" if device.type == "cpu" else device.type):
        torch.manual_seed(int(torch.randint(1 << 31, (), device=device)))
        yield


def document_starts(positions: Tensor) -> Tensor:
    """Return the index where each token's document begins; ``positions`` ``[batch, rows]`` restart at 0."""
    index = torch.arange(positions.shape[-1], device=positions.device)
    # positions 0 1 2 0 1: starts 0 0 0 3 3.
    return torch.where(positions == 0, index, 0).cummax(dim=-1).values


class Attention(NamedTuple):
    """Core attention of a layer with sparse attention."""

    options: SparseOptions
    rows: int
    """Tokens of a step on all ranks; the loss is a mean over them."""
    tensor: ProcessGroup | None = None
    """Tensor parallel group over which heads are split; ``None`` without one."""
    context: Context | None = None
    """Context parallelism of the layer; ``None`` without it."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Attention:
        # A pipeline copies the model for its stages, and process groups cannot be copied.
        return self

    def start(self, key: Tensor) -> Keys:
        """Start to gather keys ``[batch, rows, dim]`` over context parallel ranks, if there are any."""
        return Keys.start(key, self.context)

    def gathers_again_behind(self, output: Tensor) -> Tensor:
        """Return the layer's output; when its gradient arrives, freed keys start to be gathered again."""
        if isinstance(self.context, KeyExchange):
            self.context.start_again_with(output)
        return output

    def attend(
        self, projected: Projected, index: IndexOperands, positions: Tensor | None, trains: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Attend to the keys that the indexer selects.

        Attention runs on keys and values per head or in the absorbed form, whichever is faster on the device.
        Under context parallelism the form is absorbed.

        Args:
            projected: layer's projections.
            index: indexer's projections.
            positions: ``[batch, rows]`` int, position of each token in its document, if tokens see only their
                own document; ``None``: tokens see all before them.
            trains: whether to compute the indexer's loss.

        Returns:
            Output ``[batch, rows, heads * value_dim]`` and detached indexer loss, a mean over this rank's
            tokens without the coefficient. The output's backward also backpropagates the loss. The loss is
            ``None`` if ``trains`` is false.
        """
        options, value_dim = self.options, projected.value_dim
        query, width = projected.query, projected.keys.local.shape[-1]
        heads, rank = query.shape[2], projected.up_projection.shape[-1]
        rope = width - rank
        nope = query.shape[-1] - rope
        up = projected.up_projection.unflatten(0, (heads, nope + value_dim))
        common: dict[str, Any] = {
            "topk": options.topk,
            "softmax_scale": projected.softmax_scale,
            "stage": options.stage,
            "with_loss": trains and options.loss_coeff > 0,
            "reduction": "sum",
            "tp_group": self.tensor,
            "backend": options.backend,
        }
        # Width of a key and value per head, by head and absorbed. DeepSeek-V3.2: 128 + 64 + 128 = 320 by
        # head, 512 + 64 + 512 = 1088 absorbed.
        rows, widths = query.shape[1], (nope + rope + value_dim, rank + rope + rank)
        if self.context is None and is_faster_by_head(
            query.device, rows, options.topk, heads, widths, options.backend
        ):
            latent, key_rope = projected.keys.local.split([rank, rope], dim=-1)
            both = F.linear(latent, up.flatten(0, 1)).unflatten(-1, (heads, -1))
            key, value = both.split([nope, value_dim], dim=-1)
            key = torch.cat([key, key_rope[:, :, None].expand(-1, -1, heads, -1)], dim=-1)
            starts = None if positions is None else document_starts(positions)
            out, loss, _ = deepseek_sparse_attention(
                query, key, value, index.query, index.keys.local, index.weights, starts=starts, **common
            )
        else:
            up_key, up_value = up.split([nope, value_dim], dim=1)
            # Move the key's up-projection to the query: q (U c) = (q U) c.
            absorbed = torch.einsum("blhd,hdr->blhr", query[..., :nope], up_key)
            query = torch.cat([absorbed, query[..., nope:]], dim=-1)
            common["value_dim"] = rank
            mixed, loss = self._absorbed(query, projected.keys, index, positions, common)
            # The output is a mixture of latents. Project it to each head's values.
            out = torch.einsum("blhr,hvr->blhv", mixed, up_value)
        out, mean = out.flatten(2), None
        read = [projected.keys]
        if loss is not None:
            mean = loss.detach() / (out.shape[0] * out.shape[1])
            # The operator returns a sum over tokens. The gradient uses the mean over a whole step's tokens.
            out = _WithLoss.apply(out, loss, options.loss_coeff / self.rows)
            read.append(index.keys)  # without a loss, backward does not read the index keys
        if isinstance(self.context, KeyExchange):
            out = self.context.free(out, [keys.gathered for keys in read if keys.gathered is not None])
        return out, mean

    def _absorbed(
        self,
        query: Tensor,
        keys: Keys,
        index: IndexOperands,
        positions: Tensor | None,
        common: dict[str, Any],
    ) -> tuple[Tensor, Tensor | None]:
        """Return mixtures of latents ``[batch, rows, heads, rank]``, and the loss as a sum over tokens."""
        context, ranges = self.context, dict[str, Tensor | None]()
        operands = Operands(query, keys.wait(), index.query, index.keys.wait(), index.weights)
        if isinstance(context, KeyExchange):
            if positions is None:
                return _by_runs(operands, context.runs(query.shape[1]), common)
            ends = context.ends(query.shape[1], query.device).expand_as(positions)
            ranges = {"starts": (ends - 1 - positions).clamp_min(0).int(), "ends": ends}
        elif isinstance(context, ContextParallelStrategy):
            operands, at = exchanged(context, operands)
            ranges = {"ends": None if at is None else (at + 1).to(query.device, torch.int32)}
        elif positions is not None:
            ranges = {"starts": document_starts(positions)}
        out, loss, _ = _attend(operands, **ranges, **common)
        if isinstance(context, ContextParallelStrategy):
            out = context.merge(out.transpose(0, 1)).transpose(0, 1)
        return out, loss


def _attend(operands: Operands, **options: Any) -> DSAOutput:
    query, key, *index = operands
    return deepseek_sparse_attention(query, key, None, *index, **options)


def _by_runs(
    operands: Operands, runs: list[tuple[int, int, int, int]], common: dict[str, Any]
) -> tuple[Tensor, Tensor | None]:
    """Attend once per run of contiguous tokens, with the keys up to the run's end.

    All backends take this form, also on Ascend, and no range of keys has to be read from a device.
    """
    query, key, index_query, index_key, index_weights = operands
    results = [
        _attend(
            Operands(
                query[:, first:end],
                key[:, :high],
                index_query[:, first:end],
                index_key[:, :high],
                index_weights[:, first:end],
            ),
            form=TO_LAST_KEY,
            **common,
        )
        for first, end, _, high in runs
    ]
    losses = [result.loss for result in results if result.loss is not None]
    out = torch.cat([result.out for result in results], dim=1)
    return out, torch.stack(losses).sum() if losses else None


class _WithLoss(torch.autograd.Function):
    """Identity on the attention output whose backward also backpropagates the indexer loss."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, loss: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        ctx.save_for_backward(loss)
        return out.view_as(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Any, ...]:
        (loss,) = ctx.saved_tensors
        return grad_out, torch.full_like(loss, ctx.factor), None


def indexer_losses(model: nn.Module) -> dict[str, float]:
    """Return a dict from module name to the indexer loss of the last pass, averaged over this rank's tokens.

    Copies the losses from the device, which blocks. Layers without a loss, such as layers of other pipeline
    stages, are left out. The names have no parts of wrappers for recomputation or compilation.
    """
    # Wrappers have the attributes of their modules, but not in a dictionary of their own.
    return {
        ".".join(part for part in name.split(".") if part not in _WRAPPED): float(loss)
        for name, module in model.named_modules()
        if isinstance(loss := vars(module).get("indexer_loss"), Tensor)
    }


def sparse_output(
    layer: Any, x: Tensor, key: tuple[Tensor, Tensor], rotate: Rotate, positions: Tensor | None
) -> Tensor:
    """Return the output of a layer of latent attention whose keys its indexer selects, shaped as ``x``.

    Args:
        layer: TorchTitan's latent attention with ``indexer`` and ``_core``; gets ``indexer_loss``.
        x: hidden states ``[batch, rows, dim]``, or ``[rows, dim]`` of concatenated sequences.
        key: latent ``[..., rows, rank]`` and rotary dimensions ``[..., rows, 1, rope]`` from ``layer.wkv_a``,
            neither normalised nor rotated.
        rotate: model's rotary embedding.
        positions: see :meth:`Attention.attend`.
    """
    core, flat = layer._core, x.dim() == 2
    # Keys first: under context parallelism their transfer is hidden behind the projections of queries.
    latent, key_rope = key
    keys = core.start(shared_key(layer.kv_norm(latent), rotate(key_rope).squeeze(-2)))
    query_input = x if layer.q_lora_rank == 0 else layer.q_norm(layer.wq_a(x))
    # The indexer has its own loss: its inputs are detached, and without the loss it needs no graph.
    trains = layer.training and torch.is_grad_enabled() and core.options.loss_coeff > 0
    with torch.set_grad_enabled(trains):
        index = index_operands(
            layer.indexer,
            x.detach(),
            query_input.detach(),
            rotate,
            core.options,
            layer.qk_rope_head_dim,
            core.start,
        )
    placed = layer.wq(x) if layer.q_lora_rank == 0 else layer.wq_b(query_input)
    # [batch, rows, heads, nope + rope]; the rotary part comes last.
    query_nope, query_rope = placed.unflatten(-1, (-1, layer.qk_head_dim)).split(
        [layer.qk_nope_head_dim, layer.qk_rope_head_dim], dim=-1
    )
    projected = Projected(
        local(torch.cat([query_nope, rotate(query_rope)], dim=-1)),
        keys,
        local(layer.wkv_b.weight),
        layer.softmax_scale,
        layer.v_head_dim,
    )
    if flat:
        projected = projected._replace(query=projected.query[None], keys=Keys(keys.local[None]))
        index = IndexOperands(index.query[None], Keys(index.keys.local[None]), index.weights[None])
    out = attend(layer, projected, index, positions, trains)
    out = out.squeeze(0) if flat else out
    if isinstance(placed, DTensor):  # sharded by heads, like the query
        out = DTensor.from_local(out, placed.device_mesh, placed.placements, run_check=False)
    return core.gathers_again_behind(layer.wo(out))  # type: ignore[no-any-return]


# -- attention in compiled graphs --------------------------------------------------------------


def enter(layer: Any) -> None:
    """Give an attention layer the number by which compiled graphs call it.

    The number is a tensor: the compiler would make another graph for each layer of a constant.
    """
    layer.number = torch.tensor([number(layer)], device="cpu")


def attend(
    layer: Any, projected: Projected, index: IndexOperands, positions: Tensor | None, trains: bool
) -> Tensor:
    """Attend with a layer's core, and store the indexer's loss in the layer; see :meth:`Attention.attend`.

    In a compiled graph this is one node, between the projections before and after it.
    """
    if not torch.compiler.is_compiling():
        out, layer.indexer_loss = layer._core.attend(projected, index, positions, trains)
        return out  # type: ignore[no-any-return]
    query, keys, up_projection, softmax_scale, value_dim = projected
    operands = (query, keys.local, up_projection, index.query, index.keys.local, index.weights, positions)
    static = f"{softmax_scale} {value_dim} {trains}"
    return call_in_graph("attention", static, layer.number, *operands)[0]


def _attend_in_layer(
    static: str,
    layer: Tensor,
    query: Tensor,
    key: Tensor,
    up_projection: Tensor,
    index_query: Tensor,
    index_key: Tensor,
    index_weights: Tensor,
    positions: Tensor | None,
) -> tuple[Tensor]:
    softmax_scale, value_dim, trains = static.split()
    projected = Projected(query, Keys(key), up_projection, float(softmax_scale), int(value_dim))
    index = IndexOperands(index_query, Keys(index_key), index_weights)
    out = attend(numbered(layer), projected, index, positions, trains == "True")
    return (out.contiguous(),)


def _attended(static: str, layer: Tensor, query: Tensor, *operands: Tensor | None) -> tuple[Tensor]:
    batch, rows, heads, _ = query.shape
    return (query.new_empty(batch, rows, heads * int(static.split()[1])),)


node("attention", _attend_in_layer, _attended)
