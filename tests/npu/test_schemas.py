"""Calls compared with schemas of published wheels and with CANN's operator library, and limits by product."""

from __future__ import annotations

import ast
import logging
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from packaging.version import Version

import mindspeed_dsa
from mindspeed_dsa import log
from mindspeed_dsa.ops.backend import ShapeClass, choose
from mindspeed_dsa.ops.npu import device as npu_device
from mindspeed_dsa.platforms.npu_operators import BY_NAME, OPERATORS
from tests.npu.schemas import RELEASES, releases_of, require_fit

ROWS, BY_CHOICE = torch.zeros(8, 4), torch.arange(8).int()


def test_calls_that_older_releases_refuse_are_refused_here():
    """Two calls that our code once made: ``k``, and ``group_list_type``."""
    ones = torch.ones(4, 2)
    require_fit("npu_moe_finalize_routing", (ROWS, None, None, None, ones, BY_CHOICE, None), {})
    with pytest.raises(AssertionError, match=r"'2\.9\.0\.post4': 'too many positional arguments'"):
        require_fit("npu_moe_finalize_routing", (ROWS, None, None, None, None, BY_CHOICE, None, 0, 2), {})
    operands = (torch.zeros(2, 3, 4), torch.zeros(5, 3), torch.zeros(5, 4), torch.tensor([2, 5]))
    require_fit("npu_grouped_matmul_add_", operands, {})
    with pytest.raises(AssertionError, match=r"'2\.7\.1\.post2': .*group_list_type"):
        require_fit("npu_grouped_matmul_add_", operands, {"group_list_type": 0})
    with pytest.raises(AssertionError, match="self_ is Tensor, not NoneType"):
        require_fit("npu_grouped_matmul_add_", (None, *operands[1:]), {})


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.name)
def test_first_releases_are_those_of_the_wheels(operator):
    def has(release: Version) -> bool:
        first = [Version(each) for each in operator.since.torch_npu]
        same = [each for each in first if each.release == release.release]
        return release >= same[0] if same else release.release > first[-1].release

    assert releases_of(operator.name) == [release for release in RELEASES if has(Version(release))]


def test_every_operator_of_the_package_is_in_the_table():
    named = set()
    for file in Path(mindspeed_dsa.__file__).parent.rglob("npu.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Constant)
                and str(node.value).startswith("npu_")
                and " " not in node.value
            ):
                named.add(node.value)
    assert named
    assert named <= BY_NAME.keys()


def test_symbols_are_those_that_torch_npu_looks_up():
    (folder,) = find_spec("torch_npu").submodule_search_locations
    library = Path(folder, "lib", "libtorch_npu.so").read_bytes()
    symbols = [symbol for operator in OPERATORS for symbol in operator.symbols]
    assert len(symbols) > 12
    assert not [symbol for symbol in symbols if f"\0{symbol}GetWorkspaceSize\0".encode() not in library]


@pytest.fixture
def cann(tmp_path, monkeypatch):
    """Return a library with CANN 8.5's operators: it lacks the dense loss."""

    def build(*symbols, name="libopapi.so"):
        source = "".join(f"int {symbol}GetWorkspaceSize(void) {{ return 0; }}\n" for symbol in symbols)
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        command = ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(file)]
        subprocess.run(command, input=source, text=True, check=True)
        return file

    def forget():
        npu_device.operator_libraries.cache_clear()
        npu_device.absent_symbols.cache_clear()

    old = build("aclnnLightningIndexer", "aclnnLightningIndexerGrad", "aclnnGroupedMatmulV5")
    monkeypatch.setattr(npu_device, "_LIBRARIES", (str(old),))
    forget()
    yield build
    forget()


def test_an_operator_that_cann_lacks_is_declined_with_the_reason(npu_kernels, cann, monkeypatch, caplog):
    sizes = {"heads": 128, "dim": 192, "key_heads": 128, "index_heads": 64, "index_dim": 128, "topk": 0}
    shape = ShapeClass("cpu", torch.bfloat16, tuple(sizes.items()))
    assert npu_device.unavailable("cpu", "npu_lightning_indexer", "npu_grouped_matmul", "npu_swiglu") is None
    reason = npu_device.unavailable("cpu", "npu_dense_lightning_indexer_softmax_lse")
    assert reason == (
        "CANN's operator library has no aclnnDenseLightningIndexerSoftmaxLse, which torch_npu 2.13.0 calls; "
        "npu_dense_lightning_indexer_softmax_lse needs torch_npu 2.7.1.post4, 2.8.0.post4, 2.9.0.post2 or "
        "2.10.0 with CANN 9.0.0, or newer ones"
    )
    monkeypatch.setattr("mindspeed_dsa.ops.backend.PREFERENCE", {"cpu": ("npu", "chunked")})
    with caplog.at_level(logging.WARNING):
        assert choose("indexer_kl_loss", "auto", shape).__name__.endswith(".chunked")
    assert reason in caplog.text


def test_a_library_of_the_user_comes_first(npu_kernels, cann, tmp_path, monkeypatch):
    names = ("npu_dense_lightning_indexer_softmax_lse", "npu_sparse_flash_attention_grad")
    cann("aclnnDenseLightningIndexerSoftmaxLse", name="custom/op_api/lib/libcust_opapi.so")
    cann("aclnnSparseFlashAttentionGrad", name="opp/vendors/own/op_api/lib/libcust_opapi.so")
    monkeypatch.setenv("ASCEND_CUSTOM_OPP_PATH", f"{tmp_path}/custom")
    monkeypatch.setenv("ASCEND_OPP_PATH", f"{tmp_path}/opp")
    assert npu_device.unavailable("cpu", *names) is None


def test_without_cann_nothing_is_known(npu_kernels, cann, monkeypatch):
    monkeypatch.setattr(npu_device, "_LIBRARIES", ("libno_such_library.so",))
    assert npu_device.unavailable("cpu", "npu_dense_lightning_indexer_softmax_lse") is None


def test_products(npu_kernels, monkeypatch, caplog):
    """Limits follow the device's name; an unknown device gets the narrowest limits, and one warning."""

    def of(name):
        monkeypatch.setattr("torch.npu.get_device_name", lambda device=None: name)
        npu_device.product.cache_clear()
        return npu_device.product()

    assert of("Ascend910B3").fused_ranks == (2, 4, 8)
    assert of("Ascend910_9391").fused_ranks == (2, 4, 8, 16, 32)
    assert of("Ascend950PR_9579").loss_sequences == 128
    assert not caplog.records
    with caplog.at_level(logging.WARNING, log.NAME):
        for _ in range(2):
            unknown = of("Ascend310P3")
    assert not unknown.indexer_gradient
    assert unknown.indexer_heads == (8, 16, 24, 32, 64)
    assert (unknown.loss_index_heads, unknown.loss_sequences, unknown.fused_ranks) == (
        (32, 64),
        128,
        (2, 4, 8),
    )
    (record,) = caplog.records
    assert "Ascend310P3 is none of Atlas A2, Atlas A3, Ascend 950" in record.getMessage()
