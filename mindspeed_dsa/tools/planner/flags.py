"""Megatron's flags that a plan depends on: their defaults, and the example job's."""

from __future__ import annotations

import argparse
import difflib
import math
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from mindspeed_dsa import settings
from mindspeed_dsa.features import everything
from mindspeed_dsa.megatron.batches import SCHEDULE
from mindspeed_dsa.patches.errors import SettingsError
from mindspeed_dsa.tools.migrate import megatron_flags

INTEGERS: Mapping[str, int | None] = {
    "num-layers": None,
    "hidden-size": None,
    "ffn-hidden-size": None,
    "num-attention-heads": None,
    "kv-channels": None,
    "num-query-groups": 1,
    "seq-length": None,
    "max-position-embeddings": None,
    "vocab-size": None,
    "padded-vocab-size": None,
    "make-vocab-size-divisible-by": 128,
    "q-lora-rank": None,
    "kv-lora-rank": 32,
    "qk-head-dim": 128,
    "qk-pos-emb-head-dim": 64,
    "v-head-dim": 128,
    "dsa-indexer-n-heads": None,
    "dsa-indexer-head-dim": None,
    "dsa-indexer-topk": None,
    "num-experts": None,
    "moe-ffn-hidden-size": None,
    "moe-shared-expert-intermediate-size": None,
    "moe-router-topk": 2,
    "mtp-num-layers": None,
    "micro-batch-size": None,
    "global-batch-size": None,
    "tensor-model-parallel-size": 1,
    "pipeline-model-parallel-size": 1,
    "num-layers-per-virtual-pipeline-stage": None,
    "num-virtual-stages-per-pipeline-rank": None,
    "microbatch-group-size-per-virtual-pipeline-stage": None,
    "decoder-first-pipeline-num-layers": None,
    "decoder-last-pipeline-num-layers": None,
    "context-parallel-size": 1,
    "expert-model-parallel-size": 1,
    "expert-tensor-parallel-size": None,
    "recompute-num-layers": None,
}
MAY_BE_ZERO = (
    "q-lora-rank",
    "num-experts",
    "moe-shared-expert-intermediate-size",
    "mtp-num-layers",
    "recompute-num-layers",
    "decoder-first-pipeline-num-layers",
    "decoder-last-pipeline-num-layers",
)
SWITCHES = (
    "multi-latent-attention",
    "qk-layernorm",
    "group-query-attention",
    "swiglu",
    "disable-bias-linear",
    "add-qkv-bias",
    "untie-embeddings-and-output-weights",
    "no-bias-swiglu-fusion",
    "dsa-indexer-use-sparse-loss",
    "moe-router-enable-expert-bias",
    "moe-grouped-gemm",
    "moe-permute-fusion",
    "sequence-parallel",
    "account-for-embedding-in-pipeline-split",
    "account-for-loss-in-pipeline-split",
    "bf16",
    "fp16",
    "use-distributed-optimizer",
    "use-torch-fsdp2",
    "overlap-grad-reduce",
    "overlap-param-gather",
    "accumulate-allreduce-grads-in-fp32",
    "grad-reduce-in-bf16",
    "recompute-activations",
    "overlap-moe-expert-parallel-comm",
    "delay-wgrad-compute",
    "use-flash-attn",
    "use-fused-dsa",  # ours; the example job can also switch it off
)
WORDS: Mapping[str, tuple[str | None, tuple[str, ...]]] = {
    "experimental-attention-variant": (None, ("dsa", "none")),
    "transformer-impl": ("transformer_engine", ("transformer_engine", "local")),
    "position-embedding-type": ("learned_absolute", ("learned_absolute", "rope", "yarn", "none")),
    "normalization": ("LayerNorm", ("LayerNorm", "RMSNorm")),
    "optimizer": ("adam", ("adam", "sgd")),
    "moe-token-dispatcher-type": ("allgather", ("allgather", "alltoall", "flex")),
    "recompute-granularity": (None, ("full", "selective")),
    "recompute-method": (None, ("uniform", "block")),
}
"""Default, and what can be planned."""
FLOATS: Mapping[str, float] = {
    "dsa-indexer-loss-coeff": 0.0,
    "hidden-dropout": 0.1,
    "attention-dropout": 0.1,
}
NOT_PLANNED = (
    "use-precision-aware-optimizer",
    "main-grads-dtype",
    "main-params-dtype",
    "exp-avg-dtype",
    "exp-avg-sq-dtype",
    "optimizer-cpu-offload",
    "fine-grained-activation-offloading",
    "use-megatron-fsdp",
    "num-distributed-optimizer-instances",
    "distribute-saved-activations",
    "fp8-format",
    "fp4-format",
    "window-size",
    "moe-expert-capacity-factor",
    "moe-shared-expert-overlap",
    "tp-comm-overlap",
    "rampup-batch-size",
)
"""Megatron's flags that change memory, bytes or time in ways that plans do not know."""
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
    "disable_bias_linear": True,
    "untie_embeddings_and_output_weights": True,
    "no_bias_swiglu_fusion": True,
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
"""Defaults of ``examples/pretrain_dsa.py`` where they differ; a test compares them with its table."""
EXAMPLE_SCRIPT = "pretrain_dsa.py"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SettingsError(f"mindspeed_dsa plan: {message}")


