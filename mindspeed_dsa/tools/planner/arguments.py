"""Conversion of a job's command line into a :class:`Job` for the planner."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mindspeed_dsa import settings
from mindspeed_dsa.features import everything
from mindspeed_dsa.features.dsa.model.feature import against_model, fill_arguments
from mindspeed_dsa.megatron.batches import GLOBAL, SCHEDULE, entries_of
from mindspeed_dsa.megatron.pipeline_chunks import LAYOUT, stages_of
from mindspeed_dsa.megatron.selections import Sharing
from mindspeed_dsa.patches.errors import SettingsError
from mindspeed_dsa.tools.planner import configs, flags, layouts, loads
from mindspeed_dsa.tools.planner.job import Job, Layout, Model
from mindspeed_dsa.tools.planner.routing import IMBALANCES, balancing_of
from mindspeed_dsa.tools.planner.training_arguments import (
    batch_sizes,
    features_of,
    sharding_of,
    training_of,
)

_MODEL = ("num_layers", "hidden_size", "num_attention_heads")
_STEP = ("seq_length", "micro_batch_size")
_DSA = ("dsa_indexer_n_heads", "dsa_indexer_head_dim", "dsa_indexer_topk")


def job_of(
    argv: Sequence[str],
    devices: int | None = None,
    config_file: str | None = None,
    imbalance: float | None = None,
    any_layout: bool = False,
    expert_load: Path | None = None,
) -> Job:
    """Build a job from its command line, whose first word may be its script.

    Args:
        argv: command line of ``pretrain_gpt.py`` or of the example job.
        devices: number of devices; by default the smallest number that the layout needs.
        config_file: name or path of a ``config.json`` with the model's sizes.
        imbalance: number of tokens on the rank with the most expert tokens, over the mean of all ranks; by
            default the usual number of the job's kind of balancing.
        any_layout: whether a search will choose the layout. The result then has an unchecked layout with data
            parallelism only.
        expert_load: records of ``--moe-router-load-report``, whose imbalance by layer replaces ``imbalance``;
            not with ``any_layout``.

    Raises:
        SettingsError: sizes are missing or the layout is invalid; names the nearest valid layout.
    """
    options, names_given, unknown = flags.read(argv)
    check_sizes(devices, imbalance)
    _check_flags(options)
    if config_file:
        configs.apply(Path(config_file), options, names_given)
    fill_arguments(options)
    _check_together(options)
    options.splits_backward = _check_schedule(options, any_layout)
    _check_given(options)
    model, training = model_of(options), training_of(options)
    if any_layout:
        options.num_layers_per_virtual_pipeline_stage = options.pipeline_model_parallel_layout = None
    wanted = layout_of(options)
    if any_layout:
        layout = Layout(
            dp=devices or layouts.least_devices(wanted),
            v_shaped=wanted.v_shaped,
            cp_algorithm=wanted.cp_algorithm,
        )
    else:
        layout = layouts.placed(wanted, devices)
    if training.batch == 0:
        training = replace(training, batch=training.micro * layout.dp)
    sharding = sharding_of(options)
    features, notes = features_of(options), _notes(options, unknown)
    balancing = balancing_of(options)
    skew = IMBALANCES[balancing] if imbalance is None else imbalance
    recorded = loads.imbalances(expert_load, model, layout) if expert_load else ()
    balancing = "" if imbalance or recorded else balancing
    job = Job(model, layout, training, features, skew, sharding, notes, balancing, recorded)
    if not any_layout:
        layouts.check(job, any_number=devices is None)
    return job


def check_sizes(devices: int | None, imbalance: float | None) -> None:
    """Raise an error for numbers of devices and imbalances that no job has."""
    if devices is not None and devices < 1:
        raise SettingsError(f"mindspeed_dsa plan: --devices {devices}: a job has 1 device or more")
    if imbalance is not None and not 1.0 <= imbalance < math.inf:
        raise SettingsError(
            f"mindspeed_dsa plan: --imbalance {imbalance:g}: a maximum over its mean is 1 or more"
        )


def _check_flags(options: argparse.Namespace) -> None:
    for name in (*flags.SIZES, *flags.MAY_BE_ZERO):
        value = getattr(options, flags.dest_of(name))
        least = int(name not in flags.MAY_BE_ZERO)
        if value is not None and value < least:
            raise SettingsError(f"mindspeed_dsa plan: --{name} {value}: give {least} or more")


def _check_given(options: argparse.Namespace) -> None:
    """Raise an error if sizes of the model or the step are missing."""
    problems = []
    if missing := unknown_sizes(options):
        names = ", ".join(configs.KNOWN)
        problems.append(
            f"the model's sizes are not known: add {missing} to the job's flags, or give --config FILE, a "
            f"config.json or one of {names}"
        )
    if missing := _missing(options, _STEP):
        problems.append(
            f"the step is not known: add {missing} to the job's flags, as in `plan --config glm-5.2 -- "
            "pretrain_gpt.py --seq-length 4096 --micro-batch-size 1`"
        )
    if problems:
        raise SettingsError(f"mindspeed_dsa plan: {'; '.join(problems)}")


def unknown_sizes(options: argparse.Namespace) -> str:
    """Return the missing flags for the sizes of the model, as text; empty if none is missing."""
    return _missing(options, (*_MODEL, *(_DSA if options.experimental_attention_variant == "dsa" else ())))


def _missing(options: argparse.Namespace, names: Sequence[str]) -> str:
    absent = [f"--{name.replace('_', '-')}" for name in names if getattr(options, name) is None]
    return " and ".join(filter(None, (", ".join(absent[:-1]), *absent[-1:])))


def _check_together(options: argparse.Namespace) -> None:
    """Raise an error for combinations of flags that Megatron or a feature rejects, whatever the layout."""
    problems = list(Sharing.of(options).problems(options.num_layers))
    if options.dsa_model is not None:
        problems += against_model(options, options.dsa_model)
    if options.bf16 and options.fp16:
        problems.append("--bf16 and --fp16: give one of them")
    if schedule := options.step_batch_size_schedule:
        if options.global_batch_size is not None:
            problems.append(f"{SCHEDULE} and {GLOBAL}: give one of them")
        try:
            entries_of(schedule)
        except ValueError as error:
            problems.append(f"{SCHEDULE}: {error}; write '0:768 250B:1536'")
    if options.reuse_fp32_param and not options.bf16:
        problems.append("--reuse-fp32-param needs --bf16")
    if options.use_torch_fsdp2 and options.use_distributed_optimizer:
        problems.append("--use-torch-fsdp2 shards optimizer state itself: omit --use-distributed-optimizer")
    if options.use_torch_fsdp2 and not options.untie_embeddings_and_output_weights:
        problems.append("--use-torch-fsdp2 needs --untie-embeddings-and-output-weights")
    if options.fsdp2_sharding_size is not None and options.fsdp2_sharding_size < 2:
        problems.append(f"--fsdp2-sharding-size {options.fsdp2_sharding_size}: give 2 or more, or omit it")
    if options.fsdp2_shard_experts and not options.use_torch_fsdp2:
        problems.append("--fsdp2-shard-experts needs --use-torch-fsdp2")
    if options.fsdp2_config_path:
        problems.append("--fsdp2-config-path is not read by plans: give the same by --fsdp2-... flags")
    if options.num_experts and options.add_bias_linear:
        if options.moe_shared_expert_intermediate_size:
            problems.append("shared experts have no biases: add --disable-bias-linear")
        if options.moe_grouped_gemm and options.transformer_impl == "local":
            problems.append("--moe-grouped-gemm without Transformer Engine needs --disable-bias-linear")
    if options.cp_shard_vocabulary and not options.fused_linear_cross_entropy:
        problems.append("--cp-shard-vocabulary needs --fused-linear-cross-entropy")
    seen = Switches(options)
    on = [feature for feature in everything() if feature.is_active(seen)]
    names = {feature.name for feature in on}
    problems += [
        f"{feature.name} cannot be combined with {conflict.feature}: {conflict.why}"
        for feature in on
        for conflict in feature.conflicting(names, seen)
    ]
    if problems:
        raise SettingsError(f"mindspeed_dsa plan: {'; '.join(problems)}")


_SCHEDULES = ("dualpipev", "split-backward")


def _check_schedule(options: argparse.Namespace, any_layout: bool) -> bool:
    """Run the checks of features that change the schedule; return whether weight gradients are deferred.

    Args:
        options: job's arguments.
        any_layout: whether a search will choose the layout; the checks then assume a valid one.
    """
    seen, splits = Switches(options), False
    problems: list[str] = []
    job = argparse.Namespace(**vars(options))
    if any_layout:
        job.pipeline_model_parallel_size, job.num_layers = 2, None
    for feature in everything():
        if feature.name in _SCHEDULES and feature.is_active(seen):
            assert feature.options is not None
            feature_options = feature.options(seen)
            splits = splits or getattr(feature_options, "split", True)
            feature.rewrite(job)
            problems += feature.check(job, feature_options)
    if problems:
        raise SettingsError(f"mindspeed_dsa plan: {'; '.join(problems)}")
    return splits


class Switches:
    """View of the arguments as feature settings; Megatron's flags unknown to the planner are None."""

    platform, features_on, megatron_root = "", (), settings.MEGATRON_ROOT.default

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options

    def __getattr__(self, name: str) -> Any:
        return getattr(self._options, name, None)


