"""Checks of a job's surroundings: which there are, what they find, and how that is told."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from mindspeed_dsa import log
from mindspeed_dsa.environment import LEVELS, EnvironmentCheck, Finding, Machine, Surroundings
from mindspeed_dsa.feature import Feature, Platform
from mindspeed_dsa.runs import manifest, whole_checkpoints
from mindspeed_dsa.runs.files import RunError
from mindspeed_dsa.session.environment import communication, devices, host, installation, npu
from mindspeed_dsa.settings import Settings

__all__ = [
    "CHECKS",
    "at_start",
    "checks_of",
    "completed",
    "early",
    "examine",
    "newest",
    "overlaps",
    "records",
    "refused",
]

CHECKS: tuple[EnvironmentCheck, ...] = (
    *communication.CHECKS,
    *devices.CHECKS,
    *host.CHECKS,
    *installation.CHECKS,
    *npu.CHECKS,
)
"""Those that are no feature's own."""
_MEGATRON = {
    "overlap_grad_reduce": "the reduction of gradients",
    "overlap_param_gather": "the gather of weights",
    "overlap_moe_expert_parallel_comm": "all-to-alls of experts",
    "moe_shared_expert_overlap": "all-to-alls of experts",
    "tp_comm_overlap": "tensor parallel transfers",
}
"""Arguments of Megatron's that hide transfers behind computation, and what they hide."""
Found = tuple[EnvironmentCheck, Finding]


def overlaps(active: Sequence[Feature], args: Any) -> tuple[str, ...]:
    """Return what is sent while something is computed, each with what asks for it."""
    found = [f"{feature.overlaps} ({feature.name})" for feature in active if feature.overlaps]
    found += [
        f"{what} (--{name.replace('_', '-')})"
        for name, what in _MEGATRON.items()
        if getattr(args, name, None)
    ]
    kinds = getattr(args, "cp_comm_type", None) or ()
    sent = getattr(args, "context_parallel_size", 1) > 1 and "p2p" in kinds
    if sent and getattr(args, "experimental_attention_variant", None) != "dsa":
        found.append("keys and values on their way round a ring (--cp-comm-type p2p)")
    return tuple(found)


def checks_of(active: Sequence[Feature]) -> Iterator[EnvironmentCheck]:
    """Yield all checks of a job with these features."""
    yield from CHECKS
    for feature in active:
        yield from feature.environment


def examine(
    about: Surroundings, active: Sequence[Feature], per_node: bool | None = None, early: bool = False
) -> list[Found]:
    """Ask every check that applies to the platform.

    Args:
        about: what checks look at.
        active: features that are on, whose own checks are asked as well.
        per_node: only those of a node, or only those of the job; None: all of them.
        early: only those that are about what is installed.

    Returns:
        What they find, the worst first. A check that raises is a finding of its own: it must not stop a job.
    """
    found: list[Found] = []
    for check in checks_of(active):
        if not _applies(check, about.platform) or per_node not in (None, check.per_node):
            continue
        if early and not check.early:
            continue
        try:
            found += [(check, finding) for finding in check.find(about)]
        except Exception as error:
            found.append((check, _failed(check, error)))
    return sorted(found, key=lambda each: LEVELS.index(each[1].level))


def _applies(check: EnvironmentCheck, platform: str) -> bool:
    """Return whether a check is for a platform; an unknown one, as without torch, may be any."""
    return platform in check.platforms or (not platform and len(check.platforms) == len(get_args(Platform)))


def _failed(check: EnvironmentCheck, error: Exception) -> Finding:
    return Finding(
        "note", f"check {check.name}", f"it raises {error!r} and has found nothing", "report it as a bug"
    )


def records(found: Sequence[Found]) -> list[dict[str, str]]:
    """Return findings as plain data."""
    return [
        {"check": check.name, "level": each.level, "who": each.who, "what": each.what, "do": each.do}
        for check, each in found
    ]


