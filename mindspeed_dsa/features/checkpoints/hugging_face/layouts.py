"""Layouts of quantised weights in files: FP8 with factors is read, other layouts are reported by name.

Layouts are recognised by names, dtypes and shapes of tensors. Factors of an FP8 weight ``X.weight`` are named
``X.weight_scale_inv`` (DeepSeek), ``X.weight_scale`` (compressed-tensors, ModelOpt) or ``X.scale``
(DeepSeek-V4). The weight is multiplied by its factors: one per block, one per row, or one for the tensor.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mindspeed_dsa.features.checkpoints.hugging_face import fp8

FACTORS = "_scale_inv"
"""Suffix that DeepSeek's files, and written ones, add to a weight's name for its factors."""
_WEIGHT = ".weight"
_SUFFIXES = (FACTORS, "_scale")
_V4 = ".scale"
"""DeepSeek-V4's name of factors, in place of ``.weight``."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)
"""Dtypes of factors. DeepSeek's files to V3.2 have fp32, even for powers of two, and Qwen's have bf16."""
_READ = (torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float32, torch.float64)
"""Dtypes of weights."""
_OF_ACTIVATIONS = (".input_scale", ".activation_scale", ".output_scale")
"""Names of fixed factors of a linear layer's input or output, which no weight depends on."""
_OF_CACHE = re.compile(r".+\.self_attn\.(.+\.)?([qkv]_scale|kv_scale|prob_scale|[kv]_proj\.output_scale)")
"""Names of fixed factors of attention's inputs, for a cache of keys and values in FP8."""
_LARGEST_BLOCK = 2**16
_MX = 32
"""Columns that share a factor in the MX formats."""


@dataclass(frozen=True)
class Factors:
    """Factors of one FP8 weight.

    Attributes:
        name: name of their tensor.
        stored: factors of all blocks, ``[rows of blocks, columns of blocks]`` in their stored dtype.
        block: rows and columns of a block.
    """

    name: str
    stored: Tensor
    block: tuple[int, int]


