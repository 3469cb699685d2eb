"""Compile all Triton kernels for GPUs that need not be present, and check their resources against budgets.

    python -m tests.ops.compile_kernels [--target 90 ...] [--dtype bf16 ...] [--quick | --odd]
                                        [--write | --recorded]

Prints one JSON object per kernel and configuration, with its problems, and exits with 1 if there are any.
A kernel must fit into the shared memory of its target, and its warp group products must not be serialised.
Tiles with at least 64 rows must use warp group products (WGMMA), not products of single warps (MMA).
Budgets for spilled bytes and for waits per product are in ``kernel_budgets.json``; both half precisions
share one, and kernels with ``ORDERED`` have their own. ``--write`` raises budgets to the measured values.

``kernel_record.json`` has fingerprints of kernels that passed: their source, compile-time constants, target
and Triton's version. ``--recorded`` skips recorded kernels; ``--quick --write`` updates the record.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.kernels.cases import DTYPES, Call, all_cases, quick_cases
from benchmarks.kernels.compiled import SHARED_MEMORY, Kernel, compiled, without

BUDGETS = Path(__file__).with_name("kernel_budgets.json")
RECORD = Path(__file__).with_name("kernel_record.json")
# Rows of a WGMMA tile, and warps of a warp group.
_GROUP_ROWS, _GROUP_WARPS = 64, 4
# Per kernel, the constants whose minimum is the number of rows of its products.
_ROWS = {
    "forward_kernel": ("BLOCK_H",),
    "attention_sum_kernel": ("BLOCK_N",),
    "backward_keys_kernel": ("BLOCK_N",),
    "backward_query_kernel": ("BLOCK_H",),
    "score_slab_kernel": ("BLOCK_N",),
    "scores_at_kernel": ("BLOCK_N",),
    "score_gradients_kernel": ("BLOCK_N", "BLOCK_J"),
    "dense_lse_kernel": ("BLOCK_M",),
    "dense_sum_kernel": ("BLOCK_M",),
    "dense_key_gradient_kernel": ("BLOCK_N",),
    "multiply_kernel": ("BLOCK_M",),
    "weight_gradient_kernel": ("BLOCK_K",),
}
_HALF = ("bf16", "fp16")
# fp32 products do not run on tensor cores, so overlap does not matter: one bound for all kernels.
_FP32_BUDGET: dict[str, float] = {"spilled": 1536, "waits": 0}
# Spills and waits vary a little with unrelated code in the kernel, so both have a tolerance.
_TOLERATED_BYTES, _TOLERATED_RATIO = 32, 0.05


def problems(kernel: Kernel, dtype: str, budget: dict[str, float] | None) -> list[str]:
    """Return the problems of a compiled kernel, as sentences.

    Args:
        kernel: compiled kernel.
        dtype: name of the operator's input dtype.
        budget: ``spilled`` bytes, and ``waits`` per warp group product; ``None`` allows neither.
    """
    budget = budget or {"spilled": 0, "waits": 0}
    sentences = []
    limit = SHARED_MEMORY[kernel.target]
    serialised = [number for number in kernel.advisories if number.startswith("C75")]
    if serialised:
        sentences.append(f"its products run one at a time ({', '.join(serialised)})")
    if kernel.shared > limit:
        sentences.append(f"it needs {kernel.shared} bytes of shared memory, and there are {limit}")
    if kernel.spilled > budget["spilled"] + _TOLERATED_BYTES:
        sentences.append(f"it spills {kernel.spilled} bytes, and {budget['spilled']:.0f} are budgeted")
    ratio = waits_per_product(kernel)
    if ratio > budget["waits"] + _TOLERATED_RATIO:
        sentences.append(
            f"it waits {ratio:.2f} times for each product, and {budget['waits']:.2f} are budgeted"
        )
    if dtype in _HALF and takes_warp_groups(kernel) and (kernel.wgmma == 0 or kernel.mma > 0):
        sentences.append(f"{kernel.mma} of its products are of single warps, and its tiles allow warp groups")
    return sentences


def waits_per_product(kernel: Kernel) -> float:
    """Return the number of waits per warp group product, 0 for a kernel without them."""
    return kernel.waits / kernel.wgmma if kernel.wgmma else 0.0


def budget_name(kernel: Kernel) -> str:
    """Return the name of a kernel's budget. Forms in a fixed order need more registers than the others."""
    return f"{kernel.name} ORDERED" if kernel.constants.get("ORDERED") else kernel.name