def parser() -> argparse.ArgumentParser:
    """Build the parser of the job's own flags, this library's included."""
    made = _Parser(prog="python -m mindspeed_dsa plan", add_help=False, allow_abbrev=False)
    add = made.add_argument
    for name, number in INTEGERS.items():
        add(f"--{name}", type=int, default=number)
    for name in SWITCHES:
        add(f"--{name}", action=argparse.BooleanOptionalAction, default=False)
    for name, (word, choices) in WORDS.items():
        add(f"--{name}", default=word, choices=choices)
    for name, value in FLOATS.items():
        add(f"--{name}", type=float, default=value)
    add("--moe-layer-freq", type=megatron_flags.pattern, default=1)
    add("--pipeline-model-parallel-layout")
    add(SCHEDULE)
    add("--recompute-modules", nargs="+", default=[])
    add("--cp-comm-type", nargs="+", default=["p2p"])
    ours = settings.unique(flag for feature in everything() for flag in feature.flags)
    settings.add_flags(made, "mindspeed_dsa", ours)
    return made


def read(argv: Sequence[str]) -> tuple[argparse.Namespace, set[str], list[str]]:
    """A job's arguments, the names of those that were given, and the tokens of flags that no plan needs.

    The first word may be the script: ``pretrain_dsa.py`` has the example job's defaults.
    """
    words = list(argv)
    script = words.pop(0) if words and not words[0].startswith("-") else ""
    made = parser()
    given = {action.dest for action in made._actions} & _mentioned(made, words)
    if script.endswith(EXAMPLE_SCRIPT):
        made.set_defaults(**EXAMPLE)
    elif script and not script.endswith(".py"):
        raise SettingsError(
            f"mindspeed_dsa plan: {script!r} is neither a flag nor a script; begin with pretrain_gpt.py, "
            f"{EXAMPLE_SCRIPT} or a flag"
        )
    options, unknown = made.parse_known_args(words)
    options.example = script.endswith(EXAMPLE_SCRIPT)
    return options, given, [token for token in unknown if token.startswith("--")]


def _mentioned(made: argparse.ArgumentParser, words: Sequence[str]) -> set[str]:
    options = made._option_string_actions
    return {options[word.partition("=")[0]].dest for word in words if word.partition("=")[0] in options}


def sorted_out(unknown: Sequence[str]) -> tuple[list[str], list[str]]:
    """Flags that were not read: those that matter, and the others, with what misspelt ones resemble."""
    names = list(dict.fromkeys(token.partition("=")[0] for token in unknown))
    missed = [name for name in names if name[2:] in NOT_PLANNED]
    known = parser()._option_string_actions
    others = []
    for name in names:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.93)
        others += [f"{name} (did you mean {near[0]}?)" if near else name] if name not in missed else []
    return missed, others


def misspelt(words: Sequence[str], also: Sequence[str] = ()) -> list[str]:
    """Return flags that nobody has and that resemble one on which a plan depends, each with that one.

    Args:
        words: command line of a job.
        also: options of the command itself.
    """
    known = [*parser()._option_string_actions, *also]
    found = []
    for word in dict.fromkeys(words):
        name = word.partition("=")[0]
        if not name.startswith("--") or name in known or megatron_flags.known(name):
            continue
        alike = [each for each in known if _alike(name, each)]
        if near := difflib.get_close_matches(name, alike, n=1, cutoff=0.0):
            found.append(f"{name} is no flag; did you mean {near[0]}?")
    return found


def _alike(name: str, flag: str) -> bool:
    """Return whether a name may be a flag with a slip: of as many words, so that they are not two flags."""
    if name.count("-") != flag.count("-"):
        return False
    return sorted(name) == sorted(flag) or difflib.SequenceMatcher(None, name, flag).ratio() > 0.88


def padded(vocabulary: int, options: argparse.Namespace) -> int:
    """Rows of the embedding; the example job pads alike in every layout."""
    step: int = options.make_vocab_size_divisible_by
    step *= 1 if options.example else options.tensor_model_parallel_size
    return math.ceil(vocabulary / step) * step
