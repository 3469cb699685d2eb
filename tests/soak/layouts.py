"""Jobs of the soak: a tiny model on real text in four layouts, each with other stateful features."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
STEPS, SAVE_INTERVAL = 36, 4
_MODEL = f"""
--num-layers 4 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 2 --q-lora-rank 16
--kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 8 --v-head-dim 8 --dsa-indexer-n-heads 8
--dsa-indexer-head-dim 8 --dsa-indexer-topk 8 --seq-length 32 --num-experts 4 --moe-ffn-hidden-size 16
--moe-router-topk 2 --moe-shared-expert-intermediate-size 16 --micro-batch-size 1 --global-batch-size 4
--train-iters {STEPS} --lr-warmup-iters 2 --eval-interval 12 --eval-iters 1 --save-interval {SAVE_INTERVAL}
--log-interval 1 --no-tensorboard --no-plot --verify-checkpoint
""".split()


@dataclass(frozen=True)
class Layout:
    """Layout of a job.

    Attributes:
        name: name on the command line and in the report.
        ranks: number of processes.
        flags: flags in addition to the model's.
    """

    name: str
    ranks: int
    flags: str


LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout(
            "tp",
            2,
            "--tensor-model-parallel-size 2 --sequence-parallel --bf16 --use-distributed-optimizer "
            "--reuse-fp32-param",
        ),
        Layout(
            "pairs",
            4,
            "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 "
            "--expert-model-parallel-size 2 --moe-fb-overlap",
        ),
        Layout("fsdp2", 2, "--use-torch-fsdp2 --bf16 --virtual-optimizer all"),
        Layout("cp", 2, "--context-parallel-size 2 --bf16 --use-distributed-optimizer --swap-optimizer"),
    )
}


@dataclass(frozen=True)
class Place:
    """Folders of a job.

    Attributes:
        run: folder of the run.
        logs: folder for the output.
        cache: folder of indexed text, which all jobs share.
    """

    run: Path
    logs: Path
    cache: Path


Command = Callable[[Layout, Place, int], Sequence[str] | Callable[[str], int]]
"""Factory of a job's command for a layout, a place, and a number of restarts by the launcher itself. It may
return a launcher function instead, for a fork of this process; its argument is a prefix of the ranks' names.
"""


def torchrun(layout: Layout, place: Place, restarts: int) -> list[str]:
    """Return the torchrun command of the example job; ranks print to ``attempt_N/RANK/std*.log``."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launcher += ["--nproc-per-node", str(layout.ranks), "--max-restarts", str(restarts)]
    launcher += ["--redirects", "3", "--log-dir", str(place.logs)]
    return [*launcher, str(ROOT / "examples" / "pretrain_dsa.py"), *flags(layout, place)]


def flags(layout: Layout, place: Place) -> list[str]:
    """Return the flags of the example job."""
    where = ["--output-dir", str(place.run), "--data-cache-path", str(place.cache)]
    where += ["--record-collectives", str(place.logs.with_name("collectives"))]
    return [*_MODEL, *layout.flags.split(), *where]


def environment() -> dict[str, str]:
    """Return the environment of all jobs."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "passive",
        "CUDA_VISIBLE_DEVICES": "",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        # Otherwise ranks that torchrun restarts find addresses of killed ones in the store, and never meet.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
