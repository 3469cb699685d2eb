"""DSA fields of a model configuration: their flags, presets of named models, and consistency checks.

Names and defaults follow Megatron-core 0.19. Earlier releases lack most of the fields, and no release has all
of them.

tests: tests/matrix/test_dsa_model.py
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mindspeed_dsa.feature import EXPERIMENTAL_ATTENTION_VARIANT, Feature, Flag
from mindspeed_dsa.megatron.configuration import argument
from mindspeed_dsa.megatron.dsa import (
    DSA,
    KERNELS,
    MLA,
    MODEL_SIZES,
    MODELS,
    OWN_LOOP,
    SIZES,
    rotates_first,
    uses_dsa,
)
from mindspeed_dsa.megatron.selections import Sharing
from mindspeed_dsa.patches import versions
from mindspeed_dsa.patches.errors import SettingsError
from mindspeed_dsa.patches.spec import Patch
from mindspeed_dsa.settings import Setting, Settings

# -- fields of the configuration ---------------------------------------------------------------

TOPK_FREQ = Flag(
    "--dsa-indexer-topk-freq",
    "One layer in so many selects keys, from --dsa-indexer-skip-topk-offset on; the layers between attend to "
    "the same keys and own no indexer. GLM-5.2 has 4.",
    kind="value",
    type=int,
    default=1,
    field=True,
)
SKIP_TOPK_OFFSET = Flag(
    "--dsa-indexer-skip-topk-offset",
    "Layers up to this one, counted from 1, all select keys; 0 is 1. GLM-5.2 has 3.",
    kind="value",
    type=int,
    default=0,
    field=True,
)
TOPK_PATTERN = Flag(
    "--dsa-indexer-topk-pattern",
    "A letter for each layer of the decoder, in place of frequency and offset: C or F selects keys, S "
    "attends to those of the next layer below that does.",
    kind="value",
    aliases=("--index-topk-pattern",),
    field=True,
)
SHARE_FOR_MTP = Flag(
    "--dsa-indexer-share-for-mtp",
    "Let only the first layer of multi-token prediction select keys; the others attend to the same.",
    kind="auto",
    default=False,
    aliases=("--index-share-for-mtp-iteration",),
    field=True,
)
ROPE_FIRST = Flag(
    "--dsa-indexer-rope-first",
    "Apply the indexer's rotary embedding to the first dimensions of each head, as DeepSeek and GLM do. "
    "Default: as Megatron does, on the last ones before 0.19 and on the first ones since.",
    kind="auto",
    field=True,
)
ROPE_INTERLEAVED = Flag(
    "--dsa-indexer-rope-interleaved",
    "Rotate the indexer's first dimensions in pairs of an even and an odd one, as GLM does, instead of half "
    "against half, as DeepSeek does.",
    kind="auto",
    default=False,
    field=True,
)
NORMALISED_QUERY = Flag(
    "--dsa-indexer-normalised-query",
    "Pass the indexer the latent query after its norm, as DeepSeek and GLM do. Default: as Megatron does, "
    "before it in releases before 0.19 and after it since.",
    kind="auto",
    field=True,
)
ROTATE_ACTIVATION = Flag(
    "--dsa-indexer-rotate-activation",
    "Rotate the indexer's queries and keys by a Hadamard matrix, which needs a head size that is a power of "
    "two. Default: on.",
    kind="auto",
    default=True,
    negations=("--disable-dsa-indexer-rotate-activation",),
    field=True,
)
SCORING_RELU = Flag(
    "--dsa-indexer-scoring-relu",
    "Apply ReLU to the products of the indexer's queries and keys before they are weighted. Default: on.",
    kind="auto",
    default=True,
    negations=("--disable-dsa-indexer-scoring-relu",),
    field=True,
)
K_NORM_EPSILON = Flag(
    "--dsa-indexer-k-norm-epsilon",
    "Epsilon of the indexer's key norm. Default: that of the model's norms. GLM and DeepSeek have 1e-6.",
    kind="value",
    type=float,
    field=True,
)
K_NORM_FP32 = Flag(
    "--dsa-indexer-k-norm-fp32",
    "Compute the indexer's key norm in fp32 and round its result, whatever the model's type is.",
    kind="auto",
    default=False,
    field=True,
)
SHARING_FLAGS = (TOPK_FREQ, SKIP_TOPK_OFFSET, TOPK_PATTERN, SHARE_FOR_MTP)
INDEXER_FLAGS = (
    ROPE_FIRST,
    ROPE_INTERLEAVED,
    NORMALISED_QUERY,
    ROTATE_ACTIVATION,
    SCORING_RELU,
    K_NORM_EPSILON,
    K_NORM_FP32,
)
FLAGS = (*SHARING_FLAGS, *INDEXER_FLAGS)

# -- models by name ----------------------------------------------------------------------------

MODEL_NAME = Flag(
    "--dsa-model",
    "Set the indexer's options and which layers select keys as this model has them; glm-5 and glm-5.1 are "
    "the same, glm-5.2 and glm-5.3 too. Sizes of the indexer are set where the job names none.",
    kind="value",
    choices=tuple(MODELS),
)


def fill_arguments(args: Any) -> Sequence[str]:
    """Fill unset job arguments from the preset of ``--dsa-model``; a ``Feature.rewrite``."""
    model = argument(args, MODEL_NAME.dest)
    if model is None or argument(args, "experimental_attention_variant") != "dsa":
        return ()
    # A value counts as unset if it is the flag's default; see _open_values.
    unset = {flag.dest: _open_values(flag) for flag in FLAGS} | dict.fromkeys(SIZES, (None,))
    filled = {
        name: value
        for name, value in (MODELS[model] | MODEL_SIZES[model]).items()
        if argument(args, name) in unset[name] and argument(args, name) != value
    }
    for name, value in filled.items():
        setattr(args, name, value)
    return (sets(model, filled),) if filled else ()


def _open_values(flag: Flag) -> tuple[Any, ...]:
    """Return the values that an argument can have if its flag is not given."""
    # A parser that Megatron derives from fields stores False, not None, for an unset "auto" flag.
    return (None, flag.unset, bool(flag.unset)) if flag.kind == "auto" else (None, flag.unset)


def sets(model: str, filled: Mapping[str, Any]) -> str:
    """Describe the fields that a preset has set, without fields set to None; "" if there are none."""
    said = ", ".join(f"{name}={value}" for name, value in filled.items() if value is not None)
    return f"{MODEL_NAME.name} {model} sets {said}" if said else ""


def _against(model: str, said: Mapping[str, str], values: Mapping[str, Any]) -> list[str]:
    """Describe values that contradict a preset. ``said`` maps each field to its name in messages."""
    return [
        f"{said[name]} contradicts {MODEL_NAME.name} {model}, which has {_shown(name, MODELS[model][name])}: "
        f"omit it, or omit {MODEL_NAME.name} and set each option by its flag"
        for name, value in values.items()
        if name in MODELS[model] and value != MODELS[model][name]
    ]


def _shown(name: str, value: Any) -> str:
    return f"{name} not given" if value is None else f"{name}={value}"


def against_model(args: Any, model: str) -> list[str]:
    """Describe job arguments that contradict a preset. Unset arguments do not contradict."""
    set_values = {}
    for flag in FLAGS:
        value = argument(args, flag.dest)
        if value not in _open_values(flag):
            set_values[flag.dest] = value
    return _against(model, {name: f"{name}={value!r}" for name, value in set_values.items()}, set_values)


@dataclass(frozen=True)
class Options:
    """DSA fields set by the job.

    Attributes:
        chosen: dict from field name to setting, for fields set by API, environment or command line.
        release: release of Megatron-core; None without Megatron.
        model: preset of ``--dsa-model``. Its fields are included in ``chosen``.
    """

    chosen: Mapping[str, Setting]
    release: str | None
    model: str | None = None

    @property
    def native(self) -> bool:
        """Return whether Megatron's indexer rotates its first dimensions and uses the normed latent query."""
        return rotates_first(self.release)

    @classmethod
    def of(cls, settings: Any) -> Options:
        """Build from settings, or from job arguments, for which ``chosen`` is empty.

        Raises:
            SettingsError: a setting contradicts the preset of ``--dsa-model``.
        """
        said = settings.chosen() if isinstance(settings, Settings) else {}
        fields = {flag.dest: said[flag.dest] for flag in FLAGS if flag.dest in said}
        model = getattr(settings, MODEL_NAME.dest, None)
        if model is not None:
            who = {name: f"{name}={setting.value!r} of {setting.who}" for name, setting in fields.items()}
            problems = _against(model, who, {name: setting.value for name, setting in fields.items()})
            if problems:
                raise SettingsError("mindspeed_dsa: dsa-model: " + "; ".join(problems))
        # A --dsa-model from job arguments has filled them already (fill_arguments).
        if model is not None and MODEL_NAME.dest in said:
            source = said[MODEL_NAME.dest].source
            named = f"{MODEL_NAME.name} {model}"
            fields = {name: Setting(value, source, named) for name, value in MODELS[model].items()} | fields
        return cls(
            chosen=fields,
            release=versions.of_job(settings),
            model=model,
        )