def _notes(options: argparse.Namespace, unknown: Sequence[str]) -> tuple[str, ...]:
    notes = []
    missed, others = flags.sorted_out(unknown)
    if missed:
        notes.append(f"NOT planned, though memory, bytes or time depend on them: {', '.join(missed)}")
    if others:
        notes.append(f"not read: {', '.join(others)}")
    dispatcher = options.moe_token_dispatcher_type
    if options.num_experts and dispatcher == "allgather" and options.expert_model_parallel_size > 1:
        notes.append(
            "experts' transfers are those of --moe-token-dispatcher-type alltoall; allgather, Megatron's "
            "default, is NOT planned"
        )
    layout = options.pipeline_model_parallel_layout
    if options.mtp_num_layers and layout and "m" not in stages_of(layout)[-1]:
        notes.append(
            f"{LAYOUT} has multi-token prediction before the last chunk, where it is NOT planned: it is "
            "counted in the last one"
        )
    if options.delay_wgrad_compute and not options.splits_backward:
        notes.append("weight gradients that Transformer Engine's layers keep are NOT planned")
    if sizes := batch_sizes(options):
        notes.append(f"steps have {', '.join(map(str, sizes))} samples; planned are those of {max(sizes)}")
    elif options.global_batch_size is None:
        notes.append("no --global-batch-size: one microbatch per step and data parallel rank")
    if options.fp8:
        notes.append(
            "fp8 shortens a step by the factor that published jobs gained; activations are planned for bf16"
        )
    if options.transformer_impl != "local":
        notes.append("Transformer Engine's modules are assumed to keep what fused kernels need")
    return tuple(notes)


