"""Figures of the five articles that this library follows, derived by the planner, and their page.

Arithmetic on numbers that an article prints itself is left out: it proves nothing about this library.

Articles: 0 pre-training DeepSeek-V3.2 at 32k with TorchTitan on Ascend, 1 inference of DeepSeek-V3.2-Exp on
Ascend, 2 grouped matmul with NZ weights in Qwen3-235B, 3 MindSpeed at QCon 2025, 4 prefill of DeepSeek-R1 on
Atlas A3.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mindspeed_dsa.tools.planner import arguments, configs, flags, schedules, sizes, work
from mindspeed_dsa.tools.planner.job import Model

PAGE = Path(__file__).parents[3] / "docs" / "design" / "articles.md"
GB, MIB, KIB = 1e9, 2**20, 2**10
LONG = 65536


@dataclass(frozen=True)
class Figure:
    """One figure.

    Attributes:
        article: article's number.
        name: name of the figure.
        stated: article's number.
        formula: formula in words or numbers.
        compute: function that computes it with the planner.
        tolerance: relative rounding of the article.
        note: reason if the article's number does not follow from its inputs, or depends on unstated ones.
    """

    article: int
    name: str
    stated: float
    unit: str
    formula: str
    compute: Callable[[], float]
    tolerance: float = 0.01
    note: str = ""

    @property
    def reproduced(self) -> bool:
        """Return whether the formula gives the article's number, within the article's rounding."""
        return abs(self.compute() - self.stated) <= self.tolerance * self.stated


def deepseek(**changes: object) -> Model:
    """Build DeepSeek-V3.2 without multi-token prediction, with a trained indexer."""
    path = Path("deepseek-v3.2")
    options, given_flags, _ = flags.read(["--num-layers", "61"])
    configs.apply(path, options, {"num_layers"} & given_flags)
    options.mtp_num_layers, options.dsa_indexer_loss_coeff = None, 0.01
    for name, value in changes.items():
        setattr(options, name, value)
    return arguments.model_of(options)


def parameters(part: str = "", without: tuple[str, ...] = ()) -> float:
    """Count the parameters of DeepSeek-V3.2: of one part, or of all parts except some."""
    by_part = sizes.by_part(sizes.model_weights(deepseek()))
    return by_part[part] if part else sum(n for name, n in by_part.items() if name not in without)


def uncut() -> float:
    """Count parameters that every tensor parallel rank has: down projections, indexer, router; no norms."""
    weights = sizes.model_weights(deepseek())
    return sum(w.numbers for w in weights if w.cut == "whole" and w.part != "norms")


def even_tokens(model: Model | None = None) -> float:
    """Return the length at which absorbed DSA with its indexer costs as much as dense naive attention."""
    model = model or deepseek()
    low, high = float(model.topk), 1e6
    while high - low > 0.5:
        middle = (low + high) / 2
        low, high = (middle, high) if _dense(model, middle) < _sparse(model, middle) else (low, middle)
    return low


def _dense(model: Model, length: float) -> float:
    return work.pair_flops(model, absorbed=False)[0] * length**2 / 2


def _sparse(model: Model, length: float) -> float:
    chosen = model.topk * length - model.topk**2 / 2
    index = 2.0 * model.index_heads * model.index_dim * length**2 / 2
    return work.pair_flops(model, absorbed=True)[0] * chosen + index


def exchange_over_reduce_scatter(ranks: int) -> float:
    """Return the ratio of bytes of SP-TP-SP's all-to-all to the reduce-scatter that it replaces."""
    model = deepseek()
    return model.heads * model.value / ranks / model.hidden


def _latent_width() -> int:
    """Return the width of a key that all heads share: latent and rotary."""
    model = deepseek()
    return model.kv_lora + model.rope


def _naive_width() -> int:
    """Return the width of one head's key and value."""
    model = deepseek()
    return model.nope + model.rope + model.value


def _latent_heads() -> int:
    """Return the numbers of one token's query in absorbed form."""
    return deepseek().heads * _latent_width()


def _index_heads() -> int:
    """Return the numbers of one token's query in the indexer."""
    model = deepseek()
    return model.index_heads * model.index_dim


def _first_smaller() -> float:
    return next(float(t) for t in range(2, 64) if exchange_over_reduce_scatter(t) < 1)


