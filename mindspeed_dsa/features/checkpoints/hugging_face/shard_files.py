"""Files of a Hugging Face model, written tensor by tensor.

``safetensors.torch.save_file`` needs all tensors of a file in memory, 5 GB for each process. This writer
produces the same bytes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from mindspeed_dsa.features.checkpoints.hugging_face.config import INDEX, SINGLE

_DTYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.float8_e4m3fn: "F8_E4M3",
}
"""Dict from dtype to its name in headers, in the library's order of tensors in a file: wide dtypes first."""
_ALIGNMENT = 8  # bytes, of the first tensor's offset
Shards = Mapping[str, Mapping[str, Tensor]]
"""Dict from file name to its tensors on the meta device, by name in the model's order."""


def divide(tensors: Iterable[tuple[str, Tensor]], shard_bytes: int) -> dict[str, dict[str, Tensor]]:
    """Distribute tensors over files like transformers: in order, up to ``shard_bytes`` per file.

    A larger tensor gets its own file.

    Args:
        tensors: pairs of name and meta tensor, in the model's order.
        shard_bytes: maximum bytes of tensors in a file.

    Returns:
        Dict from file name to its tensors: ``model.safetensors`` only, or
        ``model-00001-of-00003.safetensors`` and so on.
    """
    dealt: list[dict[str, Tensor]] = []
    current: dict[str, Tensor] = {}
    filled = 0
    for name, tensor in tensors:
        if tensor.nbytes > shard_bytes:
            dealt.append({name: tensor})
            continue
        if filled + tensor.nbytes > shard_bytes:
            dealt.append(current)
            current, filled = {}, 0
        current[name] = tensor
        filled += tensor.nbytes
    if current:
        dealt.append(current)
    if len(dealt) == 1:
        return {SINGLE: dealt[0]}
    return {
        f"model-{number:05d}-of-{len(dealt):05d}.safetensors": group
        for number, group in enumerate(dealt, start=1)
    }


def write_index(folder: Path, shards: Shards) -> None:
    """Write ``model.safetensors.index.json``, unless there is only one file."""
    if len(shards) == 1:
        return
    index = {
        "metadata": {
            "total_size": sum(each.nbytes for tensors in shards.values() for each in tensors.values())
        },
        "weight_map": {name: file for file, tensors in shards.items() for name in tensors},
    }
    (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


class Writer:
    """Writer of one file, whose tensors may be written by several threads in any order.

    Use it as a context manager; the file is synced to disk at the end of the block.

    Args:
        path: file to write.
        tensors: all tensors of the file, on the meta device.

    Raises:
        OSError: the file exists, or the disk is full.
    """

    def __init__(self, path: Path, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = dict(tensors)
        self._missing = set(tensors)
        self._begins: dict[str, int] = {}
        content: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        places = list(_DTYPES)
        # The header lists tensors in the order of their bytes, as the safetensors library does.
        for name, tensor in sorted(
            tensors.items(), key=lambda item: (places.index(item[1].dtype), item[0].encode("utf-8"))
        ):
            self._begins[name], end = end, end + tensor.nbytes
            content[name] = {
                "dtype": _DTYPES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [self._begins[name], end],
            }
        text = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
        # Pad the header with spaces, so that the tensors start at a multiple of 8 bytes.
        text += b" " * (-len(text) % _ALIGNMENT)
        self._start = 8 + len(text)
        self._file = open(path, "xb", buffering=0)  # noqa: SIM115 - closed at the end of the block
        self._put(memoryview(len(text).to_bytes(8, "little") + text), 0)

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        with self._file:
            if kind is None:
                assert not self._missing, self._missing
                os.fsync(self._file.fileno())

    def write(self, name: str, tensor: Tensor) -> None:
        """Write a tensor, which must have the announced dtype and shape."""
        announced = self._tensors[name]
        if (tensor.dtype, tensor.shape) != (announced.dtype, announced.shape):
            raise ValueError(f"{name} is {tensor.dtype} {list(tensor.shape)}, which was not announced")
        if tensor.numel():
            content = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data
            self._put(content, self._start + self._begins[name])
        self._missing.discard(name)

    def _put(self, view: memoryview, offset: int) -> None:
        # A single call may write only a part.
        while view:
            count = os.pwrite(self._file.fileno(), view, offset)
            view, offset = view[count:], offset + count
