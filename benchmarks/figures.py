"""``python -m benchmarks.figures``: fills pages with figures from ``benchmarks/results``.

Tables go between ``<!-- figures:begin -->`` and ``<!-- figures:end -->``. A figure in a sentence follows a
marker, which names the file, the keys of its metrics, and a format with an optional factor::

    <!-- figure pipeline/milliseconds/stock .1f*0.001 -->12.9<!-- end --> s

``make docs`` rewrites both.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FIGURE = re.compile(r"<!-- figure ([^>]+?) (\.\d[a-z])(?:\*([\d.]+))? -->.*?<!-- end -->")
BEGIN, END = "<!-- figures:begin -->\n", "<!-- figures:end -->"
GLM = "GLM-5.2, 64 heads, 4096 tokens"
SMALL, LARGE = "DeepSeek-V3.2, 64 heads, 4096 tokens", "DeepSeek-V3.2, 128 heads, 8192 tokens"
_ENGLISH = {
    "heading": "| a training step | stock Megatron | with `--use-fused-dsa` | where it ran |",
    GLM: "one layer of GLM-5.2's sizes, 64 heads, 4096 tokens, bf16",
    SMALL: "one layer of DeepSeek-V3.2's sizes, 64 heads, 4096 tokens, bf16",
    LARGE: "the same with 128 heads, 8192 tokens",
    "cpu": "a layer's sparse attention, indexer and loss, forward and backward, 4096 tokens, fp32",
    "none": "does not fit",
    "h100": "one H100",
    "cores": "two CPU cores",
    "curves": "| stage | step | indexer loss over its coefficient | gradient norm |",
}
_CHINESE = {
    "heading": "| 一个训练步 | 原生 Megatron | 加上 `--use-fused-dsa` | 实测环境 |",
    GLM: "GLM-5.2 尺寸的一层，64 头、4096 token、bf16",
    SMALL: "DeepSeek-V3.2 尺寸的一层，64 头、4096 token、bf16",
    LARGE: "同一层，128 头、8192 token",
    "cpu": "一层的稀疏注意力、indexer 和 loss，前向加反向，4096 token、fp32",
    "none": "显存放不下",
    "h100": "单张 H100",
    "cores": "两个 CPU 核",
    "curves": "| 阶段 | 步 | indexer loss 除以系数 | 梯度范数 |",
}
_EXAMPLES = ("example, fp32", "example, bf16")
_STAGES = {"warmup": (1, 5, 10, 20, 40, 80, 120), "sparse": (1, 10, 40)}
SHARED_LAYERS = ("heldout_loss", "above_full", "recall", "attention", "equal_keys")
"""Figures of the models whose layers share, in the order of the table."""
_MEMORY_FLAGS = (
    "swap-attention",
    "recompute-norm",
    "recompute-activation-function",
    "virtual-optimizer",
    "swap-optimizer",
    "reuse-fp32-param",
)


@functools.cache
def metrics(name: str) -> dict[str, Any]:
    """Return the metrics of ``benchmarks/results/NAME.json``."""
    found: dict[str, Any] = json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())["metrics"]
    return found


def step(side: Mapping[str, Any] | str, none: str) -> str:
    """Format milliseconds and GiB of a training step; ``none`` if it ran out of memory."""
    if isinstance(side, str):
        return none
    mib = side["peak_mib"]
    return f"{side['step_ms']:.3g} ms, " + (f"{mib / 1024:.1f} GiB" if mib >= 1024 else f"{mib:.0f} MiB")


def front(words: Mapping[str, str], docs: str) -> str:
    """Return README's table: steps on an H100, and one row for a CPU.

    Args:
        words: texts in the page's language.
        docs: path from the page to ``docs/``.
    """
    layers, cpu = metrics("gpu-h100")["layer"], metrics("dsa-cpu")
    lines = [words["heading"], "| --- | ---: | ---: | --- |"]
    for name in (GLM, SMALL, LARGE):
        stock, fused = (step(layers[name][side], words["none"]) for side in ("stock", "fused"))
        where = f"[{words['h100']}]({docs}design/gpu.md#measured-on-one-h100)"
        lines.append(f"| {words[name]} | {stock} | **{fused}** | {where} |")
    seconds, mib = cpu["seconds"], cpu["extra_peak_mib"]
    stock, fused = (f"{seconds[side]:.3g} s, {mib[side]:,.0f} MiB" for side in ("megatron", "fused"))
    where = f"[{words['cores']}]({docs}design/benchmarks.md#dsa)"
    lines.append(f"| {words['cpu']} | {stock} | **{fused}** | {where} |")
    return "\n".join(lines) + "\n"


def training_steps() -> str:
    """Return the table of ``docs/design/gpu.md``: steps with and without fused DSA."""
    lines = ["| training step | stock | fused DSA | losses apart |", "| --- | ---: | ---: | ---: |"]
    layers = metrics("gpu-h100")["layer"]
    for name in (GLM, SMALL, LARGE, *_EXAMPLES):
        layer, words = layers[name], _ENGLISH.get(name, f"{name}, the example's model")
        stock, fused = (step(layer[side], "does not fit") for side in ("stock", "fused"))
        apart = f"{layer['apart']['lm_loss']:.1e}" if "apart" in layer else "-"
        lines.append(f"| {words} | {stock} | **{fused}** | {apart} |")
    return "\n".join(lines) + "\n"


def memory_flags() -> str:
    """Return the table of ``docs/design/memory.md``: six flags in a small model on an H100."""
    lines = ["| One H100, small model in bf16 | peak, MiB | at rest, MiB | time of a step |"]
    lines.append("| --- | ---: | ---: | ---: |")
    for name in _MEMORY_FLAGS:
        feature = metrics("gpu-h100")["features"][name]
        peak, rest = (
            f"{feature[each]['off']:.0f} to {feature[each]['on']:.0f}" for each in ("peak_mib", "rest_mib")
        )
        lines.append(f"| `--{name}` | {peak} | {rest} | {feature['step_ratio']:.2f} |")
    return "\n".join(lines) + "\n"


def curves(words: Mapping[str, str]) -> str:
    """Return the table of ``curves.md`` in a language: a warm-up of the example's model."""
    lines = [words["curves"], "| --- | ---: | ---: | ---: |"]
    for stage, numbers in _STAGES.items():
        curve = metrics("curves-cpu")[stage]
        for number in numbers:
            loss = curve["indexer_loss"][number - 1] / curve["coefficient"]
            lines.append(f"| {stage} | {number} | {loss:.2g} | {curve['grad_norm'][number - 1]:.2g} |")
    return "\n".join(lines) + "\n"


