"""How evenly context parallel ranks share the work of a sparse layer: counted, not measured."""

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
"""Documents' mean lengths; lognormal with a spread of one."""
PACKS = 50


def run(link: str, quick: bool) -> Metrics:
    """The cell's entries; ``link`` is not used."""
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
    """Most over mean of indexer pairs and of selected pairs, in Megatron's rows and in blocks."""
    visible = torch.arange(1, length + 1)
    found = {}
    for name, layout in (("zigzag", Zigzag(ranks)), ("blocks", Zigzag(ranks, BLOCK))):
        rows = rows_of_all(layout, length)
        found[f"indexer {name}"] = imbalance(visible, rows)
        found[f"selected {name}"] = imbalance(visible.clamp_max(TOPK), rows)
    return found


def of_packs(mean: int, ranks: int, packs: int, length: int = LENGTHS["64k"]) -> dict[str, float]:
    """The same of packs with documents of random lengths: means, and the worst one of the dealt rows."""
    found: dict[str, list[float]] = {}
    zigzag = rows_of_all(Zigzag(ranks), length)
    for seed in range(packs):
        pack = pack_of(mean, length, seed)
        visible = (pack.ends - pack.starts).long()
        dealt_rows = rows_of_all(BalancedBlocks(ranks, pack, BLOCK), length)
        for name, rows in (("zigzag", zigzag), ("dealt", dealt_rows)):
            found.setdefault(f"indexer {name}", []).append(imbalance(visible, rows))
            found.setdefault(f"selected {name}", []).append(imbalance(visible.clamp_max(TOPK), rows))
    dealt = [*found["indexer dealt"], *found["selected dealt"]]
    return {**{name: statistics.fmean(values) for name, values in found.items()}, "worst dealt": max(dealt)}


def pack_of(mean: int, length: int, seed: int) -> Pack:
    """Documents of lognormal lengths until the pack is full; the last one is cut."""
    draw = random.Random(seed)
    ends = [0]
    while ends[-1] < length:
        # The mean of a lognormal is exp(mu + 1/2) with a spread of one.
        size = max(1, round(mean * draw.lognormvariate(-0.5, 1.0)))
        ends.append(min(length, ends[-1] + size))
    return Pack.of_prefix_sums(ends, None, length)


def imbalance(work: Tensor, rows: Tensor) -> float:
    """The most loaded rank's work over the mean.

    Args:
        work: ``[length]``, of each row.
        rows: ``[ranks, length / ranks]`` int64, of each rank.
    """
    shares = work[rows].sum(1).double()
    return float(shares.max() / shares.mean())


def draw(path: Path, ranks: int = 4, length: int = 2048, block: int = 32) -> None:
    """Write an image of who computes what: rows by keys, each row in its rank's colour.

    Args:
        path: of the PNG.
        ranks: context parallel size.
        length: rows of the sequence, and of the pack.
        block: rows of a block, as much smaller than usual as the sequence is.
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
