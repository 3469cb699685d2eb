"""Flags of fused DSA and of the absorbed form of MLA."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import Any

from packaging.version import Version

from mindspeed_dsa import platforms
from mindspeed_dsa.feature import EXPERIMENTAL_ATTENTION_VARIANT, WORDS, Feature, Flag
from mindspeed_dsa.megatron import batches
from mindspeed_dsa.megatron.configuration import argument, hybrid_flag
from mindspeed_dsa.megatron.dsa import (
    DSA,
    LOSS_LAYERS,
    MLA,
    PARTS,
    PRECISIONS,
    Options,
    absorb_wanted,
    fused_wanted,
    megatron_flag,
)
from mindspeed_dsa.megatron.graphs import ATTENTION, refuse_graphs
from mindspeed_dsa.megatron.low_precision import low_precision
from mindspeed_dsa.megatron.selections import Sharing
from mindspeed_dsa.patches import versions
from mindspeed_dsa.patches.spec import Patch

_PACKAGES = {"triton": ("triton", "pip install triton"), "npu": ("torch_npu", "pip install torch_npu")}
_HOMES = {"cpu": "cpu", "triton": "cuda", "npu": "npu"}


def check_fused(args: Any, options: Any) -> Sequence[str]:
    """Return problems with arguments of fused DSA; skip arguments that ``args`` lacks."""
    parsed = Options.of(args)
    problems = []
    if getattr(args, "experimental_attention_variant", "dsa") != "dsa":
        problems.append(
            "these switches speed up DSA, and the model has none: add --experimental-attention-variant dsa "
            "or omit them"
        )
    # Only installation is checked here; a backend that cannot run the shapes raises at its first call.
    package, command = _PACKAGES.get(parsed.backend, ("", ""))
    if package and find_spec(package) is None:
        problems.append(
            f"--dsa-backend {parsed.backend} needs the package {package}, which is not installed: {command}, "
            "or use --dsa-backend auto"
        )
    problems += _platform_problems(parsed.backend)
    if parsed.fuse_kl_in_backward:
        problems += _fuse_problems(parsed, args)
    if parsed.precision != "full":
        problems += _precision_problems(parsed)
    if parsed.learns_served:
        problems += _loss_layers_problems(parsed, args)
    problems += refuse_packs_in_graphs(args)
    problems += batches.check_conversations(args, "--use-fused-dsa")
    if getattr(args, "delay_wgrad_compute", False) and parsed.absorb:
        problems.append(
            "the absorbed form has no delayed weight gradients; omit --delay-wgrad-compute or add "
            "--no-use-dsa-absorb"
        )
    precision = low_precision(args)
    if precision is not None and precision.stored and parsed.absorb:
        problems.append(
            f"the absorbed form multiplies by parts of a weight, which {precision.stored_by} stores in "
            f"{precision.name}; omit {precision.stored_by} or add --no-use-dsa-absorb"
        )
    return problems


def refuse_packs_in_graphs(args: Any) -> Iterator[str]:
    """Yield a problem if Megatron delivers packed documents to attention that runs as a CUDA graph."""
    why = "the host reads at which token each document of a pack begins"
    for flag in batches.packs_of_megatron(args):
        yield from refuse_graphs(args, f"{flag} with fused DSA", why, {ATTENTION})


def refuse_packs_of_megatron(args: Any, flags: str) -> Iterator[str]:
    """Yield a problem if Megatron's own attention runs packs under context parallelism, from 0.19 on."""
    release, packs = versions.of_job(args) or "0", batches.packs_of_megatron(args)
    if packs and (argument(args, "context_parallel_size") or 1) > 1 and Version(release) >= Version("0.19"):
        yield (
            f"{flags}: Megatron-core {release} attends itself to packs of {packs[0]} "
            "under context parallelism; use --context-parallel-size 1, or --pack-documents in place of it"
        )


def _platform_problems(backend: str) -> list[str]:
    """Report a requested backend that is not available on this platform."""
    home, platform, interpreter = _HOMES.get(backend), platforms.current().name, ""
    if home in (None, platform):
        return []
    if backend == "triton" and platform == "cpu":
        if os.environ.get("TRITON_INTERPRET") == "1":
            return []
        interpreter = ", or set TRITON_INTERPRET=1 to run its kernels in the interpreter (slow, for tests)"
    problem = f"--dsa-backend {backend} runs on platform {home}, and this is {platform}"
    return [f"{problem}; use --dsa-backend auto{interpreter}"]


