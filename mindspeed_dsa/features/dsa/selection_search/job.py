"""Search for the layers that need an indexer, in the first training step of a job.

The job's schedule runs forwards without gradients on microbatches of the job's own data, once for each
pattern. Indexers stay in place: a layer shares if its :class:`.Place` says so.

The evaluation of a pattern begins at the frontier: the layers below it have the same letters as in an earlier
evaluation, whose outputs were kept. They return these outputs instead of running.
"""

from __future__ import annotations

import copy
import math
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from mindspeed_dsa.feature import Context
from mindspeed_dsa.features.dsa.selection_search import greedy
from mindspeed_dsa.features.dsa.selection_search.feature import SEARCH, Options, check_search
from mindspeed_dsa.features.dsa.selection_search.greedy import Request, Results
from mindspeed_dsa.features.dsa.selections.share import decoder_place
from mindspeed_dsa.megatron.configuration import argument, require
from mindspeed_dsa.megatron.selection_source import NUMBER, PLACE, Place, Selected, current
from mindspeed_dsa.megatron.selections import Sharing
from mindspeed_dsa.patches.errors import show_without_traceback
from mindspeed_dsa.runs.files import RunError

_Function = Callable[..., Any]
_OF_MODEL = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "num_moe_experts",
    "mtp_num_layers",
    "dsa_indexer_topk",
    "dsa_indexer_n_heads",
    "dsa_indexer_head_dim",
)
"""Fields of the configuration by which results of another model are told apart."""


def search_instead(original: _Function, context: Context[Options]) -> _Function:
    """Decorate ``get_forward_backward_func``: the first step that trains searches, and ends the job."""

    def get_forward_backward_func(*args: Any, **kwargs: Any) -> Any:
        schedule = original(*args, **kwargs)

        def forward_backward(*inner: Any, **step: Any) -> Any:
            if step.get("forward_only", False):
                return schedule(*inner, **step)
            show_without_traceback()
            run(Evaluator(schedule, inner, step, context), step, context)
            # No rank ends, and takes its connections away, before all have finished.
            dist.barrier()
            raise SystemExit(0)

        return forward_backward

    return get_forward_backward_func


