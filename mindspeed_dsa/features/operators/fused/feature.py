"""``--fused-operators``: replaces chains of small PyTorch operations in Megatron by fused operators.

Three of the fused operators also have their own switch, as in MindSpeed.

tests: tests/features/operators, tests/ops/test_small_operators.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from mindspeed_dsa import platforms
from mindspeed_dsa.feature import Feature, Flag, Requires
from mindspeed_dsa.megatron import releases
from mindspeed_dsa.megatron.configuration import argument
from mindspeed_dsa.megatron.expert_parallel import number_of_experts
from mindspeed_dsa.patches.spec import Patch
from mindspeed_dsa.settings import PLATFORM

OPERATORS = ("rmsnorm", "rotary-pos-emb", "swiglu", "mask-arithmetic")
_LIBRARY = "liger_kernel"
_IMPL = "mindspeed_dsa.features.operators.fused.functions"
_REQUIRES = Requires(versions={"megatron-core": releases.SERVED})
_PAGE = "fused-operators.md"

FUSED_OPERATORS = Flag(
    "--fused-operators",
    "Small operators to fuse: names from this list, all of them, or none. rmsnorm, rotary-pos-emb and swiglu "
    "are also switched on by flags of their own. Default: mask-arithmetic on NPUs, else none.",
    kind="value",
    nargs="+",
    choices=("all", "none", *OPERATORS),
)

# -- selection -----------------------------------------------------------------------------------


def selects(operator: str, switch: str = "") -> Callable[[Any], bool]:
    """Return a predicate on settings that tells whether a fused operator is requested.

    It is true if the operator's own switch is set, or if ``--fused-operators`` has its name or ``all``.

    Args:
        operator: one of :data:`OPERATORS`.
        switch: ``dest`` of the operator's own flag, if it has one.
    """

    def active(settings: Any) -> bool:
        chosen = getattr(settings, FUSED_OPERATORS.dest, None) or ()
        return "all" in chosen or operator in chosen or bool(switch and getattr(settings, switch, False))

    return active


def fills_by_mask(settings: Any) -> bool:
    """Return whether mask-arithmetic is on.

    It is on if ``--fused-operators`` has its name or ``all``, and on NPUs also unless the flag is ``none``.
    """
    if selects("mask-arithmetic")(settings):
        return True
    return settings.platform == "npu" and "none" not in (getattr(settings, FUSED_OPERATORS.dest, None) or ())


def is_named(args: Any, operator: str, switch: str) -> bool:
    """Return whether this operator was requested by its name or switch, and not only by ``all``."""
    return bool(argument(args, switch)) or operator in (argument(args, FUSED_OPERATORS.dest) or ())


def _check_selection(args: Any, operator: str, switch: str = "") -> Iterator[str]:
    """Yield a problem if ``--fused-operators`` has ``none`` and something else, or the switch is set too."""
    selected = argument(args, FUSED_OPERATORS.dest) or ()
    if "none" not in selected:
        return
    if "all" in selected:
        # Every operator runs this check; only the first reports the contradiction.
        if operator == OPERATORS[0]:
            yield "--fused-operators has both all and none; drop one of them"
        return
    by_switch = switch and argument(args, switch)
    other = f"--{switch.replace('_', '-')}" if by_switch else f"{operator} in the same list"
    yield f"--fused-operators none contradicts {other}; drop one of them"


def _check_library(operator: str) -> Iterator[str]:
    """Yield a problem if Liger-Kernel, which has the operator's GPU kernels, is not installed."""
    if platforms.current().name == "cuda" and find_spec(_LIBRARY) is None:
        yield (
            f"{operator} runs on GPUs through Liger-Kernel, which is not installed; pip install "
            f"'mindspeed_dsa[liger]', or leave {operator} out of the fused operators"
        )


# -- mask-arithmetic -----------------------------------------------------------------------------


def check_mask_arithmetic(args: Any, options: Any) -> Iterator[str]:
    """Yield problems with arguments that do not work together with mask-arithmetic."""
    yield from _check_selection(args, "mask-arithmetic")


