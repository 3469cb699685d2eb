"""Many small modules on disk that import each other's names, and patch rows for some of them."""

from __future__ import annotations

import contextlib
import importlib
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mindspeed_dsa.patches import Claim, Patch

PACKAGE = "benchmark_stubs"
IMPLEMENTATION = f"{PACKAGE}_impl"
_NAMES = 50  # names per module
_OWN = 5  # names that the template below defines
_IMPORTED = 3
_HOLDERS = 10  # modules whose tables, defaults and closures keep an original

_MODULE = '''
"""Stub {index}."""

{imports}


def scale(query, key, softmax_scale=1.0):
    """Scores."""
    total = 0.0
    for left, right in zip(query, key):
        total += left * right
    return total * softmax_scale


def mask(scores, *, topk=8):
    """The largest."""
    return sorted(scores)[-topk:]


class Layer:
    """A layer."""

    def __init__(self, size=1):
        self.size = size

    def forward(self, hidden_states, attention_mask=None):
        """Pass on."""
        return hidden_states if attention_mask is None else attention_mask

    @staticmethod
    def build(size=1):
        """Make one."""
        return Layer(size)


LIMIT = {index}
{holder}
{constants}
'''

_IMPL = """
def through(original):
    def wrapper(*args, **kwargs):
        return original(*args, **kwargs)

    return wrapper


def scale(query, key, softmax_scale=1.0):
    return softmax_scale


LIMIT = -1
"""
_HOLDING = (
    "USE = {'score': score}",
    "def use(query, key, function=score): return function(query, key)",
    "USE = (lambda function: lambda: function)(score)",
)
# Kinds of sites, in turn: target below the module, kind, implementation, parameters relied on.
_SITES = (
    ("scale", "wrap", "through", ("query", "key")),
    ("Layer.forward", "wrap", "through", ("hidden_states",)),
    ("mask", "wrap", "through", ("scores",)),
    ("Layer.build", "wrap", "through", ("size",)),
    ("scale", "replace", "scale", ("softmax_scale",)),
    ("LIMIT", "value", "LIMIT", ()),
)


@dataclass(frozen=True)
class Stubs:
    """Packages written by :func:`on_disk`."""

    folder: Path
    modules: list[str]
    claims: list[Claim]

    def load(self) -> None:
        """Import all modules."""
        for name in self.modules:
            importlib.import_module(name)


@contextlib.contextmanager
def on_disk(modules: int, sites: int) -> Iterator[Stubs]:
    """Write the stubs to a temporary folder and put it on the path.

    Args:
        modules: number of modules, of 50 names each.
        sites: number of modules with a patch site, spread evenly. For each of the first ten, a table, a
            default argument or a closure of another module keeps the original, so that a search for stale
            references has results; those sites only report.
    """
    folder = Path(tempfile.mkdtemp(prefix="mindspeed_dsa-benchmark-"))
    sys.path.insert(0, str(folder))
    written, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        names = _write(folder, modules, sites)
        yield Stubs(folder, names, [_claim(names[i * (modules // sites)], i) for i in range(sites)])
    finally:
        sys.dont_write_bytecode = written
        sys.path.remove(str(folder))
        for name in [name for name in sys.modules if name.partition(".")[0] in (PACKAGE, IMPLEMENTATION)]:
            del sys.modules[name]
        shutil.rmtree(folder, ignore_errors=True)


def _write(folder: Path, modules: int, sites: int) -> list[str]:
    package = folder / PACKAGE
    package.mkdir()
    (package / "__init__.py").touch()
    (folder / f"{IMPLEMENTATION}.py").write_text(_IMPL, encoding="utf-8")
    step = modules // sites
    for index in range(modules):
        # Every module imports three names of the preceding module with a site, as consumers do.
        source = f"{PACKAGE}.m{index // step * step}"
        mine = index % step == 0
        imports = "" if mine else f"from {source} import Layer as Base, mask as select, scale as score"
        holds = index % step == 1 and index // step < _HOLDERS
        holder = _HOLDING[index // step % len(_HOLDING)] if holds else "SPARE = None"
        constants = "\n".join(f"C{i} = {i}" for i in range(_NAMES - _OWN - (0 if mine else _IMPORTED)))
        text = _MODULE.format(index=index, imports=imports, holder=holder, constants=constants)
        (package / f"m{index}.py").write_text(text, encoding="utf-8")
    return [f"{PACKAGE}.m{index}" for index in range(modules)]


def _claim(module: str, index: int) -> Claim:
    path, kind, implementation, params = _SITES[0] if index < _HOLDERS else _SITES[index % len(_SITES)]
    row = Patch(
        f"{module}:{path}",
        kind,  # type: ignore[arg-type]
        f"{IMPLEMENTATION}:{implementation}",
        "benchmark",
        params=params,
        stale="report" if index < _HOLDERS else "error",
    )
    return Claim(f"feature-{index}", row, index)
