"""Checks of installed software, and the description of the machine that all checks read."""

from __future__ import annotations

import contextlib
import os
import resource
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from mindspeed_dsa import platforms
from mindspeed_dsa.environment import EnvironmentCheck, Finding, Installation, Level, Machine, Surroundings
from mindspeed_dsa.patches import versions
from mindspeed_dsa.patches.errors import MindSpeedDSAError
from mindspeed_dsa.platforms.host_pool import host_memory_free
from mindspeed_dsa.platforms.npu_operators import OPERATORS, product_of
from mindspeed_dsa.platforms.npu_releases import installed_cann

_SHARED_MEMORY = Path("/dev/shm")
_RDMA = Path("/sys/class/infiniband")
_IMPORTED: tuple[tuple[str, str, str], ...] = (
    ("einops", "einops", "<0.13"),  # vision models, imported by Megatron's tokenizers
    ("psutil", "psutil", ""),  # checkpoints: without it the first save fails, or hangs forever
    ("pydantic", "pydantic", ">=0.16,<0.17"),  # megatron.rl
    ("regex", "regex", "<0.17"),  # tokenizers
    ("setuptools", "setuptools", ""),
    ("six", "six", "<0.17"),  # tokenizers
    ("triton", "triton", ">=0.16,!=0.17.*"),  # imported for kernels that no job here calls
    ("yaml", "pyyaml", "<0.19"),
)
"""Module, package that provides it, and Megatron-core releases that import it."""
_HELPERS, _BUILDER = "helpers_cpp", "pybind11"


def find_copies(about: Surroundings) -> Iterator[Finding]:
    """Check for two copies of Megatron-core on the path, and for a ``megatron.training`` of another copy."""
    if len(about.machine.megatrons) < 2:
        return
    # In the order of the search path, so the first copy is imported.
    used, *hidden = about.machine.megatrons
    shown = " and ".join(map(str, hidden))
    # megatron is a namespace package: each subpackage comes from the first folder that has it.
    level: Level
    training = next((copy for copy in about.machine.megatrons if copy.has_training), used)
    if training is not used:
        level, what = "warning", f"it hides {shown}, and megatron.training, which it lacks, comes from there"
    elif any(copy.version != used.version for copy in hidden):
        level, what = "warning", f"it comes first on the path and hides {shown}"
    else:
        level, what = "note", f"it hides {shown}, whose changes, if there are any, are not run"
    do = "take the one that is not meant off PYTHONPATH, or pip uninstall megatron-core"
    yield Finding(level, f"megatron-core {used}", what, do)


def find_packages(about: Surroundings) -> Iterator[Finding]:
    """Check for missing packages that Megatron-LM imports."""
    if absent := about.machine.absent:
        yield Finding(
            "error",
            f"Megatron-LM {about.machine.release or ''}".strip(),
            f"it needs {', '.join(absent)}, which {'is' if len(absent) == 1 else 'are'} not installed",
            f"pip install {' '.join(absent)}",
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
        "megatron-lm-packages",
        "packages that Megatron-LM imports",
        "a checkout of it is used, and one of them is not installed",
        "Megatron-LM 0.12.1 to 0.19: with each of them hidden, `pretrain_gpt.py` does not begin or not save",
        ("error",),
        find_packages,
        early=True,
    ),
)


def read(
    platform: str, root: str, variables: Mapping[str, str], path: Sequence[str] | None = None
) -> Machine:
    """Collect the facts about this node that the checks read. Does not block.

    Args:
        platform: platform of the job.
        root: top-level package of Megatron.
        variables: environment variables, in which launchers state the number of ranks.
        path: search path for Megatron; ``None`` means this process's path.
    """
    local = int(variables.get("LOCAL_WORLD_SIZE", 0))
    megatrons = copies(root, path)
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
        megatrons=megatrons,
        release=megatrons[0].version if megatrons else versions.of_megatron(root),
        torch=versions.of_package("torch") if platform == "npu" else None,
        torch_npu=versions.of_package("torch_npu") if platform == "npu" else None,
        cann=installed_cann(variables) if platform == "npu" else None,
        lacking=_lacking(platform),
        devices=_devices(platform),
        absent=absent(megatrons),
        free=_free,
    )