def wanted(settings: Any) -> bool:
    """Return whether the model uses DSA, or any DSA setting is set."""
    if uses_dsa(settings):
        return True
    said = any(getattr(settings, flag.dest, flag.unset) != flag.unset for flag in (*FLAGS, MODEL_NAME))
    return said or bool(getattr(settings, "dsa_backport", False))


def check_model(args: Any, options: Options) -> Iterator[str]:
    """Yield contradictions within a job's arguments or a model's configuration."""
    if getattr(args, "experimental_attention_variant", "dsa") != "dsa":
        described = (*FLAGS, MODEL_NAME)
        said = [flag.name for flag in described if argument(args, flag.dest) not in (None, flag.unset)]
        if said:
            yield (
                f"{', '.join(said)} describe DSA, and the model has none: add "
                "--experimental-attention-variant dsa, or omit them"
            )
        return
    if options.model is not None:
        yield from against_model(args, options.model)
    yield from Sharing.of(args).problems(argument(args, "num_layers"))
    first, interleaved = argument(args, ROPE_FIRST.dest), argument(args, ROPE_INTERLEAVED.dest)
    if interleaved and not first and not options.native:
        yield (
            f"{ROPE_INTERLEAVED.name} is about the first dimensions of the indexer's heads, and "
            f"Megatron-core {options.release} rotates the last ones; add {ROPE_FIRST.name}"
        )
    only = {ROPE_FIRST: "rotates the first dimensions", NORMALISED_QUERY: "normalises the indexer's query"}
    for flag, what in only.items():
        if options.native and argument(args, flag.dest) is False:
            yield (
                f"--no-{flag.name[2:]}: Megatron-core {options.release} always {what}; omit it, or train "
                "with a release before 0.19"
            )


