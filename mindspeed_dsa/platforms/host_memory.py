"""How much memory the host and this process have, in bytes."""

from __future__ import annotations

import contextlib
import os
import resource
import sys

from mindspeed_dsa.platforms.base import MemoryFigures


def _kilobytes(path: str, key: str) -> int | None:
    """Bytes of a ``key: 123 kB`` line below ``/proc``; ``None`` where there is no such file."""
    try:
        with open(path, encoding="ascii", errors="replace") as lines:
            for line in lines:
                if line.startswith(f"{key}:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def _lifetime_peak() -> int:
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss: bytes on macOS, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def process_memory() -> MemoryFigures:
    """Resident set of this process, its peak, and the host's memory.

    Linux reports all of it. Elsewhere only the peak since the start of the process is known, which is
    then reported as the current figure too: it is the nearest upper bound.
    """
    peak = _kilobytes("/proc/self/status", "VmHWM") or _lifetime_peak()
    current = _kilobytes("/proc/self/status", "VmRSS") or peak
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    free = _kilobytes("/proc/meminfo", "MemAvailable") or max(total - current, 0)
    # The kernel counts lazily: the high-water mark may lag behind the current figure by some pages.
    return MemoryFigures(current=current, peak=max(peak, current), total=total, free=free)


_CGROUP = "/sys/fs/cgroup"


def host_memory_free() -> int:
    """Bytes of host memory that this process could still get: the system's, or its container's if less."""
    free = process_memory().free
    with contextlib.suppress(OSError, ValueError):  # no container, or one without a limit ("max")
        figures = []
        for name in ("memory.max", "memory.current"):
            with open(f"{_CGROUP}/{name}", encoding="ascii") as file:
                figures.append(int(file.read()))
        limit, current = figures
        with open(f"{_CGROUP}/memory.stat", encoding="ascii") as file:
            lines = dict(line.split() for line in file)
        free = min(free, limit - current + int(lines.get("inactive_file", 0)))  # files give way
    return max(free, 0)


def reset_peak_memory() -> None:
    """Let the peak start again; where the system does not allow it, the peak stays that of the process."""
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w", encoding="ascii") as control:
        control.write("5")  # proc(5): 5 resets VmHWM to the current resident set
