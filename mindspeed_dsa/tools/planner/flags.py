"""The planner's parser for a job's flags, built from the record of Megatron-LM's flags."""

from __future__ import annotations

import argparse
import difflib
import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from packaging.version import Version

from mindspeed_dsa import settings
from mindspeed_dsa.feature import Flag
from mindspeed_dsa.features import everything
from mindspeed_dsa.megatron.batches import SCHEDULE
from mindspeed_dsa.patches.errors import SettingsError
from mindspeed_dsa.tools.migrate import megatron_flags

# Flags with a number of at least 1.
SIZES = (
    "num-layers",
    "hidden-size",
    "ffn-hidden-size",
    "num-attention-heads",
    "kv-channels",
    "num-query-groups",
    "seq-length",
    "max-position-embeddings",
    "vocab-size",
    "padded-vocab-size",
    "make-vocab-size-divisible-by",
    "kv-lora-rank",
    "qk-head-dim",
    "qk-pos-emb-head-dim",
    "v-head-dim",
    "dsa-indexer-n-heads",
    "dsa-indexer-head-dim",
    "dsa-indexer-topk",
    "moe-ffn-hidden-size",
    "moe-router-topk",
    "micro-batch-size",
    "global-batch-size",
    "tensor-model-parallel-size",
    "pipeline-model-parallel-size",
    "num-layers-per-virtual-pipeline-stage",
    "num-virtual-stages-per-pipeline-rank",
    "microbatch-group-size-per-virtual-pipeline-stage",
    "context-parallel-size",
    "expert-model-parallel-size",
    "expert-tensor-parallel-size",
)
# Flags with a number that may be 0.
MAY_BE_ZERO = (
    "q-lora-rank",
    "num-experts",
    "moe-shared-expert-intermediate-size",
    "mtp-num-layers",
    "recompute-num-layers",
    "decoder-first-pipeline-num-layers",
    "decoder-last-pipeline-num-layers",
)
# Other flags of Megatron that the planner reads, without a fixed set of values.
OTHERS = (
    "multi-latent-attention",
    "qk-layernorm",
    "group-query-attention",
    "swiglu",
    "disable-bias-linear",
    "add-qkv-bias",
    "untie-embeddings-and-output-weights",
    "no-bias-swiglu-fusion",
    "dsa-indexer-loss-coeff",
    "dsa-indexer-use-sparse-loss",
    "hidden-dropout",
    "attention-dropout",
    "moe-layer-freq",
    "moe-router-enable-expert-bias",
    "moe-router-force-load-balancing",
    "moe-router-num-groups",
    "moe-router-group-topk",
    "moe-flex-dispatcher-backend",
    "moe-grouped-gemm",
    "moe-permute-fusion",
    "sequence-parallel",
    "pipeline-model-parallel-layout",
    "account-for-embedding-in-pipeline-split",
    "account-for-loss-in-pipeline-split",
    "bf16",
    "fp16",
    "use-distributed-optimizer",
    "use-precision-aware-optimizer",
    "main-grads-dtype",
    "main-params-dtype",
    "exp-avg-dtype",
    "exp-avg-sq-dtype",
    "use-torch-fsdp2",
    "overlap-grad-reduce",
    "overlap-param-gather",
    "accumulate-allreduce-grads-in-fp32",
    "grad-reduce-in-bf16",
    "recompute-activations",
    "recompute-modules",
    "overlap-moe-expert-parallel-comm",
    "delay-wgrad-compute",
    "use-flash-attn",
    "enable-cuda-graph",
    "external-cuda-graph",
    "cuda-graph-impl",
    "cuda-graph-modules",
    "cuda-graph-scope",
    "fp8-format",
    "fp8-recipe",
    "fp8-param-gather",
    "cp-comm-type",
)
CHOICES: Mapping[str, tuple[str, ...]] = {
    "experimental-attention-variant": ("dsa", "none"),
    "transformer-impl": ("transformer_engine", "local"),
    "position-embedding-type": ("learned_absolute", "rope", "yarn", "none"),
    "normalization": ("LayerNorm", "RMSNorm"),
    "optimizer": ("adam", "sgd"),
    "moe-token-dispatcher-type": ("allgather", "alltoall", "flex"),
    "recompute-granularity": ("full", "selective"),
    "recompute-method": ("uniform", "block"),
}
"""Dict from flag to the values that the planner supports."""
NOT_PLANNED = (
    "optimizer-cpu-offload",
    "fine-grained-activation-offloading",
    "use-megatron-fsdp",
    "num-distributed-optimizer-instances",
    "distribute-saved-activations",
    "fp4-format",
    "window-size",
    "moe-expert-capacity-factor",
    "moe-shared-expert-overlap",
    "tp-comm-overlap",
    "rampup-batch-size",
    "spec",
)
"""Megatron's flags with effects on memory, transfers or time that the planner does not model."""
EXAMPLE: Mapping[str, Any] = {
    "num_layers": 4,
    "hidden_size": 128,
    "ffn_hidden_size": 384,
    "num_attention_heads": 4,
    "seq_length": 256,
    "vocab_size": 256,
    "multi_latent_attention": True,
    "qk_layernorm": True,
    "swiglu": True,
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
    "bias_swiglu_fusion": False,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "transformer_impl": "local",
    "experimental_attention_variant": "dsa",
    "use_fused_dsa": True,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_head_dim": 32,
    "qk_pos_emb_head_dim": 16,
    "v_head_dim": 32,
    "dsa_indexer_n_heads": 8,
    "dsa_indexer_head_dim": 32,
    "dsa_indexer_topk": 48,
    "dsa_indexer_loss_coeff": 0.01,
    "dsa_indexer_use_sparse_loss": True,
    "num_experts": 4,
    "moe_ffn_hidden_size": 128,
    "moe_shared_expert_intermediate_size": 128,
    "moe_router_enable_expert_bias": True,
    "moe_token_dispatcher_type": "alltoall",
    "micro_batch_size": 4,
    "global_batch_size": 8,
}
"""Defaults of ``examples/pretrain_dsa.py`` that differ from Megatron's; a test keeps them in sync."""
EXAMPLE_SCRIPT = "pretrain_dsa.py"


