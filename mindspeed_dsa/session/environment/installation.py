"""Checks of what is installed, and the reading of the machine that all checks ask."""

from __future__ import annotations

import contextlib
import os
import resource
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from packaging.version import InvalidVersion, Version

from mindspeed_dsa import platforms
from mindspeed_dsa.environment import EnvironmentCheck, Finding, Installation, Level, Machine, Surroundings
from mindspeed_dsa.patches import versions
from mindspeed_dsa.patches.errors import MindSpeedDSAError
from mindspeed_dsa.platforms.host_pool import host_memory_free
from mindspeed_dsa.platforms.npu_operators import product_of

_SHARED_MEMORY = Path("/dev/shm")
_RDMA = Path("/sys/class/infiniband")


def find_copies(about: Surroundings) -> Iterator[Finding]:
    """Yield a Megatron-core that hides another one, or runs beneath the training loop of another one."""
    if len(about.machine.megatrons) < 2:
        return
    used, *hidden = about.machine.megatrons
    shown = " and ".join(map(str, hidden))
    # megatron is a namespace package: each part of it comes from the first folder that has that part.
    level: Level
    training = next((each for each in about.machine.megatrons if each.has_training), used)
    if training is not used:
        level, what = "warning", f"it hides {shown}, and megatron.training, which it lacks, comes from there"
    elif any(each.version != used.version for each in hidden):
        level, what = "warning", f"it comes first on the path and hides {shown}"
    else:
        level, what = "note", f"it hides {shown}, whose changes, if there are any, are not run"
    do = "take the one that is not meant off PYTHONPATH, or pip uninstall megatron-core"
    yield Finding(level, f"megatron-core {used}", what, do)


def find_torch_npu(about: Surroundings) -> Iterator[Finding]:
    """Yield a torch_npu that was built for another torch."""
    torch, torch_npu = about.machine.torch, about.machine.torch_npu
    if not torch or not torch_npu:
        return
    try:
        wanted, built_for = Version(torch).release[:3], Version(torch_npu).release[:3]
    except InvalidVersion:
        return
    if wanted != built_for:
        release = ".".join(map(str, wanted))
        yield Finding(
            "error",
            f"torch_npu {torch_npu}",
            f"it was built for another torch than {torch}, whose C++ interfaces differ",
            f"pip install 'torch_npu=={release}.*'",
        )


CHECKS = (
    EnvironmentCheck(
        "two-megatrons",
        "the search path of Python",
        "two copies of Megatron-core lie on it; a warning where their releases differ, or where the one that "
        "is not used has `megatron.training`",
        "Python's import system",
        ("warning", "note"),
        find_copies,
    ),
    EnvironmentCheck(
        "torch-npu-release",
        "torch, torch_npu",
        "torch_npu is of another release than torch",
        "torch_npu, its table of releases",
        ("error",),
        find_torch_npu,
        platforms=("npu",),
    ),
)


def read(
    platform: str, root: str, variables: Mapping[str, str], path: Sequence[str] | None = None
) -> Machine:
    """Look at this node, without waiting for anything.

    Args:
        platform: of the job.
        root: top-level package of Megatron.
        variables: the environment, in which launchers say how many ranks there are.
        path: on which the job looks for Megatron; None: the one of this process.
    """
    local = int(variables.get("LOCAL_WORLD_SIZE", 0))
    found = copies(root, path)
    return Machine(
        processors=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        local_ranks=local,
        world=int(variables.get("WORLD_SIZE", local)),
        architecture=_architecture(platform),
        product=_product(platform),
        open_files=_limit("RLIMIT_NOFILE"),
        locked_memory=_limit("RLIMIT_MEMLOCK"),
        shared_memory=_free(_SHARED_MEMORY) if _SHARED_MEMORY.is_dir() else None,
        memory=host_memory_free(),
        infiniband=_has_rdma(),
        megatrons=found,
        release=found[0].version if found else versions.of_megatron(root),
        torch=versions.of_package("torch") if platform == "npu" else None,
        torch_npu=versions.of_package("torch_npu") if platform == "npu" else None,
        free=_free,
    )


def _has_rdma() -> bool:
    try:
        return any(_RDMA.iterdir())
    except OSError:
        return False


def _limit(name: str) -> int | None:
    """Return a soft limit; None where there is none, or where the system does not know it."""
    if not hasattr(resource, name):
        return None
    soft, _ = resource.getrlimit(getattr(resource, name))
    return None if soft == resource.RLIM_INFINITY else soft


def _free(folder: Path) -> int | None:
    """Return the bytes that are free where a folder is, or will be made."""
    folder = folder.absolute()
    for each in (folder, *folder.parents):
        with contextlib.suppress(OSError):
            found = os.statvfs(each)
            return found.f_bavail * found.f_frsize
    return None


def copies(root: str, path: Sequence[str] | None = None) -> tuple[Installation, ...]:
    """Return every copy of Megatron-core on a path, each folder once.

    Args:
        root: top-level package of Megatron.
        path: to be searched; None: the one of this process, and where it has Megatron from, since an editable
            installation is on no path.
    """
    if path is not None:
        return tuple(_copies(root, path))
    loaded = getattr(sys.modules.get(f"{root}.core"), "__path__", ())
    return tuple(_copies(root, [*sys.path, *(str(Path(each).parent.parent) for each in loaded)]))


def _copies(root: str, path: Sequence[str]) -> Iterator[Installation]:
    seen = set()
    for entry in path:
        folder = Path(entry or ".").absolute()
        file = folder / root / "core" / "package_info.py"
        with contextlib.suppress(OSError, SyntaxError):
            if file.is_file() and (real := file.resolve()) not in seen:
                seen.add(real)
                version = versions.version_in_source(file.read_text(encoding="utf-8"))
                yield Installation(folder, version, (folder / root / "training").is_dir())


def _architecture(platform: str) -> int | None:
    """Return the major compute capability of the GPU; None where there is none to ask."""
    if platform != "cuda":
        return None
    with contextlib.suppress(ImportError, AssertionError, RuntimeError):
        import torch

        return int(torch.cuda.get_device_capability()[0])
    return None


def _product(platform: str) -> str:
    """Return the family of the NPU; empty where there is none to ask."""
    if platform == "npu":
        with contextlib.suppress(MindSpeedDSAError, AttributeError, RuntimeError):
            return product_of(platforms.get(platform).device_name()).name
    return ""
