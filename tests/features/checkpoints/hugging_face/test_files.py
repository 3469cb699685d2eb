"""Model folders read by slices: contents, damaged folders and memory."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from mindspeed_dsa.features.checkpoints.hugging_face.files import Reader
from mindspeed_dsa.runs.files import RunError

FP8 = torch.float8_e4m3fn


def a_model() -> dict[str, torch.Tensor]:
    """Return tensors of several dtypes and numbers of dimensions."""
    weights = {"wide": torch.randn(4, 3), "half": torch.randn(4, 3).half(), "bias": torch.randn(70)}
    weights |= {"empty": torch.zeros(0, 5), "experts": torch.randn(5, 30, 20).bfloat16()}
    weights |= {"matrix": torch.randn(300, 70).bfloat16()}
    # Below 127, which is NaN.
    codes = torch.randint(0, 127, (200, 300), dtype=torch.uint8)
    return weights | {"fp8.weight": codes.view(FP8), "fp8.weight_scale_inv": torch.rand(2, 3) + 0.1}


def official(weight: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Dequantise as DeepSeek's code does, with torch's cast."""
    each = factors.repeat_interleave(128, -2).repeat_interleave(128, -1)
    return (weight.float() * each[..., : weight.shape[-2], : weight.shape[-1]]).bfloat16()


def save(folder: Path, *shards: dict[str, torch.Tensor]) -> Path:
    """Write a folder with an index, as transformers does; FP8 scales may be in another file."""
    for number, tensors in enumerate(shards):
        save_file(tensors, folder / f"part-{number}.safetensors")
    names = {name: f"part-{number}.safetensors" for number, shard in enumerate(shards) for name in shard}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return folder


@pytest.fixture(scope="module")
def model() -> dict[str, torch.Tensor]:
    return a_model()


@pytest.fixture(scope="module", params=["single", "sharded"])
def folder(request, model, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    if request.param == "single":
        save_file(model, path / "model.safetensors")
        return path
    names = sorted(model)  # scales come after their weight, here in the next file
    split = names.index("fp8.weight_scale_inv")
    return save(path, {n: model[n] for n in names[:split]}, {n: model[n] for n in names[split:]})


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8).numpy().tobytes()


