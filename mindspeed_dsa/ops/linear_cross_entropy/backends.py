"""Backends of linear cross entropy: a reference with all logits in memory, and chunks of tokens."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_dsa.ops.backend import Backend, Call
from mindspeed_dsa.ops.precision import raising_factor, wide

_FEWEST_ROWS = 256
_STEP = 64


class Accumulator(Protocol):
    """Receiver that accumulates the gradient of a weight outside autograd."""

    def target(self) -> Tensor:
        """Return the ``[vocabulary, hidden]`` buffer to which the gradient is added in place."""

    def result(self) -> Tensor | None:
        """Return the gradient that autograd gets for the weight after everything has been added."""


@dataclass(frozen=True)
class LossCall(Call):
    """Arguments of a loss; their shapes have been checked.

    Attributes:
        hidden: ``[tokens, hidden]``.
        weight: ``[vocabulary, hidden]``, this rank's part of the projection.
        labels: ``[tokens]`` int64, entries of the whole vocabulary.
        token_weights: ``[tokens]`` fp32 (fp64 for fp64), expected loss gradients up to a common factor.
        logit_scale: factor of the logits.
        group: group of the ranks that hold the parts of the vocabulary.
        first: first vocabulary entry of this rank.
        rows: tokens per chunk; 0 leaves the choice to the backend.
        wants_top: whether the index of each token's largest logit is needed.
    """

    hidden: Tensor
    weight: Tensor
    labels: Tensor
    token_weights: Tensor
    logit_scale: float
    group: dist.ProcessGroup | None
    first: int
    rows: int
    wants_top: bool

    @property
    def ranks(self) -> int:
        """Return the number of ranks that share the vocabulary."""
        return 1 if self.group is None else dist.get_world_size(self.group)

    def on_rank(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return labels as rows of this rank's weight (0 if on another rank), and whether they are on it."""
        local = labels - self.first
        held = (local >= 0) & (local < self.weight.shape[0])
        return local.masked_fill(~held, 0), held


@dataclass(frozen=True)
class Losses:
    """Results of a forward pass.

    Attributes:
        loss: ``[tokens]``, fp32 or fp64.
        top: ``[tokens]``, largest of this rank's logits, in the dtype of the loss.
        top_index: ``[tokens]`` int64, index of ``top`` in this rank's vocabulary; meaningless unless
            ``wants_top``.
        largest: ``[tokens]``, largest logit of the whole vocabulary.
        log_sum: ``[tokens]``, natural log of the sum of exp(logit - largest) over the whole vocabulary. Added
            to a large ``largest`` it would lose digits, so they are kept separately.
    """

    loss: Tensor
    top: Tensor
    top_index: Tensor
    largest: Tensor
    log_sum: Tensor


class LinearCrossEntropy(Backend):
    """Backend of linear cross entropy."""

    KIND: ClassVar[str] = "chunks"
    """``"autograd"``: the forward is differentiable; ``"chunks"``: gradients have separate functions."""

    @abstractmethod
    def losses(self, call: LossCall) -> Losses:
        """Return the losses and the largest logits of all tokens."""


class Reference(LinearCrossEntropy):
    """Backend that computes the loss from all logits in plain PyTorch, with backward by autograd."""

    KIND = "autograd"

    def losses(self, call: LossCall) -> Losses:
        dtype = wide(call.hidden.dtype)
        logits = (call.hidden @ call.weight.t()).to(dtype) * call.logit_scale  # [tokens, vocabulary]
        top, top_index = logits.detach().max(-1)
        largest = top if call.group is None else top.clone()
        if call.group is not None:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=call.group)
        shifted = logits - largest[:, None]
        labels, held = call.on_rank(call.labels)
        predicted = shifted.gather(1, labels[:, None])[:, 0].masked_fill(~held, 0)  # [tokens]
        log_sum = _over_ranks(shifted.exp().sum(-1), call.group).log()
        loss = log_sum - _over_ranks(predicted, call.group)
        return Losses(loss, top, top_index, largest, log_sum.detach())


