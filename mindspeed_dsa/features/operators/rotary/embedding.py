"""Megatron's rotation of a tensor by angles, which all layouts of a batch come down to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from mindspeed_dsa.ops.rotary import Rotation, rotate, rotation
from mindspeed_dsa.ops.rotary.layouts import Layout

_MOST = 16


class _Rotations:
    """Tables of sines and cosines, for as long as the angles exist that they were made of."""

    def __init__(self) -> None:
        self._of: Any = WeakIdKeyDictionary()

    def of(self, angles: Tensor, scale: float, layout: Layout, like: Tensor) -> Rotation:
        """Those of earlier calls with these angles, unless somebody has written to them since."""
        # Callers cut off what is beyond the sequence, so a call's own tensor is a view of the one that stays.
        lasting = angles._base if angles._base is not None else angles
        if angles.is_inference() or lasting.is_inference():  # these have no version
            return rotation(angles, scale, layout, like)
        known = self._of.setdefault(lasting, {})
        place = angles.shape, angles.stride(), angles.storage_offset(), lasting._version
        # A backend's limits depend on the sizes of what is rotated.
        key = place, scale, layout, like.dtype, like.device, like.shape[:-1]
        if key not in known:
            if len(known) >= _MOST:
                known.clear()
            with torch.inference_mode(False):  # training will want them after an evaluation too
                known[key] = rotation(angles, scale, layout, like)
        found: Rotation = known[key]
        return found


def rotate_fused(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Decorate ``_apply_rotary_pos_emb_bshd``.

    Its fourth argument, latent attention's order of dimensions, has had two names.
    """
    rotations = _Rotations()

    def _apply_rotary_pos_emb_bshd(
        t: Tensor, freqs: Tensor, rotary_interleaved: bool = False, *args: Any, **kwargs: Any
    ) -> Tensor:
        latent, mscale, more = _given(args, kwargs)
        # A compiler fuses by itself. Angles that learn, an order that is both, and what later releases can be
        # asked for as well, are Megatron's affair.
        if torch.compiler.is_compiling() or freqs.requires_grad or (latent and rotary_interleaved) or more:
            return original(t, freqs, rotary_interleaved, *args, **kwargs)
        layout: Layout = "pairs to halves" if latent else "pairs" if rotary_interleaved else "halves"
        return rotate(t, rotations.of(freqs, mscale, layout, t))

    return _apply_rotary_pos_emb_bshd


def _given(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, float, bool]:
    """Whether dimensions are in latent attention's order, what lengths are multiplied by, and more."""
    named = dict(kwargs)
    latent = args[0] if args else named.pop("mla_rotary_interleaved", False)
    if (older := named.pop("multi_latent_attention", None)) is not None:
        latent = older
    mscale = args[1] if len(args) > 1 else named.pop("mscale", 1.0)
    return bool(latent), float(mscale), any(args[2:]) or any(named.values())
