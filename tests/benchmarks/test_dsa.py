"""The benchmark of the DSA operators measures the declared figures; speed is not tested here."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from benchmarks import __main__ as cli
from benchmarks import dsa
from benchmarks.dsa import child, floor, forms, problem, sharing
from benchmarks.dsa.problem import Sizes
from benchmarks.released import MODELS
from mindspeed_dsa.megatron.selections import Sharing
from tests.support.figures import numbers

TINY = Sizes(length=80, heads=2, index_heads=2, topk=16)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_every_metric_of_a_quick_run(tmp_path, capsys):
    pytest.importorskip("megatron.core")
    file = tmp_path / "result.json"
    assert cli.main(["dsa", "--quick", "--device", "cpu", "--json", str(file)]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    found = json.loads(line)
    assert json.loads(file.read_text()) == found
    metrics = found["metrics"]
    assert metrics.pop("model") == "deepseek-v3.2"
    assert metrics.pop("scaled") == {"heads": "4 of 128", "index_heads": "4 of 64", "topk": "64 of 2048"}
    assert metrics.pop("indexer_time_ratio") == "every layer of this model selects"
    assert metrics.pop("cuda") == "not run on a GPU"
    rows = metrics["absorb_choice"]
    assert list(rows) == list(metrics["extra_peak_mib_by_length"])
    assert metrics["absorb_choice_worst_ratio"] == max(row["ratio"] for row in rows.values())
    assert {row.pop("chosen") for row in rows.values()} <= {"by head", "absorbed"}
    assert all(isinstance(value, (int, float)) and value > 0 for value in numbers(metrics))
    assert metrics["correctness_deviation"] < 1e-4
    assert metrics["correctness_deviation_bf16"] < 2e-2
    for name in ("floor_multiple", "floor_multiple_bf16"):
        assert {operator: list(row) for operator, row in metrics[name].items()} == {
            "lightning_indexer": ["forward", "backward"],
            "sparse_flash_attention": ["forward", "backward"],
            "indexer_kl_loss": ["forward_backward"],
        }
    assert metrics["threads"] == torch.get_num_threads()
    for dtype in ("", "_bf16"):
        for ratio, of in (
            ("speedup_vs_megatron", "seconds"),
            ("cpu_time_ratio_vs_megatron", "cpu_seconds"),
            ("memory_ratio_vs_megatron", "extra_peak_mib"),
        ):
            sides = metrics[of + dtype]
            assert metrics[ratio + dtype] == pytest.approx(sides["megatron"] / sides["fused"])
    small, large = metrics["extra_peak_mib_by_length"].values()
    assert metrics["memory_growth_per_doubling"] == pytest.approx(large / small)


def test_only_cases_with_a_quick_form_take_quick(capsys):
    with pytest.raises(SystemExit):
        cli.main(["patch-engine", "--quick"])
    assert "patch-engine has no quick form" in capsys.readouterr().err


def test_figures_are_those_of_the_processes(monkeypatch):
    """Medians over all runs of all processes, whose steps alternate, and the largest growth ratio."""
    extra = {2048: 10.0, 4096: 30.0, 8192: 40.0}
    seconds = {"fused": iter([1.0, 2.0, 3.0, 9.0]), "megatron": iter([10.0, 40.0, 30.0, 20.0])}
    order = []

    class Process:
        def __init__(self, side, sizes, dtype="float32"):
            self.side, self.sizes, self.dtype, self.runs = side, sizes, dtype, 0

        def __enter__(self):
            return self

        def __exit__(self, *_):
            order.append("end")

        def run(self):
            order.append((self.side, self.dtype))
            self.runs += 1
            taken = next(seconds[self.side], 1.0)
            bytes_ = extra[self.sizes.length] * (2 if self.side == "megatron" else 1) * self.runs
            return {"seconds": taken, "cpu_seconds": 2 * taken, "extra_bytes": bytes_, "threads": 2}

    monkeypatch.setattr(dsa, "Child", Process)
    monkeypatch.setattr(child, "Child", Process)
    result = dsa.compare(Sizes(), rounds=2, runs=2, dtype=torch.bfloat16)
    turns = [("fused", "bfloat16"), ("megatron", "bfloat16")]
    assert order == [*turns, *turns, "end", "end"] * 2
    assert result["seconds"] == {"fused": 2.5, "megatron": 25.0}
    assert result["speedup_vs_megatron"] == result["cpu_time_ratio_vs_megatron"] == 10
    # Memory is of the first runs: later ones reuse memory that the process has kept.
    assert result["memory_ratio_vs_megatron"] == 2
    assert result["extra_peak_mib"]["fused"] == 30 / 2**20
    grown = dsa.memory_growth(Sizes(), tuple(extra))
    assert grown["memory_growth_per_doubling"] == 3
    assert grown["extra_peak_mib_by_length"] == {str(n): value / 2**20 for n, value in extra.items()}


@pytest.mark.parametrize("model", MODELS)
def test_both_forms_are_compared_before_they_are_timed(model):
    """The gates include the form of the compared size and the other form."""
    cut = [dsa.SCALED, *({**dsa.SCALED, **gate} for gate in dsa.GATES)]
    of_compared, *of_gates = (forms.chosen(Sizes.of(MODELS[model], **sizes)) for sizes in cut)
    assert set(of_gates) == {forms.BY_HEAD, forms.ABSORBED} > {of_compared}


def test_parts_of_a_model(monkeypatch):
    """Each part gets the model; an unreleased model and other parts are refused with the choices."""
    got = []
    monkeypatch.setattr(
        dsa,
        "PARTS",
        {part: lambda model, *rest, part=part: got.append((part, model)) or {} for part in "ab"},
    )
    assert dsa.run("cpu", True, "glm-5", "b,a")["model"] == "glm-5"
    assert got == [("b", MODELS["glm-5"]), ("a", MODELS["glm-5"])]
    with pytest.raises(SystemExit, match=r"--model glm-4 is none of deepseek-v3\.2, glm-5, glm-5\.2$"):
        dsa.run("cpu", True, "glm-4")
    with pytest.raises(SystemExit, match="--only c is none of a, b"):
        dsa.run("cpu", True, only="a,c")


def test_sizes_of_glm():
    """By head 192 + 64 with values of 256, absorbed 512 + 64; scaling reduces the number of heads."""
    sizes = Sizes.of(MODELS["glm-5.2"])
    assert (sizes.heads, sizes.index_heads, sizes.topk, sizes.widths) == (64, 32, 2048, (512, 1088))
    assert sizes.softmax_scale == 256**-0.5
    assert Sizes.of(MODELS["deepseek-v3.2"], **dsa.SCALED) == Sizes()


@pytest.mark.full
def test_time_in_the_indexers_of_layers_that_share(capsys):
    """In the quick run one layer of four has an indexer, and its selection is stored once."""
    assert cli.main(["dsa", "--quick", "--model", "glm-5.2", "--only", "sharing", "--device", "cpu"]) == 0
    result = json.loads(capsys.readouterr().out)["metrics"]
    assert result["computing_layers"] == {"each": 4, "shared": 1}
    # int32, 256 rows of 64 keys
    assert result["selection_bytes"] == {"each": 4 * 65536, "shared": 65536}
    assert result["selection_bytes_planned"] == 65536
    for kind, ratio in (("cpu_seconds", "indexer_time_ratio"), ("seconds", "indexer_wall_ratio")):
        times = result[f"indexer_{kind}"]
        assert result[ratio] == pytest.approx(times["shared"] / times["each"])
        assert all(0 < times[side] < whole for side, whole in result[f"whole_{kind}"].items())
    assert dsa.run("cpu", True, "glm-5", "sharing")["indexer_time_ratio"].startswith("every layer")


def test_layers_that_select_for_three_above():
    places = sharing.four_places(MODELS["glm-5.2"].sharing)
    assert [place.source for place in places] == ["layer 3"] * 4
    with pytest.raises(ValueError, match="selects for 3 above it"):
        sharing.four_places(Sharing(frequency=2))


def test_layers_that_share_and_differ_are_not_timed(monkeypatch):
    sizes, places = replace(TINY, hidden_dim=32, query_rank=16), sharing.four_places(Sharing(frequency=4))
    sharing.require_same_results(sizes, places)
    original = sharing.attend_sparsely

    def wrong(operands, topk_indices, backend, with_sum):
        attended = original(operands, topk_indices, backend, with_sum=with_sum)
        return attended if with_sum else replace(attended, out=attended.out * 1.0001)

    monkeypatch.setattr(sharing, "attend_sparsely", wrong)
    with pytest.raises(RuntimeError, match="layer 2 of 4 differs"):
        sharing.require_same_results(sizes, places)


def test_the_ratio_is_that_of_the_form_which_a_job_takes(monkeypatch):
    """The test's clock advances 3 seconds in a step by head, and 2 in an absorbed one."""
    now, called = [0.0], []

    def step_in(form, inputs, grad_out, sizes):
        def step():
            called.append(form)
            now[0] += 3.0 if form == forms.BY_HEAD else 2.0
            return (torch.ones(1),)

        return step

    monkeypatch.setattr(forms, "step_in", step_in)
    monkeypatch.setattr(forms, "CLOCKS", {kind: lambda: now[0] for kind in forms.CLOCKS})
    result = forms.choice(TINY, (16, 80), rounds=3)
    rows = result["absorb_choice"]
    assert [row["chosen"] for row in rows.values()] == [forms.BY_HEAD, forms.ABSORBED]
    assert [row["ratio"] for row in rows.values()] == [1.5, 1.0]
    assert result["absorb_choice_worst_ratio"] == 1.5
    assert called == [forms.BY_HEAD, forms.ABSORBED] * 8
    monkeypatch.setattr(forms, "CLEAR", 1.2)
    called.clear()
    forms.choice(TINY, (80,), rounds=3)
    assert len(called) == 4, "one round is enough where the forms are far apart"