def expected(model: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    return official(model[name], model[name + "_scale_inv"]) if name.startswith("fp8") else model[name]


def read(
    files: Reader,
    name: str,
    begin: int = 0,
    end: int | None = None,
    columns: tuple[int, int] | None = None,
) -> torch.Tensor:
    """Return rows and columns of a weight in its own dtype; FP8 weights in bf16."""
    shape = list(files.shape(name))
    if shape:
        shape[0] = (shape[0] if end is None else end) - begin
    if columns is not None:
        shape[1:2] = [columns[1] - columns[0]]
    dtype = torch.bfloat16 if files.factors_dtype(name) else files.dtype(name)
    out = torch.empty(shape, dtype=dtype)
    files.read_into(out, name, begin, columns)
    return out


# -- right folders -----------------------------------------------------------------------------


def test_whole_tensors(folder, model):
    files = Reader(folder)
    assert files.names == {name for name in model if not name.endswith("_scale_inv")}
    for name in files.names:
        assert files.shape(name) == tuple(model[name].shape)
        assert files.dtype(name) == model[name].dtype
        assert bits(read(files, name)) == bits(expected(model, name)), name
        factors = files.factors(name)
        assert (factors is None) == (not name.startswith("fp8"))
        assert factors is None or torch.equal(factors, model[name + "_scale_inv"])
    files.check_factors()


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_slices_into_any_tensor(folder, model, data):
    """Rows and columns may begin inside of blocks; targets may be strided and have other dtypes."""
    files = Reader(folder)
    name = data.draw(st.sampled_from(["matrix", "bias", "experts", "fp8.weight"]))
    part = expected(model, name)
    begin = data.draw(st.integers(0, len(part)))
    end = data.draw(st.integers(begin, len(part)))
    columns = None
    if part.dim() > 1 and data.draw(st.booleans()):
        first = data.draw(st.integers(0, part.shape[1]))
        columns = (first, data.draw(st.integers(first, part.shape[1])))
    wanted = part[begin:end] if columns is None else part[begin:end, slice(*columns)]
    assert bits(read(files, name, begin, end, columns)) == bits(wanted)
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
    *others, last = wanted.shape
    # Every second place of a larger tensor is filled; the others stay NaN.
    around = torch.full((*others, 2 * last + 1), torch.nan, dtype=dtype)
    into = around[..., 1::2]
    files.read_into(into, name, begin, columns)
    assert bits(into) == bits(wanted.to(dtype))
    assert around.isnan().sum() == around.numel() - wanted.numel()


def test_one_element_of_any_stride(folder, model):
    # A tensor with one element counts as contiguous, whatever its strides.
    around = torch.zeros(3, 4, 5).bfloat16()
    Reader(folder).read_into(around[:1, 1:2, 2], "matrix", 7, (8, 9))
    Reader(folder).read_into(around[2, 3, ::5], "bias", 69)
    assert around[0, 1, 2] == model["matrix"][7, 8]
    assert around[2, 3, 0] == model["bias"][69].bfloat16()
    assert around.count_nonzero() == 2


def test_parameters_are_filled(folder, model):
    parameter = torch.nn.Parameter(torch.zeros(100, 70))
    Reader(folder).read_into(parameter[:50], "matrix", 10)
    Reader(folder).read_into(parameter[50:], "matrix", 60)
    assert torch.equal(parameter.detach(), model["matrix"][10:110].float())


def test_threads_share_a_reader(folder, model):
    files = Reader(folder)
    names = sorted(files.names) * 20
    with ThreadPoolExecutor(8) as threads:
        for name, found in zip(names, threads.map(partial(read, files), names), strict=True):
            assert bits(found) == bits(expected(model, name))


@pytest.mark.parametrize(
    ("shape", "begin", "columns", "there"),
    [((5, 69), 0, None, "[5, 70]"), ((5, 70), 297, None, "[3, 70]"), ((5, 69), 0, (2, 71), "[5, 68]")],
)
def test_rows_and_columns_that_a_weight_does_not_have_fill_nothing(folder, shape, begin, columns, there):
    with pytest.raises(ValueError, match=re.escape(f"{list(shape)} cannot take {there} of matrix")):
        Reader(folder).read_into(torch.empty(shape), "matrix", begin, columns)


def test_other_blocks(tmp_path):
    weight, factors = torch.ones(60, 60).to(FP8), torch.arange(1.0, 7.0).view(2, 3)
    save_file({"w": weight, "w_scale_inv": factors}, tmp_path / "model.safetensors")
    files = Reader(tmp_path, {"quantization_config": {"weight_block_size": [32, 20]}})
    # Rows 31 and 32 are in different blocks.
    assert read(files, "w", 31, 33)[:, ::20].tolist() == factors.tolist()
    with pytest.raises(RunError, match=r"w_scale_inv is \[2, 3\] in torch.float32; blocks of 128 x 128"):
        Reader(tmp_path)


@pytest.mark.parametrize("value", ["three", 1.5, [1], True, -1, 10**9], ids=repr)
@pytest.mark.parametrize("name", ["num_hidden_layers", "num_nextn_predict_layers"])
def test_layers_that_are_no_number_are_refused(tmp_path, name, value):
    save_file({"w": torch.ones(6, 6)}, tmp_path / "model.safetensors")
    with pytest.raises(RunError, match=f"has a {name} of .*, which is no number of layers"):
        Reader(tmp_path, {name: value})


@pytest.mark.parametrize("block", [[128], 128, [0, 128], ["a", 1], [1, 10**12]])
def test_blocks_of_no_size_are_refused(tmp_path, block):
    save_file({"w": torch.ones(6, 6)}, tmp_path / "model.safetensors")
    with pytest.raises(RunError, match="which is no rows and columns"):
        Reader(tmp_path, {"quantization_config": {"weight_block_size": block}})


def test_factors_that_have_an_exponent_alone(tmp_path):
    # e8m0 scales have only an exponent; byte 255 is NaN.
    weight = torch.ones(130, 60).to(FP8)
    factors = torch.tensor([[0], [130]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    nan = torch.tensor([[255], [255]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    tensors = {"w": weight, "w_scale_inv": factors, "v": weight.clone(), "v_scale_inv": nan}
    save_file(tensors, tmp_path / "model.safetensors")
    files = Reader(tmp_path)
    assert files.factors_dtype("w") == torch.float8_e8m0fnu
    assert files.factors("w").tolist() == [[2.0**-127], [8.0]]
    assert read(files, "w")[::129, 0].tolist() == [2.0**-127, 8.0]
    with pytest.raises(RunError, match=r"v_scale_inv holds nan at \[0, 0\]"):
        files.check_factors()


# -- damaged folders ---------------------------------------------------------------------------


def refused(folder: Path) -> str:
    with pytest.raises(RunError) as caught:
        Reader(folder)
    assert str(folder) in str(caught.value)
    return str(caught.value)


def test_an_empty_folder(tmp_path):
    assert "neither model.safetensors nor model.safetensors.index.json" in refused(tmp_path)


def test_both_kinds_of_folder(tmp_path):
    save(tmp_path, {"a": torch.zeros(1)})
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    assert "remove the one that is not meant" in refused(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "has no weight_map"),
        ("[]", "has no weight_map"),
        ('{"weight_map": {}}', "names nothing"),
        ('{"weight_map": {"a": "../x", "b": 3}}', "names '../x', 3, which are no files"),
        ('{"weight_map": {"a": "x\\u0000", "b": ""}}', "names '', 'x\\x00', which are no files"),
        ('{"weight_map": {"a": "\\ud800", "b": ".."}}', "names '..', '\\ud800', which are no files"),
        ("[" * 100_000, "has no weight_map"),
    ],
)
def test_a_broken_index(tmp_path, text, message):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    assert message in refused(tmp_path)


def test_every_problem_is_in_one_message(tmp_path):
    shards = [{f"{letter}{n}": torch.zeros(8) for n in range(9)} for letter in "abcd"]
    save(tmp_path, *shards)
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    # c0 and x are listed for the wrong file, and d8 for none.
    content["weight_map"] |= {"c0": "part-3.safetensors", "x": "part-3.safetensors"}
    del content["weight_map"]["d8"]
    index.write_text(json.dumps(content))
    (tmp_path / "part-0.safetensors").unlink()
    with open(tmp_path / "part-1.safetensors", "r+b") as file:
        file.truncate(700)
    lines = refused(tmp_path).splitlines()[1:]
    eight = ", ".join(f"a{number}" for number in range(8))
    assert [line.strip(" -") for line in lines] == [
        f"part-0.safetensors is not there; {index.name} says that it holds {eight} and 1 more",
        lines[1].strip(" -"),
        "part-2.safetensors holds c0, which model.safetensors.index.json does not say",
        "part-3.safetensors does not hold c0, x, as model.safetensors.index.json says",
        "part-3.safetensors holds d8, which model.safetensors.index.json does not say",
    ]
    assert re.search(r"part-1.safetensors: .*not fully covered", lines[1])


@pytest.mark.parametrize("size", [0, 5, 8, 40, 79])
def test_a_file_that_is_cut(tmp_path, size):
    save_file({"a": torch.zeros(4)}, tmp_path / "model.safetensors")
    with open(tmp_path / "model.safetensors", "r+b") as file:
        file.truncate(size)
    assert "- model.safetensors: " in refused(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        lambda header: header["b"].update(data_offsets=[12, 24]),  # inside of another tensor's bytes
        lambda header: header["a"].update(shape=[5]),
        lambda header: header["a"].update(dtype="F3"),
        lambda header: header["a"].update(shape=[2**62, 4]),
        lambda header: header.pop("b"),  # bytes that belong to no tensor
    ],
)
def test_a_header_that_does_not_describe_its_file(tmp_path, change):
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(4), "b": torch.ones(3)}, file)
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    # A header with this change, in front of the same bytes.
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
    assert "- model.safetensors: " in refused(tmp_path)


