from __future__ import annotations

import logging
import sys

import pytest
import torch

from mindspeed_dsa import log
from mindspeed_dsa.ops import backend
from mindspeed_dsa.ops.backend import BackendUnavailable, ShapeClass, choose
from mindspeed_dsa.ops.lightning_indexer import lightning_indexer, selected_scores
from tests.ops.random_inputs import indexer_inputs
from tests.support import warm

CPU = ShapeClass("cpu", torch.float32, (("heads", 4), ("head_dim", 16), ("topk", 8)))
original_import = backend.import_module
GPU = ShapeClass("cuda", torch.float32, CPU.sizes)


def warnings_of(caplog):
    return [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.fixture(autouse=True)
def fresh_choices(monkeypatch):
    monkeypatch.setattr(logging.getLogger(log.NAME), "propagate", True)  # caplog listens at the root logger
    choose.cache_clear()
    log.forget()
    yield
    choose.cache_clear()
    log.forget()


@pytest.mark.parametrize("operator", ["lightning_indexer", "sparse_flash_attention", "indexer_kl_loss"])
def test_each_operator_has_its_backends(operator):
    assert choose(operator, "auto", CPU).__name__ == f"mindspeed_dsa.ops.{operator}.cpu"
    assert choose(operator, "reference", GPU).__name__ == f"mindspeed_dsa.ops.{operator}.reference"


def test_explicit_request_that_cannot_be_met_is_an_error():
    with pytest.raises(
        BackendUnavailable, match=r"'cpu' cannot run float32 on cuda, heads 4.*CPU tensors only"
    ):
        choose("lightning_indexer", "cpu", GPU)
    with pytest.raises(ValueError, match=r"no backend is called 'gpu'.*auto, reference, chunked, cpu"):
        choose("lightning_indexer", "gpu", CPU)


@pytest.mark.parametrize("operator", ["lightning_indexer", "sparse_flash_attention", "indexer_kl_loss"])
def test_on_a_gpu_auto_never_takes_what_gathers_all_keys(operator, monkeypatch, caplog):
    triton = pytest.importorskip(f"mindspeed_dsa.ops.{operator}.triton")
    # Without fitting kernels, `auto` takes the backend that works in chunks of bounded memory, and says why.
    monkeypatch.setattr(triton, "unsupported", lambda shape: "the GPU is too small")
    with caplog.at_level(logging.WARNING, logger=log.NAME):
        for _ in range(2):
            selected = choose(operator, "auto", GPU)
    assert selected.__name__ == f"mindspeed_dsa.ops.{operator}.chunked"
    assert selected.unsupported(GPU) is None
    (record,) = warnings_of(caplog)
    assert "backend 'triton' is skipped" in record.getMessage()
    assert record.getMessage().endswith("the GPU is too small")
    # A limit found only at the call, not from the shape, leads to the same backend.
    assert backend.plan(operator, "auto", triton, "it is raining") == (selected, None)


def test_auto_falls_back_and_says_so_once(monkeypatch, caplog):
    from mindspeed_dsa.ops.lightning_indexer import cpu

    monkeypatch.setattr(cpu, "unsupported", lambda shape: f"it takes no {shape['heads']} heads")
    with caplog.at_level(logging.WARNING, logger=log.NAME):
        for _ in range(3):
            assert choose("lightning_indexer", "auto", CPU).__name__.endswith("reference")
    (record,) = warnings_of(caplog)
    assert record.getMessage() == (
        "lightning_indexer: backend 'cpu' is skipped for float32 on cpu, heads 4, head_dim 16, topk 8: "
        "it takes no 4 heads"
    )


def test_missing_package_is_named(monkeypatch):
    module = "mindspeed_dsa.ops.lightning_indexer.cpu"
    monkeypatch.delitem(sys.modules, module)

    def import_module(path):
        raise ModuleNotFoundError("No module named 'triton'", name="triton")

    monkeypatch.setattr(backend, "import_module", import_module)
    with pytest.raises(BackendUnavailable, match="the package 'triton' is not installed"):
        choose("lightning_indexer", "cpu", CPU)


class Gone:
    """Import hook for a package of another release, in which names are missing."""

    def __init__(self, error):
        self.error = error

    def __call__(self, path):
        if path.endswith(".triton"):
            raise self.error
        return original_import(path)


def test_a_package_that_has_changed_is_a_reason_to_fall_back(monkeypatch, caplog):
    # A name that moved, at the import or at the top of a module, and a library that does not load.
    errors = (
        ImportError("cannot import name 'Kernel' from 'triton.runtime'", name="triton.runtime"),
        AttributeError("module 'triton' has no attribute 'jit'", name="jit", obj=logging),
        ImportError("libcuda.so: cannot open shared object file"),
    )
    for error in errors:
        monkeypatch.setattr(backend, "import_module", Gone(error))
        choose.cache_clear()
        log.forget()
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger=log.NAME):
            assert choose("lightning_indexer", "auto", GPU).__name__.endswith("chunked")
        (record,) = warnings_of(caplog)
        assert f"its module cannot be imported: {type(error).__name__}: {error}" in record.getMessage()
        with pytest.raises(BackendUnavailable, match="its module cannot be imported"):
            choose("lightning_indexer", "triton", GPU)


