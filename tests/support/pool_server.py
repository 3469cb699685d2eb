"""The process that the workers of pools are forked from, which has imported what cases need.

Reads one JSON object a line. ``{"address": ..., "log": ...}`` starts a worker, which connects to the address;
the answer is its process id. ``{"wait": ...}`` names one that ends; the answer is its exit code.
"""

import json
import os
import signal
import sys
import traceback
from multiprocessing.connection import Client
from typing import TextIO

from tests.support import preload, worker

__all__ = ["preload"]


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
    """What the forked child does; never returns."""
    code = 0
    try:
        worker.serve(Client(address, "AF_UNIX"), log)
    except BaseException:
        code = 1
        traceback.print_exc()
    os._exit(code)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C on the terminal: the pool ends its workers
    main(sys.stdout)
