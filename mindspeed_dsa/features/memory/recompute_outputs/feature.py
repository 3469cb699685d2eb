"""Declarations of features that free outputs after the forward and recompute them for backward.

There are four features: recompute of a layer's norms, recompute of MLP activation functions, the checkpoint
class (``checkpoint.py``) that both use and that also serves Megatron's own recompute modules, and a fix of
Megatron's class.

tests: tests/features/memory/recompute_activation_function, tests/features/memory/recompute_norm
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from mindspeed_dsa.feature import EXPERIMENTAL_ATTENTION_VARIANT, Feature, Flag, Requires
from mindspeed_dsa.features.memory import chosen_layers
from mindspeed_dsa.features.memory.chosen_layers import LayerOptions, check_layers
from mindspeed_dsa.features.memory.conditions import any_of, wanted, without
from mindspeed_dsa.megatron import releases
from mindspeed_dsa.megatron.configuration import argument, builds_by_engine, check_weight_shards
from mindspeed_dsa.megatron.dsa import uses_dsa
from mindspeed_dsa.megatron.expert_parallel import number_of_experts
from mindspeed_dsa.megatron.graphs import refuse_graphs
from mindspeed_dsa.megatron.low_precision import check_history
from mindspeed_dsa.patches.spec import Patch

_HERE = "mindspeed_dsa.features.memory.recompute_outputs"
_REQUIRES = Requires(versions={"megatron-core": releases.SERVED})

# -- activation functions ------------------------------------------------------------------------

_ACTIVATION = "--recompute-activation-function"
_activation_wanted = wanted("recompute_activation_function", "recompute_activation_function_num_layers")


@dataclass(frozen=True)
class ActivationOptions(LayerOptions):
    """Options of ``--recompute-activation-function``.

    Attributes:
        verify: whether to compare the recomputed bytes with the forward's.
    """

    verify: bool

    @classmethod
    def of(cls, settings: Any) -> ActivationOptions:
        """Build the options from resolved settings or from parsed arguments."""
        verify = bool(getattr(settings, "recompute_verify", False))
        return cls.from_settings(settings, "recompute_activation_function", verify=verify)


def check_activation(args: Any, options: ActivationOptions) -> Iterator[str]:
    """Yield arguments or model settings that conflict with ``--recompute-activation-function``."""
    yield from check_layers(args, options, _ACTIVATION)
    yield from _check_recompute(args, _ACTIVATION)
    yield from _check_own_module(args, _ACTIVATION, "moe_act")
    if argument(args, "use_grouped_gemm_for_shared_expert"):
        yield (
            f"{_ACTIVATION}: --use-grouped-gemm-for-shared-expert has the activation inside of one "
            "operation with both linear layers; drop one of them"
        )
    if argument(args, "use_transformer_engine_op_fuser"):
        yield (
            f"{_ACTIVATION}: with --use-transformer-engine-op-fuser the activation is inside one operation "
            "with both linear layers and has no output of its own; drop one of them"
        )


ACTIVATION_FUNCTION = Feature(
    name="recompute-activation-function",
    summary="Frees the output of each MLP's activation function after fc2 has used it, and computes it again "
    "right before fc2's backward reads it.",
    flags=(
        Flag(
            "--recompute-activation-function",
            "Recompute the activation function of MLPs, experts and shared experts in backward.",
        ),
        Flag(
            "--recompute-activation-function-num-layers",
            "Recompute activation functions in N layers of each pipeline stage; default: in all layers.",
            kind="value",
            type=int,
            metavar="N",
        ),
    ),
    patches=(
        Patch(
            "megatron.core.transformer.mlp:MLP.forward",
            "wrap",
            f"{_HERE}.activations:recompute_in_mlp",
            "the activation function lies between the forward's calls of fc1 and fc2",
            params=("hidden_states", "per_token_scale"),
            versions=releases.SERVED,
        ),
        *(
            Patch(
                f"megatron.core.transformer.moe.experts:{experts}.forward",
                "wrap",
                f"{_HERE}.activations:recompute_in_grouped_mlp",
                "Megatron's own moe_act recompute is switched on in the chosen layers",
                versions=versions,
            )
            for experts, versions in (("GroupedMLP", ">=0.12.1,<0.17"), ("TEGroupedMLP", releases.SERVED))
        ),
        *chosen_layers.rows(f"{_HERE}.activations", releases.SERVED),
    ),
    requires=_REQUIRES,
    active=_activation_wanted,
    options=ActivationOptions.of,
    check=check_activation,
    doc="recompute-activation-function.md",
)

# -- norms ---------------------------------------------------------------------------------------

_NORM = "--recompute-norm"
_norm_wanted = wanted("recompute_norm", "recompute_norm_num_layers")


@dataclass(frozen=True)
class NormOptions(LayerOptions):
    """Options of ``--recompute-norm``."""

    @classmethod
    def of(cls, settings: Any) -> NormOptions:
        """Build the options from resolved settings or from parsed arguments."""
        return cls.from_settings(settings, "recompute_norm")


def check_norm(args: Any, options: NormOptions) -> Iterator[str]:
    """Yield arguments or model settings that conflict with ``--recompute-norm``."""
    yield from check_layers(args, options, _NORM)
    yield from _check_recompute(args, _NORM)
    yield from _check_own_module(args, _NORM, "layernorm")
    is_dense = argument(args, "multi_latent_attention") is False and not number_of_experts(args)
    if is_dense and builds_by_engine(args):
        yield (
            f"{_NORM} has nothing to recompute: Transformer Engine's linear layers of this model hold both "
            "norms; use --transformer-impl local or omit it"
        )


NORM = Feature(
    name="recompute-norm",
    summary="Frees the outputs of a layer's two norms after their consumers have used them, and computes "
    "them again right before the consumers' backward reads them.",
    flags=(
        Flag("--recompute-norm", "Recompute the input norm and the norm before the MLP in backward."),
        Flag(
            "--recompute-norm-num-layers",
            "Recompute norms in N layers of each pipeline stage; default: in all layers.",
            kind="value",
            type=int,
            metavar="N",
        ),
    ),
    patches=(
        Patch(
            "megatron.core.transformer.transformer_layer:TransformerLayer.forward",
            "wrap",
            f"{_HERE}.norms:recompute_norms",
            "Megatron's own layernorm recompute is switched on in the chosen layers",
            versions=releases.SERVED,
        ),
        *chosen_layers.rows(f"{_HERE}.norms", releases.SERVED),
    ),
    requires=_REQUIRES,
    active=_norm_wanted,
    options=NormOptions.of,
    check=check_norm,
    doc="recompute-norm.md",
)

# -- the checkpoint ------------------------------------------------------------------------------

# Megatron builds their checkpoint without an `fp8` argument, and takes the default `False` for fp8
# (`self.fp8 = fp8 is not None`).
_NEED_TRANSFORMER_ENGINE = ("layernorm", "moe_act", "gdn_norm_out", "gdp_qkv")
"""Recompute modules whose checkpoint requires Transformer Engine even without fp8 (Megatron-core >= 0.14)."""


@dataclass(frozen=True)
class Options:
    """Options of the checkpoint class.

    Attributes:
        verify: whether to compare the recomputed bytes with the forward's.
    """

    verify: bool

    @classmethod
    def of(cls, settings: Any) -> Options:
        """Build the options from resolved settings or from parsed arguments."""
        return cls(verify=bool(getattr(settings, "recompute_verify", False)))


def recomputes_without_engine(settings: Any) -> bool:
    """Return whether Megatron's output-discarding recompute modules are on without Transformer Engine.

    Megatron's own checkpoint class fails without Transformer Engine. With it, that class works, fp8 included,
    and is not replaced.
    """
    return bool(_modules(settings)) and find_spec("transformer_engine") is None


def check_outputs(args: Any, options: Options) -> Iterator[str]:
    """Yield conflicts of ``--recompute-verify``, or of Megatron's own modules without Transformer Engine."""
    if argument(args, "recompute_verify"):
        yield from _check_outputs(args, "--recompute-verify")
        if not _frees_outputs(args):
            yield (
                "--recompute-verify compares outputs that are freed, and this job frees none; add "
                "--recompute-norm, --recompute-activation-function or --recompute-granularity selective with "
                "--recompute-modules mla_up_proj, or omit it"
            )
    elif recomputes_without_engine(args) and argument(args, "recompute_granularity") == "selective":
        modules = " ".join(_modules(args))
        yield from _check_outputs(args, f"--recompute-modules {modules} without Transformer Engine")


