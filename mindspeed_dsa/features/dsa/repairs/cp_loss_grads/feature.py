"""The indexer's gradients do not grow with the context parallel size."""

from __future__ import annotations

from mindspeed_dsa.megatron.dsa import DSA, dsa_repair
from mindspeed_dsa.patches.spec import Patch

_HERE = "mindspeed_dsa.features.dsa.repairs.cp_loss_grads"

_KERNELS = f"{DSA.rpartition('.')[0]}.dsa_kernels"
_IMPL = f"{_HERE}.shares"
_RELEASES = ">=0.19,<0.21"

FEATURE = dsa_repair(
    "dsa-cp-loss-grads",
    summary="Divides the indexer loss's gradient by the context parallel size that Megatron has put into it.",
    switch_help="Give the indexer the gradients of one context parallel rank.",
    patches=(
        Patch(
            f"{DSA}:FusedDSAIndexerLoss.backward",
            "wrap",
            f"{_IMPL}:start_with_share",
            "a mean over a rank's own rows meets a scale that holds the number of ranks",
            params=("ctx", "grad_topk_indices", "grad_loss"),
            versions=_RELEASES,
        ),
        Patch(
            f"{_KERNELS}:run_fused_dsa_attention",
            "wrap",
            f"{_IMPL}:share_of_kernels",
            "the same, for losses of kernel backends",
            versions=_RELEASES,
        ),
        Patch(
            f"{_KERNELS}:run_fused_qk_topk_with_loss",
            "wrap",
            f"{_IMPL}:share_of_kernels",
            "the same, for losses of kernel backends",
            versions=_RELEASES,
        ),
    ),
)
