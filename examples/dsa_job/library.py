"""What mindspeed_dsa did in this job, for the summary at its end."""

from __future__ import annotations

from collections.abc import Sequence

import torch

import mindspeed_dsa
from mindspeed_dsa import session

_PARTS = {
    "use_dsa_absorb": "absorbed MLA",
    "use_fused_lightning_indexer": "Lightning Indexer",
    "use_fused_sparse_flash_attention": "Sparse Flash Attention",
    "use_fused_lightning_indexer_kl_loss": "indexer loss",
}
"""What ``--use-fused-dsa`` switches on, unless a switch of its own says otherwise."""


class Account:
    """Counts how often sparse attention is called, and reads the library's report.

    Args:
        model: chunks of this rank; their sparse attention layers are watched.
    """

    def __init__(self, model: Sequence[torch.nn.Module]) -> None:
        modules = [module for chunk in model for module in chunk.modules()]
        layers = [module for module in modules if type(module).__name__ == "DSAttention"]
        self._calls, self._layers = 0, len(layers)
        for layer in layers:
            layer.register_forward_hook(self._count)

    def _count(self, *_: object) -> None:
        self._calls += 1

    def lines(self) -> list[str]:
        """Features that are on with the names that they replaced, and what computed sparse attention."""
        running = session.current()
        if running is None:
            return ["mindspeed_dsa: no feature was on"]
        patched = {feature.name: 0 for feature in running.features}
        for site in mindspeed_dsa.report():
            for name in patched.keys() & site["features"]:
                patched[name] += site["state"] == "applied"
        at_work = ", ".join(f"{name} ({count} patched)" for name, count in patched.items() if count)
        lines = [f"mindspeed_dsa: {len(patched)} features on; at work: {at_work or 'none'}"]
        if self._layers:
            settings = running.settings
            chosen = {name: getattr(settings, name) for name in _PARTS}
            fused = [_PARTS[n] for n, on in chosen.items() if (settings.use_fused_dsa if on is None else on)]
            lines.append(
                f"sparse attention: {self._calls:,} calls in {self._layers} layers on rank 0; fused: "
                f"{', '.join(fused) or 'nothing'}"
            )
        return lines