def _has_rdma() -> bool:
    try:
        return any(_RDMA.iterdir())
    except OSError:
        return False


def _limit(name: str) -> int | None:
    """Return a soft limit, or ``None`` if there is no limit or the system does not support it."""
    if not hasattr(resource, name):
        return None
    soft, _ = resource.getrlimit(getattr(resource, name))
    return None if soft == resource.RLIM_INFINITY else soft


def _free(folder: Path) -> int | None:
    """Return the free bytes of the file system of a folder, which may not exist yet."""
    folder = folder.absolute()
    for existing in (folder, *folder.parents):
        with contextlib.suppress(OSError):
            found = os.statvfs(existing)
            return found.f_bavail * found.f_frsize
    return None


def copies(root: str, path: Sequence[str] | None = None) -> tuple[Installation, ...]:
    """Return every copy of Megatron-core on a path, without duplicates.

    Args:
        root: top-level package of Megatron.
        path: search path; ``None`` means this process's path, plus the folder of the Megatron that is already
            imported (an editable installation is on no path).
    """
    if path is not None:
        return tuple(_copies(root, path))
    # Megatron's core folder is PATH/megatron/core, so its second parent is the search path entry.
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
                # Parsed without importing it.
                version = versions.version_in_source(file.read_text(encoding="utf-8"))
                yield Installation(folder, version, (folder / root / "training").is_dir())


def _architecture(platform: str) -> int | None:
    """Return the major compute capability of the GPU, or ``None`` without a GPU."""
    if platform != "cuda":
        return None
    with contextlib.suppress(ImportError, AssertionError, RuntimeError):
        import torch

        return int(torch.cuda.get_device_capability()[0])
    return None


def _product(platform: str) -> str:
    """Return the family of the NPU, or an empty string without an NPU."""
    if platform == "npu":
        with contextlib.suppress(MindSpeedDSAError, AttributeError, RuntimeError):
            return product_of(platforms.get(platform).device_name()).name
    return ""


def _devices(platform: str) -> int | None:
    """Return the number of accelerators visible to this process, or ``None`` if unknown."""
    if platform not in ("cuda", "npu"):
        return None
    with contextlib.suppress(MindSpeedDSAError, ImportError, AttributeError, RuntimeError):
        return platforms.get(platform).device_count()
    return None


def _lacking(platform: str) -> Mapping[str, str]:
    """Return the torch_npu operators that cannot be called, with the reason; empty without an NPU."""
    try:
        if platform != "npu" or not platforms.get("npu").is_available():
            return {}
    except MindSpeedDSAError:  # other checks report it
        return {}
    from mindspeed_dsa.ops.npu.device import unavailable

    reasons = {each.name: unavailable(platform, each.name) for each in OPERATORS}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def absent(megatrons: Sequence[Installation]) -> tuple[str, ...]:
    """Return the missing packages that the Megatron-LM checkout in use needs.

    Args:
        megatrons: copies on the search path, the one in use first. A copy without ``megatron.training`` is
            not a checkout.
    """
    used = next((each for each in megatrons if each.has_training), None)
    return () if used is None else tuple(sorted(_absent_beside(used)))


def _absent_beside(checkout: Installation) -> Iterator[str]:
    for module, package, releases in _IMPORTED:
        if versions.covers(releases, checkout.version) and find_spec(module) is None:
            yield package
    # The first job builds the dataset helpers, which needs pybind11; later jobs find them built.
    helpers = _HELPERS + (sysconfig.get_config_var("EXT_SUFFIX") or ".so")
    datasets = checkout.folder / "megatron" / "core" / "datasets"
    if (
        (datasets / "Makefile").is_file()
        and not (datasets / helpers).is_file()
        and find_spec(_BUILDER) is None
    ):
        yield _BUILDER