@dataclass
class Sorted:
    """Tensors of a folder by their use.

    Attributes:
        weights: dict from name to weight.
        factors: dict from an FP8 weight's name to its factors.
        unread: dict from the name of a layout that is not read to the tensors that have it.
        problems: messages on factors that do not fit their weight.
    """

    weights: dict[str, Tensor] = field(default_factory=dict)
    factors: dict[str, Factors] = field(default_factory=dict)
    unread: dict[str, list[str]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def sort(
    tensors: Mapping[str, Tensor], block: tuple[int, int], blocks_only: bool, cache: bool = False
) -> Sorted:
    """Sort the tensors of a folder into weights and factors.

    Args:
        tensors: dict from name to tensor, of all files.
        block: rows and columns of a block, if factors belong to blocks.
        blocks_only: whether the configuration states the block, so that other factors contradict it.
        cache: whether the configuration states factors for a cache of keys and values.
    """
    by_use, used = Sorted(), set[str]()
    for layout_of in (_packed, _other_dtype):
        # A packed layout explains the dtypes of all that belongs to it.
        for name, tensor in tensors.items() if not by_use.unread else ():
            if layout := layout_of(name, tensor, tensors):
                by_use.unread.setdefault(layout, []).append(name)
    for name, tensor in tensors.items():
        if tensor.dtype == torch.float8_e4m3fn:
            factors = {other: tensors[other] for other in _names_of_factors(name) if other in tensors}
            used.update(factors)
            _add_fp8(by_use, name, tensor, factors, block, blocks_only)
    cache = cache or any(tensor.dtype == torch.float8_e4m3fn for tensor in tensors.values())
    for name, tensor in tensors.items():
        weight = _weight_of(name, tensors)
        if name in used or _is_of_activations(name, tensors) or (cache and _OF_CACHE.fullmatch(name)):
            continue
        if weight is None:
            by_use.weights[name] = tensor
        else:
            by_use.problems.append(f"{name} has no weight in FP8 (F8_E4M3) to belong to")
    return by_use


def block_of(quantised: Mapping[str, Any]) -> Any:
    """Return the block size in a ``quantization_config`` of DeepSeek or compressed-tensors, else ``None``."""
    groups = quantised.get("config_groups")
    settings = [quantised, *(groups.values() if isinstance(groups, dict) else ())]
    for each in settings:
        inner = each.get("weights") if isinstance(each, dict) else None
        block = each.get("weight_block_size") if isinstance(each, dict) else None
        block = block or (inner.get("block_structure") if isinstance(inner, dict) else None)
        if block:
            return block
    return None


def transforms(quantised: Mapping[str, Any]) -> list[str]:
    """Return the transforms in a ``quantization_config`` of compressed-tensors, which weights depend on."""
    settings = quantised.get("transform_config")
    groups = settings.get("config_groups", settings) if isinstance(settings, dict) else settings
    if not isinstance(groups, dict):
        return [repr(groups)] if groups else []
    return [
        f"{name} ({group.get('type')})" if isinstance(group, dict) else str(name)
        for name, group in groups.items()
    ]


def is_block(block: Any) -> bool:
    """Return whether a value is a valid pair of block rows and columns."""
    sizes = block if isinstance(block, (list, tuple)) else ()
    return len(sizes) == 2 and all(type(size) is int and 0 < size <= _LARGEST_BLOCK for size in sizes)


# -- FP8 with factors ----------------------------------------------------------------------------


def _names_of_factors(weight: str) -> Iterator[str]:
    yield from (weight + suffix for suffix in _SUFFIXES)
    if weight.endswith(_WEIGHT):
        yield weight.removesuffix(_WEIGHT) + _V4


def _add_fp8(
    by_use: Sorted,
    name: str,
    weight: Tensor,
    factors: Mapping[str, Tensor],
    block: tuple[int, int],
    blocks_only: bool,
) -> None:
    """Add an FP8 weight's factors to ``by_use``, or else the reason why the weight cannot be read."""
    if not factors:
        by_use.problems.append(f"{name} is in FP8, and {name}{FACTORS} with its factors is not there")
        return
    if len(factors) > 1:
        by_use.problems.append(f"{name} is in FP8, and has factors twice: {' and '.join(factors)}")
        return
    if weight.dim() != 2:
        by_use.problems.append(f"{name} is in FP8 and {list(weight.shape)}, which is no matrix")
        return
    ((other, stored),) = factors.items()
    # Bytes are exponents, as in the MX formats: byte 127 is the factor 1.
    exponents = stored.view(torch.float8_e8m0fnu) if stored.dtype == torch.uint8 else stored
    rows, columns = weight.shape
    shape = tuple(stored.shape)
    expected = fp8.factors_shape((rows, columns), block)
    of_blocks, of_rows = shape == expected, shape in ((rows, 1), (rows,))
    of_others = not blocks_only and weight.numel() > 0 and (of_rows or stored.numel() == 1)
    if exponents.dtype in _DTYPES and (of_blocks or of_others):
        if not of_blocks:
            block = (1 if of_rows else rows, columns)
        exponents = exponents.reshape(fp8.factors_shape((rows, columns), block))
        by_use.factors[name] = Factors(other, exponents, block)
    elif len(shape) == 2 and shape[0] == rows and 1 < shape[1] < columns and columns % shape[1] == 0:
        of_mx = exponents.dtype == torch.float8_e8m0fnu and columns // shape[1] == _MX
        layout = "mxfp8, " if of_mx else ""
        layout += f"FP8 with a factor for {columns // shape[1]} columns of a row"
        by_use.unread.setdefault(layout, []).append(name)
    else:
        others = "" if blocks_only else f"; a factor for each row would be [{rows}, 1], and one for all [1]"
        dtypes = " or ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES)
        by_use.problems.append(
            f"{other} is {list(shape)} in {stored.dtype}; blocks of {block[0]} x {block[1]} need "
            f"{list(expected)} in {dtypes}{others}"
        )


def _weight_of(name: str, tensors: Mapping[str, Tensor]) -> str | None:
    """Return the weight's name if ``name`` is the name of a weight's factors, else ``None``."""
    for suffix in _SUFFIXES:
        weight = name.removesuffix(suffix)
        if weight != name and (weight in tensors or weight.endswith(_WEIGHT) or suffix == FACTORS):
            return weight
    # A `.scale` without a weight next to it may be a weight itself.
    weight = name.removesuffix(_V4) + _WEIGHT
    return weight if name.endswith(_V4) and weight in tensors else None


def _is_of_activations(name: str, tensors: Mapping[str, Tensor]) -> bool:
    stem = next((name.removesuffix(suffix) for suffix in _OF_ACTIVATIONS if name.endswith(suffix)), None)
    weight = None if stem is None else tensors.get(stem + _WEIGHT)
    return weight is not None and weight.dtype == torch.float8_e4m3fn


# -- layouts that are not read -------------------------------------------------------------------


def _packed(name: str, tensor: Tensor, tensors: Mapping[str, Tensor]) -> str | None:
    """Return the packed layout of a tensor, recognised by its and its neighbours' names, or ``None``."""
    stem, _, last = name.rpartition(".")
    if last == "weight_packed":
        if tensor.dtype == torch.int32:
            return "int4 or int8, packed in int32 (compressed-tensors)"
        kind = "nvfp4" if f"{stem}.weight_global_scale" in tensors else "mxfp4"
        return f"{kind}, packed (compressed-tensors)"
    if last == "qweight":
        return "int4 or int8, packed (GPTQ or AWQ)"
    if last == "weight_zero_point":
        return "numbers with a zero point (compressed-tensors)"
    if last.endswith("_blocks") and name.removesuffix("_blocks") + "_scales" in tensors:
        return "mxfp4, blocks and scales (gpt-oss)"
    if name + "_scale_2" in tensors:
        return "nvfp4, packed (ModelOpt)"
    if name + ".absmax" in tensors or (last == "weight" and f"{stem}.SCB" in tensors):
        return "nf4, fp4 or int8 (bitsandbytes)"
    return None


def _other_dtype(name: str, tensor: Tensor, tensors: Mapping[str, Tensor]) -> str | None:
    """Return the layout of a tensor whose dtype is not read; ``None`` for weights and factors."""
    if tensor.dtype in _READ or _weight_of(name, tensors) in tensors:
        return None
    kind = str(tensor.dtype).removeprefix("torch.")
    if tensor.dtype == torch.float4_e2m1fn_x2:
        return "fp4 (F4), two numbers in a byte"
    factors = next((tensors[other] for other in _names_of_factors(name) if other in tensors), None)
    if factors is None:
        return kind
    # Two 4-bit numbers share a byte: a factor for 32 of them is one for 16 bytes.
    if tensor.dim() == factors.dim() == 2 and tensor.shape[1] * 2 == factors.shape[1] * _MX:
        return f"mxfp4, packed in {kind} (DeepSeek-V4's experts)"
    return f"{kind} with factors"
