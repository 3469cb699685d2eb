"""DSA in Megatron: module paths, published models, and helpers for feature declarations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from packaging.specifiers import SpecifierSet

from mindspeed_dsa.context_parallel.padding import Padding
from mindspeed_dsa.feature import Flag
from mindspeed_dsa.megatron.selections import Sharing

if TYPE_CHECKING:
    from typing_extensions import Self

DSA = "megatron.core.transformer.experimental_attention_variant.dsa"
MLA = "megatron.core.transformer.multi_latent_attention"
SPECS = "megatron.core.models.gpt.experimental_attention_variant_module_specs"

SIZES = {"dsa_indexer_n_heads": 64, "dsa_indexer_head_dim": 128, "dsa_indexer_topk": 2048}
"""Size arguments that a DSA model needs, with DeepSeek-V3.2's values."""
_DEEPSEEK: dict[str, Any] = {
    "dsa_indexer_topk_freq": 1,
    "dsa_indexer_skip_topk_offset": 0,
    "dsa_indexer_topk_pattern": None,
    "dsa_indexer_rope_first": True,
    "dsa_indexer_rope_interleaved": False,
    "dsa_indexer_normalised_query": True,
    "dsa_indexer_rotate_activation": True,
    "dsa_indexer_scoring_relu": True,
    "dsa_indexer_k_norm_epsilon": 1e-6,
}
_GLM = _DEEPSEEK | {"dsa_indexer_rope_interleaved": True, "dsa_indexer_rotate_activation": False}
_GLM_SHARED = _GLM | {"dsa_indexer_topk_freq": 4, "dsa_indexer_skip_topk_offset": 3}
_GLM_SIZES = SIZES | {"dsa_indexer_n_heads": 32}
MODELS: dict[str, dict[str, Any]] = {
    "deepseek-v3.2": _DEEPSEEK,
    "glm-5": _GLM,
    "glm-5.1": _GLM,
    "glm-5.2": _GLM_SHARED,
    "glm-5.3": _GLM_SHARED,
}
"""Indexer configuration by model, from the publisher's code and configuration."""
MODEL_SIZES = {
    "deepseek-v3.2": SIZES,
    "glm-5": _GLM_SIZES,
    "glm-5.1": _GLM_SIZES,
    "glm-5.2": _GLM_SIZES,
    "glm-5.3": _GLM_SIZES,
}
"""Indexer sizes by model, for jobs that set none."""
OWN_LOOP = ">=0.16,<0.19"
"""Releases whose DSA is one class without kernel backends and shared selections."""
KERNELS = ">=0.19,<0.21"
"""Releases whose DSA has kernel backends, context parallelism and shared selections."""


def rotates_first(release: str | None) -> bool:
    """Return whether a release's own indexer applies RoPE to its first dimensions and uses the normed query.

    Releases since 0.19 do both without an argument, like DeepSeek's and GLM's code.

    Args:
        release: release of Megatron-core, ``None`` if not installed.
    """
    return release is not None and release in SpecifierSet(">=0.19.dev0", prereleases=True)


def megatron_flag(name: str, type: Callable[[str], Any] = str) -> Flag:
    """Declare one of Megatron's own flags that a check reads."""
    return Flag(name, "Megatron's own flag.", kind="value", type=type, megatron=True)


STAGES = ("dense", "warmup", "sparse", "frozen")
"""Stages of the indexer's training, in the order in which a job runs them."""


def uses_dsa(settings: Any) -> bool:
    """Return whether settings, arguments or a model's configuration describe a DSA model."""
    return getattr(settings, "experimental_attention_variant", None) == "dsa"


PRECISIONS = ("full", "fp8", "fp8-plain")
"""Precision of key selection: ``full`` uses the projected tensors; the others quantise to FP8 like inference
engines, with power-of-two scales (``fp8``) or plain scales (``fp8-plain``)."""

PARTS = (
    "use_dsa_absorb",
    "use_fused_lightning_indexer",
    "use_fused_sparse_flash_attention",
    "use_fused_lightning_indexer_kl_loss",
)
"""Flags that ``--use-fused-dsa`` enables; each can also be set individually.

The first one also accepts :data:`~mindspeed_dsa.feature.AUTO`, its value under ``--use-fused-dsa`` only.
"""


