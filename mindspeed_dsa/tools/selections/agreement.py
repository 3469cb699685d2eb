"""How far two recordings of selections are apart: equal keys by layer, length and place, and lost attention.

Only rows that choose count, which see more keys than they list: others list all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mindspeed_dsa.runs.files import RunError
from mindspeed_dsa.runs.metrics import pyplot_for
from mindspeed_dsa.runs.selections import Key, Recording, Rows

ENDS = 128
"""Keys at the head of a document, and of those right before a row, that are counted apart."""


class Share(NamedTuple):
    """A part of a whole.

    Attributes:
        part: how many, or how much.
        whole: of how many, or how much.
    """

    part: float = 0.0
    whole: float = 0.0

    def __add__(self, other: Any) -> Share:
        return Share(self.part + other.part, self.whole + other.whole)

    @property
    def value(self) -> float | None:
        """The quotient; None of nothing."""
        return self.part / self.whole if self.whole else None


_NOTHING = Share()


@dataclass
class Agreement:
    """Agreement of two selections, B's with A's.

    Attributes:
        rows: that choose, and are in both.
        same: rows with the same keys, of these.
        keys: A's keys that B has, too.
        by_place: likewise, of the keys at the document's head, near the row, and between.
        by_length: likewise, of rows by the number of keys that they see: from a power of two on.
        lost: A's attention on keys that B lacks; without a whole where it was not recorded.
    """

    rows: int = 0
    same: Share = _NOTHING
    keys: Share = _NOTHING
    by_place: dict[str, Share] = field(default_factory=dict)
    by_length: dict[int, Share] = field(default_factory=dict)
    lost: Share = _NOTHING

    def add(self, other: Agreement) -> None:
        """Add the rows of another part."""
        self.rows += other.rows
        self.same += other.same
        self.keys += other.keys
        self.lost += other.lost
        for place, share in other.by_place.items():
            self.by_place[place] = self.by_place.get(place, _NOTHING) + share
        for length, share in other.by_length.items():
            self.by_length[length] = self.by_length.get(length, _NOTHING) + share

    def as_json(self) -> dict[str, Any]:
        """Return it as numbers: quotients, None of nothing."""
        return {
            "rows": self.rows,
            "same_rows": self.same.value,
            "equal_keys": self.keys.value,
            "by_place": {name: share.value for name, share in self.by_place.items()},
            "by_length": {str(length): share.value for length, share in sorted(self.by_length.items())},
            "lost_attention": self.lost.value,
        }


def compare(a: Recording, b: Recording) -> dict[int, Agreement]:
    """Compare the rows that both have, by layer.

    Raises:
        RunError: the recordings are of different models, have no row in common, or a record is damaged.
    """
    differences = list(a.header.problems(b.header))
    if differences:
        raise RunError(f"{a.folder} and {b.folder} are of different models: {'; '.join(differences)}")
    common = sorted(set(a.places()) & set(b.places()))
    if not common:
        raise RunError(
            f"{a.folder} and {b.folder} have no step, sequence and layer in common; record the same steps of "
            "the same data, from --load with --finetune if the checkpoints are of different steps"
        )
    found: dict[int, Agreement] = {}
    for key in common:
        mine, theirs = _read(a, key), _read(b, key)
        found.setdefault(key.layer, Agreement()).add(_agreement(mine, theirs, key))
    return dict(sorted(found.items()))


def _read(recording: Recording, key: Key) -> Rows:
    rows = recording.rows(key)
    assert rows is not None, "it is listed"
    return rows


def _agreement(a: Rows, b: Rows, key: Key) -> Agreement:
    _, at_a, at_b = np.intersect1d(a.positions, b.positions, return_indices=True)
    if (a.documents[at_a] != b.documents[at_b]).any():
        raise RunError(
            f"step {key.step}, sequence {key.sequence}: documents begin at other rows in one recording than "
            "in the other; record the same data in the same order"
        )
    visible = a.positions[at_a] - a.documents[at_a] + 1
    result = Agreement()
    # A byte for each key that a row sees: a few rows at a time.
    for part in np.array_split(np.arange(len(at_a)), max(1, len(at_a) // 256)):
        rows = part[visible[part] > np.count_nonzero(a.keys[at_a[part]] >= 0, axis=1)]
        if len(rows):
            mass = None if a.mass is None else a.mass[at_a[rows]]
            result.add(_of_rows(a.keys[at_a[rows]], b.keys[at_b[rows]], visible[rows], mass))
    return result


def _of_rows(keys: Any, others: Any, visible: Any, mass: Any) -> Agreement:
    """Compare rows ``[rows, topk]`` that see so many keys each, ``[rows]``."""
    named = keys >= 0
    has = np.zeros((len(keys), int(visible.max()) + 1), np.bool_)
    # What is no key falls behind the last one.
    np.put_along_axis(has, np.where(others >= 0, others, has.shape[1] - 1), True, axis=1)
    has[:, -1] = False
    equal = np.take_along_axis(has, np.where(named, keys, has.shape[1] - 1), axis=1) & named
    per_row, of_row = equal.sum(axis=1), named.sum(axis=1)
    is_head, is_near = keys < ENDS, keys >= (visible - ENDS)[:, None]
    places = {"head": is_head, "between": ~is_head & ~is_near, "near": is_near & ~is_head}
    lengths = 2 ** np.floor(np.log2(visible)).astype(np.int64)
    same = (per_row == of_row) & (np.count_nonzero(others >= 0, axis=1) == of_row)
    return Agreement(
        rows=len(keys),
        same=Share(float(same.sum()), float(len(keys))),
        keys=Share(float(per_row.sum()), float(of_row.sum())),
        by_place={
            name: Share(float((equal & where).sum()), float((named & where).sum()))
            for name, where in places.items()
        },
        by_length={
            int(length): Share(
                float(per_row[lengths == length].sum()), float(of_row[lengths == length].sum())
            )
            for length in np.unique(lengths)
        },
        lost=Share() if mass is None else Share(float(mass[named & ~equal].sum()), float(mass.sum())),
    )


def total(layers: dict[int, Agreement]) -> Agreement:
    """Return the agreement of all layers together."""
    result = Agreement()
    for each in layers.values():
        result.add(each)
    return result


def table(layers: dict[int, Agreement]) -> list[tuple[str, ...]]:
    """Return one row of words for each layer, and one for all of them."""
    rows: list[tuple[str, ...]] = [
        ("layer", "rows that choose", "equal keys", "same rows", "head", "between", "near", "lost attention")
    ]
    for name, each in [*((str(layer), each) for layer, each in layers.items()), ("all", total(layers))]:
        places = [_percent(each.by_place.get(place, Share())) for place in ("head", "between", "near")]
        figures = [_percent(each.keys), _percent(each.same), *places, _percent(each.lost)]
        rows.append((name, str(each.rows), *figures))
    return rows


def lengths(layers: dict[int, Agreement]) -> list[tuple[str, ...]]:
    """Return one row of words for each power of two of keys that rows see."""
    everything = total(layers)
    return [
        ("keys seen", "equal keys"),
        *(
            (f"{length} to {2 * length - 1}", _percent(share))
            for length, share in sorted(everything.by_length.items())
        ),
    ]


def _percent(share: Share) -> str:
    return "-" if share.value is None else f"{share.value:.3%}"


def draw(path: Path, layers: dict[int, Agreement], names: Sequence[str]) -> None:
    """Draw equal keys over layers, by the place of the key and by the number of keys seen.

    Args:
        path: picture file.
        layers: that were compared.
        names: of A and B.

    Raises:
        RunError: matplotlib is missing.
    """
    pyplot = pyplot_for(path)
    figure, (by_place, by_length) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    numbers = list(layers)
    for name in ("head", "between", "near"):
        by_place.plot(numbers, list(_values(layers, name)), marker="o", label=f"keys {name}")
    by_place.plot(numbers, [each.keys.value for each in layers.values()], "k--", label="all keys")
    by_place.set(xlabel="layer", ylabel="equal keys", title=f"{names[0]} and {names[1]}")
    by_place.legend()
    found = sorted(total(layers).by_length.items())
    by_length.plot([length for length, _ in found], [share.value for _, share in found], marker="o")
    by_length.set(xscale="log", xlabel="keys that the row sees", ylabel="equal keys", title="all layers")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _values(layers: dict[int, Agreement], place: str) -> Iterator[float]:
    for each in layers.values():
        value = each.by_place.get(place, Share()).value
        yield float("nan") if value is None else value
