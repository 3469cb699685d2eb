"""Host time by class of module: whose operators, forward and backward, and what the command prints."""

from __future__ import annotations

import argparse
import cProfile
import json
import sys
import types
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
from torch.nn.modules import module as torch_modules

from mindspeed_dsa.__main__ import main
from mindspeed_dsa.features import all_features
from mindspeed_dsa.features.diagnostics.steps import host_profile as recorder
from mindspeed_dsa.features.diagnostics.steps.feature import check_profile
from mindspeed_dsa.tools.cli import host_profile
from tests.support import model as job
from tests.support import third_party

# -- what runs in the pool's workers ---------------------------------------------------------------


STEPS = 2


def train(file: str | None) -> dict[str, Any]:
    """Losses of both steps, and how many hooks on all modules are left."""
    job.start({} if file is None else {"host_profile": file, "host_profile_step": 1})
    cfg = job.config()
    model = job.gpt_model(cfg)
    losses = [job.train_step(cfg, [model], list(job.samples(4).split(2))) for _ in range(STEPS)]
    hooks = len(torch_modules._global_forward_hooks) + len(torch_modules._global_forward_pre_hooks)
    return {"losses": [float(each["lm loss"]) for step in losses for each in step], "hooks": hooks}


def library(switches: dict[str, Any]) -> dict[str, Any]:
    """What this library's own lines cost in steps of the tiny model, when everything is built."""
    from mindspeed_dsa.features.diagnostics.steps import host_profile
    from tests.features.compilation.regions.compiled_steps import operator_by_operator

    job.start(switches)
    # All functions: which are the most costly depends on who else runs on the machine.
    with operator_by_operator(), mock.patch.object(host_profile, "_SHOWN", None):
        model = job.gpt_model(job.config()).train()
        return _profiled(lambda: job.per_token_loss(model, job.samples(2)), host_profile.own_share)


def library_off() -> dict[str, Any]:
    """The same of a plain GPT, with the library on and no feature."""
    import mindspeed_dsa

    mindspeed_dsa.enable()
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    from mindspeed_dsa.features.diagnostics.steps.host_profile import own_share

    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1234)
    cfg = TransformerConfig(num_layers=2, hidden_size=32, num_attention_heads=4, add_bias_linear=False)
    model = GPTModel(cfg, get_gpt_layer_local_spec(), job.VOCABULARY, job.SEQUENCE)
    return _profiled(lambda: job.per_token_loss(model, job.samples(2)), own_share)


def _profiled(forward: Callable[[], Any], own_share: Callable[[Any], Any]) -> dict[str, Any]:
    for _ in range(2):
        forward().mean().backward()
    functions = cProfile.Profile()
    functions.enable()
    for _ in range(5):
        forward().mean().backward()
    functions.disable()
    found: dict[str, Any] = own_share(functions)
    return found


torch = pytest.importorskip("torch")
third_party.or_skip("megatron.core")

CASES = "tests.features.diagnostics.test_host_profile"
LAYERS, MICROBATCHES = 2, 2


@pytest.fixture(scope="module")
def record(pool, tmp_path_factory):
    file = tmp_path_factory.mktemp("host") / "profile.json"
    (plain,) = pool.run(f"{CASES}:train", 1, file=None)
    (recorded,) = pool.run(f"{CASES}:train", 1, file=str(file))
    assert recorded == plain  # the same losses, and no hook left
    return json.loads(file.read_text())


def test_operators_belong_to_the_modules_that_ran_them(record):
    assert record["layers"] == LAYERS * MICROBATCHES
    classes = record["classes"]
    assert classes["TopKRouter"]["calls"] == (LAYERS - 1) * MICROBATCHES  # the first layer is dense
    for name in ("TopKRouter", "MLASelfAttention", "DSAttention", "SharedExpertMLP"):
        row = classes[name]
        assert row["in_layers"]
        assert row["launches"] > 10
        assert row["forward_us"] > 0
        assert row["backward_us"] > 0
    assert not classes["VocabParallelEmbedding"]["in_layers"]
    # The sizes of experts' parts are read on the host.
    assert classes["MoELayer"]["waits"] > 0
    assert 0 < record["library"]["share"] < 1
    assert record["library"]["functions"][0]["function"].count(".py:") == 1


def test_what_the_library_costs(pool):
    switches = {"compile_regions": True, "fused_operators": ["all"], "two_streams": True}
    # Shares of microseconds grow where other programs interrupt: the least disturbed of three counts.
    runs = [pool.run(f"{CASES}:library", 1, switches=switches)[0] for _ in range(3)]
    on = min(runs, key=lambda run: run["patches"])
    assert any("compilation/regions" in each["function"] for each in on["functions"])
    # A hundredth of a layer's host time is the goal; this model's layers are small, and profiled.
    assert 0 < on["patches"] <= 0.05, on
    (off,) = pool.run(f"{CASES}:library_off", 1)
    assert off["patches"] == 0
    assert off["share"] == pytest.approx(off["platform"]), off["functions"]


