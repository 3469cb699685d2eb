"""Training jobs of ``test_waits.py``: the example's model, one case after the other in one process.

``python tests/npu/waits_jobs.py CASES``: ``CASES`` is a JSON list of ``[name, flags]``. Each rank prints a
line of JSON for each case: a step's events on the device, ``[count, kind, operator, place]``, or an error.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sys
import traceback
from typing import Any

MICROBATCHES = 4
MODEL = f"""
    --bf16 --fused-operators all --num-layers 2 --hidden-size 64 --ffn-hidden-size 96 --num-attention-heads 4
    --q-lora-rank 32 --kv-lora-rank 512 --qk-head-dim 16 --qk-pos-emb-head-dim 64 --v-head-dim 16
    --seq-length 32 --dsa-indexer-n-heads 8 --dsa-indexer-head-dim 128 --dsa-indexer-topk 32 --num-experts 4
    --moe-ffn-hidden-size 32 --moe-router-topk 2 --moe-shared-expert-intermediate-size 32 --moe-grouped-gemm
    --moe-permute-fusion --micro-batch-size 1 --global-batch-size {MICROBATCHES} --lr 1e-3 --min-lr 1e-3
    --no-deterministic-mode
"""
"""A dense layer, and one with experts."""
COUNTED = 2
"""Number of the counted step; things made once exist by then."""
MARK = "CASE "


def main() -> None:
    """Run the cases."""
    import torch

    from mindspeed_dsa import platforms
    from mindspeed_dsa.features.dsa import problem
    from tests.npu import device_jobs

    platforms.prepare(platforms.detect("npu"))
    torch.npu.set_device(int(os.environ["LOCAL_RANK"]))
    # With all keys chosen, attention would be dense; and operators of an NPU need at least 1024 keys to
    # choose from.
    problem.every_key_is_chosen = lambda *_: False
    device_jobs.parse_once()
    for name, flags in json.loads(sys.argv[1]):
        print(MARK + json.dumps([name, _run(flags)]), flush=True)


def _run(flags: str) -> Any:
    from benchmarks.gpu import job
    from tests.npu.device import counts

    step, events = job._step, counts.Counts()

    def counting_step(stepper: Any, number: int, stream: Any) -> Any:
        train_step = type(stepper).train_step

        def counted(*args: Any) -> Any:
            with counts.counted() as now:
                result = train_step(stepper, *args)
            events.events.update(now.events)
            return result

        if number == COUNTED:
            stepper.train_step = counted
        return step(stepper, number, stream)

    job._step = counting_step
    try:
        job.train([*shlex.split(MODEL), *shlex.split(flags), "--mindspeed-platform", "npu"], COUNTED + 1)
    except BaseException as error:
        # A rank that failed by itself would wait for the others in the next case.
        with contextlib.suppress(Exception):
            traceback.print_exc()
        return f"{type(error).__name__}: {error}"
    finally:
        job._step = step
    return [[count, *event] for event, count in events.events.items() if event[0] != "launch"]


if __name__ == "__main__":
    main()