def fp8_model(**changes) -> dict[str, torch.Tensor]:
    tensors = {"w": torch.zeros(200, 300).to(FP8), "w_scale_inv": torch.ones(2, 3), "n": torch.zeros(3)}
    return {name: tensor for name, tensor in (tensors | changes).items() if tensor is not None}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"w_scale_inv": None}, "w is in FP8, and w_scale_inv with its factors is not there"),
        ({"w": None}, "w_scale_inv has no weight in FP8"),
        ({"w": torch.zeros(200, 300)}, "w_scale_inv has no weight in FP8"),
        (
            {"w_scale_inv": torch.ones(3, 3)},
            "w_scale_inv is [3, 3] in torch.float32; blocks of 128 x 128 need [2, 3]",
        ),
        ({"w_scale_inv": torch.ones(2, 3).double()}, "is [2, 3] in torch.float64"),
        ({"w": torch.zeros(5).to(FP8)}, "w is in FP8 and [5], which is no matrix"),
    ],
)
def test_fp8_without_its_factors(tmp_path, changes, message):
    save_file(fp8_model(**changes), tmp_path / "model.safetensors")
    assert message in refused(tmp_path)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 0.0, -1.0])
def test_factors_that_are_none(tmp_path, value):
    factors = torch.ones(2, 3)
    factors[1, 2] = value
    save(tmp_path, fp8_model(), {"v": torch.ones(200, 300).to(FP8), "v_scale_inv": factors})
    files = Reader(tmp_path)
    assert read(files, "w").shape == (200, 300)
    message = re.escape(f"v_scale_inv holds {value} at [1, 2]")
    for use in (files.check_factors, lambda: read(files, "v", 0, 1), lambda: files.factors("v")):
        with pytest.raises(RunError, match=message):
            use()


