"""``selections``: show a recording of selected keys, or compare two recordings.

A comparison of recordings A and B counts the keys that both select, by layer, context length and key
position. It also sums the attention probability on keys that only A selects (``lost``). Query tokens that see
at most ``topk`` keys are left out, because they select all of them.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_dsa.features.dsa.selections.format import SUFFIX, Key, Recording, Rows
from mindspeed_dsa.runs.files import RunError, amount
from mindspeed_dsa.runs.metrics import pyplot_for
from mindspeed_dsa.session import start_report
from mindspeed_dsa.tools.cli import selections_search
from mindspeed_dsa.tools.compare import job

_DESCRIPTION = """\
Shows what --dsa-record-selections wrote into A; or, with B, how many of A's keys B has, by layer, by the
place of the key and by how many keys a row sees, and how much of A's attention lies on the others (if A was
recorded with --dsa-record-selections-mass).

A and B are folders, or flags that are appended to the command of a job behind --, which is run once with
each of them and records its first step:

  python -m mindspeed_dsa selections runs/a runs/b --picture agreement.png
  python -m mindspeed_dsa selections "" "--dsa-indexer-precision fp8" -- torchrun pretrain.py FLAGS...
  python -m mindspeed_dsa selections "--load X --finetune" "--load Y --finetune" -- python pretrain.py
  FLAGS...

`selections search CHECKPOINT -- COMMAND` finds the layers that can do without an indexer; see its --help.

