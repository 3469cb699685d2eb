"""What ``doctor --job`` calls an error of the environment, and what Megatron-LM's ``validate_args`` refuses.

``MEGATRON_LM`` names checkouts, as for ``test_pretrain_gpt.py``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.matrix.test_pretrain_gpt import checkout

pytestmark = [
    pytest.mark.releases(">=0.12.1"),
    pytest.mark.skipif(checkout() is None, reason="MEGATRON_LM names no checkout of the installed release"),
]

ROOT = Path(__file__).parents[2]
QUEUES, ALGORITHM = "CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_ALGO"
TENSOR, CONTEXT = "--tensor-model-parallel-size 2", "--context-parallel-size 2"
SHARDED = "--use-torch-fsdp2 --ckpt-format torch_dist"
DETERMINISTIC = "--deterministic-mode"
CASES = [
    ("", {QUEUES: "8"}),
    *((layout, {QUEUES: value} if value else {}) for layout in (TENSOR, CONTEXT) for value in ("", "1", "8")),
    *((SHARDED, {QUEUES: value} if value else {}) for value in ("", "1", "8")),
    (DETERMINISTIC, {}),
    *((DETERMINISTIC, {ALGORITHM: value}) for value in ("Ring", "Tree", "PAT", "Ring,CollnetChain", "^NVLS")),
]
JOB = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    "--micro-batch-size 1 --global-batch-size 4 --train-iters 3 --lr 1e-3 --transformer-impl local "
    "--vocab-size 128 --tokenizer-type NullTokenizer --untie-embeddings-and-output-weights "
    "--no-gradient-accumulation-fusion"
)
ASK = """\
import json, os, sys

import mindspeed_dsa.megatron_adaptor
from megatron.training import arguments
from mindspeed_dsa.environment import Surroundings
from mindspeed_dsa.session import environment
from mindspeed_dsa.session.environment import installation

cases, job = json.loads(sys.argv[1]), sys.argv[2].split()
verdicts = []
for flags, variables in cases:
    os.environ.update(variables)
    sys.argv = ["pretrain_gpt.py", *job, *flags.split()]
    args = arguments.parse_args()
    machine = installation.read("cpu", "megatron", os.environ)
    about = Surroundings("cpu", args, variables=os.environ, machine=machine, checked_by_megatron=True)
    errors = [str(finding) for _, finding in environment.examine(about, ()) if finding.level == "error"]
    try:
        arguments.validate_args(args)
        refused = ""
    except AssertionError as error:
        refused = str(error)
    verdicts.append((errors, refused))
    for name in ("CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_ALGO", "CUBLAS_WORKSPACE_CONFIG"):
        os.environ.pop(name, None)  # those that the job, or Megatron, has set
print("VERDICTS", json.dumps(verdicts))
"""


def test_errors_are_what_megatron_refuses():
    folders = os.pathsep.join((str(ROOT), str(checkout())))
    variables = {name: value for name, value in os.environ.items() if name not in (QUEUES, ALGORITHM)}
    variables |= {"PYTHONPATH": folders, "RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}
    command = [sys.executable, "-c", ASK, json.dumps(CASES), JOB]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("VERDICTS"))
    verdicts = json.loads(line.partition(" ")[2])
    assert len(verdicts) == len(CASES)
    for case, (errors, refused) in zip(CASES, verdicts, strict=True):
        assert bool(errors) == bool(refused), (case, errors, refused)
    assert {bool(refused) for _, refused in verdicts} == {True, False}
