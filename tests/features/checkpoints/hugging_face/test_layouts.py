"""FP8 as several tools store it against its formula in torch; every other layout is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from mindspeed_dsa.features.checkpoints.hugging_face import layouts
from mindspeed_dsa.features.checkpoints.hugging_face.files import Reader
from mindspeed_dsa.runs.files import RunError

FP8, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
ROWS, COLUMNS = 200, 300
NAMES = ("x.weight_scale_inv", "x.weight_scale", "x.scale")
SHAPES = {
    "block": (2, 3),
    "row": (ROWS, 1),
    "row, one axis": (ROWS,),
    "tensor": (),
    "tensor, one axis": (1,),
    "tensor, two axes": (1, 1),
}
DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "e8m0": E8M0,
    "e8m0 bytes": torch.uint8,
}


def codes(rows: int = ROWS, columns: int = COLUMNS) -> Tensor:
    """Return random finite numbers in FP8."""
    # 127 is NaN; the highest bit is the sign.
    bits = torch.randint(0, 127, (rows, columns), dtype=torch.uint8)
    return (bits + 128 * torch.randint(0, 2, (rows, columns), dtype=torch.uint8)).view(FP8)


def factors_in(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return factors as they are stored, and their values in fp32."""
    if dtype in (E8M0, torch.uint8):
        # Exponents around 127, which stands for a factor of 1.
        exponents = torch.randint(110, 135, shape, dtype=torch.uint8)
        values = torch.exp2(exponents.float() - 127)
        return exponents if dtype == torch.uint8 else exponents.view(E8M0), values
    stored = (torch.rand(shape) + 0.1).to(dtype)
    return stored, stored.float()


