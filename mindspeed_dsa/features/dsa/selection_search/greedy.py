"""Greedy search for the layers that need an indexer, on patterns alone, and the file of its results.

The search is the training-free one of IndexCache (arXiv 2603.12201). It starts with the job's own pattern. In
each step every layer that computes is made to share in turn, and the one with the least loss stays so.
The first layer of a pipeline chunk always computes, because a selection is not sent between chunks.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mindspeed_dsa.megatron.selections import SHARES, Sharing
from mindspeed_dsa.runs.files import RunError, write_atomically

REQUEST, RESULTS = "request.json", "search.json"
_COMPUTES = "C"


# -- patterns ------------------------------------------------------------------------------------


def letters_of(sharing: Sharing, layers: int) -> str:
    """Return the pattern of a model's decoder layers, C for each that computes and S for each that shares."""
    return "".join(_COMPUTES if sharing.computes(layer) else SHARES for layer in range(1, layers + 1))


def kept(pattern: str) -> int:
    """Return the number of layers that compute."""
    return len(pattern) - pattern.count(SHARES)


def for_engines(pattern: str) -> str:
    """Return a pattern in the letters of inference engines' ``index_topk_pattern``: F full, S shared."""
    return pattern.replace(_COMPUTES, "F")


def removable(pattern: str, firsts: Sequence[int]) -> list[int]:
    """Return the layers that compute and may share instead, ascending.

    Args:
        pattern: pattern of all decoder layers.
        firsts: numbers of the chunks' first layers.
    """
    return [n for n, letter in enumerate(pattern, 1) if letter != SHARES and n > 1 and n not in firsts]


def sharing_at(pattern: str, layer: int) -> str:
    """Return a pattern in which one more layer shares."""
    return pattern[: layer - 1] + SHARES + pattern[layer:]