MASK_ARITHMETIC = Feature(
    name="mask-arithmetic",
    summary="In vocabulary parallel embedding and cross entropy, masked_fill replaces assignments through a "
    "mask. Results are bitwise equal, and the host does not wait for the device.",
    flags=(FUSED_OPERATORS, PLATFORM),
    patches=tuple(
        Patch(
            f"megatron.core.tensor_parallel.{function}",
            "wrap",
            f"{_IMPL}:fill_by_mask",
            "an assignment through a mask lists the places where it is true, for which the host waits",
            params=params,
            versions=releases.SERVED,
        )
        for function, params in (
            ("layers:VocabParallelEmbedding.forward", ("input_",)),
            (
                "cross_entropy:VocabParallelCrossEntropy.calculate_predicted_logits",
                ("vocab_parallel_logits", "target"),
            ),
        )
    ),
    requires=_REQUIRES,
    active=fills_by_mask,
    check=check_mask_arithmetic,
    doc=_PAGE,
)

# -- rmsnorm -------------------------------------------------------------------------------------


def check_rmsnorm(args: Any, options: Any) -> Iterator[str]:
    """Yield problems with arguments that do not work together with a fused RMSNorm."""
    yield from _check_selection(args, "rmsnorm", "use_fused_rmsnorm")
    yield from _check_library("rmsnorm")
    if not is_named(args, "rmsnorm", "use_fused_rmsnorm"):
        return
    normalization = argument(args, "normalization") or "RMSNorm"
    if normalization != "RMSNorm":
        yield (
            f"a fused RMSNorm needs --normalization RMSNorm, and the model has {normalization}; set it, or "
            "drop rmsnorm from the fused operators"
        )
    if argument(args, "transformer_impl") == "transformer_engine":
        yield (
            "with --transformer-impl transformer_engine the norms are Transformer Engine's, which are fused "
            "already; drop rmsnorm from the fused operators, or use --transformer-impl local"
        )


RMSNORM = Feature(
    name="fused-rmsnorm",
    summary="RMSNorm runs as one operator in forward and one in backward. For backward it keeps only its "
    "input and one number per token.",
    flags=(Flag("--use-fused-rmsnorm", "Fuse RMSNorm."), FUSED_OPERATORS),
    patches=(
        Patch(
            "megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__",
            "wrap",
            f"{_IMPL}:build_fused_norm",
            "PyTorch's RMSNorm is half a dozen operations, whose results backward keeps",
            params=("config", "hidden_size", "eps"),
            versions=releases.SERVED,
            priority=100,  # outermost: it replaces the norm that inner wrappers adapt
        ),
        Patch(
            "megatron.core.transformer.transformer_layer:TransformerLayer.__init__",
            "wrap",
            f"{_IMPL}:fuse_in_linear_layers",
            "our linear layers with a norm of their own compute it with PyTorch's function",
            versions=releases.SERVED,
        ),
    ),
    requires=_REQUIRES,
    active=selects("rmsnorm", "use_fused_rmsnorm"),
    check=check_rmsnorm,
    doc=_PAGE,
)

# -- rotary-pos-emb ------------------------------------------------------------------------------

_ROTARY = ("rope", "yarn", "mrope")


def take_the_place_of_megatrons(args: Any) -> Sequence[str]:
    """Switch off Megatron's ``apply_rope_fusion``; used as ``Feature.rewrite``.

    It is true by default, so no flag of the job is overridden.
    """
    if not getattr(args, "apply_rope_fusion", False):
        return ()
    args.apply_rope_fusion = False
    return ("fused-rotary-pos-emb: apply_rope_fusion is False, ours takes the place of Megatron's",)


def check_rotary(args: Any, options: Any) -> Iterator[str]:
    """Yield problems with arguments that do not work together with a fused rotary embedding."""
    yield from _check_selection(args, "rotary-pos-emb", "use_fused_rotary_pos_emb")
    if not is_named(args, "rotary-pos-emb", "use_fused_rotary_pos_emb"):
        return
    embedding = argument(args, "position_embedding_type") or "rope"
    if embedding not in _ROTARY and not argument(args, "multi_latent_attention"):
        yield (
            f"a fused rotary embedding needs --position-embedding-type rope, and the model has {embedding}; "
            "set it, or drop rotary-pos-emb from the fused operators"
        )