def model_of(options: argparse.Namespace) -> Model:
    """Return the model's sizes, with Megatron's defaults."""
    layers, hidden, heads = options.num_layers, options.hidden_size, options.num_attention_heads
    ffn = options.ffn_hidden_size
    if ffn is None:
        ffn = int(4 * hidden * 2 / 3) // 64 * 64 if options.swiglu else 4 * hidden
    experts = options.num_experts or 0
    frequency = options.moe_layer_freq
    if options.example and frequency == 1:
        frequency = [0] + [1] * (layers - 1)
    if isinstance(frequency, int):
        frequency = [int(layer % frequency == 0) for layer in range(layers)]
    if len(frequency) != layers:
        raise SettingsError(
            f"mindspeed_dsa plan: --moe-layer-freq names {len(frequency)} layers, --num-layers {layers}"
        )
    latent = options.multi_latent_attention
    return Model(
        layers=layers,
        hidden=hidden,
        ffn=ffn,
        heads=heads,
        vocabulary=_vocabulary(options),
        words=0 if options.padded_vocab_size or options.example else options.vocab_size,
        multiple=options.make_vocab_size_divisible_by,
        pattern=tuple(bool(experts and each) for each in frequency),
        gated=options.swiglu,
        bias=options.add_bias_linear,
        qkv_bias=options.add_qkv_bias,
        layer_norm=options.normalization == "LayerNorm",
        tied=not options.untie_embeddings_and_output_weights,
        learned_positions=(
            options.max_position_embeddings or options.seq_length
            if options.position_embedding_type == "learned_absolute"
            else 0
        ),
        head_dim=options.kv_channels or hidden // heads,
        kv_heads=options.num_query_groups if options.group_query_attention else heads,
        latent=latent,
        query_lora=(options.q_lora_rank or 0) if latent else 0,
        kv_lora=options.kv_lora_rank if latent else 0,
        nope=options.qk_head_dim if latent else 0,
        rope=options.qk_pos_emb_head_dim if latent else 0,
        value=options.v_head_dim if latent else 0,
        qk_norm=options.qk_layernorm,
        sparse=options.experimental_attention_variant == "dsa",
        index_heads=options.dsa_indexer_n_heads or 0,
        index_dim=options.dsa_indexer_head_dim or 0,
        topk=options.dsa_indexer_topk or 0,
        index_loss=(options.dsa_indexer_loss_coeff or 0) > 0,
        sharing=Sharing.of(options),
        experts=experts,
        expert_ffn=(options.moe_ffn_hidden_size or ffn) if experts else 0,
        shared_ffn=(options.moe_shared_expert_intermediate_size or 0) if experts else 0,
        router_topk=options.moe_router_topk if experts else 0,
        router_groups=options.moe_router_num_groups or 0,
        group_topk=options.moe_router_group_topk or 0,
        expert_bias=options.moe_router_enable_expert_bias,
        mtp=options.mtp_num_layers or 0,
    )


