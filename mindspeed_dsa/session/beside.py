"""Other libraries that change Megatron in place: which are installed, and what of them is in this process."""

from __future__ import annotations

import argparse
import ast
import contextlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType
from typing import Any

from mindspeed_dsa import features
from mindspeed_dsa.patches import Covered, compose, hooks
from mindspeed_dsa.patches.signatures import is_a
from mindspeed_dsa.settings import Settings

_NAMED = 3  # a message names so many functions


@dataclass(frozen=True)
class Patcher:
    """A library that changes Megatron in place.

    Attributes:
        name: as its users call it.
        packages: modules below which its functions are defined.
        distributions: under which it is installed.
        changes: what it puts into Megatron, and when.
        do: what a job does that wants both, or only this library.
        engine: ``module:class`` whose ``patches_info`` lists what it has patched. Such a library patches what
            this one patches, and knows flags of the same names: only one of the two can be in a process.
        flags: ``module:class`` whose ``register_features_args`` adds its flags to a parser.
        by: module whose import patches.
    """

    name: str
    packages: tuple[str, ...]
    distributions: tuple[str, ...]
    changes: str
    do: str
    engine: str = ""
    flags: str = ""
    by: str = ""


PATCHERS = (
    Patcher(
        "MindSpeed",
        ("mindspeed", "mindspeed_llm", "mindspeed_mm", "mindspeed_rl"),
        ("mindspeed", "mindspeed_llm", "mindspeed_mm", "mindspeed_rl"),
        "hundreds of functions of Megatron and torch, when mindspeed.megatron_adaptor or mindspeed_llm is "
        "imported",
        "remove `import mindspeed.megatron_adaptor` (or that of mindspeed_llm) from the training script, see "
        "docs/migrate.md, or train without mindspeed_dsa",
        engine="mindspeed.patch_utils:MindSpeedPatchesManager",
        flags="mindspeed.features_manager.features_manager:MindSpeedFeaturesManager",
        by="megatron_adaptor",
    ),
    Patcher(
        "MegatronAdaptor",
        ("megatron_adaptor",),
        ("megatron_adaptor", "megatron-adaptor"),
        "functions of Megatron and torch that fail on an NPU, when megatron_adaptor is imported",
        "remove `import megatron_adaptor` from the training script, or unset VERL_USE_MEGATRON_ADAPTOR: this "
        "library runs Megatron on NPUs itself; or train without mindspeed_dsa",
        engine="megatron_adaptor.patches.patch_manager:PatchesManager",
        flags="megatron_adaptor.features_manager.features_manager:FeaturesManager",
        by="megatron_adaptor",
    ),
    Patcher(
        "TransformerEngineNPU (TENPU)",
        ("transformer_engine_npu",),
        ("transformer_engine_npu", "transformer-engine-npu"),
        "nothing of Megatron; it is imported as transformer_engine, so that Megatron takes its layers",
        "with --transformer-impl local Megatron builds layers of its own, which features here are for",
    ),
    Patcher(
        "Liger-Kernel",
        ("liger_kernel",),
        ("liger-kernel", "liger-kernel-nightly"),
        "norms, cross entropy and SwiGLU, when apply_liger_kernel_to_megatron() is called",
        "leave that call out: --use-fused-rmsnorm and --use-fused-swiglu run Liger's kernels on GPUs too",
    ),
    Patcher(
        "Megatron-Bridge (NeMo)",
        ("megatron.bridge", "nemo", "nemo_rl", "nemo_automodel"),
        ("megatron-bridge", "nemo-toolkit", "nemo-rl"),
        "YaRN's factor and single layers of models of its own, when their modules are imported",
        "switch features on before megatron.bridge is imported, see docs/hosts/frameworks.md",
    ),
    Patcher(
        "ms-swift (mcore-bridge)",
        ("mcore_bridge", "swift"),
        ("ms-swift", "mcore-bridge"),
        "rotary embeddings, multi-token prediction and routers, when mcore_bridge is imported",
        "switch features on before mcore_bridge is imported, see docs/hosts/frameworks.md",
    ),
    Patcher(
        "verl",
        ("verl", "mbridge"),
        ("verl", "mbridge"),
        "latent attention, recomputation and routers, when a worker builds its engine, and some on request",
        "switch features on in a module of VERL_USE_EXTERNAL_MODULES, see docs/hosts/dsa-in-rl.md",
    ),
    Patcher(
        "slime",
        ("slime", "slime_plugins"),
        ("slime",),
        "routers, for the replay of routing; its layers of GLM and Qwen bring attention of their own",
        "switch features on in the module that --spec names, see docs/hosts/dsa-in-rl.md",
    ),
)


@dataclass(frozen=True)
class Presence:
    """Functions of one library in this process.

    Attributes:
        patcher: the library.
        places: names in Megatron that hold its functions, or below which they are called.
        dropped: names of which a patch of this library has replaced its function.
    """

    patcher: Patcher
    places: tuple[str, ...]
    dropped: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"library": self.patcher.name, "places": [*self.places], "dropped": [*self.dropped]}

    def __str__(self) -> str:
        said = [f"{self.patcher.name} has changed {_listed(self.places)}"] if self.places else []
        if self.dropped:
            said.append(
                f"what {self.patcher.name} had put in place of {_listed(self.dropped)} is no longer called"
            )
        return f"{'; '.join(said)}; {self.patcher.do}"


