"""Assignment of decoder layers to pipeline chunks, and search for splits that work with shared selections.

Layers that share a selection need it from a layer of the same chunk, so every chunk must begin with a
*computing* layer, one with an indexer. Splits are computed from a job's arguments or a model's configuration,
without Megatron. The layers equal the result of
Megatron-core's ``get_transformer_layer_offset`` and ``get_num_layers_to_build``, or of
``--pipeline-model-parallel-layout`` (Megatron-core 0.14 and later).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import groupby
from typing import TYPE_CHECKING, Any

from mindspeed_dsa.megatron.selections import Sharing

if TYPE_CHECKING:
    from typing_extensions import Self

LAYOUT = "--pipeline-model-parallel-layout"
FIRST, LAST = "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"
_EMBEDDING, _DECODER, _MTP, _LOSS = "E", "t", "m", "L"
_LETTERS = {"embedding": _EMBEDDING, "decoder": _DECODER, "mtp": _MTP, "loss": _LOSS}
"""Letters of a layout, by the names in Megatron's ``LayerType``."""


@dataclass(frozen=True)
class Split:
    """Assignment of decoder layers to the ranks and chunks of a pipeline.

    Attributes:
        layers: number of decoder layers.
        ranks: number of pipeline ranks.
        chunks: number of chunks per rank, above 1 for an interleaved schedule.
        first, last: numbers of layers on the first and last rank, ``None`` if not set.
        embedding_counts, loss_counts: whether embedding and loss count as a layer each.
        stages: letters of each chunk in the model's order: ``E`` embedding, ``t`` decoder, ``m`` multi-token
            prediction, ``L`` loss. Overrides ``first``, ``last`` and the counts. Empty without a layout.
        v_shaped: whether second chunks are assigned to the ranks in reverse order, as in DualPipeV.
    """

    layers: int
    ranks: int = 1
    chunks: int = 1
    first: int | None = None
    last: int | None = None
    embedding_counts: bool = False
    loss_counts: bool = False
    stages: tuple[str, ...] = ()
    v_shaped: bool = False

    @classmethod
    def of(cls, config: Any) -> Self | None:
        """Build the split from arguments or a model's configuration; ``None`` if ``num_layers`` is missing.

        Raises:
            ValueError: the layout contains unknown letters.
        """

        def given(*names: str) -> Any:
            return next((each for name in names if (each := getattr(config, name, None)) is not None), None)

        layers, ranks = given("num_layers"), given("pipeline_model_parallel_size") or 1
        if layers is None:
            return None
        # Arguments and configuration use different names for the layers of the first and last rank.
        split = cls(
            layers=layers,
            ranks=ranks,
            first=given("decoder_first_pipeline_num_layers", "num_layers_in_first_pipeline_stage"),
            last=given("decoder_last_pipeline_num_layers", "num_layers_in_last_pipeline_stage"),
            embedding_counts=bool(given("account_for_embedding_in_pipeline_split")),
            loss_counts=bool(given("account_for_loss_in_pipeline_split")),
            stages=stages_of(given("pipeline_model_parallel_layout")),
            v_shaped=is_v_shaped(config),
        )
        if ranks == 1:
            return replace(split, stages=())
        if split.stages:
            return replace(split, chunks=len(split.stages) // ranks)
        if split.v_shaped:
            return replace(split, chunks=2)
        chunks = given("virtual_pipeline_model_parallel_size", "num_virtual_stages_per_pipeline_rank")
        per_chunk = given("num_layers_per_virtual_pipeline_stage")
        if chunks is None and per_chunk:
            chunks = split.counted // (ranks * per_chunk)  # 32 layers on 4 ranks, 2 per chunk: 4 chunks
        return replace(split, chunks=chunks or 1)

    @property
    def counted(self) -> int:
        """Number of layers to assign, plus embedding and loss if they count as layers."""
        return self.layers + self.embedding_counts + self.loss_counts

    @cached_property
    def problem(self) -> str | None:
        """Reason why the layers cannot be assigned like this, or ``None``."""
        if self.stages:
            if len(self.stages) % self.ranks:
                return (
                    f"{LAYOUT} has {len(self.stages)} chunks, no multiple of the {self.ranks} pipeline ranks"
                )
            letters = "".join(self.stages)
            if not re.fullmatch(f"{_EMBEDDING}[{_DECODER}{_MTP}]*{_LOSS}", letters):
                return f"{LAYOUT} begins with E, ends with L and has t and m between them"
            named = letters.count(_DECODER)
            return (
                None if named == self.layers else f"{LAYOUT} has {named} layers, --num-layers {self.layers}"
            )
        counts = self._counts()
        return counts if isinstance(counts, str) else None

    def _counts(self) -> list[int] | str:
        """Return the number of layers per rank, or a description of the problem."""
        if self.ranks == 1:
            return [self.counted]
        ends = (self.first, self.last)
        if self.counted > self.layers and ends != (None, None):
            return f"{FIRST} and {LAST} exclude --account-for-embedding-in-pipeline-split and ...-loss-..."
        # 61 layers on 8 ranks with first=4 and last=3: 54 layers on 6 middle ranks, 9 each.
        rest = self.counted - sum(count or 0 for count in ends)
        middle = self.ranks - sum(count is not None for count in ends)
        if (rest <= 0 or rest % middle) if middle else rest:
            more = f", {self.counted} with embedding and loss," if self.counted > self.layers else ""
            given = [f"{flag} {count}" for flag, count in zip((FIRST, LAST), ends, strict=True) if count]
            return (
                f"--num-layers {self.layers}{more} cannot be dealt out to {self.ranks} pipeline ranks"
                f"{' with ' * bool(given)}{' and '.join(given)}"
            )
        if not middle and self.chunks > 1:  # Megatron divides by the number of middle ranks, which is 0
            return f"give one of {FIRST} and {LAST}, on {self.ranks} pipeline ranks with {self.chunks} chunks"
        counts = [rest // middle if middle else 0] * self.ranks
        counts[0] = counts[0] if self.first is None else self.first
        counts[-1] = counts[-1] if self.last is None else self.last
        for count in counts:
            if count % self.chunks:
                return f"{count} layers of a pipeline rank are no multiple of {self.chunks} chunks"
        return counts

    @cached_property
    def in_order(self) -> tuple[tuple[int, ...], ...]:
        """Layer numbers of each chunk, counted from 1, with chunks in the model's order.

        Raises:
            ValueError: the layers cannot be assigned, see :attr:`problem`.
        """
        if self.problem:
            raise ValueError(self.problem)
        if self.stages:
            sizes = [stage.count(_DECODER) for stage in self.stages]
        else:
            counts = self._counts()
            assert not isinstance(counts, str)
            # Interleaved chunks of a rank are equal; chunk c of all ranks precedes chunk c + 1 of any rank.
            sizes = [count // self.chunks for count in counts] * self.chunks
            # Embedding and loss take a place in the split, but are no decoder layers.
            sizes[0] -= self.embedding_counts
            sizes[-1] -= self.loss_counts
        held, below = [], 0
        for size in sizes:
            held.append(tuple(range(below + 1, below + size + 1)))
            below += size
        return tuple(held)

    @property
    def by_rank(self) -> list[list[tuple[int, ...]]]:
        """Layer numbers, counted from 1, indexed by rank and then by chunk of the rank."""
        if self.v_shaped:
            # 2 ranks, chunks 0 to 3: rank 0 has chunks 0 and 3, rank 1 has chunks 1 and 2.
            return [[self.in_order[rank], self.in_order[-1 - rank]] for rank in range(self.ranks)]
        # Interleaved: of chunks 0 to 3 on 2 ranks, rank 0 has 0 and 2, rank 1 has 1 and 3.
        return [list(self.in_order[rank :: self.ranks]) for rank in range(self.ranks)]

    def flags(self) -> str:
        """Return the flags that set this split, except the flags for numbers of ranks and chunks."""
        if self.stages:
            return f"{LAYOUT} '{_compact(self.stages)}'"
        ends = ((FIRST, self.first), (LAST, self.last))
        return " ".join(f"{flag} {count}" for flag, count in ends if count is not None)


def stages_of(layout: Any) -> tuple[str, ...]:
    """Return the letters of each chunk of a ``pipeline_model_parallel_layout``.

    Args:
        layout: ``None``, a text such as ``Et*3|(tt|)*4mL``, lists of layer names, or Megatron's layout
            object.

    Raises:
        ValueError: the layout contains letters or names of no layer type.
    """
    if layout is None:
        return ()
    if hasattr(layout, "stages"):  # V-shaped layout
        layout = layout.stages
    elif hasattr(layout, "layout"):  # Megatron's object, indexed by rank and then chunk
        layout = [chunk for turn in zip(*layout.layout, strict=True) for chunk in turn]
    if not isinstance(layout, str):
        names = [[str(getattr(item, "name", item)).strip().lower() for item in stage] for stage in layout]
        unknown = {name for stage in names for name in stage} - set(_LETTERS)
        if unknown:
            raise ValueError(f"{LAYOUT}: {', '.join(sorted(unknown))} is no kind of layer")
        return tuple("".join(_LETTERS[name] for name in stage) for stage in names)
    text = layout.replace(",", "")
    # Expand repetitions: "(tt|)*2" to "tt|tt|", and then "t*3" to "ttt".
    for repeated in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        text = re.sub(repeated, lambda found: found[1] * int(found[2]), text)
    unknown = set(text) - {*_LETTERS.values(), "|"}
    if unknown:
        raise ValueError(f"{LAYOUT} {layout}: {', '.join(sorted(unknown))} is no kind of layer")
    return tuple(text.split("|"))


def is_v_shaped(config: Any) -> bool:
    """Return whether second chunks are assigned to the ranks in reverse order, as in DualPipeV.

    Args:
        config: job's arguments, or a model's configuration.
    """
    if getattr(config, "schedules_method", None) == "dualpipev":
        return (getattr(config, "pipeline_model_parallel_size", None) or 1) > 1
    return bool(getattr(getattr(config, "pipeline_model_parallel_layout", None), "v_shaped", False))


def layout_text(sizes: Sequence[int], mtp_layers: int = 0) -> str:
    """Return Megatron's layout text for chunks with these numbers of decoder layers.

    Args:
        sizes: number of decoder layers per chunk, in the model's order.
        mtp_layers: number of multi-token prediction layers, which the last chunk holds.
    """
    return _compact(stages_text(sizes, mtp_layers))


def nearly_even(layers: int, chunks: int, mtp_layers: int = 0) -> str:
    """Return Megatron's layout text for chunks of nearly equal size; the later chunks have one more layer."""
    # 10 layers in 4 chunks: 2, 2, 3, 3.
    return layout_text([(layers + chunk) // chunks for chunk in range(chunks)], mtp_layers)


def stages_text(sizes: Sequence[int], mtp_layers: int) -> tuple[str, ...]:
    """Return the letters of each chunk, for chunks with these numbers of decoder layers, as in a layout."""
    stages = [_DECODER * size for size in sizes]
    stages[0] = f"{_EMBEDDING}{stages[0]}"
    stages[-1] += _MTP * mtp_layers + _LOSS
    return tuple(stages)


def _compact(stages: Sequence[str]) -> str:
    """Format a layout as Megatron reads it, with repetition counts for equal letters in a chunk."""
    runs = [[(letter, len(list(run))) for letter, run in groupby(stage)] for stage in stages]
    return "|".join(
        "".join(letter if count == 1 else f"{letter}*{count}" for letter, count in stage) for stage in runs
    )


# -- chunks of layers that share selections ------------------------------------------------------


def check_chunks(args: Any) -> Iterator[str]:
    """Yield the reason why a pipeline's layers cannot share selections, with the nearest splits that can.

    Splits that Megatron itself rejects, and invalid sharing patterns, are reported by other checks.

    Args:
        args: job's arguments or a model's configuration; nothing is yielded if they name no layers.
    """
    sharing = Sharing.of(args)
    try:
        split = Split.of(args)
    except ValueError:
        return
    if split is None or split.problem or not sharing.is_on or any(sharing.problems(split.layers)):
        return
    problem = sharing.chunk_problem(split.in_order)
    if problem is None:
        return
    has_layout = hasattr(args, LAYOUT[2:].replace("-", "_"))
    mtp_layers = getattr(args, "mtp_num_layers", None) or 0
    yield f"{who(sharing)}: {problem}. {remedy(split, sharing, has_layout, mtp_layers)}"


def who(sharing: Sharing) -> str:
    """Return the flags by which layers share selections."""
    if sharing.pattern:
        return f"--dsa-indexer-topk-pattern {sharing.pattern}"
    return (
        f"--dsa-indexer-topk-freq {sharing.frequency} --dsa-indexer-skip-topk-offset {max(sharing.offset, 1)}"
    )


def remedy(split: Split, sharing: Sharing, has_layout: bool = True, mtp_layers: int = 0) -> str:
    """Return advice: splits that work for this number of ranks and chunks, or else a limit on chunks.

    Args:
        split: split that does not work.
        sharing: model's sharing of selections.
        has_layout: whether Megatron has ``--pipeline-model-parallel-layout``.
        mtp_layers: number of multi-token prediction layers.
    """
    candidates = list(nearest(split, sharing, has_layout, mtp_layers))
    if candidates:
        sizes = "; ".join(f"{candidate.flags()} ({_sizes(candidate)})" for candidate in candidates)
        return f"What works, in place of the flags that deal layers out now: {sizes}"
    most, wanted = sharing.computing(split.layers), split.ranks * split.chunks
    if most < wanted:
        return (
            f"No split of {split.layers} layers into {wanted} chunks works, because only {most} layers "
            "compute: use fewer pipeline ranks or virtual stages"
        )
    return (
        f"No {FIRST} and {LAST} make such chunks: use another number of pipeline ranks or virtual stages, or "
        f"Megatron-core 0.14 or later, whose {LAYOUT} can"
    )


def _sizes(split: Split) -> str:
    return f"chunks of {', '.join(str(len(chunk)) for chunk in split.in_order)} layers"


def nearest(split: Split, sharing: Sharing, has_layout: bool = True, mtp_layers: int = 0) -> Iterator[Split]:
    """Yield splits with as many ranks and chunks in which every chunk begins with a computing layer.

    The split that sets only the first and last rank's layers comes first, then the most even layout.

    Args:
        split: split to replace.
        sharing: model's sharing of selections.
        has_layout: whether a layout can be set.
        mtp_layers: number of multi-token prediction layers, which a layout includes.
    """
    if split.ranks == 1:
        return
    by_ends = None if split.v_shaped else _by_ends(split.layers, split.ranks, split.chunks, sharing)
    if by_ends is not None:
        yield by_ends
    if has_layout:
        layout = _most_even(split.layers, split.ranks, split.chunks, sharing, mtp_layers)
        if layout is not None and (by_ends is None or _largest(layout) < _largest(by_ends)):
            yield replace(layout, v_shaped=split.v_shaped)


def works(split: Split, sharing: Sharing) -> bool:
    """Return whether the split is possible and every chunk begins with a computing layer."""
    return split.problem is None and sharing.chunk_problem(split.in_order) is None


def _largest(split: Split) -> int:
    return max(map(len, split.in_order))


@lru_cache(maxsize=256)
def _by_ends(layers: int, ranks: int, chunks: int, sharing: Sharing) -> Split | None:
    """Return the most even split that sets only the numbers of layers of the first and last rank."""
    plain = Split(layers, ranks, chunks)
    # None leaves the number to Megatron. A number must be a multiple of the rank's chunks.
    counts = (None, *range(chunks, layers, chunks))
    fitting = [
        split
        for first in counts
        for last in counts
        if not (ranks == 2 and first and last)  # with 2 ranks one flag determines the other
        and works(split := replace(plain, first=first, last=last), sharing)
        and all(split.in_order)
    ]
    return min(fitting, key=_unevenness, default=None)


def _unevenness(split: Split) -> tuple[int, int, int]:
    """Return a sort key, least for the best split: largest chunk, sum of squares, number of flags."""
    sizes = [len(chunk) for chunk in split.in_order]
    return (
        max(sizes),
        sum(size * size for size in sizes),
        (split.first is not None) + (split.last is not None),
    )


@lru_cache(maxsize=256)
def _most_even(layers: int, ranks: int, chunks: int, sharing: Sharing, mtp_layers: int) -> Split | None:
    """Return the most even layout in which every chunk begins with a computing layer."""
    # Dynamic programming over chunks. `best` maps the first layer of the next chunk to the best split of all
    # earlier layers: (largest chunk, sum of squares, sizes), compared in this order.
    # Layers that may begin a chunk, and the end of the model.
    starts = [layer for layer in range(1, layers + 1) if sharing.computes(layer)] + [layers + 1]
    best: dict[int, tuple[int, int, tuple[int, ...]]] = {1: (0, 0, ())}
    for _ in range(ranks * chunks):
        longer: dict[int, tuple[int, int, tuple[int, ...]]] = {}
        for begin, (largest, squares, sizes) in best.items():
            for end in starts:
                if end > begin:
                    size = end - begin
                    candidate = (max(largest, size), squares + size * size, (*sizes, size))
                    longer[end] = min(longer.get(end, candidate), candidate)
        best = longer
    if layers + 1 not in best:
        return None
    return Split(layers, ranks, chunks, stages=stages_text(best[layers + 1][2], mtp_layers))
