"""Translation of TorchTitan 0.2's jobs into the planner's."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from mindspeed_dsa.megatron.pipeline_chunks import stages_text
from mindspeed_dsa.tools.planner import arguments, configs, flags, layouts
from mindspeed_dsa.tools.planner.job import Features, Job, Layout, Model, Sharding, Training
from mindspeed_dsa.tools.planner.routing import BIASED, FORCED, IMBALANCES
from mindspeed_dsa.tools.planner.torchtitan_settings import Settings, read

CONVERTERS: Mapping[str, str] = {
    "npu_dsa": "dsa",
    "npu_rms_norm": "rms_norm",
    "npu_permute": "permute",
    "npu_gmm": "grouped_matmul",
    "npu_rope": "rope",
}
"""Converters that can be planned, with their other names."""
MODELS = {
    ("deepseek_v3", "671B"): "deepseek-v3",
    ("deepseek_v32", "671B"): "deepseek-v3.2",
    ("llama3", "8B"): "llama-3.1-8b",
}
"""Names of models for ``--config``, by model and the flavor's part before ``_``."""
SCHEDULES = {"1f1b": 1, "interleaved1f1b": 2, "dualpipev": 2}
"""Chunks of a rank by pipeline schedule."""


def job_of(
    words: Sequence[str], devices: int | None, config_file: str | None, imbalance: float | None
) -> Job:
    """Build a job.

    Args:
        words: TOML file, then settings that override it.
        devices: number of devices; by default the number in the settings, or the smallest that they need.
        config_file: name or path of a ``config.json`` with the model's sizes; by default the flavor's.
        imbalance: tokens on the rank with the most expert tokens, over the mean; by default the usual number.

    Raises:
        SettingsError: settings that cannot be planned, or that exclude each other.
    """
    settings = read(words)
    arguments.check_sizes(devices, imbalance)
    converters = _converters(settings)
    model = _model(settings, converters, config_file)
    layout = _layout(settings, model, devices)
    training, features, notes = _training(settings, converters, layout, model)
    forced = settings["debug.moe_force_load_balance"] or not model.experts
    balancing = FORCED if forced else BIASED  # TorchTitan's routers learn a bias by default
    job = Job(
        model,
        layout,
        training,
        features,
        IMBALANCES[balancing] if imbalance is None else imbalance,
        _sharding(settings, layout),
        notes,
        "" if imbalance else balancing,
    )
    layouts.check(job, any_number=devices is None, flags=False)
    return job


def _converters(settings: Settings) -> set[str]:
    chosen = {CONVERTERS.get(name, name) for name in settings["model.converters"]}
    if others := chosen.difference(CONVERTERS.values()):
        known = ", ".join(CONVERTERS)
        raise settings.refused("model.converters", f"plans know no {', '.join(sorted(others))}, but {known}")
    return chosen


def _model(settings: Settings, converters: set[str], config_file: str | None) -> Model:
    name, flavor = settings["model.name"], settings["model.flavor"]
    sizes = config_file or MODELS.get((name, flavor.partition("_")[0]))
    if sizes is None:
        raise settings.refused(
            "model.flavor",
            f"the sizes of this {name} are not known; give --config FILE, a config.json or one of "
            f"{', '.join(configs.KNOWN)}",
        )
    options, _, _ = flags.read([])
    configs.apply(Path(sizes), options, set())
    options.mtp_num_layers, options.padded_vocab_size = None, options.vocab_size
    options.experimental_attention_variant = None
    if "dsa" in converters or name == "deepseek_v32":
        options.experimental_attention_variant = "dsa"
        options.dsa_indexer_topk = settings.size("dsa.topk")
        options.dsa_indexer_n_heads = settings.size("dsa.index_heads")
        options.dsa_indexer_head_dim = settings.size("dsa.index_dim")
        options.dsa_indexer_loss_coeff = settings["dsa.loss_coeff"]
    return arguments.model_of(options)


