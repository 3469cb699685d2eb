"""The switches of fused DSA, of the absorbed form, and of the warm-up stage."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from mindspeed_dsa.declarations import EXPERIMENTAL_ATTENTION_VARIANT, Feature, Flag, Requires
from mindspeed_dsa.features.attention.declare import DSA, HERE, MLA, host_flag
from mindspeed_dsa.features.attention.fused.options import PARTS, Options
from mindspeed_dsa.patches.spec import Patch

_FUSED = f"{HERE}.fused"
_RELEASES = ">=0.16,<0.19"

USE_FUSED_DSA = Flag(
    "--use-fused-dsa",
    "DSA on fused operators: memory grows with the sequence, not with its square, and work with the chosen "
    "keys. Switches on --use-dsa-absorb and the three --use-fused-* below; --no-use-dsa-absorb and so on "
    "leave one of them to Megatron.",
)
ABSORB = Flag(
    "--use-dsa-absorb",
    "MLA in absorbed form: all heads share one latent key. Default: as --use-fused-dsa.",
    kind="auto",
)
_SWITCHES = (
    USE_FUSED_DSA,
    ABSORB,
    Flag(
        "--use-fused-lightning-indexer",
        "Choose keys with the fused operator, ties to the lowest position. Default: as --use-fused-dsa.",
        kind="auto",
    ),
    Flag(
        "--use-fused-sparse-flash-attention",
        "Attend to the chosen keys with the fused operator. Default: as --use-fused-dsa.",
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
    "Implementation of the DSA operators; 'auto' takes the best one that the device and the shapes allow and "
    "says why one is passed over, a named one that cannot run is an error.",
    kind="value",
    default="auto",
    choices=("auto", "reference", "chunked", "cpu", "triton", "npu"),
)
_FUSE_KL = Flag(
    "--dsa-fuse-kl-in-backward",
    "Collect the indexer loss's target inside the attention's backward pass, where the probabilities are "
    "recomputed anyway; the loss is logged from there.",
)
_STAGE = Flag(
    "--dsa-stage",
    "Stage of DSA training: 'warmup' trains the indexer alone, beside dense attention; 'sparse' trains all.",
    kind="value",
    default="sparse",
    choices=("sparse", "warmup"),
)
_PACKAGES = {"triton": ("triton", "pip install triton"), "npu": ("torch_npu", "pip install torch_npu")}


_HOMES = {"cpu": "cpu", "triton": "cuda", "npu": "npu"}


def _check(args: Any) -> Sequence[str]:
    """Combinations that cannot be; arguments that are not there are not judged."""
    chosen = Options.of(args)
    problems = []
    if getattr(args, "experimental_attention_variant", "dsa") != "dsa":
        problems.append(
            "these switches speed up DSA, and the model has none: add --experimental-attention-variant dsa "
            "or leave them away"
        )
    package, command = _PACKAGES.get(chosen.backend, ("", ""))
    if package and find_spec(package) is None:
        problems.append(
            f"--dsa-backend {chosen.backend} needs the package {package}, which is not installed: {command}, "
            "or take --dsa-backend auto"
        )
    problems += _platform_problems(chosen.backend)
    if chosen.fuse_kl_in_backward:
        problems += _fuse_problems(chosen, args)
    if getattr(args, "delay_wgrad_compute", False) and chosen.absorb:
        problems.append(
            "the absorbed form has no delayed weight gradients; leave --delay-wgrad-compute away or add "
            "--no-use-dsa-absorb"
        )
    return problems


def _platform_problems(backend: str) -> list[str]:
    """A named backend that this platform's tensors cannot enter; shapes are judged when there are some."""
    from mindspeed_dsa import session

    running = session.current()
    home = _HOMES.get(backend)
    if running is None or home is None or running.settings.platform == home:
        return []
    platform, interpreter = running.settings.platform, ""
    if backend == "triton" and platform == "cpu":
        if os.environ.get("TRITON_INTERPRET") == "1":
            return []
        interpreter = ", or set TRITON_INTERPRET=1 to run its kernels in the interpreter (slow, for tests)"
    problem = f"--dsa-backend {backend} runs on platform {home}, and this is {platform}"
    return [f"{problem}; take --dsa-backend auto{interpreter}"]


