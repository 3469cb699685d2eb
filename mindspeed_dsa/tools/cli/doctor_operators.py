"""Table of DSA operators for ``doctor``: chosen backend on this device, and why others are skipped."""

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
"""Sizes of DeepSeek-V3.2, used for flags that the command line lacks."""


def is_served(root: str) -> bool:
    """Return whether this Megatron-core lacks DSA and needs the backport."""
    release = versions.of_megatron(root)
    return release is not None and release in SpecifierSet("<0.16", prereleases=True)


def examine(running: session.Session, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Choose a backend for each operator, in the same way as the first call in a job.

    Args:
        running: session.
        args: job's arguments; missing ones get the sizes of :data:`_SIZES`.

    Returns:
        One row per operator: backend, skipped backends with reasons, dtype and device. Empty if no DSA
        operator is on or torch is not installed.
    """
    options = Options.of(running.settings)
    # Before 0.16 Megatron has no DSA: the backport replaces all three operators, whatever the flags say.
    backport = "dsa-backport" in running.settings.features_on and is_served(running.settings.megatron_root)
    parts = {
        "lightning_indexer": options.indexer or backport,
        "sparse_flash_attention": options.attention or backport,
        "indexer_kl_loss": options.kl_loss or backport,
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
        ("key_heads", 1),  # absorbed MLA: all query heads share one latent key
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
        backend_name = ""
        for name, module, reason in backend.candidates(operator, options.backend, shape):
            if module is not None:
                backend_name = name
                break
            tried.append({"backend": name, "why": str(reason)})
        rows.append(
            {
                "operator": operator,
                "backend": backend_name or "none can run it",
                "skipped": tried,
                "dtype": str(dtype).removeprefix("torch."),
                "device": shape.device,
            }
        )
    return rows