def _layout(settings: Settings, model: Model, devices: int | None) -> Layout:
    tp, pp, cp, ep, etp = (
        settings.size(f"parallelism.{kind}_parallel_degree")
        for kind in ("tensor", "pipeline", "context", "expert", "expert_tensor")
    )
    schedule = settings["parallelism.pipeline_parallel_schedule"]
    chunks = SCHEDULES.get(schedule.lower())
    if chunks is None or settings["parallelism.pipeline_parallel_schedule_csv"]:
        raise settings.refused(
            "parallelism.pipeline_parallel_schedule",
            "other schedules and CSV files cannot be planned; give 1F1B, Interleaved1F1B or DualPipeV",
        )
    if settings["parallelism.module_fqns_per_model_part"] is not None:
        raise settings.refused(
            "parallelism.module_fqns_per_model_part", "lists of modules cannot be planned; leave it out"
        )
    if ep == 1 or not model.experts:
        ep, etp = 1, tp if model.experts else 1
    elif etp not in (1, tp):
        raise settings.refused("parallelism.expert_tensor_parallel_degree", f"give 1 or {tp}")
    stages = _stages(settings, model.layers, pp, chunks)
    wanted = Layout(
        tp=tp,
        pp=pp,
        vpp=len(stages) // pp if pp > 1 else 1,
        ep=ep,
        etp=etp,
        cp=cp,
        sequence=tp > 1,
        group=pp,
        stages=stages,
        v_shaped=pp > 1 and schedule.lower() == "dualpipev",
        cp_algorithm=(
            "all_gather" if settings["parallelism.context_parallel_rotate_method"] == "allgather" else "p2p"
        ),
    )
    replicas, shards = _data_parallel(settings)
    if shards > 0:
        named = replicas * shards * tp * pp * cp
        if devices not in (None, named):
            raise settings.refused(
                "parallelism.data_parallel_shard_degree",
                f"the degrees make {named} devices, not {devices}; give --devices {named}, or -1 here",
            )
        devices = named
    elif devices is None:
        devices = math.lcm(layouts.least_devices(wanted), replicas * tp * pp * cp)
    layout = layouts.placed(wanted, devices)
    if layout.dp % replicas:
        raise settings.refused(
            "parallelism.data_parallel_replicate_degree",
            f"it does not divide {layout.dp} data parallel ranks",
        )
    return layout


def _data_parallel(settings: Settings) -> tuple[int, int]:
    """Return the degrees of data parallelism with copies and with shards; -1 for all ranks that are left."""
    shards: int = settings["parallelism.data_parallel_shard_degree"]
    if shards == 0 or shards < -1:
        raise settings.refused("parallelism.data_parallel_shard_degree", "give 1 or more, or -1")
    return settings.size("parallelism.data_parallel_replicate_degree"), shards


def _shards(settings: Settings, layout: Layout) -> int:
    """Return the number of ranks over which FSDP shards dense weights: shard and context ranks."""
    return layout.dp // _data_parallel(settings)[0] * layout.cp