def broadcast(values: Tensor) -> Tensor:
    """Return a factor for each number of the weight: for each block of 128, row, or all."""
    if values.shape == SHAPES["block"]:
        return torch.stack(
            [
                torch.stack([values[row // 128, column // 128] for column in range(COLUMNS)])
                for row in range(ROWS)
            ]
        )
    return values.reshape(-1, 1).expand(ROWS, COLUMNS)


def written(folder: Path, tensors: dict[str, Tensor], quantised: dict[str, Any] | None = None) -> Reader:
    save_file(tensors, folder / "model.safetensors")
    return Reader(folder, {} if quantised is None else {"quantization_config": quantised})


def read(
    files: Reader,
    name: str = "x.weight",
    begin: int = 0,
    end: int | None = None,
    columns: tuple[int, int] | None = None,
) -> Tensor:
    rows, width = files.shape(name)
    first, last = columns or (0, width)
    # NaN, so that places that are not filled show.
    out = torch.full(((rows if end is None else end) - begin, last - first), torch.nan, dtype=torch.bfloat16)
    files.read_into(out, name, begin, columns)
    return out


# -- read ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", NAMES)
def test_every_name_shape_and_dtype_of_factors(tmp_path: Path, name: str, shape: str, dtype: str) -> None:
    weight, (stored, values) = codes(), factors_in(DTYPES[dtype], SHAPES[shape])
    files = written(tmp_path, {"x.weight": weight, name: stored, "x.input_scale": torch.ones(1)})
    expected = (weight.float() * broadcast(values)).bfloat16()
    assert files.names == {"x.weight"}
    assert files.factors_dtype("x.weight") == (E8M0 if "e8m0" in dtype else DTYPES[dtype])
    assert torch.equal(read(files), expected)
    # A part that begins and ends inside blocks.
    assert torch.equal(read(files, begin=90, end=170, columns=(37, 290)), expected[90:170, 37:290])
    assert list(files.wrong_factors()) == []


@pytest.mark.parametrize("strategy", ["channel", "tensor", "block"])
def test_the_formula_of_compressed_tensors(tmp_path: Path, strategy: str) -> None:
    """Its ``dequantize`` multiplies in the factors' dtype; ``block_structure`` is in its own place."""
    shape = {"channel": (ROWS, 1), "tensor": (1,), "block": (4, 3)}[strategy]
    weight, scale = codes(), (torch.rand(shape) + 0.1).bfloat16()
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True}
    if strategy == "block":
        weights["block_structure"] = [50, 128]
        # The last block of columns is not full.
        padded = torch.zeros(ROWS, 384).to(scale.dtype)
        padded[:, :COLUMNS] = weight.to(scale.dtype)
        blocks = padded.view(4, 50, 3, 128) * scale[:, None, :, None]
        expected = blocks.view(ROWS, 384)[:, :COLUMNS]
    else:
        expected = weight.to(scale.dtype) * scale
    settings = {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }
    files = written(tmp_path, {"x.weight": weight, "x.weight_scale": scale}, settings)
    assert torch.equal(read(files), expected)


CACHE = [f"self_attn.{name}" for name in ("k_scale", "v_scale", "q_scale", "kv_scale", "attn.prob_scale")]
CACHE += [f"self_attn.{each}_proj.{name}" for each in "kv" for name in (f"{each}_scale", "output_scale")]


@pytest.mark.parametrize("name", CACHE)
@pytest.mark.parametrize("shape", [(), (1,), (4, 1, 1)])
def test_factors_of_a_cache_in_fp8_are_left_out(tmp_path: Path, name: str, shape: tuple[int, ...]) -> None:
    """Even of a projection that is not in FP8 itself."""
    factors = {f"model.layers.0.{name}": torch.ones(shape)}
    projections = {
        f"model.layers.0.self_attn.{each}_proj.weight": torch.ones(4, 4).bfloat16() for each in "kv"
    }
    weights = projections | {"x.weight": codes()}
    files = written(tmp_path, weights | factors | {"x.weight_scale": torch.ones(1)})
    assert files.names == weights.keys()
    # Files of weights in bf16 state it in the configuration only.
    scheme = {"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8, "type": "float"}}
    assert written(tmp_path, projections | factors, scheme).names == projections.keys()
    assert written(tmp_path, projections | factors).names == (projections | factors).keys()


def test_names_that_end_like_factors_are_weights_without_fp8(tmp_path: Path) -> None:
    tensors = {"norm.scale": torch.ones(3), "attn.k_scale": torch.ones(1), "x.input_scale": torch.ones(1)}
    assert written(tmp_path, tensors).names == set(tensors)


@pytest.mark.parametrize("shape", ["block", "row", "tensor"])
@pytest.mark.parametrize("sign", [0, 128])
def test_a_factor_of_0_belongs_to_zeros(tmp_path: Path, shape: str, sign: int) -> None:
    """Tools that divide by the largest magnitude store it for a block of zeros, positive or negative."""
    bits = codes().view(torch.uint8)
    # The last block, row 150, or all.
    zeros = {"block": (slice(128, 200), slice(256, 300)), "row": (150,), "tensor": (...,)}[shape]
    bits[zeros] = sign
    factors = torch.rand(SHAPES[shape]) + 0.1
    factors[{"block": (1, 2), "row": (150, 0), "tensor": ()}[shape]] = 0
    expected = (bits.view(FP8).float() * broadcast(factors)).bfloat16()
    files = written(tmp_path, {"x.weight": bits.view(FP8), "x.weight_scale": factors})
    files.check_factors()
    assert torch.equal(read(files), expected)
    bits[199, 299] = 1
    if shape == "row":
        bits[150, 0] = 1
    files = written(tmp_path, {"x.weight": bits.view(FP8), "x.weight_scale": factors})
    place = {"block": r"\[1, 2\]", "row": r"\[150, 0\]", "tensor": r"\[0, 0\]"}[shape]
    # Even if only row 0 is read.
    for use in (files.check_factors, lambda: read(files, end=1)):
        with pytest.raises(RunError, match=rf"x.weight_scale holds 0.0 at {place}"):
            use()


# -- refused ---------------------------------------------------------------------------------------


def packed(columns: int, dtype: torch.dtype) -> Tensor:
    return torch.zeros(64, columns, dtype=dtype)


E4M3_FACTORS, GLOBAL = torch.ones(64, 8).to(FP8), torch.ones(1)
BYTES_OF_16 = torch.zeros(64, 4, dtype=torch.uint8)
UNREAD: dict[str, tuple[str, dict[str, Tensor]]] = {
    "pack-quantized": (
        "int4 or int8, packed in int32 (compressed-tensors): x.weight_packed",
        {
            "x.weight_packed": packed(16, torch.int32),
            "x.weight_scale": torch.ones(64, 4).bfloat16(),
            "x.weight_shape": torch.tensor([64, 128]),
        },
    ),
    "nvfp4 of compressed-tensors": (
        "nvfp4, packed (compressed-tensors): x.weight_packed",
        {
            "x.weight_packed": packed(64, torch.uint8),
            "x.weight_scale": E4M3_FACTORS,
            "x.weight_global_scale": GLOBAL,
        },
    ),
    "nvfp4 of ModelOpt": (
        "nvfp4, packed (ModelOpt): x.weight",
        {"x.weight": packed(64, torch.uint8), "x.weight_scale": E4M3_FACTORS, "x.weight_scale_2": GLOBAL},
    ),
    "mxfp4 of compressed-tensors": (
        "mxfp4, packed (compressed-tensors): x.weight_packed",
        {"x.weight_packed": packed(64, torch.uint8), "x.weight_scale": BYTES_OF_16},
    ),
    "mxfp4 of gpt-oss": (
        "mxfp4, blocks and scales (gpt-oss): x.down_proj_blocks",
        {"x.down_proj_blocks": packed(16, torch.uint8), "x.down_proj_scales": BYTES_OF_16},
    ),
    "experts of DeepSeek-V4": (
        "mxfp4, packed in int8 (DeepSeek-V4's experts): x.weight",
        {"x.weight": packed(64, torch.int8), "x.scale": BYTES_OF_16.view(E8M0)},
    ),
    "GPTQ": (
        "int4 or int8, packed (GPTQ or AWQ): x.qweight",
        {
            "x.qweight": packed(8, torch.int32),
            "x.qzeros": packed(8, torch.int32),
            "x.scales": torch.ones(2, 64).half(),
            "x.g_idx": torch.arange(64, dtype=torch.int32),
        },
    ),
    "bitsandbytes": (
        "nf4, fp4 or int8 (bitsandbytes): x.weight",
        {
            "x.weight": packed(1, torch.uint8),
            "x.weight.absmax": torch.ones(1),
            "x.weight.quant_state.bitsandbytes__nf4": torch.zeros(9, dtype=torch.uint8),
        },
    ),
    "mxfp8": (
        "mxfp8, FP8 with a factor for 32 columns of a row: x.weight",
        {"x.weight": codes(64, 128), "x.weight_scale": BYTES_OF_16},
    ),
    "groups": (
        "FP8 with a factor for 64 columns of a row: x.weight",
        {"x.weight": codes(64, 128), "x.weight_scale": torch.ones(64, 2)},
    ),
    "zero points": (
        "numbers with a zero point (compressed-tensors): x.weight_zero_point",
        {
            "x.weight": codes(64, 128),
            "x.weight_scale": torch.ones(64, 1),
            "x.weight_zero_point": torch.ones(64, 1),
        },
    ),
    "int8": (
        "int8 with factors: x.weight",
        {"x.weight": packed(64, torch.int8), "x.weight_scale": torch.ones(64, 1)},
    ),
    "E5M2": (
        "float8_e5m2 with factors: x.weight",
        {"x.weight": torch.ones(64, 64).to(torch.float8_e5m2), "x.weight_scale_inv": torch.ones(1, 1)},
    ),
    "E4M3 of another range": ("float8_e4m3fnuz: x.weight", {"x.weight": packed(4, torch.float8_e4m3fnuz)}),
    "integers": ("int64: x.weight", {"x.weight": packed(4, torch.int64)}),
}


@pytest.mark.parametrize("layout", UNREAD)
def test_a_layout_that_is_not_read_is_named_and_nothing_else(tmp_path: Path, layout: str) -> None:
    says, tensors = UNREAD[layout]
    with pytest.raises(RunError) as caught:
        written(tmp_path, {"a.weight": torch.ones(3), **tensors})
    head, *lines = str(caught.value).splitlines()
    assert str(tmp_path) in head
    assert "a layout that is not read; name a folder with this model in bf16, or in FP8" in head
    assert lines == [f"  - {says}"]


def test_weights_under_a_transform_are_refused(tmp_path: Path) -> None:
    """Their products with activations are right only after the transform, here a Hadamard matrix."""
    tensors = {"x.weight": codes(), "x.weight_scale": torch.ones(ROWS, 1)}
    group = {"type": "hadamard", "apply": [{"targets": ["Linear"], "location": "input"}]}
    settings = {"quant_method": "compressed-tensors", "transform_config": {"config_groups": {"R4": group}}}
    with pytest.raises(RunError) as caught:
        written(tmp_path, tensors, settings)
    head, *lines = str(caught.value).splitlines()
    assert "a layout that is not read; name a folder with this model in bf16, or in FP8" in head
    assert lines == ["  - weights under a transform (compressed-tensors' transform_config): R4 (hadamard)"]
    for odd in ({"config_groups": ["R4"]}, [3], {"config_groups": {"R4": None}}):
        with pytest.raises(RunError, match="weights under a transform"):
            written(tmp_path, tensors, {**settings, "transform_config": odd})
    for empty in ({}, None, {"config_groups": {}}):
        assert written(tmp_path, tensors, {**settings, "transform_config": empty}).names == {"x.weight"}


def test_fp4_of_the_format_itself(tmp_path: Path) -> None:
    header = {"x.weight": {"dtype": "F4", "shape": [4, 8], "data_offsets": [0, 16]}}
    text = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(16))
    with pytest.raises(RunError, match=r"not read; name .*\n  - fp4 \(F4\), two numbers in a byte: x.weight"):
        Reader(tmp_path)


@pytest.mark.parametrize(
    ("changes", "quantised", "says"),
    [
        (
            {"x.weight_scale": torch.ones(ROWS, 1)},
            {"weight_block_size": [128, 128]},
            r"x.weight_scale is \[200, 1\] in torch.float32; blocks of 128 x 128 need \[2, 3\]",
        ),
        (
            {"x.weight_scale": torch.ones(7)},
            {},
            r"x.weight_scale is \[7\] .* a factor for each row would be \[200, 1\], and one for all \[1\]",
        ),
        ({"x.weight_scale": torch.ones(1).double()}, {}, r"x.weight_scale is \[1\] in torch.float64"),
        (
            {"x.weight_scale": torch.ones(1), "x.scale": torch.ones(1)},
            {},
            "x.weight is in FP8, and has factors twice: x.weight_scale and x.scale",
        ),
        ({"y.weight_scale": torch.ones(1)}, {}, r"y.weight_scale has no weight in FP8 \(F8_E4M3\)"),
        (
            {"y.weight": torch.ones(2, 2), "y.scale": torch.ones(1)},
            {},
            r"y.scale has no weight in FP8 \(F8_E4M3\)",
        ),
    ],
)
def test_factors_that_contradict_their_weight(
    tmp_path: Path, changes: dict[str, Tensor], quantised: dict[str, Any], says: str
) -> None:
    with pytest.raises(RunError, match=f"fetch the files again(.|\n)*{says}"):
        written(tmp_path, {"x.weight": codes(), **changes}, quantised)


@pytest.mark.parametrize(
    ("settings", "block"),
    [
        ({}, None),
        ({"weight_block_size": None}, None),
        ({"weight_block_size": [64, 32]}, [64, 32]),
        ({"config_groups": {"a": {"weights": {"block_structure": [8, 4]}}}}, [8, 4]),
        ({"config_groups": {"a": {"weights": {"strategy": "channel"}}}}, None),
        ({"config_groups": [3]}, None),
        ({"config_groups": {"a": 3}}, None),
    ],
)
def test_the_block_of_a_configuration(settings: dict[str, Any], block: list[int] | None) -> None:
    assert layouts.block_of(settings) == block


# -- numbers that are not finite -------------------------------------------------------------------


def test_numbers_that_are_not_finite_are_counted_while_they_are_read(tmp_path: Path) -> None:
    wide = torch.randn(4, 2**20).bfloat16()
    wide[1, 7], wide[3, -1], wide[3, 0] = torch.nan, torch.inf, -torch.inf
    large = torch.full((3, 5), 1e6)
    bits = codes().view(torch.uint8)
    # 0x7F and 0xFF are NaN.
    bits[3, 150], bits[199, 0] = 0x7F, 0xFF
    extremes = torch.tensor([[torch.finfo(torch.bfloat16).max, torch.finfo(torch.bfloat16).min]]).bfloat16()
    tensors = {"wide": wide, "large": large, "x.weight": bits.view(FP8), "x.scale": torch.ones(1)}
    files = written(tmp_path, tensors | {"extremes": extremes})
    # A target whose rows are not contiguous.
    strided = torch.zeros(2**20, 4).t()
    files.read_into(strided[1:3], "wide", 1)
    assert files.non_finite == {"wide": 1}
    files.read_into(strided[3:], "wide", 3)
    assert files.non_finite == {"wide": 3}
    read(files, end=100)
    assert files.non_finite == {"wide": 3, "x.weight": 1}
    read(files, begin=100)
    files.read_into(torch.empty(3, 5), "large")
    files.read_into(torch.empty(1, 2).bfloat16(), "extremes")
    assert files.non_finite == {"wide": 3, "x.weight": 2}
    # 1e6 is beyond fp16, and so is 448 times 1000.
    files.read_into(torch.empty(3, 5).half(), "large")
    assert files.non_finite == {"wide": 3, "x.weight": 2, "large": 15}
    with pytest.raises(RunError) as caught:
        files.require_finite("who")
    assert "who: the weights in" in str(caught.value)
    assert "wide (3 in model.safetensors), x.weight (2 in model.safetensors)" in str(caught.value)


def test_fp8_beyond_fp16_is_counted(tmp_path: Path) -> None:
    files = written(
        tmp_path, {"x.weight": torch.full((2, 3), 448.0).to(FP8), "x.scale": torch.ones(1) * 1000}
    )
    files.read_into(torch.empty(2, 3), "x.weight")
    files.require_finite("who")
    files.read_into(torch.empty(2, 3).half(), "x.weight")
    assert files.non_finite == {"x.weight": 6}
