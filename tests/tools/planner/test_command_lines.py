"""Searches whose flags make the same plan again, misspelt flags, sizes by name, verdicts and pictures."""

from __future__ import annotations

import json
import re
import shlex

import pytest

from mindspeed_dsa.__main__ import main
from mindspeed_dsa.tools.planner import (
    arguments,
    command_lines,
    configs,
    differences,
    flags,
    picture,
    plan,
    report,
    search,
    sizes,
)
from mindspeed_dsa.tools.planner.devices import DEVICES, device
from mindspeed_dsa.tools.planner.memory import GIB
from tests.tools.planner.jobs import DEEPSEEK, EXAMPLE, deepseek, example, planned

GLM = (
    "pretrain_gpt.py --seq-length 4096 --bf16 --use-distributed-optimizer --use-fused-dsa "
    "--dsa-indexer-loss-coeff 0.01 --moe-grouped-gemm"
)

SELECTIVE = (
    "--tensor-model-parallel-size 2 --reuse-fp32-param --recompute-granularity selective "
    "--recompute-modules layernorm"
)


def figures(made):
    return made.worst.total, made.worst.host, made.time.total, str(made.job.layout), made.verdict


@pytest.mark.parametrize(
    ("words", "devices", "kind", "name"),
    [
        # Measures: none, full recomputation; with the optimizer on the host; vocabulary padded by TP.
        pytest.param(
            f"{GLM} --micro-batch-size 2 --global-batch-size 512",
            64,
            {"name": "h200"},
            "glm-5.2",
            marks=pytest.mark.full,
        ),
        pytest.param(
            f"{GLM} --micro-batch-size 1 --global-batch-size 256",
            256,
            {"name": "h100"},
            "deepseek-v3.2",
            marks=pytest.mark.full,
        ),
        (
            f"{EXAMPLE} --num-layers 8 --expert-tensor-parallel-size 2 {SELECTIVE}",
            8,
            {"name": "cpu", "memory": 0.06, "host_memory": 64.0},
            None,
        ),
        (
            "pretrain_gpt.py --seq-length 8192 --micro-batch-size 1 --bf16 --schedules-method dualpipev",
            16,
            {"name": "h200"},
            "moonlight",
        ),
    ],
)
def test_flags_under_a_row_make_the_same_plan_again(words, devices, kind, name):
    """Printed lines, parsed as by a shell, with the sizes by name and with the model's flags."""
    flags, on = words.split(), device(**kind)
    job = arguments.job_of(flags, devices, name, any_layout=True)
    results = search.search(job, on, best=8)
    lines = search.text(results, flags)
    blocks = re.findall(r"(?:^    .*\n?)+", lines, re.MULTILINE)
    assert len(blocks) == len(results)
    for result, block in zip(results, blocks, strict=True):
        pasted = shlex.split(block.replace("\\\n", ""))
        assert figures(plan.make(arguments.job_of(pasted, devices, name), on)) == figures(result.plan)
        if name:
            model = configs.flags_of(name, set(), result.plan.job, "0.16.1")
            whole = [pasted[0], *(word for line in model for word in shlex.split(line)), *pasted[1:]]
            assert figures(plan.make(arguments.job_of(whole, devices), on)) == figures(result.plan)
    assert max(map(len, lines.splitlines())) <= 130


def test_a_batch_that_nobody_gave_is_in_the_line():
    job = arguments.job_of([*GLM.split(), "--micro-batch-size", "1"], 64, "deepseek-v3.2", any_layout=True)
    words = command_lines.words_for([*GLM.split(), "--micro-batch-size", "1"], job)
    assert words[words.index("--global-batch-size") + 1] == "64"
    assert "--global-batch-size" not in command_lines.words_for(EXAMPLE.split(), example(any_layout=True))


@pytest.mark.parametrize(
    ("given", "host", "full"),
    [
        ("--reuse-fp32-param --recompute-norm", True, False),
        ("--recompute-norm --swap-attention", False, True),
    ],
)
def test_flags_that_a_measure_replaces_are_gone(given, host, full):
    words = [*EXAMPLE.split(), "--global-batch-size", "32", *given.split()]
    job = arguments.job_of(words, 8, any_layout=True)
    tried = search._with(job, host, search.FULL if full else 0)
    pasted = command_lines.words_for(words, tried)
    again = arguments.job_of(pasted, 8)
    assert (again.features, again.training) == (tried.features, tried.training)