def reach() -> str:
    """Return the table of ``balanced-moe-experts.md``: experts that pay on simulated clusters."""
    clusters = metrics("moe-reach")["reach"]
    names = {"h100": "nodes of 8", "a3": "super node"}
    imbalances = list(clusters["h100"]["EP16"])
    heads = [f"{names[cluster]}, {imbalance}" for cluster in names for imbalance in imbalances]
    lines = [f"| ranks | {' | '.join(heads)} |", "| --- |" + " --- |" * len(heads)]
    for ranks in clusters["h100"]:
        cells = [clusters[cluster][ranks][imbalance] for cluster in names for imbalance in imbalances]
        texts = [f"{cell['moved']}: {cell['speedup']:.2f}" if cell["moved"] else "none" for cell in cells]
        lines.append(f"| {ranks} | {' | '.join(texts)} |")
    return "\n".join(lines) + "\n"


def shared_layers() -> str:
    """Return the table of ``dsa-shared-selections.md``: mean and spread over the seeds, by model."""
    lines = [
        "| model | held-out loss | above the first row | recall | attention on the keys | equal keys |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, model in metrics("selections-layers-cpu")["shared_layers"].items():
        figures = (model[figure] for figure in SHARED_LAYERS)
        cells = (f"{figure['mean']:.3f} ± {figure['spread']:.3f}" for figure in figures)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def families() -> str:
    """Return the table of ``docs/hosts/transformers.md``: steps of a narrow layer of each family."""
    found = metrics("transformers-families-cpu")
    lines = ["| `model_type` | tokens | `eager` | `sdpa` | `apply_dsa(model)` | and the indexer's loss |"]
    lines.append("| --- | ---: | ---: | ---: | ---: | ---: |")

    def cell(figures: Mapping[str, float] | str) -> str:
        if isinstance(figures, str):
            return figures
        return f"{figures['cpu_seconds']:.1f} s, {figures['extra_mib'] / 1024:.1f} GiB"

    for family in found["widths"]:
        losses = found[family]["step with the indexer's loss"]
        for length, ways in found[family]["step"].items():
            ours, theirs = cell(ways["mindspeed_dsa"]), (cell(ways.get(x, "none")) for x in ("eager", "sdpa"))
            with_loss = cell(losses[length]["mindspeed_dsa"])
            cells = f"`{family}`", f"{int(length):,}", *theirs, f"**{ours}**", with_loss
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


TABLES: dict[str, Callable[[], str]] = {
    "README.md": lambda: front(_ENGLISH, "docs/"),
    "docs/zh/README.md": lambda: front(_CHINESE, "../"),
    "docs/features/balanced-moe-experts.md": reach,
    "docs/design/memory.md": memory_flags,
    "docs/design/gpu.md": training_steps,
    "docs/curves.md": lambda: curves(_ENGLISH),
    "docs/zh/curves.md": lambda: curves(_CHINESE),
    "docs/features/dsa-shared-selections.md": shared_layers,
    "docs/hosts/transformers.md": families,
}
"""Builder of each page's table."""


def filled(text: str, table: str, begin: str = BEGIN, end: str = END) -> str:
    """Return the page with the part between two markers replaced, by default its table.

    Raises:
        ValueError: the page lacks a marker.
    """
    before, _, rest = text.partition(begin)
    _, closing, after = rest.partition(end)
    if not closing:
        raise ValueError(f"the page lacks {begin.strip()} or {end}")
    return f"{before}{begin}{table}{end}{after}"


def placed(text: str) -> str:
    """Return the page with the figures in its sentences replaced.

    Raises:
        KeyError: the results lack a figure.
    """

    def figure(found: re.Match[str]) -> str:
        name, *keys = found[1].split("/")
        value: Any = metrics(name)
        for key in keys:
            value = value[key]
        shown = format(value * float(found[3] or 1), found[2]).replace("e-0", "e-")
        return f"{found[0].partition('>')[0]}>{shown}<!-- end -->"

    return FIGURE.sub(figure, text)


def pages() -> Iterator[Path]:
    """Yield the pages whose sentences may have figures."""
    yield ROOT / "README.md"
    yield from sorted((ROOT / "docs").rglob("*.md"))


def write() -> None:
    """Write all tables and figures."""
    for name, table in TABLES.items():
        page = ROOT / name
        page.write_text(filled(page.read_text(encoding="utf-8"), table()), encoding="utf-8")
    for page in pages():
        before = page.read_text(encoding="utf-8")
        if (after := placed(before)) != before:
            page.write_text(after, encoding="utf-8")


if __name__ == "__main__":
    write()
