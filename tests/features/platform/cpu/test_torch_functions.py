"""torch itself keeps working under the CPU platform's redirections."""

from __future__ import annotations

import copy
import io
import os
import pickle
import shutil
import sys

import pytest
import torch
import torch.utils.checkpoint
from torch.utils.data import DataLoader, TensorDataset

from tests.features.platform.cpu import afresh


def test_compiled_functions_of_the_user_still_compile(redirected):
    seen = []

    def backend(graph, inputs):
        seen.append(graph)
        return graph

    def function(x: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(3, device="cuda").type_as(x)
        return x.to("cuda").cuda() * 2 + mask + torch.arange(3, device=torch.cuda.current_device())

    compiled = torch.compile(function, fullgraph=True, backend=backend)
    assert torch.equal(compiled(torch.ones(3)), torch.tensor([2.0, 3.0, 4.0]))
    assert len(seen) == 1


@pytest.mark.full
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler")
def test_inductor_still_finds_its_way(redirected):
    compiled = torch.compile(lambda x: torch.relu(x) + torch.ones(3, device="cuda"), fullgraph=True)
    assert torch.equal(compiled(torch.tensor([-1.0, 0.0, 1.0])), torch.tensor([1.0, 1.0, 2.0]))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_scripted_functions_still_know_the_factories(redirected):
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.zeros(2) + torch.ones_like(x) + x

    assert torch.equal(torch.jit.script(function)(torch.ones(2)), torch.full((2,), 2.0))


def test_the_device_context_still_reaches_the_factories(redirected):
    with torch.device("meta"):
        assert torch.zeros(2).device.type == "meta"
        assert torch.tensor(1.0).device.type == "meta"


def test_a_torch_without_torchscript_has_no_table_to_fill(monkeypatch):
    from mindspeed_dsa.features.platform.cpu import torch_functions

    filled = []
    monkeypatch.setattr(torch.utils._device, "_device_constructors", lambda: filled.append("constructors"))
    monkeypatch.setitem(sys.modules, "torch.jit._builtins", None)  # an ImportError, as in a torch without it
    torch_functions.fill_tables()
    assert filled == ["constructors"]
    monkeypatch.delattr(torch.utils._device, "_device_constructors")
    torch_functions.fill_tables()


@pytest.mark.full
def test_tables_filled_while_redirected_serve_afterwards(tmp_path):
    # torch fills look-up tables on first use. In a fresh process, that happens under the redirections.
    (tmp_path / "functions.py").write_text(
        "import torch\n"
        "def plus(x: torch.Tensor) -> torch.Tensor:\n    return torch.zeros(2) + torch.ones_like(x) + x\n"
        "def minus(x: torch.Tensor) -> torch.Tensor:\n    return torch.zeros(2) + torch.ones_like(x) - x\n"
    )
    afresh.run(
        """
        import torch, mindspeed_dsa
        from functions import minus, plus

        def on_meta():
            with torch.device("meta"):
                return torch.zeros(2).device.type

        def compiled(function):
            torch._dynamo.reset()
            return torch.compile(function, fullgraph=True, backend=lambda graph, inputs: graph)

        with mindspeed_dsa.enabled(mindspeed_platform="cpu"):
            assert torch.jit.script(plus)(torch.ones(2)).sum() == 4
            assert compiled(plus)(torch.ones(2)).sum() == 4
            assert on_meta() == "meta"
        assert torch.jit.script(minus)(torch.ones(2)).sum() == 0
        assert compiled(minus)(torch.ones(2)).sum() == 0
        assert on_meta() == "meta"
        with mindspeed_dsa.enabled(mindspeed_platform="cpu"):
            assert compiled(plus)(torch.ones(2)).sum() == 4
        """,
        PYTHONPATH=f"{tmp_path}{os.pathsep}{os.getcwd()}",
    )


def test_a_loader_with_pin_memory_works(redirected):
    loader = DataLoader(TensorDataset(torch.arange(6.0)), batch_size=2, pin_memory=True, num_workers=1)
    assert [batch.tolist() for (batch,) in loader] == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_replays_dropout(redirected, reentrant):
    x = torch.ones(64, requires_grad=True)

    def block(value: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(value, 0.5) * value

    torch.manual_seed(3)
    out = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=reentrant, preserve_rng_state=True)
    torch.rand(7)
    out.sum().backward()
    assert torch.equal(x.grad, 2 * out.detach())  # d(m x^2)/dx = 2 m at x = 1: the same mask twice
    assert 0 < int((out == 0).sum()) < 64


def test_forked_generators_come_back(redirected):
    torch.manual_seed(5)
    with torch.random.fork_rng():
        torch.rand(3)
    first = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(first, torch.rand(3))


def test_tensors_copy_pickle_and_load(redirected):
    tensor = torch.nn.Parameter(torch.ones(2, device="cuda"))
    assert torch.equal(copy.deepcopy(tensor), tensor)
    assert torch.equal(pickle.loads(pickle.dumps(tensor)), tensor)
    file = io.BytesIO()
    torch.save({"weight": tensor, "make": torch.zeros}, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)["weight"], tensor)
