"""Backends of linear cross entropy: the formula with whole logits, and chunks of tokens on every device."""

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
    """Place where the gradient of a weight is summed up, other than what autograd passes on."""

    def target(self) -> Tensor:
        """Return ``[vocabulary, hidden]``, to which the gradient is added in place."""

    def result(self) -> Tensor | None:
        """Return what autograd gives to the weight once everything is added."""


@dataclass(frozen=True)
class LossCall(Call):
    """Arguments of a loss, of checked shapes.

    Attributes:
        hidden: ``[tokens, hidden]``.
        weight: ``[vocabulary, hidden]``, this rank's part of the projection.
        labels: ``[tokens]`` int64, entries of the whole vocabulary.
        token_weights: ``[tokens]`` fp32 (fp64 for fp64), expected gradients of the losses up to one factor.
        logit_scale: factor of the logits.
        group: tensor parallel ranks that hold the other parts of the vocabulary, in this order.
        rows: tokens of a chunk; 0 leaves it to the backend.
        wants_top: whether the place of each token's largest logit is wanted.
    """

    hidden: Tensor
    weight: Tensor
    labels: Tensor
    token_weights: Tensor
    logit_scale: float
    group: dist.ProcessGroup | None
    rows: int
    wants_top: bool

    @property
    def ranks(self) -> int:
        """Return how many ranks share the vocabulary."""
        return 1 if self.group is None else dist.get_world_size(self.group)

    @property
    def first(self) -> int:
        """Return the first entry of the vocabulary that this rank holds."""
        return 0 if self.group is None else dist.get_rank(self.group) * self.weight.shape[0]

    def on_rank(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return labels as rows of this rank's weight, 0 where it has none, and whether it has one."""
        local = labels - self.first
        held = (local >= 0) & (local < self.weight.shape[0])
        return local.masked_fill(~held, 0), held


@dataclass(frozen=True)
class Losses:
    """Results of a forward pass.

    Attributes:
        loss: ``[tokens]``, fp32 or fp64.
        top: ``[tokens]``, the largest of this rank's logits, in the dtype of the loss.
        top_index: ``[tokens]`` int64, its place on this rank; of no meaning where nobody wants it.
        largest: ``[tokens]``, the largest logit of the whole vocabulary.
        log_sum: ``[tokens]``, natural log of the sum of exp(logit - largest) over it. Their sum would lose
            digits of ``log_sum`` where logits are large.
    """

    loss: Tensor
    top: Tensor
    top_index: Tensor
    largest: Tensor
    log_sum: Tensor


class LinearCrossEntropy(Backend):
    """Backend of linear cross entropy."""

    KIND: ClassVar[str] = "chunks"
    """``"autograd"``: forward is differentiable; ``"chunks"``: gradients have functions of their own."""

    @abstractmethod
    def losses(self, call: LossCall) -> Losses:
        """Return the losses."""


class Reference(LinearCrossEntropy):
    """The formula in PyTorch, by autograd, with all logits in memory."""

    KIND = "autograd"

    def losses(self, call: LossCall) -> Losses:
        dtype = wide(call.hidden.dtype)
        logits = (call.hidden @ call.weight.t()).to(dtype) * call.logit_scale
        top, top_index = logits.detach().max(-1)
        largest = top if call.group is None else top.clone()
        if call.group is not None:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=call.group)
        shifted = logits - largest[:, None]
        labels, held = call.on_rank(call.labels)
        predicted = shifted.gather(1, labels[:, None])[:, 0].masked_fill(~held, 0)
        log_sum = _over_ranks(shifted.exp().sum(-1), call.group).log()
        loss = log_sum - _over_ranks(predicted, call.group)
        return Losses(loss, top, top_index, largest, log_sum.detach())