# -- memory ------------------------------------------------------------------------------------

READ = """
import resource, sys, torch
from pathlib import Path
from mindspeed_dsa.features.checkpoints.hugging_face.files import Reader
torch.set_num_threads(1)
files = Reader(Path(sys.argv[1]))
outs = {name: torch.empty(1024, 1024) for name in files.names}
for out in outs.values():
    out.zero_()
# The files are mapped now, which counts as data and takes no memory.
held = int(Path("/proc/self/status").read_text().split("VmData:")[1].split()[0]) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (held + 2**25, held + 2**25))
for name in files.names:
    rows = files.shape(name)[0]
    for begin in (0, rows // 2, rows - 1024):
        files.read_into(outs[name], name, begin, (100, 1124))
        assert outs[name].max() == 0 and outs[name].min() == 0
try:
    torch.empty(2**26, dtype=torch.uint8)
except RuntimeError:
    print("limited")
"""


def test_memory_is_that_of_the_slice(tmp_path):
    """Reading slices of 2 GB and 4 GB tensors, in sparse files, stays within the memory limit."""
    rows, columns = 2**18, 8192
    header = {
        "a": {"dtype": "BF16", "shape": [rows, columns], "data_offsets": [0, 2 * rows * columns]},
        "b": {"dtype": "F8_E4M3", "shape": [rows, columns]},
        "b_scale_inv": {"dtype": "F32", "shape": [rows // 128, columns // 128]},
    }
    end = 2 * rows * columns
    for name, nbytes in (("b", rows * columns), ("b_scale_inv", rows * columns // 4096)):
        header[name]["data_offsets"] = [end, end + nbytes]
        end += nbytes
    text = json.dumps(header).encode()
    with open(tmp_path / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        # A sparse file, in which only the scales are written.
        file.truncate(8 + len(text) + end)
        file.seek(-(rows * columns // 4096), 2)
        file.write(torch.ones(rows * columns // 2**14).numpy().tobytes())
    done = subprocess.run([sys.executable, "-c", READ, tmp_path], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    # Buffers and scales. All rows of the slices would need 48 MiB.
    assert done.stdout == "limited\n"
