"""Jobs that start from Hugging Face's files or from imported weights, and that write such files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.matrix.hugging_face import DEEPSEEK, Model

from .conftest import ROOT, JobServer, results

transformers = pytest.importorskip("transformers", "5.20", reason="needs transformers >= 5.20")
VOCABULARY = 384
"""Padded number of embedding rows of a tokenizer for bytes."""
SIZES = """
--num-layers 3 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 --q-lora-rank 24
--kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 8 --v-head-dim 8 --num-experts 8
--moe-ffn-hidden-size 16 --moe-router-topk 4 --moe-shared-expert-intermediate-size 16
--moe-router-num-groups 4 --moe-router-group-topk 2 --moe-router-topk-scaling-factor 2.5
--max-position-embeddings 64 --dsa-model deepseek-v3.2 --dsa-indexer-n-heads 32
--dsa-indexer-head-dim 16 --dsa-indexer-topk 6 --train-iters 3 --eval-iters 0
""".split()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that transformers has written."""
    folder = tmp_path_factory.mktemp("model")
    Model(DEEPSEEK).theirs(vocab_size=VOCABULARY, num_nextn_predict_layers=0).save_pretrained(folder)
    return folder


@pytest.mark.full
def test_files_and_imported_weights_train_alike(jobs: JobServer, model: Path, tmp_path: Path) -> None:
    padded = [*SIZES, "--make-vocab-size-divisible-by", str(VOCABULARY)]
    written, imported = tmp_path / "hf", tmp_path / "imported"
    from_files = jobs.run(tmp_path / "files", *padded, "--load-hf", str(model), "--save-hf", str(written))
    assert from_files.code == 0, from_files.output
    assert "of weights on this rank" in from_files.output
    command = [sys.executable, "-m", "mindspeed_dsa", "weights", "import", str(model), str(imported), "--"]
    flags = [*SIZES[: SIZES.index("--train-iters")], "--padded-vocab-size", str(VOCABULARY)]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([*command, *flags], capture_output=True, text=True, env=environ, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    alone = tmp_path / "alone"
    loaded = jobs.run(tmp_path / "loaded", *padded, "--load", str(imported), "--save-hf", str(alone))
    assert loaded.code == 0, loaded.output
    assert "provides the weights only" in loaded.output
    drawn = jobs.run(tmp_path / "drawn", *padded)
    assert results(tmp_path / "files") == results(tmp_path / "loaded") != results(tmp_path / "drawn")
    assert drawn.code == 0
    _, loading_info = transformers.AutoModelForCausalLM.from_pretrained(
        written / "iter_0000003", output_loading_info=True
    )
    assert not any(loading_info.values()), loading_info


@pytest.mark.full
def test_what_cannot_be_loaded_ends_every_rank_with_the_message_alone(
    jobs: JobServer, model: Path, tmp_path: Path
) -> None:
    layout = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
    ended = jobs.start(tmp_path / "run", *SIZES, *layout, "--load-hf", str(model), ranks=2)
    assert [rank.code for rank in ended] == [2, 2], ended[0].output + ended[1].output
    message = f"pretrain_dsa.py: mindspeed_dsa load-hf: {model}: embedding.word_embeddings.weight is "
    assert ended[0].output.splitlines()[-1].startswith(message)
    assert not any("Traceback" in rank.output for rank in ended)


def test_two_sources_of_weights_are_refused(jobs: JobServer, model: Path, tmp_path: Path) -> None:
    finished = jobs.run(tmp_path / "run", *SIZES, "--load-hf", str(model), "--load", str(tmp_path))
    assert finished.code == 2
    assert "--load-hf" in finished.output
    assert "both say where the weights come from; omit one" in finished.output
