"""``--two-streams``: the indexer's projections and the shared expert run beside the rest of their layer."""

from __future__ import annotations

from mindspeed_dsa.feature import Conflict, Feature, Flag, Requires
from mindspeed_dsa.features.operators.two_streams.validation import check_streams
from mindspeed_dsa.megatron import configuration
from mindspeed_dsa.patches.spec import Patch

_IMPL = "mindspeed_dsa.features.operators.two_streams"
_INDEXER = "megatron.core.transformer.experimental_attention_variant.dsa:DSAIndexer"
_WHY_INDEXER = "its products of the hidden states are there already"
_MOVES_SHARED = "that one runs the shared expert under the transfers; omit one of them"

FEATURE = Feature(
    name="two-streams",
    summary="Runs the indexer's projections beside the main attention's, and the shared expert beside the "
    "router and the experts, on a second stream.",
    flags=(
        Flag(
            "--two-streams",
            "Run the indexer's projections of the hidden states beside the main attention's "
            "down-projections, and the shared expert beside the router, on a second stream.",
        ),
    ),
    patches=(
        Patch(
            "megatron.core.transformer.multi_latent_attention:MLASelfAttention.get_query_key_value_tensors",
            "wrap",
            f"{_IMPL}.indexer:project_beside",
            "the first step with the hidden states, of which the indexer needs nothing but products",
            params=("hidden_states", "inference_context"),
            versions=">=0.16,<0.19",
        ),
        Patch(
            f"{_INDEXER}.forward_with_scores",
            "wrap",
            f"{_IMPL}.indexer:take_projections",
            _WHY_INDEXER,
            params=("x",),
            versions=">=0.16,<0.17",
        ),
        Patch(
            f"{_INDEXER}.forward_before_topk",
            "wrap",
            f"{_IMPL}.indexer:take_projections",
            _WHY_INDEXER,
            params=("x",),
            versions=">=0.17,<0.19",
        ),
        Patch(
            "megatron.core.transformer.moe.moe_layer:MoELayer.shared_experts_compute",
            "wrap",
            f"{_IMPL}.shared_expert:compute_beside",
            "nobody needs the shared expert's output before the layer's last step",
            params=("hidden_states",),
            versions=">=0.16,<0.19",
            priority=-100,  # inside of whoever decides when the shared expert runs
        ),
    ),
    requires=Requires(versions={"megatron-core": ">=0.16,<0.19"}),
    conflicts=(
        Conflict("moe-alltoall-overlap-comm", _MOVES_SHARED),
        Conflict("moe-batch-overlap", _MOVES_SHARED),
        Conflict("moe-fb-overlap", _MOVES_SHARED),
        Conflict("swap-attention", "that one brings tensors back for one stream; omit one of them"),
        Conflict("fsdp2", "that one frees a layer's weights when one stream is done; omit one of them"),
    ),
    validate=configuration.validate(check_streams),
    on_finalize=f"{_IMPL}.side:say_how_many",
    doc="two-streams.md",
)
FEATURES = (FEATURE,)
