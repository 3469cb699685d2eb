"""Plans of TOML files, compared with TorchTitan 0.2: its settings, models and pipeline stages."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("torchtitan", reason="TorchTitan: make test-hosts")

from mindspeed_dsa.integrations.torchtitan import CONVERTERS
from mindspeed_dsa.tools.planner import sizes, torchtitan, torchtitan_settings
from tests.hosts.torchtitan import jobs

pytestmark = pytest.mark.skipif(not jobs.OLD.is_dir(), reason="TorchTitan 0.2: make test-hosts")
SPLITS = [(2, 61), (4, 61), (4, 8), (3, 16)]
PROGRAM = f"""
import dataclasses, json, torch
from torchtitan.config import JobConfig
from torchtitan.distributed.pipeline_parallel import generate_llm_fqn_per_model_part
from torchtitan.models import deepseek_v3, llama3

deepseek = deepseek_v3.deepseekv3_args["671B"]
deepseek.moe_impl = "standard"  # the job's settings set it
sections = {{name: dataclasses.asdict(value) for name, value in vars(JobConfig()).items()}}
with torch.device("meta"):
    models = [
        deepseek_v3.DeepSeekV3Model(deepseek),
        llama3.Transformer(llama3.llama3_args["8B"]),
    ]
numbers = [sum(x.numel() for x in model.parameters()) for model in models]
stages = [generate_llm_fqn_per_model_part(*split) for split in {SPLITS}]
print(json.dumps([sections, numbers, stages]))
"""


@pytest.fixture(scope="module")
def theirs():
    """Return TorchTitan's settings, its models' numbers of parameters, and the modules of pipeline stages."""
    path = os.pathsep.join([str(jobs.OLD), str(jobs.ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_every_setting_is_planned_refused_noted_or_listed(theirs):
    settings, _, _ = theirs
    defaults, others = torchtitan_settings.DEFAULTS, torchtitan_settings.OTHERS
    # A section and settings of this library and of TorchTitan-npu.
    assert {*defaults, *others} - settings.keys() == {"dsa"}
    added = {"parallelism": {"enable_custom_context_parallel", "custom_context_parallel_path"}}
    for section, every in settings.items():
        planned, listed = defaults.get(section, {}), others.get(section, "").split()
        assert {**every, **planned} == every, section
        assert len(listed) == len({*listed} - planned.keys()), section
        assert {*planned, *listed} - added.get(section, set()) == every.keys(), section


def test_converters_and_options_are_ours():
    from mindspeed_dsa.integrations.torchtitan.names import SparseOptions

    assert torchtitan.CONVERTERS == CONVERTERS
    defaults = dataclasses.asdict(SparseOptions())
    planned = torchtitan_settings.OURS["dsa"]
    assert {**defaults, **planned} == defaults
    assert defaults.keys() - planned.keys() == {*torchtitan_settings.OTHERS["dsa"].split()}


@pytest.mark.parametrize(("position", "model"), list(enumerate(["deepseek_v3 671B", "llama3 8B"])))
def test_models_have_their_numbers_of_parameters(theirs, tmp_path, position, model):
    name, flavor = model.split()
    (tmp_path / "job.toml").write_text(f'[model]\nname = "{name}"\nflavor = "{flavor}"\n')
    planned = torchtitan.job_of([str(tmp_path / "job.toml")], None, None, None).model
    assert sum(sizes.by_part(sizes.model_weights(planned)).values()) == theirs[1][position]


@pytest.mark.parametrize(("position", "split"), list(enumerate(SPLITS)))
def test_stages_have_their_layers(theirs, tmp_path, position, split):
    number, layers = split
    modules = theirs[2][position]
    wanted = [sum(module.startswith("layers.") for module in stage) for stage in modules]
    file = tmp_path / "job.toml"
    file.write_text(f"[parallelism]\npipeline_parallel_degree = {number}\n")
    found = torchtitan._stages(torchtitan_settings.read([str(file)]), layers, number, 1)
    assert [stage.count("t") for stage in found] == wanted