def refusal(active: bool, resolved: Settings) -> str | None:
    """Say what to do about a library that cannot share a process with this one; None without one.

    Args:
        active: whether a feature of this library is on.
        resolved: the settings, of which those are named that the other library acts on too.
    """
    patched = {each: _patched(each) for each in PATCHERS if each.engine} if active else {}
    found = {each: names for each, names in patched.items() if names}
    if not found:
        return None
    who = " and ".join(each.name for each in found)
    names = list(dict.fromkeys(name for every in found.values() for name in every))
    return (
        f"mindspeed_dsa: {who} has patched {len(names)} functions of this process ({_listed(names)}), and "
        f"only one of the two libraries can be in it{_acting_twice(found, resolved)}: "
        f"{'; '.join(each.do for each in found)}"
    )


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def _acting_twice(found: Iterable[Patcher], resolved: Settings) -> str:
    ours = {flag.name: flag.dest for flag in features.all_flags() if not flag.megatron}
    shared = sorted(ours.keys() & {name for each in found for name in _flags(each)})
    if not shared:
        return ""
    given = [name for name in shared if ours[name] in resolved.chosen()]
    if not given:
        return f" (both know {len(shared)} flags, as {', '.join(shared[:_NAMED])})"
    more = len(shared) - len(given)
    also = f", as would {more} more if they were given" if more else ""
    return f" ({', '.join(given)} would act twice{also})"


def _patched(patcher: Patcher) -> list[str]:
    """Return what an engine has patched in this process, by its own account."""
    return [str(name) for name in getattr(_loaded(patcher.engine), "patches_info", None) or ()]


def _flags(patcher: Patcher) -> list[str]:
    """Return the flags of a library that is loaded; none where it cannot say."""
    parser = argparse.ArgumentParser(add_help=False, conflict_handler="resolve")
    with contextlib.suppress(Exception):  # its own code, whose failure is not what is to be told here
        _loaded(patcher.flags).register_features_args(parser)
    return [name for action in parser._actions for name in action.option_strings]


def _loaded(dotted: str) -> Any:
    module, _, name = dotted.partition(":")
    return getattr(sys.modules.get(module), name, None)


def present(root: str, covered: Iterable[Covered] = ()) -> list[Presence]:
    """Return the libraries whose functions stand in Megatron, or did until a patch of ours replaced them.

    Args:
        root: top-level package of Megatron.
        covered: what patches of ours have found in their places.
    """
    places: dict[Patcher, list[str]] = {}
    dropped: dict[Patcher, list[str]] = {}
    for name, thing in _standing_in(root):
        if (patcher := _of(_home(thing))) is not None:
            places.setdefault(patcher, []).append(name)
    for each in covered:
        if (patcher := _of(_home(each.found))) is not None:
            (places if each.is_called else dropped).setdefault(patcher, []).append(each.name)
    return [
        Presence(each, tuple(places.get(each, ())), tuple(dropped.get(each, ())))
        for each in PATCHERS
        if each in places or each in dropped
    ]


def _standing_in(root: str) -> Iterator[tuple[str, Any]]:
    """Yield the names of Megatron's loaded modules and of their own classes, with what they hold."""
    for module, loaded in sys.modules.copy().items():
        if not module.startswith(f"{root}.") or _of(module) is not None:
            continue
        for name, thing in (hooks.namespace(loaded) or {}).copy().items():
            yield f"{module}:{name}", thing
            if is_a(thing, type) and thing.__module__ == module:
                for inner, held in vars(thing).copy().items():
                    yield f"{module}:{name}.{inner}", held


def _home(thing: Any) -> str:
    """Return the module in whose source a function or class was written; empty for anything else.

    A wrapper made with ``functools.wraps`` has the original's ``__module__``, but not its globals.
    """
    thing = compose.underlying(thing)
    if is_a(thing, partial):
        thing = thing.func
    if is_a(thing, FunctionType):
        return str(thing.__globals__.get("__name__", ""))
    return thing.__module__ if is_a(thing, type) and isinstance(thing.__module__, str) else ""


@cache
def _of(module: str) -> Patcher | None:
    for patcher in PATCHERS:
        if any(module == package or module.startswith(f"{package}.") for package in patcher.packages):
            return patcher
    return None


def installed() -> dict[Patcher, str]:
    """Return the libraries that could be imported here, each with its release; nothing is imported."""
    found = {}
    for patcher in PATCHERS:
        release = next(filter(None, map(_release, patcher.distributions)), "")
        if release or any(_exists(package) for package in patcher.packages):
            found[patcher] = release or "of unknown release"
    return found


def _release(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _exists(package: str) -> bool:
    """Return whether a package lies on the path; a folder without modules in it, as a checkout's, is none."""
    if "." in package:
        return False
    with contextlib.suppress(ImportError, ValueError):
        spec = find_spec(package)
        return spec is not None and spec.origin is not None
    return False


def imported_by(script: str) -> dict[Patcher, list[str]]:
    """Return the libraries that a script imports, each with the imports, as ``line 3: import x``.

    Args:
        script: path of a Python file; one that cannot be read imports nothing.
    """
    found: dict[Patcher, list[str]] = {}
    try:
        tree = ast.parse(Path(script).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return found
    for node in ast.walk(tree):
        for module in _imports(node):
            if (patcher := _of(module)) is not None:
                line = getattr(node, "lineno", 0)
                found.setdefault(patcher, []).append(f"line {line}: {ast.unparse(node)}")
    return found


def _imports(node: ast.AST) -> Sequence[str]:
    if isinstance(node, ast.Import):
        return [each.name for each in node.names]
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        return [node.module]
    return []


def refused_imports(found: Mapping[Patcher, Sequence[str]]) -> Iterator[str]:
    """Yield a problem for each import of a script that would patch what this library patches."""
    for patcher, lines in found.items():
        for line in lines:
            if patcher.by and patcher.by in line:
                yield f"{line}: {patcher.name} patches what this library patches; {patcher.do}"
