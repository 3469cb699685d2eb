"""Launch lines of ``examples/launch``: the programs that they start, and the variables."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import yaml

LAUNCH = Path(__file__).parents[2] / "examples" / "launch"
SCRIPTS = sorted(LAUNCH.glob("*.sh"))
NEEDED = {"OMP_WAIT_POLICY": "passive", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
PRINTS = '#!/bin/sh\necho "$(basename "$0")" "$@"\nenv\n'
# scontrol show hostnames node[3-4]
SCONTROL = "#!/bin/bash\nspan=${3//[^0-9-]/}\nfor i in $(seq ${span%-*} ${span#*-}); do echo node$i; done\n"
SLURM = {
    "SLURM_JOB_ID": "17",
    "SLURM_JOB_NODELIST": "node[1-4]",
    "SLURM_JOB_NUM_NODES": "4",
    "SLURM_NTASKS": "32",
    "SLURM_PROCID": "13",
    "SLURM_LOCALID": "5",
    "SLURM_CPUS_PER_TASK": "96",
}


@pytest.fixture
def run(tmp_path):
    """Return a function that runs a script with Slurm, Ray and Python replaced by printing stubs."""
    for name in ("srun", "ray", "python"):
        (tmp_path / name).write_text(PRINTS)
    (tmp_path / "scontrol").write_text(SCONTROL)
    for path in tmp_path.iterdir():
        path.chmod(0o755)

    def start(script, *arguments, **variables):
        found = {"PATH": f"{tmp_path}:{os.environ['PATH']}", **variables}
        done = subprocess.run(
            ["bash", str(LAUNCH / script), *arguments], env=found, capture_output=True, text=True, timeout=60
        )
        lines = done.stdout.splitlines()
        shown = dict(line.split("=", 1) for line in lines[1:] if "=" in line)
        return done, lines[0] if lines else "", shown

    return start


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_read_by_the_shell_and_may_be_started(script):
    subprocess.run(["bash", "-n", str(script)], check=True, timeout=60)
    assert os.access(script, os.X_OK)


def test_slurm_starts_one_torchrun_on_each_node(run):
    done, line, shown = run("slurm.sh", "pretrain_gpt.py", "--use-fused-dsa", COMMON="/common", **SLURM)
    assert done.returncode == 0, done.stderr
    words = line.split()
    assert words[:5] == ["srun", "--kill-on-bad-exit=1", "--cpus-per-task", "96", "torchrun"]
    for flag, value in (
        ("--nnodes", "4"),
        ("--nproc-per-node", "8"),
        ("--max-restarts", "3"),
        ("--rdzv-backend", "c10d"),
        ("--rdzv-endpoint", "node1:29500"),
        ("--load", "/common/checkpoints"),
        ("--save", "/common/checkpoints"),
        ("--record-collectives", "/common/collectives"),
    ):
        assert words[words.index(flag) + 1] == value
    assert words[words.index("pretrain_gpt.py") + 1] == "--use-fused-dsa"
    assert words.index("--save") > words.index("pretrain_gpt.py"), "these are the job's flags"
    assert NEEDED.items() <= shown.items()
    assert (shown[OWN_STORE], shown["OMP_NUM_THREADS"]) == ("1", "12")


def test_slurm_without_a_common_folder_is_refused(run):
    done, _, _ = run("slurm.sh", "pretrain_gpt.py", **SLURM)
    assert done.returncode != 0
    assert "COMMON: name a folder that all nodes see" in done.stderr


def test_ranks_of_slurm_are_named_as_torchrun_would(run):
    step = {"SLURM_STEP_NODELIST": "node[3-4]", "SLURM_STEP_NUM_NODES": "2", "SLURM_NTASKS": "16"}
    done, line, shown = run("slurm_ranks.sh", "pretrain_gpt.py", "--use-fused-dsa", **(SLURM | step))
    assert done.returncode == 0, done.stderr
    assert line == "python pretrain_gpt.py --use-fused-dsa"
    names = {"RANK": "13", "WORLD_SIZE": "16", "LOCAL_RANK": "5", "LOCAL_WORLD_SIZE": "8"}
    assert (NEEDED | names | {"MASTER_ADDR": "node3", "MASTER_PORT": "29500"}).items() <= shown.items()


def test_ray_gives_workers_their_variables(run):
    done, line, _ = run("ray_job.sh", "python", "-m", "trainer", PLUGIN="rl_plugin", COMMON="/common")
    assert done.returncode == 0, done.stderr
    said = f"{line}{done.stdout.removeprefix(line)}".partition("--runtime-env-json ")[2]
    environment, end = json.JSONDecoder().raw_decode(said)
    assert environment["env_vars"]["VERL_USE_EXTERNAL_MODULES"] == "rl_plugin"
    assert environment["env_vars"]["MINDSPEED_DSA_MINDSPEED_REPORT_DIR"] == "/common/report"
    assert NEEDED.items() <= environment["env_vars"].items()
    assert said[end:].split("\n")[0] == " -- python -m trainer"


def pods(name):
    """Return the documents of a manifest, and the specification of its pods."""
    documents = list(yaml.safe_load_all((LAUNCH / name).read_text(encoding="utf-8")))
    spec = documents[-1]["spec"]
    template = spec["pytorchReplicaSpecs"]["Worker"] if "pytorchReplicaSpecs" in spec else spec
    return documents, template["template"]["spec"]


@pytest.mark.parametrize("name", ["job.yaml", "pytorchjob.yaml"])
def test_pods_have_what_a_job_needs(name):
    _, pod = pods(name)
    (container,) = pod["containers"]
    variables = {entry["name"]: entry["value"] for entry in container["env"]}
    assert (NEEDED | {OWN_STORE: "1"}).items() <= variables.items()
    assert all(isinstance(value, str) for value in variables.values()), "Kubernetes refuses numbers"
    mounts = {entry["mountPath"]: entry["name"] for entry in container["volumeMounts"]}
    volumes = {entry["name"]: entry for entry in pod["volumes"]}
    assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
    assert "persistentVolumeClaim" in volumes[mounts["/common"]]
    words = container["command"]
    assert words[0] == "torchrun"
    for flag in ("--save", "--load", "--record-collectives"):
        assert words[words.index(flag) + 1].startswith("/common/")


def test_the_first_pod_of_a_job_is_its_rendezvous():
    (service, job), pod = pods("job.yaml")
    words = dict(each.split("=") for each in pod["containers"][0]["command"] if "=" in each)
    name, port = job["metadata"]["name"], service["spec"]["ports"][0]["port"]
    assert words["--rdzv-endpoint"] == f"{name}-0.{service['metadata']['name']}:{port}"
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": name}
    assert service["spec"]["clusterIP"] == "None"
    assert job["spec"]["completionMode"] == "Indexed"
    assert int(words["--nnodes"]) == job["spec"]["completions"] == job["spec"]["parallelism"]
    assert words["--rdzv-backend"] == "c10d"


def test_the_operator_restarts_by_a_rendezvous_of_its_own():
    (job,), _ = pods("pytorchjob.yaml")
    policy = job["spec"]["elasticPolicy"]
    workers = job["spec"]["pytorchReplicaSpecs"]["Worker"]["replicas"]
    assert policy == {
        "minReplicas": workers,
        "maxReplicas": workers,
        "rdzvBackend": "c10d",
        "maxRestarts": 3,
    }
