"""Training jobs of ``feature_cases.py``: cases of the example's model in one process.

``python tests/npu/device_jobs.py PLATFORM CASES``: ``CASES`` is a JSON list of ``[name, flags]``. Each rank
prints a line of JSON for each case: losses, norms and operators called, or the exception.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shlex
import sys
import traceback
from typing import Any

MODEL = """
    --num-layers 2 --hidden-size 64 --ffn-hidden-size 96 --num-attention-heads 4 --q-lora-rank 32
    --kv-lora-rank 512 --qk-head-dim 16 --qk-pos-emb-head-dim 64 --v-head-dim 16 --seq-length 32
    --dsa-indexer-n-heads 8 --dsa-indexer-head-dim 128 --dsa-indexer-topk 32 --num-experts 4
    --moe-ffn-hidden-size 32 --moe-router-topk 2 --moe-shared-expert-intermediate-size 32
    --micro-batch-size 1 --global-batch-size 2 --lr 1e-3 --min-lr 1e-3 --no-deterministic-mode
"""
STEPS = 2
MARK = "CASE "


def main() -> None:
    """Run the cases on the platform."""
    from mindspeed_dsa.features.dsa import problem

    platform, cases = sys.argv[1], json.loads(sys.argv[2])
    rank = int(os.environ["LOCAL_RANK"])
    if platform == "npu":
        import torch

        from mindspeed_dsa import platforms

        platforms.prepare(platforms.detect("npu"))
        torch.npu.set_device(rank)
    # With all keys chosen, attention would be dense; and operators of an NPU need at least 1024 keys to
    # choose from.
    problem.every_key_is_chosen = lambda *_: False
    parse_once()
    for name, flags in cases:
        print(MARK + json.dumps([name, _run(platform, flags)]), flush=True)


def parse_once() -> None:
    """Cache a session's parse of Megatron for later sessions: it takes a third of a case's time."""
    from mindspeed_dsa.patches import source_tree

    source_tree.scope_of_text = functools.cache(source_tree.scope_of_text)


def _run(platform: str, flags: str) -> dict[str, Any]:
    from benchmarks.gpu import job

    argv = [*shlex.split(MODEL), *shlex.split(flags), "--mindspeed-platform", platform]
    try:
        figures = job.train(argv, STEPS)
    except BaseException as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        # A rank that failed by itself would wait for the others in the next case.
        with contextlib.suppress(Exception):
            traceback.print_exc()
        return {"error": f"{type(error).__name__}: {str(error)[:600]} ({where.filename}:{where.lineno})"}
    return {name: figures[name] for name in ("lm_loss", "indexer_loss", "grad_norm", "calls")}


if __name__ == "__main__":
    main()