def test_a_fault_of_ours_is_not_taken_for_a_missing_package(monkeypatch):
    for error in (
        ImportError("cannot import name 'x'", name="mindspeed_dsa.ops.checks"),
        AttributeError("module has no attribute 'x'", name="x", obj=backend),
    ):
        monkeypatch.setattr(backend, "import_module", Gone(error))
        choose.cache_clear()
        with pytest.raises(type(error)):
            choose("lightning_indexer", "auto", GPU)


def test_kernels_are_found_where_tritons_interpreter_has_moved():
    pytest.importorskip("triton")
    program = (
        "import sys, triton, triton.runtime.interpreter as it; del it.InterpretedFunction;"
        "from mindspeed_dsa.ops.triton.common import interpreted; print(interpreted())"
    )
    assert warm.run([sys.executable, "-c", program]).stdout == "False\n"


def test_the_choice_is_made_once_per_shape_class():
    for length in (5, 9, 12):
        lightning_indexer(*indexer_inputs(1, length), 4)
    assert choose.cache_info().misses == 1


def test_the_backend_that_runs_is_told_once(monkeypatch, capsys):
    monkeypatch.delenv("RANK", raising=False)
    for name in ("auto", "cpu", "reference", "reference"):
        lightning_indexer(*indexer_inputs(1, 5), 4, backend=name)
    assert capsys.readouterr().err.splitlines() == [
        "mindspeed_dsa: lightning_indexer runs on the cpu backend",
        "mindspeed_dsa: lightning_indexer runs on the reference backend",
    ]


def test_calls_are_counted_by_the_backend_that_ran(monkeypatch):
    from mindspeed_dsa.ops.lightning_indexer import cpu

    before = backend.calls()
    inputs = indexer_inputs(1, 5)
    indices, _ = lightning_indexer(*inputs, 4)
    selected_scores(*inputs, indices, backend="chunked")
    lightning_indexer(*indexer_inputs(0, 5), 4)
    monkeypatch.setattr(cpu, "plan_call", lambda *_: "rows are upside down")
    lightning_indexer(*inputs, 4)
    assert backend.calls() - before == {
        ("lightning_indexer", "cpu"): 1,
        ("lightning_indexer", "chunked"): 1,
        ("lightning_indexer", "reference"): 2,
    }


def test_operators_import_no_megatron():
    code = (
        "import sys, mindspeed_dsa.ops.indexer_kl_loss; "
        "print([m for m in sys.modules if m.startswith(('megatron', 'mindspeed_dsa.features'))])"
    )
    assert warm.run([sys.executable, "-c", code]).stdout.strip() == "[]"


def test_a_call_that_the_chosen_backend_declines(monkeypatch, caplog):
    # A limit that depends on the call, not on its shape class: an error for a named backend, the reference
    # and one log line for `auto`.
    from mindspeed_dsa.ops.lightning_indexer import cpu

    monkeypatch.setattr(cpu, "plan_call", lambda *_: "rows are upside down", raising=False)
    monkeypatch.setattr(cpu, "select", None)
    inputs = indexer_inputs(1, 9)
    with pytest.raises(
        BackendUnavailable, match=r"backend 'cpu' cannot run this call: rows are upside down\. Ask"
    ):
        lightning_indexer(*inputs, 4, backend="cpu")
    expected = lightning_indexer(*inputs, 4, backend="reference")
    with caplog.at_level(logging.WARNING, logger=log.NAME):
        for _ in range(2):
            result = lightning_indexer(*inputs, 4)
    assert torch.equal(result.topk_indices, expected.topk_indices)
    (record,) = warnings_of(caplog)
    assert (
        record.getMessage()
        == "lightning_indexer: backend 'cpu' is skipped for 'reference': rows are upside down"
    )
