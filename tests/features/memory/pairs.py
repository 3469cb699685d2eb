"""All pairs of memory features: bit-identical to training without them, or refused with a reason.

``python -m tests.features.memory.pairs`` runs all pairs and writes the table of ``docs/design/memory.md``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import combinations
from pathlib import Path
from typing import Any

from tests.support.memory_events import EVENTS
from tests.support.pool import WorkerPool

DOCS = Path(__file__).parents[3] / "docs" / "design" / "memory.md"
BEGIN, END = "<!-- pairs:begin -->", "<!-- pairs:end -->"
SMALL = {"swap_attention_min_bytes": 0}  # the test model has no large tensors
FEATURES: dict[str, dict[str, Any]] = {
    "reuse-fp32-param": {"reuse_fp32_param": True},
    "recompute-activation-function": {"recompute_activation_function": True},
    "recompute-norm": {"recompute_norm": True},
    "swap-attention": {"swap_attention": True, **SMALL},
    "swap-optimizer": {"swap_optimizer": True},
    "virtual-optimizer": {"virtual_optimizer": ["all"]},
}
COMBINES = "combines"
CASE = "tests.features.memory.pairs:attempt"
Pair = tuple[str, str]


def pairs() -> list[Pair]:
    """Return all pairs in the order of :data:`FEATURES`."""
    return list(combinations(FEATURES, 2))


def attempt(switches: Mapping[str, Any]) -> dict[str, Any]:
    """Train ten steps in a worker, one of them skipped; return values to compare, or ``refused``."""
    from mindspeed_dsa import SettingsError
    from tests.support import memory_events
    from tests.support.optimizer_job import train

    with memory_events.counted() as counts:
        try:
            # On a CPU, RMSNorm is several operations, so its recomputed gradient would round differently.
            norm = {"normalization": "LayerNorm"}
            result = train(switches=switches, distributed=True, skip=5, clip=0.5, overrides=norm)
        except SettingsError as error:
            return {"refused": str(error)}
    return {**result, "counts": dict(counts)}


def outcome(pool: WorkerPool, pair: Pair, alone: Mapping[str, Any]) -> str:
    """Return :data:`COMBINES`, or the reason why the pair is refused.

    Args:
        pool: pool of workers.
        pair: two names of :data:`FEATURES`.
        alone: result of :func:`attempt` without features.

    Raises:
        AssertionError: the pair is neither refused nor bit-identical.
    """
    switches = {name: value for each in pair for name, value in FEATURES[each].items()}
    (result,) = pool.run(CASE, 1, switches=switches)
    if "refused" in result:
        return reason(result["refused"])
    for what in ("records", "weights", "masters", "moments"):
        assert result[what] == alone[what], f"{' with '.join(pair)}: {what} differ"
    # Both features must have run, and no other.
    for name, event in EVENTS.items():
        assert (event in result["counts"]) == (name in pair), f"{' with '.join(pair)}: {event}?"
        assert event not in alone["counts"]
    return COMBINES


def reason(error: str) -> str:
    """Return the sentence of a refusal without the common beginning."""
    # The first line is the common beginning.
    (line,) = [line.strip(" -") for line in error.splitlines()[1:]]
    return re.sub(r" \(switched on by API \(.*?\)\)", "", line)


def table(outcomes: Mapping[Pair, str]) -> str:
    """Return a Markdown table of the pairs, and the reasons of refusals."""
    names = list(FEATURES)
    reasons = list(dict.fromkeys(text for text in outcomes.values() if text != COMBINES))
    cells = {
        pair: "yes" if text == COMBINES else f"refused ({1 + reasons.index(text)})"
        for pair, text in outcomes.items()
    }

    def cell(row: str, column: str) -> str:
        return cells.get((row, column), "") if row != column else ""

    lines = ["| | " + " | ".join(names[1:]) + " |", "| --- |" + " --- |" * (len(names) - 1)]
    for row in names[:-1]:
        lines.append(f"| {row} | " + " | ".join(cell(row, column) for column in names[1:]) + " |")
    lines += ["", *(f"{number}. {text}" for number, text in enumerate(reasons, 1))]
    return "\n".join(lines)


def written() -> str:
    """Return the table in the documentation."""
    return DOCS.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0].strip()


def main() -> None:
    """Try all pairs and write the table."""
    with WorkerPool() as pool:
        outcomes = dict(results(pool))
    # The text around the table stays.
    before, _, rest = DOCS.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    DOCS.write_text(f"{before}{BEGIN}\n{table(outcomes)}\n{END}{after}", encoding="utf-8")


def results(pool: WorkerPool) -> Iterator[tuple[Pair, str]]:
    """Yield every pair and its outcome."""
    (alone,) = pool.run(CASE, 1, switches={})
    for pair in pairs():
        yield pair, outcome(pool, pair, alone)


if __name__ == "__main__":
    main()
