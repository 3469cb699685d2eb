"""Process from which pools fork their workers, with everything imported that cases need.

Reads one JSON object per line. ``{"address": ..., "log": ...}`` starts a worker, which connects to the
address; the answer is its process id. ``{"wait": ...}`` names a worker that exits; the answer is its exit
code.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import signal
import sys
import traceback
from multiprocessing.connection import Client
from typing import TextIO

import mindspeed_dsa
from tests.support import sources, stand_in, third_party, worker

_MEGATRON = (
    "megatron.core.dist_checkpointing",
    "megatron.core.distributed",
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.models.gpt.experimental_attention_variant_module_specs",
    "megatron.core.optimizer",
    "megatron.core.pipeline_parallel",
    "megatron.core.transformer.experimental_attention_variant.dsa",
)


def preload() -> None:
    """Import the workers' modules, which forked workers inherit."""
    gc.disable()  # imports leave no garbage
    third_party.load(third_party.OF_CASES)
    stand_in.take_from_environment()
    sources.parse_once()
    sources.check_all()
    third_party.out_of_sight()
    with contextlib.redirect_stderr(io.StringIO()), mindspeed_dsa.enabled(mindspeed_platform="cpu"):
        # As in a job, so that functions that Megatron would compile stay eager.
        third_party.load(_MEGATRON)
    gc.enable()


def main(answers: TextIO) -> None:
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            answer = os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1])
        else:
            answer = os.fork()
            if answer == 0:
                work(**request)
        print(answer, file=answers, flush=True)


def work(address: str, log: str) -> None:
    """Serve a pool in the forked child; never returns."""
    code = 0
    try:
        worker.serve(Client(address, "AF_UNIX"), log)
    except BaseException:
        code = 1
        traceback.print_exc()
    os._exit(code)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C on the terminal: the pool ends its workers
    preload()
    main(sys.stdout)
