"""Feature for ``--moe-permute-fusion`` without Transformer Engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from mindspeed_dsa.feature import Feature, Flag, Megatron, Requires
from mindspeed_dsa.megatron.configuration import argument
from mindspeed_dsa.patches.spec import Patch


@dataclass(frozen=True)
class Options:
    """Options of ``--moe-permute-fusion``.

    Attributes:
        backend: operator backend; ``auto`` keeps Transformer Engine's kernels where they are installed.
    """

    backend: str

    @classmethod
    def of(cls, settings: Any) -> Options:
        """Build from resolved settings, or from arguments."""
        return cls(backend=getattr(settings, "moe_permute_backend", None) or "auto")

    @property
    def may_leave_it(self) -> bool:
        """Return whether the settings allow Transformer Engine's kernels."""
        return self.backend == "auto"

    def leaves_it_to_transformer_engine(self, megatron: Megatron) -> bool:
        """Return whether to use Transformer Engine's kernels: allowed and installed."""
        if not self.may_leave_it or find_spec("transformer_engine") is None:
            return False
        try:
            extension = megatron("core.extensions.transformer_engine")
        except ImportError:
            return False
        return getattr(extension, "fused_unpermute", None) is not None


_FLAG = "--moe-permute-fusion"


def check_permute_fusion(args: Any, options: Options) -> Iterator[str]:
    """Yield a problem for each argument or field that is incompatible with the feature."""
    if options.may_leave_it and find_spec("transformer_engine") is not None:
        return
    if argument(args, "moe_token_dispatcher_type") == "flex":
        yield (
            f"{_FLAG} serves the dispatchers alltoall and allgather, and flex permutes for its own kernels; "
            "use --moe-token-dispatcher-type alltoall, or omit the flag"
        )


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
"""Functions that Megatron imports into ``moe_utils`` from Transformer Engine."""

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
                f"{_IMPL}.permutation:{name}",
                "defines what Megatron's configuration asks for, as Transformer Engine would",
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
            "computes Megatron's fused form without Transformer Engine",
            params=("tokens", "routing_map", "probs", "num_out_tokens", "fused"),
            versions=_RANGE,
        ),
        Patch(
            f"{_UTILS}:unpermute",
            "wrap",
            f"{_IMPL}.permutation:unpermute_fused",
            "computes Megatron's fused form without Transformer Engine, and adds the shared expert's output",
            params=("permuted_tokens", "sorted_indices", "restore_shape", "probs", "fused"),
            versions=_RANGE,
        ),
        Patch(
            f"{_UTILS}:sort_chunks_by_idxs",
            "wrap",
            f"{_IMPL}.permutation:sort_chunks_fused",
            "computes Megatron's fused form without Transformer Engine",
            params=("input", "split_sizes", "sorted_idxs", "probs", "fused"),
            versions=_RANGE,
        ),
        Patch(
            f"{_LAYER}.postprocess",
            "wrap",
            f"{_IMPL}.permutation:add_while_unpermuting",
            "offers the shared expert's output to the unpermutation, which Megatron adds in another pass",
            params=("output", "shared_expert_output"),
            versions=">=0.16,<0.21",
        ),
        Patch(
            f"{_LAYER}.combine",
            "wrap",
            f"{_IMPL}.permutation:add_while_unpermuting",
            "offers the shared expert's output to the unpermutation, which Megatron adds in another pass",
            params=("output", "shared_expert_output"),
            versions=">=0.13,<0.16",
        ),
    ),
    requires=Requires(versions={"megatron-core": _RANGE}),
    options=Options.of,
    check=check_permute_fusion,
    doc="moe-permute-fusion.md",
)