def _fuse_problems(options: Options, args: Any) -> list[str]:
    if options.attends_densely:
        problem = "--dsa-fuse-kl-in-backward forms the loss in the backward of sparse attention"
        return [f"{problem}, which --dsa-stage {options.stage} lacks; omit it"]
    problems = []
    parts_on = (options.absorb, options.indexer, options.attention, options.kl_loss)
    missing = [name for name, on in zip(PARTS, parts_on, strict=True) if not on]
    if missing:
        ways = [] if getattr(args, "use_fused_dsa", False) else ["add --use-fused-dsa"]
        refused = [_flag("no_" + name) for name in missing if getattr(args, name, None) is False]
        ways += [f"omit {', '.join(refused)}"] if refused else []
        problems.append(
            f"--dsa-fuse-kl-in-backward needs all four fused parts, and {', '.join(map(_flag, missing))} "
            f"{'is' if len(missing) == 1 else 'are'} off; {' and '.join(ways)}"
        )
    if not getattr(args, "dsa_indexer_use_sparse_loss", True):
        problems.append(
            "--dsa-fuse-kl-in-backward has the probabilities of the chosen keys only; add "
            "--dsa-indexer-use-sparse-loss or omit it"
        )
    return problems


def _loss_layers_problems(options: Options, args: Any) -> list[str]:
    """Report losses of layers that share in a job that has no such layers, or no such losses."""
    wanted, problems = f"--dsa-indexer-loss-layers {options.loss_layers}", []
    sharing, layers = Sharing.of(args), getattr(args, "num_layers", None)
    mtp_layers = getattr(args, "mtp_num_layers", None) or 0
    if layers is not None and sharing.computing(layers, mtp_layers) == layers + mtp_layers:
        problems.append(
            f"{wanted} is for layers that share a selection, and every layer of this model selects keys "
            "itself; add --dsa-indexer-topk-freq or --dsa-indexer-topk-pattern, or omit it"
        )
    if options.stage not in ("sparse", "warmup"):
        problems.append(f"{wanted}: --dsa-stage {options.stage} trains no indexer; omit one of them")
    elif not (getattr(args, "dsa_indexer_loss_coeff", 1.0) or 0.0) > 0:
        problems.append(f"{wanted}: no layer has an indexer loss; set --dsa-indexer-loss-coeff above 0")
    if flag := hybrid_flag(args):
        problems.append(f"{wanted} weighs losses by layers of GPT models, and {flag} makes another; omit one")
    if not options.all_ours:
        problems.append(
            f"{wanted} needs our indexer, attention and indexer loss; add --use-fused-dsa, without "
            "--no-use-fused-..., or omit it"
        )
    return problems


def _precision_problems(options: Options) -> list[str]:
    """Report FP8 selection if no operator on this platform supports it."""
    wanted, problems = f"--dsa-indexer-precision {options.precision}", []
    if not options.indexer:
        problems.append(
            f"{wanted} is for our operator, and Megatron's own indexer selects the keys; add --use-fused-dsa "
            "or --use-fused-lightning-indexer, or omit it"
        )
    if "npu" in (platforms.current().name, options.backend):
        from mindspeed_dsa.ops.quantised_indexer.backends import ON_NPUS

        problems.append(f"{wanted} does not run on NPUs: {ON_NPUS}; omit it")
    return problems


def _flag(dest: str) -> str:
    return "--" + dest.replace("_", "-")


_IMPL = "mindspeed_dsa.features.dsa"
_RELEASES = ">=0.16,<0.19"

