"""Test of a device: trains, saves and resumes a small model in each precision.

Runs as a subprocess of ``doctor --device``. For each stage it prints one JSON object on standard output at
the beginning, and one with the result. The model uses Megatron's data parallelism, optimizer and checkpoints.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch

from mindspeed_dsa import platforms, session
from mindspeed_dsa.feature import Megatron
from mindspeed_dsa.ops.backend import calls
from mindspeed_dsa.tools.trial.side import MODEL, TRAINING, VOCABULARY, Sequences, answers, fill
from mindspeed_dsa.tools.weights.model import chunk, one_rank_for_all

SIZES: dict[str, Any] = {
    **MODEL,
    "num_layers": 2,
    "hidden_size": 64,
    "ffn_hidden_size": 96,
    "num_attention_heads": 2,
    "q_lora_rank": 32,
    "kv_lora_rank": 512,
    "qk_head_dim": 16,
    "qk_pos_emb_head_dim": 64,
    "v_head_dim": 16,
    "dsa_indexer_n_heads": 8,
    "dsa_indexer_head_dim": 128,
    "dsa_indexer_topk": 1024,
    "moe_layer_freq": [0, 1],
    "moe_ffn_hidden_size": 32,
    "moe_shared_expert_intermediate_size": 32,
}
"""Sizes of a model of two layers, the smallest that the fused operators of every device support."""
LENGTH = 1032
"""Sequence length, more than the 1024 selected keys, so that attention is sparse."""
STEPS = 2
_RATE = 1e-3
_SAME = 1e-3
"""Largest accepted relative difference of the loss after a resume."""


@dataclass(frozen=True)
class Case:
    """One run of the device test: precision of the model, and switches.

    Attributes:
        name: name in the printed results.
        dtype: dtype of the weights.
        fused: whether ``--use-fused-dsa`` is on, in absorbed form.
        saved: whether the model is saved, and training resumed from the checkpoint.
    """

    name: str
    dtype: torch.dtype
    fused: bool = False
    saved: bool = False


CASES = (
    Case("fp32", torch.float32),
    Case("bf16", torch.bfloat16),
    Case("bf16 with --use-fused-dsa", torch.bfloat16, fused=True, saved=True),
)


class Trainer:
    """The small model in Megatron's wrappers, with Megatron's distributed optimizer.

    Attributes:
        chunk: model in Megatron's DistributedDataParallel.
    """

    def __init__(self, dtype: torch.dtype, megatron: Megatron) -> None:
        ddp: Any = megatron("core.distributed")
        transformer: Any = megatron("core.transformer.module")
        optimizer: Any = megatron("core.optimizer")
        device = platforms.current().device
        model = chunk(SIZES, VOCABULARY, dtype, TRAINING)
        model.to_empty(device=device)
        fill(model)
        half = dtype is not torch.float32
        model.config.bf16 = half
        wrapped = transformer.Float16Module(model.config, model) if half else model
        buckets = ddp.DistributedDataParallelConfig(use_distributed_optimizer=True)
        self.chunk = ddp.DistributedDataParallel(model.config, buckets, wrapped)
        self._finish = ddp.finalize_model_grads
        config = optimizer.OptimizerConfig(
            optimizer="adam", lr=_RATE, bf16=half, params_dtype=dtype, use_distributed_optimizer=True
        )
        self._optimizer = optimizer.get_megatron_optimizer(config, [self.chunk])
        self._checkpoints: Any = megatron("core.dist_checkpointing")
        self._groups: Any = megatron("core.parallel_state")
        self._sequences = Sequences(LENGTH)
        self._device = device

    def step(self, number: int) -> float:
        """Train on one sequence, and return its loss before the update.

        Raises:
            ArithmeticError: the loss or the gradient norm is not finite.
        """
        self.chunk.zero_grad_buffer()
        self._optimizer.zero_grad()
        tokens, labels = (tensor.to(self._device) for tensor in self._sequences(number))
        positions = torch.arange(LENGTH, device=self._device)[None]
        loss = self.chunk(tokens, positions, None, labels=labels).float().mean()
        self._optimizer.scale_loss(loss).backward()
        self._finish([self.chunk])
        _, norm, _ = self._optimizer.step()
        value_of_loss = float(loss.detach())
        for name, value in (("loss", value_of_loss), ("gradient norm", float(norm))):
            if not math.isfinite(value):
                raise ArithmeticError(f"the {name} of step {number + 1} is {value}")
        return value_of_loss

    def save(self, folder: Path) -> None:
        """Save model and optimizer, as Megatron's training loop does by default."""
        folder.mkdir()
        self._checkpoints.save(self._state(is_loading=False), str(folder))

    def load(self, folder: Path) -> None:
        """Load model and optimizer from a checkpoint."""
        state = self._checkpoints.load(self._state(is_loading=True), str(folder))
        self.chunk.module.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])

    def _state(self, is_loading: bool) -> dict[str, Any]:
        told: dict[str, Any] = {}
        # Newer releases choose the optimizer's checkpoint format by this metadata.
        if hasattr(self._checkpoints, "load_content_metadata"):
            told["metadata"] = {
                "distrib_optim_sharding_type": "dp_reshardable",
                "singleton_local_shards": False,
                "chained_optim_avoid_prefix": True,
                "dp_cp_group": self._groups.get_data_parallel_group(with_context_parallel=True),
            }
        model = self.chunk.module.sharded_state_dict(**told)
        return {
            "model": model,
            "optimizer": self._optimizer.sharded_state_dict(model, is_loading=is_loading, **told),
        }


