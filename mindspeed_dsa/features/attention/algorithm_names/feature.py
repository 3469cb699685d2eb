"""One name for each context parallel algorithm, whoever gave it."""

from __future__ import annotations

from mindspeed_dsa.context_parallel.algorithms import ALGORITHM, MEGATRON_FLAGS, ULYSSES_DEGREE
from mindspeed_dsa.feature import Feature
from mindspeed_dsa.features.attention.algorithm_names.arguments import name_for_megatron, wanted
from mindspeed_dsa.features.attention.algorithm_names.options import Options
from mindspeed_dsa.features.attention.algorithm_names.validation import check_context_parallel
from mindspeed_dsa.megatron.configuration import validate
from mindspeed_dsa.patches.spec import Patch

FEATURE = Feature(
    name="context-parallel",
    summary="Takes MindSpeed's names of context parallel algorithms beside Megatron's, for all layers or one "
    "per layer.",
    flags=(ALGORITHM, ULYSSES_DEGREE, *MEGATRON_FLAGS),
    active=wanted,
    options=Options.of,
    rewrite=name_for_megatron,
    validate=validate(check_context_parallel, Options.of),
    doc="context-parallel.md",
    patches=(
        Patch(
            "megatron.core.transformer.transformer_layer:TransformerLayer.__init__",
            "wrap",
            "mindspeed_dsa.features.attention.algorithm_names.layers:count_layers_from_one",
            "a list of --cp-comm-type is read one layer too late, and past its end by the last layer",
            params=("config", "layer_number"),
            versions=">=0.12.1,<0.17",
        ),
    ),
)