def _fuse_problems(chosen: Options, args: Any) -> list[str]:
    if chosen.warmup:
        problem = "--dsa-fuse-kl-in-backward has no attention backward to work in under --dsa-stage warmup"
        return [f"{problem}; leave it away"]
    problems = []
    chosen_parts = (chosen.absorb, chosen.indexer, chosen.attention, chosen.kl_loss)
    missing = ["--" + name.replace("_", "-") for name, on in zip(PARTS, chosen_parts, strict=True) if not on]
    if missing:
        problems.append(
            f"--dsa-fuse-kl-in-backward needs all four fused parts, and {', '.join(missing)} is off; add "
            "--use-fused-dsa and take --no-use-... away"
        )
    if not getattr(args, "dsa_indexer_use_sparse_loss", True):
        problems.append(
            "--dsa-fuse-kl-in-backward has the probabilities of the chosen keys only; add "
            "--dsa-indexer-use-sparse-loss or leave it away"
        )
    return problems


def _check_stage(args: Any) -> Sequence[str]:
    problems = []
    if getattr(args, "experimental_attention_variant", "dsa") != "dsa":
        problems.append(
            "--dsa-stage warmup trains DSA's indexer, and the model has none; add "
            "--experimental-attention-variant dsa"
        )
    if not (getattr(args, "dsa_indexer_loss_coeff", 1.0) or 0.0) > 0:
        problems.append(
            "--dsa-stage warmup trains by the indexer loss alone; set --dsa-indexer-loss-coeff above 0"
        )
    return problems


FUSED = Feature(
    name="fused-dsa",
    summary="DSA's attention path on fused operators: Lightning Indexer, Sparse Flash Attention, KL loss.",
    flags=(
        *_SWITCHES,
        _BACKEND,
        _FUSE_KL,
        EXPERIMENTAL_ATTENTION_VARIANT,
        host_flag("--dsa-indexer-loss-coeff", float),
    ),
    active=lambda settings: Options.of(settings).any or Options.of(settings).fuse_kl_in_backward,
    validate=_check,
    doc="fused-dsa.md",
    patches=(
        Patch(
            f"{DSA}:DSAttention.forward",
            "wrap",
            f"{_FUSED}.core:fused_forward",
            "Megatron's form holds several sequence x sequence buffers a head and saves no work by sparsity",
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
            priority=-100,  # inside of everything that decides whether and when the forward runs
        ),
        Patch(
            f"{DSA}:DSAIndexer._compute_index_scores",
            "wrap",
            f"{_FUSED}.indexer:tap_index_scores",
            "this release has no function that projects for the indexer and stops before the scores",
            params=("q", "weights", "k"),
            versions=">=0.16,<0.17",
        ),
    ),
)
ABSORBED = Feature(
    name="dsa-absorb",
    summary="MLA in absorbed form, so that sparse attention gathers one latent key for all heads.",
    flags=(ABSORB, USE_FUSED_DSA, EXPERIMENTAL_ATTENTION_VARIANT),
    active=lambda settings: Options.of(settings).absorb,
    doc="dsa-absorb.md",
    patches=(
        Patch(
            f"{MLA}:MLASelfAttention.get_query_key_value_tensors",
            "wrap",
            f"{_FUSED}.absorb:absorb_latent",
            "Megatron makes a key and a value for each head, which sparse attention would have to gather",
            params=("hidden_states", "packed_seq_params", "inference_context"),
            versions=_RELEASES,
            priority=-100,
        ),
    ),
)
WARMUP = Feature(
    name="dsa-stage",
    summary="Warm-up stage of DSA training: dense attention, dense indexer loss, only the indexer trained.",
    flags=(_STAGE, EXPERIMENTAL_ATTENTION_VARIANT, host_flag("--dsa-indexer-loss-coeff", float)),
    requires=Requires(versions={"megatron-core": _RELEASES}),
    active=lambda settings: settings.dsa_stage == "warmup",
    validate=_check_stage,
    doc="dsa-stage.md",
    patches=(
        Patch(
            "megatron.core.models.gpt.gpt_model:GPTModel.__init__",
            "wrap",
            f"{_FUSED}.warmup:freeze_all_but_indexers",
            "parameters that are not trained belong neither in gradient buffers nor in the optimizer",
            versions=_RELEASES,
        ),
        Patch(
            "megatron.core.transformer.transformer_layer:TransformerLayer.forward",
            "wrap",
            f"{_FUSED}.warmup:layer_without_graph",
            "nothing of a frozen layer is needed in backward",
            versions=_RELEASES,
        ),
    ),
)
FEATURES = (FUSED, ABSORBED, WARMUP)