def test_forms_that_differ_are_not_timed(monkeypatch):
    original = forms.attend_sparsely
    forms.choice(TINY, (48,), rounds=1)

    def wrong(operands, *args, **kwargs):
        attended = original(operands, *args, **kwargs)
        return replace(attended, out=attended.out * (1.01 if operands.absorbed else 1))

    monkeypatch.setattr(forms, "attend_sparsely", wrong)
    with pytest.raises(RuntimeError, match="both forms differ by"):
        forms.choice(TINY, (48,), rounds=1)


@pytest.mark.full
def test_sides_that_differ_are_not_compared(monkeypatch):
    pytest.importorskip("megatron.core")
    assert problem.require_same_results(TINY) < 1e-4
    original = problem.fused_step

    def wrong(inputs, grad_out, sizes):
        step = original(inputs, grad_out, sizes)
        return replace(step, gradients=(*step.gradients[:-1], step.gradients[-1] * 1.01))

    monkeypatch.setattr(problem, "fused_step", wrong)
    with pytest.raises(RuntimeError, match=r"differ by more than 0\.0001.*gradient of index_weights"):
        problem.require_same_results(TINY)


@pytest.mark.full
def test_extra_memory_is_what_the_step_holds_at_its_peak(monkeypatch):
    size = 160 << 20
    held = []

    def step(inputs, grad_out, sizes):
        if sizes.length == 300:
            torch.ones(size, dtype=torch.uint8)
            held.append(torch.ones(size // 2, dtype=torch.uint8))

    # Memory held before the step, or freed before it, does not count.
    before = torch.ones(size, dtype=torch.uint8)
    torch.ones(2 * size, dtype=torch.uint8)
    monkeypatch.setitem(child.SIDES, "fused", step)
    first, second = child.serve("fused", "float32", replace(TINY, length=300), ["run", "run"])
    del before
    assert 0.95 * size < first["extra_bytes"] < 1.2 * size
    assert first.keys() == second.keys() == {"seconds", "cpu_seconds", "extra_bytes", "threads"}
    assert len(held) == 2


@pytest.mark.full
def test_a_process_that_fails_is_an_error():
    with pytest.raises(RuntimeError, match=r"nobody at .* exited with 1"):
        child.measure("nobody", TINY)


def test_needed_operations():
    sizes = Sizes(length=4096, heads=16, index_heads=16, topk=512)
    pairs = sum(min(t + 1, 512) for t in range(4096))
    assert sizes.selected_pairs == pairs
    assert floor.needed_flops(sizes) == {
        "lightning_indexer": {
            "forward": 2 * 16 * 128 * 4096 * 4097 // 2,
            "backward": 6 * 16 * 128 * pairs,
        },
        "sparse_flash_attention": {"forward": 2 * 16 * 1088 * pairs, "backward": 2 * 16 * 2752 * pairs},
        "indexer_kl_loss": {"forward_backward": 2 * 16 * 576 * pairs + 6 * 16 * 128 * pairs},
    }


def test_floor_multiples_are_time_by_rate_over_work(monkeypatch):
    """Every call advances the clock by one second, so that the table can be computed by hand."""
    called = []

    def seconds(call):
        call()
        called.append(call)
        return 1.0

    monkeypatch.setattr(floor, "_seconds", seconds)
    result = floor.floor_multiples(TINY, torch.float32, rounds=2, matmul_size=64)
    work = 2.0 * 64**3
    assert all(rate == work / 1e9 for rate in result["matmul_gflops"].values())
    for operator, directions in floor.needed_flops(TINY).items():
        for direction, flops in directions.items():
            assert result["multiple"][operator][direction] == pytest.approx(work / flops)
    # Five operators, and the matmuls of three groups, in two rounds.
    assert len(called) == 2 * (5 + 3 * len(result["matmul_gflops"]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_call_of_the_table_does_its_work(dtype, monkeypatch):
    from mindspeed_dsa.ops.indexer_kl_loss import cpu as loss
    from mindspeed_dsa.ops.lightning_indexer import cpu as indexer
    from mindspeed_dsa.ops.sparse_flash_attention import cpu as attention

    called = []
    for module, name in (
        (indexer, "select"),
        (indexer, "score_gradients"),
        (attention, "forward"),
        (attention, "backward"),
        (loss, "attention_sum"),
        (loss, "divergence_and_gradient"),
    ):
        original = getattr(module, name)

        def counted(*arguments, _original=original, _name=name):
            called.append(_name)
            return _original(*arguments)

        monkeypatch.setattr(module, name, counted)
    calls = floor.operator_calls(TINY, dtype, "cpu")
    expected = {
        ("lightning_indexer", "forward"): ["select"],
        ("lightning_indexer", "backward"): ["score_gradients"],
        ("sparse_flash_attention", "forward"): ["forward"],
        ("sparse_flash_attention", "backward"): ["backward"],
        ("indexer_kl_loss", "forward_backward"): [
            "attention_sum",
            "divergence_and_gradient",
            "score_gradients",
        ],
    }
    for (operator, direction), names in expected.items():
        called.clear()
        calls[operator][direction]()
        assert called == names
