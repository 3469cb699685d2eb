"""Runs jobs in forked children of one process with everything imported, so that a job starts at once.

Reads one JSON object a line: ``argv`` of the job, ``environ`` to add, ``output`` file, and ``fault`` to
cause. Answers with ``{"pid": ...}`` at once. ``null`` instead of a job waits for all jobs; the answer is
``{"codes": {pid: exit code}}``.
"""

import errno
import gc
import json
import os
import re
import resource
import shutil
import signal
import sys
import time
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[2] / "examples")]

from tests.support import sources  # noqa: E402

sources.parse_once()
sources.check_all()

from mindspeed_dsa import session  # noqa: E402

session.enable_from_argv(["--experimental-attention-variant", "dsa"])

import torch  # noqa: E402
import torch._dynamo  # noqa: E402  what the first optimizer imports
from dsa_job import (  # noqa: E402
    checkpoint,
    checkpoints,
    step,
    torch_dist,
    training,
)
from dsa_job.app import main  # noqa: E402

from mindspeed_dsa import features  # noqa: E402
from mindspeed_dsa.runs import metrics  # noqa: E402
from mindspeed_dsa.settings import ACCEPT_MINDSPEED  # noqa: E402
from mindspeed_dsa.tools.migrate.accept import accept  # noqa: E402

POISONED_STEP = 3
LATE_S = 2
ROOM = 20_000  # bytes
WRITE = torch_dist.Shards.write
OURS = {flag.name for flag in features.all_flags() if not flag.megatron}


def run(job: dict[str, Any]) -> None:
    """Run a job in the forked child; never return."""
    output = os.open(job["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(job["environ"])
    code = 99
    try:
        tell_of_process_groups()
        if job["fault"]:
            FAULTS[job["fault"]]()
        argv = job["argv"]
        accepted = [ACCEPT_MINDSPEED.name] if accept(argv) else []
        if OURS.intersection([*accepted, *argv]):
            session.enable_from_argv([*accepted, *argv])  # as the one-liner does with its process's argv
        code = main(argv)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def tell_of_process_groups() -> None:
    join = torch.distributed.init_process_group

    def joining(*args: Any, **kwargs: Any) -> None:
        print("a process group", flush=True)
        join(*args, **kwargs)

    torch.distributed.init_process_group = joining


def die(*args: object, **kwargs: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_in_the_write_of_step_4(place: Any) -> None:
    """Cause the fault only once there is a checkpoint to resume from."""
    save = checkpoint.save

    def saving(args: Any, folder: Path, progress: checkpoint.Progress, *rest: Any) -> Any:
        if progress.iteration == 4:
            place.start()
        return save(args, folder, progress, *rest)

    checkpoint.save = saving


def write_late(shards: torch_dist.Shards) -> None:
    """Write a rank's file after training has made its next step; the last write waits for LATE_S."""
    folder = Path(shards.path)
    step = int(re.findall(r"iter_(\d+)", folder.name)[0])
    end = time.monotonic() + LATE_S
    while len((folder.parents[1] / "metrics.jsonl").read_text().splitlines()) <= step:
        if time.monotonic() > end:
            break
        time.sleep(0.01)
    WRITE(shards)


def write_never(*args: object) -> None:
    """Print the id of the writing process, and never finish."""
    print(f"writer {os.getpid()}", flush=True)
    time.sleep(10**6)


def write_on_a_full_disk(*args: object) -> None:
    """Write with space for only a part of a shard."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM, ROOM))
    WRITE(*args)


def write_nowhere(shards: torch_dist.Shards) -> None:
    """Write after the folder was removed."""
    shutil.rmtree(shards.path)
    WRITE(shards)


def leave_no_room_for_metrics() -> None:
    """Make the third record meet a full disk."""
    append, calls = metrics.append, [0]

    def appending(path: Path, record: Any) -> None:
        calls[0] += path.name == metrics.FILE
        if calls[0] == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        append(path, record)

    metrics.append = appending


def poison_the_loss() -> None:
    """Make the loss NaN at the place where it is computed."""
    compute, train_step = step.loss_function, step.Stepper.train_step
    now = [0]

    def counting(self: step.Stepper, number: int, *rest: Any) -> Any:
        now[0] = number
        return train_step(self, number, *rest)

    def poisoned(*args: Any) -> step.LossAndCount:
        total, tokens, report = compute(*args)
        if now[0] == POISONED_STEP:
            report = {name: value * float("nan") for name, value in report.items()}
        return total, tokens, report

    step.Stepper.train_step, step.loss_function = counting, poisoned


def poison_a_gradient_of_rank_1() -> None:
    """Make a gradient of rank 1 NaN between the backward pass and the optimizer."""
    forward_backward, calls = step.Stepper._forward_backward, [0]

    def poisoned(self: step.Stepper, data: Any, forward_only: bool) -> Any:
        sums = forward_backward(self, data, forward_only)
        calls[0] += not forward_only
        if calls[0] == POISONED_STEP and torch.distributed.get_rank() == 1:
            next(self.model[0].parameters()).main_grad.fill_(float("nan"))
        return sums

    step.Stepper._forward_backward = poisoned


def look_for_the_model_afterwards() -> None:
    """Print whether model and optimizer are gone after the job has returned."""
    train = training.train

    def looking(*args: Any, **kwargs: Any) -> Any:
        alive: list[weakref.ref[Any]] = []
        records = train(
            *args,
            on_end=lambda stepper: alive.extend(map(weakref.ref, [*stepper.model, stepper.optimizer])),
            **kwargs,
        )
        gc.collect()
        print(f"{len(alive)} watched, {sum(ref() is not None for ref in alive)} left", flush=True)
        return records

    training.train = looking


FAULTS = {
    "none, but look for the model afterwards": look_for_the_model_afterwards,
    "loss": poison_the_loss,
    "gradient on rank 1": poison_a_gradient_of_rank_1,
    # The common state is written, the weights are not.
    "before the weights": lambda: die_in_the_write_of_step_4(
        mock.patch.object(torch.distributed.checkpoint.state_dict_saver, "save", die)
    ),
    "in the writer": lambda: die_in_the_write_of_step_4(mock.patch.object(torch_dist.Shards, "write", die)),
    "never written": lambda: die_in_the_write_of_step_4(
        mock.patch.object(torch_dist.Shards, "write", write_never)
    ),
    "full disk": lambda: die_in_the_write_of_step_4(
        mock.patch.object(torch_dist.Shards, "write", write_on_a_full_disk)
    ),
    "vanished folder": lambda: die_in_the_write_of_step_4(
        mock.patch.object(torch_dist.Shards, "write", write_nowhere)
    ),
    "no room for metrics": leave_no_room_for_metrics,
    "written late": lambda: setattr(torch_dist.Shards, "write", write_late),
    # Everything is written, under the temporary name.
    "before the rename": lambda: die_in_the_write_of_step_4(mock.patch.object(checkpoints, "publish", die)),
    # The new folder has its name, the tracker names the old one.
    "before the tracker": lambda: die_in_the_write_of_step_4(
        mock.patch.object(checkpoints, "write_atomically", die)
    ),
}


def serve() -> None:
    children: set[int] = set()
    for line in sys.stdin:
        job = json.loads(line)
        if job is not None:
            pid = os.fork()
            if pid == 0:
                run(job)
            children.add(pid)
            print(json.dumps({"pid": pid}), flush=True)
            continue
        codes = {}
        while children:
            pid, status = os.wait()
            children.discard(pid)
            codes[pid] = os.waitstatus_to_exitcode(status)
        print(json.dumps({"codes": codes}), flush=True)


if __name__ == "__main__":
    serve()
