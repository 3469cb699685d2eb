"""List of the repairs of Megatron's DSA: their patches, and the releases that need them.

Wrappers of the same function nest in the order of this file: specs, inputs, losses, recomputation, gradients.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mindspeed_dsa.megatron import optimizer, without_engine
from mindspeed_dsa.megatron.dsa import DSA, KERNELS, MLA, OWN_LOOP, SPECS
from mindspeed_dsa.patches.spec import Patch

_HERE = "mindspeed_dsa.features.dsa.repairs"
_ANY = ">=0.16,<0.21"
_KERNELS = f"{DSA.rpartition('.')[0]}.dsa_kernels"


@dataclass(frozen=True)
class Repair:
    """Repair of one bug in Megatron's DSA.

    Attributes:
        name: name for ``--no-dsa-repairs``.
        fault: description of the bug.
        symptom: effect of the bug on a job.
        patches: patches; their ``versions`` exclude releases without the bug.
    """

    name: str
    fault: str
    symptom: str
    patches: tuple[Patch, ...]


# -- model specs -------------------------------------------------------------------------------


LOCAL_PROVIDER = Repair(
    "local-provider",
    "the DSA specification can only be built from Transformer Engine's modules",
    "`--transformer-impl local` fails while the model is built",
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


SPEC_DISPATCH = Repair(
    "spec-dispatch",
    "0.16 and 0.17 cannot select DSA, and MTP layers get a dense core attention",
    "`Invalid experimental attention variant: dsa`; MTP fails in its first forward",
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


HADAMARD = Repair(
    "hadamard",
    "the indexer's rotation needs a CUDA package and bfloat16",
    "an assertion on CPUs, NPUs and in other dtypes",
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

LOSS_GATE = Repair(
    "loss-gate",
    "the indexer loss is computed at coefficient 0 and crashes at None; from 0.19 on indexers then get no "
    "gradient",
    "memory and time for a loss that does not count; overlapped gradient reduction fails",
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

LOSS_SCALE = Repair(
    "loss-scale",
    "the scale of the indexer loss's gradient is never set",
    "the gradient grows with the number of microbatches and lacks the loss scale of fp16",
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

LOSS_TRACKER = Repair(
    "loss-tracker",
    "the log's tracker is allocated on the CUDA device, counts layers without an indexer, and waits for "
    "stages that report nothing",
    "an error on other devices, a logged mean that is wrong, a job that hangs",
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

CP_LOSS_GRADS = Repair(
    "cp-loss-grads",
    "a context parallel rank's loss is a mean over its own query tokens, under a scale that holds the number "
    "of ranks",
    "the indexer's gradient is N times too large on N ranks",
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


# -- recomputation -----------------------------------------------------------------------------

CORE_ATTENTION_RECOMPUTE = Repair(
    "core-attention-recompute",
    "latent attention's recomputation does not pass the indexer's inputs",
    "`--recompute-modules core_attn` fails in the first forward",
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
            priority=100,  # outside all wrappers that change the forward
        ),
    ),
)


# -- gradients under tensor parallelism --------------------------------------------------------

INDEXER_TP_GRADS = Repair(
    "indexer-tp-grads",
    "each tensor parallel rank has the indexer's full gradient, and sequence parallelism sums these copies",
    "the indexer's gradient is N times too large on N ranks",
    patches=(
        Patch(
            f"{DSA}:DSAIndexer.__init__",
            "wrap",
            f"{_HERE}.backward:average_over_tensor_parallel_ranks",
            "every rank computes the indexer's full gradient, and sequence parallelism sums these copies",
            versions=OWN_LOOP,
        ),
        Patch(
            "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel.__init__",
            "wrap",
            f"{_HERE}.backward:reduce_adapters",
            "adapters (LoRA) of an indexer lack the marks by which its weights' gradients are reduced",
            versions=_ANY,
        ),
    ),
)

ROTARY_KEY_TP_GRADS = Repair(
    "rotary-key-tp-grads",
    "without sequence parallelism a rank keeps the rotary key's gradient of its own heads only",
    "wrong gradients of the down projection and of all layers below; copies drift apart",
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

# -- adapters (LoRA) -------------------------------------------------------------------------------

ABSORBED_ADAPTERS = Repair(
    "absorbed-adapters",
    "absorbed MLA reads the weight of the key-value up-projection, without an adapter on it",
    "LoRA on `linear_kv_up_proj` has no effect and no gradient (PEFT), or fails (Megatron-Bridge)",
    patches=(
        Patch(
            "megatron.core.transformer.experimental_attention_variant.absorbed_mla:"
            "AbsorbedMLASelfAttention._get_kv_up_weights",
            "wrap",
            f"{_HERE}.backward:fold_adapters",
            "Megatron's absorbed MLA leaves out adapters (LoRA) of the up-projection",
            versions=KERNELS,
        ),
    ),
)

# -- saved optimizer state ----------------------------------------------------------------------

PADDED_BUCKETS = Repair(
    "padded-buckets",
    "the distributed optimizer cuts buffers with several padded buckets at wrong places for the format "
    "fully_reshardable",
    "wrong moments and master weights after a resume, without an error",
    patches=(
        Patch(
            f"{optimizer.DISTRIBUTED}.sharded_param_state_fully_reshardable",
            "wrap",
            f"{_HERE}.backward:cut_without_padding",
            "Megatron saves wrong moments and master weights of buffers with several padded buckets",
            versions=">=0.15,<0.20",
        ),
    ),
)

REPAIRS = (
    LOCAL_PROVIDER,
    SPEC_DISPATCH,
    HADAMARD,
    LOSS_GATE,
    LOSS_SCALE,
    LOSS_TRACKER,
    CP_LOSS_GRADS,
    CORE_ATTENTION_RECOMPUTE,
    INDEXER_TP_GRADS,
    ROTARY_KEY_TP_GRADS,
    ABSORBED_ADAPTERS,
    PADDED_BUCKETS,
)
