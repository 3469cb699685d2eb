"""Cases of environment checks: when each check reports something, and when it is silent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mindspeed_dsa.environment import Installation

GB = 10**9
WHEEL = Installation(Path("/wheel"), "0.16.1")
CHECKOUT = Installation(Path("/checkout"), "0.16.1")
TRAINING = Installation(Path("/checkout"), "0.16.1", has_training=True)
_LACKS = "CANN's library has no aclnnLightningIndexer; npu_lightning_indexer needs newer ones"
FIRST = {"LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "none"}  # of torchrun
HIDDEN = ("all-to-alls of experts (moe-fb-overlap)",)


def _found(*megatrons: Installation) -> dict[str, Any]:
    """Return the part of a case that lists the Megatron installations."""
    return {"machine": {"megatrons": megatrons}}


# name, platform, triggering surroundings, level, part of the message, changes that silence it
CASES = [
    (
        "hccl-expansion-mode",
        "npu",
        {"variables": {"HCCL_OP_EXPANSION_MODE": "AIV"}, "overlaps": HIDDEN},
        "warning",
        "to hide all-to-alls of experts (moe-fb-overlap)",
        [{"variables": {}}, {"overlaps": ()}, {"variables": {"HCCL_OP_EXPANSION_MODE": "AI_CPU"}}],
    ),
    (
        "hccl-timeouts",
        "npu",
        {"args": {"distributed_timeout_minutes": 120}},
        "warning",
        "after HCCL_EXEC_TIMEOUT, 1836 s, its default",
        [{"variables": {"HCCL_EXEC_TIMEOUT": "3600"}}, {"args": {}}],
    ),
    (
        "hccl-timeouts",
        "npu",
        {
            "args": {"distributed_timeout_minutes": 120},
            "variables": {"HCCL_EXEC_TIMEOUT": "3600", "HCCL_OP_EXPANSION_MODE": "AIV"},
        },
        "warning",
        "1091 s, the most that AIV mode has",
        [
            {"variables": {"HCCL_EXEC_TIMEOUT": "3600"}},
            {"variables": {"HCCL_EXEC_TIMEOUT": "900", "HCCL_OP_EXPANSION_MODE": "AIV"}},
        ],
    ),
    (
        "hccl-timeouts",
        "npu",
        {"args": {"distributed_timeout_minutes": 10}},
        "note",
        "message, which says who is missing, is never printed; --distributed-timeout-minutes 31",
        [
            {"variables": {"HCCL_EXEC_TIMEOUT": "500"}},
            {"args": {"distributed_timeout_minutes": 31}, "variables": {"HCCL_EXEC_TIMEOUT": "1836"}},
        ],
    ),
    (
        "hccl-deterministic",
        "npu",
        {"args": {"deterministic_mode": True}, "machine": {"product": "Atlas A2"}},
        "warning",
        "with HCCL_DETERMINISTIC not set",
        [
            {"variables": {"HCCL_DETERMINISTIC": "true"}},
            {"machine": {"product": "Atlas A3"}},
            {"args": {"deterministic_mode": False}},
        ],
    ),
    (
        "hccl-buffer",
        "npu",
        {
            "args": {
                "hidden_size": 7168,
                "seq_length": 4096,
                "num_experts": 256,
                "expert_model_parallel_size": 8,
                "moe_router_topk": 8,
                "bf16": True,
                "eval_micro_batch_size": 2,
            }
        },
        "note",
        "send 896 MB from each rank",
        [{"variables": {"HCCL_BUFFSIZE": "896"}}, {"args": {"hidden_size": 7168, "seq_length": 4096}}],
    ),
    (
        "async-error-handling",
        "npu",
        {"variables": {"HCCL_ASYNC_ERROR_HANDLING": "0"}},
        "warning",
        "unset HCCL_ASYNC_ERROR_HANDLING",
        [{"variables": {}}, {"platform": "cuda"}],
    ),
    (
        "async-error-handling",
        "npu",
        {"variables": {"TORCH_HCCL_ASYNC_ERROR_HANDLING": "0"}},
        "warning",
        "ranks wait until HCCL's own time-out",
        [{"variables": {}}, {"variables": {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}}],
    ),
    (
        "async-error-handling",
        "cuda",
        {"variables": {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}},
        "warning",
        "unset TORCH_NCCL_ASYNC_ERROR_HANDLING",
        [{"variables": {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"}}, {"platform": "cpu"}],
    ),
    (
        "blocking-wait",
        "cuda",
        {"variables": {"TORCH_NCCL_BLOCKING_WAIT": "1"}, "overlaps": HIDDEN},
        "warning",
        "stops in each wait",
        [{"variables": {"TORCH_NCCL_BLOCKING_WAIT": "0"}}, {"overlaps": ()}],
    ),
    (
        "nccl-transports",
        "cuda",
        {"variables": {"NCCL_P2P_DISABLE": "1"}, "machine": {"local_ranks": 8, "world": 8}},
        "warning",
        "the 8 ranks of a node exchange through host memory in place of NVLink",
        [{"variables": {}}, {"machine": {"local_ranks": 1, "world": 1}}, {"machine": {}}],
    ),
    (
        "nccl-transports",
        "cuda",
        {
            "variables": {"NCCL_IB_DISABLE": "1"},
            "machine": {"local_ranks": 8, "world": 16, "infiniband": True},
        },
        "warning",
        "the 2 nodes exchange through IP sockets",
        [
            {"machine": {"local_ranks": 8, "world": 8, "infiniband": True}},
            {"machine": {"local_ranks": 8, "world": 16}},
        ],
    ),
    (
        "distributed-debug",
        "cpu",
        {"variables": {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}},
        "warning",
        "before each collective",
        [{"variables": {"TORCH_DISTRIBUTED_DEBUG": "INFO"}}, {"variables": {}}],
    ),
    (
        "device-connections",
        "cuda",
        {"args": {"tensor_model_parallel_size": 2}, "machine": {"architecture": 9}},
        "warning",
        "may start behind the matmul",
        [{"machine": {"architecture": 10}}, {"machine": {}}, {"platform": "cpu"}],
    ),
    (
        "device-connections",
        "cuda",
        {"args": {"use_torch_fsdp2": True}, "variables": {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}},
        "warning",
        "wait behind the layers that should hide them",
        [{"variables": {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}}, {"platform": "cpu"}],
    ),
    (
        "device-connections",
        "cuda",
        {
            "args": {"overlap_moe_expert_parallel_comm": True},
            "variables": {"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
            "machine": {"architecture": 9},
        },
        "warning",
        "needs more queues",
        [{"variables": {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}}, {"machine": {"architecture": 10}}],
    ),
    (
        "launch-blocking",
        "npu",
        {"variables": {"ASCEND_LAUNCH_BLOCKING": "1", "TASK_QUEUE_ENABLE": "2"}},
        "warning",
        "TASK_QUEUE_ENABLE=2 does nothing",
        [{"variables": {"ASCEND_LAUNCH_BLOCKING": "0"}}, {"variables": {"CUDA_LAUNCH_BLOCKING": "1"}}],
    ),
    (
        "launch-blocking",
        "cuda",
        {"variables": {"CUDA_LAUNCH_BLOCKING": "1"}, "overlaps": HIDDEN},
        "warning",
        "nothing hides all-to-alls",
        [{"variables": {}}, {"platform": "cpu"}],
    ),
    (
        "task-queue",
        "npu",
        {"variables": {"TASK_QUEUE_ENABLE": "0"}, "overlaps": HIDDEN},
        "warning",
        "may come too late",
        [{"variables": {"TASK_QUEUE_ENABLE": "1"}}, {"variables": {}}, {"overlaps": ()}],
    ),
    (
        "memory-caching",
        "cuda",
        {"variables": {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}},
        "warning",
        "allocated and freed by the driver",
        [{"variables": {}}, {"platform": "npu"}],
    ),
    (
        "processor-threads",
        "cpu",
        {"machine": {"local_ranks": 2, "processors": 2}},
        "warning",
        "2 ranks have 2 threads each on 2 processors",
        [
            {"variables": {"OMP_NUM_THREADS": "1"}},
            {"machine": {"local_ranks": 1, "processors": 2}},
            {"platform": "cuda"},
        ],
    ),
    (
        "processor-threads",
        "cpu",
        {
            "machine": {"local_ranks": 2, "processors": 2},
            "variables": {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "PASSIVE"},
        },
        "note",
        "export OMP_NUM_THREADS=1",
        [{"machine": {"local_ranks": 2, "processors": 4}}],
    ),
    (
        "open-files",
        "cpu",
        {"machine": {"open_files": 256, "world": 16, "local_ranks": 16}},
        "warning",
        "ulimit -n 512",
        [{"machine": {"open_files": 512, "world": 16}}, {"machine": {"world": 16}}, {"platform": "cuda"}],
    ),
    (
        "shared-memory",
        "cuda",
        {
            "args": {
                "num_workers": 2,
                "seq_length": 4096,
                "micro_batch_size": 1,
                "create_attention_mask_in_dataloader": True,
            },
            "machine": {"local_ranks": 8, "world": 8, "shared_memory": 64 * 2**20},
        },
        "error",
        "--no-create-attention-mask-in-dataloader",
        [
            {"args": {"num_workers": 2, "seq_length": 4096, "create_attention_mask_in_dataloader": False}},
            {"args": {"num_workers": 0, "seq_length": 4096}},
            {"machine": {"local_ranks": 8, "shared_memory": 2**34}},
        ],
    ),
    (
        "shared-memory",
        "cuda",
        {
            "args": {"num_workers": 2, "seq_length": 4096, "create_attention_mask_in_dataloader": True},
            "machine": {"local_ranks": 8, "world": 8, "shared_memory": 256 * 2**20},
        },
        "error",
        "8 ranks with --num-workers 2",
        [
            {
                "args": {
                    "num_workers": 2,
                    "seq_length": 4096,
                    "create_attention_mask_in_dataloader": True,
                    "pipeline_model_parallel_size": 8,
                }
            }
        ],
    ),
    (
        "locked-memory",
        "cuda",
        {"machine": {"locked_memory": 65536, "local_ranks": 8, "world": 16, "infiniband": True}},
        "warning",
        "ulimit -l unlimited",
        [
            {"machine": {"locked_memory": None, "local_ranks": 8, "world": 16, "infiniband": True}},
            {"machine": {"locked_memory": 65536, "local_ranks": 8, "world": 8, "infiniband": True}},
            {"variables": {"NCCL_IB_DISABLE": "1"}},
        ],
    ),
    (
        "host-memory",
        "cuda",
        {
            "args": {"async_save": True, "save": "saves"},
            "machine": {"local_ranks": 8, "world": 16, "memory": 400 * GB},
            "checkpoint": 1000 * GB,
        },
        "warning",
        "8 ranks copy about 500.00 GB of the checkpoint",
        [
            {"args": {"async_save": False}},
            {"machine": {"local_ranks": 8, "world": 32, "memory": 400 * GB}},
            {"checkpoint": None},
        ],
    ),
    (
        "free-disk",
        "cpu",
        {"args": {"save": "saves"}, "machine": {"free": lambda folder: 5 * GB}, "checkpoint": 8 * GB},
        "error",
        "5.00 GB are free, and the next save writes about 8.00 GB",
        [
            {"checkpoint": 4 * GB},
            {"args": {"save": "s3://bucket"}},
            {"args": {"save": "saves", "no_save": True}},
            {"machine": {"free": lambda folder: 5 * GB, "local_ranks": 8, "world": 16}},
            {"machine": {"free": lambda folder: 5 * GB, "world": 16}},
            {"machine": {}},
        ],
    ),
    (
        "free-disk",
        "cpu",
        {
            "args": {"save": "saves", "train_iters": 100, "save_interval": 10},
            "machine": {"free": lambda folder: 25 * GB},
            "checkpoint": 8 * GB,
        },
        "warning",
        "10 checkpoints of about 8.00 GB are to come, and 25.00 GB are free: full after 3",
        [
            {"args": {"save": "saves", "train_iters": 100, "save_interval": 50}},
            {"args": {"save": "s", "train_iters": 100, "save_interval": 10, "save_retain_interval": 50}},
            {"iteration": 80},
        ],
    ),
    (
        "two-megatrons",
        "cpu",
        _found(Installation(Path("/checkout"), "0.19.0"), WHEEL),
        "warning",
        "hides 0.16.1 in",
        [_found(CHECKOUT), _found()],
    ),
    (
        "two-megatrons",
        "cpu",
        _found(WHEEL, CHECKOUT),
        "note",
        "hides 0.16.1 in /checkout, whose changes",
        [_found(CHECKOUT)],
    ),
    (
        "two-megatrons",
        "cpu",
        _found(WHEEL, TRAINING),
        "warning",
        "hides 0.16.1 in /checkout, and megatron.training, which it lacks, comes from there",
        [_found(TRAINING)],
    ),
    (
        "torch-npu-release",
        "npu",
        {"machine": {"torch": "2.9.0+cpu", "torch_npu": "2.8.0.post4"}},
        "error",
        "pip install --no-deps 'torch_npu==2.9.0.*'",
        [{"machine": {"torch": "2.9.0", "torch_npu": "2.9.0.post4"}}, {"machine": {"torch": "2.9.0"}}],
    ),
    (
        "torch-npu-release",
        "npu",
        {"machine": {"torch": "2.9.0", "torch_npu": "2.9.0.post2", "cann": "8.3.RC1"}},
        "error",
        "it is of release 26.0.0 for CANN 9.0.0, and CANN 8.3.RC1 is installed",
        [{"machine": {"torch": "2.9.0", "torch_npu": "2.9.0.post2", "cann": "8.5.1"}}],
    ),
    (
        "torch-npu-release",
        "npu",
        {"machine": {"torch": "2.13.0", "torch_npu": "2.13.0", "cann": "9.1.0"}},
        "warning",
        "the newest of it is 2.12.0",
        [{"machine": {"torch": "2.13.0", "torch_npu": "2.13.0", "cann": "9.2.0"}}],
    ),
    (
        "npu-operators",
        "npu",
        {"features": frozenset({"fused-dsa"}), "machine": {"lacking": {"npu_lightning_indexer": _LACKS}}},
        "warning",
        "aclnnLightningIndexer, and PyTorch runs in its place, slower; install torch_npu 2.6.0.post5",
        [
            {"features": frozenset({"fused-swiglu"})},
            {"machine": {"lacking": {"npu_dense_lightning_indexer_softmax_lse": _LACKS}}},
        ],
    ),
    (
        "npu-operators",
        "npu",
        {
            "features": frozenset({"fused-dsa"}),
            "args": {"dsa_backend": "npu", "dsa_indexer_loss_coeff": 0.1, "dsa_stage": "warmup"},
            "machine": {"lacking": {"npu_dense_lightning_indexer_softmax_lse": _LACKS}},
        },
        "error",
        "and it has nothing else to run; install torch_npu 2.7.1.post4",
        [
            {
                "args": {
                    "dsa_backend": "npu",
                    "dsa_indexer_loss_coeff": 0.1,
                    "dsa_indexer_use_sparse_loss": True,
                }
            },
            {"args": {"dsa_backend": "npu"}},
        ],
    ),
    (
        "devices-for-ranks",
        "npu",
        {"machine": {"local_ranks": 8, "devices": 2}, "variables": {"ASCEND_RT_VISIBLE_DEVICES": "0,1"}},
        "error",
        "8 ranks on a node: they see 2 devices there (ASCEND_RT_VISIBLE_DEVICES=0,1)",
        [
            {"machine": {"local_ranks": 2, "devices": 2}},
            {"machine": {"local_ranks": 8, "devices": None}},
            {"variables": {"LOCAL_RANK": "0"}},  # each rank has a device of its own
            {
                "machine": {"local_ranks": 8, "devices": 1},
                "variables": {**FIRST, "ASCEND_RT_VISIBLE_DEVICES": "3"},
            },
        ],
    ),
    (
        "devices-for-ranks",
        "cuda",
        {
            "machine": {"local_ranks": 4, "devices": 1},
            "variables": FIRST,
        },
        "error",
        "torchrun --nproc-per-node 1, or more devices in CUDA_VISIBLE_DEVICES",
        [
            {"machine": {"local_ranks": 1, "devices": 1}},
            {
                "machine": {"local_ranks": 4, "devices": 1},
                "variables": {**FIRST, "CUDA_VISIBLE_DEVICES": "2"},
            },
        ],
    ),
    (
        "devices-for-ranks",
        "cuda",
        {
            "machine": {"local_ranks": 4, "devices": 1},
            "variables": {**FIRST, "CUDA_VISIBLE_DEVICES": "2", "LOCAL_RANK": "2"},
        },
        "error",
        "sets CUDA_VISIBLE_DEVICES to that device, and LOCAL_RANK=0",
        [{"variables": {**FIRST, "CUDA_VISIBLE_DEVICES": "2"}}],
    ),
    (
        "megatron-lm-packages",
        "cpu",
        {"machine": {"release": "0.16.1", "absent": ("six", "triton")}},
        "error",
        "Megatron-LM 0.16.1: it needs six, triton, which are not installed; pip install six triton",
        [{"machine": {"release": "0.16.1"}}],
    ),
    (
        "swap-optimizer-rounding",
        "npu",
        {
            "machine": {"torch_npu": "2.13.0"},
            "variables": {"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True"},
        },
        "note",
        "=expandable_segments:True,pinned_max_round_threshold_mb:128",
        [
            {"machine": {"torch_npu": "2.9.0"}},
            {"variables": {"PYTORCH_NPU_ALLOC_CONF": "pinned_max_round_threshold_mb:64"}},
        ],
    ),
]
