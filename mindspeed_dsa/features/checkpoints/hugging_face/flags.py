"""Conversion of a model's arguments to Megatron-LM flags for a release, and access to a job's values.

The arguments are the result of ``config.arguments_of``. Releases differ in the names of YaRN's flags, in
whether the number of embedding rows can be set, and in which indexer options are Megatron's own.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from packaging.version import Version

from mindspeed_dsa.features.checkpoints.hugging_face.config import arguments_of
from mindspeed_dsa.features.checkpoints.hugging_face.rotary import yarn_scale
from mindspeed_dsa.megatron.dsa import rotates_first
from mindspeed_dsa.patches.errors import SettingsError

_NEGATED = {
    "add_bias_linear": "--disable-bias-linear",
    "dsa_indexer_rotate_activation": "--no-dsa-indexer-rotate-activation",
    "dsa_indexer_scoring_relu": "--no-dsa-indexer-scoring-relu",
}
"""Dict from arguments that default to true to the flags that disable them."""
ALWAYS_SINCE_0_19 = ("dsa_indexer_rope_first", "dsa_indexer_normalised_query")
_YARN = {
    "original_max_position_embeddings": ("yarn_original_max_position_embeddings", 4096),
    "beta_fast": ("yarn_beta_fast", 32.0),
    "beta_slow": ("yarn_beta_slow", 1.0),
}
"""Dict from fields of ``MLATransformerConfig`` to the flag's argument and its default."""
_ALSO = {
    "num_experts": "num_moe_experts",
    "norm_epsilon": "layernorm_epsilon",
    "swiglu": "gated_linear_unit",
    "apply_layernorm_1p": "layernorm_zero_centered_gamma",
    **{name: flag for name, (flag, _) in _YARN.items()},
}
"""Dict from arguments to names in a ``TransformerConfig``, which a job's namespace has too since 0.16."""
_TRAINED = ("--dsa-indexer-loss-coeff 0.01", "--dsa-indexer-use-sparse-loss")
_FROZEN = ("--dsa-stage frozen",)
_PADDING = 128
"""Default of ``--make-vocab-size-divisible-by``."""


def before_0_14(release: str) -> bool:
    """Return whether the release predates 0.14: YaRN only, and ``--mscale`` scales the softmax."""
    return Version(release) < Version("0.14.dev0")


# -- flags -------------------------------------------------------------------------------------


