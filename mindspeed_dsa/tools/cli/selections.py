"""``selections``: what a run recorded, and how far two recordings, or two ways to run a job, are apart."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mindspeed_dsa.runs.files import RunError, amount
from mindspeed_dsa.runs.selections import SUFFIX, Recording
from mindspeed_dsa.session import start_report
from mindspeed_dsa.tools.compare import job
from mindspeed_dsa.tools.selections import agreement

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

Keys at the head are the first 128 of their document, near ones the last 128 before the row. Rows that see no
more keys than they select are left out. Exit status: 0, or 1 if a job failed, 2 if something was refused."""


def run(argv: Sequence[str]) -> int:
    """Print the tables, and write what was asked for."""
    options, command = _parse(list(argv))
    with tempfile.TemporaryDirectory() as scratch:
        folders = []
        for side, what in zip(
            "AB", filter(lambda each: each is not None, (options.a, options.b)), strict=False
        ):
            folder = Path(what)
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
        for each in folders:
            for problem in each.problems:
                print(f"{each.folder}: {problem}", file=sys.stderr)
        if len(folders) == 1:
            print("\n".join(start_report.aligned(_contents(folders[0]))))
            return 0
        return _compare(folders, options)


def _compare(folders: Sequence[Recording], options: argparse.Namespace) -> int:
    layers = agreement.compare(*folders)
    everything = agreement.total(layers)
    if not everything.rows:
        raise RunError(
            f"no row that both recorded sees more than the {folders[0].header.topk} keys that it lists; "
            "longer sequences are needed for a choice to be made"
        )
    print("\n".join(start_report.aligned(agreement.table(layers))))
    print()
    print("\n".join(start_report.aligned(agreement.lengths(layers))))
    if options.json is not None:
        found: dict[str, Any] = {
            "a": options.a,
            "b": options.b,
            "all": everything.as_json(),
            "layers": {str(layer): each.as_json() for layer, each in layers.items()},
        }
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        print(f"\n{options.json}")
    if options.picture is not None:
        agreement.draw(options.picture, layers, (options.a or "A", options.b or "B"))
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
    records = ["--dsa-record-selections", str(folder), "--dsa-record-selections-steps", "1"]
    records += ["--dsa-record-selections-mass"] if side == "A" else []
    return job.execute(side, 1, scratch, [*words, *shlex.split(flags), *records], {}, None)


def _parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    cut = argv.index("--") if "--" in argv else len(argv)
    own, command = argv[:cut], argv[cut + 1 :]
    parser = argparse.ArgumentParser(
        prog="python -m mindspeed_dsa selections",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("a", metavar="A", help="a recording, or flags of the job")
    parser.add_argument("b", metavar="B", nargs="?", help="another one")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw them, e.g. agreement.png")
    # argparse takes flags of a job for its own, unless they are no words of their own.
    marked = [f" {each}" if each.startswith("--") and " " in each else each for each in own]
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