def _vocabulary(options: argparse.Namespace) -> int:
    if options.padded_vocab_size:
        return int(options.padded_vocab_size)
    if options.vocab_size is None:
        raise SettingsError(
            "mindspeed_dsa plan: give --vocab-size (or --padded-vocab-size): without the tokenizer's files "
            "nobody knows the size of the embedding"
        )
    return flags.padded(options.vocab_size, options)


def _multiples(number: int, step: int, without: int = 0) -> str:
    below, above = (number // step * step - without, (number // step + 1) * step - without)
    return f"{below} or {above}" if below > 0 else str(above)


def layout_of(options: argparse.Namespace) -> Layout:
    """Return the requested layout, without the data parallel size."""
    tp, pp = options.tensor_model_parallel_size, options.pipeline_model_parallel_size
    chunks = options.num_virtual_stages_per_pipeline_rank
    per_chunk = options.num_layers_per_virtual_pipeline_stage
    if chunks is None and per_chunk and pp > 1:
        more = options.account_for_embedding_in_pipeline_split + options.account_for_loss_in_pipeline_split
        counted = options.num_layers + more
        if counted % (pp * per_chunk):
            raise SettingsError(
                f"mindspeed_dsa plan: --num-layers-per-virtual-pipeline-stage {per_chunk} does not divide "
                f"the {counted} layers of {pp} pipeline ranks; give --num-virtual-stages-per-pipeline-rank "
                f"or --num-layers {_multiples(counted, pp * per_chunk, more)}"
            )
        chunks = counted // (pp * per_chunk)
    v_shaped = options.schedules_method == "dualpipev"
    vpp = chunks if chunks and pp > 1 else 1
    stages = _stages_of(options)
    if stages:
        vpp = len(stages) // pp
    elif v_shaped:
        vpp = 2
    if options.expert_model_parallel_size > 1 and not options.num_experts:
        raise SettingsError(
            f"mindspeed_dsa plan: --expert-model-parallel-size {options.expert_model_parallel_size} needs "
            "--num-experts"
        )
    ep, etp = options.expert_model_parallel_size, options.expert_tensor_parallel_size or tp
    if options.moe_tp_extend_ep:
        ep, etp = ep * tp, 1
    return Layout(
        tp=tp,
        pp=pp,
        vpp=vpp,
        ep=ep if options.num_experts else 1,
        etp=etp if options.num_experts else 1,
        cp=options.context_parallel_size,
        sequence=options.sequence_parallel and tp > 1,
        group=options.microbatch_group_size_per_vp_stage or pp,
        first=options.decoder_first_pipeline_num_layers,
        last=options.decoder_last_pipeline_num_layers,
        embedding_counts=options.account_for_embedding_in_pipeline_split,
        loss_counts=options.account_for_loss_in_pipeline_split,
        stages=stages,
        v_shaped=v_shaped,
        cp_algorithm=(options.cp_comm_type or ["p2p"])[0],
    )


def _stages_of(options: argparse.Namespace) -> tuple[str, ...]:
    """Return the chunks of ``--pipeline-model-parallel-layout``; refuse other flags for the split."""
    layout, pp = options.pipeline_model_parallel_layout, options.pipeline_model_parallel_size
    if layout is None or pp == 1:
        return ()
    said = [f"--{name.replace('_', '-')}" for name in flags.SPLIT if getattr(options, name)]
    if said:
        raise SettingsError(f"mindspeed_dsa plan: {LAYOUT} deals all layers out: omit {', '.join(said)}")
    try:
        stages = stages_of(layout)
    except ValueError as error:
        raise SettingsError(
            f"mindspeed_dsa plan: {error}; write E, t, m and L, and | between chunks"
        ) from None
    if len(stages) % pp:
        raise SettingsError(
            f"mindspeed_dsa plan: {LAYOUT} has {len(stages)} chunks, no multiple of the {pp} pipeline ranks"
        )
    return stages
