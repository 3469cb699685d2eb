"""Several NPUs: HCCL's collectives, layouts of a small model compared with one rank, MC2 and CoC.

``python -m benchmarks.npu.ranks collectives QUICK`` and ``... train FLAGS`` run one rank of a job.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks import launched, whole_weights
from benchmarks.gpu import job
from benchmarks.gpu.layer import BF16, STEPS, apart
from benchmarks.npu import stand_ins
from benchmarks.npu.steps import MODEL, TINY

NUMBERS = (2, 8)
"""Numbers of ranks to try, if there are as many devices."""
_FUSED = "--use-fused-dsa"
_TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
_PP2, _CP2 = "--pipeline-model-parallel-size 2", "--context-parallel-size 2"
_LAYOUTS = {
    2: {"TP2, SP": _TP2, "EP2": "--expert-model-parallel-size 2", "CP2": _CP2, "PP2": _PP2},
    8: {
        "TP2, SP, PP2, CP2": f"{_TP2} {_PP2} {_CP2}",
        "EP8": "--expert-model-parallel-size 8",
        "CP8": "--context-parallel-size 8",
    },
}
SWITCHES = {"MC2": "--use-ascend-mc2", "CoC": "--use-ascend-coc"}
# Four layers and eight microbatches fit into every layout; the batch is one sequence over and over.
_MODEL = MODEL.replace("--num-layers 3", "--num-layers 4")
_MODEL = _MODEL.replace("--global-batch-size 2", "--global-batch-size 8")
_QUICK = f"""
    {TINY} --num-layers 2 --seq-length 64 --dsa-indexer-topk 64 --global-batch-size 2
    --num-experts 4 --moe-ffn-hidden-size 32 --moe-shared-expert-intermediate-size 32
"""
_QUICK_LAYOUTS = ("TP2, SP", "EP2")
_ABSENT = "its time was not reached"


def run(quick: bool, seconds: float, tell: Callable[[Any], None]) -> dict[str, Any]:
    """Return figures by number of ranks and case, or the reason as ``refused`` or ``absent``.

    Cases are ``collectives``; layouts compared with one rank (``apart``, ``step_ratio``); and ``MC2`` and
    ``CoC`` compared with layers without them (likewise).

    Args:
        quick: a tiny model, two ranks, some of the cases.
        seconds: time limit of all cases together.
        tell: callback that gets the figures so far.
    """
    from mindspeed_dsa import platforms

    deadline = time.monotonic() + 0.95 * seconds
    devices = platforms.current().device_count() or 0
    numbers = [number for number in (NUMBERS[:1] if quick else NUMBERS) if number <= devices]
    if not numbers:
        return {"several ranks": {"absent": f"{devices} device is visible"}}
    model = f"{_QUICK if quick else _MODEL} {_FUSED}"
    figures: dict[str, Any] = {}
    alone: list[dict[str, Any] | str] = []

    def left() -> float:
        return deadline - time.monotonic()

    def trained(flags: str, ranks: int) -> dict[str, Any] | str:
        if left() < 1:
            return _ABSENT
        return _launched(["train", *f"{model} {flags}".split()], ranks, left())

    for ranks in numbers:
        of = f"{ranks} ranks"
        figures[f"{of}, collectives"] = _collectives(quick, ranks, left())
        tell(figures)
        alone = alone or [trained("", 1)]
        layouts = _LAYOUTS[ranks]
        for name in _QUICK_LAYOUTS if quick else layouts:
            figures[f"{of}, {name}"] = compared(alone[0], trained(layouts[name], ranks), "one rank")
            tell(figures)
        tensor = f"--tensor-model-parallel-size {ranks} --sequence-parallel"
        without = trained(tensor, ranks) if not quick else _ABSENT
        for name, flag in SWITCHES.items() if not quick else ():
            figures[f"{of}, TP{ranks}, {name}"] = compared(
                without, trained(f"{tensor} {flag}", ranks), "without it"
            )
            tell(figures)
    return figures


def compared(base: dict[str, Any] | str, ours: dict[str, Any] | str, what: str) -> dict[str, Any]:
    """Return how far losses are apart and how long a step takes, or why they cannot be compared.

    Args:
        base: figures of the reference job.
        ours: figures of the other job.
        what: name of the reference job, for messages.
    """
    for name, figures in ((what, base), ("several ranks", ours)):
        if isinstance(figures, str):
            return {"absent" if figures == _ABSENT else "refused": f"{name}: {figures}"}
    assert isinstance(base, dict)
    assert isinstance(ours, dict)
    seen = [name for name in BF16 if all(each is not None for each in (*base[name], *ours[name]))]
    distance = {name: apart(ours[name], base[name]) for name in seen}
    comparison = {
        "apart": distance,
        "step_ms": ours["step_ms"],
        "step_ratio": ours["step_ms"] / base["step_ms"],
    }
    for name in seen:
        if not distance[name] <= BF16[name]:
            return {**comparison, "refused": f"{name} is {distance[name]:.1e} from that of {what}"}
    return comparison


def _collectives(quick: bool, ranks: int, seconds: float) -> dict[str, Any]:
    rows = _launched(["collectives", str(int(quick))], ranks, seconds)
    return {"refused": rows} if isinstance(rows, str) else {"rows": rows}


def _launched(words: list[str], ranks: int, seconds: float) -> dict[str, Any] | str:
    with _messages() as variables:
        return launched.figures(__name__, words, ranks, max(seconds, 1.0), lambda rank: variables)


@contextmanager
def _messages() -> Iterator[dict[str, str]]:
    """Yield variables that give ranks on the stand-in a folder for their messages."""
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        yield stand_ins.messages(folder) if os.environ.get(stand_ins.ASKED_FOR) else {}


def _rank(kind: str, words: list[str]) -> dict[str, Any]:
    """Run one rank."""
    from benchmarks.npu import part

    part.prepare()
    if kind == "train":
        return job.train(words, STEPS, prepare=whole_weights.fill)
    import torch
    import torch.distributed as dist

    from benchmarks.npu import collectives
    from mindspeed_dsa import platforms

    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(platforms.current().backend)
    found = collectives.run(words == ["1"])
    dist.destroy_process_group()
    return found


if __name__ == "__main__":
    with open(os.dup(1), "w", encoding="utf-8") as answer:
        os.dup2(2, 1)
        print(json.dumps(_rank(sys.argv[1], sys.argv[2:])), file=answer, flush=True)
    # torch_npu's threads may outlive the interpreter, whose end then aborts.
    os._exit(0)
