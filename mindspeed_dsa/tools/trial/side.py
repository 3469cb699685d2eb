"""One side of ``try``: a subprocess that trains a small DeepSeek-V3.2-shaped model step by step.

Each line on standard input requests a step. The process prints one JSON object about the model, and one per
step, on standard output. Prints of torch and Megatron go to standard error.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor

from mindspeed_dsa import platforms, session
from mindspeed_dsa.feature import Megatron
from mindspeed_dsa.tools.weights.model import chunk, one_rank_for_all

VOCABULARY = 256
"""Vocabulary size: tokens are bytes."""
MODEL: dict[str, Any] = {
    "multi_latent_attention": True,
    "qk_layernorm": True,
    "untie_embeddings_and_output_weights": True,
    "num_layers": 4,
    "hidden_size": 128,
    "ffn_hidden_size": 384,
    "num_attention_heads": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_head_dim": 32,
    "qk_pos_emb_head_dim": 16,
    "v_head_dim": 32,
    "experimental_attention_variant": "dsa",
    "dsa_indexer_n_heads": 16,
    "dsa_indexer_head_dim": 32,
    "dsa_indexer_topk": 48,
    "num_experts": 4,
    "moe_layer_freq": [0, 1, 1, 1],
    "moe_ffn_hidden_size": 128,
    "moe_router_topk": 2,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_shared_expert_intermediate_size": 128,
}
"""Sizes of a small DeepSeek-V3.2: MLA, an indexer, experts with a shared one, a dense first layer.

With few index heads many scores are exactly zero, and ``torch.topk`` in Megatron has no defined order of
ties.
"""
TRAINING: dict[str, Any] = {
    "dsa_indexer_loss_coeff": 0.01,
    "dsa_indexer_use_sparse_loss": True,
    "moe_router_dtype": "fp32",
}
_SPREAD, _RATE = 0.02, 1e-3


class Sequences:
    """Training sequences from the bytes of this package's source files, which every installation has.

    Attributes:
        length: number of tokens per sequence.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        package = Path(__file__).parents[2]
        text = b"".join(file.read_bytes() for file in sorted(package.rglob("*.py")))
        self._tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def __call__(self, step: int) -> tuple[Tensor, Tensor]:
        """Return a step's tokens and labels, int64 ``[1, length]`` each. The text is read cyclically."""
        start = step * self.length
        positions = torch.arange(start, start + self.length + 1) % self._tokens.numel()
        row = self._tokens[positions].long()
        return row[None, :-1], row[None, 1:]


class Trainer:
    """The model on one device, and its optimizer.

    Attributes:
        model: Megatron's ``GPTModel``.
        length: number of tokens per sequence; a step has one sequence.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self._platform = platforms.current()
        self.model = chunk(MODEL, VOCABULARY, torch.float32, TRAINING)
        # Built on the meta device, so memory is allocated only here.
        self.model.to_empty(device=self._platform.device)
        fill(self.model)
        self._sequences = Sequences(length)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=_RATE)
        # The peak then includes the weights, but nothing of the setup.
        self._platform.reset_peak_memory()

    def about(self) -> dict[str, Any]:
        """Return the device's name and the number of parameters."""
        parameters = sum(map(torch.numel, self.model.parameters()))
        return {"device": self._platform.device_name(), "parameters": parameters}

    def step(self, number: int) -> dict[str, float]:
        """Train on one sequence.

        Returns:
            Loss in nats per token before the update, time in seconds, and peak memory in bytes since the
            model was built.
        """
        device = self._platform.device
        tokens, labels = (tensor.to(device) for tensor in self._sequences(number))
        positions = torch.arange(self.length, device=device)[None]
        self._platform.synchronize()
        begin = time.perf_counter()
        loss = self.model(tokens, positions, None, labels=labels).mean()
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._platform.synchronize()
        taken = time.perf_counter() - begin
        peak = self._platform.memory().peak
        return {"lm_loss": loss.item(), "step_time_s": taken, "peak_memory_bytes": peak}


@torch.no_grad()
def fill(model: torch.nn.Module) -> None:
    """Initialize the model's weights, with the same values in every process."""
    generator = torch.Generator().manual_seed(1234)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.zero_()
        elif parameter.dim() == 1:  # a norm's scale
            parameter.fill_(1.0)
        else:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * _SPREAD)
    for buffer in model.buffers():  # the routers' token counts
        buffer.zero_()


@contextlib.contextmanager
def answers() -> Iterator[TextIO]:
    """Yield the real standard output for JSON results, and redirect all other prints to standard error."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers_file:
        # Redirect file descriptor 1 itself: C++ code prints there without Python's sys.stdout.
        os.dup2(2, 1)
        yield answers_file


def main(side: str, length: int) -> None:
    """Train side ``stock`` or ``fused``, one step per line of standard input."""
    switches = {"experimental_attention_variant": "dsa", "transformer_impl": "local"}
    with (
        answers() as out,
        session.enabled(**switches, use_fused_dsa=side == "fused"),
        one_rank_for_all(Megatron()),
    ):
        trainer = Trainer(length)
        print(json.dumps(trainer.about()), file=out, flush=True)
        for number, _ in enumerate(sys.stdin):
            record = trainer.step(number)
            if not math.isfinite(record["lm_loss"]):
                raise SystemExit(f"the loss of step {number + 1} is {record['lm_loss']}")
            print(json.dumps(record), file=out, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
