"""Captured parts of a step, from the command lines of every release and from configurations."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Set
from enum import Enum
from types import SimpleNamespace
from unittest import mock

import pytest
from packaging.version import Version

from mindspeed_dsa.megatron.graphs import (
    ATTENTION,
    EXPERTS,
    LAYER,
    MAMBA,
    MLP,
    OPTIMIZER,
    ROUTER,
    STEP,
    captured,
    refuse_graphs,
)
from mindspeed_dsa.tools.migrate import megatron_flags
from tests.support import model as job

LOCAL, ENGINE = "--cuda-graph-impl local", "--cuda-graph-impl transformer_engine"
Scope = Enum("Scope", ["full_iteration", "full_iteration_inference", "attn", "moe_router"])
OLD, NEW = ("0.12.1", "0.14.0"), ("0.16.1", "0.19.0")
"""Releases whose parsers are recorded; :func:`test_namespaces` has those between them."""
LINES: list[tuple[str, str, Set[str]]] = [
    *((release, "", set()) for release in (*OLD, *NEW)),
    *((release, "--enable-cuda-graph", LAYER) for release in OLD),
    *((release, "--enable-cuda-graph --cuda-graph-scope attn", LAYER) for release in OLD),
    *((release, "--external-cuda-graph", LAYER) for release in OLD),
    *((release, "--external-cuda-graph --cuda-graph-scope attn", {ATTENTION}) for release in OLD),
    ("0.14.0", "--enable-cuda-graph --cuda-graph-scope full_iteration", STEP),
    *((release, LOCAL, LAYER) for release in NEW),
    *((release, f"{LOCAL} --cuda-graph-scope full", LAYER) for release in NEW),
    *((release, f"{LOCAL} --cuda-graph-scope full_iteration", STEP) for release in NEW),
    # Layers with experts, too; see the last test.
    *((release, f"{LOCAL} --cuda-graph-scope attn", LAYER - {MAMBA}) for release in NEW),
    *((release, f"{LOCAL} --cuda-graph-scope mlp", {ATTENTION, MLP}) for release in NEW),
    *((release, f"{LOCAL} --cuda-graph-scope moe_router", {ROUTER}) for release in NEW),
    *(
        (release, f"{ENGINE} --cuda-graph-scope attn moe_router moe_preprocess", {ATTENTION, ROUTER})
        for release in NEW
    ),
    ("0.19.0", f"{ENGINE} --cuda-graph-modules mlp moe", {MLP, ROUTER, EXPERTS}),
    ("0.19.0", "--cuda-graph-impl full_iteration", STEP),
    ("0.16.1", "--cuda-graph-scope full_iteration", set()),
    ("0.19.0", "--cuda-graph-scope full_iteration", STEP),
    ("0.19.0", "--cuda-graph-modules full_iteration", STEP),
    ("0.19.0", "--cuda-graph-modules full_iteration_inference", set()),
    ("0.19.0", f"{LOCAL} --inference-cuda-graph-scope block", set()),
    ("0.19.0", f"{LOCAL} --inference-cuda-graph-scope layer", LAYER),
    ("0.19.0", f"{LOCAL} --inference-cuda-graph-scope block --cuda-graph-modules mlp", {ATTENTION, MLP}),
    ("0.19.0", "--optimizer-cuda-graph", {OPTIMIZER}),
    ("0.19.0", f"{LOCAL} --optimizer-cuda-graph", LAYER | {OPTIMIZER}),
]


@pytest.mark.parametrize(("release", "line", "parts"), LINES)
def test_command_lines_of_every_release(release, line, parts):
    parser = megatron_flags.add_recorded(argparse.ArgumentParser(), Version(release))
    args = parser.parse_args(line.split())
    assert captured(args) == parts
    problems = list(refuse_graphs(args, "--flag", "reason"))
    assert bool(problems) == bool(parts - {OPTIMIZER})
    graphs = line.split(" --")[0]
    for problem in problems:
        assert problem.startswith(f"--flag cannot be used with {graphs}")
        assert problem.endswith(": reason; omit one of them")


LOCALLY, BY_ENGINE = {"cuda_graph_impl": "local"}, {"cuda_graph_impl": "transformer_engine"}


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ({**LOCALLY, "cuda_graph_scope": "full_iteration"}, STEP),  # 0.15
        ({**LOCALLY, "cuda_graph_scope": "attn"}, LAYER),
        ({**BY_ENGINE, "cuda_graph_scope": "attn"}, {ATTENTION}),
        ({**LOCALLY, "cuda_graph_scope": [Scope.full_iteration]}, STEP),  # 0.16 and 0.17, validated
        ({**LOCALLY, "cuda_graph_scope": [Scope.full_iteration_inference]}, set()),
        ({**BY_ENGINE, "cuda_graph_scope": [Scope.attn]}, {ATTENTION}),
        ({**BY_ENGINE, "cuda_graph_modules": "attn,moe_router"}, {ATTENTION, ROUTER}),  # from 0.18
        ({**BY_ENGINE, "cuda_graph_modules": Scope.moe_router}, {ROUTER}),
        ({**LOCALLY, "cuda_graph_modules": [], "cuda_graph_scope": None}, LAYER),
        ({"cuda_graph_impl": "none", "cuda_graph_modules": "full"}, set()),
        ({}, set()),
    ],
)
def test_namespaces(fields, parts):
    assert captured(SimpleNamespace(**fields)) == parts


def test_a_part_that_is_not_captured_is_not_refused():
    args = SimpleNamespace(cuda_graph_impl="transformer_engine", cuda_graph_modules=["moe_router"])
    assert not list(refuse_graphs(args, "--flag", "reason", {ATTENTION}))
    (problem,) = refuse_graphs(args, "--flag", "reason", {ROUTER})
    assert "--cuda-graph-impl transformer_engine --cuda-graph-modules moe_router: reason" in problem
    (problem,) = refuse_graphs(SimpleNamespace(optimizer_cuda_graph=True), "--flag", "reason", {OPTIMIZER})
    assert problem == "--flag cannot be used with --optimizer-cuda-graph: reason; omit one of them"


@pytest.mark.releases(">=0.16")
def test_megatrons_local_graphs_of_attention_hold_experts(pool):
    (kinds,) = pool.run(f"{__name__}:captured_layers", 1)
    assert kinds == [(False, True), (True, True)]


def captured_layers() -> list[tuple[bool, bool]]:
    """Return whether each layer of a GPT model has experts, and whether a local graph is made of it."""
    job.start()
    from megatron.core.transformer import cuda_graphs

    fields = {each.name for each in dataclasses.fields(job.config())}
    names = "cuda_graph_modules" if "cuda_graph_modules" in fields else "cuda_graph_scope"
    with mock.patch.object(cuda_graphs, "CudaGraphManager"):
        cfg = job.config(cuda_graph_impl="local", moe_layer_freq=[0, 1], num_layers=2, **{names: ["attn"]})
        layers = job.gpt_model(cfg).decoder.layers
    return [(layer.is_moe_layer, hasattr(layer, "cudagraph_manager")) for layer in layers]
