"""Balance of a sparse layer's work between context parallel ranks: counted, not measured."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.registry import Metrics
from mindspeed_dsa.context_parallel.layout import Layout, Zigzag, rows_of_all
from mindspeed_dsa.context_parallel.packs import BalancedBlocks, Pack

TOPK = 2048
BLOCK = 128
LENGTHS = {"16k": 16_384, "64k": 65_536}
RANKS = (2, 4, 8)
DOCUMENTS = {"mean 1k": 1024, "mean 8k": 8192, "mean 32k": 32_768}
"""Mean lengths of documents; lengths are lognormal with sigma 1."""
PACKS = 50


def run(link: str, quick: bool) -> Metrics:
    """Return the cell's entries; ``link`` is not used."""
    return {
        "work_imbalance": {
            name: {f"CP{ranks}": of_sequences(length, ranks) for ranks in RANKS}
            for name, length in LENGTHS.items()
        },
        "work_imbalance_packs": {
            name: {f"CP{ranks}": of_packs(mean, ranks, 2 if quick else PACKS) for ranks in RANKS}
            for name, mean in DOCUMENTS.items()
        },
    }


def of_sequences(length: int, ranks: int) -> dict[str, float]:
    """Return the imbalance of indexer pairs and selected pairs, for zigzag rows and zigzag blocks."""
    visible = torch.arange(1, length + 1)
    ratios = {}
    for name, layout in (("zigzag", Zigzag(ranks)), ("blocks", Zigzag(ranks, BLOCK))):
        rows = rows_of_all(layout, length)
        ratios[f"indexer {name}"] = imbalance(visible, rows)
        ratios[f"selected {name}"] = imbalance(visible.clamp_max(TOPK), rows)
    return ratios


def of_packs(mean: int, ranks: int, packs: int, length: int = LENGTHS["64k"]) -> dict[str, float]:
    """Return the mean imbalance over packs of random documents, and the worst imbalance of dealt rows."""
    samples: dict[str, list[float]] = {}
    zigzag = rows_of_all(Zigzag(ranks), length)
    for seed in range(packs):
        pack = pack_of(mean, length, seed)
        visible = (pack.ends - pack.starts).long()
        dealt_rows = rows_of_all(BalancedBlocks(ranks, pack, BLOCK), length)
        for name, rows in (("zigzag", zigzag), ("dealt", dealt_rows)):
            samples.setdefault(f"indexer {name}", []).append(imbalance(visible, rows))
            samples.setdefault(f"selected {name}", []).append(imbalance(visible.clamp_max(TOPK), rows))
    dealt = [*samples["indexer dealt"], *samples["selected dealt"]]
    return {**{name: statistics.fmean(values) for name, values in samples.items()}, "worst dealt": max(dealt)}


def pack_of(mean: int, length: int, seed: int) -> Pack:
    """Return a full pack of documents with lognormal lengths; the last document is cut."""
    draw = random.Random(seed)
    ends = [0]
    while ends[-1] < length:
        # The mean of a lognormal is exp(mu + 1/2) with a spread of one.
        size = max(1, round(mean * draw.lognormvariate(-0.5, 1.0)))
        ends.append(min(length, ends[-1] + size))
    return Pack.of_prefix_sums(ends, None, length)


def imbalance(work: Tensor, rows: Tensor) -> float:
    """Return the most loaded rank's work over the mean work.

    Args:
        work: work of every row, ``[length]``.
        rows: row indices of every rank, ``[ranks, length / ranks]`` int64.
    """
    shares = work[rows].sum(1).double()
    return float(shares.max() / shares.mean())


def draw(path: Path, ranks: int = 4, length: int = 2048, block: int = 32) -> None:
    """Draw rows by keys, coloured by the rank that computes the row.

    Args:
        path: PNG file to write.
        ranks: context parallel size.
        length: rows of the sequence, and of the pack.
        block: rows of a block, reduced like the length of the sequence.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.colors import ListedColormap

    pack = pack_of(length // 6, length, seed=3)
    whole = torch.zeros(length, dtype=torch.long), torch.arange(1, length + 1)
    packed = pack.starts.long(), pack.ends.long()
    panels: Sequence[tuple[str, Layout, tuple[Tensor, Tensor]]] = (
        ("sequence, Megatron's rows", Zigzag(ranks), whole),
        (f"sequence, --cp-block-rows {block}", Zigzag(ranks, block), whole),
        ("pack, Megatron's rows", Zigzag(ranks), packed),
        ("pack, rows dealt by work", BalancedBlocks(ranks, pack, block), packed),
    )
    colours = ListedColormap(["white", *("#4878a8", "#e08a3c", "#58a070", "#c05050")[:ranks]])
    figure, axes = pyplot.subplots(1, len(panels), figsize=(4 * len(panels), 5), layout="constrained")
    for axis, (name, layout, (starts, ends)) in zip(axes, panels, strict=True):
        owner = torch.empty(length, dtype=torch.long)
        of_ranks = rows_of_all(layout, length)
        for rank, rows in enumerate(of_ranks):
            owner[rows] = rank
        keys = torch.arange(length)
        seen = (keys >= starts[:, None]) & (keys < ends[:, None])
        image = torch.where(seen, owner[:, None] + 1, 0)[::4, ::4]
        axis.imshow(image.numpy(), cmap=colours, vmin=0, vmax=ranks, interpolation="nearest")
        most = imbalance(ends - starts, of_ranks)
        axis.set_title(f"{name}\nmost over mean of the index scores: {most:.3f}", fontsize=10)
        axis.set_xlabel("key")
        axis.set_xticks([])
        axis.set_yticks([])
    axes[0].set_ylabel("row")
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=colours(rank + 1)) for rank in range(ranks)]
    names = [f"rank {rank}" for rank in range(ranks)]
    figure.legend(handles, names, loc="outside lower center", ncol=ranks)
    figure.savefig(path, dpi=80)
    pyplot.close(figure)
