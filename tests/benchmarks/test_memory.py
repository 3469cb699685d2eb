"""The benchmark of the memory features measures the declared figures; their benefit is not tested."""

from __future__ import annotations

import json
import subprocess
from types import SimpleNamespace

import pytest
import torch

from benchmarks import __main__ as cli
from benchmarks import memory
from benchmarks.memory import child, measure
from benchmarks.memory.child import Child
from tests.support import third_party, warm

third_party.or_skip("megatron.core")


@pytest.mark.full
def test_every_metric_of_a_quick_run(tmp_path, capsys):
    file = tmp_path / "result.json"
    assert cli.main(["memory", "--quick", "--device", "cpu", "--json", str(file)]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(file.read_text()) == json.loads(line)
    metrics = json.loads(line)["metrics"]
    keys = {"off", *memory.FEATURES}
    assert metrics["tokens"] == {"step": 64, "long step": 128}
    ratios = [f"{step}_{clock}_ratio" for step in ("step", "long_step") for clock in ("time", "cpu_time")]
    for name in ("device_bytes_per_param", "device_peak_bytes_per_param", *ratios):
        assert set(metrics[name]) == keys
    assert set(metrics["activation_peak_ratio"]) == {"off", *memory.ACTIVATIONS}
    for name, saved in memory.SAVED.items():
        # Padding of buckets and step counters weigh more in a model this small.
        assert metrics["saved_bytes_per_param"][name] == pytest.approx(saved, abs=0.1)


@pytest.mark.full
def test_one_feature_beside_a_job_without_it():
    rounds = {"step": 2, "long step": 1}
    result = memory.compare(["reuse-fp32-param"], memory.QUICK, rounds, device="cpu")
    rest, peak = result["device_bytes_per_param"], result["device_peak_bytes_per_param"]
    assert rest["off"] == pytest.approx(14, abs=0.1)  # bf16 weight, master weight, two moments
    assert rest["off"] - rest["reuse-fp32-param"] == pytest.approx(2, abs=0.05)
    assert all(peak[name] >= rest[name] for name in rest)
    assert result["step_time_ratio"]["off"] == 1
    assert result["step_time_ratio"]["reuse-fp32-param"] > 0


@pytest.mark.full
def test_jobs_that_train_differently_are_not_compared(monkeypatch):
    monkeypatch.setattr(memory, "GATE_STEPS", 1)
    with (
        Child("off", memory.QUICK, {}, "cpu") as off,
        Child("on", memory.QUICK, {}, "cpu") as on,
    ):
        memory.require_same_training([off, on])
        on.ask("step")  # one step ahead
        with pytest.raises(RuntimeError, match="on: loss of step 0 is not the same"):
            memory.require_same_training([off, on])


@pytest.mark.full
def test_a_job_that_ends_is_an_error():
    with (
        Child("bad", memory.QUICK, {"use_nothing": True}, "cpu") as bad,
        pytest.raises(RuntimeError, match="bad: the job exited at 'step'"),
    ):
        bad.ask("step")


@pytest.mark.full
def test_a_long_step_is_a_step_of_several_microbatches(monkeypatch):
    monkeypatch.setattr(child, "subprocess", SimpleNamespace(Popen=warm.popen, PIPE=subprocess.PIPE))
    with Child("off", memory.QUICK, {}, "cpu") as one, Child("other", memory.QUICK, {}, "cpu") as other:
        short, long = one.ask("step"), other.ask("long step")
        assert short["loss"] != long["loss"]
        memory_of_gradients = [each.ask("rest")["bytes"] for each in (one, other)]
        assert memory_of_gradients[0] == memory_of_gradients[1]
        assert one.ask("digest") != other.ask("digest")


def test_time_alone_and_of_chosen_features(monkeypatch):
    asked = []
    monkeypatch.setattr(memory, "compare", lambda *given, **options: asked.append((given, options)) or {})
    result = memory.run("cpu", timed="swap-attention,reuse-fp32-param")
    assert asked[0][0][0] == ["swap-attention", "reuse-fp32-param"]
    assert asked[0][1] == {"bytes_too": False}
    assert result["tokens"] == {"step": 2048, "long step": 8192}
    with pytest.raises(SystemExit, match="names nothing"):
        memory.run("cpu", timed="nothing")


def test_ratios_are_medians_over_rounds_whatever_the_order():
    class Clock:
        def __init__(self, name, seconds):
            self.name, self._seconds = name, iter(seconds)

        def ask(self, command):
            assert command == "long step"
            order.append(self.name)
            seconds = next(self._seconds)
            return {"seconds": seconds, "cpu_seconds": 2 * seconds}

    order = []
    clocks = [Clock("off", [1, 10, 100]), Clock("on", [2, 50, 300]), Clock("too", [1, 30, 200])]
    ratios = memory.step_ratios(clocks, "long step", 3)
    assert ratios["long_step_time_ratio"] == {"off": 1, "on": 3, "too": 2}
    assert ratios["long_step_cpu_time_ratio"] == ratios["long_step_time_ratio"]
    assert ratios["long_step_seconds_off"] == {"seconds": 10, "cpu_seconds": 20}
    assert order == ["off", "on", "too", "on", "too", "off", "too", "off", "on"]


def test_the_peak_of_work_knows_what_its_lead_in_allocated():
    kept = []

    def lead_in():
        torch.empty(3 << 20, dtype=torch.uint8)  # freed before the work begins
        kept.append(torch.empty(1 << 20, dtype=torch.uint8))

    def work():
        kept.append(torch.empty(1 << 18, dtype=torch.uint8))
        kept.clear()
        torch.empty(1 << 19, dtype=torch.uint8)

    assert measure.peak_bytes(work, lead_in) == (1 << 20) + (1 << 18)
    assert measure.peak_bytes(work) == 1 << 19


def test_live_bytes_leave_out_tensors_without_memory():
    from torch._subclasses.fake_tensor import FakeTensorMode

    before = measure.live_bytes()
    with FakeTensorMode():  # compiled regions of an earlier case leave tensors without memory
        fake = torch.empty(1000)
    kept = [fake, torch.empty(1000)]
    assert measure.live_bytes() - before == 4000
    del kept


@pytest.mark.full
def test_live_bytes_are_those_of_the_device():
    from mindspeed_dsa.platforms import host_pool

    before = measure.live_bytes()
    device = torch.empty(1000, dtype=torch.float32)
    views = [device[1:], device.view(10, 100)]
    host = host_pool.shared.take(1 << 20)
    assert measure.live_bytes() - before == 4000
    host.give_back()
    del views
