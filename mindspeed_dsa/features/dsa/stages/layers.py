"""Comparison of the layers that have an indexer in a checkpoint and in the model.

Does not import Megatron, because it is loaded while Megatron is being imported.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from weakref import ref

from mindspeed_dsa.feature import Context
from mindspeed_dsa.features.dsa.stages.parameters import mark_indexers
from mindspeed_dsa.megatron.dsa import Options, uses_dsa
from mindspeed_dsa.megatron.selections import Sharing
from mindspeed_dsa.patches.errors import SettingsError

_INDEXER = ".core_attention.indexer."
_DECODER, _MTP = "decoder", "mtp"
_LAYER = re.compile(rf"(?:^|\.)(?P<block>{_DECODER}|{_MTP})\.layers\.(?:(?P<index>\d+)\.)?")
_OF_OPTIMIZER = ("optimizer.", "chained_")


class Models:
    """Holder of the configuration of a session's latest DSA model."""

    def __init__(self, context: Context[Options]) -> None:
        # Weak reference: a configuration holds the optimizer (its loss scale method), and jobs end.
        self._config: ref[Any] | None = None

    @property
    def config(self) -> Any:
        """Megatron's configuration of the latest DSA model, or None."""
        return None if self._config is None else self._config()

    def note(self, config: Any) -> None:
        """Store the configuration of a new model."""
        self._config = ref(config)


def of_indexer(key: str) -> bool:
    """Return whether a parameter name (in a model or optimizer) belongs to an indexer."""
    return _INDEXER in key


# -- models ------------------------------------------------------------------------------------


def note_model(original: Callable[..., None], context: Context[Options]) -> Callable[..., None]:
    """Decorate ``GPTModel.__init__``: mark indexer parameters, and check state dicts before loading."""

    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        original(self, config, *args, **kwargs)
        if uses_dsa(config):
            context.state(Models).note(config)
            mark_indexers(self, config)
            self.register_load_state_dict_pre_hook(_Check(context))

    return __init__


