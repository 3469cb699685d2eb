"""Validation of parallel layouts, splits of layers over pipeline ranks, and the nearest valid layout."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from mindspeed_dsa.megatron.batches import GLOBAL, SCHEDULE
from mindspeed_dsa.megatron.pipeline_chunks import LAYOUT, Split, nearly_even, stages_of
from mindspeed_dsa.megatron.pipeline_chunks import nearest as nearest_splits
from mindspeed_dsa.patches.errors import SettingsError
from mindspeed_dsa.tools.planner.job import Job, Layout, Model, Training


def least_devices(layout: Layout) -> int:
    """Return the number of devices that one replica of the model needs (data parallel size 1)."""
    # Dense layers and experts share the same ranks: TP8 PP4 and EP16 ETP1 need lcm(32, 64) = 64.
    return math.lcm(layout.tp * layout.pp * layout.cp, layout.ep * layout.etp * layout.pp)


def placed(layout: Layout, devices: int | None) -> Layout:
    """Return a copy of the layout with the data parallel size at which the job uses all devices.

    Raises:
        SettingsError: the number of devices is not a multiple of :func:`least_devices`.
    """
    least = least_devices(layout)
    count = least if devices is None else devices
    if count % least:
        below, above = count // least * least, (count // least + 1) * least
        near = f"{below} or {above}" if below else str(above)
        raise SettingsError(
            f"mindspeed_dsa plan: {count} devices cannot be split into {layout}, which needs a multiple of "
            f"{least}; use {near} devices, or {_smaller(layout, count)}"
        )
    return replace(layout, dp=count // (layout.tp * layout.pp * layout.cp))


def _smaller(layout: Layout, devices: int) -> str:
    """Return the largest layout for ``devices`` in which each group size divides the one in ``layout``."""

    def divisors(number: int) -> list[int]:
        return [size for size in range(1, number + 1) if number % size == 0]

    candidates = [
        replace(layout, tp=tp, pp=pp, cp=cp, ep=ep, etp=min(layout.etp, tp))
        for tp in divisors(layout.tp)
        for pp in divisors(layout.pp)
        for cp in divisors(layout.cp)
        for ep in divisors(layout.ep)
    ]
    fitting = [each for each in candidates if devices % least_devices(each) == 0]
    return str(max(fitting, key=lambda each: each.tp * each.pp * each.cp * each.ep))


def check(job: Job, any_number: bool = False, flags: bool = True) -> None:
    """Raise if Megatron would reject the layout; the error lists all problems.

    Args:
        job: planned job.
        any_number: whether the suggested layout may use another number of devices.
        flags: whether the suggestion may name flags of Megatron.

    Raises:
        SettingsError: the layout is invalid; names the nearest valid one.
    """
    problems = list(_problems(job))
    if problems:
        text = "; ".join(problems)
        raise SettingsError(
            f"mindspeed_dsa plan: {job.layout} does not fit: {text}{_hint(job, any_number, flags)}"
        )


def works(job: Job) -> bool:
    """Return whether Megatron accepts the job's layout."""
    return next(_problems(job), None) is None


def _hint(job: Job, any_number: bool, flags: bool) -> str:
    near = nearest(job, any_number)
    if near is None:
        return ""
    layout, batch = near.layout, ""
    if not flags:
        return f". The nearest layout that works: {layout}"
    if near.training.batches != job.training.batches:
        batch = f" with {near.training.batch_flag}"
    ends = ""
    if _split_flags(layout) != _split_flags(job.layout):
        ends = f" {split_of(layout, near.model).flags()}".rstrip()
    return f". The nearest layout that works: {layout}{ends}{batch}"


def _split_flags(layout: Layout) -> tuple[object, ...]:
    return layout.first, layout.last, layout.stages


