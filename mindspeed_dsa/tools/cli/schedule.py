"""``schedule``: simulate pipeline schedules, or compare a recorded step with its simulation."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from mindspeed_dsa import settings
from mindspeed_dsa.feature import Megatron
from mindspeed_dsa.patches.errors import SettingsError
from mindspeed_dsa.runs import expert_load
from mindspeed_dsa.schedule import beside, lists, megatron_order, report
from mindspeed_dsa.schedule.events import Costs, Schedule
from mindspeed_dsa.schedule.megatron_order import Recompute
from mindspeed_dsa.schedule.report import figures, table
from mindspeed_dsa.schedule.simulate import Timeline, simulate
from mindspeed_dsa.session.start_report import aligned
from mindspeed_dsa.tools.planner import devices

_DESCRIPTION = """\
Simulates one step of pipeline schedules with given costs per chunk and microbatch, and compares them. The
order of events comes from the functions of the installed Megatron-core that drive training.

  python -m mindspeed_dsa schedule --pipeline-model-parallel-size 16 --virtual 2 --num-microbatches 64 \\
      --all-to-all-forward 0.5 --all-to-all-backward 1 --png schedule.png
  python -m mindspeed_dsa schedule --beside runs/mine/schedule
  python -m mindspeed_dsa schedule --expert-model-parallel-size 64 --device h100 --imbalance 2 --png layer.png

The last one simulates one layer's routed experts, without and with --balanced-moe-experts.

