"""Features in CUDA graphs: which parts of a step each runs in, and where the library refuses a capture.

The library's own checks decide, in jobs in which each feature is on. ``python -m tests.combinations.graphs``
writes the tables in docs/design/gpu.md.
"""

from __future__ import annotations

import tempfile
from collections.abc import Set
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

from mindspeed_dsa import features
from mindspeed_dsa.megatron.graphs import (
    ATTENTION,
    EXPERTS,
    LAYER,
    MLP,
    OPTIMIZER,
    REST,
    ROUTER,
    STEP,
    captured,
)
from tests.combinations import pairs
from tests.ops.cuda_graph_cases import CASES

PAGE = Path(__file__).parents[2] / "docs" / "design" / "gpu.md"
BEGIN, END = "<!-- graphs:begin -->\n", "<!-- graphs:end -->"
ENGINE = {"cuda_graph_impl": "transformer_engine"}
GRAPHS: dict[str, dict[str, Any]] = {
    "`attn`": {**ENGINE, "cuda_graph_scope": ["attn"]},
    "`mlp`": {**ENGINE, "cuda_graph_scope": ["mlp"]},
    "`moe_router`": {**ENGINE, "cuda_graph_scope": ["moe_router"]},
    "`moe`": {**ENGINE, "cuda_graph_scope": ["moe"]},
    "layers": {"cuda_graph_impl": "local"},
    "iteration": {"cuda_graph_impl": "full_iteration"},
    "optimizer": {"optimizer_cuda_graph": True},
}
"""Arguments of Megatron by column of the table."""
ROWS: dict[str, tuple[str, str]] = {
    "dsa-warmup": ("--dsa-stage warmup", "fused"),
    "dsa-stage": ("--dsa-stage frozen", "fused"),
    "dsa-shared-selections": ("--dsa-indexer-topk-freq 2", "fused"),
    "dsa-recorded-selections": ("--dsa-record-selections FOLDER/selections", "fused"),
    "dsa-selection-search": ("--dsa-search-selections FOLDER/search", "fused"),
    "dsa-context-parallel": ("--cp-keep-gathered", "CP"),
    "dense-context-parallel": (f"{pairs._DENSE_MODEL} --cp-comm-type p2p", "CP"),
    "pack-documents": ("--pack-documents", "fused"),
    "pad-sequences": ("--seq-length 31 --use-fused-dsa", "TP"),
    "record-collectives": ("--record-collectives FOLDER/collectives", ""),
    "fused-adam": ("--fused-adam", ""),
    "gradient-accumulation-fusion": ("--gemm-gradient-accumulation-fusion", ""),
}
"""Flags and need, as in :data:`tests.combinations.pairs.ROWS`, of features without a row there."""
PLACES: dict[str, Set[str]] = {
    "accept-mindspeed-flags": set(),
    "ascend-coc": LAYER | {REST},
    "balanced-moe-experts": {EXPERTS},
    "compile-regions": {ATTENTION},
    "context-parallel": set(),
    "cp-block-rows": {ATTENTION, REST},
    "cp-shard-vocabulary": {REST},
    "dense-context-parallel": {ATTENTION},
    "dsa-absorb": {ATTENTION},
    "dsa-backport": {ATTENTION},
    "dsa-context-parallel": {ATTENTION},
    "dsa-expert-tp-grads": {REST},
    "dsa-kernel-backend": {ATTENTION},
    "dsa-model": set(),
    "dsa-recorded-selections": {ATTENTION},
    "dsa-repairs": {ATTENTION},
    "dsa-selection-search": {ATTENTION},
    "dsa-shared-selections": {ATTENTION},
    "dsa-stage": set(),
    "dsa-stage-checkpoints": set(),
    "dsa-warmup": LAYER,
    "dualpipev": {REST},
    "flash-attention": {ATTENTION},
    "fsdp2": STEP,
    "fused-adam": {OPTIMIZER},
    "fused-dsa": {ATTENTION},
    "fused-linear-cross-entropy": {REST},
    "fused-rmsnorm": LAYER | {REST},
    "fused-rotary-pos-emb": {ATTENTION},
    "fused-swiglu": {MLP, ROUTER, EXPERTS},
    "gradient-accumulation-fusion": LAYER | {REST},
    "init-norm-weight-in-fp32": set(),
    "initial-weights": set(),
    "latent-yarn": set(),
    "load-hf": set(),
    "local-modules": {OPTIMIZER},
    "mask-arithmetic": {REST},
    "mla-sp-tp-sp": {ATTENTION},
    "moe-alltoall-overlap-comm": {EXPERTS},
    "moe-batch-overlap": LAYER,
    "moe-expert-placement": set(),
    "moe-fb-overlap": STEP,
    "moe-grouped-gemm": {EXPERTS},
    "moe-permute-fusion": {EXPERTS},
    "moe-router-load-report": {ROUTER},
    "moe-tp-extend-ep": set(),
    "mtp-recompute": {REST},
    "pack-documents": STEP,
    "pad-sequences": {ATTENTION, ROUTER, REST},
    "record-collectives": STEP,
    "recompute-activation-function": {MLP, ROUTER, EXPERTS},
    "recompute-ahead": {REST},
    "recompute-norm": LAYER,
    "recompute-outputs": LAYER,
    "recompute-outputs-learning": LAYER,
    "reuse-fp32-param": {OPTIMIZER},
    "save-hf": set(),
    "schedule-trace": {REST},
    "sft-prompts": set(),
    "split-backward": STEP,
    "split-backward-outputs": LAYER,
    "step-metrics": set(),
    "swap-attention": LAYER,
    "swap-attention-outputs": LAYER,
    "swap-optimizer": {OPTIMIZER, REST},
    "two-streams": LAYER,
    "virtual-optimizer": {OPTIMIZER},
    "whole-checkpoints": set(),
}
"""Parts of a step, between its first and its last kernel, in which a feature's code runs."""
CAPTURED: dict[str, Set[str]] = {
    "dsa-kernel-backend": {"layers", "iteration"},
    "fused-rmsnorm": {"iteration"},
    "fused-rotary-pos-emb": {"iteration"},
    "fused-swiglu": {"iteration"},
    "gradient-accumulation-fusion": {"iteration"},
}
"""Columns in which tests/matrix/test_cuda_graphs.py captures jobs with the feature."""
WITHOUT_GRAPHS = ("ascend-mc2", "cpu-platform", "npu-platform")
"""Features of devices that have no CUDA graphs."""


