"""Repairs of Megatron's own DSA.

Each repair is on where the model uses DSA, unless its switch says otherwise, in the releases that have the
defect. Wrappers of one target nest in the order of this page: what is built, its inputs, its loss, what is
recomputed, its gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

from packaging.specifiers import SpecifierSet

from mindspeed_dsa.megatron import without_engine
from mindspeed_dsa.megatron.configuration import argument
from mindspeed_dsa.megatron.dsa import (
    DSA,
    KERNELS,
    MLA,
    OWN_LOOP,
    SIZES,
    SPECS,
    dsa_repair,
    megatron_flag,
    uses_dsa,
)
from mindspeed_dsa.patches import versions
from mindspeed_dsa.patches.spec import Patch

_HERE = "mindspeed_dsa.features.dsa.repairs"
_ANY = ">=0.16,<0.21"
_KERNELS = f"{DSA.rpartition('.')[0]}.dsa_kernels"


# -- what is built -----------------------------------------------------------------------------


@dataclass(frozen=True)
class ProviderOptions:
    """Facts that the provider of local modules needs.

    Attributes:
        groups_experts: Megatron's own provider has experts for ``--moe-grouped-gemm``.
    """

    groups_experts: bool

    @classmethod
    def of(cls, settings: Any) -> ProviderOptions:
        """Build from resolved settings."""
        return cls(groups_experts="moe-grouped-gemm" in getattr(settings, "features_on", ()))


def check_transformer_engine(args: Any, options: Any) -> Sequence[str]:
    """Report a missing Transformer Engine, which Megatron's default implementation needs."""
    if getattr(args, "transformer_impl", None) != "transformer_engine" or find_spec("transformer_engine"):
        return ()
    problem = (
        "--transformer-impl transformer_engine (Megatron's default) needs Transformer Engine, which is not "
        "installed; add --transformer-impl local"
    )
    return (problem,)


LOCAL_PROVIDER = dsa_repair(
    "dsa-local-provider",
    summary="Builds MLA + DSA + MoE from Megatron's own layers, without Transformer Engine.",
    switch_help="Support --transformer-impl local for DSA models.",
    check=check_transformer_engine,
    options=ProviderOptions.of,
    megatron_flags=(megatron_flag("--transformer-impl"),),
    patches=(
        Patch(
            f"{SPECS}:_get_backend_spec_provider",
            "wrap",
            f"{_HERE}.specs:provide_local_modules",
            "Megatron's spec functions of DSA require Transformer Engine",
            params=("config",),
            versions=_ANY,
        ),
        Patch(
            f"{MLA}:__dict__",
            "entry",
            f"{_HERE}.specs:full_copy_linear",
            "MLA accepts a replicated down projection only under the name Linear",
            versions=_ANY,
            key="Linear",
            factory=True,
        ),
        Patch(
            "megatron.core.transformer.experimental_attention_variant.absorbed_mla:__dict__",
            "entry",
            f"{_HERE}.specs:full_copy_linear",
            "absorbed MLA accepts a replicated down projection only under the name Linear",
            versions=KERNELS,
            key="Linear",
            factory=True,
        ),
        without_engine.MLA_ENGINE,
        without_engine.ROUTER,
        replace(without_engine.NORMS, versions=">=0.12.1,<0.21"),
    ),
)


def check_dsa_model(args: Any, options: Any) -> Sequence[str]:
    """Report missing sizes and options that Megatron's DSA does not support; absent ones are not checked."""
    if argument(args, "experimental_attention_variant") != "dsa":
        return ()
    problems = [
        f"DSA needs --{name.replace('_', '-')}; DeepSeek-V3.2 has {usual}"
        for name, usual in SIZES.items()
        if getattr(args, name, usual) is None
    ]
    if not getattr(args, "multi_latent_attention", True):
        problems.append("DSA is built on latent attention; add --multi-latent-attention")
    head, rotary = argument(args, "dsa_indexer_head_dim"), argument(args, "qk_pos_emb_head_dim")
    if head is not None and rotary is not None and head < rotary:
        problems.append(
            f"--dsa-indexer-head-dim {head} has no room for the --qk-pos-emb-head-dim {rotary} in "
            "it; make it at least as large"
        )
    return problems


def keep_rope_unfused(args: Any) -> Sequence[str]:
    """Switch off ``apply_rope_fusion``, which Megatron's DSA lacks before 0.19; ``Feature.rewrite``.

    Megatron's default is true, so a job that leaves it has not asked for it; the results are the same.
    """
    release = versions.of_megatron(getattr(args, "megatron_root", "megatron"))
    lacks_it = release is not None and release in SpecifierSet("<0.19", prereleases=True)
    if not (lacks_it and uses_dsa(args) and argument(args, "apply_rope_fusion")):
        return ()
    args.apply_rope_fusion = False
    return (
        f"apply_rope_fusion is False (--no-rope-fusion): DSA has no fused RoPE in Megatron-core {release}",
    )


