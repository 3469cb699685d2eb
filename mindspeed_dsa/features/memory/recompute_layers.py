"""Which layers of a pipeline stage recompute: N of them, spread over its chunks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mindspeed_dsa.features.host import host
from mindspeed_dsa.features.memory import recompute_limits


def chosen(layers: Sequence[int], chunk: int, wanted: int | None, in_full: int = 0) -> list[int]:
    """Positions, from 0, of the chunk's layers that recompute.

    The stage's layers are taken in the order of their position inside their chunk, at equal position in
    the order of the chunks: first layers of all chunks, second layers of all chunks, and so on. Layers that
    Megatron recomputes in full do not count.

    Args:
        layers: number of layers of each chunk of this stage.
        chunk: which of them.
        wanted: how many layers of the stage, none for all.
        in_full: how many layers at the beginning of each chunk are recomputed in full.
    """
    order = [
        (position, index)
        for position in range(in_full, max(layers, default=0))
        for index, count in enumerate(layers)
        if position < count
    ]
    return [position for position, index in order[:wanted] if index == chunk]


def after_building(
    block_init: Callable[..., None],
    choose: Callable[[Any], None],
    dest: str,
    problems: Callable[[Any], Sequence[str]],
) -> Callable[..., None]:
    """``TransformerBlock.__init__``, after which ``choose`` has been called with each layer that recomputes.

    Args:
        block_init: the host's.
        choose: gets a transformer layer.
        dest: of the switch.
        problems: what the configuration cannot be combined with.
    """

    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        # A job without Megatron's argument parser has not been asked before.
        if found := problems(config):
            raise ValueError("mindspeed_dsa: " + "; ".join(found))
        block_init(self, config, *args, **kwargs)
        chunk = self.vp_stage or 0
        in_full = 0
        if config.recompute_granularity == "full":
            in_full = config.recompute_num_layers
        wanted = recompute_limits.layers_wanted(dest)
        layer_class = host("core.transformer.transformer_layer").TransformerLayer
        for position in chosen(_layers_of_chunks(self, chunk), chunk, wanted, in_full):
            if isinstance(self.layers[position], layer_class):
                choose(self.layers[position])

    return __init__


def after_building_mtp(
    block_init: Callable[..., None], choose: Callable[[Any], None], dest: str
) -> Callable[..., None]:
    """``MultiTokenPredictionBlock.__init__``; its layers recompute where all layers do."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        block_init(self, *args, **kwargs)
        if recompute_limits.layers_wanted(dest) is None:
            layer_class = host("core.transformer.transformer_layer").TransformerLayer
            for module in self.modules():
                if isinstance(module, layer_class):
                    choose(module)

    return __init__


def _layers_of_chunks(block: Any, chunk: int) -> list[int]:
    chunks = block.config.virtual_pipeline_model_parallel_size
    if chunks is None or block.vp_stage is None:
        return [len(block.layers)]
    transformer_block = host("core.transformer.transformer_block")
    rank = block.pg_collection.pp.rank()
    layers = [transformer_block.get_num_layers_to_build(block.config, stage, rank) for stage in range(chunks)]
    layers[chunk] = len(block.layers)
    return layers
