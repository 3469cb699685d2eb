"""What runs inside the pool's workers: packed documents, and the same documents one by one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from tests.features.attention.cp_cases import logged_indexer_loss
from tests.support import model as job

LENGTHS = (5, 17, 1, 40, 9)
PADDING = 8


def tokens_of(lengths: Sequence[int], padding: int = 0, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Tokens and labels, ``[1, rows]``."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randint(0, job.VOCABULARY, (1, sum(lengths) + padding), generator=generator) for _ in range(2)
    )


def prefix_sums(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def described(lengths: Sequence[int], rows: int) -> Any:
    """Megatron's description with the given lengths, empty documents included."""
    from megatron.core.packed_seq_params import PackedSeqParams

    sums = prefix_sums(lengths)
    places = None
    if rows > sums[-1]:
        places = torch.cat([sums[:-1], torch.tensor([rows])]).int()
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=sums,
        cu_seqlens_kv=sums,
        cu_seqlens_q_padded=places,
        cu_seqlens_kv_padded=places,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
    )


def one_pass(
    packed: bool,
    lengths: Sequence[int] = LENGTHS,
    padding: int = PADDING,
    switches: Mapping[str, Any] | None = None,
    overrides: Mapping[str, Any] | None = None,
    builder: str = "tests.support.model",
    mtp: bool = False,
) -> dict[str, Any]:
    """Loss, gradients and logged indexer loss of documents, in one pack or one by one."""
    from importlib import import_module

    job.start({"use_fused_dsa": True, **(switches or {})})
    build, rows, count = import_module(builder), sum(lengths) + padding, sum(lengths)
    tokens, labels = tokens_of(lengths, padding)
    cfg = build.config(**(overrides or {}))
    with mock.patch.object(job, "SEQUENCE", rows):
        model = build.gpt_model(cfg, **({"mtp": True} if mtp else {}))
    logged, losses = 0.0, []
    parts = [(slice(0, rows), count)] if packed else []
    if not packed:
        ends = prefix_sums(lengths).tolist()
        parts = [(slice(a, b), b - a) for a, b in zip(ends[:-1], ends[1:], strict=True) if b > a]
    for part, counted in parts:
        own = torch.arange(part.stop - part.start)[None]
        scale_indexer_loss(counted / count)
        inputs = tokens[:, part], own, None
        given = {"packed_seq_params": described(lengths, rows)} if packed else {}
        out = model(*inputs, labels=labels[:, part], **given)[0, :counted]
        losses.append(out.detach())
        (out.sum() / count).backward()
        logged += logged_loss() * counted / count
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"losses": torch.cat(losses), "gradients": gradients, "indexer loss": logged}


def logged_loss() -> float:
    try:
        return logged_indexer_loss(1)
    except KeyError:  # nothing was logged
        return 0.0


def scale_indexer_loss(factor: float) -> None:
    from mindspeed_dsa.context import Megatron
    from mindspeed_dsa.features.attention.indexer_loss import indexer_loss

    try:
        indexer_loss(Megatron()).scale.set_loss_scale(torch.tensor(factor))
    except ModuleNotFoundError:
        pass