SPEC_DISPATCH = dsa_repair(
    "dsa-spec-dispatch",
    summary="Makes --experimental-attention-variant dsa build a model.",
    switch_help="Let Megatron's spec functions build DSA layers.",
    check=check_dsa_model,
    rewrite=keep_rope_unfused,
    patches=(
        Patch(
            f"{SPECS}:get_experimental_attention_variant_module_spec",
            "wrap",
            f"{_HERE}.specs:dispatch_dsa",
            "the dispatcher rejects 'dsa', and the DSA spec lacks an attribute that the block builder reads",
            params=("config", "backend"),
            versions=">=0.16,<0.18",
        ),
        Patch(
            "megatron.core.models.gpt.gpt_layer_specs:get_gpt_decoder_layer_specs",
            "wrap",
            f"{_HERE}.specs:layer_specs_with_dsa",
            "MTP layers get a core attention that fails on the inputs of DSA, and from 0.19 on none",
            params=("config",),
            versions=_ANY,
        ),
    ),
)


# -- inputs of the indexer ---------------------------------------------------------------------


def check_head_dim(args: Any, options: Any) -> Sequence[str]:
    """Report a head size that is not a power of two, where heads are rotated."""
    size = getattr(args, "dsa_indexer_head_dim", None)
    if size is None or (size > 0 and size & (size - 1) == 0):
        return ()
    if argument(args, "dsa_indexer_rotate_activation") is False:
        return ()
    problem = (
        f"--dsa-indexer-head-dim {size}: the Hadamard rotation needs a power of two; use 64 or 128, or add "
        "--no-dsa-indexer-rotate-activation"
    )
    return (problem,)


HADAMARD = dsa_repair(
    "dsa-hadamard",
    summary="Rotates indexer queries and keys on any device and in any float type.",
    switch_help="Rotate in plain PyTorch where fast_hadamard_transform is missing or does not apply.",
    check=check_head_dim,
    megatron_flags=(megatron_flag("--dsa-indexer-head-dim", int),),
    patches=(
        Patch(
            f"{DSA}:rotate_activation",
            "wrap",
            f"{_HERE}.indexer:rotate_anywhere",
            "Megatron's Hadamard rotation asserts bfloat16 and a package for CUDA only",
            params=("x",),
            versions=_ANY,
        ),
    ),
)


# -- indexer loss ------------------------------------------------------------------------------

LOSS_GATE = dsa_repair(
    "dsa-loss-gate",
    summary="Skips the indexer loss if its coefficient is 0 or None, and in evaluation; the indexer's "
    "gradients are then zeros, so that overlapped gradient reduction completes.",
    switch_help="Skip the indexer loss where it is not used.",
    patches=(
        Patch(
            f"{DSA}:DSAttention.forward",
            "wrap",
            f"{_HERE}.loss:skip_unwanted_loss",
            "Megatron computes the indexer loss at coefficient 0, and crashes without a coefficient",
            versions=OWN_LOOP,
        ),
        Patch(
            f"{DSA}:DSAIndexer.forward_with_scores",
            "wrap",
            f"{_HERE}.loss:score_without_graph",
            "the graph of the indexer's scores is built and kept although it is not used",
            versions=OWN_LOOP,
        ),
        Patch(
            f"{DSA}:DSAttention.forward",
            "wrap",
            f"{_HERE}.loss:keep_indexer_gradients",
            "without the loss the indexer gets no gradients, and overlapped reduction waits for them",
            versions=KERNELS,
        ),
    ),
)

LOSS_SCALE = dsa_repair(
    "dsa-loss-scale",
    summary="Scales the indexer loss like the main loss: microbatches, context parallel size, fp16 scale, "
    "per-token loss.",
    switch_help="Scale the indexer loss's gradient like the main loss's.",
    patches=(
        Patch(
            "megatron.core.pipeline_parallel.schedules:forward_step_calc_loss",
            "wrap",
            f"{_HERE}.loss:set_indexer_loss_scale",
            "Megatron never sets the indexer loss's scale: gradients grow with the number of microbatches "
            "and lack the fp16 scale",
            params=("config", "num_microbatches", "cp_group_size"),
            versions=">=0.14,<0.19",
        ),
        Patch(
            "megatron.core.pipeline_parallel.schedules:forward_step",
            "wrap",
            f"{_HERE}.loss:set_indexer_loss_scale",
            "this release computes the loss in forward_step, and never sets the indexer loss's scale there",
            params=("config", "num_microbatches"),
            versions=">=0.12.1,<0.14",
        ),
        Patch(
            f"{DSA}:DSAIndexerLossAutoScaler.backward",
            "wrap",
            f"{_HERE}.loss:weigh_by_tokens",
            "with --calculate-per-token-loss gradients are divided by the number of tokens at the end",
            params=("ctx", "grad_output"),
            versions=OWN_LOOP,
        ),
    ),
)

_HELPER = f"{DSA}:DSAIndexerLossLoggingHelper"

