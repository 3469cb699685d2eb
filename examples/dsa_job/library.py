"""What mindspeed_dsa did in this job, told at its end."""

from __future__ import annotations

from collections.abc import Sequence

import torch

import mindspeed_dsa
from mindspeed_dsa import session
from mindspeed_dsa.features.attention.dsa_module import dsa_module
from mindspeed_dsa.features.attention.fused.options import Options


class Account:
    """Counts how often sparse attention is called, and reads the library's report.

    Args:
        model: chunks of this rank; their sparse attention layers are watched.
    """

    def __init__(self, model: Sequence[torch.nn.Module]) -> None:
        self._calls = self._layers = 0
        attention = getattr(dsa_module(), "DSAttention", None) if _wants_dsa() else None
        for chunk in model:
            for module in chunk.modules():
                if attention is not None and isinstance(module, attention):
                    self._layers += 1
                    module.register_forward_hook(self._count)

    def _count(self, *of_the_call: object) -> None:
        self._calls += 1

    def lines(self) -> list[str]:
        """Features that are on with the names that they replaced, and who computed sparse attention."""
        running = session.current()
        if running is None:
            return ["mindspeed_dsa: no feature was on"]
        replaced: dict[str, list[str]] = {feature.name: [] for feature in running.features}
        for site in mindspeed_dsa.report():
            for name in site["features"]:
                if site["state"] == "applied":
                    replaced[name].append(site["target"].rpartition(":")[2])
        told = [f"{name} ({len(targets)} patched)" for name, targets in replaced.items() if targets]
        lines = [f"mindspeed_dsa: {len(replaced)} features on; at work: {', '.join(told) or 'none'}"]
        if self._layers:
            chosen = Options.of(running.settings)
            parts = {
                "absorbed MLA": chosen.absorb,
                "Lightning Indexer": chosen.indexer,
                "Sparse Flash Attention": chosen.attention,
                "indexer loss": chosen.kl_loss,
            }
            fused = ", ".join(part for part, on in parts.items() if on)
            lines.append(
                f"sparse attention: {self._calls:,} calls in {self._layers} layers on rank 0; fused: "
                f"{fused or 'nothing'}"
            )
        return lines


def _wants_dsa() -> bool:
    running = session.current()
    return running is not None and running.settings.experimental_attention_variant == "dsa"