ROTARY = Feature(
    name="fused-rotary-pos-emb",
    summary="Rotary position embedding runs as one operator in forward and one in backward. Sines and "
    "cosines are computed once for all layers.",
    flags=(Flag("--use-fused-rotary-pos-emb", "Fuse rotary position embedding."), FUSED_OPERATORS),
    patches=(
        Patch(
            "megatron.core.models.common.embeddings.rope_utils:_apply_rotary_pos_emb_bshd",
            "wrap",
            f"{_IMPL}:rotate_fused",
            "Megatron computes sines and cosines anew in every call, and rotates in some fifteen operations",
            params=("t", "freqs", "rotary_interleaved", "mscale"),
            versions=releases.SERVED,
        ),
    ),
    requires=_REQUIRES,
    active=selects("rotary-pos-emb", "use_fused_rotary_pos_emb"),
    rewrite=take_the_place_of_megatrons,
    check=check_rotary,
    doc=_PAGE,
)

# -- swiglu --------------------------------------------------------------------------------------

_FUSIONS = "megatron.core.fusions.fused_bias_swiglu"
_WHY_SWIGLU = "SwiGLU's backward is more than a dozen operations unless a compiler fuses them"


@dataclass(frozen=True)
class SwigluOptions:
    """Options of a fused SwiGLU.

    Attributes:
        apart: whether ``--recompute-activation-function`` is on, which needs a separate activation per
            expert.
    """

    apart: bool

    @classmethod
    def of(cls, settings: Any) -> SwigluOptions:
        """Read the options from resolved settings."""
        return cls(apart=bool(getattr(settings, "recompute_activation_function", False)))


def check_swiglu(args: Any, options: Any) -> Iterator[str]:
    """Yield problems with arguments that do not work together with a fused SwiGLU."""
    yield from _check_selection(args, "swiglu", "use_fused_swiglu")
    yield from _check_library("swiglu")
    if not is_named(args, "swiglu", "use_fused_swiglu"):
        return
    if argument(args, "swiglu") is False:
        yield (
            "a fused SwiGLU needs --swiglu, and the model has another activation; add it, or drop swiglu "
            "from the fused operators"
        )
    # Experts and shared experts keep an activation of their own.
    if argument(args, "use_transformer_engine_op_fuser") and not number_of_experts(args):
        yield (
            "a fused SwiGLU cannot be used with --use-transformer-engine-op-fuser, which has the activation "
            "inside one operation with both linear layers; drop one of them"
        )
    if argument(args, "use_te_activation_func"):
        yield (
            "a fused SwiGLU and --use-te-activation-func are two kernels for the same activation; drop one "
            "of them"
        )


SWIGLU = Feature(
    name="fused-swiglu",
    summary="SwiGLU, also with a bias or weighted by router probabilities, runs as one operator in forward "
    "and one in backward. For backward it keeps only its input.",
    flags=(Flag("--use-fused-swiglu", "Fuse SwiGLU."), FUSED_OPERATORS),
    patches=(
        Patch(
            f"{_FUSIONS}:bias_swiglu_impl",
            "wrap",
            f"{_IMPL}:fuse_swiglu",
            _WHY_SWIGLU,
            params=("input", "bias", "fp8_input_store"),
            versions=releases.SERVED,
        ),
        Patch(
            f"{_FUSIONS}:weighted_bias_swiglu_impl",
            "wrap",
            f"{_IMPL}:fuse_weighted_swiglu",
            _WHY_SWIGLU,
            params=("input", "bias", "weights", "fp8_input_store"),
            versions=releases.SERVED,
        ),
        Patch(
            "megatron.core.transformer.mlp:MLP.forward",
            "wrap",
            f"{_IMPL}:fuse_in_mlp",
            "an MLP without Megatron's own fusion keeps the results of three operations for backward",
            params=("hidden_states", "per_token_scale"),
            versions=releases.SERVED,
            priority=-1,  # inside of wrappers that run the forward in part, or compare the module's identity
        ),
        Patch(
            "megatron.core.transformer.moe.experts:SequentialMLP.forward",
            "wrap",
            f"{_IMPL}:activate_together",
            "every expert has an activation of its own, of a few rows",
            params=("permuted_local_hidden_states", "tokens_per_expert", "permuted_probs"),
            versions=releases.SERVED,
        ),
    ),
    requires=_REQUIRES,
    active=selects("swiglu", "use_fused_swiglu"),
    options=SwigluOptions.of,
    check=check_swiglu,
    doc=_PAGE,
)