def _mtp(kind: str, column: str, tokens: int) -> float:
    """Return a number of the multi-token prediction table: MiB, GFLOP, MiB; batch 2, two bytes per number."""
    model, batch, number = deepseek(), 2, 2
    latent = _latent_width()
    keys = {"MLA": LONG, "SFA": model.topk, "LI": LONG}[kind]
    width = model.index_dim if kind == "LI" else latent
    heads = model.index_heads if kind == "LI" else model.heads
    moved = batch * keys * width * number
    if column == "keys":
        return moved * (tokens if kind == "SFA" else 1) / MIB
    if column == "flops":
        return 2.0 * batch * tokens * heads * width * keys / 1e9
    return batch * tokens * heads * keys * number / MIB


def _mtp_figures() -> list[Figure]:
    stated = {
        ("MLA", 1): (144, 19.33, 32),
        ("MLA", 2): (144, 38.65, 64),
        ("SFA", 1): (4.5, 0.60, 1),
        ("SFA", 2): (9, 1.21, 2),
        ("LI", 1): (32, 2.15, 16),
        ("LI", 2): (32, 4.29, 32),
    }
    words = {"keys": "keys moved", "flops": "work of Q K^T", "scores": "scores moved"}
    formulas = {
        "keys": "batch x keys x width x 2 bytes",
        "flops": "2 x batch x tokens x heads x width x keys",
        "scores": "batch x tokens x heads x keys x 2 bytes",
    }
    note = "the title says 4 sequences, the numbers match 2; MB are MiB"
    return [
        Figure(
            1,
            f"MTP table, {kind}, {'one token' if tokens == 1 else 'two tokens'}: {words[column]}",
            value,
            "GFLOP" if column == "flops" else "MiB",
            formulas[column],
            lambda kind=kind, column=column, tokens=tokens: _mtp(kind, column, tokens),  # type: ignore[misc]
            note=note,
        )
        for (kind, tokens), row in stated.items()
        for column, value in zip(words, row, strict=True)
    ]


