"""Triton kernels compiled for a GPU that is not present, and the assembler's results."""

from __future__ import annotations

import contextlib
import io
import json
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from mindspeed_dsa.ops.triton.launch import rehearsal

# Bytes of shared memory available to a program, by ten times the compute capability.
SHARED_MEMORY = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
_TOOL = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
# Patterns in the assembly; the last are products of warp groups, of tensor memory, and of warps.
_INSTRUCTIONS = {
    "waits": r"\bWARPGROUP\.DEPBAR\b",
    "wgmma": r"\b[HQ]GMMA\.",
    "tcgen05": r"\bUTC\w*MMA\b",
    "mma": r"\b[HQ]MMA\.",
}
_PTX = {"async_copies": r"cp\.async\.c[ag]", "vector_atomics": r"\b(?:red|atom)\.[a-z0-9.]*v4\.f32"}
# Shape of a warp group's product, and whether its first operand comes from registers.
_WGMMA = re.compile(r"wgmma\.mma_async\S*\.m64n(\d+)k(\d+)\S*\s*\{[^}]*\},\s*(\{)?")


@dataclass(frozen=True)
class Kernel:
    """One kernel in one configuration, compiled for one target."""

    target: int
    """Ten times the compute capability."""
    name: str
    constants: dict[str, Any]
    """Constants of the source by name, without flags of the compiler."""
    shared: int
    """Bytes of shared memory of a program."""
    registers: int
    """Registers of a thread."""
    spilled: int
    """Bytes of a thread's stack: values that did not fit into registers."""
    warps: int
    waits: int
    """Waits for products of warp groups; if each product has one, they run one at a time."""
    wgmma: int
    tcgen05: int
    mma: int
    async_copies: int
    vector_atomics: int
    products: dict[str, int]
    """Number of occurrences of each shape of wgmma, for example ``n32k16 from registers``."""
    advisories: list[str]
    """Numbers of the assembler's C7xxx advisories; C75xx report products that do not overlap."""


class Absent:
    """Stand-in for the driver that Triton queries before a launch."""

    def __init__(self, target: int) -> None:
        self._target = GPUTarget("cuda", target, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        # Kernels are cached by device: one for each target.
        return int(self._target.arch)

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


@contextlib.contextmanager
def without(known: Collection[str]) -> Iterator[dict[str, str]]:
    """Skip compiling kernels with known fingerprints; yield the names of all kernels by fingerprint."""
    fingerprints: dict[str, str] = {}

    def is_known(*, fn: Any, compile: Mapping[str, Any], **_: Any) -> bool:
        name = fn.name.rpartition(".")[2]
        own = _fingerprint(fn.jit_function.cache_key, compile["specialization_data"])
        fingerprints[own] = name
        return own in known

    before = knobs.runtime.jit_cache_hook
    knobs.runtime.jit_cache_hook = is_known
    try:
        yield fingerprints
    finally:
        knobs.runtime.jit_cache_hook = before


def _fingerprint(source: str, specialization: str) -> str:
    """Return a hash of a kernel's source with all that it calls, its specialization, and the compiler."""
    data = json.loads(specialization)
    options = {key: value for key, value in data["options"].items() if key != "extern_libs"}  # paths
    kinds = {key: data[key] for key in sorted(data) if key not in ("options", "key")}
    return sha256(json.dumps([triton.__version__, source, options, kinds]).encode()).hexdigest()[:16]


def compiled(
    target: int, calls: Iterable[tuple[str, Callable[[], object]]], each: bool = False
) -> Iterator[tuple[str, Kernel]]:
    """Yield every kernel that the calls launch, once, with the words of its call.

    Args:
        target: ten times the compute capability; a key of :data:`SHARED_MEMORY`.
        calls: pairs of words, and a function that makes the call on tensors without memory.
        each: whether to yield a kernel for every call that launches it.
    """
    driver.set_active(Absent(target))
    knobs.nvidia.dump_ptxas_log = True
    seen: set[str] = set()
    for words, call in calls:
        if each:
            seen.clear()
        found: list[Kernel] = []
        log = io.StringIO()

        def visit(kernel: Any, found: list[Kernel] = found, log: io.StringIO = log) -> None:
            if kernel is not None and kernel.hash not in seen:
                seen.add(kernel.hash)
                found.append(_described(target, kernel, log.getvalue()))
            log.seek(0)
            log.truncate()

        with contextlib.redirect_stdout(log), rehearsal(target, visit):
            call()
        for kernel in found:
            yield words, kernel


def _described(target: int, kernel: Any, log: str) -> Kernel:
    """Return a kernel's description, from a file next to Triton's cache if it was described before."""
    # A kernel from Triton's cache comes without the assembler's log.
    kept = Path(knobs.cache.dir) / "described" / f"{kernel.hash}.json"
    if kept.exists():
        return Kernel(**json.loads(kept.read_text()))
    assert "ptxas" in log, (
        f"{kernel.metadata.name} was compiled before without a look: clear {knobs.cache.dir}"
    )
    description = Kernel(
        target=target,
        name=kernel.metadata.name,
        constants=_constants(kernel.src),
        warps=kernel.metadata.num_warps,
        shared=kernel.metadata.shared,
        **_of_binary(kernel.asm["cubin"]),
        **{name: len(re.findall(pattern, kernel.asm["ptx"])) for name, pattern in _PTX.items()},
        products=_products(kernel.asm["ptx"]),
        advisories=sorted(set(re.findall(r"\bC7\d{3}\b", log))),
    )
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps(asdict(description)))
    return description


def _of_binary(binary: bytes) -> dict[str, int]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(binary)
        usage, assembly = (
            subprocess.run([_TOOL, option, path], capture_output=True, text=True, check=True).stdout
            for option in ("--dump-resource-usage", "--dump-sass")
        )
    # The kernels declare no arrays of their own: the stack holds only values that did not fit into registers.
    match = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert match is not None, usage
    counts = {name: len(re.findall(pattern, assembly)) for name, pattern in _INSTRUCTIONS.items()}
    return {"registers": int(match[1]), "spilled": int(match[2]), **counts}


def _products(ptx: str) -> dict[str, int]:
    shapes = (
        f"n{columns}k{inner} from {'registers' if registers else 'memory'}"
        for columns, inner, registers in _WGMMA.findall(ptx)
    )
    return dict(Counter(shapes))


def _constants(source: Any) -> dict[str, Any]:
    names = source.fn.arg_names
    return {
        names[path[0]]: value
        for path, value in source.constants.items()
        if names[path[0]].isupper() and isinstance(value, int | str)
    }
