"""Import and export of a model's weights, compared with a plain copy of the same files."""

from __future__ import annotations

import filecmp
import json
import shutil
import statistics
import tempfile
import threading
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.registry import Metrics
from mindspeed_dsa.feature import Megatron
from mindspeed_dsa.features.checkpoints.hugging_face import shard_files
from mindspeed_dsa.features.checkpoints.hugging_face.architectures.registry import find
from mindspeed_dsa.features.checkpoints.hugging_face.config import arguments_of
from mindspeed_dsa.features.checkpoints.hugging_face.files import Reader
from mindspeed_dsa.features.checkpoints.hugging_face.names import Shape
from mindspeed_dsa.features.checkpoints.hugging_face.pieces import pieces_of
from mindspeed_dsa.runs.files import sync_tree
from mindspeed_dsa.tools.weights import importing, job
from mindspeed_dsa.tools.weights.model import built

GLM: dict[str, Any] = {
    "model_type": "glm_moe_dsa", "hidden_size": 2048, "intermediate_size": 6144,
    "moe_intermediate_size": 1024, "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32768,
    "n_routed_experts": 64, "num_experts_per_tok": 8, "n_shared_experts": 1, "q_lora_rank": 1024,
    "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 0, "index_n_heads": 32, "index_head_dim": 128, "index_topk": 2048,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_parameters": {"rope_theta": 1e6},
    "pad_token_id": 0,
}  # fmt: skip
"""GLM-5's shape at a third of its width."""
TINY = {"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128, "vocab_size": 512,
        "num_attention_heads": 4, "num_key_value_heads": 4, "n_routed_experts": 8}  # fmt: skip
# 2 bytes x 64 experts x 3 matrices x 2048 x 1024 = 768 MiB.
_LAYER = 2 * 64 * 3 * 2048 * 1024
"""Bytes of one layer's experts in bf16."""


def run(device: str, quick: bool = False, size: str = "4") -> Metrics:
    """Return all metrics of the case.

    Args:
        device: not used.
        quick: a model too small for meaningful figures.
        size: model's size in GB, in bf16.
    """
    # All weights but the experts take about 0.4 GB, and the first layer has no experts.
    config = GLM | {"num_hidden_layers": 1 + max(1, round((float(size) * 1e9 - 4e8) / _LAYER))}
    if quick:
        config |= TINY | {"num_hidden_layers": 2}
    with tempfile.TemporaryDirectory(prefix="weights-") as name:
        folder = Path(name)
        _write(folder / "bf16", config)
        figures = {"bf16": _measured(folder, "bf16", False, 1 if quick else 3)}
        # The FP8 model of the second measurement is an FP8 export of the bf16 model.
        _import(folder / "bf16", folder / "first")
        _export(folder / "first", folder / "fp8", None, True)
        shutil.rmtree(folder / "first")
        shutil.rmtree(folder / "bf16")
        figures["fp8"] = _measured(folder, "fp8", True, 1 if quick else 3)
    return {name: {kind: each[name] for kind, each in figures.items()} for name in figures["bf16"]}


def _write(folder: Path, config: dict[str, Any]) -> None:
    """Write a model with random weights in bf16."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    values, shapes = arguments_of(config, "benchmark"), {}
    shape = Shape.of(Namespace(**values), find(config, "benchmark"))
    with built(values, config["vocab_size"], torch.bfloat16) as model:
        for _, pieces in pieces_of(model.sharded_state_dict(), Megatron()):
            for piece in pieces:
                rows, *rest = piece.whole
                shapes |= {
                    name: (last - first, *rest) for name, first, last in shape.segments(piece.place, rows)
                }
    bias = "e_score_correction_bias"
    dtypes = {key: torch.float32 if key.endswith(bias) else torch.bfloat16 for key in shapes}
    announced = ((key, torch.empty(shape, dtype=dtypes[key], device="meta")) for key, shape in shapes.items())
    shards = shard_files.divide(announced, 5 * 10**9)
    for file, tensors in shards.items():
        with shard_files.Writer(folder / file, tensors) as writer:
            for key, tensor in tensors.items():
                writer.write(key, torch.randn(tensor.shape).mul_(0.02).to(tensor.dtype))
    shard_files.write_index(folder, shards)


def _import(source: Path, target: Path) -> None:
    importing.run(job.import_of(source, target, (), None), _silent)


def _export(checkpoint: Path, target: Path, like: Path | None, fp8: bool) -> None:
    options = Namespace(
        checkpoint=checkpoint,
        target=target,
        like=like,
        dtype="bfloat16",
        shard_size=5 * 10**9,
        fp8_blocks=fp8,
        dsa_indexer_topk_pattern=None,
    )
    job.export(options, _silent)


def _copy(source: Path, target: Path) -> None:
    shutil.copytree(source, target)
    sync_tree(target)


def _silent(total: int) -> Callable[[int], None]:
    return lambda done: None


def _measured(folder: Path, kind: str, fp8: bool, rounds: int) -> dict[str, Any]:
    model, checkpoint, out, copy = (folder / entry for entry in (kind, "checkpoint", "out", "copy"))
    seconds: dict[str, list[float]] = {"import": [], "export": [], "copy": []}
    resident = {"import": 0, "export": 0}
    work: dict[str, Callable[[], None]] = {
        "copy": lambda: _copy(model, copy),
        "import": lambda: _import(model, checkpoint),
        "export": lambda: _export(checkpoint, out, model, fp8),
    }
    for number in range(rounds + 1):
        for what, do in work.items():
            with _Resident() as watch:
                began = time.perf_counter()
                do()
                took = time.perf_counter() - began
            if number:  # the first round is the warmup, and checks the files
                seconds[what].append(took)
            if what in resident:
                resident[what] = max(resident[what], watch.peak)
        if number == 0:
            _require_same(model, out)
        for entry in (checkpoint, out, copy):
            shutil.rmtree(entry)
    files = Reader(model)
    largest = max(torch.Size(files.shape(name)).numel() * 2 for name in files.names)
    total = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    rates = {
        what: statistics.median(c / s for c, s in zip(seconds["copy"], seconds[what], strict=True))
        for what in resident
    }
    return {
        "import_rate_over_copy": rates["import"],
        "export_rate_over_copy": rates["export"],
        "resident_over_largest_tensor": max(resident.values()) / largest,
        "seconds": {what: statistics.median(taken) for what, taken in seconds.items()},
        "gb": total / 1e9,
    }


def _require_same(model: Path, out: Path) -> None:
    """Raise unless an import and export reproduces the model's files byte for byte."""
    for file in model.glob("*.safetensors"):
        if not filecmp.cmp(file, out / file.name, shallow=False):
            raise RuntimeError(f"{file.name} is another after import and export")


class _Resident:
    """Peak of this process's anonymous memory above the level at entry, in bytes."""

    def __enter__(self) -> _Resident:
        self._begin, self.peak, self._end = self._now(), 0, threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._end.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._end.wait(0.005):
            self.peak = max(self.peak, self._now() - self._begin)

    @staticmethod
    def _now() -> int:
        status = Path("/proc/self/status").read_text(encoding="ascii")
        return int(status.split("RssAnon:")[1].split()[0]) * 1024