_HERE = "mindspeed_dsa.features.dsa.model"
_CONFIG = "megatron.core.transformer.transformer_config"
CONFIGS = ("TransformerConfig", "MLATransformerConfig")
_LACKING = ">=0.12.1,<0.19"
_ANY = ">=0.12.1,<0.21"
_WHY = "Megatron's configuration lacks the field, and Megatron-LM copies arguments to fields it knows"


def field_rows(names: tuple[str, ...], impl: str, versions: str) -> tuple[Patch, ...]:
    """Build patches that add fields to Megatron's two configuration classes.

    The fields are added to ``__dataclass_fields__``, so code that reads, copies or derives configurations
    finds them.

    Args:
        names: names of the fields, and of the ``dataclasses.Field`` objects in ``impl``.
        impl: import path ``module:namespace`` of the field objects.
        versions: Megatron-core releases that lack the fields.
    """
    return tuple(
        Patch(
            f"{_CONFIG}:{config}.__dataclass_fields__",
            "entry",
            f"{impl}.{name}",
            _WHY,
            versions=versions,
            key=name,
        )
        for config in CONFIGS
        for name in names
    )


_OURS = (ROPE_FIRST, NORMALISED_QUERY)
"""Options that are always on in 0.19 and later, where Megatron has no field for them."""
_NOWHERE = (TOPK_PATTERN, SHARE_FOR_MTP)
"""Fields that no Megatron-core release has."""

