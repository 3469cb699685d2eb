"""Checks of the host: processors, limits, memory, and disk space for the next checkpoint."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from mindspeed_dsa.environment import EnvironmentCheck, Finding, Surroundings
from mindspeed_dsa.runs.files import amount

_FILES, _FILES_PER_RANK = 128, 12
"""File descriptors of one process, and additional ones per other rank.

Measured with the example job over gloo: 91 with one rank, 122 with four ranks in two kinds of groups."""
_PREFETCHED = 2
"""Batches that each DataLoader worker of torch prepares ahead."""
_ROW = 8 + 8 + 4 + 8
"""Bytes per token in a Megatron batch: token (8), label (8), loss mask (4), position (8)."""
_LOCKED = 64 * 2**20
"""Bytes; below this limit NCCL cannot register its own buffers."""


def find_threads(about: Surroundings) -> Iterator[Finding]:
    """Check for more threads than processors: spinning threads of one rank then slow down other ranks."""
    machine, omp_threads = about.machine, about.variable("OMP_NUM_THREADS")
    if omp_threads and not omp_threads.isdigit():
        return
    threads = int(omp_threads) if omp_threads else machine.processors
    if machine.local_ranks < 2 or threads < 2 or machine.local_ranks * threads <= machine.processors:
        return
    passive = about.variable("OMP_WAIT_POLICY").lower() == "passive"
    who = f"OMP_NUM_THREADS {omp_threads or 'not set'}"
    # 64 processors and 8 ranks: 8 threads each.
    share = max(1, machine.processors // machine.local_ranks)
    if not passive:
        yield Finding(
            "warning",
            f"{who}, OMP_WAIT_POLICY {about.variable('OMP_WAIT_POLICY') or 'not set'}",
            f"{machine.local_ranks} ranks have {threads} threads each on {machine.processors} processors, "
            "and those that spin while they wait take the time of others: ten times slower was seen",
            f"export OMP_NUM_THREADS={share}, or OMP_WAIT_POLICY=passive",
        )
    else:
        yield Finding(
            "note",
            who,
            f"{machine.local_ranks} ranks have {threads} threads each on {machine.processors} processors",
            f"export OMP_NUM_THREADS={share}",
        )


def find_files(about: Surroundings) -> Iterator[Finding]:
    """Check for a limit of open files below the number of gloo's connections."""
    limit, world = about.machine.open_files, about.machine.world
    # 64 ranks: 128 + 12 x 63 = 884 descriptors.
    needed = _FILES + _FILES_PER_RANK * (world - 1)
    if limit is not None and world and limit < needed:
        yield Finding(
            "warning",
            f"limit of open files {limit}",
            f"gloo connects each pair of ranks of every group, which takes about {needed} in a process of "
            f"{world} ranks; beyond the limit the job ends with 'Too many open files'",
            f"ulimit -n {2 ** math.ceil(math.log2(needed))}",
        )


def find_shared_memory(about: Surroundings) -> Iterator[Finding]:
    """Check whether the batches of all data loader workers fit into shared memory."""
    free, ranks = about.machine.shared_memory, about.machine.local_ranks
    workers, length = about.argument("num_workers"), about.argument("seq_length")
    if free is None or not (ranks and workers and length):
        return
    # Only the first rank of each tensor parallel group loads data.
    loading = math.ceil(ranks / about.size("tensor_model_parallel_size"))
    stages = about.size("pipeline_model_parallel_size")
    if stages > 1 and about.machine.world and not about.argument("sft"):  # with sft all stages load packs
        in_two = 2 * about.machine.world / (stages * about.size("tensor_model_parallel_size"))
        loading = min(loading, math.ceil(in_two))  # only the first and the last stage load data
    # A mask in the batch has length x length elements.
    masked = about.argument("create_attention_mask_in_dataloader")
    samples = max(about.size("micro_batch_size"), about.size("eval_micro_batch_size"))
    # 1 sample x 4096 tokens x 28 bytes = 112 KiB; an attention mask adds 4096 x 4096 bytes = 16 MiB.
    batch = samples * (length * _ROW + (length * length if masked else 0))
    needed = loading * workers * _PREFETCHED * batch
    if needed > free:
        yield Finding(
            "error",
            f"/dev/shm {amount(free)} free",
            f"{loading} ranks with --num-workers {workers} keep batches of {amount(needed)} there; a worker "
            "that finds no room is killed (bus error)",
            "--no-create-attention-mask-in-dataloader where attention needs none, a container with "
            f"--shm-size={math.ceil(needed / 2**30) + 1}g, or fewer workers"
            if masked
            else f"start the container with --shm-size={math.ceil(needed / 2**30) + 1}g or --ipc=host, or "
            "take fewer workers",
        )


