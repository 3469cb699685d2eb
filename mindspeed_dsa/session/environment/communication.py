"""Checks of environment variables of HCCL, NCCL and torch.distributed."""

from __future__ import annotations

import math
from collections.abc import Iterator

from mindspeed_dsa.environment import EnvironmentCheck, Finding, Surroundings

_HCCL = "CANN, environment variable reference"
_TORCH = "PyTorch, ProcessGroupNCCL environment variables"
_NCCL = "NCCL, environment variables"
_HCCL_ERRORS = ("HCCL_ASYNC_ERROR_HANDLING", "TORCH_HCCL_ASYNC_ERROR_HANDLING")
"""Name of the variable in torch_npu up to 2.7.1, and in its manual since then."""
_MIB = 2**20
_EXEC_S, _EXEC_AIV_S = 1836, 1091
"""Seconds: default of HCCL_EXEC_TIMEOUT, and its default and upper bound in AIV mode (CANN 8.5)."""
_BUFFER_MB = 200
_GROUP_MINUTES = 10
"""Default of HCCL_BUFFSIZE, and of Megatron's --distributed-timeout-minutes."""


def _aiv(about: Surroundings) -> bool:
    return about.variable("HCCL_OP_EXPANSION_MODE").upper() == "AIV"


def find_expansion_mode(about: Surroundings) -> Iterator[Finding]:
    """Check for HCCL's AIV mode, whose collectives take vector cores from overlapped computation."""
    if _aiv(about) and about.overlaps:
        yield Finding(
            "warning",
            "HCCL_OP_EXPANSION_MODE=AIV",
            f"collectives run on the vector cores and take them from the computation that is to hide "
            f"{about.hidden}, so that both become slower",
            "unset HCCL_OP_EXPANSION_MODE",
        )


def find_timeouts(about: Surroundings) -> Iterator[Finding]:
    """Check whether HCCL's timeout is shorter than the job's timeout, or longer than torch's."""
    minutes = about.argument("distributed_timeout_minutes")
    if not minutes:
        return
    text = about.variable("HCCL_EXEC_TIMEOUT")
    if text and not text.isdigit():
        return
    configured = int(text) if text else _EXEC_S
    # HCCL_EXEC_TIMEOUT=0 means no limit. AIV mode caps it at 1091 s.
    limit = min(configured or _EXEC_AIV_S, _EXEC_AIV_S) if _aiv(about) else configured or math.inf
    who = f"--distributed-timeout-minutes {minutes}"
    # Only warn if the user has raised Megatron's default of 10 minutes.
    capped = _aiv(about) and limit == _EXEC_AIV_S
    if minutes * 60 > limit and minutes > _GROUP_MINUTES and (capped or not text):
        cause = ", the most that AIV mode has" if capped else ", its default"
        yield Finding(
            "warning",
            who,
            f"HCCL ends a collective after HCCL_EXEC_TIMEOUT, {limit:g} s{cause}, so that a rank which saves "
            "or loads for longer ends the job",
            "unset HCCL_OP_EXPANSION_MODE" if capped else f"export HCCL_EXEC_TIMEOUT={minutes * 60 - 60}",
        )
    elif minutes * 60 <= limit:
        shown = "unlimited" if math.isinf(limit) else f"{limit:g} s"
        yield Finding(
            "note",
            who,
            f"torch ends a hanging collective before HCCL does (HCCL_EXEC_TIMEOUT: {shown}), and HCCL's "
            "message, which says who is missing, is never printed",
            f"--distributed-timeout-minutes {int(limit // 60) + 1}"
            if math.isfinite(limit)
            else f"export HCCL_EXEC_TIMEOUT={minutes * 60 - 60}",
        )