def stages(case: Case, folder: Path) -> Iterator[tuple[str, Callable[[], dict[str, Any] | None]]]:
    """Yield the name and function of each stage of a case; the caller stops after the first failure."""
    megatron = Megatron()
    trained: list[Trainer] = []
    losses: list[float] = []

    def train() -> dict[str, Any]:
        before = calls()
        trained.append(Trainer(case.dtype, megatron))
        losses.extend(trained[0].step(number) for number in range(STEPS))
        # The calls of operators since `before` say which backends really ran.
        used = [" ".join(names) for names in calls() - before]
        return {"operators": sorted(used)} if case.fused else {}

    def save() -> None:
        trained[0].save(folder)

    def resume() -> None:
        # Both train the same third step: one without interruption, one from the checkpoint.
        expected = trained[0].step(STEPS)
        again = Trainer(case.dtype, megatron)
        again.load(folder)
        resumed = again.step(STEPS)
        if not abs(resumed - expected) <= _SAME * abs(expected):
            raise ArithmeticError(f"the loss is {resumed} behind the checkpoint, and {expected} without it")

    yield f"{case.name}: {STEPS} steps", train
    if case.saved:
        yield f"{case.name}: save", save
        yield f"{case.name}: resume", resume


def said(error: BaseException) -> str:
    """Return an error in one line, with the innermost line in Megatron or this library."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if any(f"/{name}/" in frame.filename for name in ("megatron", "mindspeed_dsa"))
        and frame.filename != __file__
    ]
    place = ""
    if frames:
        *_, parent, file = Path(frames[-1].filename).parts
        place = f" ({parent}/{file}:{frames[-1].lineno})"
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}{place}"


def run(platform: str, tell: Callable[[dict[str, Any]], None], folder: Path) -> None:
    """Train, save and resume the small model in all cases, and report every stage.

    Args:
        platform: platform of the device.
        tell: function called with a JSON object when a stage begins, and with its result.
        folder: path for the checkpoint, which must not exist.
    """
    for case in CASES:
        switches = {
            "mindspeed_platform": platform,
            "experimental_attention_variant": "dsa",
            "transformer_impl": "local",
            "use_fused_dsa": case.fused,
            "use_dsa_absorb": "on" if case.fused else "off",
        }
        with contextlib.ExitStack() as running:
            tell({"begins": f"{case.name}: start"})
            try:
                running.enter_context(session.enabled(**switches))
                running.enter_context(one_rank_for_all(Megatron(), platforms.current().backend))
            except Exception as error:
                tell({"stage": f"{case.name}: start", "error": said(error)})
                continue
            for name, work in stages(case, folder):
                tell({"begins": name})
                started = time.perf_counter()
                try:
                    more = work()
                    platforms.current().synchronize()
                except Exception as error:
                    traceback.print_exc()
                    tell({"stage": name, "error": said(error)})
                    break
                tell({"stage": name, "seconds": round(time.perf_counter() - started, 1), **(more or {})})


def main(platform: str = "auto") -> None:
    """Test the device of a platform, and print the results on standard output."""
    temporary = tempfile.TemporaryDirectory(prefix="mindspeed_dsa-", ignore_cleanup_errors=True)
    with answers() as out, temporary as folder:
        run(platform, _teller(out), Path(folder) / "checkpoint")


def _teller(out: TextIO) -> Callable[[dict[str, Any]], None]:
    return lambda found: print(json.dumps(found), file=out, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
