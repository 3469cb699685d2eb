"""Operators' times on a GPU against the bounds of the model of ``kernels-static``."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.dsa.floor import needed_flops
from benchmarks.dsa.problem import Sizes
from benchmarks.released import MODELS

STATIC = Path(__file__).parents[1] / "results/kernels-static.json"
# Kernels that do the products of an operator and direction, to the operations that each one does. A key is
# the beginning of the kernel's name in the model's table, without the prefix of GPU-specific kernels. "rest"
# is the remainder.
_KERNELS = {
    ("sparse_flash_attention", "forward"): {"forward_kernel, {heads} heads": "rest"},
    ("sparse_flash_attention", "backward"): {"backward, {heads} heads": "rest"},
    ("lightning_indexer", "forward"): {"score_slab_kernel, indexer": "rest"},
    ("lightning_indexer", "backward"): {"score_gradients_kernel, indexer": "rest"},
    ("indexer_kl_loss", "forward_backward"): {
        "score_gradients_kernel, indexer": ("lightning_indexer", "backward"),
        "attention_sum_kernel, {heads} heads": "rest",
    },
}


def slower_than_model(operators: Mapping[str, Any], device: str) -> dict[str, Any] | str:
    """Return ``ms``, ``model_ms`` and their ratio ``times`` by operator, largest ratio first.

    Args:
        operators: figures of :func:`benchmarks.dsa.cuda.run`.
        device: GPU's name.

    Returns:
        The table, or the reason why there is none.
    """
    from benchmarks.kernels import model

    name = next((name for name in model.GPUS if name in device), None)
    if name is None:
        return f"the model knows {', '.join(model.GPUS)}, and this is {device}"
    if not STATIC.exists():
        return f"there are no bounds: {STATIC.name} is missing; run python -m benchmarks kernels-static"
    fractions = json.loads(STATIC.read_text(encoding="utf-8"))["metrics"]["model_fraction_of_peak"][name]
    rows = dict(_rows(operators, fractions, model.GPUS[name].flops))
    return dict(sorted(rows.items(), key=lambda row: -row[1]["times"]))


def _rows(
    operators: Mapping[str, Any], fractions: Mapping[str, float], peak: float
) -> Iterator[tuple[str, dict[str, float]]]:
    for problem, figures_of in operators.items():
        sizes = re.fullmatch(r"S(\d+)_H(\d+)", problem)
        if sizes is None or isinstance(figures_of, str):
            continue
        length, heads = map(int, sizes.groups())
        for (operator, direction), seconds in model_seconds(length, heads, fractions, peak).items():
            ms, model_ms = figures_of[operator][direction]["ms"], seconds * 1e3
            figures = {"ms": ms, "model_ms": model_ms, "times": ms / model_ms}
            yield f"{problem} {operator} {direction}", figures


def model_seconds(
    length: int, heads: int, fractions: Mapping[str, float], peak: float
) -> dict[tuple[str, str], float]:
    """Return the model's time bound in seconds, by operator and direction.

    Args:
        length: number of rows, and of keys.
        heads: heads of the main attention.
        fractions: dict from kernel to its fraction of ``peak``; operators with an unlisted kernel are left
            out.
        peak: bf16 operations per second.
    """
    flops = needed_flops(Sizes.of(MODELS["deepseek-v3.2"], length=length, heads=heads))
    bounds = {}
    for (operator, direction), kernels in _KERNELS.items():
        rest, seconds = flops[operator][direction], 0.0
        for start, part in kernels.items():
            wanted = re.compile(rf"(hopper_\w*)?{start.format(heads=heads)}")
            fraction = next((value for name, value in fractions.items() if wanted.match(name)), None)
            if fraction is None:
                break
            # The loss includes the indexer's backward, which has its own kernel; the sum's kernel does the
            # rest.
            work = rest if part == "rest" else flops[part[0]][part[1]]
            rest -= work
            seconds += work / fraction / peak
        else:
            bounds[operator, direction] = seconds
    return bounds