def number_sharing_layers(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``TransformerBlock.sharded_state_dict`` to save layers one by one if some lack an indexer."""

    def sharded_state_dict(
        self: Any, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> Any:
        if Sharing.of(self.config).is_on:
            metadata = {**(metadata or {}), "non_homogeneous_layers": True}
        return original(self, prefix, sharded_offsets, metadata)

    return sharded_state_dict


class _Check:
    """Pre-hook for a model's ``load_state_dict`` that compares indexers."""

    def __init__(self, context: Context[Options]) -> None:
        self._context = context

    def __call__(
        self, model: Any, state_dict: dict[str, Any], prefix: str, metadata: Any, strict: bool, *unused: Any
    ) -> None:
        """Raise if state dict and model have indexers in different layers.

        If the state dict has no indexers at all, the model keeps its own.
        """
        if not strict:
            return
        own_params = {prefix + name: param for name, param in model.named_parameters() if of_indexer(name)}
        saved_names = {name for name in state_dict if name.startswith(prefix) and of_indexer(name)}
        # Indices in names count from the stage's first layer, layer_number from the model's.
        numbers = {
            f"{_DECODER}.layers.{index}": layer.layer_number
            for index, layer in enumerate(getattr(getattr(model, _DECODER, None), "layers", ()))
        }
        there, here = ({_layer(name, numbers) for name in names} for names in (saved_names, own_params))
        if not there and here and _may_begin(self._context):
            # Loading these values leaves the parameters unchanged, and strict loading finds every key.
            state_dict.update({name: param.detach() for name, param in own_params.items()})
            return
        refuse("the state dict", there, here, model.config, self._context.options.stage)


def _layer(name: str, numbers: Mapping[str, int]) -> tuple[str, int]:
    """Return the block and the layer number (from 1) of a parameter."""
    match = _LAYER.search(name)
    assert match is not None, name
    index = int(match["index"] or 0)
    return match["block"], numbers.get(f"{match['block']}.layers.{index}", index + 1)


# -- distributed checkpoints -------------------------------------------------------------------


def checked(
    wanted: dict[str, Any], folder: Any, shapes: Mapping[str, tuple[int, ...]], context: Context[Options]
) -> dict[str, Any]:
    """Compare the indexers in a distributed checkpoint with the model's. All ranks get the same result.

    Args:
        wanted: sharded state dict to be loaded.
        folder: checkpoint folder.
        shapes: global shape of each tensor in the checkpoint, by key.
        context: context of the session.

    Returns:
        ``wanted``. If the checkpoint is of a dense model, its indexer entries are replaced by objects that
        are not loaded.

    Raises:
        SettingsError: a layer has an indexer in the checkpoint but not in the model, or the reverse.
    """
    weights = [key for key in shapes if not key.startswith(_OF_OPTIMIZER) and _LAYER.search(key)]
    if not weights or not any(name.startswith("model") for name in wanted):
        return wanted
    config = context.state(Models).config
    there = {layer for key in weights if of_indexer(key) for layer in _layers(key, shapes[key])}
    mtp = {layer for key in weights for layer in _layers(key, shapes[key]) if layer[0] == _MTP}
    here = set(_computing(config, len(mtp)))
    if not there and here and _may_begin(context):
        return {
            name: _kept(state, context) if name.startswith("model") else state
            for name, state in wanted.items()
        }
    # The checkpoint may have more layers than the model; those are not compared.
    inside = {(_DECODER, number) for number in range(1, config.num_layers + 1)} | mtp
    refuse(f"checkpoint {folder}", there & inside, here, config, context.options.stage)
    return wanted


def _layers(key: str, shape: tuple[int, ...]) -> Iterator[tuple[str, int]]:
    """Yield the layers of a checkpoint tensor: one, or all if it stacks one layer per index."""
    match = _LAYER.search(key)
    if match is None:
        return
    if match["index"] is not None:
        yield match["block"], int(match["index"]) + 1
    elif shape:
        yield from ((match["block"], number) for number in range(1, shape[0] + 1))


def _computing(config: Any, mtp_layers: int) -> Iterator[tuple[str, int]]:
    """Yield the layers of the model that have an indexer."""
    sharing = Sharing.of(config)
    yield from ((_DECODER, n) for n in range(1, config.num_layers + 1) if sharing.computes(n))
    mtp = min(getattr(config, "mtp_num_layers", None) or 0, mtp_layers)
    yield from ((_MTP, n) for n in range(1, mtp + 1) if sharing.mtp_computes(n))


def _kept(state: Any, context: Context[Options]) -> Any:
    """Return a model's sharded state dict in which indexers are local objects, so they are not loaded."""
    local_object: Any = context.megatron("core.dist_checkpointing.mapping").LocalNonpersistentObject
    return {
        name: local_object(tensor.data) if of_indexer(name) and hasattr(tensor, "data") else tensor
        for name, tensor in state.items()
    }


# -- messages ----------------------------------------------------------------------------------


def _may_begin(context: Context[Options]) -> bool:
    """Return whether indexers may start from initial weights in this stage; log it once."""
    stage = context.options.stage
    if stage not in ("dense", "warmup"):
        return False
    context.log.info(
        "--dsa-stage %s: the checkpoint is of a model without indexers; they start as initialised",
        stage,
        once=True,
    )
    return True


def refuse(
    what: str, there: set[tuple[str, int]], here: set[tuple[str, int]], config: Any, stage: str
) -> None:
    """Raise if checkpoint and model have indexers in different layers.

    Args:
        what: name of the checkpoint or state dict, for messages.
        there: layers with an indexer in the checkpoint.
        here: layers with an indexer in the model.
        config: configuration of the model.
        stage: stage of the job.

    Raises:
        SettingsError: the layers differ.
    """
    extra, missing = sorted(there - here), sorted(here - there)
    if extra:
        source = _source(extra[0], Sharing.of(config))
        raise SettingsError(
            f"mindspeed_dsa: {what} has an indexer in {_name(extra[0])}, where this model has none: that "
            f"layer shares the selection of {source}{_more(extra)}. Load it with the "
            "--dsa-indexer-topk-freq, --dsa-indexer-skip-topk-offset and --dsa-indexer-topk-pattern that it "
            "was saved with"
        )
    if missing and not there:
        raise SettingsError(
            f"mindspeed_dsa: {what} has no indexers, so its model attends densely, and --dsa-stage "
            f"{stage} needs trained ones, first in {_name(missing[0])}; begin with --dsa-stage warmup, which "
            "initialises and trains them"
        )
    if missing:
        raise SettingsError(
            f"mindspeed_dsa: {what} has no indexer in {_name(missing[0])}, which selects keys itself "
            f"in this model{_more(missing)}. Load it with the --dsa-indexer-topk-freq, "
            "--dsa-indexer-skip-topk-offset and --dsa-indexer-topk-pattern that it was saved with"
        )


def _name(layer: tuple[str, int]) -> str:
    block, number = layer
    return f"layer {number}" if block == _DECODER else f"layer {number} of multi-token prediction"


def _source(layer: tuple[str, int], sharing: Sharing) -> str:
    block, number = layer
    return f"layer {sharing.source(number)}" if block == _DECODER else _name((_MTP, 1))


def _more(found: list[tuple[str, int]]) -> str:
    return f" (likewise {', '.join(map(_name, found[1:]))})" if len(found) > 1 else ""
