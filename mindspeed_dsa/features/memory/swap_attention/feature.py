"""Declaration of swap-attention: saved tensors of attention are kept on the host until backward."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from packaging.version import Version

from mindspeed_dsa.feature import Feature, Flag, Requires
from mindspeed_dsa.features.memory import chosen_layers
from mindspeed_dsa.features.memory.chosen_layers import LayerOptions, check_layers
from mindspeed_dsa.features.memory.conditions import check_has_effect, wanted, without
from mindspeed_dsa.megatron import batches, releases
from mindspeed_dsa.megatron.configuration import argument, builds_by_engine, check_weight_shards
from mindspeed_dsa.megatron.graphs import refuse_graphs
from mindspeed_dsa.megatron.low_precision import check_stored
from mindspeed_dsa.megatron.pipeline_chunks import Split
from mindspeed_dsa.patches import versions
from mindspeed_dsa.patches.errors import SettingsError
from mindspeed_dsa.patches.spec import Patch
from mindspeed_dsa.platforms.host_pool import local_processes, require_host_memory

MODULES = {
    "input_norm": "input_layernorm",
    "self_attention": "self_attention",
    "post_attention_norm": "pre_mlp_layernorm",
}
"""Dict from names for ``--swap-modules`` to attributes of Megatron's layers."""
DEFAULT_MODULES = "self_attention"
_ENGINE_KEEPS = "NVTE_CPU_OFFLOAD_V1"
DEFAULT_MIN_BYTES = 1 << 20
MARGIN = 1.1
"""Safety factor on measured or nominal copy times, because processes share the link to the host."""


@dataclass(frozen=True)
class Options(LayerOptions):
    """Options of ``--swap-attention``.

    Attributes:
        modules: module names separated by commas; ``None`` if unset.
        min_bytes: size below which a storage stays on the device; ``None`` if unset.
        most_bytes: limit for bytes on the host at one time; ``None`` for no limit.
        measures: whether measurements in the first steps determine how much each layer swaps
            (``--swap-attention auto``).
    """

    modules: str | None
    min_bytes: int | None
    most_bytes: int | None = None
    measures: bool = False

    @classmethod
    def of(cls, settings: Any) -> Options:
        """Build the options from resolved settings or from parsed arguments."""
        return cls.from_settings(
            settings,
            "swap_attention",
            modules=getattr(settings, "swap_modules", None),
            min_bytes=getattr(settings, "swap_attention_min_bytes", None),
            most_bytes=getattr(settings, "swap_attention_bytes", None),
            measures=getattr(settings, "swap_attention", False) == "auto",
        )

    @property
    def names(self) -> list[str]:
        """Return the module names as given; validation restricts them to :data:`MODULES`."""
        return [name.strip() for name in (self.modules or DEFAULT_MODULES).split(",")]

    @property
    def attributes(self) -> tuple[str, ...]:
        """Return the names of the layer attributes that hold the selected modules."""
        return tuple(MODULES[name] for name in self.names)

    @property
    def smallest(self) -> int:
        """Return the size in bytes below which a storage stays on the device, with the default filled in."""
        return DEFAULT_MIN_BYTES if self.min_bytes is None else self.min_bytes


_FLAG = "--swap-attention"


def check_swapped_attention(args: Any, options: Options) -> Iterator[str]:
    """Yield arguments or model settings that conflict with ``--swap-attention``."""
    yield from check_layers(args, options, _FLAG)
    yield from check_has_effect(
        options.switched_on,
        _FLAG,
        swap_modules=options.modules,
        swap_attention_min_bytes=options.min_bytes,
        swap_attention_bytes=options.most_bytes,
    )
    yield from _check_values(options)
    yield from _check_other_movers(args)
    yield from _check_host_memory(args, options)


def _check_values(options: Options) -> Iterator[str]:
    """Yield errors for unknown module names and invalid sizes."""
    unknown = [name for name in options.names if name not in MODULES]
    if unknown:
        yield (
            f"--swap-modules {options.modules}: {', '.join(map(repr, unknown))} cannot be swapped; use names "
            f"out of {', '.join(MODULES)}, with commas between them"
        )
    if options.min_bytes is not None and options.min_bytes < 0:
        yield f"--swap-attention-min-bytes {options.min_bytes}: use a number of bytes, at least 0"
    if options.most_bytes is not None and options.most_bytes <= 0:
        yield (
            f"--swap-attention-bytes {options.most_bytes}: use a number of bytes above 0, or omit "
            "--swap-attention"
        )