def _over_ranks(part: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return the sum over ranks, whose gradient each rank's part takes whole."""
    if group is None:
        return part
    total = part.detach().clone()
    dist.all_reduce(total, group=group)
    return part + (total - part.detach())


class _Room:
    """Memory for the chunks of a pass, each of which writes where the one before it did.

    Memory that is new to a process has to be mapped and cleared by the system, which takes as long as reading
    it several times.
    """

    def __init__(self) -> None:
        self._held: dict[str, Tensor] = {}

    def product(self, name: str, left: Tensor, right: Tensor) -> Tensor:
        """Return ``left @ right``, which lasts until the next one of this name."""
        shape = (left.shape[0], right.shape[1])
        return torch.mm(left, right, out=self._take(name, shape, left, left.dtype))

    def wide(self, name: str, tensor: Tensor) -> Tensor:
        """Return a copy of a tensor in fp32, or itself where it has no fewer bits; lasts likewise."""
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
    """PyTorch's operations on chunks of tokens.

    Logits of a chunk are computed, reduced to losses, turned into their gradient in place, and multiplied
    with both operands; nothing of a chunk's size outlives it.
    """

    CHUNK_BYTES: ClassVar[int] = 512 << 20
    """Logits of a chunk. More tokens let a device read and write the weight's gradient less often."""
    WIDE_BYTES: ClassVar[int] = 256 << 20
    """Part of a chunk that exists in fp32, and part of the weight's gradient that is added at once."""
    NORMALISES: ClassVar[bool] = False
    """Exponentials are divided by this rank's sum of a row where they are formed."""

    def losses(self, call: LossCall) -> Losses:
        return self.losses_and_gradients(call, None, None)

    def losses_and_gradients(
        self, call: LossCall, grad_hidden: Tensor | None, grad_weight: Tensor | None
    ) -> Losses:
        """Return the losses, and form gradients of theirs in the same pass.

        Args:
            call: the arguments.
            grad_hidden: ``[tokens, hidden]``, of any content; becomes :func:`raised` times the gradient of
                each token's own loss, without the logits' factor. None: not formed.
            grad_weight: ``[vocabulary, hidden]`` fp32 or fp64; gets the gradient of the losses' sum by
                ``token_weights`` added, without that factor as well. None: not formed.
        """
        room = _Room()
        chunks = [self._chunk(call, part, room, grad_hidden, grad_weight) for part in self.parts(call)]
        return Losses(*(torch.cat(parts) for parts in zip(*chunks, strict=True)))

    def _chunk(
        self,
        call: LossCall,
        part: slice,
        room: _Room,
        grad_hidden: Tensor | None,
        grad_weight: Tensor | None,
    ) -> tuple[Tensor, ...]:
        """Return the results of some tokens."""
        logits = room.product("logits", call.hidden[part], call.weight.t())
        wants_gradient = grad_hidden is not None or grad_weight is not None
        found = [
            self._rows(call, room, rows, labels, wants_gradient)
            for rows, labels in zip(*self._wide_parts(logits, call.labels[part]), strict=True)
        ]
        if wants_gradient:
            self._multiply(call, part, room, logits, call.token_weights[part], grad_hidden, grad_weight)
        return tuple(torch.cat(each) for each in zip(*found, strict=True))

    def _rows(
        self, call: LossCall, room: _Room, logits: Tensor, labels: Tensor, wants_gradient: bool
    ) -> tuple[Tensor, ...]:
        """Return the results of rows of logits, which become their own gradient, :func:`raised`."""
        numbers = _scaled(call, room, logits)
        local, held = call.on_rank(labels)
        top, top_index = numbers.max(-1) if call.wants_top else (numbers.amax(-1), local)
        predicted = numbers.gather(1, local[:, None])[:, 0].masked_fill_(~held, 0)
        total = self._exponentials(numbers, top)
        largest, log_sum, predicted = _joined(call, top, total, predicted)
        known = (labels >= 0) & (labels < call.ranks * call.weight.shape[0])
        # As in Megatron, a label that no rank has counts as the largest logit.
        loss = log_sum - (predicted - largest).masked_fill(~known, 0)
        if wants_gradient:
            multiplier = None
            if call.group is not None or not self.NORMALISES:
                multiplier = torch.exp(top - largest - log_sum)
                if self.NORMALISES:
                    multiplier.mul_(total)
            _to_gradient(numbers, multiplier, local, held, logits)
        return loss, top, top_index, largest, log_sum

    def _exponentials(self, numbers: Tensor, top: Tensor) -> Tensor:
        """Turn rows into exp(number - top) in place, over the sum if :attr:`NORMALISES`; return the sums."""
        return numbers.sub_(top[:, None]).exp_().sum(-1)

    def add_gradients(
        self,
        call: LossCall,
        sums: Sequence[Tensor],
        factors: Tensor,
        grad_hidden: Tensor | None,
        grad_weight: Tensor | None,
    ) -> None:
        """Form gradients from logits that are computed again; no rank waits for another.

        Args:
            call: the arguments, or a selection of their tokens.
            sums: ``largest`` and ``log_sum``, ``[tokens]`` each, of these.
            factors: ``[tokens]``, by which the gradients of the losses are multiplied.
            grad_hidden: ``[tokens, hidden]``, of any content; becomes the gradient, if ``factors`` have the
                logits' own factor in them.
            grad_weight: ``[vocabulary, hidden]``; gets it added, likewise.
        """
        room = _Room()
        for part in self.parts(call):
            logits = room.product("logits", call.hidden[part], call.weight.t())
            of_parts = self._wide_parts(logits, call.labels[part], *(each[part] for each in sums))
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
        """Form both gradients of some tokens from :func:`raised` ones: that of the weight by ``factors``.

        It is added in parts if it has more bits: an addition of other dtypes would make copies of the whole.
        """
        if grad_hidden is not None:
            torch.mm(grad_logits, call.weight, out=grad_hidden[part])
        if grad_weight is None:
            return
        hidden = call.hidden[part]
        if grad_weight.dtype == hidden.dtype:
            grad_weight.addmm_(grad_logits.t(), hidden * factors[:, None])
            return
        weighted, unit = _weighted(hidden, factors)
        size = max(_FEWEST_ROWS, self.WIDE_BYTES // (2 * hidden.shape[1] * grad_weight.itemsize))
        for some, gradients in zip(grad_weight.split(size), grad_logits.split(size, dim=1), strict=True):
            product = room.product("product", gradients.t(), weighted)
            some.addcmul_(room.wide("wide product", product), unit)

    def _wide_parts(self, logits: Tensor, *others: Tensor) -> list[tuple[Tensor, ...]]:
        """Cut a chunk, and what belongs to its rows, into parts that are computed in fp32 at once."""
        rows = max(1, self.WIDE_BYTES // (logits.shape[1] * wide(logits.dtype).itemsize))
        return [each.split(rows) for each in (logits, *others)]

    def parts(self, call: LossCall) -> list[slice]:
        """Return the chunks."""
        rows = call.rows
        if not rows:
            fitting = self.CHUNK_BYTES // (call.weight.shape[0] * call.weight.itemsize)
            rows = max(_FEWEST_ROWS, fitting // _STEP * _STEP)
        return [slice(first, first + rows) for first in range(0, call.hidden.shape[0], rows)]


class Cpu(Chunked):
    """Smaller chunks, which suffice for as many operations by byte as a CPU computes."""

    CHUNK_BYTES = 224 << 20
    WIDE_BYTES = 32 << 20
    NORMALISES = True

    def _exponentials(self, numbers: Tensor, top: Tensor) -> Tensor:
        # PyTorch's softmax keeps a row in the cache, where a pass for each step reads and writes all rows.
        # The largest of its results is 1 / sum.
        torch.softmax(numbers, -1, out=numbers)
        return numbers.amax(-1).reciprocal_()


class Cuda(Chunked):
    """Chunks of the size that keeps tensor cores busy."""


class Npu(Chunked):
    """Chunks as on GPUs."""


def raised(dtype: torch.dtype) -> float:
    """Return the factor by which gradients in this dtype are kept.

    Probabilities of a large vocabulary are below what fp16 holds with all its digits, and the scale of the
    loss comes with the gradient, after they are formed.
    """
    return 256.0 if dtype == torch.float16 else 1.0


def _weighted(hidden: Tensor, factors: Tensor) -> tuple[Tensor, Tensor]:
    """Return hidden states by the tokens' factors in 16 bits, and the unit in which products with them are.

    Factors are relative to the largest, so that 16 bits hold them, whatever it is, and equal ones round
    nothing. For fp16 each channel is multiplied with the power of two for which no sum of its products with
    :func:`raised` gradients overflows, not even where all tokens have one label.

    Args:
        hidden: ``[tokens, hidden]``, bf16 or fp16.
        factors: ``[tokens]`` fp32.

    Returns:
        ``[tokens, hidden]`` in the dtype of ``hidden``; and a scalar fp32, for fp16 ``[hidden]``.
    """
    largest = factors.abs().amax()
    unit = largest.masked_fill(largest == 0, 1)
    weighted = hidden * (factors / unit)[:, None]
    if hidden.dtype == torch.float16:
        # Raised gradients are up to 2 ** 8: sums stay below 2 ** 15.
        fitting = raising_factor(torch.linalg.vector_norm(weighted, 1, dim=0), 7, least=-60)
        weighted, unit = weighted.mul_(fitting), unit / (fitting * raised(hidden.dtype))
    return weighted.to(hidden.dtype), unit


def _to_gradient(
    numbers: Tensor, multiplier: Tensor | None, columns: Tensor, held: Tensor, logits: Tensor
) -> None:
    """Turn exponentials of rows into the :func:`raised` gradient of the logits, and write it over them.

    Args:
        numbers: ``[rows, vocabulary]`` fp32 or fp64; overwritten.
        multiplier: ``[rows]``, what makes probabilities of them; None if they are some.
        columns: ``[rows]``, the labels on this rank.
        held: ``[rows]`` bool, whether the label is on this rank.
        logits: ``[rows, vocabulary]``, of which ``numbers`` may be a view.
    """
    raising = raised(logits.dtype)
    if multiplier is not None:
        numbers.mul_(multiplier.mul_(raising)[:, None])
    elif raising != 1:
        numbers.mul_(raising)
    _subtract(numbers, columns, held.to(numbers.dtype).mul_(raising))
    if numbers is not logits:
        logits.copy_(numbers)


def _joined(call: LossCall, top: Tensor, total: Tensor, predicted: Tensor) -> tuple[Tensor, ...]:
    """Return the largest logit, the log of the sum relative to it, and the label's logit, over all ranks.

    Args:
        call: the arguments.
        top: ``[tokens]``, the largest of this rank's.
        total: ``[tokens]``, sum of exp(logit - top).
        predicted: ``[tokens]``, the label's logit, 0 where this rank does not have it.
    """
    if call.group is None:
        return top, total.log(), predicted
    own = torch.stack((top, total, predicted))
    gathered = [torch.empty_like(own) for _ in range(call.ranks)]
    dist.all_gather(gathered, own, group=call.group)
    tops, totals, labels = torch.stack(gathered, dim=1)
    largest = tops.amax(0)
    return largest, (totals * torch.exp(tops - largest)).sum(0).log(), labels.sum(0)


def _scaled(call: LossCall, room: _Room, logits: Tensor) -> Tensor:
    """Return logits in fp32 or wider, to work with in place: a copy only of those in fewer bits."""
    numbers = room.wide("logits in fp32", logits)
    return numbers if call.logit_scale == 1 else numbers.mul_(call.logit_scale)


def _subtract(numbers: Tensor, columns: Tensor, amounts: Tensor) -> None:
    """Subtract an amount from one number of each row; unlike a scattered sum it is deterministic on GPUs."""
    numbers[torch.arange(len(columns), device=columns.device), columns] -= amounts
