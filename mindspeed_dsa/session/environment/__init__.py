"""Environment checks of a job: their list, their execution, and the log output."""

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

CHECKS: tuple[EnvironmentCheck, ...] = (
    *communication.CHECKS,
    *devices.CHECKS,
    *host.CHECKS,
    *installation.CHECKS,
    *npu.CHECKS,
)
"""Checks that belong to no feature."""
_MEGATRON = {
    "overlap_grad_reduce": "the reduction of gradients",
    "overlap_param_gather": "the gather of weights",
    "overlap_moe_expert_parallel_comm": "all-to-alls of experts",
    "moe_shared_expert_overlap": "all-to-alls of experts",
    "tp_comm_overlap": "tensor parallel transfers",
}
"""Megatron's arguments that hide communication behind computation, with the hidden communication."""
Found = tuple[EnvironmentCheck, Finding]


def overlaps(active: Sequence[Feature], args: Any) -> tuple[str, ...]:
    """Describe the communication that features, or Megatron's own flags, overlap with computation."""
    hidden = [f"{feature.overlaps} ({feature.name})" for feature in active if feature.overlaps]
    hidden += [
        f"{what} (--{name.replace('_', '-')})"
        for name, what in _MEGATRON.items()
        if getattr(args, name, None)
    ]
    # Ring attention passes keys and values on while a block is computed. DSA does not use it.
    kinds = getattr(args, "cp_comm_type", None) or ()
    sent = getattr(args, "context_parallel_size", 1) > 1 and "p2p" in kinds
    if sent and getattr(args, "experimental_attention_variant", None) != "dsa":
        hidden.append("keys and values on their way round a ring (--cp-comm-type p2p)")
    return tuple(hidden)


def checks_of(active: Sequence[Feature]) -> Iterator[EnvironmentCheck]:
    """Yield the general checks, and the checks that these features declare."""
    yield from CHECKS
    for feature in active:
        yield from feature.environment


def examine(
    about: Surroundings, active: Sequence[Feature], per_node: bool | None = None, early: bool = False
) -> list[Found]:
    """Run every check that applies to the platform.

    Args:
        about: input of the checks.
        active: features that are on; their own checks run too.
        per_node: whether to run only the checks of a node (True) or only the checks of the job (False).
            ``None`` runs all.
        early: whether to run only the checks of installed software.

    Returns:
        Findings, the worst first. If a check raises, its finding is a note, because a faulty check must not
            stop the job.
    """
    findings: list[Found] = []
    for check in checks_of(active):
        if not _applies(check, about.platform) or per_node not in (None, check.per_node):
            continue
        if early and not check.early:
            continue
        try:
            findings += [(check, finding) for finding in check.find(about)]
        except Exception as error:
            findings.append((check, _failed(check, error)))
    # The sort is stable: findings of one level stay in the order of the checks.
    return sorted(findings, key=lambda each: LEVELS.index(each[1].level))


def _applies(check: EnvironmentCheck, platform: str) -> bool:
    """Return whether a check is for the platform. With an unknown platform, only checks for all apply."""
    return platform in check.platforms or (not platform and len(check.platforms) == len(get_args(Platform)))


def _failed(check: EnvironmentCheck, error: Exception) -> Finding:
    return Finding(
        "note", f"check {check.name}", f"it raises {error!r} and has found nothing", "report it as a bug"
    )


def records(found: Sequence[Found]) -> list[dict[str, str]]:
    """Return the findings of environment checks as plain data for JSON."""
    return [
        {"check": check.name, "level": each.level, "who": each.who, "what": each.what, "do": each.do}
        for check, each in found
    ]


def early(settings: Settings, args: Any = None) -> list[Found]:
    """Run the checks of installed software, which need no job.

    Args:
        settings: session's settings.
        args: job's arguments, if there is a job.
    """
    machine = _machine(settings, os.environ)
    about = Surroundings(settings.platform, args, variables=os.environ, machine=machine)
    return examine(about, (), early=True)