def _check_engine(args: Any) -> Iterator[str]:
    """Yield a problem with releases of Transformer Engine that lose the weight of a swapped tensor."""
    engine = versions.parsed(versions.of_package("transformer_engine"))
    if engine is None or not Version("2.10") <= engine < Version("2.15") or not builds_by_engine(args):
        return
    fused = argument(args, "gradient_accumulation_fusion") and argument(args, "overlap_grad_reduce")
    if fused and os.environ.get(_ENGINE_KEEPS) != "1":
        yield (
            f"--swap-attention: Transformer Engine {engine} forgets which weight a swapped tensor is, and "
            f"--overlap-grad-reduce waits for its gradient; set {_ENGINE_KEEPS}=1, or add "
            "--no-gradient-accumulation-fusion"
        )


def _check_other_movers(args: Any) -> Iterator[str]:
    """Yield conflicts with other Megatron features that move, free or hide saved tensors."""
    if argument(args, "recompute_granularity") == "full" and argument(args, "recompute_method") != "block":
        yield (
            "--swap-attention has nothing left to swap where --recompute-granularity full recomputes every "
            "layer; drop one of them, recompute the MLP alone (--recompute-granularity selective "
            "--recompute-modules mlp, moe for experts), or only some layers in full with --recompute-method "
            "block"
        )
    for name, flag in (
        ("cpu_offloading", "--cpu-offloading-num-layers"),
        ("fine_grained_activation_offloading", "--fine-grained-activation-offloading"),
    ):
        if argument(args, name):
            yield (
                f"--swap-attention and {flag} both take saved tensors from autograd, which lets only the "
                "innermost of them have a tensor; drop one of them"
            )
    yield from refuse_graphs(
        args, "--swap-attention", "what a graph saves for backward is in its own memory and passes no hook"
    )
    yield from check_weight_shards(args, "--swap-attention")
    yield from _check_engine(args)
    yield from check_stored(args, "--swap-attention", "autograd saves parts of such weights as activations")
    for name in ("use_megatron_fsdp", "use_custom_fsdp"):
        if argument(args, name):
            yield (
                f"--swap-attention cannot be used with --{name.replace('_', '-')}: weights that are gathered "
                "inside a module would be taken for activations; use --use-distributed-optimizer instead"
            )


def _check_host_memory(args: Any, options: Options) -> Iterator[str]:
    """Yield an error if host memory is below the minimum that the first pipeline stage needs."""
    nbytes = least_host_bytes(args, options)
    if nbytes is None:
        return
    try:
        require_host_memory(
            nbytes,
            "--swap-attention on the first pipeline stage",
            "swap fewer layers (--swap-attention-num-layers N) or use smaller microbatches",
            _on_first_stage(args),
        )
    except SettingsError as error:
        yield str(error)