MODEL = Feature(
    name="dsa-model",
    summary="DSA's model as its configuration says it: the fields and flags of Megatron-core 0.19 on every "
    "release, checked together.",
    flags=(*FLAGS, MODEL_NAME, EXPERIMENTAL_ATTENTION_VARIANT),
    active=wanted,
    options=Options.of,
    rewrite=fill_arguments,
    check=check_model,
    doc="dsa-model.md",
    patches=(
        *field_rows(
            tuple(flag.dest for flag in FLAGS if flag not in _NOWHERE), f"{_HERE}.fields:FIELDS", _LACKING
        ),
        *field_rows(tuple(flag.dest for flag in _NOWHERE), f"{_HERE}.fields:FIELDS", _ANY),
        *field_rows(tuple(flag.dest for flag in _OURS), f"{_HERE}.fields:NATIVE", KERNELS),
        *(
            Patch(
                f"{_CONFIG}:{name}.__init__",
                "wrap",
                f"{_HERE}.fields:take_fields",
                "Megatron's configuration rejects fields that it lacks, and does not know our settings",
                versions=_ANY,
            )
            for name in CONFIGS
        ),
        Patch(
            f"{_CONFIG}:TransformerConfig.__post_init__",
            "wrap",
            f"{_HERE}.fields:settle_fields",
            "configurations derived from Megatron's have constructors of their own, and end here as well",
            versions=_ANY,
            priority=100,  # outermost: the other wrappers find every field set
        ),
        Patch(
            f"{DSA}:DSAIndexer.__init__",
            "wrap",
            f"{_HERE}.indexer:build_key_norm",
            "before 0.19 the key norm has the epsilon and the type of the model, and since then fp32 input "
            "with bf16 weights, which torch's norm does not take",
            params=("config", "submodules"),
            versions=">=0.16,<0.21",
        ),
        Patch(
            f"{DSA}:DSAIndexer.__init__",
            "wrap",
            f"{_HERE}.uninitialised:initialise_indexer",
            "with --no-initialization the weights of indexers that no file has are what memory was",
            params=("config",),
            versions=">=0.16,<0.21",
        ),
        *(
            Patch(
                f"megatron.core.{target}.__init__",
                "wrap",
                f"{_HERE}.uninitialised:{marks}",
                "with --no-initialization split weights are not marked, and the gradient norm lacks those of "
                "all tensor parallel ranks but the first",
                versions=f">=0.12.1,<{fixed}",
            )
            for target, marks, fixed in (
                ("tensor_parallel.layers:VocabParallelEmbedding", "mark_rows", "0.18"),
                ("tensor_parallel.layers:ColumnParallelLinear", "mark_rows", "0.18"),
                ("tensor_parallel.layers:RowParallelLinear", "mark_columns", "0.18"),
                ("transformer.moe.experts:GroupedMLP", "mark_experts", "0.17"),
            )
        ),
        Patch(
            f"{DSA}:rotate_activation",
            "wrap",
            f"{_HERE}.indexer:rotate_where_wanted",
            "the indexer of these releases always rotates its queries and keys",
            params=("x",),
            versions=OWN_LOOP,
            priority=100,  # outside the wrapper that does the rotation
        ),
        Patch(
            f"{DSA}:DSAIndexer.forward_with_scores",
            "wrap",
            f"{_HERE}.indexer:project_with_scores",
            "the indexer of this release projects and scores in one function",
            versions=">=0.16,<0.17",
        ),
        Patch(
            f"{DSA}:DSAIndexer._compute_index_scores",
            "wrap",
            f"{_HERE}.indexer:score_without_relu",
            "the indexer of this release always applies ReLU",
            params=("q", "weights", "k"),
            versions=">=0.16,<0.17",
            priority=-100,  # inside the wrapper that takes the projections
        ),
        Patch(
            f"{DSA}:DSAIndexer.forward_before_topk",
            "wrap",
            f"{_HERE}.indexer:project",
            "the indexer of these releases always rotates, and Megatron's scores always apply ReLU",
            versions=">=0.17,<0.19",
        ),
        Patch(
            f"{MLA}:MLASelfAttention.get_query_key_value_tensors",
            "wrap",
            f"{_HERE}.indexer:normalise_latent_query",
            "the norm is fused into the up projection, after the point where the indexer branches off",
            versions=OWN_LOOP,
        ),
        Patch(
            f"{DSA}:DSAIndexer._apply_rope",
            "wrap",
            f"{_HERE}.indexer:rotate_as_configured",
            "the indexer of these releases rotates its last dimensions, in interleaved pairs",
            params=("x", "rotary_pos_emb", "mscale"),
            versions=OWN_LOOP,
            priority=-100,  # inside the wrapper that passes on the angles of packed documents
        ),
    ),
)