def run(evaluator: Evaluator, step: Mapping[str, Any], context: Context[Options]) -> Results:
    """Search, and write the results on the first rank after each evaluation.

    Args:
        evaluator: evaluator of patterns.
        step: keyword arguments of the job's schedule.
        context: context of the session.

    Returns:
        Results, the same on all ranks.

    Raises:
        RunError: on all ranks; the folder has results of another problem, or the model cannot be searched.
    """
    folder, request, is_first = context.options.folder, evaluator.request, dist.get_rank() == 0
    assert folder is not None, "the feature is on"
    state = context.megatron("core.parallel_state")
    identity = {
        "checkpoint": request.checkpoint,
        **{name: argument(evaluator.config, name) for name in _OF_MODEL},
        "pattern": evaluator.start,
        "microbatches": request.microbatches,
        "sequences": step.get("micro_batch_size"),
        "sequence_length": step.get("seq_length"),
        "data_parallel_ranks": state.get_data_parallel_world_size(),
        "checksum_of_data": evaluator.checksum_of_data(),
    }
    results = _resumed(folder, identity)
    wanted = request.layers_kept
    if wanted is None:
        wanted = min(max(len(evaluator.start) // 2, len(evaluator.firsts)), greedy.kept(evaluator.start))
    results.planned = greedy.evaluations(evaluator.start, evaluator.firsts, wanted)
    results.firsts = evaluator.firsts

    def evaluate(pattern: str, layer: int | None) -> float:
        if pattern not in results.losses:
            results.losses[pattern] = evaluator.loss(pattern, layer)
            if is_first:
                results.write(folder)
        return results.losses[pattern]

    with evaluator.evaluating():
        for found in greedy.search(evaluator.start, evaluator.firsts, wanted, evaluate):
            if math.isnan(found.loss) and found.removed is None:
                raise RunError(
                    f"{SEARCH}: the loss of {request.checkpoint} is not a number before any layer shares; "
                    "look at the checkpoint and the data"
                )
            results.steps.append(found)
            context.log.info("%d layers compute, %s: loss %.6f", found.kept, found.pattern, found.loss)
    results.is_done = True
    if is_first:
        results.write(folder)
    return results


def _resumed(folder: Any, identity: dict[str, Any]) -> Results:
    """Return the first rank's results on all ranks, because only its folder has them for certain."""
    told: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            told[0] = greedy.resumed(folder, identity)
        except RunError as error:
            told[1] = str(error)
    dist.broadcast_object_list(told, src=0)
    results, problem = told
    if problem is not None:
        raise RunError(f"{SEARCH}: {problem}")
    assert isinstance(results, Results)
    return results


# -- evaluation ----------------------------------------------------------------------------------


@dataclass
class _Layer:
    """Decoder layer of this rank.

    Attributes:
        number: number in the whole model, from 1.
        chunk: index of the model chunk on this rank.
        module: ``TransformerLayer``.
        attention: ``DSAttention`` of the layer.
        place: place of the pattern that is evaluated.
        runs: number of microbatches that have passed in the current evaluation.
    """

    number: int
    chunk: int
    module: Any
    attention: Any
    place: Place | None = None
    runs: int = 0


class Evaluator:
    """Evaluator of patterns on the microbatches of a job.

    Args:
        schedule: job's schedule.
        args: positional arguments of the schedule.
        step: keyword arguments of the schedule.
        context: context of the session.

    Attributes:
        request: checkpoint, number of layers and of microbatches of the search.
        config: model's configuration.
        start: pattern of the job.
        firsts: ascending numbers of the first layers of all ranks' chunks.
        layer_runs: number of layer forwards that were computed, by layer.

    Raises:
        SettingsError: the job cannot be searched.
        RunError: on all ranks; the model has layers without DSA.
    """

    def __init__(
        self, schedule: _Function, args: Sequence[Any], step: Mapping[str, Any], context: Context[Options]
    ) -> None:
        assert context.options.folder is not None, "the feature is on"
        model = step["model"]
        self._chunks: list[Any] = list(model) if isinstance(model, (list, tuple)) else [model]
        found = [_layers_of(chunk, index) for index, chunk in enumerate(self._chunks)]
        self._layers = [layer for layers in found for layer in layers]
        self.config = _config_of(self._chunks[0])
        require(context, check_search, self.config)
        self.request = Request.read(context.options.folder)
        self.start = greedy.letters_of(Sharing.of(self.config), self.config.num_layers)
        # An embedding or a loss may have a chunk of its own, without layers.
        self.firsts = _agreed(found, self.config.num_layers)
        require(context, lambda *_: greedy.keep_problems(self.request.layers_kept, self.start, self.firsts))
        self.layer_runs: Counter[int] = Counter()
        self._schedule, self._args = schedule, args
        iterators: dict[int, _Repeated] = {}
        self._step = {
            **step,
            "data_iterator": _repeated(step["data_iterator"], iterators),
            "num_microbatches": self.request.microbatches,
            "forward_only": True,
        }
        self._iterators = list(iterators.values())
        # Frontier of the current evaluation, layer that is tried, and letters below the next frontier.
        self._frontier, self._tried, self._below = 1, 1, ""
        # Outputs below the frontier, and the selection at that place, by chunk and microbatch.
        self._kept: dict[tuple[int, int], tuple[Any, Selected | None]] = {}

    def checksum_of_data(self) -> int | None:
        """Return a checksum of this rank's first calibration microbatch; ``None`` on a rank without data."""
        if not self._iterators:
            return None
        microbatch = next(self._iterators[0])
        self._iterators[0].rewind()
        checksum = 0
        for leaf in tree_leaves(microbatch):
            if isinstance(leaf, Tensor):
                content = leaf.detach().cpu().reshape(-1).view(torch.uint8)
                checksum = zlib.crc32(content.numpy().tobytes(), checksum)
        return checksum

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Put the model in evaluation mode in the block, and restore modes, layers and places after it."""
        modes = [(module, module.training) for chunk in self._chunks for module in chunk.modules()]
        places = [
            (vars(layer.attention), {name: vars(layer.attention).get(name) for name in _SET})
            for layer in self._layers
        ]
        forwards = [(vars(layer.module), vars(layer.module).get("forward")) for layer in self._layers]
        jitter = argument(self.config, "moe_input_jitter_eps")
        for chunk in self._chunks:
            chunk.eval()
        for layer in self._layers:
            layer.module.forward = self._forward_of(layer, layer.module.forward)
        if jitter is not None:
            self.config.moe_input_jitter_eps = None  # Megatron adds this noise in evaluations, too
        try:
            yield
        finally:
            if jitter is not None:
                self.config.moe_input_jitter_eps = jitter
            for attributes, forward in forwards:
                _restore(attributes, {"forward": forward})
            for attributes, before in places:
                _restore(attributes, before)
            for module, training in modes:
                module.training = training
            self._kept.clear()
            current().latest = None

    def loss(self, pattern: str, layer: int | None = None) -> float:
        """Return the mean loss of a pattern, the same on all ranks.

        Args:
            pattern: pattern of all decoder layers.
            layer: layer from which on the next patterns may differ from this one; None: do not keep outputs.

        Raises:
            RunError: a layer has not run as often as there are microbatches, or has read no selection.
        """
        self._begin(pattern, layer)
        with torch.no_grad():
            reports = self._schedule(*self._args, **self._step)
        for each in self._layers:
            if each.runs != self.request.microbatches:
                raise RunError(
                    f"{SEARCH}: layer {each.number} ran {each.runs} times for {self.request.microbatches} "
                    "microbatches, so the schedule does not call Megatron's layers; omit its flag"
                )
        if layer is not None and self._tried > self._frontier:
            self._frontier = self._tried
        self._below = pattern[: self._frontier - 1]
        return _mean_over_ranks(reports or ())

    def _begin(self, pattern: str, layer: int | None) -> None:
        """Set places, frontier and data for one evaluation."""
        if not pattern.startswith(self._below):
            # The kept outputs are of other layers: run all of them.
            self._frontier = 1
            self._kept.clear()
        self._tried = 1 if layer is None else layer
        sharing = Sharing(pattern=pattern)
        for each in self._layers:
            each.runs, each.place = 0, decoder_place(sharing, each.number, len(pattern))
            _put(each.attention, each.place)
        for iterator in self._iterators:
            iterator.rewind()
        current().latest = None

    def _forward_of(self, layer: _Layer, original: _Function) -> _Function:
        def forward(*args: Any, **kwargs: Any) -> Any:
            microbatch, layer.runs = layer.runs, layer.runs + 1
            place = (layer.chunk, microbatch)
            selections = current()
            if layer.number < self._frontier:
                return _aliases(self._kept[place][0])
            if layer.number == self._frontier and place in self._kept:
                kept = self._kept[place][1]
                selections.latest = None if kept is None else replace(kept)
            latest = selections.latest
            reads = 0 if latest is None else latest.reads
            output = original(*args, **kwargs)
            self.layer_runs[layer.number] += 1
            assert layer.place is not None, "a pattern is set"
            if not layer.place.computes and (latest is None or latest.reads == reads):
                raise RunError(
                    f"{SEARCH}: {layer.place.name} has not read the selection of {layer.place.source}: its "
                    "attention is not Megatron's or ours, as in a fork that carries selections itself; "
                    "search with a released Megatron-core"
                )
            if layer.number < self._tried:
                self._kept[place] = (_aliases(output), selections.latest)
            return output

        return forward


_SET = (PLACE, "index_share", "skip_topk")


def _put(attention: Any, place: Place) -> None:
    """Store a place in a ``DSAttention``, whose indexer stays."""
    vars(attention)[PLACE] = place
    if hasattr(attention, "skip_topk"):  # 0.19 and later
        # With True in all layers a layer computes in the same way whether its selection is read or not.
        attention.index_share, attention.skip_topk = True, not place.computes


def _restore(attributes: dict[str, Any], before: Mapping[str, Any]) -> None:
    for name, value in before.items():
        if value is not None:
            attributes[name] = value
        else:
            attributes.pop(name, None)


def _aliases(output: Any) -> Any:
    """Return a layer's output with new tensor objects on the same storage."""
    # A schedule frees what it has sent by replacing a tensor's data, which must not reach kept ones.
    if isinstance(output, tuple):
        return tuple(map(_aliases, output))
    return output.data if isinstance(output, Tensor) else output


def _layers_of(chunk: Any, index: int) -> list[_Layer]:
    """Return a chunk's decoder layers with DSA, ascending, without layers of multi-token prediction."""
    layers, most = [], _config_of(chunk).num_layers
    for module in chunk.modules():
        attention = getattr(getattr(module, "self_attention", None), "core_attention", None)
        number = None if attention is None else vars(attention).get(NUMBER)
        if number is not None and number <= most:
            layers.append(_Layer(number, index, module, attention))
    return sorted(layers, key=lambda layer: layer.number)


def _config_of(chunk: Any) -> Any:
    """Return the configuration of a chunk, which may be wrapped for data parallelism and 16 bits."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk.config


def _agreed(chunks: Sequence[Sequence[_Layer]], layers: int) -> list[int]:
    """Return the first layers of all ranks' chunks, ascending.

    Raises:
        RunError: on all ranks; a decoder layer has no DSA.
    """
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, [[layer.number for layer in chunk] for chunk in chunks])
    numbers = {number for rank in told for chunk in rank for number in chunk}
    lacking = sorted(set(range(1, layers + 1)) - numbers)
    if lacking:
        raise RunError(
            f"{SEARCH}: layers {', '.join(map(str, lacking))} have no DSAttention, which a search needs in "
            "every decoder layer"
        )
    return sorted({chunk[0] for rank in told for chunk in rank if chunk})


# -- data and loss -------------------------------------------------------------------------------


class _Repeated(Iterator[Any]):
    """Iterator over a job's microbatches that can begin again.

    Args:
        source: job's iterator.
    """

    def __init__(self, source: Iterator[Any]) -> None:
        self._source, self._items, self._at = source, list[Any](), 0

    def __next__(self) -> Any:
        if self._at == len(self._items):
            try:
                self._items.append(next(self._source))
            except StopIteration:
                raise RunError(
                    f"{SEARCH}: the job's data end after {self._at} microbatches; give a smaller "
                    "--microbatches"
                ) from None
        self._at += 1
        # A job may take entries out of its dictionary.
        return copy.copy(self._items[self._at - 1])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def rewind(self) -> None:
        """Begin with the first microbatch again."""
        self._at = 0


def _repeated(iterators: Any, made: dict[int, _Repeated]) -> Any:
    """Return a schedule's data iterators as :class:`_Repeated`; ranks without data have None."""
    if isinstance(iterators, (list, tuple)):
        return [_repeated(iterator, made) for iterator in iterators]
    if iterators is None:
        return None
    # Chunks may share an iterator.
    return made.setdefault(id(iterators), _Repeated(iterators))


def _mean_over_ranks(reports: Sequence[Any]) -> float:
    """Return the mean loss over tokens, or over microbatches if the job counts none, of all ranks.

    Args:
        reports: loss reports of this rank's microbatches, from the job's loss function; empty except in the
            last pipeline stage.
    """
    total = count = 0.0
    for report in reports:
        value, weight = _loss_and_count(report)
        total, count = total + value, count + weight
    told: list[Any] = [None] * dist.get_world_size()
    # Sums in fp64 in the order of ranks: every rank decides by the same bits. Ranks that share a model's
    # layers have equal losses, which do not change the mean.
    dist.all_gather_object(told, (total, count))
    total, count = sum(total for total, _ in told), sum(count for _, count in told)
    return float(total / count) if count else math.nan


def _loss_and_count(report: Any) -> tuple[float, float]:
    """Return the sum of a microbatch's losses and their number, from any release's report."""
    if isinstance(report, Mapping):
        report = report.get("lm loss", next(iter(report.values())))
    parts = report if isinstance(report, (list, tuple)) else torch.as_tensor(report).flatten().tolist()
    loss, *counts = (float(part) for part in parts)
    return loss, counts[0] if counts else 1.0