def _on_first_stage(args: Any) -> int:
    """Return the number of processes on this host that belong to the first pipeline stage."""
    local = local_processes()
    world = int(os.environ.get("WORLD_SIZE", local))
    # The ranks of a stage are consecutive: 16 ranks in 4 stages put ranks 0 to 3 on the first stage.
    return min(local, max(world // (argument(args, "pipeline_model_parallel_size") or 1), 1))


def least_host_bytes(args: Any, options: Options) -> int | None:
    """Return a lower bound on the bytes that the first stage swaps; ``None`` if arguments are missing.

    The first stage has as many microbatches in flight as there are stages, but at most the number in a batch.
    For each layer and microbatch, at least the query and the output of the core attention are swapped, and
    for multi-head attention also key and value. If the actual tensors do not fit, the host memory pool raises
    later.
    """
    names = ("seq_length", "micro_batch_size", "num_attention_heads", "hidden_size")
    sizes = [argument(args, name) for name in names]
    of_stage = _layers_of_first_stage(args)
    if None in sizes or of_stage is None or "self_attention" not in options.names:
        return None
    length, batch, heads, hidden = sizes
    stages = argument(args, "pipeline_model_parallel_size") or 1
    ranks = (argument(args, "tensor_model_parallel_size") or 1) * (
        argument(args, "context_parallel_size") or 1
    )
    # Elements per token: query and output with latent attention, also key and value otherwise.
    if argument(args, "multi_latent_attention"):
        recomputed = "mla_up_proj" in (argument(args, "recompute_modules") or ())
        query = (
            0
            if recomputed  # mla_up_proj recomputes the query in backward
            else (argument(args, "qk_head_dim") or 0) + (argument(args, "qk_pos_emb_head_dim") or 0)
        )
        width = heads * (query + (argument(args, "v_head_dim") or 0))
    else:
        head = argument(args, "kv_channels") or hidden // heads
        groups = (
            argument(args, "num_query_groups") if argument(args, "group_query_attention") else None
        ) or heads
        width = 2 * head * (heads + groups)
    of_layer = length * batch * width * _bytes_of_number(args) // ranks
    # Smaller storages stay on the device.
    if of_layer < options.smallest:
        return None
    if options.num_layers is not None:
        of_stage = min(options.num_layers, of_stage)
    least: int = of_layer * of_stage * min(stages, _microbatches(args))
    return least


def _layers_of_first_stage(args: Any) -> int | None:
    """Return the number of the first stage's layers that are not recomputed in full; ``None`` if unknown."""
    try:
        split = Split.of(args)
    except ValueError:  # a layout with unknown letters, which Megatron reports
        return None
    if split is None or split.problem:
        return None
    is_full = argument(args, "recompute_granularity") == "full"
    recomputed = (argument(args, "recompute_num_layers") or 0) if is_full else 0
    # --recompute-method block recomputes the first layers of each chunk.
    return sum(max(len(chunk) - recomputed, 0) for chunk in split.by_rank[0])


def _bytes_of_number(args: Any) -> int:
    return 2 if argument(args, "bf16") or argument(args, "fp16") else 4


def _microbatches(args: Any) -> int:
    """Return the largest number of microbatches that any step has."""
    steps = batches.of_training(args)
    return 1 if steps is None else max(steps.most_microbatches, 1)


_IMPL = "mindspeed_dsa.features.memory.swap_attention.layer_pass"
_PARALLEL = "megatron.core.tensor_parallel"
_wanted = wanted(
    "swap_attention",
    "swap_modules",
    "swap_attention_num_layers",
    "swap_attention_bytes",
    "swap_attention_min_bytes",
)

FEATURE = Feature(
    name="swap-attention",
    summary="Moves what attention saves for backward to host memory, and fetches it before its backward; "
    "both copies run behind the MLPs.",
    flags=(
        Flag(
            "--swap-attention",
            "Keep saved tensors of attention in host memory until their backward; auto: as many of them as "
            "the copies of the first steps show to be hidden behind computation.",
            kind="auto",
            default=False,
            choices=("auto",),
        ),
        Flag(
            "--swap-modules",
            f"Swap what these modules save: names out of {', '.join(MODULES)}, with commas between them; "
            f"default: {DEFAULT_MODULES}.",
            kind="value",
            metavar="NAMES",
        ),
        Flag(
            "--swap-attention-num-layers",
            "Swap in N layers of each pipeline stage; default: in all layers.",
            kind="value",
            type=int,
            metavar="N",
        ),
        Flag(
            "--swap-attention-bytes",
            "Keep at most so many bytes of a process in host memory at one time; default: no limit.",
            kind="value",
            type=int,
            metavar="BYTES",
        ),
        Flag(
            "--swap-attention-min-bytes",
            f"Leave storages on the device that have fewer bytes; default: {DEFAULT_MIN_BYTES >> 20} MiB.",
            kind="value",
            type=int,
            metavar="BYTES",
        ),
    ),
    patches=(
        Patch(
            "megatron.core.transformer.transformer_layer:TransformerLayer.forward",
            "wrap",
            f"{_IMPL}:swap_in_layer",
            "saved tensors leave the device at the end of a layer, and return a layer ahead of backward",
            versions=releases.SERVED,
        ),
        *chosen_layers.rows(_IMPL, releases.SERVED),
        Patch(
            "megatron.core.pipeline_parallel.schedules:get_forward_backward_func",
            "wrap",
            "mindspeed_dsa.features.memory.swap_attention.hidden_copies:Choice.wrap_steps",
            "the copies of the second step are measured, and later steps swap what is hidden",
        ),
        Patch(
            f"{_PARALLEL}.layers:LinearWithGradAccumulationAndAsyncCommunication.backward",
            "wrap",
            "mindspeed_dsa.parallel.saved_tensors:with_own_weight",
            "gradient accumulation fusion reads and sets attributes of the weight, which a saved copy lacks",
            ("ctx", "grad_output"),
            releases.SERVED,
        ),
    ),
    requires=Requires(versions={"megatron-core": releases.SERVED}),
    active=_wanted,
    options=Options.of,
    check=check_swapped_attention,
    doc="swap-attention.md",
)

OUTPUTS = Feature(
    name="swap-attention-outputs",
    summary="Keeps swap-attention from moving what Megatron's own modules recompute in place.",
    flags=(),
    patches=(
        Patch(
            f"{_PARALLEL}.random:CheckpointWithoutOutput.checkpoint",
            "wrap",
            "mindspeed_dsa.parallel.saved_tensors:mark_outputs",
            "outputs that Megatron recomputes in place must not be moved",
            ("run_function",),
            releases.SERVED,
        ),
    ),
    requires=Requires(versions={"megatron-core": releases.SERVED}),
    active=without(_wanted, "recompute-outputs"),
    doc="swap-attention.md",
)