def _frees_outputs(args: Any) -> bool:
    """Return whether a feature or a module of Megatron frees outputs, instead of recomputing itself whole."""
    if any(argument(args, name) for name in ("recompute_norm", "recompute_activation_function")):
        return True
    is_selective = argument(args, "recompute_granularity") == "selective"
    modules = argument(args, "recompute_modules") or ()
    return is_selective and any(name in modules for name in (*_NEED_TRANSFORMER_ENGINE, "mla_up_proj"))


def _modules(settings: Any) -> list[str]:
    modules = getattr(settings, "recompute_modules", None) or ()
    return [name for name in _NEED_TRANSFORMER_ENGINE if name in modules]


OUTPUTS = Feature(
    name="recompute-outputs",
    summary="Frees a module's output and recomputes it in backward, for recompute-norm, "
    "recompute-activation-function and Megatron's own modules: without Transformer Engine, and with an "
    "optional check of every byte.",
    flags=(
        Flag(
            "--recompute-verify",
            "Keep a host copy of every output that is recomputed, and fail where the recomputed bytes "
            "differ. For debugging.",
        ),
        Flag("--recompute-modules", "Megatron's own flag.", kind="value", nargs="*", megatron=True),
    ),
    patches=(
        Patch(
            "megatron.core.tensor_parallel:CheckpointWithoutOutput",
            "value",
            f"{_HERE}.checkpoint:checkpoint_without_output",
            "Megatron's class needs Transformer Engine even without fp8, and copies random states every time",
            versions=releases.SERVED,
            factory=True,
        ),
    ),
    requires=_REQUIRES,
    active=any_of(_activation_wanted, _norm_wanted, wanted("recompute_verify"), recomputes_without_engine),
    options=Options.of,
    check=check_outputs,
    doc="recompute-outputs.md",
)

