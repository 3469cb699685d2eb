"""Comparison of a Hugging Face model with the model that a job trains: arguments, tensor names, shapes.

A job is given by its arguments or by a model configuration. Attributes that it lacks are not compared. Both
sides are compared by their effect: groups of experts that exclude none count as no groups, and YaRN with a
factor of 1 counts as plain RoPE.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from mindspeed_dsa.features.checkpoints.hugging_face import config
from mindspeed_dsa.features.checkpoints.hugging_face.config import INDEXER
from mindspeed_dsa.features.checkpoints.hugging_face.contradictions import (
    first_contradiction,
    layer_of,
    layers_beyond,
)
from mindspeed_dsa.features.checkpoints.hugging_face.flags import (
    ALWAYS_SINCE_0_19,
    MISSING,
    Rotary,
    before_0_14,
    head_width,
    lacks,
    layers_with_experts,
    mend,
    pattern,
    prediction_layers,
    query_groups,
    rotates_first_here,
    value_of,
)
from mindspeed_dsa.features.checkpoints.hugging_face.names import PADDED, Place, Shape, listed
from mindspeed_dsa.megatron.dsa import uses_dsa
from mindspeed_dsa.megatron.selections import Sharing
from mindspeed_dsa.patches.errors import SettingsError
from mindspeed_dsa.runs.files import RunError

if TYPE_CHECKING:
    from pathlib import Path

    from mindspeed_dsa.features.checkpoints.hugging_face.files import Reader
    from mindspeed_dsa.features.checkpoints.hugging_face.pieces import Piece

_WHO = "mindspeed_dsa load-hf"
_SAME = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads"),
    *("multi_latent_attention", "q_lora_rank", "kv_lora_rank"),
    *("qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "qk_layernorm"),
    *("num_experts", "moe_router_topk", "moe_router_score_function"),
    *("moe_router_pre_softmax", "moe_router_enable_expert_bias"),
    *("swiglu", "add_bias_linear", "normalization", "norm_epsilon"),
    "untie_embeddings_and_output_weights",
)
"""Arguments that must be equal, as far as the files' architecture has them."""
_WITHOUT = (
    "add_qkv_bias",
    "apply_layernorm_1p",
    "apply_residual_connection_post_layernorm",
    "attention_output_gate",
    "moe_latent_size",
    "moe_shared_expert_gate",
    "no_rope_freq",
    "qk_l2_norm",
    "quick_geglu",
    "rotary_interleaved",
    "rotary_seq_len_interpolation_factor",
    "squared_relu",
    "use_mup",
    "use_rope_scaling",
)
"""Switches that change a model's outputs; few architectures set any."""
_USUAL: dict[str, Any] = {
    "activation_func_clamp_value": None,
    "glu_linear_offset": 0.0,
    "softmax_type": "vanilla",
    "window_size": None,
}
"""Dict from arguments that change a model's outputs to the value that every architecture has."""
_POSITIONS = {True: ("rope", "yarn", "none"), False: ("rope",)}
"""Position embedding types with the files' outputs; latent attention (true) applies RoPE itself."""
_LATENT_EPSILON = 1e-6
"""Epsilon of transformers' norms of latents, independent of the configuration."""


def mismatches(arguments: Mapping[str, Any], args: Any, release: str) -> list[str]:
    """Return all argument mismatches: the job's value, the files' value, and the flag that fixes it.

    Args:
        arguments: arguments of the files' model, from ``config.arguments_of``.
        args: Megatron-LM's namespace, or a ``TransformerConfig``; attributes may be missing.
        release: release of Megatron-core, for the defaults of unset arguments.

    Returns:
        Messages. Fewer multi-token prediction layers than in the files, and indexers with the files of a
        dense model, are permitted; see :func:`remarks`.
    """
    if lacking := lacks(arguments, release):
        return [lacking]
    messages = [
        *_sizes(arguments, args, release),
        *_experts(arguments, args, release),
        *_rotary(arguments, args, release),
    ]
    if arguments["experimental_attention_variant"] == "dsa":
        messages += _indexers(arguments, args, release)
    return messages