def find_reductions(about: Surroundings) -> Iterator[Finding]:
    """Check for nondeterministic reductions of HCCL in spite of --deterministic-mode."""
    if not about.argument("deterministic_mode"):
        return
    # Atlas A3 runs collectives on the AI CPU by default, where reductions are deterministic anyway.
    if not _aiv(about) and "A2" not in about.machine.product:
        return
    if about.variable("HCCL_DETERMINISTIC").lower() not in ("true", "strict"):
        yield Finding(
            "warning",
            "--deterministic-mode",
            f"with HCCL_DETERMINISTIC {about.variable('HCCL_DETERMINISTIC') or 'not set'}, HCCL adds "
            "in any order, so that two runs differ",
            "export HCCL_DETERMINISTIC=true",
        )


def find_buffer(about: Surroundings) -> Iterator[Finding]:
    """Check whether the all-to-all of experts is larger than a communicator's buffer."""
    text = about.variable("HCCL_BUFFSIZE") or str(_BUFFER_MB)
    hidden, rows = about.argument("hidden_size"), about.argument("seq_length")
    experts = about.argument("num_experts") or about.argument("num_moe_experts")
    if not (text.isdigit() and hidden and rows and experts and about.size("expert_model_parallel_size") > 1):
        return
    # Ranks that a sequence is split over: context parallel, and tensor parallel under sequence parallelism.
    parts = about.size("context_parallel_size")
    parts *= about.size("tensor_model_parallel_size") if about.argument("sequence_parallel") else 1
    # Bytes per element.
    number = 2 if about.argument("bf16") or about.argument("fp16") else 4
    samples = max(about.size("micro_batch_size"), about.size("eval_micro_batch_size"))
    tokens = rows * samples / parts * about.size("moe_router_topk")
    message = math.ceil(tokens * hidden * number / _MIB)
    # 4096 tokens x top-8 x hidden 7168 x 2 bytes = 448 MiB, more than the default buffer of 200 MB.
    if message > int(text):
        yield Finding(
            "note",
            f"HCCL_BUFFSIZE {text} MB" + ("" if about.variable("HCCL_BUFFSIZE") else " (default)"),
            f"dispatch and combine of experts send {message} MB from each rank, and what is larger than the "
            "buffer may be slower",
            f"export HCCL_BUFFSIZE={message}, if twice as much of each communicator fits into the device's "
            "memory",
        )


def find_error_handling(about: Surroundings) -> Iterator[Finding]:
    """Check for disabled error handling: a failed collective would then not end the job."""
    if about.variable("TORCH_NCCL_ASYNC_ERROR_HANDLING") == "0" and about.platform == "cuda":
        yield Finding(
            "warning",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING=0",
            "a collective that fails or exceeds its time does not end the process, and all ranks wait for "
            "ever",
            "unset TORCH_NCCL_ASYNC_ERROR_HANDLING",
        )
    for name in _HCCL_ERRORS if about.platform == "npu" else ():
        if about.variable(name) == "0":
            yield Finding(
                "warning",
                f"{name}=0",
                "a collective that the network has failed (ERROR CQE) does not end the process, and ranks "
                "wait until HCCL's own time-out",
                f"unset {name}",
            )


def find_blocking_wait(about: Surroundings) -> Iterator[Finding]:
    """Check for blocking waits, which keep the host from launching computation during communication."""
    if about.is_set("TORCH_NCCL_BLOCKING_WAIT") and about.overlaps:
        yield Finding(
            "warning",
            f"TORCH_NCCL_BLOCKING_WAIT={about.variable('TORCH_NCCL_BLOCKING_WAIT')}",
            f"the host stops in each wait until the transfer has ended, in place of the stream, and launches "
            f"nothing behind which to hide {about.hidden}",
            "unset TORCH_NCCL_BLOCKING_WAIT",
        )