# fmt: off
FIGURES = (
    Figure(0, "routed experts", 654, "B", "58 layers x 256 experts x 3 x 7168 x 2048",
           lambda: parameters("routed experts") / 1e9, 0.001,
           "653.9 routed; with the shared experts it would be 656.5"),
    Figure(0, "other weights and gradients a rank, PP2 TP4", 17.97, "GB",
           "(17.118 B + 0.8515 B of indexers) / (2 x 4) x 8 bytes",
           lambda: parameters(without=("routed experts",)) / GB, 0.001,
           "18 in the article, as (671 - 654) B / (2 x 4) x 8 bytes, which is 17: with indexers it follows"),
    Figure(0, "the same, q_a, kv_a, indexer and router copied", 23.6, "GB",
           "cut / (2 x 4) x 8 + copied / 2 x 8 bytes",
           lambda: (parameters(without=("routed experts",)) - uncut()) / GB + uncut() * 4 / GB, 0.002,
           "the article: more than 18"),
    Figure(0, "routed experts a rank, EP64 PP2", 40.9, "GB", "653.9 B / (64 x 2) x 8 bytes",
           lambda: parameters("routed experts") / 128 * 8 / GB, 0.002,
           "not printed; what the chosen layout leaves of a 64 GB die"),
    Figure(0, "L1: query", 144, "KB", "128 x 576 x 2 bytes", lambda: _latent_heads() * 2 / KIB),
    Figure(0, "L1: index query", 32, "KB", "2 x 64 x 128 x 2 bytes", lambda: 2 * _index_heads() * 2 / KIB),
    Figure(0, "L1: gathered keys", 64, "KB", "2 x 128 x 128 x 2 bytes",
           lambda: 2 * 128 * deepseek().index_dim * 2 / KIB),
    Figure(0, "L1: gradient of ReLU", 288, "KB", "64 x 2048 x 2 bytes",
           lambda: deepseek().index_heads * deepseek().topk * 2 / KIB,
           note="its own product is 256; with 256 the four buffers take 496 of 512 KB"),
    Figure(1, "indexers' weights", 0.85, "B", "61 x (1536 x 64 x 128 + 7168 x 128 + 7168 x 64)",
           lambda: parameters("indexer") / 1e9),
    Figure(1, "cache of index keys, 4 x 64k", 4, "GB", "4 x 65536 x 128 x 2 bytes x 61",
           lambda: 4 * LONG * deepseek().index_dim * 2 * 61 / GB, 0.03, "4.09"),
    Figure(1, "absorbed over naive work", 3, "times", "(576 + 512) / (192 + 128)",
           lambda: work.pair_flops(deepseek(), True)[0] / work.pair_flops(deepseek(), False)[0], 0.14,
           "3.4; the article says about 3"),
    Figure(1, "dense over sparse work, 64k", 32, "times", "65536 / 2048", lambda: LONG / deepseek().topk),
    Figure(1, "naive sparse over dense traffic of keys", 2048, "times",
           "each query gathers topk keys for itself", lambda: LONG * deepseek().topk / LONG),
    Figure(1, "traffic, naive over absorbed", 71, "times", "128 x (192 + 128) / 576",
           lambda: deepseek().heads * _naive_width() / _latent_width(),
           note="tens of times, the article says"),
    Figure(1, "length from which DSA takes less work", 16320, "tokens",
           "128 x 320 x S^2 = 2 x 128 x 1088 x (K S - K^2/2) + 64 x 128 x S^2", even_tokens, 0.001,
           "the article prints a range: 16k to 166k gain"),
    *_mtp_figures(),
    Figure(3, "warmups, 4 stages with 2 chunks", 4, "forwards",
           "(4 - 3 - 1) x 2 + (2 - 1) x 4, on the last rank",
           lambda: float(schedules.warmups(4, 3, 2, 8, 4, False)),
           note="the article says as many as devices; the first rank has 10"),
    Figure(3, "with one more", 5, "forwards", "the same + 1",
           lambda: float(schedules.warmups(4, 3, 2, 8, 4, True))),
    Figure(4, "ranks from which the all-to-all moves less", 3, "ranks",
           "S/t x 16384 x 2 x (t-1)/t against S x 7168 x 2 x (t-1)/t", _first_smaller,
           note="the article says smaller; on two ranks it is 1.14 times as large"),
    Figure(4, "NZ columns of [16384, 7168] int8", 224, "blocks", "7168 / 32", lambda: deepseek().hidden / 32),
)
# fmt: on
NEEDS_HARDWARE = (
    (0, "29 tokens/s a card, 32k, 64 A3 cards"),
    (0, "58.32 to 50.54 G and 155 to 400 tokens/s with 8 layers, 54.58 to 38.71 G and 402 to 568 with 4"),
    (0, "RMSNorm 138.7 to 39.9 us, permutation 803.9 to 127.3 us, grouped matmul 3.1 to 2.4 ms"),
    (0, "5.16 % of a step by fused operators, 5.1 % of a layer by compilation, dispatch 409.5 to 118.8 us"),
    (1, "128k prefill below 2 s, 30 ms a token; 70 % of the peak in MLA with one predicted token"),
    (2, "slice and cast of one layer 4.2 to 2.8 ms"),
    (3, "7 to 8 % by overlapped tensor parallelism, 7 % by hot experts' weights, 1 % cost of mapped moments"),
    (4, "latencies of 3128 and 2512 ms, 30 % of them communication; 15 % by the NTD layout"),
)
MEASURED_HERE = (
    (0, "memory grows with sequence x topk", "[DSA](benchmarks.md#dsa)"),
    (0, "moments and master weights on the host", "[memory](benchmarks.md#memory)"),
    (
        0,
        "keys gathered over context parallel ranks",
        "[context parallelism](benchmarks.md#context-parallel)",
    ),
    (3, "tensor parallel overlap", "[TP overlap](benchmarks.md#tp-overlap)"),
    (3, "dispatch and combine behind shared experts; hot experts", "[MoE](benchmarks.md#moe)"),
    (3, "one warmup more, pairs", "[pipelines](benchmarks.md#pipeline)"),
    (4, "halves of a microbatch", "[pipelines](benchmarks.md#pipeline)"),
)


def table() -> str:
    """Return the tables of the page, in Markdown."""
    lines = ["| Article | Figure | Stated | Formula | Gives | |", "| --- | --- | --- | --- | --- | --- |"]
    for figure in FIGURES:
        text = figure.note if figure.reproduced else f"**does not follow**; {figure.note}"
        cells = (figure.article, figure.name, f"{_number(figure.stated)} {figure.unit}", figure.formula)
        lines.append(f"| {' | '.join(map(str, (*cells, _number(figure.compute()), text)))} |")
    lines += ["", "| Article | Measured here | Where |", "| --- | --- | --- |"]
    lines += [f"| {article} | {name} | {where} |" for article, name, where in MEASURED_HERE]
    lines += ["", "| Article | Needs its hardware |", "| --- | --- |"]
    return "\n".join([*lines, *(f"| {article} | {name} |" for article, name in NEEDS_HARDWARE)])


def _number(value: float) -> str:
    if value == int(value):
        return f"{int(value):,}"
    return f"{value:,.{max(0, 3 - math.floor(math.log10(abs(value))))}f}"


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(text[: text.index("| Article | Figure |")] + table() + "\n", encoding="utf-8")