def problems(args: Any, folder: Path, release: str) -> Iterator[str]:
    """Yield all mismatches between a model's files and a job's arguments: sizes, numbers, names of weights.

    Args:
        args: Megatron's arguments of the job.
        folder: folder of the files.
        release: release of Megatron-core.
    """
    from mindspeed_dsa.features.checkpoints.hugging_face.files import weights_of

    try:
        described, _ = config.read_model(folder, _WHO)
        arguments = config.arguments_of(described, f"{_WHO}: {folder / config.FILE}")
        yield from mismatches(arguments, args, release)
        files = weights_of(folder)
    except (RunError, SettingsError) as error:
        yield str(error)
        return
    if hasattr(args, "num_layers"):
        if contradiction := first_contradiction(files):
            yield contradiction
            return
        shape = Shape.of(args, files.architecture)
        yield from Mismatch.of(shape, files).problems(dense=adds_indexers(arguments, args))


def adds_indexers(arguments: Mapping[str, Any], args: Any) -> bool:
    """Return whether the job's model has indexers and the files' model is dense."""
    return uses_dsa(args) and arguments["experimental_attention_variant"] != "dsa"


def remarks(arguments: Mapping[str, Any], args: Any) -> list[str]:
    """Return the permitted differences: missing indexers, dropped MTP layers, epsilon of latent norms."""
    messages = []
    if adds_indexers(arguments, args):
        messages.append("the files are of a dense model: indexers are initialised, all else is read")
    here, there = prediction_layers(args), arguments["mtp_num_layers"] or 0
    if here is not None and here < there:
        messages.append(
            f"the files have {there} layers of multi-token prediction, and {here} are trained: the others "
            f"are left out; give --mtp-num-layers {there} to train them"
        )
    epsilon = arguments["norm_epsilon"]
    if arguments["multi_latent_attention"] and epsilon != _LATENT_EPSILON:
        messages.append(
            f"transformers computes the norms of latent queries and keys with epsilon {_LATENT_EPSILON:g}, "
            f"and Megatron, which has one for all norms, with {epsilon:g}"
        )
    return messages


def _differs(name: str, here: Any, there: Any, release: str) -> str:
    return f"{name} is {_shown(here)} here and {_shown(there)} in the files: {mend(name, there, release)}"


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return pattern(value)
    return f"{value:.10g}" if isinstance(value, float) else str(value)


def _equal(here: Any, there: Any) -> bool:
    if isinstance(here, float) or isinstance(there, float):
        return here is not None and there is not None and math.isclose(here, there)
    return bool(here == there)


def _sizes(arguments: Mapping[str, Any], args: Any, release: str) -> Iterator[str]:
    latent = arguments["multi_latent_attention"]
    # Where all layers have experts, no layer has the width of dense ones.
    unused = ("ffn_hidden_size",) if arguments["num_experts"] and all(arguments["moe_layer_freq"]) else ()
    for name in (name for name in _SAME if name in arguments and name not in unused):
        here, there = value_of(args, name), arguments[name]
        if here is not MISSING and not _equal(here, there):
            yield _differs(name, here, there, release)
    for name in _WITHOUT:
        here, there = value_of(args, name), arguments.get(name)
        if here is not MISSING and bool(here) != bool(there):
            yield _differs(name, here, there, release)
    for name, usual in _USUAL.items():
        # None is Megatron's default where it is not this one.
        if (here := value_of(args, name)) not in (MISSING, None, usual):
            yield _differs(name, here, usual, release)
    if not latent:
        for name, width in (("num_query_groups", query_groups(args)), ("kv_channels", head_width(args))):
            if width is not None and width != arguments[name]:
                yield _differs(name, width, arguments[name], release)
        variant = value_of(args, "experimental_attention_variant")
        if variant is not MISSING and variant:
            yield _differs("experimental_attention_variant", variant, None, release)
    positions = value_of(args, "position_embedding_type")
    if positions is not MISSING and positions not in _POSITIONS[latent]:
        yield _differs("position_embedding_type", positions, arguments["position_embedding_type"], release)
    activation = value_of(args, "activation_func")
    if activation is not MISSING and getattr(activation, "__name__", "") != "silu":
        name = getattr(activation, "__name__", activation)
        yield f"activation_func is {name} here and silu in the files: give --swiglu alone"
    yield from _vocabulary(arguments["vocab_size"], args, release)
    here, there = prediction_layers(args), arguments["mtp_num_layers"] or 0
    if here is not None and here > there:
        yield _differs("mtp_num_layers", here, there or None, release)


