"""``doctor``: which backend runs each operator of DSA on this device, and why not the fastest one."""

from __future__ import annotations

import argparse
from typing import Any

from packaging.specifiers import SpecifierSet

from mindspeed_dsa import session
from mindspeed_dsa.megatron.dsa import Options, uses_dsa
from mindspeed_dsa.patches import versions

_SIZES = {
    "num_attention_heads": 128,
    "kv_lora_rank": 512,
    "qk_pos_emb_head_dim": 64,
    "dsa_indexer_n_heads": 64,
    "dsa_indexer_head_dim": 128,
    "dsa_indexer_topk": 2048,
}
"""Sizes of DeepSeek-V3.2, for those that a command line does not name."""


def is_served(root: str) -> bool:
    """Return whether this Megatron-core lacks DSA, which the backport then adds."""
    release = versions.of_megatron(root)
    return release is not None and release in SpecifierSet("<0.16", prereleases=True)


def examine(running: session.Session, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Ask each operator for its backend, as the first call of a job does.

    Args:
        running: the session.
        args: the job's arguments, as far as they are known.

    Returns:
        A row for each operator, with what was tried before its backend and why that is skipped; nothing where
        no operator of DSA is on, or without torch.
    """
    chosen = Options.of(running.settings)
    # Megatron has no DSA of its own there, so that every part is ours.
    backport = "dsa-backport" in running.settings.features_on and is_served(running.settings.megatron_root)
    parts = {
        "lightning_indexer": chosen.indexer or backport,
        "sparse_flash_attention": chosen.attention or backport,
        "indexer_kl_loss": chosen.kl_loss or backport,
    }
    if not uses_dsa(running.settings) or not any(parts.values()):
        return []
    import torch

    from mindspeed_dsa.ops import backend

    dtype = torch.float16 if getattr(args, "fp16", False) else torch.bfloat16
    if not getattr(args, "fp16", False) and getattr(args, "bf16", True) is False:
        dtype = torch.float32
    heads, latent, rotary, index_heads, index_dim, topk = (
        getattr(args, name, None) or usual for name, usual in _SIZES.items()
    )
    index = (("heads", index_heads), ("head_dim", index_dim), ("topk", topk))
    attention = (("heads", heads), ("dim", latent + rotary), ("value_dim", latent), ("topk", topk))
    loss = (
        ("heads", heads),
        ("dim", latent + rotary),
        ("key_heads", 1),
        ("index_heads", index_heads),
        ("index_dim", index_dim),
        ("topk", topk),
    )
    rows = []
    for operator, sizes in zip(parts, (index, attention, loss), strict=True):
        if not parts[operator]:
            continue
        shape = backend.ShapeClass(running.settings.platform, dtype, sizes)
        tried = []
        found = ""
        for name, module, reason in backend.candidates(operator, chosen.backend, shape):
            if module is not None:
                found = name
                break
            tried.append({"backend": name, "why": str(reason)})
        rows.append(
            {
                "operator": operator,
                "backend": found or "none can run it",
                "skipped": tried,
                "dtype": str(dtype).removeprefix("torch."),
                "device": shape.device,
            }
        )
    return rows