def find_locked_memory(about: Surroundings) -> Iterator[Finding]:
    """Check for a limit of locked memory that is too low to register buffers with RDMA devices."""
    limit, machine = about.machine.locked_memory, about.machine
    if limit is None or limit >= _LOCKED or machine.nodes < 2 or not machine.infiniband:
        return
    if about.variable("NCCL_IB_DISABLE") != "1":
        yield Finding(
            "warning",
            f"limit of locked memory {amount(limit)}",
            f"between the {machine.nodes} nodes NCCL registers buffers with RDMA devices, which locks them",
            "ulimit -l unlimited, or start the container with --ulimit memlock=-1",
        )


def find_staging(about: Surroundings) -> Iterator[Finding]:
    """Check whether host memory has room for the copy that an asynchronous save makes."""
    machine, size = about.machine, about.checkpoint
    if not (about.argument("async_save") and size and machine.memory and machine.local_ranks):
        return
    # Ranks hold equal shares of the checkpoint: 8 of 64 ranks are on this node, so it copies 1/8.
    share = size * machine.local_ranks / max(machine.world, machine.local_ranks)
    if share > machine.memory:
        yield Finding(
            "warning",
            "--async-save",
            f"{machine.local_ranks} ranks copy about {amount(int(share))} of the checkpoint to the host "
            f"before it is written, and {amount(machine.memory)} are available",
            "omit --async-save, or add --no-save-optim",
        )


def find_disk(about: Surroundings) -> Iterator[Finding]:
    """Check whether the disk has room for the next checkpoint, and for all later ones."""
    folder, size = about.argument("save"), about.checkpoint
    if not folder or "://" in str(folder) or not size or about.argument("no_save"):
        return
    free = about.machine.free(Path(folder))
    if free is None:
        return
    # The folder may be local to each node, so a node holds only its share. If the ranks per node are unknown,
    # a node may have only one rank.
    nodes = about.machine.nodes if about.machine.local_ranks else max(1, about.machine.world)
    # A checkpoint of 800 GB on 4 nodes: 200 GB in each node's folder.
    share = size / nodes
    who = f"--save {folder}"
    if free < share:
        least = "at least" if nodes > 1 else "about"
        yield Finding(
            "error",
            who,
            f"{amount(free)} are free, and the next save writes {least} {amount(int(share))}",
            f"python -m mindspeed_dsa checkpoints {folder} --keep 1, or save elsewhere",
        )
        return
    steps, every = about.argument("train_iters"), about.argument("save_interval")
    if not steps or not every:
        return
    left = max(steps - about.iteration, 0)
    kept = about.argument("save_retain_interval")
    # With --save-retain-interval older checkpoints in between are deleted, so only every `kept` steps
    # count.
    number = 1 + left // kept if kept else math.ceil(left / every)
    if number * share > free:
        size_text = f"at least {amount(int(share))} here" if nodes > 1 else f"about {amount(int(share))}"
        yield Finding(
            "warning",
            who,
            f"{number} checkpoints of {size_text} are to come, and {amount(free)} are free: full after "
            f"{int(free // share)}",
            f"python -m mindspeed_dsa checkpoints {folder} --keep 2 from time to time, or a larger "
            "--save-interval",
        )


CHECKS = (
    EnvironmentCheck(
        "processor-threads",
        "`OMP_NUM_THREADS`, `OMP_WAIT_POLICY`",
        "threads of the ranks on a node exceed its processors",
        "measured here; GNU libgomp, `OMP_WAIT_POLICY`",
        ("warning", "note"),
        find_threads,
        platforms=("cpu",),
        per_node=True,
    ),
    EnvironmentCheck(
        "open-files",
        "limit of open files (`ulimit -n`)",
        f"below {_FILES} and {_FILES_PER_RANK} for each other rank",
        "measured here",
        ("warning",),
        find_files,
        platforms=("cpu",),
        per_node=True,
    ),
    EnvironmentCheck(
        "shared-memory",
        "`/dev/shm`",
        "batches that `--num-workers` prepare ahead exceed what is free",
        "PyTorch, `torch.utils.data` and `torch.multiprocessing`; Megatron-LM's data sets",
        ("error",),
        find_shared_memory,
        per_node=True,
    ),
    EnvironmentCheck(
        "locked-memory",
        "limit of locked memory (`ulimit -l`)",
        f"below {amount(_LOCKED)} on nodes with RDMA devices, in a job of several nodes",
        "NCCL, troubleshooting",
        ("warning",),
        find_locked_memory,
        platforms=("cuda",),
        per_node=True,
    ),
    EnvironmentCheck(
        "host-memory",
        "memory of the host",
        "`--async-save` copies more to the host than is available",
        "Megatron-core, `dist_checkpointing/strategies`",
        ("warning",),
        find_staging,
        per_node=True,
    ),
    EnvironmentCheck(
        "free-disk",
        "room below `--save`",
        "the next checkpoint does not fit, or not all that are to come; of several nodes, each one's share",
        "the planner's sizes, or the newest checkpoint's",
        ("error", "warning"),
        find_disk,
    ),
)