LEARNING_OUTPUTS = Feature(
    name="recompute-outputs-learning",
    summary="Gives gradients to weights behind frozen modules if Megatron's own class recomputes outputs: "
    "with Transformer Engine, or in mla_up_proj.",
    flags=(EXPERIMENTAL_ATTENTION_VARIANT,),
    patches=(
        Patch(
            "megatron.core.tensor_parallel.random:CheckpointWithoutOutput.checkpoint",
            "wrap",
            "mindspeed_dsa.megatron.frozen_inputs:learn_without_output",
            "weights get no gradient where no input wants one, and the output cannot be computed again",
            params=("run_function",),
            versions=releases.SERVED,
        ),
    ),
    requires=_REQUIRES,
    active=without(uses_dsa, "recompute-outputs"),
    when="the model uses DSA, and Megatron's checkpoint is not replaced",
    doc="recompute-outputs.md",
)

# -- shared conflicts ----------------------------------------------------------------------------


def _check_recompute(args: Any, flag: str) -> Iterator[str]:
    """Yield the conflicts that recomputing norms and activations have in common."""
    yield from _check_outputs(args, flag)
    # Transformer Engine's `save_original_input` refuses this recipe.
    why = "its consumer keeps a quantised copy, which cannot be made again, so nothing would be freed"
    yield from check_history(args, flag, why)
    yield from check_weight_shards(args, flag)
    if argument(args, "recompute_granularity") == "full" and argument(args, "recompute_method") != "block":
        yield (
            f"{flag} has nothing left to do where --recompute-granularity full recomputes every layer; drop "
            "one of them, or recompute only some layers in full with --recompute-method block"
        )
    if argument(args, "cpu_offloading"):
        yield (
            f"{flag} frees the memory of tensors that --cpu-offloading-num-layers moves to the host, which "
            "gains nothing; drop one of them"
        )
    if argument(args, "fine_grained_activation_offloading"):
        yield (
            f"{flag} frees the memory of tensors that --fine-grained-activation-offloading may still be "
            "copying to the host; drop one of them"
        )


def _check_outputs(args: Any, flag: str) -> Iterator[str]:
    """Yield conflicts of freeing outputs: hyper-connection recompute, and CUDA graphs."""
    if "mhc" in (argument(args, "recompute_modules") or ()):
        yield (
            f"{flag} cannot be used with --recompute-modules mhc: Megatron frees and recomputes what several "
            "layers' hyper-connections put out together; drop one of them"
        )
    yield from refuse_graphs(args, flag, "a graph holds the addresses of the memory that this frees")


def _check_own_module(args: Any, flag: str, module: str) -> Iterator[str]:
    """Yield an error if ``--recompute-modules`` already has the module that does the same work."""
    if argument(args, "recompute_granularity") == "selective" and module in (
        argument(args, "recompute_modules") or ()
    ):
        yield (
            f"{flag} and --recompute-modules {module} do the same work, the latter in every layer; drop "
            f"{module} from the modules"
        )