def find_transports(about: Surroundings) -> Iterator[Finding]:
    """Check for disabled NCCL transports that the job's ranks could use."""
    level = about.variable("NCCL_P2P_LEVEL").upper()
    off = "NCCL_P2P_DISABLE=1" if about.variable("NCCL_P2P_DISABLE") == "1" else ""
    off = off or (f"NCCL_P2P_LEVEL={level}" if level in ("LOC", "0") else "")
    if off and about.machine.local_ranks > 1:
        shared = about.variable("NCCL_SHM_DISABLE") != "1"
        yield Finding(
            "warning",
            off,
            f"the {about.machine.local_ranks} ranks of a node exchange through "
            + ("host memory" if shared else "the network, as NCCL_SHM_DISABLE=1 is set too,")
            + " in place of NVLink or PCIe between their GPUs",
            f"unset {off.partition('=')[0]}",
        )
    if about.variable("NCCL_IB_DISABLE") == "1" and about.machine.nodes > 1 and about.machine.infiniband:
        yield Finding(
            "warning",
            "NCCL_IB_DISABLE=1",
            f"the {about.machine.nodes} nodes exchange through IP sockets, though this one has RDMA devices",
            "unset NCCL_IB_DISABLE",
        )


def find_debugging(about: Surroundings) -> Iterator[Finding]:
    """Check for torch's consistency check of every collective, which synchronizes all ranks."""
    if about.variable("TORCH_DISTRIBUTED_DEBUG").upper() == "DETAIL":
        yield Finding(
            "warning",
            "TORCH_DISTRIBUTED_DEBUG=DETAIL",
            "before each collective all ranks compare its shapes over gloo and wait for each other"
            + (f", which is not hidden as {about.hidden}" if about.overlaps else ""),
            "unset TORCH_DISTRIBUTED_DEBUG",
        )


CHECKS = (
    EnvironmentCheck(
        "hccl-expansion-mode",
        "`HCCL_OP_EXPANSION_MODE`",
        "AIV, and features or flags of Megatron's hide transfers behind computation",
        "article on DeepSeek's inference on Ascend: SDMA beside computation, never AIV",
        ("warning",),
        find_expansion_mode,
        platforms=("npu",),
    ),
    EnvironmentCheck(
        "hccl-timeouts",
        "`HCCL_EXEC_TIMEOUT`, `--distributed-timeout-minutes`",
        "the flag was raised and the variable was not, or torch ends a collective before HCCL does",
        f"{_HCCL}; torch_npu on `HCCL_ASYNC_ERROR_HANDLING`: the group's timeout exceeds HCCL's",
        ("warning", "note"),
        find_timeouts,
        platforms=("npu",),
    ),
    EnvironmentCheck(
        "hccl-deterministic",
        "`HCCL_DETERMINISTIC`",
        "`--deterministic-mode` without it, on Atlas A2 or in AIV mode",
        _HCCL,
        ("warning",),
        find_reductions,
        platforms=("npu",),
    ),
    EnvironmentCheck(
        "hccl-buffer",
        "`HCCL_BUFFSIZE`",
        "a rank's tokens for other experts are larger than the buffer",
        _HCCL,
        ("note",),
        find_buffer,
        platforms=("npu",),
    ),
    EnvironmentCheck(
        "async-error-handling",
        "`TORCH_NCCL_ASYNC_ERROR_HANDLING`, `HCCL_ASYNC_ERROR_HANDLING`, `TORCH_HCCL_ASYNC_ERROR_HANDLING`",
        "0",
        f"{_TORCH}; torch_npu, environment variables",
        ("warning",),
        find_error_handling,
        platforms=("cuda", "npu"),
    ),
    EnvironmentCheck(
        "blocking-wait",
        "`TORCH_NCCL_BLOCKING_WAIT`",
        "set, and transfers are hidden behind computation",
        _TORCH,
        ("warning",),
        find_blocking_wait,
        platforms=("cuda",),
    ),
    EnvironmentCheck(
        "nccl-transports",
        "`NCCL_P2P_DISABLE`, `NCCL_P2P_LEVEL`, `NCCL_SHM_DISABLE`, `NCCL_IB_DISABLE`",
        "a transport is off, and the job has ranks on one node, or RDMA devices and several nodes, to use it",
        _NCCL,
        ("warning",),
        find_transports,
        platforms=("cuda",),
    ),
    EnvironmentCheck(
        "distributed-debug",
        "`TORCH_DISTRIBUTED_DEBUG`",
        "DETAIL",
        "PyTorch, distributed communication package",
        ("warning",),
        find_debugging,
    ),
)