Keys at the head are the first 128 of their document, near ones the last 128 before the row. Rows that see no
more keys than they select are left out. Exit status: 0, or 1 if a job failed, 2 if something was refused."""
ENDS = 128
"""Number of keys in the groups ``head`` (start of the document) and ``near`` (before the query token)."""
PLACES = ("head", "between", "near")


# -- the command ---------------------------------------------------------------------------------


def run(argv: Sequence[str]) -> int:
    """Print the tables, and write JSON and picture if requested."""
    if argv and argv[0] == "search":
        return selections_search.run(argv[1:])
    options, command = _parse(list(argv))
    with tempfile.TemporaryDirectory() as scratch:
        folders = []
        for side, what in zip(
            "AB", filter(lambda each: each is not None, (options.a, options.b)), strict=False
        ):
            folder = Path(what)
            # An existing folder is a recording even if a job's command is given.
            if command and not (what and folder.is_dir()):
                folder = Path(scratch, side, "selections")
                done = _record(side, command, what, folder, Path(scratch, side))
                if done.problem:
                    print(
                        "\n".join([f"{side}: the job {done.problem}", *job.last_lines(done.log)]),
                        file=sys.stderr,
                    )
                    return 1
            folders.append(Recording.open(folder))
        for recording in folders:
            for problem in recording.problems:
                print(f"{recording.folder}: {problem}", file=sys.stderr)
        if len(folders) == 1:
            print("\n".join(start_report.aligned(_contents(folders[0]))))
            return 0
        return _compare(folders, options)


def _compare(folders: Sequence[Recording], options: argparse.Namespace) -> int:
    layers = compare(*folders)
    everything = total(layers)
    if not everything.rows:
        raise RunError(
            f"no row that both recorded sees more than the {folders[0].header.topk} keys that it lists; "
            "longer sequences are needed for a choice to be made"
        )
    print("\n".join(start_report.aligned(_table(layers))))
    print()
    print("\n".join(start_report.aligned(_lengths(everything))))
    if options.json is not None:
        result: dict[str, Any] = {
            "a": options.a,
            "b": options.b,
            "all": everything.as_json(),
            "layers": {str(layer): each.as_json() for layer, each in layers.items()},
        }
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        print(f"\n{options.json}")
    if options.picture is not None:
        _draw(options.picture, layers, (options.a or "A", options.b or "B"))
        print(f"\n{options.picture} shows them")
    return 0


def _contents(recording: Recording) -> list[tuple[str, ...]]:
    header, keys = recording.header, recording.places()
    steps = sorted({key.step for key in keys})
    sizes = sum(path.stat().st_size for path in recording.folder.glob(f"*{SUFFIX}"))
    numbers = sum(recording.count(key) for key in keys) * header.topk * 4
    return [
        ("keys of a row", f"at most {header.topk}"),
        ("layers that select", ", ".join(map(str, header.computing))),
        ("layers recorded", ", ".join(map(str, sorted({key.layer for key in keys})))),
        ("steps", f"{len(steps)}, from {steps[0]} to {steps[-1]}" if steps else "none"),
        ("sequences", str(len({(key.step, key.sequence) for key in keys}))),
        ("bytes", f"{amount(sizes)}, {sizes / numbers:.3f} of int32" if numbers else amount(sizes)),
    ]


def _record(side: str, command: Sequence[str], flags: str, folder: Path, scratch: Path) -> job.Run:
    words = [each.replace("{out}", str(scratch)) for each in command]
    # The attention mass is only needed of A: the loss is A's mass on keys that B lacks.
    records = ["--dsa-record-selections", str(folder), "--dsa-record-selections-steps", "1"]
    records += ["--dsa-record-selections-mass"] if side == "A" else []
    return job.execute(side, 1, scratch, [*words, *shlex.split(flags), *records], {}, None)


def _parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    cut = argv.index("--") if "--" in argv else len(argv)
    words, command = argv[:cut], argv[cut + 1 :]
    parser = argparse.ArgumentParser(
        prog="python -m mindspeed_dsa selections",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("a", metavar="A", help="a recording, or flags of the job")
    parser.add_argument("b", metavar="B", nargs="?", help="another one")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw them, e.g. agreement.png")
    # argparse takes "--load X" for an option; a leading space makes it a positional argument.
    own = ("--json", "--picture", "--help")
    marked = []
    for each in words:
        is_side = " " in each or (command and each.partition("=")[0] not in own)
        marked.append(f" {each}" if each.startswith("--") and is_side else each)
    options = parser.parse_args(marked)
    options.a, options.b = options.a.strip(), None if options.b is None else options.b.strip()
    if command and options.b is None:
        parser.error("a job behind -- is for two sides: give A and B")
    if cut < len(argv) and not command:
        parser.error("nothing follows --; give the job's command there")
    for path in (options.json, options.picture):
        if path is not None and not path.parent.is_dir():
            parser.error(f"{path} cannot be written: make the folder {path.parent} first")
    return options, command


# -- comparison ----------------------------------------------------------------------------------


@dataclass
class Agreement:
    """Agreement of two recordings: named counts of a whole, and of a part of it.

    * ``keys``: whole: keys that recording A selects; part: those that recording B selects, too.
    * a name of :data:`PLACES`: as ``keys``, for keys at this position in the sequence.
    * a power of two ``n``: as ``keys``, for query tokens that see n to 2n - 1 keys.
    * ``same``: whole: query tokens; part: those for which A and B select the same set of keys.
    * ``lost``: whole: sum of A's attention probabilities; part: the sum on keys that B does not select.

    Attributes:
        part: dict from name to the part's count.
        whole: dict from name to the whole's count; without ``lost`` if no probabilities were recorded.
    """

    part: Counter[str | int] = field(default_factory=Counter)
    whole: Counter[str | int] = field(default_factory=Counter)

    def count(self, name: str | int, part: Any, whole: Any) -> None:
        """Add the array scalars ``part`` and ``whole`` to the counts of this name."""
        self.part[name] += part.item()
        self.whole[name] += whole.item()

    def add(self, other: Agreement) -> None:
        """Add the counts of ``other`` to these counts."""
        self.part.update(other.part)
        self.whole.update(other.whole)

    @property
    def rows(self) -> int:
        """Number of query tokens that were compared between the two recordings."""
        return self.whole["same"]

    def value(self, name: str | int) -> float | None:
        """Return part / whole, or None if the whole is zero."""
        return self.part[name] / self.whole[name] if self.whole[name] else None

    def lengths(self) -> list[int]:
        """Return the powers of two among the names, ascending."""
        return sorted(name for name in self.whole if isinstance(name, int))

    def as_json(self) -> dict[str, Any]:
        """Return part / whole of all counts for JSON, with None where whole is zero."""
        return {
            "rows": self.rows,
            "same_rows": self.value("same"),
            "equal_keys": self.value("keys"),
            "by_place": {name: self.value(name) for name in PLACES if name in self.whole},
            "by_length": {str(length): self.value(length) for length in self.lengths()},
            "lost_attention": self.value("lost"),
        }


def compare(a: Recording, b: Recording) -> dict[int, Agreement]:
    """Compare the query tokens that both recordings contain, by layer.

    Raises:
        RunError: the recordings are for different models, have no sequence in common, or are damaged.
    """
    differences = list(a.header.problems(b.header, a.folder, b.folder))
    if differences:
        raise RunError(f"{a.folder} and {b.folder} are of different models: {'; '.join(differences)}")
    common = sorted(set(a.places()) & set(b.places()))
    if not common:
        raise RunError(
            f"{a.folder} and {b.folder} have no step, sequence and layer in common; record the same steps of "
            "the same data, from --load with --finetune if the checkpoints are of different steps"
        )
    agreements: dict[int, Agreement] = {}
    for key in common:
        _count_rows(agreements.setdefault(key.layer, Agreement()), _rows(a, key), _rows(b, key), key)
    return dict(sorted(agreements.items()))


def _rows(recording: Recording, key: Key) -> Rows:
    rows = recording.rows(key)
    assert rows is not None, "it is listed"
    return rows


def _count_rows(agreement: Agreement, a: Rows, b: Rows, key: Key) -> None:
    """Compare the query tokens of one sequence that both recordings contain, and add their counts."""
    _, at_a, at_b = np.intersect1d(a.positions, b.positions, return_indices=True)
    if (a.documents[at_a] != b.documents[at_b]).any():
        raise RunError(
            f"step {key.step}, sequence {key.sequence}: documents begin at other rows in one recording than "
            "in the other; record the same data in the same order"
        )
    # Causal attention inside a document: token 130 of a document that begins at 100 sees 31 keys.
    visible = a.positions[at_a] - a.documents[at_a] + 1
    # _count_keys needs a byte per visible key: 256 rows x 128k keys = 32 MiB at a time.
    for part in np.array_split(np.arange(len(at_a)), max(1, len(at_a) // 256)):
        rows = part[visible[part] > np.count_nonzero(a.keys[at_a[part]] >= 0, axis=1)]
        if len(rows):
            mass = None if a.mass is None else a.mass[at_a[rows]]
            _count_keys(agreement, a.keys[at_a[rows]], b.keys[at_b[rows]], visible[rows], mass)


def _count_keys(agreement: Agreement, keys: Any, others: Any, visible: Any, mass: Any) -> None:
    """Compare the keys of the same query tokens in A and B, and add the counts to ``agreement``.

    Args:
        agreement: counts to add to.
        keys: recording A's keys, ``[rows, topk]`` padded with -1.
        others: recording B's keys, likewise.
        visible: ``[rows]``, number of keys visible to each query token.
        mass: ``[rows, topk]``, A's attention probabilities; None if not recorded.
    """
    named = keys >= 0
    has = np.zeros((len(keys), int(visible.max()) + 1), np.bool_)
    # Padding is scattered into an additional last column, which is cleared afterwards.
    np.put_along_axis(has, np.where(others >= 0, others, has.shape[1] - 1), True, axis=1)
    has[:, -1] = False
    equal = np.take_along_axis(has, np.where(named, keys, has.shape[1] - 1), axis=1) & named
    per_row, of_row = equal.sum(axis=1), named.sum(axis=1)
    same = (per_row == of_row) & (np.count_nonzero(others >= 0, axis=1) == of_row)
    agreement.count("same", same.sum(), np.int64(len(keys)))
    agreement.count("keys", per_row.sum(), of_row.sum())
    is_head, is_near = keys < ENDS, keys >= (visible - ENDS)[:, None]
    places = (is_head, ~is_head & ~is_near, is_near & ~is_head)
    for name, where in zip(PLACES, places, strict=True):
        agreement.count(name, (equal & where).sum(), (named & where).sum())
    # Context lengths in powers of two: 2048 stands for 2048 to 4095 visible keys.
    lengths = 2 ** np.floor(np.log2(visible)).astype(np.int64)
    for length in np.unique(lengths):
        of_length = lengths == length
        agreement.count(int(length), per_row[of_length].sum(), of_row[of_length].sum())
    if mass is not None:
        agreement.count("lost", mass[named & ~equal].sum(), mass.sum())


def total(layers: Mapping[int, Agreement]) -> Agreement:
    """Return one :class:`Agreement` with the counts of all layers added up."""
    result = Agreement()
    for layer in layers.values():
        result.add(layer)
    return result


# -- tables and picture --------------------------------------------------------------------------


def _table(layers: Mapping[int, Agreement]) -> list[tuple[str, ...]]:
    """Return the rows of the table: one per layer, and one for all layers."""
    rows: list[tuple[str, ...]] = [
        ("layer", "rows that choose", "equal keys", "same rows", *PLACES, "lost attention")
    ]
    for name, agreement in [
        *((str(layer), agreement) for layer, agreement in layers.items()),
        ("all", total(layers)),
    ]:
        figures = (_percent(agreement.value(figure)) for figure in ("keys", "same", *PLACES, "lost"))
        rows.append((name, str(agreement.rows), *figures))
    return rows


def _lengths(everything: Agreement) -> list[tuple[str, ...]]:
    """Return the rows of the table by context length, one per power of two."""
    return [
        ("keys seen", "equal keys"),
        *(
            (f"{length} to {2 * length - 1}", _percent(everything.value(length)))
            for length in everything.lengths()
        ),
    ]


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.3%}"


def _draw(path: Path, layers: Mapping[int, Agreement], names: Sequence[str]) -> None:
    """Plot the share of equal keys over the layers, by key position, and over the context length."""
    pyplot = pyplot_for(path)
    figure, (by_place, by_length) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for name in (*PLACES, "keys"):
        values = [layer.value(name) for layer in layers.values()]
        style: dict[str, Any] = {"marker": "o", "label": f"keys {name}"}
        if name == "keys":
            style = {"color": "k", "linestyle": "--", "label": "all keys"}
        by_place.plot(list(layers), [np.nan if value is None else value for value in values], **style)
    by_place.set(xlabel="layer", ylabel="equal keys", title=f"{names[0]} and {names[1]}")
    by_place.legend()
    everything = total(layers)
    lengths = everything.lengths()
    by_length.plot(lengths, [everything.value(length) for length in lengths], marker="o")
    by_length.set(xscale="log", xlabel="keys that the row sees", ylabel="equal keys", title="all layers")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
