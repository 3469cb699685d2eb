"""Selection of the N layers of a pipeline stage to which a memory feature applies, over all its chunks.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from mindspeed_dsa.feature import Check, Context
from mindspeed_dsa.megatron import releases
from mindspeed_dsa.megatron.configuration import argument, hybrid_flag, require
from mindspeed_dsa.patches.spec import Patch

_BLOCK = "megatron.core.transformer.transformer_block:TransformerBlock.__init__"
_MTP_BLOCK = "megatron.core.transformer.multi_token_prediction:MultiTokenPredictionBlock.__init__"
_Options = TypeVar("_Options", bound="LayerOptions")


@dataclass(frozen=True)
class LayerOptions:
    """Base class for the options of a feature that applies to selected layers.

    Attributes:
        switched_on: state of the feature's own switch.
        num_layers: number of layers per pipeline stage; ``None`` selects all layers.
        follows_pieces: whether ``--moe-fb-overlap`` is on, under which a layer's forward runs as several
            separate calls. Our schedule then enters the contexts registered in ``megatron/split_layers.py``
            around each of these calls.
    """

    switched_on: bool
    num_layers: int | None
    follows_pieces: bool = field(default=False, kw_only=True)

    @classmethod
    def from_settings(cls: type[_Options], settings: Any, switch: str, **own: Any) -> _Options:
        """Build the options of a derived class from resolved settings or parsed arguments.

        Args:
            settings: object with one attribute per ``dest``.
            switch: ``dest`` of the feature's switch.
            **own: values of the attributes that the derived class adds.
        """
        return cls(
            switched_on=bool(getattr(settings, switch, False)),
            num_layers=getattr(settings, f"{switch}_num_layers", None),
            follows_pieces=bool(getattr(settings, "moe_fb_overlap", False)),
            **own,
        )


def check_layers(args: Any, options: LayerOptions, flag: str) -> Iterator[str]:
    """Yield an error for an invalid number of layers, or for a schedule that never calls ``layer.forward``.

    Args:
        args: parsed arguments or a model configuration.
        options: options of the feature.
        flag: command line switch of the feature.
    """
    wanted = options.num_layers
    if options.switched_on and (hybrid := hybrid_flag(args)):
        yield f"{flag} works in the layers of GPT models alone, not in those of {hybrid}; omit one of them"
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
    """Return the patches that select layers when Megatron constructs a transformer or MTP block.

    Args:
        module: name of the module that defines ``choose_in_block`` and ``choose_in_mtp``, the
            results of :func:`decorators`.
        versions: supported versions of Megatron-core.
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
    """Return the positions (from 0) of the selected layers in one chunk.

    Layers are selected round robin over the chunks of the stage: the first layer of every chunk, then the
    second layer of every chunk, and so on. Layers under full recompute are skipped and do not count.

    Args:
        layers: number of layers in each chunk of this stage.
        chunk: index of the chunk in ``layers``.
        wanted: number of layers to select in the stage; ``None`` selects all.
        in_full: number of layers at the start of each chunk that Megatron recomputes in full.
    """
    # layers [2, 3], wanted 3: (position, chunk) = (0, 0), (0, 1), (1, 0) of the five pairs.
    order = [
        (position, index)
        for position in range(in_full, max(layers, default=0))
        for index, count in enumerate(layers)
        if position < count
    ]
    return [position for position, index in order[:wanted] if index == chunk]


_Decorator = Callable[[Callable[..., None], Context[_Options]], Callable[..., None]]


def decorators(
    choose_with: Callable[[Context[_Options]], Callable[[Any], None]], check: Check
) -> tuple[_Decorator[_Options], _Decorator[_Options]]:
    """Return ``choose_in_block`` and ``choose_in_mtp`` of a feature.

    Args:
        choose_with: function that returns, for a context, a callback that takes a chosen transformer layer.
        check: check of the model configuration, which yields the feature's conflicts.
    """

    def choose_in_block(original: Callable[..., None], context: Context[_Options]) -> Callable[..., None]:
        return _choose_in_block(original, context, choose_with(context), check)

    def choose_in_mtp(original: Callable[..., None], context: Context[_Options]) -> Callable[..., None]:
        return _choose_in_mtp(original, context, choose_with(context))

    return choose_in_block, choose_in_mtp


def _choose_in_block(
    original: Callable[..., None], context: Context[_Options], choose: Callable[[Any], None], check: Check
) -> Callable[..., None]:
    """Decorate ``TransformerBlock.__init__`` to call ``choose`` on each selected layer."""

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


def _choose_in_mtp(
    original: Callable[..., None], context: Context[_Options], choose: Callable[[Any], None]
) -> Callable[..., None]:
    """Decorate ``MultiTokenPredictionBlock.__init__`` to call ``choose`` on its layers.

    Does nothing when the feature is limited to ``num_layers``, which counts decoder layers only.
    """

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
    # This chunk's block is built already: take its actual count.
    layers[stage] = len(block.layers)
    return layers