def takes_warp_groups(kernel: Kernel) -> bool:
    """Whether the target has warp group products and the kernel's tiles are large enough for them."""
    rows = min((kernel.constants[name] for name in _ROWS.get(kernel.name, ())), default=0)
    return kernel.target == 90 and rows >= _GROUP_ROWS and kernel.warps >= _GROUP_WARPS


def checked(target: int, dtype: str, calls: Iterable[Call]) -> Iterator[tuple[str, Kernel, list[str]]]:
    """Yield each kernel of some calls: the description of the call, the kernel and its problems."""
    budgets = json.loads(BUDGETS.read_text())
    for words, kernel in compiled(target, calls):
        # A kernel for fp32 inputs that uses WGMMA multiplies quantised operands, hence the half-precision
        # budget.
        in_half = dtype in _HALF or kernel.wgmma > 0
        budget = budgets.get(budget_name(kernel), {}).get(f"sm_{target}") if in_half else _FP32_BUDGET
        yield words, kernel, problems(kernel, dtype, budget)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--target", type=int, nargs="*", default=[*SHARED_MEMORY], choices=SHARED_MEMORY)
    parser.add_argument("--dtype", nargs="*", default=[*DTYPES], choices=DTYPES)
    parser.add_argument("--quick", action="store_true", help="one case for each kernel")
    parser.add_argument("--odd", action="store_true", help="also sizes that take the same tiles as others")
    parser.add_argument("--write", action="store_true", help="take over spills and waits as budgets")
    parser.add_argument("--recorded", action="store_true", help="not those that passed as they are")
    options = parser.parse_args()
    recorded: dict[str, str] = json.loads(RECORD.read_text()) if options.recorded else {}
    with without(recorded) as fingerprints:
        wrong = _check(options)
    for own, name in fingerprints.items():
        if own in recorded:
            print(json.dumps({"name": name, "case": "as recorded", "problems": []}), flush=True)
    if options.write and options.quick and not wrong:
        RECORD.write_text(json.dumps(fingerprints, indent=1) + "\n")
    return int(wrong > 0)


def _check(options: argparse.Namespace) -> int:
    """Print every kernel, write budgets if requested, and return the number of kernels with problems."""
    budgets: dict[str, dict[str, dict[str, float]]] = json.loads(BUDGETS.read_text())
    wrong = 0
    for target in options.target:
        if options.write and not options.quick and "bf16" in options.dtype:
            for entries in budgets.values():
                entries.pop(f"sm_{target}", None)
        for dtype in options.dtype:
            calls = quick_cases(DTYPES[dtype]) if options.quick else all_cases(DTYPES[dtype], options.odd)
            for words, kernel, sentences in checked(target, dtype, calls):
                wrong += bool(sentences)
                print(
                    json.dumps({"dtype": dtype, "case": words, **asdict(kernel), "problems": sentences}),
                    flush=True,
                )
                if options.write and dtype in _HALF:
                    _raise_budget(budgets, f"sm_{target}", kernel)
    if options.write:
        BUDGETS.write_text(_text(budgets))
    return wrong


def _raise_budget(budgets: dict[str, Any], name: str, kernel: Kernel) -> None:
    """Raise a kernel's budget to this configuration's spills and waits; zeros need no entry."""
    waits = round(waits_per_product(kernel), 2)
    if kernel.spilled == 0 and waits == 0:
        return
    entry = budgets.setdefault(budget_name(kernel), {}).setdefault(name, {"spilled": 0, "waits": 0})
    entry["spilled"] = max(entry["spilled"], kernel.spilled)
    entry["waits"] = max(entry["waits"], waits)


def _text(budgets: dict[str, Any]) -> str:
    """Format budgets with one line per kernel and target, for small diffs."""
    kernels = []
    for name, entries in sorted(budgets.items()):
        if entries:
            lines = ",\n".join(
                f"    {json.dumps(key)}: {json.dumps(entries[key])}" for key in sorted(entries)
            )
            kernels.append(f"  {json.dumps(name)}: {{\n{lines}\n  }}")
    return "{\n" + ",\n".join(kernels) + "\n}\n"


if __name__ == "__main__":
    sys.exit(main())