def flags_of(config: Mapping[str, Any], release: str, where: str) -> list[str]:
    """Return the flags of Megatron-LM and of this library that train a model.

    Args:
        config: parsed ``config.json`` of Hugging Face.
        release: release of Megatron-core, at least 0.12.1.
        where: source of the configuration as prefix of messages.

    Returns:
        One string per flag with its values, quoted for a shell.

    Raises:
        SettingsError: Megatron, or this release, does not support the model.
    """
    arguments = arguments_of(config, where)
    old, yarn = before_0_14(release), arguments.get("rope_type") == "yarn"
    if not isinstance(arguments["rotary_base"], int):
        raise SettingsError(
            f"{where}: rope_theta is {arguments['rotary_base']!r}, and Megatron-LM's --rotary-base an integer"
        )
    if old and yarn and arguments["mscale"] != arguments["mscale_all_dim"]:
        raise SettingsError(
            f"{where}: mscale {arguments['mscale']:g} is not mscale_all_dim {arguments['mscale_all_dim']:g}, "
            f"and Megatron-core {release} scales attention with --mscale for both; use 0.14 or later"
        )
    if lacking := lacks(arguments, release):
        raise SettingsError(f"{where}: {lacking}")
    if old:
        arguments.pop("rope_type", None)
        # Before 0.14 this argument is the length before YaRN's extension.
        if yarn:
            arguments["max_position_embeddings"] = arguments.pop("original_max_position_embeddings")
    else:
        arguments["padded_vocab_size"] = -(-arguments["vocab_size"] // _PADDING) * _PADDING
    # Leave out flags that would repeat a default.
    for name, (_, usual) in _YARN.items():
        if arguments.get(name) == usual:
            del arguments[name]
    if arguments.get("dsa_indexer_topk_freq") == 1:
        del arguments["dsa_indexer_topk_freq"], arguments["dsa_indexer_skip_topk_offset"]
    lines = [line for name, value in arguments.items() if (line := _line(name, value, release))]
    # The fused RoPE kernels support neither plain RoPE in latent attention nor DSA.
    lines += [["--no-rope-fusion"]] if arguments["multi_latent_attention"] else []
    return [shlex.join(line) for line in lines]


def lacks(arguments: Mapping[str, Any], release: str) -> str:
    """Return text that names a model's requirements that a release does not meet; empty if none."""
    if arguments.get("moe_shared_expert_gate") and Version(release) < Version("0.16.dev0"):
        return f"the shared expert has a gate, and Megatron-core {release} no flag for it; use 0.16 or later"
    return ""


def flags_of_training(config: Mapping[str, Any], frozen: bool, where: str) -> list[str]:
    """Return the flags that control the training of DSA; none for a model with dense attention.

    Args:
        config: parsed ``config.json`` of Hugging Face.
        frozen: whether indexers select keys without being trained.
        where: source of the configuration as prefix of messages.

    Raises:
        SettingsError: Megatron does not support the model, or ``frozen`` is set for a model without indexers.
    """
    if arguments_of(config, where).get("experimental_attention_variant") == "dsa":
        # Without a loss and not frozen, indexers would get only weight decay.
        return ["--use-fused-dsa", *(_FROZEN if frozen else _TRAINED)]
    if frozen:
        raise SettingsError(f"{where}: the model has no indexers, which --frozen is about")
    return []


def mend(name: str, value: Any, release: str) -> str:
    """Return advice for setting an argument: ``give --num-layers 61``, or ``omit --swiglu``."""
    line = _line(name, value, release)
    if line is not None:
        return f"give {shlex.join(line)}"
    if rotates_first(release) and name in ALWAYS_SINCE_0_19:
        return f"omit --no-{name.replace('_', '-')}"
    return f"omit {_NEGATED.get(name, _flag(name))}"


def _flag(name: str) -> str:
    renamed = _YARN[name][0] if name in _YARN else name
    return f"--{renamed.replace('_', '-')}"


def _line(name: str, value: Any, release: str) -> list[str] | None:
    """Return a list of the flag and the words that set an argument; ``None`` if no flag is needed."""
    if name in _NEGATED:
        return None if value else [_NEGATED[name]]
    if value is None or value is False or (name in ALWAYS_SINCE_0_19 and rotates_first(release)):
        return None
    if value is True:
        return [_flag(name)]
    return [_flag(name), pattern(value) if name == "moe_layer_freq" else str(value)]


def pattern(layers: Sequence[int]) -> str:
    """Return a list of layers as ``--moe-layer-freq`` takes it, for example ``([0]*3+[1]*58)``."""
    runs = ((kind, len(list(run))) for kind, run in itertools.groupby(layers))
    return f"({'+'.join(f'[{kind}]*{length}' for kind, length in runs)})"


# -- values of a job -----------------------------------------------------------------------------


class Missing:
    """Placeholder for an argument that an object does not have."""


MISSING = Missing()


def value_of(args: Any, name: str) -> Any:
    """Return an argument of a job's namespace or model configuration, or :data:`MISSING`."""
    first = getattr(args, name, MISSING)
    return getattr(args, _ALSO[name], MISSING) if first is MISSING and name in _ALSO else first


def layers_with_experts(args: Any) -> list[int] | Missing:
    """Return 1 for each layer with experts and 0 for dense layers, from a list or an interval."""
    layers, frequency = value_of(args, "num_layers"), value_of(args, "moe_layer_freq")
    if not isinstance(layers, int) or isinstance(frequency, Missing):
        return MISSING
    if isinstance(frequency, int):
        return [int(layer % frequency == 0) for layer in range(layers)]
    return [int(each) for each in frequency]


def prediction_layers(args: Any) -> int | None:
    """Return the number of multi-token prediction layers with their own weights; ``None`` if unknown."""
    here = value_of(args, "mtp_num_layers")
    if here is MISSING:
        return None
    # With a repeated layer, all predictions share the weights of one.
    return min(here or 0, 1) if getattr(args, "mtp_use_repeated_layer", False) else here or 0


def query_groups(args: Any) -> int | None:
    """Return the number of heads of keys and values; ``None`` if unknown."""
    groups = value_of(args, "num_query_groups")
    if groups in (None, MISSING) or not getattr(args, "group_query_attention", True):
        groups = value_of(args, "num_attention_heads")
    return groups if isinstance(groups, int) else None


def head_width(args: Any) -> int | None:
    """Return the number of dimensions of a head; ``None`` if unknown."""
    width, hidden, heads = (
        value_of(args, name) for name in ("kv_channels", "hidden_size", "num_attention_heads")
    )
    if width in (None, MISSING) and isinstance(hidden, int) and isinstance(heads, int):
        width = hidden // heads
    return width if isinstance(width, int) else None


def rotates_first_here(args: Any, name: str, release: str) -> bool:
    """Return the value of one of :data:`ALWAYS_SINCE_0_19`; unset arguments take the release's default."""
    value = getattr(args, name, None)
    return rotates_first(release) if value is None else bool(value)


class Rotary(NamedTuple):
    """Rotary embeddings, reduced to the values that affect the outputs.

    Attributes:
        base: base of the frequencies.
        factor: YaRN's extension factor; with 1 there is no extension, and the next three are ``None``.
        original: context length before the extension.
        beta_fast, beta_slow: rotations over the original context that bound the blended frequencies.
        magnitude: factor of sines and cosines.
        scale: factor of the attention scores, in addition to ``1 / sqrt(head_dim)``.
    """

    base: float
    factor: float
    original: int | None
    beta_fast: float | None
    beta_slow: float | None
    magnitude: float
    scale: float

    @classmethod
    def of(cls, args: Any, release: str) -> Rotary | None:
        """Build the values from a job's arguments or a model configuration; ``None`` if these lack RoPE's."""
        # Megatron defaults to YaRN, and multiplies the softmax scale for every rope type: by the square of
        # `yarn_scale` with `mscale` before 0.14, with `mscale_all_dim` since.
        base, factor = value_of(args, "rotary_base"), value_of(args, "rotary_scaling_factor")
        if isinstance(base, Missing) or isinstance(factor, Missing):
            return None
        old = before_0_14(release)
        scale = getattr(args, "mscale", 1.0)
        all_dims = getattr(args, "mscale_all_dim", 1.0 if old else 0.0)
        attention = yarn_scale(factor, scale if old else all_dims) ** 2
        if (getattr(args, "rope_type", None) or "yarn") == "rope" or factor == 1:
            return cls(float(base), 1.0, None, None, None, 1.0, attention)
        original = value_of(args, "max_position_embeddings" if old else "original_max_position_embeddings")
        fast, slow = value_of(args, "beta_fast"), value_of(args, "beta_slow")
        return cls(
            float(base),
            float(factor),
            _or_usual("original_max_position_embeddings", original),
            _or_usual("beta_fast", fast),
            _or_usual("beta_slow", slow),
            yarn_scale(factor, scale) / yarn_scale(factor, all_dims),
            attention,
        )


def _or_usual(name: str, value: Any) -> Any:
    return _YARN[name][1] if value is None or isinstance(value, Missing) else value
