"""Overhead of the patch engine: per call, and at arming, checking and verification; with all features off."""

from __future__ import annotations

import gc
import os
import statistics
import subprocess
import sys
import time
import timeit
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks import stub_packages
from benchmarks.registry import Metrics
from mindspeed_dsa.patches import Claim, Patch, PatchManager
from mindspeed_dsa.patches.drift import Checker
from mindspeed_dsa.patches.manager import StaticCheck
from mindspeed_dsa.patches.site import load
from mindspeed_dsa.patches.source_tree import SourceTree

_IMPORT = """
import sys, time
started = time.perf_counter()
import mindspeed_dsa
for name in mindspeed_dsa.__all__:  # they are loaded when first used
    getattr(mindspeed_dsa, name)
print((time.perf_counter() - started) * 1000)
assert "torch" not in sys.modules, "importing mindspeed_dsa loaded torch"
"""


def run(device: str) -> Metrics:
    """Return all metrics of the case; ``device`` does not matter."""
    del device
    return {
        "call_ratio": call_ratio(calls=100_000, rounds=31),
        **engine_ms(modules=2000, sites=200, rounds=7),
        "import_ms": import_ms(rounds=7),
        **changed_when_off(),
    }


def call_ratio(calls: int, rounds: int) -> float:
    """Return the time per call of a patched function over the same closure written by hand.

    Args:
        calls: calls per round.
        rounds: rounds of each function.
    """
    with stub_packages.on_disk(modules=1, sites=1) as stubs:
        stubs.load()
        target = sys.modules[stubs.modules[0]]
        through = f"{stub_packages.IMPLEMENTATION}:through"
        closure = load(through)(target.mask)
        manager = PatchManager()
        row = Patch(f"{target.__name__}:mask", "wrap", through, "benchmark")
        manager.plan([Claim("call", row)])
        manager.arm()
        functions = {"closure": closure, "patched": target.mask}
        timers = {name: timeit.Timer("f(x)", globals={"f": f, "x": ()}) for name, f in functions.items()}
        # Interleave the rounds, so that both functions see the same state of the machine.
        seconds: dict[str, list[float]] = {name: [] for name in timers}
        for _ in range(rounds):
            for name, timer in timers.items():
                seconds[name].append(timer.timeit(calls))
        manager.undo()
    return statistics.median(seconds["patched"]) / statistics.median(seconds["closure"])


def engine_ms(modules: int, sites: int, rounds: int) -> Metrics:
    """Return milliseconds to plan, arm and apply; to check; and to finalize; medians of several rounds.

    Args:
        modules: number of stub modules, of 50 names each, all imported.
        sites: number of patch sites among them, with known fingerprints.
        rounds: number of rounds; each plans again and undoes.
    """
    taken: dict[str, list[float]] = {"arm_200_ms": [], "check_200_ms": [], "finalize_200_ms": []}
    with stub_packages.on_disk(modules, sites) as stubs:
        stubs.load()
        for _ in range(rounds):
            manager = PatchManager(static_check=_static_check(stubs))
            arming = _ms(lambda m=manager: m.plan(stubs.claims))
            taken["check_200_ms"].append(_ms(manager.check))
            taken["arm_200_ms"].append(arming + _ms(manager.arm))
            # Include the search that only doctor does: the most expensive form.
            taken["finalize_200_ms"].append(_ms(partial(manager.finalize, thorough=True)))
            _require_all_applied(manager)
            manager.undo()
    return {name: statistics.median(values) for name, values in taken.items()}


def _static_check(stubs: stub_packages.Stubs) -> StaticCheck:
    """Return a checker that has read no source yet, and knows the fingerprints of all targets."""
    root = stub_packages.PACKAGE
    recorder = Checker(SourceTree(), root=root, original_root=root)
    known = {c.patch.label: {"1.0": recorder.inspect(c.patch).fingerprint} for c in stubs.claims}
    return Checker(SourceTree(), "1.0", known, root, root)


def _require_all_applied(manager: PatchManager) -> None:
    """Raise unless the patches are in place."""
    reports = manager.report()
    wrong = [site.target for site in reports if site.state != "applied" or site.notes]
    held = sum(bool(site.stale) for site in reports)
    names = sum(site.rebound for site in reports)
    print(f"{len(reports)} sites, {names} names rebound, {held} originals held elsewhere", file=sys.stderr)
    if wrong or not held or not names:
        raise RuntimeError(f"the measured patches are not in place: {wrong}, {held} held, {names} rebound")


def import_ms(rounds: int) -> float:
    """Return milliseconds to import ``mindspeed_dsa`` and all its public names; median of fresh processes."""
    return statistics.median(float(_in_fresh_process("-c", _IMPORT)) for _ in range(rounds))


def changed_when_off() -> Metrics:
    """Return ``patched_when_off`` and ``platform_sites``, see :mod:`benchmarks.off_snapshot`."""
    script = Path(__file__).with_name("off_snapshot.py")
    changed, platform_sites = _in_fresh_process("-W", "ignore", str(script)).split()[-2:]
    return {"patched_when_off": int(changed), "platform_sites": int(platform_sites)}


def _in_fresh_process(*arguments: str) -> str:
    root = str(Path(__file__).parents[1])
    code = [sys.executable, *arguments]
    done = subprocess.run(
        code, cwd=root, env=_environment(root), stdout=subprocess.PIPE, text=True, check=True
    )
    return done.stdout


def _environment(root: str) -> dict[str, str]:
    """Return the environment, with this checkout importable and without our switches."""
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    clean = {key: value for key, value in os.environ.items() if not key.startswith("MINDSPEED_DSA_")}
    return {**clean, "PYTHONPATH": os.pathsep.join(paths)}


def _ms(function: Callable[[], object]) -> float:
    """Return milliseconds of one call without garbage collection, as timeit does."""
    # A full collection takes as long as the process has objects: it may collect syntax trees of an earlier
    # check.
    gc.collect()
    gc.disable()
    try:
        started = time.perf_counter()
        function()
        return (time.perf_counter() - started) * 1000
    finally:
        gc.enable()
