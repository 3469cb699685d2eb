"""``--moe-permute-fusion`` without Transformer Engine."""

from __future__ import annotations

from mindspeed_dsa.feature import Feature, Flag, Requires
from mindspeed_dsa.features.moe.permute_fusion.options import Options
from mindspeed_dsa.features.moe.permute_fusion.validation import check_permute_fusion
from mindspeed_dsa.megatron import configuration
from mindspeed_dsa.patches.spec import Patch

_IMPL = "mindspeed_dsa.features.moe.permute_fusion"
_UTILS = "megatron.core.transformer.moe.moe_utils"
_LAYER = "megatron.core.transformer.moe.moe_layer:MoELayer"
_RANGE = ">=0.12.1,<0.21"
NAMES = (
    "fused_permute",
    "fused_permute_with_probs",
    "fused_sort_chunks_by_index",
    "fused_sort_chunks_by_index_with_probs",
    "fused_unpermute",
)
"""What Megatron's configuration looks for in ``moe_utils``, where Transformer Engine has put it or nobody."""

FEATURE = Feature(
    name="moe-permute-fusion",
    summary="Permutes tokens by expert with gathers instead of scatter-add, and adds the shared expert's "
    "output in the same pass; without Transformer Engine.",
    flags=(
        Flag(
            "--moe-permute-fusion",
            "Megatron's own flag: permute tokens with fused operators.",
            megatron=True,
        ),
        Flag(
            "--moe-permute-backend",
            "Implementation of --moe-permute-fusion; 'auto' leaves it to Transformer Engine where that is "
            "installed, and selects the best one for the device elsewhere; a named one that cannot run is an "
            "error.",
            kind="value",
            default="auto",
            choices=("auto", "reference", "cpu", "triton", "npu"),
        ),
    ),
    patches=(
        *(
            Patch(
                f"{_UTILS}:__dict__",
                "entry",
                f"{_IMPL}.kernels:{name}",
                "the configuration refuses the flag unless Transformer Engine has put this name there",
                versions=_RANGE,
                key=name,
                factory=True,
            )
            for name in NAMES
        ),
        Patch(
            f"{_UTILS}:permute",
            "wrap",
            f"{_IMPL}.permutation:permute_fused",
            "the fused form asks for Transformer Engine",
            params=("tokens", "routing_map", "probs", "num_out_tokens", "fused"),
            versions=_RANGE,
        ),
        Patch(
            f"{_UTILS}:unpermute",
            "wrap",
            f"{_IMPL}.permutation:unpermute_fused",
            "the fused form asks for Transformer Engine, and has no place for the shared expert's output",
            params=("permuted_tokens", "sorted_indices", "restore_shape", "probs", "fused"),
            versions=_RANGE,
        ),
        Patch(
            f"{_UTILS}:sort_chunks_by_idxs",
            "wrap",
            f"{_IMPL}.permutation:sort_chunks_fused",
            "the fused form asks for Transformer Engine",
            params=("input", "split_sizes", "sorted_idxs", "probs", "fused"),
            versions=_RANGE,
        ),
        Patch(
            f"{_LAYER}.postprocess",
            "wrap",
            f"{_IMPL}.permutation:add_while_unpermuting",
            "the shared expert's output is added in a pass of its own",
            params=("output", "shared_expert_output"),
            versions=">=0.16,<0.21",
        ),
        Patch(
            f"{_LAYER}.combine",
            "wrap",
            f"{_IMPL}.permutation:add_while_unpermuting",
            "the shared expert's output is added in a pass of its own",
            params=("output", "shared_expert_output"),
            versions=">=0.13,<0.16",
        ),
    ),
    requires=Requires(versions={"megatron-core": _RANGE}),
    options=Options.of,
    validate=configuration.validate(check_permute_fusion, Options.of),
    doc="moe-permute-fusion.md",
)
FEATURES = (FEATURE,)
