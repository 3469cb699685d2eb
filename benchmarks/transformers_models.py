"""DeepSeek-V3.2 of transformers with its own attention and with this library's: time and memory of passes.

One attention layer has the released widths of heads, latent and indexer, but fewer heads. With all 64 index
heads, the scores of 4096 tokens would take 4 GiB in transformers, and of 16384 tokens 64 GiB. Each figure
comes from its own process with a memory limit; a process that exceeds the limit reports that instead.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.registry import Metrics

LENGTHS = (4096, 8192, 16384)
WAYS = ("eager", "sdpa", "mindspeed_dsa")
PASSES = ("forward", "step", "step with the indexer's loss")
LIMIT_GIB = 12
_OUT_OF_MEMORY = ("not enough memory", "Cannot allocate memory", "MemoryError")
_MIB = 2**20


def run(device: str, quick: bool = False) -> Metrics:
    """Return all metrics of the case."""
    lengths = (64, 128) if quick else LENGTHS
    metrics: dict[str, Any] = {"limit_gib": LIMIT_GIB, "layer": sizes(quick)}
    for length in lengths:
        for what in PASSES:
            ways = WAYS if what != PASSES[2] else WAYS[2:]
            figures = {way: measured(way, what, length, quick) for way in ways}
            metrics.setdefault(what, {})[str(length)] = figures
            print(length, what, figures, file=sys.stderr)
    return metrics


def sizes(quick: bool) -> dict[str, int]:
    """Return the layer's configuration."""
    return {
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "index_n_heads": 8,
        "hidden_size": 128 if quick else 1024,
        "q_lora_rank": 64 if quick else 512,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "index_head_dim": 128,
        "index_topk": 32 if quick else 2048,
    }


def measured(way: str, what: str, length: int, quick: bool) -> Metrics | str:
    """Measure in a separate process; return seconds and MiB above the prior level, or that memory ran out."""
    root = Path(__file__).parents[1]
    paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-m", __name__, json.dumps([way, what, length, quick])],
        cwd=root,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 0:
        found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
        return found
    if any(words in done.stderr for words in _OUT_OF_MEMORY):
        return f"more than {LIMIT_GIB} GiB"
    raise SystemExit(f"transformers: {way}, {what} of {length} tokens failed:\n{done.stderr[-2000:]}")


def child(way: str, what: str, length: int, quick: bool) -> Metrics:
    """Build the model and measure the second pass; the first one is the warmup."""
    import torch
    import transformers

    from mindspeed_dsa.integrations.transformers import apply_dsa

    resource.setrlimit(resource.RLIMIT_DATA, (LIMIT_GIB * 2**30,) * 2)
    torch.manual_seed(0)
    config = transformers.DeepseekV32Config(
        **sizes(quick),
        vocab_size=512,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_hidden_layers=1,
        first_k_dense_replace=1,
        max_position_embeddings=length,
        attn_implementation="eager" if way == WAYS[2] else way,
    )
    model = transformers.DeepseekV32Model(config)
    in_use = None
    if way == WAYS[2]:
        in_use = apply_dsa(model, loss_coeff=1.0 if what == PASSES[2] else 0.0)
    ids = torch.randint(config.vocab_size, (1, length))

    def one_pass() -> None:
        with torch.set_grad_enabled(what != PASSES[0]):
            loss = model(ids, use_cache=False).last_hidden_state.square().mean()
            if in_use is not None and in_use.loss is not None:
                loss = loss + in_use.loss
            if what != PASSES[0]:
                loss.backward()
                model.zero_grad()

    level = _peak()
    one_pass()
    before = time.perf_counter(), time.process_time()
    one_pass()
    after = time.perf_counter(), time.process_time()
    seconds, cpu_seconds = (now - then for now, then in zip(after, before, strict=True))
    return {
        "seconds": round(seconds, 3),
        "cpu_seconds": round(cpu_seconds, 3),
        "extra_mib": round((_peak() - level) / _MIB),
    }


def _peak() -> int:
    """Return this process's peak resident bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    print(json.dumps(child(*json.loads(sys.argv[1]))))
