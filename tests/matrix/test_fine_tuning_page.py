"""Blocks of docs/fine-tune-glm-5.md in order, on a tiny model: flags, training, export, a question."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.features.data.sft_prompts.test_sft_prompts import CHAT, PLAIN, tokenizer
from tests.matrix.hugging_face import GLM, Model
from tests.matrix.test_pretrain_gpt import checkout
from tests.matrix.test_weights_in_training import tensors

pytest.importorskip("datasets", reason="--sft reads conversations with it")
pytestmark = [
    pytest.mark.releases(">=0.18,<0.21"),
    pytest.mark.full,
    pytest.mark.timeout(900),
    pytest.mark.skipif(checkout() is None, reason="MEGATRON_LM names no checkout of the installed release"),
]

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "fine-tune-glm-5.md"
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.M | re.S)
NODES = "NODES=(--standalone --nproc-per-node 2)"
LAYOUT = """LAYOUT=(--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2
    --expert-tensor-parallel-size 1 --seq-length 64 --global-batch-size 4 --train-iters 2 --lr-warmup-iters 0
    --transformer-impl local --distributed-backend gloo --no-gradient-accumulation-fusion
    --no-masked-softmax-fusion --no-bias-swiglu-fusion --distributed-timeout-minutes 5)
"""
"""Replaces the page's 64 devices, and everything that has no CPU kernel; later flags win."""
TOKENS = 256


def blocks(language: str) -> list[str]:
    """Return the page's blocks of a language."""
    return [text for kind, text in BLOCK.findall(PAGE.read_text(encoding="utf-8")) if kind == language]


def test_the_page_fine_tunes_a_model(tmp_path: Path) -> None:
    import torch

    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 8000000}
    theirs = Model(GLM, 8, 4, 3).theirs(vocab_size=TOKENS, num_nextn_predict_layers=0, rope_parameters=rope)
    theirs.to(torch.bfloat16).save_pretrained(tmp_path / "HF_DIR")
    words = tokenizer(PLAIN)
    words.add_special_tokens({"pad_token": "<pad>"})
    words.save_pretrained(tmp_path / "HF_DIR")
    line = json.loads(blocks("json")[0])
    assert [message["role"] for message in line["messages"]] == ["system", "user", "assistant"]
    rows = [json.dumps(line), json.dumps({"messages": CHAT})] * 8
    (tmp_path / "conversations.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")

    _, _, layout, data, flags, train, export = blocks("")
    assert layout.startswith("LAYOUT=(")
    train = train.replace("examples/", f"{ROOT}/examples/")
    script = "\n".join(["set -e", NODES, LAYOUT, data, flags, train, export])
    printed = run(["bash", "-c", script], tmp_path)
    assert re.search(r"iteration +2/ +2 .* lm loss: [0-5]\.", printed), printed[-3000:]

    before, after = tensors(tmp_path / "HF_DIR"), tensors(tmp_path / "trained")
    assert before.keys() == after.keys()
    moved = {name for name, tensor in after.items() if not torch.equal(tensor, before[name].to(tensor.dtype))}
    assert any("q_a_proj" in name for name in moved)
    assert [name for name in moved if "indexer" in name or "correction_bias" in name] == []

    (question,) = blocks("python")
    answer = run([sys.executable, "-c", question.replace(', device_map="auto"', "")], tmp_path)
    assert "[U] hi [A]" in answer


def run(command: list[str], folder: Path) -> str:
    """Run a command in a folder, with this Python's programs first."""
    programs = [os.path.dirname(sys.executable), os.path.join(sys.base_prefix, "bin"), os.environ["PATH"]]
    where = str(checkout())
    environment = {
        **os.environ,
        "MEGATRON_LM": where,
        "OMP_NUM_THREADS": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "HF_HOME": str(folder / "cache"),
        "PATH": os.pathsep.join(programs),
        "PYTHONPATH": os.pathsep.join([where, str(ROOT), *filter(None, sys.path)]),
    }
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, timeout=600)
    printed = done.stdout + done.stderr
    assert done.returncode == 0, f"{shlex.join(command)}\n{printed[-6000:]}"
    return printed