def early(settings: Settings, args: Any = None, variables: Mapping[str, str] = os.environ) -> list[Found]:
    """Examine what is installed, which needs no job.

    Args:
        settings: of the session.
        args: the job's arguments, where there is one.
        variables: the environment.
    """
    machine = _machine(settings, variables)
    return examine(
        Surroundings(settings.platform, args, variables=variables, machine=machine), (), early=True
    )


def refused(settings: Settings, args: Any) -> list[str]:
    """Log what is wrong with what is installed, before process groups start.

    Most of it ends a job before its first model, and so before :func:`at_start`.

    Returns:
        what no job survives.
    """
    try:
        found = early(settings, args)
    except Exception as error:  # a look around must not stop a job
        log.get().warning("environment: not examined: %r; report it as a bug", error, once=True)
        return []
    for check, finding in found:
        if not check.stops:
            _tell(check, finding, "")
    return [str(finding) for check, finding in found if check.stops and finding.level == "error"]


def at_start(
    settings: Settings,
    active: Sequence[Feature],
    args: Any,
    checkpoint_size: Callable[[Any], float | None],
) -> list[Found]:
    """Examine a job that is about to build its model, on ranks that speak for it or for their node, and log.

    Args:
        settings: of the session.
        active: features that are on.
        args: the job's arguments; None where it has shown none.
        checkpoint_size: returns the bytes of a checkpoint of these arguments, where the job's flags say so.

    Returns:
        What this rank has logged.
    """
    variables: Mapping[str, str] = os.environ
    first = log.is_first_rank()
    if not first and variables.get("LOCAL_RANK") != "0":
        return []
    try:
        machine = _machine(settings, variables)
        about = Surroundings(settings.platform, args, variables=variables, machine=machine)
        about = completed(about, active, lambda: checkpoint_size(args) if about.argument("save") else None)
    except Exception as error:  # a look around must not stop a job
        log.get().warning("environment: not examined: %r; report it as a bug", error, once=True)
        return []
    found = examine(about, active, None if first else True)
    where = "" if first else f" of node {socket.gethostname()}"
    for check, finding in found:
        _tell(check, finding, where, ranks="all")
    return found


def _tell(check: EnvironmentCheck, finding: Finding, where: str, ranks: log.Ranks = "first") -> None:
    text = f"environment{where}: {finding.level}: {finding} [{check.name}]"
    tell = {"error": "error", "warning": "warning", "note": "info"}
    getattr(log.get(), tell[finding.level])("%s", text, once=True, ranks=ranks)


def completed(
    about: Surroundings, active: Sequence[Feature], planned_size: Callable[[], float | None]
) -> Surroundings:
    """Add what features, and the folder that the job saves to, say of its surroundings.

    Args:
        about: what else checks look at.
        active: features that are on.
        planned_size: returns the bytes of a checkpoint, where the job's flags say so; asked where no
            checkpoint is there that says it.
    """
    iteration, size = newest(about.args)
    return replace(
        about,
        features=frozenset(feature.name for feature in active),
        overlaps=overlaps(active, about.args),
        checkpoint=size or planned_size(),
        iteration=iteration,
    )


def _machine(settings: Settings, variables: Mapping[str, str]) -> Machine:
    # Launchers other than torchrun, such as srun, leave it open how many ranks a node has.
    alone = {"LOCAL_WORLD_SIZE": "1"} if variables.get("WORLD_SIZE", "1") == "1" else {}
    return installation.read(settings.platform, settings.megatron_root, {**alone, **variables})


def newest(args: Any) -> tuple[int, float | None]:
    """Look at the folder that a job saves to.

    Returns:
        The iteration from which it goes on, if it loads from there; and the bytes of the newest checkpoint,
        where that has a manifest.
    """
    named = getattr(args, "save", None)
    if not named or "://" in str(named):
        return 0, None
    folder, goes_on = Path(named), getattr(args, "load", None) == named
    try:
        for iteration in whole_checkpoints.iterations(folder)[:1]:
            listed = manifest.read(folder / whole_checkpoints.name_of(iteration))
            return iteration if goes_on else 0, None if listed is None else float(listed.size)
    except (RunError, OSError):  # which loading reports
        pass
    return 0, None
