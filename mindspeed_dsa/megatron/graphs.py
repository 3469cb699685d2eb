"""Parts of a training step that a job runs as CUDA graphs, by the arguments of every Megatron release.

A replay repeats the kernels of the capture with their addresses and sizes, and runs no Python. So a captured
part must have static shapes, must not synchronise with the host, and must decide nothing on the host that can
differ between steps. A feature refuses graphs of the parts in which it breaks one of these rules.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from typing import Any

from mindspeed_dsa.megatron.configuration import argument

ATTENTION, MLP, ROUTER, EXPERTS, MAMBA = "attention", "MLP", "router", "experts", "Mamba"
"""Parts of layers, each with its norm; the router's part includes the shared expert."""
REST = "rest"
"""Embedding, output layer, loss and schedule: the rest of forward and backward of a step."""
OPTIMIZER = "optimizer"
LAYER = frozenset((ATTENTION, MLP, ROUTER, EXPERTS, MAMBA))
STEP = LAYER | {REST}
"""Forward and backward."""

# --cuda-graph-impl local captures a whole layer of the kind whose part is named, and the router alone. In GPT
# models layers with experts are of the kind `attn`: Megatron leaves out those of hybrid models alone.
_LOCAL = {
    "attn": frozenset((ATTENTION, MLP, ROUTER, EXPERTS)),
    "mlp": frozenset((ATTENTION, MLP)),
    "moe": frozenset((ATTENTION, ROUTER, EXPERTS)),
    "moe_router": frozenset((ROUTER,)),
    "moe_preprocess": frozenset((ROUTER,)),
    "mamba": frozenset((MAMBA,)),
}
_TRANSFORMER_ENGINE = {
    "attn": frozenset((ATTENTION,)),
    "mlp": frozenset((MLP,)),
    "moe": frozenset((ROUTER, EXPERTS)),
    "moe_router": frozenset((ROUTER,)),
    "moe_preprocess": frozenset((ROUTER,)),
    "mamba": frozenset((MAMBA,)),
}
_FULL_ITERATION = "full_iteration"


def captured(args: Any) -> Set[str]:
    """Return the parts of a training step that run as CUDA graphs.

    Args:
        args: job's arguments or a configuration, of any release and before or after Megatron's validation.
            0.12.1 to 0.14: ``--enable-cuda-graph`` or ``--external-cuda-graph``, with ``--cuda-graph-scope``.
            From 0.15: ``--cuda-graph-impl`` with ``--cuda-graph-scope``; from 0.18: ``--cuda-graph-modules``.
            From 0.17: ``--optimizer-cuda-graph``. From 0.18: ``--inference-cuda-graph-scope``.

    Returns:
        Subset of :data:`STEP` and :data:`OPTIMIZER`; empty without graphs in training.
    """
    optimizer = frozenset((OPTIMIZER,)) if argument(args, "optimizer_cuda_graph") else frozenset()
    return _of_step(args) | optimizer


def _of_step(args: Any) -> Set[str]:
    implementation, names = _implementation(args), _names(args)
    # From 0.18 the name of the full iteration sets the implementation.
    sets = _FULL_ITERATION in names and argument(args, "cuda_graph_modules") is not None
    if implementation == "none" and not sets:
        return frozenset()
    if _FULL_ITERATION in (implementation, *names):
        return STEP
    # Up to 0.15, whose scope is one word, local graphs are of whole layers whatever the scope.
    by_word = isinstance(argument(args, "cuda_graph_scope"), str)
    # From 0.18 local graphs of this scope are of inference alone, unless modules are named.
    scope = argument(args, "inference_cuda_graph_scope")
    if not names and implementation == "local" and getattr(scope, "name", scope) == "block":
        return frozenset()
    if not names or (implementation == "local" and by_word):
        return LAYER
    by_name = _LOCAL if implementation == "local" else _TRANSFORMER_ENGINE
    # Other names are of graphs for inference.
    return frozenset().union(*(by_name.get(name, frozenset()) for name in names))


def refuse_graphs(args: Any, flag: str, why: str, parts: Set[str] = STEP) -> Iterator[str]:
    """Yield a problem if the job runs one of these parts as a CUDA graph.

    Args:
        args: see :func:`captured`.
        flag: feature's flag.
        why: reason, as the end of a sentence.
        parts: parts in which the feature cannot be captured.
    """
    found = captured(args) & parts
    if found:
        asked = "--optimizer-cuda-graph" if found <= {OPTIMIZER} else _flags(args)
        yield f"{flag} cannot be used with {asked}: {why}; omit one of them"


def _implementation(args: Any) -> str:
    if argument(args, "external_cuda_graph"):
        return "transformer_engine"
    if argument(args, "enable_cuda_graph"):
        return "local"
    return argument(args, "cuda_graph_impl") or "none"


def _names(args: Any) -> list[str]:
    """Return the names of captured modules; an empty list stands for whole layers."""
    for name in ("cuda_graph_modules", "cuda_graph_scope", "cuda_graph_scope_deprecated"):
        given = argument(args, name) or ()
        several = given.split(",") if isinstance(given, str) else given
        several = several if isinstance(several, (list, tuple)) else [several]
        names = [str(getattr(one, "name", one)) for one in several]
        if names and names != ["full"]:
            return names
    return []


def _flags(args: Any) -> str:
    """Return the flags that ask for graphs of forward and backward."""
    for name in ("enable_cuda_graph", "external_cuda_graph"):
        if argument(args, name):
            return f"--{name.replace('_', '-')}"
    names, implementation = _names(args), _implementation(args)
    flag = "--cuda-graph-modules" if argument(args, "cuda_graph_modules") else "--cuda-graph-scope"
    words = [] if implementation == "none" else ["--cuda-graph-impl", implementation]
    return " ".join((*words, *([flag, *names] if names else ())))