LOSS_TRACKER = dsa_repair(
    "dsa-loss-tracker",
    summary="Logs the indexer loss on any device, with MTP layers, and with stages that have no DSA layer.",
    switch_help="Track the indexer loss for logging with this library's tracker.",
    patches=(
        Patch(
            f"{_HELPER}.save_loss_to_tracker",
            "replace",
            f"{_HERE}.loss:save_loss",
            "Megatron's tracker allocates on the CUDA device, and MTP layers write past its end",
            params=("loss", "layer_number", "num_layers", "reduce_group", "avg_group"),
            versions=_ANY,
            factory=True,
        ),
        Patch(
            f"{_HELPER}.clean_loss_in_tracker",
            "replace",
            f"{_HERE}.loss:clean_loss",
            "Megatron's tracker does not know which layers have reported, which a new step resets",
            versions=_ANY,
            factory=True,
        ),
        Patch(
            f"{_HELPER}.reduce_loss_in_tracker",
            "replace",
            f"{_HERE}.loss:reduce_loss",
            "a pipeline rank that has nothing to report leaves the others hanging",
            versions=_ANY,
            factory=True,
        ),
        Patch(
            f"{_HELPER}.track_indexer_metrics",
            "replace",
            f"{_HERE}.loss:track_metrics",
            "Megatron averages over all layers, those without an indexer included",
            params=(
                "loss_scale",
                "iteration",
                "writer",
                "wandb_writer",
                "total_loss_dict",
                "per_layer_logging",
            ),
            versions=_ANY,
            factory=True,
        ),
        Patch(
            "megatron.core.parallel_state:destroy_model_parallel",
            "wrap",
            "mindspeed_dsa.features.dsa.indexer_loss:forget_losses",
            "a step that failed leaves losses, and groups that are gone, to the next job of the process",
            versions=_ANY,
        ),
        Patch(
            "megatron.core.transformer.multi_token_prediction:MultiTokenPredictionLayer.__init__",
            "wrap",
            f"{_HERE}.loss:number_after_decoder",
            "layers of multi-token prediction are numbered from 1 again, and add to the decoder's losses",
            params=("config",),
            versions=">=0.17,<0.21",
        ),
    ),
)

CP_LOSS_GRADS = dsa_repair(
    "dsa-cp-loss-grads",
    summary="Divides the indexer loss's gradient by the context parallel size that Megatron has put into it.",
    switch_help="Give the indexer the gradients of one context parallel rank.",
    patches=(
        Patch(
            f"{DSA}:FusedDSAIndexerLoss.backward",
            "wrap",
            f"{_HERE}.loss:start_with_share",
            "the indexer loss is a mean over a rank's own rows, and its scale holds the number of ranks",
            params=("ctx", "grad_topk_indices", "grad_loss"),
            versions=KERNELS,
        ),
        *(
            Patch(
                f"{_KERNELS}:{name}",
                "wrap",
                f"{_HERE}.loss:share_of_kernels",
                "losses of kernel backends are means over a rank's own rows, and their scale holds the "
                "number of ranks",
                versions=KERNELS,
            )
            for name in ("run_fused_dsa_attention", "run_fused_qk_topk_with_loss")
        ),
    ),
)


# -- what is recomputed ------------------------------------------------------------------------

CORE_ATTENTION_RECOMPUTE = dsa_repair(
    "dsa-core-attention-recompute",
    summary="Makes --recompute-granularity selective with core_attn work for DSA layers.",
    switch_help="Recompute DSA core attention when selective recomputation of core_attn is requested.",
    patches=(
        Patch(
            f"{MLA}:MLASelfAttention.__init__",
            "wrap",
            f"{_HERE}.backward:leave_recompute_to_dsa",
            "MLA's own checkpointed path does not pass the indexer's inputs and fails",
            versions=OWN_LOOP,
        ),
        Patch(
            f"{DSA}:DSAttention.forward",
            "wrap",
            f"{_HERE}.backward:recompute_in_backward",
            "DSA's core attention is recomputed together with its indexer",
            params=("query", "key", "value", "attention_mask", "x", "qr"),
            versions=OWN_LOOP,
            priority=100,  # outside all wrappers that change what the forward does
        ),
    ),
)


# -- gradients under tensor parallelism --------------------------------------------------------

INDEXER_TP_GRADS = dsa_repair(
    "dsa-indexer-tp-grads",
    summary="Averages the indexer's gradients over tensor parallel ranks instead of summing them.",
    switch_help="Average the indexer's gradients over tensor parallel ranks.",
    patches=(
        Patch(
            f"{DSA}:DSAIndexer.__init__",
            "wrap",
            f"{_HERE}.backward:average_over_tensor_parallel_ranks",
            "every rank computes the indexer's full gradient, and sequence parallelism sums these copies",
            versions=OWN_LOOP,
        ),
    ),
)

ROTARY_KEY_TP_GRADS = dsa_repair(
    "dsa-rotary-key-tp-grads",
    summary="Sums the rotary key's gradient over tensor parallel ranks where Megatron does not.",
    switch_help="Sum the rotary key's gradient over tensor parallel ranks where Megatron does not.",
    patches=(
        Patch(
            f"{MLA}:MLASelfAttention.__init__",
            "wrap",
            f"{_HERE}.backward:sum_rotary_key_gradients",
            "each rank keeps the rotary key's gradient of its own heads only, and the copies drift apart",
            versions=OWN_LOOP,
        ),
    ),
)