@pytest.mark.parametrize("search_too", [[], ["--search", "--devices", "8"]])
@pytest.mark.parametrize(
    ("flag", "meant"),
    [
        ("--use-fused-dsaa", "--use-fused-dsa"),
        ("--pngg=p.png", "--png"),
        ("--swap-optimzer", "--swap-optimizer"),
        ("--bf61", "--bf16"),
    ],
)
def test_a_misspelt_flag_is_refused_with_the_one_it_resembles(capsys, search_too, flag, meant):
    assert main(["plan", *search_too, "--", "pretrain_dsa.py", flag]) == 2
    said = capsys.readouterr()
    assert f"{flag.partition('=')[0]} is no flag; did you mean {meant}?" in said.err
    assert not said.out


def test_flags_of_megatron_and_of_other_parsers_are_notes_of_searches_too(capsys):
    words = ["--num-layers", "8", "--lora-rank", "8", "--moe-shared-expert-overlap", "--lr", "1e-4"]
    assert main(["plan", "--search", "--device", "cpu", "--", "pretrain_dsa.py", *words]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"note: not read: --lora-rank, --lr$", printed, re.MULTILINE)
    assert "NOT planned, though memory, bytes or time depend on them: --moe-shared-expert-overlap" in printed


def test_no_flag_of_the_example_job_looks_misspelt():
    from dsa_job.flags import FLAGS

    assert not flags.misspelt([flag.name for flag in FLAGS.values()])


def test_options_behind_the_jobs_flags_are_taken(tmp_path, capsys):
    files = [tmp_path / "plan.png", tmp_path / "plan.json"]
    words = ["--num-layers", "4", "--png", str(files[0]), "--bf16", f"--json={files[1]}"]
    assert main(["plan", "--device", "cpu", "--", "pretrain_dsa.py", *words]) == 0
    assert files[0].read_bytes()[:4] == b"\x89PNG"
    assert json.loads(files[1].read_text())["verdict"] == "fits"
    assert "note: not read" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "billions", "sparse"),
    [
        ("deepseek-v3", 671.0, False),
        ("deepseek-v3.1", 671.0, False),
        ("deepseek-v3.2", 671.0 + 0.85, True),
        ("glm-5", 743.9, True),
        ("glm-5.2", 743.3, True),
        ("kimi-k2", 1026.4, False),
        ("moonlight", 15.96, False),
        ("qwen3-235b-a22b", 235.09, False),
        ("qwen3-30b-a3b", 30.53, False),
        ("qwen2.5-7b", 7.616, False),
        ("llama-3.1-8b", 8.030, False),
        ("mixtral-8x7b", 46.70, False),
    ],
)
def test_models_by_name_have_their_parameters(name, billions, sparse):
    words = "pretrain_gpt.py --seq-length 4096 --micro-batch-size 1".split()
    model = arguments.job_of(words, None, name).model
    counted = sum(count for part, count in sizes.by_part(sizes.model_weights(model)).items() if part != "MTP")
    assert counted / 1e9 == pytest.approx(billions, rel=1e-3)
    assert model.sparse == sparse


@pytest.mark.parametrize(
    "kind",
    [
        {"model_type": "kimi_k2"},
        {"model_type": "of_my_own", "architectures": ["DeepseekV3ForCausalLM"]},
    ],
)
def test_files_of_the_same_architecture_are_read(tmp_path, kind):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**configs.KNOWN["kimi-k2"], **kind}))
    words = "pretrain_gpt.py --seq-length 4096 --micro-batch-size 1".split()
    assert arguments.job_of(words, None, str(file)) == arguments.job_of(words, None, "kimi-k2")


def test_three_verdicts_and_their_exit_statuses(capsys):
    made = planned(
        deepseek("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1")
    )
    needs, allocated = made.worst.total / GIB, made.worst.allocated / GIB
    assert needs == pytest.approx(1.05 * allocated)
    sizes_of = {"fits": needs + 3.001, "tight": allocated + 0.001, "does NOT fit": allocated - 0.001}
    for verdict, size in sizes_of.items():
        words = ["plan", "--devices", "512", "--device-memory", str(size), "--config", "deepseek-v3.2", "--"]
        words += [*DEEPSEEK.split(), "--recompute-granularity", "full", "--recompute-method", "uniform"]
        assert main(words) == (verdict == "does NOT fit")
        printed = capsys.readouterr().out
        assert printed.splitlines()[0].endswith(f": {verdict}")
        assert ("warning:" in printed) == (verdict == "tight")
        assert ("what saves memory" in printed) == (verdict != "fits")
    assert plan.make(made.job, device("h100", memory=needs + 1, reserve=0.0)).fits
    assert not plan.make(made.job, device("h100", memory=needs + 1)).fits
    assert main(["plan", "--reserve", "-1", "--", "pretrain_dsa.py"]) == 2


