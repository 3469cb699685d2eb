"""Models of transformers with their own attention and with this library's: time and memory of passes.

One attention layer has the released widths of heads, latent and indexer, but fewer heads; dots3_note has a
second layer, with a sliding window. With all 64 index heads, the scores of 4096 tokens would take 4 GiB in
transformers, and of 16384 tokens 64 GiB. Each way and kind of pass runs in its own process with a memory
limit, over all lengths; where it exceeds the limit, it reports that instead.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.registry import Metrics

LENGTHS = (4096, 8192, 16384)
WAYS = ("eager", "sdpa", "mindspeed_dsa")
PASSES = ("forward", "step", "step with the indexer's loss")
LIMIT_GIB = 12
_OUT_OF_MEMORY = ("not enough memory", "Cannot allocate memory", "MemoryError")
_MIB = 2**20


_NARROW = {
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "index_n_heads": 2,
    "hidden_size": 256,
    "q_lora_rank": 128,
}
"""Widths with which transformers' scores of 16384 tokens, 1 GiB for each head and copy, fit into memory."""
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "deepseek_v32": ("DeepseekV32Config", "DeepseekV32Model", {}),
    "axk2": (
        "AXK2Config",
        "AXK2Model",
        {**_NARROW, "kv_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64},
    ),
    "hy_v4": ("HYV4Config", "HYV4Model", {**_NARROW, "qk_nope_head_dim": 192, "v_head_dim": 256}),
    "mistral_large4": (
        "MistralLarge4TextConfig",
        "MistralLarge4TextModel",
        {**_NARROW, "qk_nope_head_dim": 64, "no_rope_layers": [1]},
    ),
    "dots3_note": (
        "Dots3NoteTextConfig",
        "Dots3NoteTextModel",
        {
            **_NARROW,
            "num_hidden_layers": 2,
            "layer_types": ["indexed_attention", "sliding_attention"],
            "swa_num_attention_heads": 1,
            "swa_num_key_value_heads": 1,
        },
    ),
}
"""Names of configuration and model, and widths that differ from DeepSeek-V3.2's, by family."""
NO_SDPA = ("hy_v4",)
"""Families that transformers runs only as ``eager``."""


def run(device: str, quick: bool = False, only: str = ",".join(FAMILIES)) -> Metrics:
    """Return the metrics of all passes, by family."""
    families = only.split(",")
    for family in families:
        if family not in FAMILIES:
            raise SystemExit(f"transformers: --only {family!r} is no family; choose of {', '.join(FAMILIES)}")
    widths = {family: FAMILIES[family][2] for family in families}
    metrics: dict[str, Any] = {"limit_gib": LIMIT_GIB, "layer": sizes(quick), "widths": widths}
    for family in families:
        # A step contains a forward pass, and one figure per length says enough of families alike.
        for what in PASSES if family == "deepseek_v32" else PASSES[1:]:
            ways = [x for x in WAYS if x == WAYS[2] or what != PASSES[2]]
            for way in (x for x in ways if x != "sdpa" or family not in NO_SDPA):
                found = measured(way, what, (64, 128) if quick else LENGTHS, quick, family)
                print(family, what, way, found, file=sys.stderr)
                for length, figures in found.items():
                    of_length = metrics.setdefault(family, {}).setdefault(what, {}).setdefault(length, {})
                    of_length[way] = figures
    return metrics


def sizes(quick: bool) -> dict[str, int]:
    """Return the configuration of DeepSeek-V3.2's layer."""
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


def measured(
    way: str, what: str, lengths: Sequence[int], quick: bool, family: str = "deepseek_v32"
) -> dict[str, Metrics | str]:
    """Measure ascending lengths in a separate process.

    Returns:
        By length, seconds and MiB above the level before the first pass, or that memory ran out.
    """
    root = Path(__file__).parents[1]
    paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-m", __name__, json.dumps([way, what, list(lengths), quick, family])],
        cwd=root,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
    )
    figures = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode != 0:
        if not any(words in done.stderr for words in _OUT_OF_MEMORY):
            raise SystemExit(f"transformers: {family}, {way}, {what} failed:\n{done.stderr[-2000:]}")
        figures += [f"more than {LIMIT_GIB} GiB"] * (len(lengths) - len(figures))
    return {str(length): of_length for length, of_length in zip(lengths, figures, strict=True)}


def child(way: str, what: str, lengths: Sequence[int], quick: bool, family: str) -> None:
    """Build the model, warm up, and print one pass of each length as a line of JSON."""
    import torch
    import transformers

    from mindspeed_dsa.integrations.transformers import apply_dsa

    resource.setrlimit(resource.RLIMIT_DATA, (LIMIT_GIB * 2**30,) * 2)
    torch.manual_seed(0)
    of_config, of_model, widths = FAMILIES[family]
    values: dict[str, Any] = {
        **sizes(quick),
        "vocab_size": 512,
        "pad_token_id": None,
        "intermediate_size": 256,
        "moe_intermediate_size": 64,
        "num_hidden_layers": 1,
        "first_k_dense_replace": 2,
        "mlp_layer_types": ["dense"] * widths.get("num_hidden_layers", 1),
        "max_position_embeddings": lengths[-1],
        "attn_implementation": "eager" if way == WAYS[2] else way,
    }
    config = getattr(transformers, of_config)(**values | widths)
    model = getattr(transformers, of_model)(config)
    in_use = None
    if way == WAYS[2]:
        in_use = apply_dsa(model, loss_coeff=1.0 if what == PASSES[2] else 0.0)
    level, is_warm = _peak(), False
    for length in (lengths[0], *lengths):
        ids = torch.randint(config.vocab_size, (1, length))
        before = time.perf_counter(), time.process_time()
        with torch.set_grad_enabled(what != PASSES[0]):
            loss = model(ids, use_cache=False).last_hidden_state.square().mean()
            if in_use is not None and in_use.loss is not None:
                loss = loss + in_use.loss
            if what != PASSES[0]:
                loss.backward()
                model.zero_grad()
            del loss
        after = time.perf_counter(), time.process_time()
        seconds, cpu_seconds = (now - then for now, then in zip(after, before, strict=True))
        figures = {
            "seconds": round(seconds, 3),
            "cpu_seconds": round(cpu_seconds, 3),
            # Of all passes so far, of which the last one needs most
            "extra_mib": round((_peak() - level) / _MIB),
        }
        if is_warm:
            print(json.dumps(figures), flush=True)
        is_warm = True


def _peak() -> int:
    """Return this process's peak resident bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    child(*json.loads(sys.argv[1]))
