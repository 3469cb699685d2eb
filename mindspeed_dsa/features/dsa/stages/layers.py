"""Layers of a checkpoint that have an indexer, and those of the model that do.

Imports nothing of Megatron: these functions are fetched while Megatron is being imported.
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
    """Configuration of the models that a session has built.

    A configuration outlives no job: it holds the optimizer, whose method scales the loss.
    """

    def __init__(self, context: Context[Options]) -> None:
        self._config: ref[Any] | None = None

    @property
    def config(self) -> Any:
        """Megatron's, of the latest DSA model; None: there is none."""
        return None if self._config is None else self._config()

    def note(self, config: Any) -> None:
        """Remember the configuration of a model that is being built."""
        self._config = ref(config)


def of_indexer(key: str) -> bool:
    """Return whether a tensor's name, in a model or an optimizer, is that of an indexer's parameter."""
    return _INDEXER in key


# -- models ------------------------------------------------------------------------------------


def note_model(original: Callable[..., None], context: Context[Options]) -> Callable[..., None]:
    """Decorate ``GPTModel.__init__``: mark the indexers' parameters, and check what is loaded into them."""

    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        original(self, config, *args, **kwargs)
        if uses_dsa(config):
            context.state(Models).note(config)
            mark_indexers(self, config)
            self.register_load_state_dict_pre_hook(_Check(context))

    return __init__


def number_sharing_layers(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``TransformerBlock.sharded_state_dict``: layers that differ are not stacked."""

    def sharded_state_dict(
        self: Any, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> Any:
        if Sharing.of(self.config).is_on:
            metadata = {**(metadata or {}), "non_homogeneous_layers": True}
        return original(self, prefix, sharded_offsets, metadata)

    return sharded_state_dict


class _Check:
    """Hook of a model that is about to load a state dict.

    Args:
        context: of the session.
    """

    def __init__(self, context: Context[Options]) -> None:
        self._context = context

    def __call__(
        self, model: Any, state_dict: dict[str, Any], prefix: str, metadata: Any, strict: bool, *unused: Any
    ) -> None:
        """Refuse indexers of other layers; start them as they are where the checkpoint has none."""
        if not strict:
            return
        own = {prefix + name: each for name, each in model.named_parameters() if of_indexer(name)}
        given = {name for name in state_dict if name.startswith(prefix) and of_indexer(name)}
        numbers = {
            f"{_DECODER}.layers.{index}": layer.layer_number
            for index, layer in enumerate(getattr(getattr(model, _DECODER, None), "layers", ()))
        }
        there, here = ({_layer(name, numbers) for name in names} for names in (given, own))
        if not there and here and _may_begin(self._context):
            state_dict.update({name: each.detach() for name, each in own.items()})
            return
        refuse("the state dict", there, here, model.config, self._context.options.stage)


def _layer(name: str, numbers: Mapping[str, int]) -> tuple[str, int]:
    """Return block and number, from 1, of the layer that a parameter belongs to."""
    found = _LAYER.search(name)
    assert found is not None, name
    index = int(found["index"] or 0)
    return found["block"], numbers.get(f"{found['block']}.layers.{index}", index + 1)


# -- distributed checkpoints -------------------------------------------------------------------


def checked(
    wanted: dict[str, Any], folder: Any, shapes: Mapping[str, tuple[int, ...]], context: Context[Options]
) -> dict[str, Any]:
    """Compare a checkpoint's indexers with those that the model has, on all ranks.

    Args:
        wanted: what is about to be loaded.
        folder: of the checkpoint.
        shapes: of its tensors, by key.
        context: of the session.

    Returns:
        ``wanted``; if the checkpoint is a dense model's, without the indexers, which keep their weights.

    Raises:
        SettingsError: a layer has an indexer there and none here, or the reverse.
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
            name: _kept(each, context) if name.startswith("model") else each for name, each in wanted.items()
        }
    inside = {(_DECODER, number) for number in range(1, config.num_layers + 1)} | mtp
    refuse(f"checkpoint {folder}", there & inside, here, config, context.options.stage)
    return wanted


def _layers(key: str, shape: tuple[int, ...]) -> Iterator[tuple[str, int]]:
    """Yield the layers that a tensor belongs to: one, or all of which it is a stack."""
    found = _LAYER.search(key)
    if found is None:
        return
    if found["index"] is not None:
        yield found["block"], int(found["index"]) + 1
    elif shape:
        yield from ((found["block"], number) for number in range(1, shape[0] + 1))


def _computing(config: Any, mtp_layers: int) -> Iterator[tuple[str, int]]:
    """Yield the layers of a model that have an indexer."""
    sharing = Sharing.of(config)
    yield from ((_DECODER, n) for n in range(1, config.num_layers + 1) if sharing.computes(n))
    own = min(getattr(config, "mtp_num_layers", None) or 0, mtp_layers)
    yield from ((_MTP, n) for n in range(1, own + 1) if sharing.mtp_computes(n))


def _kept(state: Any, context: Context[Options]) -> Any:
    """Return a model's sharded state dict in which indexers keep the weights that they have."""
    own: Any = context.megatron("core.dist_checkpointing.mapping").LocalNonpersistentObject
    return {
        name: own(each.data) if of_indexer(name) and hasattr(each, "data") else each
        for name, each in state.items()
    }


# -- messages ----------------------------------------------------------------------------------


def _may_begin(context: Context[Options]) -> bool:
    """Return whether indexers may start untrained, which is said once."""
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
    """Refuse indexers that a model does not have, or lacks.

    Args:
        what: has been saved.
        there: its layers with an indexer.
        here: those of the model.
        config: of the model.
        stage: of the job.

    Raises:
        SettingsError: they differ.
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