USE_FUSED_DSA = Flag(
    "--use-fused-dsa",
    "Compute DSA with fused operators: memory grows with the sequence, not with its square. Switches on "
    "--use-dsa-absorb and the three --use-fused-* flags below. To use Megatron's code for one of them, add "
    "its --no- form, e.g. --no-use-dsa-absorb.",
)
ABSORB = Flag(
    "--use-dsa-absorb",
    "Compute MLA in absorbed form, in which all heads share one latent key. 'auto' uses this form only for "
    "long sequences: above topk tokens, on CPUs above 4 to 17 x topk tokens; the log names the form. "
    "Default: auto with --use-fused-dsa, otherwise off. Without a value: on.",
    kind="auto",
    choices=WORDS,
)
_SWITCHES = (
    USE_FUSED_DSA,
    ABSORB,
    Flag(
        "--use-fused-lightning-indexer",
        "Select keys with the fused operator; of equal scores it takes the lowest position. Default: as "
        "--use-fused-dsa.",
        kind="auto",
    ),
    Flag(
        "--use-fused-sparse-flash-attention",
        "Attend to the selected keys with the fused operator. Default: as --use-fused-dsa.",
        kind="auto",
    ),
    Flag(
        "--use-fused-lightning-indexer-kl-loss",
        "Compute the indexer loss with the fused operator. Default: as --use-fused-dsa.",
        kind="auto",
    ),
)
_BACKEND = Flag(
    "--dsa-backend",
    "Implementation of the DSA operators. 'auto' selects the fastest one that supports the device and the "
    "shapes, and logs why others are skipped. A named one that cannot run is an error.",
    kind="value",
    default="auto",
    choices=("auto", "reference", "chunked", "cpu", "triton", "npu"),
)
_LOSS_LAYERS = Flag(
    "--dsa-indexer-loss-layers",
    "Layers whose attention an indexer learns if several layers attend to the keys that it selects: 'own', "
    "the indexer's layer, as in released models; 'served', the mean of all these layers; 'served-sum', their "
    "sum.",
    kind="value",
    default="own",
    choices=LOSS_LAYERS,
)
_PRECISION = Flag(
    "--dsa-indexer-precision",
    "Precision of the scores that select keys: 'full' does not quantise the indexer's queries and keys; "
    "'fp8' rounds them to e4m3 with scales that are powers of two (ue8m0), as inference engines do; "
    "'fp8-plain' uses scales that are not rounded. The indexer's loss and gradients always use 'full'.",
    kind="value",
    default="full",
    choices=PRECISIONS,
)
_FUSE_KL = Flag(
    "--dsa-fuse-kl-in-backward",
    "Compute the indexer loss in the backward of the attention, which recomputes the probabilities anyway; "
    "the loss is also logged in the backward.",
)
FUSED = Feature(
    name="fused-dsa",
    summary="DSA's attention path on fused operators: Lightning Indexer, Sparse Flash Attention, KL loss.",
    flags=(
        *_SWITCHES,
        _BACKEND,
        _PRECISION,
        _FUSE_KL,
        _LOSS_LAYERS,
        EXPERIMENTAL_ATTENTION_VARIANT,
        megatron_flag("--dsa-indexer-loss-coeff", float),
    ),
    active=fused_wanted,
    options=Options.of,
    check=check_fused,
    doc="fused-dsa.md",
    patches=(
        Patch(
            f"{DSA}:DSAttention.forward",
            "wrap",
            f"{_IMPL}.core_attention:fuse_core_attention",
            "Megatron's DSA holds sequence x sequence buffers per head and saves no work by sparsity",
            params=(
                "query",
                "key",
                "value",
                "attention_mask",
                "x",
                "qr",
                "attn_mask_type",
                "packed_seq_params",
            ),
            versions=_RELEASES,
            priority=-100,  # inside all wrappers that decide whether and when the forward runs
            in_place_of="attention that our operators compute",
        ),
        Patch(
            f"{DSA}:DSAIndexer._compute_index_scores",
            "wrap",
            f"{_IMPL}.index_projection:tap_index_scores",
            "the indexer of this release has no function that projects and stops before the scores",
            params=("q", "weights", "k"),
            versions=">=0.16,<0.17",
        ),
        Patch(
            f"{DSA}:DSAIndexer._apply_rope",
            "wrap",
            f"{_IMPL}.index_projection:rotate_by_documents",
            "the indexer of these releases does not support packed documents",
            params=("x", "rotary_pos_emb", "mscale"),
            versions=_RELEASES,
        ),
    ),
)
ABSORBED = Feature(
    name="dsa-absorb",
    summary="MLA in absorbed form, so that sparse attention gathers one latent key for all heads.",
    flags=(ABSORB, USE_FUSED_DSA, EXPERIMENTAL_ATTENTION_VARIANT),
    active=absorb_wanted,
    options=Options.of,
    doc="dsa-absorb.md",
    patches=(
        Patch(
            f"{MLA}:MLASelfAttention.get_query_key_value_tensors",
            "wrap",
            f"{_IMPL}.absorb:absorb_latent",
            "Megatron computes a key and a value for each head, which sparse attention would have to gather",
            params=("hidden_states", "packed_seq_params", "inference_context"),
            versions=_RELEASES,
            priority=-100,
            in_place_of="layers with DSA",
        ),
        Patch(
            "mcore_bridge.model.modules.multi_latent_attention:MLASelfAttention.get_query_key_value_tensors",
            "wrap",
            f"{_IMPL}.absorb:absorb_latent",
            "mcore-bridge (ms-swift) overrides Megatron's method, and passes it the rotary angles",
            params=("hidden_states", "packed_seq_params", "inference_context", "rotary_pos_emb"),
            required=False,
            priority=-100,
            in_place_of="layers with DSA",
        ),
    ),
)
