"""Layers that attend to the keys which another layer has selected, on every release of Megatron-core."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mindspeed_dsa.feature import EXPERIMENTAL_ATTENTION_VARIANT, Feature
from mindspeed_dsa.megatron.dsa import DSA, KERNELS, OWN_LOOP, Options, uses_dsa
from mindspeed_dsa.megatron.pipeline_chunks import check_chunks
from mindspeed_dsa.patches.spec import Patch

_HERE = "mindspeed_dsa.features.dsa.shared_selections.layers"
_ALL = ">=0.12.1,<0.21"


def check_sharing(args: Any, options: Options) -> Iterator[str]:
    """Yield why the chunks of a pipeline cannot share; ``dsa-model`` checks which layers do."""
    yield from check_chunks(args)


SHARED_SELECTIONS = Feature(
    name="dsa-shared-selections",
    summary="One indexer for several layers, on releases that lack it, and right under recomputation.",
    flags=(EXPERIMENTAL_ATTENTION_VARIANT,),
    active=uses_dsa,
    when="the model uses DSA",
    options=Options.of,
    check=check_sharing,
    doc="dsa-shared-selections.md",
    patches=(
        Patch(
            "megatron.core.transformer.transformer_layer:TransformerLayer.__init__",
            "wrap",
            f"{_HERE}:place_in_decoder",
            "layers of released cores all have an indexer, and 0.19 knows no pattern",
            params=("config",),
            versions=_ALL,
        ),
        Patch(
            "megatron.core.transformer.multi_token_prediction:MultiTokenPredictionLayer.__init__",
            "wrap",
            f"{_HERE}:place_in_mtp",
            "layers of multi-token prediction are counted apart from the decoder's",
            params=("config",),
            versions=_ALL,
        ),
        Patch(
            "megatron.core.transformer.multi_token_prediction:MultiTokenPredictionBlock.forward",
            "wrap",
            f"{_HERE}:select_anew_in_mtp",
            "a layer that runs once for each predicted token selects the first time only",
            versions=_ALL,
        ),
        Patch(
            f"{DSA}:DSAttention.forward",
            "wrap",
            f"{_HERE}:attend_with_megatron",
            "Megatron's DSA of these releases always selects",
            params=("query", "key", "value"),
            versions=OWN_LOOP,
        ),
        Patch(
            f"{DSA}:unfused_dsa_fn",
            "wrap",
            f"{_HERE}:hand_on_indices",
            "Megatron's DSA of these releases keeps its selection to itself",
            params=("query", "key", "value", "topk_indices"),
            versions=OWN_LOOP,
        ),
        Patch(
            f"{DSA}:DSAttention.forward",
            "wrap",
            f"{_HERE}:repeat_with_megatron",
            "Megatron's layers select in every run or in none, repeated ones of multi-token prediction too",
            versions=KERNELS,
        ),
        Patch(
            f"{DSA}:DSAttention._get_index_share_topk_holder",
            "replace",
            f"{_HERE}:hold_indices",
            "Megatron keeps selections on the configuration, where a recomputed layer reads those of a later "
            "microbatch",
            versions=KERNELS,
            factory=True,
        ),
        Patch(
            f"{DSA}:DSAttention._get_index_share_topk_length_holder",
            "replace",
            f"{_HERE}:hold_lengths",
            "Megatron keeps the lengths of selections on the configuration as well",
            versions=KERNELS,
            factory=True,
        ),
        Patch(
            "megatron.core.tensor_parallel.random:checkpoint",
            "wrap",
            f"{_HERE}:carry_selection",
            "a recomputed layer runs before the one that it shares a selection with, and its weights get no "
            "gradient where its input wants none",
            params=("function", "distribute_saved_activations"),
            versions=_ALL,
            priority=200,  # outside whoever recomputes instead of Megatron
        ),
        Patch(
            "megatron.core.extensions.transformer_engine:te_checkpoint",
            "wrap",
            f"{_HERE}:carry_selection",
            "a layer recomputed by Transformer Engine runs before the one that it shares a selection with",
            versions=_ALL,
            required=False,
        ),
    ),
)