@cache
def _session(row: str, need: str) -> tuple[Any, Any]:
    with mock.patch.dict(pairs.ROWS, {row: need}):
        job = pairs.Job((row,))
        args, session = job._resolved([word.replace("FOLDER", tempfile.gettempdir()) for word in job.argv()])
    session.rewrite(args)
    return args, session


@cache
def row_of(feature: str) -> tuple[str, str] | None:
    """Return flags and need of a job in which the feature is on; None if no row has it."""
    if feature in ROWS:
        return ROWS[feature]
    # The fewest flags first, as other features of a row refuse graphs too.
    for row, need in sorted({"": "", **pairs.ROWS}.items(), key=lambda item: len(item[0].split())):
        if feature in {one.name for one in _session(row, need)[1].features}:
            return row, need
    return None


@cache
def refusals(feature: str) -> dict[str, str]:
    """Return the reasons why a job with the feature refuses graphs, by column."""
    row = row_of(feature)
    if row is None:
        return {}
    args, session = _session(*row)

    def problems() -> list[str]:
        return [problem for one in session.features for problem in one.problems(args)]

    without, reasons = problems(), {}
    for column, values in GRAPHS.items():
        with mock.patch.multiple(args, create=True, **values):
            found = [problem for problem in problems() if problem not in without]
        if found:
            reasons[column] = found[0].partition(": ")[2].rpartition("; ")[0]
    return reasons


def cells(feature: str) -> list[str]:
    """Return the feature's cells of the table, by column."""
    refused = refusals(feature)

    def cell(column: str) -> str:
        if column in refused:
            return "refused"
        parts = captured(mock.Mock(spec_set=tuple(GRAPHS[column]), **GRAPHS[column]))
        if not parts & PLACES[feature]:
            return ""
        return "captured" if column in CAPTURED.get(feature, ()) else "inside"

    return [cell(column) for column in GRAPHS]


def operators() -> str:
    """Return the table of operators."""
    lines = ["| Operator | Backend | A capture |", "| --- | --- | --- |"]
    for name, case in CASES.items():
        for why in dict.fromkeys(map(case.refused.get, case.backends)):
            backends = ", ".join(one for one in case.backends if case.refused.get(one) == why)
            lines.append(f"| {name} | {backends} | {'works' if why is None else f'fails: {why}'} |")
    return "\n".join(lines) + "\n"


def table() -> str:
    """Return the table of features."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for feature in sorted(one.name for one in features.built_in() if one.name not in WITHOUT_GRAPHS):
        row = tuple(cells(feature))
        why = "; ".join(dict.fromkeys(refusals(feature).values()))
        rows.setdefault((*row, why), []).append(feature)
    head = ["Feature", *GRAPHS, "Reason"]
    lines = [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    for row, names in rows.items():
        lines.append(f"| {', '.join(f'`{name}`' for name in names)} | {' | '.join(row)} |")
    return "\n".join(lines) + "\n"


def page() -> str:
    """Return the page of the documentation with both tables."""
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{operators()}\n{table()}{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