def _vocabulary(there: int, args: Any, release: str) -> Iterator[str]:
    """Yield a message if the job's embedding has fewer rows than the files'; more rows are padding."""
    padded, unpadded = value_of(args, "padded_vocab_size"), value_of(args, "vocab_size")
    name, here = ("vocab_size", unpadded) if padded in (MISSING, None) else ("padded_vocab_size", padded)
    # Without --padded-vocab-size, Megatron-LM pads once the tokenizer is built, after this check.
    if here is MISSING or here is None:
        return
    ranks, multiple = (
        value_of(args, flag) for flag in ("tensor_model_parallel_size", "make_vocab_size_divisible_by")
    )
    ranks = 1 if ranks is MISSING else ranks
    # --make-vocab-size-divisible-by 128 on 4 ranks pads to a multiple of 512.
    rows = here
    if name == "vocab_size" and multiple is not MISSING:
        rows = -(-here // (multiple * ranks)) * multiple * ranks
    if rows >= there:
        return
    if before_0_14(release):
        advice = f"give --make-vocab-size-divisible-by {-(-there // ranks)}"
    else:
        advice = f"give --padded-vocab-size {there} or more"
    yield f"{name} is {here} here and {there} in the files, of which no row can be left out: {advice}"


# -- experts -----------------------------------------------------------------------------------


def _experts(arguments: Mapping[str, Any], args: Any, release: str) -> Iterator[str]:
    if not value_of(args, "num_experts") or not arguments["num_experts"]:
        return  # reported by the comparison of `num_experts`
    interleaved = ("moe_mlp_glu_interleave_size", "moe_shared_expert_glu_interleave_size")
    for name in ("moe_apply_probs_on_input", *interleaved):
        if (value := value_of(args, name)) not in (MISSING, None, False):
            yield _differs(name, value, False if value is True else None, release)
    balancing = str(value_of(args, name := "moe_router_load_balancing_type"))
    for kind in (kind for kind in ("sinkhorn", "quantile_balancing") if kind in balancing):
        yield f"{name} is {kind} here and top-k of scores in the files: {mend(name, 'aux_loss', release)}"
    here = value_of(args, "moe_ffn_hidden_size")
    if here is not MISSING:
        here = value_of(args, "ffn_hidden_size") if here is None else here
        if not _equal(here, arguments["moe_ffn_hidden_size"]):
            yield _differs("moe_ffn_hidden_size", here, arguments["moe_ffn_hidden_size"], release)
    for name, usual in (("moe_shared_expert_intermediate_size", 0), ("moe_router_topk_scaling_factor", 1.0)):
        here, there = value_of(args, name), arguments[name]
        if here is not MISSING and not _equal(here or usual, there or usual):
            yield _differs(name, here, there, release)
    # Lists of another length say nothing that `num_layers` has not said.
    layers = layers_with_experts(args)
    comparable = isinstance(layers, list) and value_of(args, "num_layers") == arguments["num_layers"]
    if comparable and layers != arguments["moe_layer_freq"]:
        yield _differs("moe_layer_freq", layers, arguments["moe_layer_freq"], release)
    groups, group_topk = value_of(args, "moe_router_num_groups"), value_of(args, "moe_router_group_topk")
    if MISSING in (groups, group_topk):
        return
    if not groups or not group_topk or group_topk >= groups:
        groups = group_topk = None
    for name, here in (("moe_router_num_groups", groups), ("moe_router_group_topk", group_topk)):
        if here != arguments[name]:
            yield _differs(name, here, arguments[name], release)


# -- rotary embeddings --------------------------------------------------------------------------


def _rotary(arguments: Mapping[str, Any], args: Any, release: str) -> Iterator[str]:
    # arguments_of() returns the values as releases from 0.14 on define them.
    here, there = Rotary.of(args, release), Rotary.of(SimpleNamespace(**arguments), "0.14")
    base, part = value_of(args, "rotary_base"), value_of(args, "rotary_percent")
    if base is not MISSING and not _equal(float(base), float(arguments["rotary_base"])):
        yield _differs("rotary_base", base, arguments["rotary_base"], release)
    if part is not MISSING and part != 1:
        yield _differs("rotary_percent", part, 1.0, release)
    if there is None:
        factor = value_of(args, "rope_scaling_factor")
        there_factor = arguments.get("rope_scaling_factor", factor)
        if factor is not MISSING and not _equal(factor, there_factor):
            yield _differs("rope_scaling_factor", factor, there_factor, release)
        return
    if here is None:
        return
    if not _equal(here.factor, there.factor):
        kinds = {True: "yarn", False: "rope"}
        flags = mend("rotary_scaling_factor", there.factor, release)
        if not before_0_14(release):
            flags += f" --rope-type {kinds[there.factor != 1]}"
        yield (
            f"rotary embeddings are {kinds[here.factor != 1]} with a factor of {here.factor:g} here and "
            f"{kinds[there.factor != 1]} with {there.factor:g} in the files: {flags}"
        )
        return
    old = before_0_14(release)
    length = "max_position_embeddings" if old else "original_max_position_embeddings"
    for name, ours, theirs in (
        (length, here.original, there.original),
        ("beta_fast", here.beta_fast, there.beta_fast),
        ("beta_slow", here.beta_slow, there.beta_slow),
    ):
        if ours != theirs:
            yield _differs(name, ours, theirs, release)
    yield from _magnitudes(arguments, here, there, release)


def _magnitudes(arguments: Mapping[str, Any], here: Rotary, there: Rotary, release: str) -> Iterator[str]:
    if _equal(here.magnitude, there.magnitude) and _equal(here.scale, there.scale):
        return
    scale, all_dims = arguments.get("mscale", 1.0), arguments.get("mscale_all_dim", 0.0)
    if there.factor == 1:
        advice = mend("rotary_scaling_factor", 1.0, release)
    elif before_0_14(release) and scale != all_dims:
        advice = f"Megatron-core {release} scales attention with --mscale for both; train with 0.14 or later"
    else:
        advice = f"give --mscale {scale:g} --mscale-all-dim {all_dims:g}"
    yield (
        f"YaRN multiplies sines by {here.magnitude:g} and attention's scores by {here.scale:g} here, and by "
        f"{there.magnitude:g} and {there.scale:g} in the files: {advice}"
    )


# -- indexers ----------------------------------------------------------------------------------


def _indexers(arguments: Mapping[str, Any], args: Any, release: str) -> Iterator[str]:
    variant = value_of(args, "experimental_attention_variant")
    if variant != "dsa":
        if variant is not MISSING:
            yield _differs("experimental_attention_variant", variant, "dsa", release)
        return
    for name in INDEXER:
        here = value_of(args, name)
        if here is not MISSING and here != arguments[name]:
            yield _differs(name, here, arguments[name], release)
    for name in ALWAYS_SINCE_0_19:
        if not rotates_first_here(args, name, release):
            yield _differs(name, False, True, release)
    for name, usual in (("dsa_indexer_rope_interleaved", False), ("dsa_indexer_scoring_relu", True)):
        here = value_of(args, name)
        here = usual if here is MISSING or here is None else here
        if here != arguments[name]:
            yield _differs(name, here, arguments[name], release)
    # The Hadamard transform of queries and keys does not change exact scores, so it is not compared.
    name = "dsa_indexer_k_norm_epsilon"
    here = value_of(args, name)
    here = value_of(args, "norm_epsilon") if here is MISSING or here is None else here
    if here is not MISSING and not _equal(here, arguments[name]):
        yield _differs(name, here, arguments[name], release)
    yield from _selections(arguments, args, release)


def _selections(arguments: Mapping[str, Any], args: Any, release: str) -> Iterator[str]:
    """Yield a message if other layers select keys, and own indexers, in the job than in the files."""
    layers = arguments["num_layers"]
    if value_of(args, "num_layers") not in (MISSING, layers):
        return
    here, there = Sharing.of(args), Sharing.of(SimpleNamespace(**arguments))
    if any(here.computes(layer) != there.computes(layer) for layer in range(1, layers + 1)):
        if there.pattern:
            flags = mend("dsa_indexer_topk_pattern", there.pattern, release)
        elif there.frequency > 1:
            flags = (
                f"give --dsa-indexer-topk-freq {there.frequency} "
                f"--dsa-indexer-skip-topk-offset {there.offset}"
            )
        else:
            flags = "omit --dsa-indexer-topk-freq and --dsa-indexer-topk-pattern"
        yield f"{here.words(layers)} select keys here and {there.words(layers)} in the files: {flags}"
    trained = range(1, min(prediction_layers(args) or 0, arguments["mtp_num_layers"] or 0) + 1)
    if any(here.mtp_computes(layer) != there.mtp_computes(layer) for layer in trained):
        flags = mend("dsa_indexer_share_for_mtp", there.mtp_shares, release)
        yield f"other layers of multi-token prediction select keys here than in the files: {flags}"


# -- names and shapes of tensors -----------------------------------------------------------------


@dataclass(frozen=True)
class Mismatch:
    """Differences between the tensor names of a job's model and of the files.

    Attributes:
        missing: names that the files lack, without indexers.
        unexpected: names that the model lacks.
        indexers: numbers, from 1, of the layers whose indexers the files lack.
        predictions: number of multi-token prediction layers that only the files have.
        idle: numbers, from 1, of the layers that share a selection and have an indexer in the files.
        beyond: message on layers that the configuration does not mention; empty: there are none.
    """

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    indexers: tuple[int, ...]
    predictions: int
    idle: tuple[int, ...] = ()
    beyond: str = ""

    @classmethod
    def of(cls, shape: Shape, files: Reader) -> Mismatch:
        """Compare the tensor names of a model with its files."""
        wanted, missing, indexers = set[str](), list[str](), set[int]()
        for place in shape.places():
            names = shape.names(place)
            wanted.update(names)
            lacking = [name for name in names if name not in files.names]
            if lacking and place.indexer:
                indexers.add(place.layer + 1 + (shape.layers if place.inner else 0))
            else:
                missing += lacking
        first_left_out = shape.layers + len(shape.prediction_indexers)
        idle = set(shape.idle()) & files.names
        wanted |= {name for name, _ in shape.repeated()} | idle
        if shape.tied:
            wanted.add("lm_head.weight")  # some files repeat the tied weight
        beyond = [number for number in files.predictions if number >= first_left_out]
        left_out = tuple(f"model.layers.{number}." for number in beyond)
        others = (name for name in files.names - wanted if not name.startswith(left_out))
        unexpected = [name for name in others if not name.endswith(shape.architecture.tensors.buffers)]
        spoken = shape.layers + len(files.predictions)
        after = [name for name in unexpected if layer_of(name) >= spoken]
        return cls(
            tuple(missing),
            tuple(sorted(set(unexpected) - set(after))),
            tuple(sorted(indexers)),
            len(beyond),
            idle=tuple(sorted({layer_of(name) + 1 for name in idle})),
            beyond=layers_beyond(after, shape, len(files.predictions)),
        )

    def problems(self, dense: bool) -> Iterator[str]:
        """Yield a message for each kind of difference that is not permitted.

        Args:
            dense: whether the files' model is dense, so that missing indexers are initialised.
        """
        if self.missing:
            yield f"the files lack {listed(self.missing)}"
        if self.unexpected:
            yield f"the files have {listed(self.unexpected)}, which the model does not"
        if self.beyond:
            yield self.beyond
        if self.indexers and not dense:
            yield f"the files lack the indexers of layers {listed([str(layer) for layer in self.indexers])}"

    def notes(self) -> Iterator[str]:
        """Yield a message for parts of the files that are left out."""
        if self.idle:
            layers = listed([str(layer) for layer in self.idle])
            yield (
                f"the files have indexers in layers {layers}, which share a selection: these are not read, "
                "and an export with --like copies them"
            )


def wrong_shapes(pieces: Iterable[Piece], files: Reader, shape: Shape, where: str = "here") -> Iterator[str]:
    """Yield a message for each tensor that has another shape in the files.

    Args:
        pieces: regions of the model's tensors.
        files: weights of the whole model.
        shape: layers of the model.
        where: source of the model's shapes, for the messages.
    """
    seen = set[Place]()
    for piece in pieces:
        names = shape.names(piece.place)
        if piece.place in seen or any(name not in files.names for name in names):
            continue
        seen.add(piece.place)
        rows, *rest = piece.whole
        expected = dict.fromkeys(names, 0)
        for name, first, last in shape.segments(piece.place, rows):
            expected[name] += last - first
        stored_shapes = {name: files.shape(name) for name in names}
        # Megatron pads the rows of the embedding, so the files may have fewer.
        least = 0 if piece.place.name in PADDED else rows
        if any(
            list(stored[1:]) != rest or not min(least, expected[name]) <= stored[0] <= expected[name]
            for name, stored in stored_shapes.items()
        ):
            described = " and ".join(
                f"{name} {list(stored)} in {files.file(name)}" for name, stored in stored_shapes.items()
            )
            yield f"{piece.place} is {list(piece.whole)} {where}, and the files have {described}"