def refused(settings: Settings, args: Any) -> list[str]:
    """Check the installed software before process groups are created, and log the findings.

    Most of these problems would end the job before :func:`at_start` runs, which is when the first model is
    built.

    Returns:
        Messages of errors that must stop the job.
    """
    try:
        findings = early(settings, args)
    except Exception as error:  # an error in the examination must not stop a job
        log.get().warning("environment: not examined: %r; report it as a bug", error, once=True)
        return []
    for check, finding in findings:
        if not check.stops:
            _tell(check, finding, "")
    return [str(finding) for check, finding in findings if check.stops and finding.level == "error"]


def at_start(
    settings: Settings,
    active: Sequence[Feature],
    args: Any,
    checkpoint_size: Callable[[Any], float | None],
) -> list[Found]:
    """Run all checks right before the model is built, and log the findings.

    Rank 0 runs every check. Local rank 0 of each other node runs the checks of its node.

    Args:
        settings: session's settings.
        active: features that are on.
        args: job's arguments, ``None`` if unknown.
        checkpoint_size: function from arguments to the size of a checkpoint in bytes, ``None`` if unknown.

    Returns:
        Findings that this rank has logged.
    """
    variables: Mapping[str, str] = os.environ
    first = log.is_first_rank()
    if not first and variables.get("LOCAL_RANK") != "0":
        return []
    try:
        machine = _machine(settings, variables)
        about = Surroundings(settings.platform, args, variables=variables, machine=machine)
        # Planning the size of a checkpoint takes time, so only jobs that save do it.
        about = completed(about, active, lambda: checkpoint_size(args) if about.argument("save") else None)
    except Exception as error:  # an error in the examination must not stop a job
        log.get().warning("environment: not examined: %r; report it as a bug", error, once=True)
        return []
    findings = examine(about, active, None if first else True)
    where = "" if first else f" of node {socket.gethostname()}"
    for check, finding in findings:
        _tell(check, finding, where, ranks="all")
    return findings


def _tell(check: EnvironmentCheck, finding: Finding, where: str, ranks: log.Ranks = "first") -> None:
    text = f"environment{where}: {finding.level}: {finding} [{check.name}]"
    tell = {"error": "error", "warning": "warning", "note": "info"}
    getattr(log.get(), tell[finding.level])("%s", text, once=True, ranks=ranks)


def completed(
    about: Surroundings, active: Sequence[Feature], planned_size: Callable[[], float | None]
) -> Surroundings:
    """Add to ``about`` the information from features and from the folder that the job saves to.

    Args:
        about: input of the checks so far.
        active: features that are on.
        planned_size: function that returns the size of a checkpoint in bytes, ``None`` if unknown. Called
            only if no existing checkpoint states it.
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
    # Launchers other than torchrun, such as srun, do not say how many ranks a node has. A world of one rank
    # has one.
    alone = {"LOCAL_WORLD_SIZE": "1"} if variables.get("WORLD_SIZE", "1") == "1" else {}
    return installation.read(settings.platform, settings.megatron_root, {**alone, **variables})


def newest(args: Any) -> tuple[int, float | None]:
    """Return iteration and size of the newest checkpoint in the job's ``--save`` folder.

    Returns:
        Iteration from which the job resumes (0 if it does not load from this folder), and the checkpoint's
        size in bytes (``None`` without a manifest).
    """
    named = getattr(args, "save", None)
    if not named or "://" in str(named):
        return 0, None
    folder, goes_on = Path(named), getattr(args, "load", None) == named
    try:
        # Newest first.
        for iteration in whole_checkpoints.iterations(folder)[:1]:
            listed = manifest.read(folder / whole_checkpoints.name_of(iteration))
            return iteration if goes_on else 0, None if listed is None else float(listed.size)
    except (RunError, OSError):  # loading the checkpoint reports it
        pass
    return 0, None