Exit status: 0; 1 where a recorded step had another order than its schedule; 2 where numbers are refused."""

_PLAIN = ("1f1b", "paired", "paired-extra")
_RECOMPUTED: dict[str, Recompute] = {
    "recompute": "in place",
    "recompute-in-bubble": "in bubbles",
    "recompute-in-advance": "in advance",
}
_LISTED = ("split", "paired-split", "zero-bubble", "dualpipev", "dualpipev-dw-detach")
NAMES = (*_PLAIN, *_RECOMPUTED, *_LISTED)
_SHOWN = 8


def run(argv: Sequence[str]) -> int:
    """Simulate the schedules, print the table, and write PNG, trace and JSON if requested."""
    options = _parse(argv)
    if options.beside is not None:
        return _beside(options)
    if options.expert_ranks is not None:
        return _layer(options)
    costs = Costs(**{name: getattr(options, name) for name in _COSTS})
    timelines, rows = [], []
    found, left_out = _schedules(options)
    for schedule in found:
        # A rank has the same layers in every schedule: with --virtual 2, the one chunk per rank of
        # zero-bubble costs twice as much as one of interleaved 1F1B's two chunks.
        own = costs.scaled(options.chunks / schedule.chunks)
        timelines.append(simulate(schedule, own))
        rows.append(figures(timelines[-1], own))
    print("\n".join([*aligned(table(rows)), *left_out]))
    _write(options, timelines, [row.record() for row in rows])
    return 0


def _beside(options: argparse.Namespace) -> int:
    comparison = beside.compare(Path(options.beside), Megatron(options.megatron_root))
    print("\n".join(aligned(table(comparison.figures()))))
    for rank, position in comparison.other_order:
        print(f"PROBLEM: rank {rank} ran another order than the schedule says, from its event {position} on")
    rows = [("rank", "event", "recorded [ms]", "simulated [ms]", "started after [ms]", "simulated [ms]")]
    rows += [
        (
            str(difference.rank),
            str(difference.event),
            f"{1e3 * difference.recorded_duration:.1f}",
            f"{1e3 * difference.simulated_duration:.1f}",
            f"{1e3 * difference.recorded_start:.1f}",
            f"{1e3 * difference.simulated_start:.1f}",
        )
        for difference in comparison.differences[:_SHOWN]
    ]
    print("\nwhere durations differ most:")
    print("\n".join(aligned(rows)))
    _write(options, [comparison.recorded, comparison.simulated], comparison.record(), "s", 1e6)
    return 1 if comparison.other_order else 0


def _layer(options: argparse.Namespace) -> int:
    # Importing this loads torch, which the other simulations do not need.
    from mindspeed_dsa.tools.planner import expert_step

    device = devices.device(options.device)
    layer = expert_step.Layer(
        options.expert_ranks, options.experts, options.topk, options.hidden, options.width, options.tokens
    )
    if options.expert_load is None:
        counts = expert_step.imbalanced(layer, options.imbalance)
    else:
        counts = expert_step.routed(layer, _recorded(options.expert_load, options.layer))
    links = expert_step.Links.of(device)
    steps = expert_step.compare(layer, counts, device.tflops * device.matmul * 1e12, links, options.limit)
    print("\n".join(aligned(expert_step.table(steps))))
    moved = steps[-1].plan.experts
    print(f"moved: experts {', '.join(map(str, moved))}" if moved else "moved: no expert, because none pays")
    timelines = [step.in_milliseconds for step in steps]
    _write(options, timelines, [step.record() for step in steps], "ms")
    return 0


def _recorded(report: Path, layer: int | None) -> Sequence[int]:
    """Return the recorded tokens by expert of a layer; without its number, of the least balanced layer."""
    loads = expert_load.totals(expert_load.read(report))
    if layer is None:
        return max(loads.values(), key=expert_load.imbalance)
    if layer not in loads:
        raise SettingsError(f"schedule: {report} has no layer {layer}; it has {', '.join(map(str, loads))}")
    return loads[layer]


def _write(
    options: argparse.Namespace,
    timelines: Sequence[Timeline],
    record: Any,
    unit: str = "",
    microseconds: float = 1000.0,
) -> None:
    """Write the requested plot, trace and JSON files.

    Args:
        options: options of the command, with the paths of the files.
        timelines: timelines to draw.
        record: content of the JSON file.
        unit: unit of the timelines, for the plot.
        microseconds: length of this unit in microseconds, for the trace.
    """
    if options.png:
        report.png(timelines, Path(options.png), unit)
    if options.perfetto:
        report.perfetto(timelines, Path(options.perfetto), microseconds)
    if options.json:
        Path(options.json).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _schedules(options: argparse.Namespace) -> tuple[list[Schedule], list[str]]:
    """Return the schedules, and reasons for omitted ones. A schedule requested by name is never omitted."""
    megatron = Megatron(options.megatron_root)
    ranks, chunks, microbatches = options.ranks, options.chunks, options.microbatches

    def ordered(**more: Any) -> Schedule:
        return megatron_order.schedule(
            megatron, ranks, chunks, microbatches, options.group, forward_only=options.forward_only, **more
        )

    def trained(listed: Callable[[int, int], Schedule]) -> Schedule:
        if options.forward_only:
            raise SettingsError("it is a schedule of training, and --forward-only asks for an evaluation")
        return listed(ranks, microbatches)

    made: dict[str, Callable[[], Schedule]] = {
        "1f1b": lambda: ordered(),
        "paired": lambda: ordered(paired=True),
        "paired-extra": lambda: ordered(paired=True, extra_warmup=True),
        **{name: partial(ordered, recompute=where) for name, where in _RECOMPUTED.items()},
        "split": lambda: trained(lambda *_: lists.weights_later(ordered(), options.waiting)),
        "paired-split": lambda: trained(
            lambda *_: lists.weights_later(ordered(paired=True, extra_warmup=True), options.waiting)
        ),
        "zero-bubble": lambda: trained(lists.zero_bubble),
        "dualpipev": lambda: trained(lists.dual_pipe_v),
        "dualpipev-dw-detach": lambda: trained(partial(lists.dual_pipe_v, split=True)),
    }
    schedules, left_out = [], []
    for name in options.schedules:
        try:
            schedules.append(made[name]())
        except SettingsError as error:
            # `1f1b` is the first of both default lists: if it fails, the layout itself is wrong.
            if options.by_name or not schedules:
                raise
            left_out.append(f"left out: {name}: {error}")
    return schedules, left_out


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m mindspeed_dsa schedule",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    layout = parser.add_argument_group("layout")
    layout.add_argument("--pipeline-model-parallel-size", dest="ranks", type=int, default=4, metavar="PP")
    layout.add_argument("--virtual", dest="chunks", type=int, default=1, metavar="V", help="chunks per rank")
    layout.add_argument("--num-microbatches", dest="microbatches", type=int, default=8, metavar="M")
    layout.add_argument(
        "--microbatch-group-size-per-virtual-pipeline-stage",
        dest="group",
        type=int,
        metavar="N",
        help="default: PP",
    )
    layout.add_argument(
        "--split-backward-waiting",
        dest="waiting",
        type=int,
        metavar="N",
        help="most weight gradients that wait on a rank in (paired-)split; default: the rank's number",
    )
    layout.add_argument("--forward-only", action="store_true", help="evaluation")
    layout.add_argument(
        "--schedules",
        metavar="NAME,...",
        help=f"of {', '.join(NAMES)}; all: of these, what the layout has; default: the first three, likewise",
    )
    _add_layer(parser)
    costs = parser.add_argument_group("costs of a chunk and microbatch")
    for name, help in _COSTS.items():
        default = getattr(Costs, name)
        costs.add_argument(
            f"--{name.replace('_', '-')}", type=float, default=default, help=f"{help}; default: {default:g}"
        )
    output = parser.add_argument_group("output")
    output.add_argument("--png", metavar="FILE", help="timelines, drawn (needs matplotlib)")
    output.add_argument("--perfetto", metavar="FILE", help="timelines as a trace for ui.perfetto.dev")
    output.add_argument("--json", metavar="FILE", help="the table, with figures per rank")
    output.add_argument(
        "--beside", metavar="DIR", help="a step recorded with --trace-schedule, beside its simulation"
    )
    parser.add_argument(
        "--megatron-root", default=settings.MEGATRON_ROOT.default, help="top-level package of a fork"
    )
    options = parser.parse_args(list(argv))
    options.by_name = options.schedules not in (None, "all")
    options.schedules = _names(options.schedules)
    return options


def _add_layer(parser: argparse.ArgumentParser) -> None:
    layer = parser.add_argument_group("routed experts of one layer, in place of a pipeline")
    layer.add_argument(
        "--expert-model-parallel-size", dest="expert_ranks", type=int, metavar="EP", help="simulate this"
    )
    for flag, name, default in (
        ("--num-experts", "experts", 256),
        ("--moe-router-topk", "topk", 8),
        ("--hidden-size", "hidden", 7168),
        ("--moe-ffn-hidden-size", "width", 2048),
    ):
        layer.add_argument(
            flag, dest=name, type=int, default=default, metavar="N", help=f"default: {default}"
        )
    layer.add_argument(
        "--tokens", type=int, default=4096, metavar="N", help="of a rank's microbatch; default: 4096"
    )
    layer.add_argument("--device", default="h100", help=f"of {', '.join(devices.DEVICES)}; default: h100")
    layer.add_argument(
        "--imbalance",
        type=float,
        default=2.0,
        metavar="X",
        help="rows of the most loaded rank over the mean, by Zipf's law; default: 2",
    )
    layer.add_argument(
        "--expert-load", type=Path, metavar="DIR", help="loads recorded by --moe-router-load-report"
    )
    layer.add_argument(
        "--layer", type=int, metavar="N", help="layer of these loads; default: the least balanced one"
    )
    layer.add_argument(
        "--balanced-moe-hot-expert-num",
        dest="limit",
        type=int,
        metavar="N",
        help="most experts to move; default: as many as pay",
    )


_COSTS = {
    "forward": "computation of a forward",
    "input_gradient": "of the backward's dX",
    "weight_gradient": "of its dW",
    "all_to_all_forward": "dispatch and combine of a forward, alone on the link",
    "all_to_all_backward": "of a backward",
    "p2p": "from one rank to the next",
    "recompute": "of a recomputed forward",
    "hidden_in_pairs": "share of the all-to-all that an independent pair hides",
    "hidden_alone": "share that an event by itself hides",
    "activations": "memory of one chunk and microbatch",
    "checkpoint": "what of it stays where it is recomputed",
    "weight_activations": "share of it that weight gradients need",
}


def _names(text: str | None) -> Sequence[str]:
    if text is None:
        return _PLAIN
    names = NAMES if text == "all" else text.split(",")
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        raise SettingsError(f"--schedules: no schedule {unknown[0]!r}; choose of {', '.join(NAMES)}, or all")
    return names
