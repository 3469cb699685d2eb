"""Decoder layers of each chunk of a pipeline, and the splits whose chunks begin with a computing layer.

Read from a job's arguments or a model's configuration, and computed without Megatron: the layers are those of
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
"""Letters of a layout by the names of Megatron's ``LayerType``."""


@dataclass(frozen=True)
class Split:
    """Decoder layers dealt out to the ranks and chunks of a pipeline.

    Attributes:
        layers: of the decoder.
        ranks: of the pipeline.
        chunks: of a rank, more than one if the schedule is interleaved.
        first: layers of the first rank, where given; likewise ``last``.
        embedding_counts: the embedding takes a layer's place; likewise ``loss_counts``.
        stages: letters of each chunk in the model's order, ``E`` embedding, ``t`` decoder, ``m`` multi-token
            prediction, ``L`` loss: the layout that takes the place of all others. Empty: there is none.
        v_shaped: second chunks lie on the ranks in reverse order, as in DualPipeV.
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
        """Build from a job's arguments or a model's configuration; None where no number of layers is given.

        Raises:
            ValueError: the layout's letters are unknown.
        """

        def given(*names: str) -> Any:
            return next((each for name in names if (each := getattr(config, name, None)) is not None), None)

        layers, ranks = given("num_layers"), given("pipeline_model_parallel_size") or 1
        if layers is None:
            return None
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
            chunks = split.counted // (ranks * per_chunk)
        return replace(split, chunks=chunks or 1)

    @property
    def counted(self) -> int:
        """Return the layers that are dealt out, embedding and loss included where they take a place."""
        return self.layers + self.embedding_counts + self.loss_counts

    @cached_property
    def problem(self) -> str | None:
        """Return why the layers cannot be dealt out like this; None if they can."""
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
        """Return what each rank counts, or what is wrong."""
        if self.ranks == 1:
            return [self.counted]
        ends = (self.first, self.last)
        if self.counted > self.layers and ends != (None, None):
            return f"{FIRST} and {LAST} exclude --account-for-embedding-in-pipeline-split and ...-loss-..."
        rest = self.counted - sum(each or 0 for each in ends)
        middle = self.ranks - sum(each is not None for each in ends)
        if (rest <= 0 or rest % middle) if middle else rest:
            return f"--num-layers {rest} of {self.counted} cannot be dealt out to {middle} pipeline ranks"
        if not middle and self.chunks > 1:  # Megatron divides by the ranks between them
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
        """Return the numbers of each chunk's layers, from 1; chunks in the order that a microbatch takes.

        Raises:
            ValueError: the layers cannot be dealt out, see :attr:`problem`.
        """
        if self.problem:
            raise ValueError(self.problem)
        if self.stages:
            sizes = [stage.count(_DECODER) for stage in self.stages]
        else:
            counts = self._counts()
            assert not isinstance(counts, str)
            sizes = [count // self.chunks for count in counts] * self.chunks
            # They are layers of their chunks in the split, not in the model.
            sizes[0] -= self.embedding_counts
            sizes[-1] -= self.loss_counts
        held, below = [], 0
        for size in sizes:
            held.append(tuple(range(below + 1, below + size + 1)))
            below += size
        return tuple(held)

    @property
    def by_rank(self) -> list[list[tuple[int, ...]]]:
        """Return the numbers of the layers of each rank and chunk, from 1."""
        if self.v_shaped:
            return [[self.in_order[rank], self.in_order[-1 - rank]] for rank in range(self.ranks)]
        return [list(self.in_order[rank :: self.ranks]) for rank in range(self.ranks)]

    @property
    def mtp_rank(self) -> int:
        """Return the rank that holds the layers of multi-token prediction."""
        with_mtp = (chunk for chunk, stage in enumerate(self.stages) if _MTP in stage)
        stage = next(with_mtp, self.ranks * self.chunks - 1)
        if self.v_shaped:
            return min(stage, self.ranks * self.chunks - 1 - stage)
        return stage % self.ranks

    def flags(self) -> str:
        """Return the flags that deal layers out like this, beside those of the sizes of the pipeline."""
        if self.stages:
            return f"{LAYOUT} '{_compact(self.stages)}'"
        ends = ((FIRST, self.first), (LAST, self.last))
        return " ".join(f"{flag} {count}" for flag, count in ends if count is not None)


def stages_of(layout: Any) -> tuple[str, ...]:
    """Return the letters of each chunk of a ``pipeline_model_parallel_layout``.

    Args:
        layout: None, a text as ``Et*3|(tt|)*4mL``, lists of names of layers, or Megatron's own object.

    Raises:
        ValueError: it has letters that are none of a layer.
    """
    if layout is None:
        return ()
    if hasattr(layout, "stages"):  # in the shape of a V
        layout = layout.stages
    elif hasattr(layout, "layout"):  # by rank and chunk
        layout = [chunk for turn in zip(*layout.layout, strict=True) for chunk in turn]
    if not isinstance(layout, str):
        names = [[str(getattr(each, "name", each)).strip().lower() for each in stage] for stage in layout]
        unknown = {name for stage in names for name in stage} - set(_LETTERS)
        if unknown:
            raise ValueError(f"{LAYOUT}: {', '.join(sorted(unknown))} is no kind of layer")
        return tuple("".join(_LETTERS[name] for name in stage) for stage in names)
    text = layout.replace(",", "")
    for repeated in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        text = re.sub(repeated, lambda found: found[1] * int(found[2]), text)
    unknown = set(text) - {*_LETTERS.values(), "|"}
    if unknown:
        raise ValueError(f"{LAYOUT} {layout}: {', '.join(sorted(unknown))} is no kind of layer")
    return tuple(text.split("|"))


def is_v_shaped(config: Any) -> bool:
    """Return whether second chunks lie on the ranks in reverse order, as in DualPipeV.

    Args:
        config: a job's arguments, or a model's configuration.
    """
    if getattr(config, "schedules_method", None) == "dualpipev":
        return (getattr(config, "pipeline_model_parallel_size", None) or 1) > 1
    return bool(getattr(getattr(config, "pipeline_model_parallel_layout", None), "v_shaped", False))


def layout_text(sizes: Sequence[int], mtp_layers: int = 0) -> str:
    """Return Megatron's layout of chunks with so many decoder layers.

    Args:
        sizes: of the chunks, in the model's order.
        mtp_layers: of multi-token prediction, which lie in the last chunk.
    """
    return _compact(_lettered(sizes, mtp_layers))


def nearly_even(layers: int, chunks: int, mtp_layers: int = 0) -> str:
    """Return Megatron's layout of chunks as equal as can be, of which later ones have a layer more."""
    return layout_text([(layers + chunk) // chunks for chunk in range(chunks)], mtp_layers)


def _lettered(sizes: Sequence[int], mtp_layers: int) -> tuple[str, ...]:
    stages = [_DECODER * size for size in sizes]
    stages[0] = f"{_EMBEDDING}{stages[0]}"
    stages[-1] += _MTP * mtp_layers + _LOSS
    return tuple(stages)


def _compact(stages: Sequence[str]) -> str:
    """Return a layout as Megatron reads it, equal letters of a chunk counted."""
    runs = [[(letter, len(list(run))) for letter, run in groupby(stage)] for stage in stages]
    return "|".join(
        "".join(letter if count == 1 else f"{letter}*{count}" for letter, count in stage) for stage in runs
    )


# -- chunks of layers that share selections ------------------------------------------------------


def check_chunks(args: Any) -> Iterator[str]:
    """Yield why the layers of a job's pipeline cannot share selections, with the nearest splits that can.

    Others refuse splits that Megatron does not make, and a sharing that is wrong in any split.

    Args:
        args: a job's arguments or a model's configuration; nothing is said where they name no layers.
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
    yield f"{_who(sharing)}: {problem}. {remedy(split, sharing, has_layout, mtp_layers)}"


def _who(sharing: Sharing) -> str:
    if sharing.pattern:
        return f"--dsa-indexer-topk-pattern {sharing.pattern}"
    return (
        f"--dsa-indexer-topk-freq {sharing.frequency} --dsa-indexer-skip-topk-offset {max(sharing.offset, 1)}"
    )


def remedy(split: Split, sharing: Sharing, has_layout: bool = True, mtp_layers: int = 0) -> str:
    """Return in words which splits work with as many ranks and chunks, or how many chunks can.

    Args:
        split: that does not work.
        sharing: of the model.
        has_layout: Megatron has ``--pipeline-model-parallel-layout``.
        mtp_layers: of multi-token prediction.
    """
    found = list(nearest(split, sharing, has_layout, mtp_layers))
    if found:
        sizes = "; ".join(f"{each.flags()} ({_sizes(each)})" for each in found)
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
    """Yield splits with as many ranks and chunks, all of which begin with a computing layer.

    The one with layers of its own on the first and last rank comes first, then the most even layout.

    Args:
        split: to replace.
        sharing: of the model.
        has_layout: a layout can be given.
        mtp_layers: of multi-token prediction, which a layout names.
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
    """Return whether layers can be dealt out like this, and every chunk begins with a computing layer."""
    return split.problem is None and sharing.chunk_problem(split.in_order) is None


def _largest(split: Split) -> int:
    return max(map(len, split.in_order))


@lru_cache(maxsize=256)
def _by_ends(layers: int, ranks: int, chunks: int, sharing: Sharing) -> Split | None:
    """Return the most even split that the flags of the first and last rank can say."""
    plain = Split(layers, ranks, chunks)
    counts = (None, *range(chunks, layers, chunks))
    fitting = [
        split
        for first in counts
        for last in counts
        if not (ranks == 2 and first and last)  # one of them says it
        and works(split := replace(plain, first=first, last=last), sharing)
        and all(split.in_order)
    ]
    return min(fitting, key=_unevenness, default=None)


def _unevenness(split: Split) -> tuple[int, int, int]:
    """Return the largest chunk, the squares of all, and how many flags say so: what is best is least."""
    sizes = [len(chunk) for chunk in split.in_order]
    return (
        max(sizes),
        sum(size * size for size in sizes),
        (split.first is not None) + (split.last is not None),
    )


@lru_cache(maxsize=256)
def _most_even(layers: int, ranks: int, chunks: int, sharing: Sharing, mtp_layers: int) -> Split | None:
    """Return the layout of the most even chunks, each of which begins with a computing layer.

    By the number of chunks and the layer that the next one begins with: the largest chunk so far and the sum
    of squares, least first.
    """
    starts = [layer for layer in range(1, layers + 1) if sharing.computes(layer)] + [layers + 1]
    best: dict[int, tuple[int, int, tuple[int, ...]]] = {1: (0, 0, ())}
    for _ in range(ranks * chunks):
        longer: dict[int, tuple[int, int, tuple[int, ...]]] = {}
        for begin, (largest, squares, sizes) in best.items():
            for end in starts:
                if end > begin:
                    size = end - begin
                    found = (max(largest, size), squares + size * size, (*sizes, size))
                    longer[end] = min(longer.get(end, found), found)
        best = longer
    if layers + 1 not in best:
        return None
    return Split(layers, ranks, chunks, stages=_lettered(best[layers + 1][2], mtp_layers))
