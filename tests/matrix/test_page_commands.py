"""Training flags on the pages pass the parser and validation of the installed release's checkout.

``MEGATRON_LM`` names checkouts, as for ``test_pretrain_gpt.py``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mindspeed_dsa.patches import versions
from tests.matrix.test_pretrain_gpt import checkout
from tests.support.page_commands import jobs, wrong_answers

pytestmark = [
    pytest.mark.releases(">=0.12.1", quick=True),
    pytest.mark.skipif(checkout() is None, reason="MEGATRON_LM names no checkout of the installed release"),
]

ROOT = Path(__file__).parents[2]
ASK = """\
import json, os, sys, traceback

import megatron.training.arguments
from tests.support import sources

sources.parse_once()
sources.check_all()

def answer(flags):
    if "--use-torch-fsdp2" in flags:  # the one layout with which Megatron refuses one connection
        del os.environ["CUDA_DEVICE_MAX_CONNECTIONS"]
    sys.argv = ["pretrain_gpt.py", *flags]
    import mindspeed_dsa.megatron_adaptor
    from megatron.training import arguments

    args = arguments.parse_args()
    args.world_size = (
        args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size
    )
    arguments.validate_args(args, {"tokenizer_type": "GPT2BPETokenizer"})
    return []


answers = []
for flags in json.load(sys.stdin):
    reading, writing = os.pipe()
    if not os.fork():
        os.dup2(writing, 2)
        try:
            found = answer(flags)
        except SystemExit:
            found = None
        except BaseException as error:
            found = [str(error) or traceback.format_exc(limit=-1)]
        sys.stderr.flush()
        os.write(writing, b"\\0" + json.dumps(found).encode())
        os._exit(0)
    os.close(writing)
    with open(reading) as stream:
        printed, _, found = stream.read().rpartition("\\0")
    os.wait()
    # argparse prints why, and ends.
    answers.append([printed.strip().rpartition("\\n")[2]] if found == "null" else json.loads(found))
print(json.dumps(answers))
"""
"""Script in which one process imports Megatron; each job is parsed and validated in a fork."""


@pytest.mark.timeout(900)
def test_the_checkout_answers_as_the_pages_say() -> None:
    lines, commands = zip(*jobs(), strict=True)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ASK],
        input=json.dumps(commands),
        capture_output=True,
        text=True,
        timeout=800,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(checkout()), *sys.path]),
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        },
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answers = json.loads(done.stdout.splitlines()[-1])
    release = str(versions.of_megatron())
    wrong = [
        each
        for line, found in zip(lines, answers, strict=True)
        for each in wrong_answers(line, release, found, core_only=False)
    ]
    assert not wrong, "\n".join(wrong)