def _stages(settings: Settings, layers: int, ranks: int, chunks: int) -> tuple[str, ...]:
    """Return the letters of each pipeline stage: embedding and output count as some layers."""
    if ranks == 1:
        return ()
    first = settings["parallelism.pipeline_parallel_first_stage_less_layers"]
    last = settings["parallelism.pipeline_parallel_last_stage_less_layers"]
    counted, number = layers + first + last, ranks * chunks
    if settings["parallelism.pipeline_parallel_layers_per_stage"] is not None:
        key = "parallelism.pipeline_parallel_layers_per_stage"
        number = math.ceil(counted / settings.size(key))
        if number % ranks or (number == ranks) != (chunks == 1):
            raise settings.refused(key, f"it makes {number} stages of {ranks} pipeline ranks; leave it out")
    # 61 + 1 + 1 layers in 4 stages are 16, 16, 16 and 15: 15, 16, 16 and 14 without embedding and output.
    sizes = [counted // number + (stage < counted % number) for stage in range(number)]
    sizes[0] -= first
    sizes[-1] -= last
    if min(sizes) < 0:
        key = "parallelism.pipeline_parallel_degree"
        raise settings.refused(key, f"{layers} layers cannot be dealt out to {number} stages")
    return stages_text(sizes, 0)


def _check(settings: Settings, layout: Layout) -> None:
    """Raise ``SettingsError`` for switches that change memory in a way that plans do not know."""
    if settings["optimizer.name"] not in ("Adam", "AdamW"):
        raise settings.refused("optimizer.name", "only Adam and AdamW can be planned")
    whole_logits = settings["parallelism.disable_loss_parallel"] and layout.tp > 1
    for key, on, why in (
        ("training.enable_cpu_offload", settings["training.enable_cpu_offload"], "it"),
        ("optimizer.early_step_in_backward", settings["optimizer.early_step_in_backward"], "it"),
        (
            "optimizer.implementation",
            settings["optimizer.implementation"] == "foreach",
            "a copy of all weights",
        ),
        ("parallelism.disable_loss_parallel", whole_logits, "whole logits on tensor parallel ranks"),
        ("fault_tolerance.enable", settings["fault_tolerance.enable"], "a changing number of replicas"),
    ):
        if on:
            raise settings.refused(key, f"{why} cannot be planned; leave it out")


def _left_out(settings: Settings) -> list[str]:
    """Return notes on switches whose effects plans leave out."""
    components = settings["compile.components"]
    switches = {
        "parallelism.enable_async_tensor_parallel is": settings["parallelism.enable_async_tensor_parallel"],
        "a compiled loss is": settings["compile.enable"]
        and "loss" in components
        and "model" not in components,
        "passes of validation are": settings["validation.enable"],
        "copies of asynchronous checkpoints on the host are": settings["checkpoint.enable"]
        and settings["checkpoint.async_mode"] != "disabled",
    }
    return [f"{subject} NOT planned" for subject, on in switches.items() if on]


def _training(
    settings: Settings, converters: set[str], layout: Layout, model: Model
) -> tuple[Training, Features, tuple[str, ...]]:
    """Return the settings of a step, the features, and notes on effects that plans ignore."""
    _check(settings, layout)
    dtype = settings["training.dtype"]
    if dtype not in ("float32", "bfloat16"):
        raise settings.refused("training.dtype", "give float32 or bfloat16")
    half = dtype == "bfloat16"
    piped, notes = layout.pp > 1, _left_out(settings)
    local = settings.size("training.local_batch_size")
    micro = settings.size("parallelism.pipeline_parallel_microbatch_size") if piped else local
    batch, all_local = settings["training.global_batch_size"], local * layout.dp
    if local % micro:
        raise settings.refused("training.local_batch_size", f"microbatches of {micro} do not divide it")
    if layout.v_shaped and local < (least := 2 * layout.pp * micro):
        raise settings.refused("training.local_batch_size", f"DualPipeV needs {least} or more")
    if batch > 0 and batch % all_local:
        raise settings.refused(
            "training.global_batch_size",
            f"it is no multiple of local_batch_size {local} x {layout.dp} data parallel ranks",
        )
    if piped and batch > all_local:
        notes.append(
            f"TorchTitan fills the pipeline again for each of {batch // all_local} accumulated passes; "
            "planned is one filling"
        )
    if piped and settings["model.name"] == _REDUCES_EACH_MICROBATCH:
        notes.append(
            "planned with TorchTitan-npu's change of torch: FSDP reduces gradients in every microbatch; "
            "torch's own pipelines keep whole gradients until the last one"
        )
    compiled = settings["compile.enable"] and "model" in settings["compile.components"]
    if compiled:
        notes.append("compiled layers are planned as fused norms and activations; the rest is NOT planned")
    full, in_parts = _recomputation(settings, layout, model, notes)
    # TorchTitan casts weights where FSDP shards them, and by autocast on data parallel ranks alone.
    cast = settings["training.mixed_precision_param"] == "bfloat16" and (
        layout.ep > 1 or _shards(settings, layout) > 1 or layout.tp == layout.pp == 1
    )
    training = Training(
        sequence=settings.size("training.seq_len"),
        micro=micro,
        batch=batch if batch > 0 else all_local,
        bf16=half or cast,
        grad_half=half,
        # torch's RMSNorm keeps its input in fp32, ours and compiled ones as it is.
        kernels="rms_norm" in converters or compiled,
        fused_glu=compiled,
        flash=True,
        grouped=True,
        full=full,
        flex=settings["parallelism.expert_parallel_comm_backend"] == "deepep",
        masters=0,
        moments=4 if half else 8,
    )
    fused = "dsa" in converters
    name = "npu_swap_optimizer" if settings["optimizer.npu_swap_optimizer"] else "swap_optimizer"
    features = Features(
        absorb=fused,
        by_length=True,
        indexer=fused,
        attention=fused,
        kl_loss=fused,
        swap_optimizer=settings[f"optimizer.{name}"],
        swap_parts=settings.size(f"optimizer.{name}_times"),
        recompute_norm=in_parts,
        recompute_act=in_parts,
        permute_fusion="permute" in converters,
        pairs=layout.v_shaped
        and layout.ep > 1
        and settings["parallelism.pipeline_parallel_expert_parallel_overlap"],
        warmup_stage=settings["dsa.stage"] != "sparse",
    )
    return training, features, tuple(notes)


def _recomputation(settings: Settings, layout: Layout, model: Model, notes: list[str]) -> tuple[int, bool]:
    """Return the number of recomputed layers of a chunk, -1 for all, and whether parts are recomputed."""
    mode, option = (
        settings["activation_checkpoint.mode"],
        settings["activation_checkpoint.selective_ac_option"],
    )
    if mode in ("none", "full"):
        return -1 if mode == "full" else 0, False
    if mode != "selective":
        raise settings.refused(
            "activation_checkpoint.mode", "it cannot be planned; give none, selective or full"
        )
    if option == "op":
        notes.append("selected operations are planned as recomputed norms and activation functions")
        return 0, True
    if not option.isdigit() or int(option) < 1:
        raise settings.refused("activation_checkpoint.selective_ac_option", "give op, or 1 or more")
    return model.layers // (layout.pp * layout.vpp) // int(option), False


_REDUCES_EACH_MICROBATCH = "deepseek_v32"
"""TorchTitan-npu's model, whose recipe changes torch so that gradients are reduced in every microbatch."""


def _sharding(settings: Settings, layout: Layout) -> Sharding:
    """Return the sharding: FSDP2 divides all weights, and torch's pipelines keep gradients whole.

    TorchTitan-npu's recipe of DeepSeek-V3.2 changes torch: gradients are reduced in every microbatch.
    """
    policy = settings["parallelism.fsdp_reshard_after_forward"]
    if policy not in ("default", "always", "never"):
        raise settings.refused("parallelism.fsdp_reshard_after_forward", "give default, always or never")
    return Sharding(
        ranks=_shards(settings, layout),
        experts=True,
        weight=2 if settings["training.dtype"] == "bfloat16" else 4,
        stays=policy == "never" or (policy == "default" and layout.pp > 1),
        whole=layout.pp > 1 and settings["model.name"] != _REDUCES_EACH_MICROBATCH,
    )
