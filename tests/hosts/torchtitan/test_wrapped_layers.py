"""Names of layers inside wrappers for recomputation and compilation."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

pytest.importorskip("torchtitan", reason="TorchTitan: make test-hosts")

from mindspeed_dsa.integrations.torchtitan import indexer_losses


class Attention(nn.Module):
    indexer_loss: torch.Tensor | None = None


def test_a_loss_is_listed_once_under_the_layers_own_name():
    layers = [nn.ModuleDict({"attention": Attention()}) for _ in range(4)]
    for number, layer in enumerate(layers[:3]):
        layer["attention"].indexer_loss = torch.tensor(float(number))
    layers[1]["attention"] = torch.compile(layers[1]["attention"], backend="eager")
    layers[2] = checkpoint_wrapper(layers[2])
    model = torch.compile(nn.ModuleDict({"layers": nn.ModuleList(layers)}), backend="eager")
    assert indexer_losses(model) == {f"layers.{number}.attention": float(number) for number in range(3)}
