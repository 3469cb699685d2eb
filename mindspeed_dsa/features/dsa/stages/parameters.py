"""Parameters of indexers, and freezing of the parameters that a stage does not train.

Does not import Megatron, because it is loaded while Megatron is being imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from mindspeed_dsa.feature import Context
from mindspeed_dsa.features.dsa.indexer_loss import coefficient
from mindspeed_dsa.features.dsa.stages.feature import WITHOUT_LOSS
from mindspeed_dsa.megatron.dsa import Options, uses_dsa

_MARK = "dsa_indexer_coefficient"
"""Attribute of indexer parameters with the coefficient of the indexer loss."""


def indexers(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield the indexers of a model, Megatron's or ours. Layers that share a selection have no indexer."""
    for module in model.modules():
        # By name: each Megatron, and our backport, has its own DSAIndexer class.
        if any(base.__name__ == "DSAIndexer" for base in type(module).__mro__):
            yield module


def mark_indexers(model: torch.nn.Module, config: Any) -> None:
    """Mark the parameters of a model's indexers, so that :func:`is_indexers` recognises them."""
    for indexer in indexers(model):
        for parameter in indexer.parameters():
            setattr(parameter, _MARK, coefficient(config))


def is_indexers(parameter: Any) -> bool:
    """Return whether a parameter is marked as an indexer's."""
    return hasattr(parameter, _MARK)


def learns(parameter: Any) -> bool:
    """Return whether a marked parameter is trained by an indexer loss."""
    return bool(getattr(parameter, _MARK) > 0)


# -- models ------------------------------------------------------------------------------------


def freeze_for_stage(original: Callable[..., None], context: Context[Options]) -> Callable[..., None]:
    """Decorate ``GPTModel.__init__`` to freeze parameters that the stage does not train."""
    stage = context.options.stage

    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        if uses_dsa(config) and stage in WITHOUT_LOSS and coefficient(config) > 0:
            context.log.info(
                "--dsa-stage %s trains no indexer: the loss coefficient %g is taken as 0",
                stage,
                coefficient(config),
                once=True,
            )
            config.dsa_indexer_loss_coeff = 0.0
        original(self, config, *args, **kwargs)
        if not uses_dsa(config):
            return
        if context.options.warmup:
            _freeze_all_but_indexers(self)
        else:
            for indexer in indexers(self):
                indexer.requires_grad_(False)

    return __init__


def _freeze_all_but_indexers(model: Any) -> None:
    model.requires_grad_(False)
    for module in model.modules():
        if getattr(module, "recompute_input_layernorm", False):
            # A layer without a graph saves only the norm's output, for its indexer. Recomputation would free
            # it, and restore it only when a gradient arrives, which never happens here.
            module.recompute_input_layernorm = False
    for indexer in indexers(model):
        indexer.requires_grad_(True)
    embedding = getattr(model, "embedding", None)
    if embedding is not None:
        embedding.register_forward_hook(_start_graph)


def _start_graph(module: Any, inputs: Any, output: Tensor) -> Tensor:
    """Make an output require a gradient: checkpoints run backward only if their input requires one."""
    return output.detach().requires_grad_(torch.is_grad_enabled())
