"""Every token counts once in every layout, and the report has each expert's tokens."""

from __future__ import annotations

import copy
import json
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import mindspeed_dsa
from mindspeed_dsa import session
from mindspeed_dsa.__main__ import main
from mindspeed_dsa.features.moe.load_report import steps
from mindspeed_dsa.features.moe.load_report import steps as load_report
from mindspeed_dsa.features.moe.load_report.feature import Options, check_load_report
from mindspeed_dsa.runs import expert_load
from mindspeed_dsa.runs.expert_load import LayerLoad
from tests.features.moe.batch_overlap.layer_in_halves import ATTENTION
from tests.support import model
from tests.support.contexts import context

# -- functions that run in the pool's workers ------------------------------------------------------


SWITCH = "moe_router_load_report"
LAYERS, SAMPLES = 4, 4


def train(
    folder: str = "",
    steps: int = 2,
    num_microbatches: int = 4,
    overrides: dict[str, Any] | None = None,
    evaluate: bool = False,
    switches: dict[str, Any] | None = None,
    mtp: bool = False,
    **layout: Any,
) -> list[dict[int, list[int]]]:
    """Train a model with three MoE layers, with a report in ``folder`` unless it is empty.

    Returns:
        per step, the tokens per layer and expert that this rank's routers sent.
    """
    model.start({**(switches or {}), **({SWITCH: folder} if folder else {})}, **layout)
    running = session.current()
    assert running is not None
    context = running.contexts.get("moe-router-load-report")
    if context is not None:
        load_report.use_own_loop(context)
    from megatron.core import parallel_state

    tp, vpp = layout.get("tp", 1), layout.get("vpp")
    cfg = model.config(
        num_layers=LAYERS,
        tensor_model_parallel_size=tp,
        sequence_parallel=tp > 1,
        pipeline_model_parallel_size=layout.get("pp", 1),
        virtual_pipeline_model_parallel_size=vpp,
        expert_model_parallel_size=layout.get("ep", 1),
        mtp_num_layers=1 if mtp else None,
        **(overrides or {}),
    )
    # As in Megatron-LM, every chunk has a separate config object.
    chunks = [
        model.gpt_model(copy.copy(cfg) if stage else cfg, stage if vpp else None, mtp)
        for stage in range(vpp or 1)
    ]
    seen: dict[int, list[int]] = {}
    for chunk in chunks:
        watch(chunk, seen)
    by_step = []
    ranks, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    for step in range(1, steps + 1):
        batch = model.samples(num_microbatches * SAMPLES, seed=step)
        mine = batch.view(num_microbatches, ranks, SAMPLES // ranks, -1)[:, rank]
        # An evaluation between steps must not be counted.
        if evaluate:
            with torch.no_grad():
                model.per_token_loss(chunks[0], mine[0])
        seen.clear()
        model.train_step(cfg, chunks, list(mine))
        if context is not None:
            load_report.record_step(context, step)
        by_step.append(dict(seen))
    return by_step


def watch(chunk: Any, seen: dict[int, list[int]]) -> None:
    """Count the tokens of each router's experts by their non-zero probabilities."""
    layers = [(layer.layer_number, layer) for layer in chunk.decoder.layers]
    if getattr(chunk, "mtp", None) is not None:
        layers += [(LAYERS + each.layer_number, each) for each in chunk.mtp.layers]
    for number, layer in layers:
        for module in layer.modules():
            if type(module).__name__ == "TopKRouter":
                module.register_forward_hook(_counter(number, seen))


def _counter(number: int, seen: dict[int, list[int]]) -> Any:
    def count(router: Any, inputs: Any, output: Any) -> None:
        # Every chosen expert has a probability that is not 0.
        tokens = (output[0] != 0).sum(dim=0).tolist()
        before = seen.get(number, [0] * len(tokens))
        seen[number] = [a + b for a, b in zip(before, tokens, strict=True)]

    return count


def summed(ranks: list[list[dict[int, list[int]]]]) -> list[dict[int, list[int]]]:
    """Return the sums over all ranks, by step."""
    together: list[dict[int, list[int]]] = []
    for of_step in zip(*ranks, strict=True):
        total: dict[int, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
        for seen in of_step:
            for layer, tokens in seen.items():
                total[layer] = [a + b for a, b in zip(total[layer], tokens, strict=True)]
        together.append(dict(sorted(total.items())))
    return together


CASE = "tests.features.moe.load_report.test_load_report:train"
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def report_of(pool, folder, world_size, **arguments):
    """Return the routers' counts and the report's records."""
    with_report = pool.run(CASE, world_size, folder=str(folder), **arguments)
    return summed(with_report), expert_load.read(folder)


def experts_of(record):
    return {layer["layer"]: layer["experts"] for layer in record["layers"]}


@pytest.mark.parametrize(
    ("world_size", "arguments"),
    [
        pytest.param(1, {"evaluate": True, "mtp": True}, marks=pytest.mark.full),
        (2, {"ep": 2}),
        pytest.param(2, {"pp": 2, "vpp": 2}, marks=pytest.mark.full),
        pytest.param(2, {"tp": 2}, marks=pytest.mark.full),
        pytest.param(4, {"ep": 2, "pp": 2, "mtp": True}, marks=pytest.mark.full),
        pytest.param(4, {"ep": 2}, marks=pytest.mark.full),
        (2, {"ep": 2, "switches": ATTENTION}),
    ],
    ids=("one process", "EP2", "PP2 x VPP2", "TP2+SP", "EP2 x PP2, MTP", "EP2 x DP2", "EP2, halves"),
)
def test_every_token_of_every_microbatch_counts_once(pool, tmp_path, world_size, arguments):
    seen, records = report_of(pool, tmp_path, world_size, **arguments)
    assert [record["step"] for record in records] == [1, 2]
    assert [experts_of(record) for record in records] == seen
    assert seen[0] != seen[1]
    layers = [2, 3, 4, 5] if arguments.get("mtp") else [2, 3, 4]
    stages = {1: [0] * len(layers), 2: [0, 1, 1, 1]}[arguments.get("pp", 1)]
    if arguments.get("vpp"):
        stages = [1, 0, 1]  # one layer per chunk, so the ranks alternate
    ep = arguments.get("ep", 1)
    replicas = world_size // (arguments.get("pp", 1) * arguments.get("tp", 1) * ep)
    for record in records:
        assert [layer["layer"] for layer in record["layers"]] == layers
        assert [layer["stage"] for layer in record["layers"]] == stages[: len(layers)]
        for layer in record["layers"]:
            # 4 microbatches x 4 samples x 20 tokens x 2 experts each
            assert sum(layer["experts"]) == 4 * 4 * 20 * 2
            assert layer["microbatches"] == 4
            assert len(layer["ranks"]) == replicas
            by_rank = [sum(loads) for loads in zip(*layer["ranks"], strict=True)]
            per = 4 // ep
            assert by_rank == [sum(layer["experts"][per * r : per * (r + 1)]) for r in range(ep)]
        assert sum(stage["tokens"] for stage in record["stages"]) == len(layers) * 640


@pytest.mark.full
def test_recomputed_layers_count_once(pool, tmp_path):
    plain, records = report_of(pool, tmp_path / "plain", 1)
    twice, recomputed = report_of(pool, tmp_path / "recomputed", 1, overrides=FULL)
    # Hooks see both runs of a recomputed layer; the report counts one.
    assert twice == [{layer: [2 * n for n in tokens] for layer, tokens in step.items()} for step in plain]
    assert recomputed == records


def test_counting_never_waits_for_the_device(load_context):
    """Meta tensors have no values, so any wait for one would raise."""
    counts = steps.Counts(load_context)
    router = torch.nn.Module()
    for _ in range(2):
        counts.add(router, torch.ones(6, 4, dtype=torch.bool, device="meta"))


@pytest.fixture
def load_context(tmp_path):
    return context("moe-router-load-report", Options(tmp_path / "run"))


def test_megatrons_loop_writes_every_step_and_shows_what_tensorboard_is_due(
    load_context, monkeypatch, tmp_path
):
    """Records are written at every step; scalars go to Megatron's writer at its own interval."""
    loads = [LayerLoad(2, 0, [6, 2, 0, 0], [[8, 0]]), LayerLoad(3, 1, [2, 2, 2, 2], [[4, 4]])]
    monkeypatch.setattr(steps, "counts_of", lambda _: SimpleNamespace(take=lambda: loads))
    shown = {}
    writer = SimpleNamespace(
        add_scalar=lambda name, value, step: shown.update({(name, step): value}),
        add_histogram=lambda name, values, step: shown.update({(name, step): values.tolist()}),
    )

    def training_log(loss_dict, iteration):
        return "logged"

    variables = SimpleNamespace(
        get_args=lambda: SimpleNamespace(tensorboard_log_interval=2),
        get_tensorboard_writer=lambda: writer,
    )
    modules = {
        "training.training": SimpleNamespace(training_log=training_log),
        "training.global_vars": variables,
    }
    loop = SimpleNamespace(options=load_context.options, megatron=modules.__getitem__, log=load_context.log)
    log = steps.record_after_log(training_log, loop)
    # Scalars are due at every second step.
    assert [log({}, 1), log({}, iteration=2)] == ["logged", "logged"]
    assert {step for _, step in shown} == {2}
    assert shown["moe load/layer 2 rank imbalance", 2] == 2.0
    assert shown["moe load/layer 2 expert imbalance", 2] == 3.0
    assert shown["moe load/layer 2 experts", 2] == [3.0, 1.0, 0.0, 0.0]
    assert shown["moe load/stage 0 imbalance", 2] == 2.0
    assert shown["moe load/stage 1 imbalance", 2] == 1.0
    assert [record["step"] for record in expert_load.read(tmp_path / "run")] == [1, 2]


def test_the_imbalance_of_a_stage_is_that_of_ranks_that_wait_in_every_layer():
    """Ranks wait in every layer, so opposite imbalances of two layers do not cancel out."""
    loads = [LayerLoad(1, 0, [3, 1], [[3, 1]]), LayerLoad(2, 0, [1, 3], [[1, 3]])]
    record = expert_load.record(7, loads)
    assert record["stages"] == [{"stage": 0, "tokens": 8, "imbalance": 1.5}]


def test_training_outlives_a_report_that_cannot_be_written(load_context, monkeypatch, caplog):
    """A folder is in the file's place."""
    monkeypatch.setattr(
        steps, "counts_of", lambda _: SimpleNamespace(take=lambda: [LayerLoad(2, 0, [6, 2], [[8, 0]])])
    )
    (load_context.options.folder / expert_load.FILE).mkdir(parents=True)
    steps.record_step(load_context, 1)
    assert "lacks steps: Is a directory" in caplog.text


def test_a_loop_that_records_nothing_is_refused(load_context):
    with pytest.raises(mindspeed_dsa.MindSpeedDSAError, match="call use_own_loop and record_step"):
        steps.require_loop(load_context)
    steps.use_own_loop(load_context)
    steps.require_loop(load_context)


def test_what_cannot_be_reported_is_refused(tmp_path):
    file = tmp_path / "file"
    file.touch()
    args = SimpleNamespace(moe_router_load_report=str(file), num_experts=None, dsa_stage="warmup")
    args.is_hybrid_model = True
    problems = " ".join(check_load_report(args, None))
    assert "not those of --is-hybrid-model; omit one" in problems
    assert "has no experts" in problems
    assert "--dsa-stage warmup" in problems
    assert "is a file; name a folder" in problems


def test_the_command_shows_and_draws_a_report(tmp_path, capsys):
    folder, picture = tmp_path / "report", tmp_path / "load.png"
    folder.mkdir()
    loads = [LayerLoad(2, 0, [6, 2, 0, 0], [[8, 0]]), LayerLoad(3, 1, [2, 2, 2, 2], [[4, 4]])]
    lines = [json.dumps(expert_load.record(step, loads)) for step in (1, 2)]
    (folder / expert_load.FILE).write_text("\n".join(lines) + "\n")
    assert main(["experts", str(folder), "--picture", str(picture)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert "2.00, at most 2.00" in printed[1]
    assert "0 (75.0%), 1 (25.0%), 2 (0.0%)" in printed[1]
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("content", [None, "", "{}\n", '{"step": 1, "layers": [{"layer": 1}]}\n'])
def test_other_files_are_no_reports(tmp_path, capsys, content):
    if content is not None:
        (tmp_path / expert_load.FILE).write_text(content)
    assert main(["experts", str(tmp_path)]) == 2
    assert "is not a report of --moe-router-load-report" in capsys.readouterr().err