OWN, SERVED = "own", "served"
LOSS_LAYERS = (OWN, SERVED, "served-sum")
"""Layers whose attention an indexer learns: its own, or the mean or sum of all that it serves."""


@dataclass(frozen=True)
class Options:
    """Options of DSA's attention path.

    Attributes:
        absorb: whether MLA's absorbed form (attention over latents) may be used.
        absorb_always: whether the absorbed form is used for every sequence length.
        stage: stage of the indexer's training, one of :data:`STAGES`.
        padding: padding of sequences whose length is no multiple of the number of context parallel ranks.
        precision: precision of key selection, one of :data:`PRECISIONS`.
        loss_layers: layers whose attention an indexer learns, one of :data:`LOSS_LAYERS`.
    """

    absorb: bool
    absorb_always: bool
    indexer: bool
    attention: bool
    kl_loss: bool
    backend: str
    stage: str
    fuse_kl_in_backward: bool
    cp_block_rows: int
    keep_gathered: bool
    padding: Padding = field(default_factory=Padding)
    precision: str = "full"
    loss_layers: str = OWN

    @property
    def any(self) -> bool:
        """Whether these options replace any step of Megatron's DSA attention."""
        return self.any_part or self.attends_densely

    @property
    def any_part(self) -> bool:
        """Whether any of our operators is enabled."""
        return self.absorb or self.indexer or self.attention or self.kl_loss

    @property
    def warmup(self) -> bool:
        """Whether only the indexers learn, with dense attention in all layers."""
        return self.stage == "warmup"

    @property
    def attends_densely(self) -> bool:
        """Whether attention covers all visible keys, regardless of the indexer."""
        return self.stage in ("dense", "warmup")

    @property
    def all_ours(self) -> bool:
        """Whether indexer, attention and KL loss all run our operators."""
        return self.indexer and self.attention and self.kl_loss

    @property
    def learns_served(self) -> bool:
        """Whether indexers also learn the attention of other layers that attend to the selected keys."""
        return self.loss_layers != OWN

    @classmethod
    def of(cls, settings: Any) -> Self:
        """Build the options from resolved settings or a job's arguments; a missing flag is off."""
        everything = bool(getattr(settings, "use_fused_dsa", False))
        switches = [getattr(settings, part, None) for part in PARTS]
        # A part that is not set individually follows --use-fused-dsa.
        absorb, indexer, attention, kl_loss = (everything if one is None else bool(one) for one in switches)
        return cls(
            absorb=absorb,
            absorb_always=switches[0] is True,  # "auto" and None are not True
            indexer=indexer,
            attention=attention,
            kl_loss=kl_loss,
            backend=getattr(settings, "dsa_backend", None) or "auto",
            stage=getattr(settings, "dsa_stage", None) or "sparse",
            fuse_kl_in_backward=bool(getattr(settings, "dsa_fuse_kl_in_backward", False)),
            cp_block_rows=getattr(settings, "cp_block_rows", None) or 0,
            keep_gathered=bool(getattr(settings, "cp_keep_gathered", False)),
            padding=Padding.of(settings),
            precision=getattr(settings, "dsa_indexer_precision", None) or "full",
            loss_layers=getattr(settings, "dsa_indexer_loss_layers", None) or OWN,
        )


def fused_wanted(settings: Any) -> bool:
    """Return whether any DSA option is set, including options without effect on their own."""
    chosen = Options.of(settings)
    return chosen.any or chosen.fuse_kl_in_backward or chosen.precision != "full" or chosen.learns_served


def absorb_wanted(settings: Any) -> bool:
    """Return whether the absorbed form is on, with or without our other operators."""
    return Options.of(settings).absorb


def shares_keys(config: Any, chosen: Options) -> bool:
    """Return whether our code, not Megatron's, all-gathers keys over context parallel ranks.

    Args:
        config: Megatron's configuration of the model.
        chosen: options of DSA.
    """
    # Dense attention uses Megatron's code, which gathers by itself; it has no losses of layers that share.
    is_ours = not chosen.attends_densely or (chosen.learns_served and Sharing.of(config).is_on)
    return chosen.all_ours and uses_dsa(config) and is_ours