def nearest(job: Job, any_number: bool = False) -> Job | None:
    """Return the job with the nearest valid layout, on the same or on any number of devices."""
    layout, model = job.layout, job.model
    devices = layout.devices
    most = 2 * devices if any_number else devices
    candidates = []
    for tp in _near(layout.tp, most):
        for pp in _near(layout.pp, most):
            for ep in _near(layout.ep, most):
                for vpp in {2} if layout.v_shaped else {layout.vpp if pp > 1 else 1, 1}:
                    sizes = replace(
                        layout, tp=tp, pp=pp, ep=ep, vpp=vpp, etp=min(layout.etp, tp), group=pp, dp=1
                    )
                    sizes = replace(sizes, sequence=layout.sequence and tp > 1)
                    # A layout by stages only fits its own number of chunks.
                    if (pp, vpp) != (layout.pp, layout.vpp):
                        sizes = replace(sizes, stages=())
                    number = least_devices(sizes) if any_number else devices
                    if number % least_devices(sizes):
                        continue
                    sizes = replace(sizes, dp=number // (tp * pp * layout.cp))
                    for split in _splits(sizes, model):
                        candidates.append(replace(job, layout=split, training=_batch(job, split)))
    fitting = [each for each in candidates if works(each)]
    return min(fitting, key=lambda each: _distance(job, each), default=None)


def _batch(job: Job, layout: Layout) -> Training:
    # Interleaving needs a multiple of the microbatch group, DualPipeV at least 2 PP microbatches.
    step = job.training.micro * layout.dp
    if layout.vpp > 1 and not layout.v_shaped:
        step *= layout.group
    least = 2 * layout.pp if layout.v_shaped else 1

    def fitting(batch: int) -> int:
        return max(least, round(batch / step)) * step

    schedule = tuple(map(fitting, job.training.schedule))
    return replace(job.training, batch=fitting(job.training.batch), schedule=schedule)


def _near(size: int, devices: int) -> list[int]:
    sizes = {size, *(2**power for power in range(int(math.log2(max(devices, 1))) + 1))}
    # The four nearest sizes keep the search of nearest() at 4 x 4 x 4 x 2 combinations.
    return sorted(sizes, key=lambda each: abs(math.log2(each / size)))[:4]


def _splits(layout: Layout, model: Model) -> Iterator[Layout]:
    """Yield the layout, then copies of it with other splits of the layers over pipeline ranks."""
    yield layout
    yield from uneven(layout, model)


def uneven(layout: Layout, model: Model) -> Iterator[Layout]:
    """Yield the most even layouts that set the numbers of layers of the first and last pipeline rank.

    If layers share selections, every chunk begins with a layer that selects keys.
    """
    if layout.pp < 2:
        return
    plain = replace(layout, first=None, last=None, stages=())
    if model.sharing.is_on:
        plain = replace(plain, embedding_counts=False, loss_counts=False)
        splits = nearest_splits(split_of(plain, model), model.sharing, mtp_layers=model.mtp)
        for split in reversed([*splits]):  # nearest_splits yields the most even split last
            yield replace(plain, first=split.first, last=split.last, stages=split.stages)
        return
    if layout.v_shaped:
        yield plain
        if model.layers >= 2 * layout.pp:
            yield replace(plain, stages=stages_of(nearly_even(model.layers, 2 * layout.pp, model.mtp)))
        return
    # 61 layers on 4 ranks: 16 each and 13 on the last, or 15, 16, 16, 14, or 15 each and 16 on the last.
    even = math.ceil(model.layers / (layout.pp * layout.vpp)) * layout.vpp
    rest = model.layers - even * (layout.pp - 1)
    if rest > 0:
        yield replace(plain, last=rest)
    short = model.layers - even * (layout.pp - 2)
    if layout.pp > 2 and short > 1:
        yield replace(plain, first=short - short // 2, last=short // 2)
    fewer = even - layout.vpp
    more = model.layers - fewer * (layout.pp - 1)
    if fewer < more <= 2 * fewer:
        yield replace(plain, last=more)


def _distance(job: Job, other: Job) -> float:
    pairs = ((getattr(job.layout, n), getattr(other.layout, n)) for n in ("tp", "pp", "vpp", "ep", "etp"))
    # Doubling or halving one size costs 1; another split of the layers only 0.5, another batch at most 1.
    moved = sum(abs(math.log2(a / b)) for a, b in pairs)
    ends = _split_flags(job.layout) != _split_flags(other.layout)
    batch = abs(math.log2(other.training.batch / max(job.training.batch, 1)))
    return moved + 0.5 * ends + min(batch, 4) * 0.25


def _problems_of_step(job: Job, batch: int) -> Iterator[str]:
    """Yield the problems of layout and microbatches in a step of ``batch`` samples."""
    training, layout = job.training, job.layout
    step = training.micro * layout.dp
    count, rest = divmod(batch, step)
    if rest:
        flag = SCHEDULE if training.schedule else GLOBAL
        yield (
            f"{flag} {batch} is no multiple of --micro-batch-size {training.micro} x data parallel "
            f"{layout.dp}"
        )
    elif layout.v_shaped and count < 2 * layout.pp:
        yield f"DualPipeV needs {2 * layout.pp} microbatches, and a step has {count}"
    elif layout.vpp > 1 and not layout.v_shaped:
        rest = count % layout.group
        if not layout.pp <= layout.group <= count or 0 < rest < layout.pp:
            yield (
                f"{count} microbatches cannot be interleaved in groups of {layout.group}; give "
                f"--microbatch-group-size-per-virtual-pipeline-stage {layout.pp}, or a number up to {count}"
            )


def _problems(job: Job) -> Iterator[str]:
    model, layout, training = job.model, job.layout, job.training
    tp, cp = layout.tp, layout.cp
    # (name of a number, number, name of a divisor, divisor)
    divided = [
        ("--num-attention-heads", model.heads, "tensor parallel", tp),
        ("--ffn-hidden-size", model.ffn, "tensor parallel", tp),
        ("the padded vocabulary", model.vocabulary, "tensor parallel", tp),
    ]
    if not model.latent:
        divided.append(("--num-attention-heads", model.heads, "--num-query-groups", model.kv_heads))
        if model.kv_heads > tp:
            divided.append(("--num-query-groups", model.kv_heads, "tensor parallel", tp))
        else:
            divided.append(("tensor parallel", tp, "--num-query-groups", model.kv_heads))
    if model.experts:
        divided += [
            ("--num-experts", model.experts, "expert parallel", layout.ep),
            ("--moe-ffn-hidden-size", model.expert_ffn, "expert tensor parallel", layout.etp),
            ("--moe-shared-expert-intermediate-size", model.shared_ffn, "tensor parallel", tp),
        ]
    for name, number, kind, size in divided:
        if number % size:
            yield f"{name} {number} is not divisible by {kind} {size}"
    if model.experts and tp > 1 and not layout.sequence:
        yield "experts with tensor parallelism need --sequence-parallel"
    if layout.devices % least_devices(layout):
        yield f"{layout.devices} devices are no multiple of {least_devices(layout)}"
    if layout.replicas % job.shards:
        yield (
            f"--fsdp2-sharding-size {job.shards} does not divide the {layout.replicas} ranks of data and "
            f"context parallelism, {math.gcd(job.shards, layout.replicas)} does"
        )
    split = split_of(layout, model)
    chunk_problem = split.problem or model.sharing.chunk_problem(split.in_order)
    if chunk_problem:
        yield chunk_problem
    mtp = "".join(layout.stages).count("m")
    if layout.stages and mtp != model.mtp:
        yield f"{LAYOUT} has {mtp} layers of multi-token prediction, --mtp-num-layers {model.mtp}"
    for batch in dict.fromkeys(training.batches):
        yield from _problems_of_step(job, batch)
    features = job.features
    if cp > 1 and model.sparse and not (features.attention and features.absorb):
        yield "sparse attention on context parallel ranks needs --use-fused-dsa in absorbed form"
    if features.divided_vocabulary:
        if cp == 1:
            yield "--cp-shard-vocabulary divides weights among context parallel ranks, and there is one"
        elif model.vocabulary % (tp * cp):
            yield (
                f"--cp-shard-vocabulary: the padded vocabulary {model.vocabulary} is not divisible by tensor "
                f"{tp} x context parallel {cp}; give --make-vocab-size-divisible-by a multiple of {cp}"
            )
    if features.pairs and layout.pp > 1 and layout.vpp == 1:
        yield "pairs of microbatches (--moe-fb-overlap) need interleaved pipelines, of 2 chunks or more"
    if layout.pp == 1 and layout.v_shaped:
        yield "DualPipeV needs a pipeline"
    if layout.pp == 1 and features.split:
        yield "--split-backward fills the waits of a pipeline, and there is none"
    if model.router_topk > model.experts:
        yield f"--moe-router-topk {model.router_topk} is more than {model.experts} experts"


def split_of(layout: Layout, model: Model) -> Split:
    """Return the assignment of decoder layers to pipeline ranks and chunks under this layout."""
    return Split(
        layers=model.layers,
        ranks=layout.pp,
        chunks=layout.vpp,
        first=layout.first,
        last=layout.last,
        embedding_counts=layout.embedding_counts,
        loss_counts=layout.loss_counts,
        stages=layout.stages,
        v_shaped=layout.v_shaped,
    )


def chunks(layout: Layout, model: Model) -> list[list[tuple[int, ...]]]:
    """Return the layer numbers (from 0) of each chunk of each pipeline rank."""
    held = split_of(layout, model).by_rank
    return [[tuple(number - 1 for number in chunk) for chunk in rank] for rank in held]
