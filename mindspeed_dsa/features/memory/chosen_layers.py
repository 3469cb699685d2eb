"""Layers of a pipeline stage that a feature works in: N of them, spread over the stage's chunks.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from mindspeed_dsa.feature import Check, Context
from mindspeed_dsa.megatron import releases
from mindspeed_dsa.megatron.configuration import argument, require
from mindspeed_dsa.patches.spec import Patch

_BLOCK = "megatron.core.transformer.transformer_block:TransformerBlock.__init__"
_MTP_BLOCK = "megatron.core.transformer.multi_token_prediction:MultiTokenPredictionBlock.__init__"
_Options = TypeVar("_Options", bound="LayerOptions")


@dataclass(frozen=True)
class LayerOptions:
    """Options of a feature that works in chosen layers; its own options derive from them.

    Attributes:
        switched_on: the feature's own switch is on.
        num_layers: of each pipeline stage; ``None`` for all of them.
        follows_pieces: our own schedule runs layers in pieces, and asks ``megatron/split_layers.py``.
    """

    switched_on: bool
    num_layers: int | None
    follows_pieces: bool = field(default=False, kw_only=True)

    @classmethod
    def from_settings(cls: type[_Options], settings: Any, switch: str, **own: Any) -> _Options:
        """Read them from resolved settings, or from arguments.

        Args:
            settings: with values by ``dest``.
            switch: ``dest`` of the feature's switch.
            **own: attributes that the derived class adds.
        """
        return cls(
            switched_on=bool(getattr(settings, switch, False)),
            num_layers=getattr(settings, f"{switch}_num_layers", None),
            follows_pieces=bool(getattr(settings, "moe_fb_overlap", False)),
            **own,
        )


def check_layers(args: Any, options: LayerOptions, flag: str) -> Iterator[str]:
    """Yield problems of the number of layers, and of schedules that split layers without asking.

    Args:
        args: arguments or a configuration.
        options: of the feature.
        flag: its switch.
    """
    wanted = options.num_layers
    if wanted is not None:
        if not options.switched_on:
            yield f"{flag}-num-layers {wanted} has no effect without {flag}; add that or drop it"
        total = argument(args, "num_layers")
        if wanted < 0 or (total is not None and wanted > total):
            most = "" if total is None else f" and at most {total}, the number of layers"
            yield f"{flag}-num-layers {wanted}: use a number that is at least 0{most}"
    if argument(args, "overlap_moe_expert_parallel_comm") and not options.follows_pieces:
        yield (
            f"{flag} works in the layer's forward, which --overlap-moe-expert-parallel-comm takes apart; use "
            "--moe-fb-overlap in place of that, or omit one of them"
        )


def rows(module: str, versions: str) -> tuple[Patch, ...]:
    """Return the patches that choose layers when they are built.

    Args:
        module: has ``choose_in_block`` and ``choose_in_mtp``, made of the functions below.
        versions: of Megatron-core.
    """
    return (
        Patch(
            _BLOCK,
            "wrap",
            f"{module}:choose_in_block",
            "the layers of a pipeline stage that take part are chosen once they are built",
            ("config",),
            versions,
        ),
        Patch(
            _MTP_BLOCK,
            "wrap",
            f"{module}:choose_in_mtp",
            "layers of multi-token prediction are built outside of the decoder",
            versions=versions,
        ),
    )


def chosen(layers: Sequence[int], chunk: int, wanted: int | None, in_full: int = 0) -> list[int]:
    """Return the positions, from 0, of the chunk's layers that take part.

    The stage's layers are taken in the order of their position inside their chunk, at equal position in
    the order of the chunks: first layers of all chunks, second layers of all chunks, and so on. Layers that
    Megatron recomputes in full do not count.

    Args:
        layers: number of layers of each chunk of this stage.
        chunk: which of them.
        wanted: how many layers of the stage, ``None`` for all.
        in_full: how many layers at the beginning of each chunk are recomputed in full.
    """
    order = [
        (position, index)
        for position in range(in_full, max(layers, default=0))
        for index, count in enumerate(layers)
        if position < count
    ]
    return [position for position, index in order[:wanted] if index == chunk]


def choose_in_block(
    original: Callable[..., None], context: Context[_Options], choose: Callable[[Any], None], check: Check
) -> Callable[..., None]:
    """Decorate ``TransformerBlock.__init__``: ``choose`` is called with each layer that takes part.

    Args:
        original: Megatron's.
        context: the feature's.
        choose: gets a transformer layer.
        check: what the feature cannot be combined with.
    """

    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        require(context, check, config)
        original(self, config, *args, **kwargs)
        stage = releases.virtual_stage(self, context.megatron)
        chunk = stage or 0
        in_full = config.recompute_num_layers if config.recompute_granularity == "full" else 0
        counts = _layers_of_chunks(self, stage, context)
        layer_class = context.megatron("core.transformer.transformer_layer").TransformerLayer
        for position in chosen(counts, chunk, context.options.num_layers, in_full):
            if isinstance(self.layers[position], layer_class):
                choose(self.layers[position])

    return __init__


def choose_in_mtp(
    original: Callable[..., None], context: Context[_Options], choose: Callable[[Any], None]
) -> Callable[..., None]:
    """Decorate ``MultiTokenPredictionBlock.__init__``; its layers take part where all layers do."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if context.options.num_layers is None:
            layer_class = context.megatron("core.transformer.transformer_layer").TransformerLayer
            for module in self.modules():
                if isinstance(module, layer_class):
                    choose(module)

    return __init__


def _layers_of_chunks(block: Any, stage: int | None, context: Context[_Options]) -> list[int]:
    chunks = block.config.virtual_pipeline_model_parallel_size
    if chunks is None or stage is None:
        return [len(block.layers)]
    layers = [releases.layers_of_chunk(block, chunk, context.megatron) for chunk in range(chunks)]
    layers[stage] = len(block.layers)
    return layers