def uniform(layers: int, computing: int, firsts: Sequence[int]) -> str:
    """Return the pattern that spreads computing layers evenly, with all chunks' first layers among them.

    Args:
        layers: number of decoder layers.
        computing: number of layers that compute, at least the number of chunks.
        firsts: ascending numbers of the chunks' first layers.
    """
    begins = sorted({1, *firsts})
    ends = [*begins[1:], layers + 1]
    sizes = [end - begin for begin, end in zip(begins, ends, strict=True)]
    counts = [1] * len(sizes)
    for _ in range(computing - len(sizes)):
        # The chunk with the widest gaps gets the next one.
        widest = max(range(len(sizes)), key=lambda chunk: (sizes[chunk] / counts[chunk], -chunk))
        counts[widest] += 1
    pattern = [SHARES] * layers
    for begin, size, count in zip(begins, sizes, counts, strict=True):
        for number in range(count):
            # 3 of 8 layers: 1, 3, 6.
            pattern[begin - 1 + number * size // count] = _COMPUTES
    return "".join(pattern)


def keep_problems(layers_kept: int | None, start: str, firsts: Sequence[int]) -> Iterator[str]:
    """Yield the reason why a search cannot end with a number of computing layers.

    Args:
        layers_kept: number of layers that compute in the end; None for half of all layers.
        start: pattern that the search starts with.
        firsts: numbers of the chunks' first layers.
    """
    if layers_kept is None:
        return
    begins = sorted({1, *firsts})
    if layers_kept > kept(start):
        yield (
            f"--layers-kept {layers_kept}: {kept(start)} of the {len(start)} layers have an indexer; give a "
            "smaller number"
        )
    elif layers_kept < len(begins):
        # The pattern with as few indexers as the chunks allow.
        nearest = uniform(len(start), len(begins), begins)
        yield (
            f"--layers-kept {layers_kept}: the pipeline has {len(begins)} chunks, which begin with layers "
            f"{', '.join(map(str, begins))}, and each of these must compute, because selections do not "
            f"travel between chunks; the nearest is --layers-kept {len(begins)}, pattern {nearest}. "
            "Give that, or search with fewer pipeline ranks or virtual stages"
        )


# -- search --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """One step of a search.

    Attributes:
        kept: number of layers that compute.
        pattern: pattern of all decoder layers.
        loss: calibration loss with the pattern.
        removed: layer that shares since this step; None for the start.
        uniform: uniform pattern with as many computing layers; empty if the start lacks indexers.
        uniform_loss: its calibration loss; None without a pattern.
    """

    kept: int
    pattern: str
    loss: float
    removed: int | None = None
    uniform: str = ""
    uniform_loss: float | None = None


Evaluate = Callable[[str, "int | None"], float]
"""Function from a pattern, and the layer by which it differs from the step's pattern, to a loss."""


def search(start: str, firsts: Sequence[int], layers_kept: int, evaluate: Evaluate) -> Iterator[Step]:
    """Yield the steps of a search: the start, and each further layer that shares.

    Args:
        start: pattern of the job.
        firsts: numbers of the chunks' first layers.
        layers_kept: number of layers that compute in the end.
        evaluate: function that returns a pattern's loss.
    """
    all_compute = SHARES not in start
    yield Step(
        kept(start), start, evaluate(start, None), None, *_beside(start, firsts, all_compute, evaluate)
    )
    pattern = start
    while kept(pattern) > layers_kept:
        # Ascending, so that the evaluation of one layer continues with the outputs below the one before.
        losses = {layer: evaluate(sharing_at(pattern, layer), layer) for layer in removable(pattern, firsts)}
        # The highest of equal layers: above it, fewer layers read an older selection.
        best = min(losses, key=lambda layer: (math.isnan(losses[layer]), losses[layer], -layer))
        pattern = sharing_at(pattern, best)
        beside = _beside(pattern, firsts, all_compute, evaluate)
        yield Step(kept(pattern), pattern, losses[best], best, *beside)


def _beside(
    pattern: str, firsts: Sequence[int], all_compute: bool, evaluate: Evaluate
) -> tuple[str, float | None]:
    if not all_compute:
        return "", None
    even = uniform(len(pattern), kept(pattern), firsts)
    return even, evaluate(even, None)


def evaluations(start: str, firsts: Sequence[int], layers_kept: int) -> int:
    """Return the largest number of evaluations of a search."""
    candidates, steps = len(removable(start, firsts)), kept(start) - layers_kept
    # 8 layers to 6 in one chunk: the start, 7 + 6 candidates, 2 uniform patterns.
    tried = sum(candidates - step for step in range(steps))
    return 1 + tried + (steps if SHARES not in start else 0)


# -- files ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    """Request of a search, which the command writes for the job.

    Attributes:
        checkpoint: path of the checkpoint that the job loads, with its step.
        layers_kept: number of layers that compute in the end; None for half of all layers.
        microbatches: number of calibration microbatches on each data parallel rank.
    """

    checkpoint: str
    layers_kept: int | None
    microbatches: int

    @classmethod
    def read(cls, folder: Path) -> Request:
        """Read the request in a folder.

        Raises:
            RunError: there is none, or it is damaged.
        """
        content = _read(folder / REQUEST, "start the search with `python -m mindspeed_dsa selections search`")
        try:
            return cls(**content)
        except TypeError:
            raise RunError(f"{folder / REQUEST} is not a request of this release; delete it") from None

    def write(self, folder: Path) -> None:
        """Write the request into a folder."""
        write_atomically(folder / REQUEST, json.dumps(asdict(self), indent=1) + "\n")


@dataclass
class Results:
    """Results of a search so far, in a file that is replaced after each evaluation.

    Attributes:
        identity: description of model, checkpoint and calibration data.
        losses: loss by pattern.
        planned: largest number of evaluations.
        firsts: numbers of the chunks' first layers, which always compute.
        steps: finished steps.
        is_done: whether the search has ended.
    """

    identity: Mapping[str, Any]
    losses: dict[str, float] = field(default_factory=dict)
    planned: int = 0
    firsts: list[int] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    is_done: bool = False

    @classmethod
    def read(cls, folder: Path) -> Results | None:
        """Read the results in a folder; ``None`` if there are none.

        Raises:
            RunError: the file is damaged.
        """
        file, remedy = folder / RESULTS, "delete it, or name another folder with --output"
        if not file.exists():
            return None
        content = _read(file, remedy)
        try:
            results = cls(**content)
            results.steps = [Step(**step) for step in content["steps"]]
        except (TypeError, KeyError):
            raise RunError(f"{file} is not of a search of this release; {remedy}") from None
        return results

    def write(self, folder: Path) -> None:
        """Write the results into a folder."""
        write_atomically(folder / RESULTS, json.dumps(asdict(self), indent=1) + "\n")


def resumed(folder: Path, identity: Mapping[str, Any]) -> Results:
    """Return new results with the losses that an earlier search of the same problem has left in a folder.

    Raises:
        RunError: the folder has results of another problem, or a damaged file.
    """
    before = Results.read(folder)
    if before is None:
        return Results(identity)
    other = [
        f"{name} {before.identity.get(name)} and not {value}"
        for name, value in identity.items()
        if before.identity.get(name) != value
    ]
    if other:
        raise RunError(
            f"{folder / RESULTS} is of another search: it has {'; '.join(other)}. Name another folder with "
            "--output, or delete this one"
        )
    return Results(identity, before.losses)


def _read(file: Path, remedy: str) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RunError(f"there is no {file}; {remedy}") from None
    except (OSError, ValueError) as error:
        raise RunError(f"{file} cannot be read: {error}; {remedy}") from None
    if not isinstance(content, dict):
        raise RunError(f"{file} has no JSON object; {remedy}")
    return content