def _over_ranks(part: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """All-reduce ``part``; backward passes the gradient through unchanged."""
    if group is None:
        return part
    total = part.detach().clone()
    dist.all_reduce(total, group=group)
    return part + (total - part.detach())


class _Room:
    """Scratch memory for the chunks of a pass, reused from chunk to chunk.

    Newly allocated memory must be mapped and cleared by the operating system, which takes as long as reading
    it several times.
    """

    def __init__(self) -> None:
        self._held: dict[str, Tensor] = {}

    def product(self, name: str, left: Tensor, right: Tensor) -> Tensor:
        """Compute ``left @ right`` into the buffer ``name``, valid until its next use."""
        shape = (left.shape[0], right.shape[1])
        return torch.mm(left, right, out=self._take(name, shape, left, left.dtype))

    def wide(self, name: str, tensor: Tensor) -> Tensor:
        """Widen a tensor to fp32 in the buffer ``name``; return the tensor itself if it is wide enough."""
        dtype = wide(tensor.dtype)
        if dtype == tensor.dtype:
            return tensor
        return self._take(name, tuple(tensor.shape), tensor, dtype).copy_(tensor)

    def _take(self, name: str, shape: tuple[int, ...], like: Tensor, dtype: torch.dtype) -> Tensor:
        numbers = math.prod(shape)
        held = self._held.get(name)
        if held is None or held.numel() < numbers:
            held = self._held[name] = torch.empty(numbers, dtype=dtype, device=like.device)
        return held[:numbers].view(shape)


class Chunked(LinearCrossEntropy):
    """Backend that computes loss and gradients for one chunk of tokens at a time, in PyTorch.

    For each chunk, logits are computed, reduced to losses, overwritten with their gradient, and multiplied
    with both operands. No logits outlive their chunk.
    """

    CHUNK_BYTES: ClassVar[int] = 512 << 20
    """Bytes of a chunk's logits. More tokens mean fewer passes over the weight's gradient."""
    WIDE_BYTES: ClassVar[int] = 256 << 20
    """Bytes of the part of a chunk that is in fp32, and of the part of the weight gradient added at once."""
    NORMALISES: ClassVar[bool] = False
    """Whether :meth:`_exponentials` divides by this rank's sum of the row."""

    def losses(self, call: LossCall) -> Losses:
        return self.losses_and_gradients(call, None, None)

    def losses_and_gradients(
        self, call: LossCall, grad_hidden: Tensor | None, grad_weight: Tensor | None
    ) -> Losses:
        """Return the losses, and compute gradients in the same pass if requested.

        Args:
            call: arguments of the loss.
            grad_hidden: ``[tokens, hidden]``, output or None. Receives the gradient of each token's own
                loss times the factor :func:`raised`, without ``logit_scale``.
            grad_weight: ``[vocabulary, hidden]`` fp32 or fp64, accumulator or None. The gradient of the loss
                sum weighted by ``token_weights`` is added, also without ``logit_scale``.
        """
        room = _Room()
        chunks = [self._chunk(call, part, room, grad_hidden, grad_weight) for part in self.parts(call)]
        return Losses(*(torch.cat(parts) for parts in zip(*chunks, strict=True)))  # [tokens] each

    def _chunk(
        self,
        call: LossCall,
        part: slice,
        room: _Room,
        grad_hidden: Tensor | None,
        grad_weight: Tensor | None,
    ) -> tuple[Tensor, ...]:
        """Return the losses and maxima for one chunk of tokens, and update the gradients."""
        logits = room.product("logits", call.hidden[part], call.weight.t())  # [chunk tokens, vocabulary]
        wants_gradient = grad_hidden is not None or grad_weight is not None
        results = [
            self._rows(call, room, rows, labels, wants_gradient)
            for rows, labels in zip(*self._wide_parts(logits, call.labels[part]), strict=True)
        ]
        if wants_gradient:
            self._multiply(call, part, room, logits, call.token_weights[part], grad_hidden, grad_weight)
        return tuple(torch.cat(parts) for parts in zip(*results, strict=True))  # [chunk tokens] each

    def _rows(
        self, call: LossCall, room: _Room, logits: Tensor, labels: Tensor, wants_gradient: bool
    ) -> tuple[Tensor, ...]:
        """Return the losses of rows, and overwrite their logits with :func:`raised` times the gradient."""
        numbers = _scaled(call, room, logits)
        local, held = call.on_rank(labels)
        top, top_index = numbers.max(-1) if call.wants_top else (numbers.amax(-1), local)
        predicted = numbers.gather(1, local[:, None])[:, 0].masked_fill_(~held, 0)  # [rows]
        total = self._exponentials(numbers, top)
        largest, log_sum, predicted = _joined(call, top, total, predicted)
        in_vocabulary = (labels >= 0) & (labels < call.ranks * call.weight.shape[0])
        # As in Megatron, a label outside the vocabulary counts as the largest logit.
        loss = log_sum - (predicted - largest).masked_fill(~in_vocabulary, 0)
        if wants_gradient:
            multiplier = None
            if call.group is not None or not self.NORMALISES:
                # exp(logit - top) times this is the probability over all ranks, exp(logit - largest) / sum.
                multiplier = torch.exp(top - largest - log_sum)
                if self.NORMALISES:
                    # The exponentials have been divided by this rank's sum: undo it.
                    multiplier.mul_(total)
            _to_gradient(numbers, multiplier, local, held, logits)
        return loss, top, top_index, largest, log_sum

    def _exponentials(self, numbers: Tensor, top: Tensor) -> Tensor:
        """Overwrite rows with exp(number - top); divide by the sum if :attr:`NORMALISES`. Return the sums."""
        return numbers.sub_(top[:, None]).exp_().sum(-1)

    def add_gradients(
        self,
        call: LossCall,
        sums: Sequence[Tensor],
        factors: Tensor,
        grad_hidden: Tensor | None,
        grad_weight: Tensor | None,
    ) -> None:
        """Compute gradients from recomputed logits, without communication between ranks.

        Args:
            call: arguments of the loss, or of a selection of its tokens.
            sums: ``largest`` and ``log_sum``, ``[tokens]`` each, of these tokens.
            factors: ``[tokens]``, gradients of the token losses, multiplied with ``logit_scale`` by the
                caller.
            grad_hidden: ``[tokens, hidden]``, uninitialized output for the gradient, or None.
            grad_weight: ``[vocabulary, hidden]``, accumulator to which the weight gradient is added, or None.
        """
        room = _Room()
        for part in self.parts(call):
            logits = room.product("logits", call.hidden[part], call.weight.t())
            of_parts = self._wide_parts(logits, call.labels[part], *(total[part] for total in sums))
            for rows, labels, largest, log_sum in zip(*of_parts, strict=True):
                numbers = _scaled(call, room, rows).sub_(largest[:, None]).exp_()
                _to_gradient(numbers, log_sum.neg().exp_(), *call.on_rank(labels), rows)
            self._multiply(call, part, room, logits, factors[part], grad_hidden, grad_weight)
            if grad_hidden is not None:
                by_token = (factors[part] / raised(logits.dtype))[:, None]
                grad_hidden[part] = (grad_hidden[part] * by_token).to(logits.dtype)

    def _multiply(
        self,
        call: LossCall,
        part: slice,
        room: _Room,
        grad_logits: Tensor,
        factors: Tensor,
        grad_hidden: Tensor | None,
        grad_weight: Tensor | None,
    ) -> None:
        """Compute a chunk's gradients from its logit gradients, which are scaled by :func:`raised`.

        ``factors`` apply to the weight's gradient only.
        """
        if grad_hidden is not None:
            torch.mm(grad_logits, call.weight, out=grad_hidden[part])
        if grad_weight is None:
            return
        hidden = call.hidden[part]
        if grad_weight.dtype == hidden.dtype:
            grad_weight.addmm_(grad_logits.t(), hidden * factors[:, None])  # [vocabulary, hidden]
            return
        weighted, unit = _weighted(hidden, factors)
        # In parts, because an addition of another dtype would copy the whole product.
        size = max(_FEWEST_ROWS, self.WIDE_BYTES // (2 * hidden.shape[1] * grad_weight.itemsize))
        # [size, hidden], [chunk tokens, size]
        for some, gradients in zip(grad_weight.split(size), grad_logits.split(size, dim=1), strict=True):
            product = room.product("product", gradients.t(), weighted)
            some.addcmul_(room.wide("wide product", product), unit)

    def _wide_parts(self, logits: Tensor, *others: Tensor) -> list[tuple[Tensor, ...]]:
        """Split logits, and tensors with one number per row, into parts small enough to process in fp32."""
        rows = max(1, self.WIDE_BYTES // (logits.shape[1] * wide(logits.dtype).itemsize))
        return [tensor.split(rows) for tensor in (logits, *others)]

    def parts(self, call: LossCall) -> list[slice]:
        """Return the chunks of tokens."""
        rows = call.rows
        if not rows:
            fitting = self.CHUNK_BYTES // (call.weight.shape[0] * call.weight.itemsize)
            rows = max(_FEWEST_ROWS, fitting // _STEP * _STEP)
        return [slice(first, first + rows) for first in range(0, call.hidden.shape[0], rows)]


class Cpu(Chunked):
    """The chunked backend with smaller chunks, which already saturate a CPU."""

    CHUNK_BYTES = 224 << 20
    WIDE_BYTES = 32 << 20
    NORMALISES = True

    def _exponentials(self, numbers: Tensor, top: Tensor) -> Tensor:
        # PyTorch's softmax keeps a row in the cache; separate steps would each read and write all rows. The
        # largest probability of a row is exp(0) / sum.
        torch.softmax(numbers, -1, out=numbers)
        return numbers.amax(-1).reciprocal_()


class Cuda(Chunked):
    """The chunked backend with its default chunk size, which keeps tensor cores busy."""


class Npu(Chunked):
    """The chunked backend with the same chunk size as on GPUs."""


def raised(dtype: torch.dtype) -> float:
    """Return the scale factor of logit gradients stored in this dtype: 256 for fp16, else 1.

    Most probabilities of a large vocabulary would be subnormal in fp16. The loss scale cannot help, because
    it arrives with the incoming gradient, after the probabilities have been rounded.
    """
    return 256.0 if dtype == torch.float16 else 1.0


def _weighted(hidden: Tensor, factors: Tensor) -> tuple[Tensor, Tensor]:
    """Return 16-bit hidden states times normalized token factors, and the factor that undoes all scaling.

    Factors are divided by the largest factor, so that they fit 16 bits, and equal factors add no rounding.
    For fp16 each channel is also multiplied with a power of two. This power is the largest for which no
    product with :func:`raised` gradients overflows, even if all tokens have the same label.

    Args:
        hidden: ``[tokens, hidden]``, bf16 or fp16.
        factors: ``[tokens]`` fp32.

    Returns:
        Weighted states ``[tokens, hidden]`` in the dtype of ``hidden``; and the fp32 factor for their
        products with :func:`raised` gradients, a scalar, or ``[hidden]`` for fp16.
    """
    largest = factors.abs().amax()
    unit = largest.masked_fill(largest == 0, 1)
    weighted = hidden * (factors / unit)[:, None]
    if hidden.dtype == torch.float16:
        # With sums below 2 ** 7, and raised gradients up to 2 ** 8, products sum to less than 2 ** 15.
        fitting = raising_factor(torch.linalg.vector_norm(weighted, 1, dim=0), 7, least=-60)
        weighted, unit = weighted.mul_(fitting), unit / (fitting * raised(hidden.dtype))
    return weighted.to(hidden.dtype), unit


def _to_gradient(
    numbers: Tensor, multiplier: Tensor | None, columns: Tensor, held: Tensor, logits: Tensor
) -> None:
    """Overwrite logits with their gradient times :func:`raised`, computed from exponentials.

    Args:
        numbers: ``[rows, vocabulary]`` fp32 or fp64; overwritten.
        multiplier: ``[rows]``, factors that turn the exponentials into probabilities; None if they are
            probabilities.
        columns: ``[rows]``, labels as columns of this rank.
        held: ``[rows]`` bool, whether the label is on this rank.
        logits: ``[rows, vocabulary]``, overwritten; ``numbers`` may be the same memory.
    """
    raising = raised(logits.dtype)
    if multiplier is not None:
        numbers.mul_(multiplier.mul_(raising)[:, None])
    elif raising != 1:
        numbers.mul_(raising)
    # The gradient is probability - onehot(label), here for labels on this rank.
    _subtract(numbers, columns, held.to(numbers.dtype).mul_(raising))
    if numbers is not logits:
        logits.copy_(numbers)


def _joined(call: LossCall, top: Tensor, total: Tensor, predicted: Tensor) -> tuple[Tensor, ...]:
    """Return the largest logit, the log of the sum relative to it, and the label's logit, over all ranks.

    Args:
        call: arguments of the loss.
        top: ``[tokens]``, largest of this rank's logits.
        total: ``[tokens]``, sum of exp(logit - top).
        predicted: ``[tokens]``, logit of the label, 0 if another rank has it.
    """
    if call.group is None:
        return top, total.log(), predicted
    local = torch.stack((top, total, predicted))  # [3, tokens]
    gathered = [torch.empty_like(local) for _ in range(call.ranks)]
    dist.all_gather(gathered, local, group=call.group)
    tops, totals, labels = torch.stack(gathered, dim=1)  # [ranks, tokens] each
    # Rescale each rank's sum to the common maximum. Only the rank of the label has a logit other than 0.
    largest = tops.amax(0)
    return largest, (totals * torch.exp(tops - largest)).sum(0).log(), labels.sum(0)


def _scaled(call: LossCall, room: _Room, logits: Tensor) -> Tensor:
    """Return scaled logits in fp32 or wider, to be modified in place; only narrower logits are copied."""
    numbers = room.wide("logits in fp32", logits)
    return numbers if call.logit_scale == 1 else numbers.mul_(call.logit_scale)


def _subtract(numbers: Tensor, columns: Tensor, amounts: Tensor) -> None:
    """Subtract an amount from one element per row; deterministic on GPUs, unlike ``scatter_add_``."""
    numbers[torch.arange(len(columns), device=columns.device), columns] -= amounts