@cache
def parser() -> argparse.ArgumentParser:
    """Build the parser: flags of all recorded Megatron-LM releases, newest first, and this library's."""
    made = megatron_flags.RefusingParser(
        "mindspeed_dsa plan", prog="python -m mindspeed_dsa plan", add_help=False, allow_abbrev=False
    )
    for release in reversed(megatron_flags.releases()):
        megatron_flags.add_recorded(made, Version(release))
    settings.add_flags(made, "mindspeed_dsa", _ours())
    # Switches that are on in the example job need a --no-... form, to switch them off in plans.
    for name in (*OTHERS, "use-fused-dsa"):
        switch = made._option_string_actions[f"--{name}"]
        if switch.nargs == 0 and f"--no-{name}" not in made._option_string_actions:
            action = "store_false" if switch.const else "store_true"
            made.add_argument(f"--no-{name}", dest=switch.dest, action=action, default=argparse.SUPPRESS)
    for name, choices in CHOICES.items():
        made._option_string_actions[f"--{name}"].choices = choices
    return made


SPLIT = (
    "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)
"""Arguments that deal layers to pipeline stages, without a layout."""


def dest_of(name: str) -> str:
    """Return the argument's name (``dest``) of a flag; ``name`` has no dashes in front."""
    return parser()._option_string_actions[f"--{name}"].dest


@cache
def planned() -> frozenset[str]:
    """Return the flags that the planner reads: some of Megatron's, and all of this library's."""
    every = parser()._option_string_actions
    names = [f"--{name}" for name in (*SIZES, *MAY_BE_ZERO, *OTHERS, *CHOICES)]
    names += settings.all_names(flag for flag in _ours() if not flag.megatron)
    arguments = {every[name].dest for name in (*names, SCHEDULE) if name in every}
    return frozenset(name for name, action in every.items() if action.dest in arguments)


def _ours() -> list[Flag]:
    return settings.unique(flag for feature in everything() for flag in feature.flags)


def read(argv: Sequence[str]) -> tuple[argparse.Namespace, set[str], list[str]]:
    """Parse a job's command line, and separate the flags that the planner does not read.

    The first word may be the script; ``pretrain_dsa.py`` selects the example job's defaults.

    Returns:
        The arguments, the names of those given on the command line, and flags that the planner does not read.
    """
    words = list(argv)
    script = words.pop(0) if words and not words[0].startswith("-") else ""
    example = script.endswith(EXAMPLE_SCRIPT)
    if script and not script.endswith(".py"):
        raise SettingsError(
            f"mindspeed_dsa plan: {script!r} is neither a flag nor a script; begin with pretrain_gpt.py, "
            f"{EXAMPLE_SCRIPT} or a flag"
        )
    made = parser()
    options, _ = made.parse_known_args(words, argparse.Namespace(**EXAMPLE if example else {}))
    options.example = example
    others = [word for word in words if word.startswith("--") and word.partition("=")[0] not in planned()]
    return options, _mentioned(made, words), others


def _mentioned(made: argparse.ArgumentParser, words: Sequence[str]) -> set[str]:
    options = made._option_string_actions
    return {options[word.partition("=")[0]].dest for word in words if word.partition("=")[0] in options}


def sorted_out(others: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split flags that the planner does not read into those in :data:`NOT_PLANNED` and the others.

    The others are returned with a hint if a flag of the planner has a similar name.
    """
    names = list(dict.fromkeys(word.partition("=")[0] for word in others))
    missed = [name for name in names if name[2:] in NOT_PLANNED]
    rest = []
    for name in names:
        near = difflib.get_close_matches(name, planned(), n=1, cutoff=0.93)
        hint = f" (did you mean {near[0]}?)" if near and name not in megatron_flags.record() else ""
        rest += [] if name in missed else [name + hint]
    return missed, rest


def misspelt(words: Sequence[str], also: Sequence[str] = ()) -> list[str]:
    """Return messages about unknown flags that resemble a flag of the planner.

    Args:
        words: job's command line.
        also: options of the ``plan`` command itself.
    """
    flags_known = [*planned(), *also]
    messages = []
    for word in dict.fromkeys(words):
        name = word.partition("=")[0]
        if not name.startswith("--") or name in flags_known or name in megatron_flags.record():
            continue
        alike = [each for each in flags_known if _alike(name, each)]
        if near := difflib.get_close_matches(name, alike, n=1, cutoff=0.0):
            messages.append(f"{name} is no flag; did you mean {near[0]}?")
    return messages


def _alike(name: str, flag: str) -> bool:
    """Return whether ``name`` may be a misspelling of ``flag``: same number of words, similar letters."""
    # --tensor-model-paralel-size, one letter short, has a ratio of 2 x 27 / 55 = 0.98.
    if name.count("-") != flag.count("-"):
        return False
    return sorted(name) == sorted(flag) or difflib.SequenceMatcher(None, name, flag).ratio() > 0.88


def padded(vocabulary: int, options: argparse.Namespace) -> int:
    """Return the padded vocabulary size. Unlike Megatron, the example job does not pad for the TP size."""
    step: int = options.make_vocab_size_divisible_by
    step *= 1 if options.example else options.tensor_model_parallel_size
    return math.ceil(vocabulary / step) * step