def test_launches_are_operators_that_do_the_work():
    linear, states = torch.nn.Linear(3, 3), torch.ones(2, 3)
    with torch.autograd.profiler.profile() as profile:
        torch.relu(linear(states)).view(-1).sum()
        torch.einsum("ab,cb->ac", states, states).to(torch.bfloat16)
    names = [event.name for event in profile.function_events if recorder.is_launch(event)]
    # Not linear and einsum, which call these; not the views and copies inside of them.
    assert names == ["aten::addmm", "aten::relu", "aten::sum", "aten::bmm", "aten::_to_copy"]


class TransformerLayer(torch.nn.Linear):
    """A layer by its name."""

    def forward(self, states):
        with torch.autograd.profiler.record_function(f"{recorder.PREFIX}TransformerLayer"):
            return torch.relu(super().forward(states))


def test_a_recomputed_layer_has_passed_once():
    layer, states = TransformerLayer(3, 3), torch.ones(2, 3, requires_grad=True)
    with torch.autograd.profiler.profile() as profile:
        torch.utils.checkpoint.checkpoint(layer, states, use_reentrant=True).sum().backward()
    found = recorder.of_events(profile.function_events)
    assert found["layers"] == 1
    assert found["classes"]["TransformerLayer"]["calls"] == 2


def test_nodes_have_numbers_of_their_own_in_every_thread():
    """As on accelerators, where layers are recomputed in the thread of backward."""
    events = []

    def event(name, thread, number=-1, parent=None, forward_thread=0):
        made = types.SimpleNamespace(
            id=len(events),
            name=name,
            thread=thread,
            fwd_thread=forward_thread,
            sequence_nr=number,
            cpu_parent=parent,
            cpu_children=[],
            self_cpu_time_total=1.0,
            time_range=types.SimpleNamespace(start=len(events)),
        )
        events.append(made)
        return made

    for thread, module in ((1, "Plain"), (2, "Recomputed")):
        event("aten::mul", thread, number=7, parent=event(f"{recorder.PREFIX}{module}", thread))
    for thread in (1, 2):
        event("autograd::engine::evaluate_function: MulBackward0", 2, number=7, forward_thread=thread)
    classes = recorder.of_events(events)["classes"]
    assert [classes[name]["backward_us"] for name in ("Plain", "Recomputed")] == [1, 1]


def test_the_command_prints_and_draws_what_a_job_recorded(record, tmp_path, capsys):
    source = tmp_path / "record.json"
    source.write_text(json.dumps(record))
    job = (
        "import os, time; "
        f"assert os.environ['MINDSPEED_DSA_HOST_PROFILE_STEP'] == '2'; "
        f"os.replace({str(source)!r}, os.environ['MINDSPEED_DSA_HOST_PROFILE']); "
        "time.sleep(600)"
    )
    files = {kind: tmp_path / f"host.{kind}" for kind in ("json", "png")}
    flags = [f"--{kind}={file}" for kind, file in files.items()]
    assert main(["host-profile", "--step=2", *flags, "--", sys.executable, "-c", job]) == 0
    out = capsys.readouterr().out
    assert "MLASelfAttention" in out
    assert "--compile-regions" in out
    assert "patches of mindspeed_dsa" in out
    assert json.loads(files["json"].read_text()) == record
    assert files["png"].read_bytes().startswith(b"\x89PNG") or "matplotlib" in out


def test_a_job_that_ends_too_early(capsys):
    assert main(["host-profile", "--", sys.executable, "-c", "print('last words')"]) == 1
    out = capsys.readouterr().out
    assert "last words" in out
    assert "ended with status 0 before step 4" in out


def test_remedies_are_those_that_are_not_on():
    assert host_profile.remedy("TopKRouter", ()) == "--compile-regions"
    assert host_profile.remedy("TopKRouter", ("compile-regions",)) == ""
    assert host_profile.remedy("Dropout", ()) == ""
    assert host_profile.remedy("TopKRouter", (), "0.19.0") == "--compile-regions"
    assert host_profile.remedy("TopKRouter", (), "0.15.3") == ""  # where it is refused
    # What fused-rmsnorm builds is an RMSNorm by its name, too.
    assert host_profile.remedy("FusedRMSNorm", ("fused-rmsnorm",)) == ""


@pytest.mark.parametrize(("feature", "flag"), sorted(set(host_profile.REMEDIES.values())))
def test_remedies_are_flags_of_the_features_that_they_name(feature, flag):
    (known,) = (each for each in all_features() if each.name == feature)
    assert flag.partition(" ")[0] in {each.name for each in known.flags}


@pytest.mark.parametrize(
    ("step", "iterations", "message"),
    [(0, 9, "counted from 1"), (9, 9, "never reached: --train-iters is 9"), (8, 9, None)],
)
def test_steps_that_do_not_come(step, iterations, message):
    args = argparse.Namespace(host_profile="f.json", host_profile_step=step, train_iters=iterations)
    found = list(check_profile(args, None))
    assert (message in found[0]) if message else not found