def test_a_nodes_host_is_a_limit(capsys):
    swapped = deepseek("--swap-optimizer --expert-model-parallel-size 4")
    roomy, small = (
        plan.make(swapped, device("h200", memory=500.0, host_memory=size)) for size in (2048.0, 64.0)
    )
    assert roomy.fits
    assert small.verdict == plan.TOO_LARGE
    assert roomy.node_host == 8 * max(item.host for item in roomy.ranks) > 64 * GIB
    text = report.text(small)
    assert "which does NOT fit the 64 assumed" in text
    assert "a node's host has no room" in text
    assert small.fitting is not None
    assert small.fitting > swapped.layout.devices, "more replicas leave each host less"
    job = example("--num-layers 8 --swap-optimizer", 8, any_layout=True)
    results = search.search(job, device("h100"))
    head, *rows = [
        line for line in search.text(results, EXAMPLE.split()).splitlines() if not line.startswith(" ")
    ][1:]
    assert "host GiB" in head
    at = head.index("host GiB")
    largest = [max(rank.host for rank in item.plan.ranks) / GIB for item in results]
    assert [row[at:].split()[0] for row in rows[: len(results)]] == [f"{item:.1f}" for item in largest]


def test_memory_is_what_devices_report():
    assert {name: DEVICES[name].memory for name in ("h100", "h200")} == {"h100": 79.2, "h200": 139.8}
    assert DEVICES["cpu"].reserve == 0


def test_equal_ranks_are_one_column_and_rows_of_nothing_are_gone():
    full = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    text = report.text(planned(deepseek(full)))
    head = next(line for line in text.splitlines() if line.startswith("memory, GiB"))
    assert len(re.findall(r"ranks? [\d, -]+", head)) <= 6
    local = "--pipeline-model-parallel-size 4 --num-layers 8 --global-batch-size 4 --moe-layer-freq 1"
    equal = report.text(planned(example(f"{local} --micro-batch-size 4")))
    assert "ranks 1-2" in equal
    rows = [line.split() for line in text.splitlines()]
    assert not [row for row in rows if row and row[-1] == "0.00" and set(row[2:]) == {"0.00"}]
    assert max(map(len, text.splitlines())) <= 120


def test_flags_that_make_it_fit_do_so_together():
    job = "--expert-model-parallel-size 8 --context-parallel-size 2 --moe-token-dispatcher-type alltoall"
    on = device("h200")

    def made(more=()):
        words = [*DEEPSEEK.split(), *job.split(), *more]
        return plan.make(arguments.job_of(words, 512, "deepseek-v3.2"), on, quick=True)

    before = made()
    assert before.verdict == plan.TOO_LARGE
    ways = differences.ways(before, made)
    together = ways[-1]
    assert together.verdict == "fits"
    assert made(together.flags.split()).fits
    assert together.seconds < min(way.seconds for way in ways[:-1] if way.verdict == "fits")
    assert max(map(len, differences.text_of_ways(ways, 512).splitlines())) <= 115
    for way in ways:
        assert not ("--recompute-granularity" in way.flags and "--swap-attention" in way.flags), way
    tiny = device("h200", memory=20.0)
    hopeless = differences.ways(before, lambda more: plan.make(made(more).job, tiny, quick=True))
    assert "plan --search" in differences.text_of_ways(hopeless, 512)


def test_a_part_has_one_colour_in_all_pictures(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    seen = {}
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **kwargs: seen.update(figure=figure))
    colours, titles = {}, []
    for job in (
        deepseek(),
        deepseek("--swap-optimizer"),
        deepseek("--use-torch-fsdp2 --no-use-distributed-optimizer"),
    ):
        made = planned(job)
        picture.draw(tmp_path / "plan.png", made)
        memory, step = seen["figure"].axes
        for axes in (memory, step):
            for bars in axes.containers:
                name = bars.get_label().removeprefix("activations: ")
                assert colours.setdefault(name, bars[0].get_facecolor()) == bars[0].get_facecolor()
            legend = [text.get_text() for text in axes.get_legend().get_texts()]
            stack = [bars.get_label() for bars in axes.containers]
            assert legend[-len(stack) :] == stack[::-1]
        titles.append(memory.get_title())
        assert titles[-1].endswith(made.verdict)
        assert f"{made.worst.total / GIB:.1f}" in [text.get_text() for text in memory.texts]
    assert len(set(colours.values())) == len(colours)
