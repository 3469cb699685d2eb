"""A fork of an old Megatron-core under another root package name, with a training loop."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap

import pytest

from tests.support import third_party

pytestmark = pytest.mark.releases(">=0.12.1,<0.16")

TRAINING = {
    "__init__.py": "",
    "arguments.py": """
        import argparse


        def parse_args(extra_args_provider=None, ignore_unknown_args=False):
            parser = argparse.ArgumentParser(allow_abbrev=False)
            parser.add_argument("--dsa-indexer-topk", type=int)  # the fork knows one of the flags
            return extra_args_provider(parser).parse_args()


        def validate_args(args, defaults={}):
            return args
        """,
    "global_vars.py": """
        ARGS = None


        def get_args():
            return ARGS


        def get_tensorboard_writer():
            return None


        def get_wandb_writer():
            return None
        """,
    "training.py": """
        def training_log(loss_dict, total_loss_dict, learning_rate, iteration):
            return dict(total_loss_dict)
        """,
}
SCRIPT = """
import json, sys
import mindspeed_dsa.megatron_adaptor
import torch
import torch.distributed as dist
from corp_megatron.training import arguments, global_vars, training
from corp_megatron.core import num_microbatches_calculator, parallel_state, tensor_parallel
from corp_megatron.core.models.gpt import GPTModel
from corp_megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from corp_megatron.core.transformer.transformer_config import MLATransformerConfig
import dataclasses

args = global_vars.ARGS = arguments.parse_args()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
parallel_state.initialize_model_parallel()
tensor_parallel.model_parallel_cuda_manual_seed(1)
num_microbatches_calculator.init_num_microbatches_calculator(0, None, 2, 1, 1)
# As Megatron-LM does: every argument that has the name of a field.
names = [field.name for field in dataclasses.fields(MLATransformerConfig)]
given = {name: getattr(args, name) for name in names if hasattr(args, name)}
config = MLATransformerConfig(
    num_layers=1, hidden_size=16, num_attention_heads=2, ffn_hidden_size=32, q_lora_rank=8, kv_lora_rank=8,
    qk_head_dim=8, qk_pos_emb_head_dim=8, v_head_dim=8, rope_type="rope", qk_layernorm=True,
    add_bias_linear=False, bias_dropout_fusion=False, apply_rope_fusion=False, hidden_dropout=0.0, **given,
)
spec = get_gpt_decoder_block_spec(config, False, normalization="RMSNorm")
model = GPTModel(config, spec, vocab_size=32, max_sequence_length=12, position_embedding_type="rope")
tokens = torch.arange(24).view(2, 12)
loss = model(tokens, torch.arange(12).expand(2, -1), None, labels=tokens).mean()
loss.backward()
print(json.dumps({
    "gradients": {n: float(p.grad.abs().max()) for n, p in model.named_parameters() if "indexer" in n},
    "logged": float(training.training_log({}, {}, 0.1, 1)["indexer loss"]),
    "again": float(training.training_log({}, {}, 0.1, 2)["indexer loss"]),
    "stock": sorted(name for name in sys.modules if name.partition(".")[0] == "megatron"),
    "sites": [
        [site["target"], site["state"]]
        for site in mindspeed_dsa.report() if "dsa-backport" in site["features"]
    ],
}), file=sys.stderr)
"""


@pytest.fixture(scope="module")
def findings(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fork")
    core = folder / "corp_megatron" / "core"
    shutil.copytree(third_party.folder("megatron.core"), core, ignore=shutil.ignore_patterns("*.pyc"))
    for file in core.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        file.write_text(text.replace("megatron.core", "corp_megatron.core"), encoding="utf-8")
    for name, text in TRAINING.items():
        file = folder / "corp_megatron" / "training" / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(textwrap.dedent(text))
    (folder / "job.py").write_text(SCRIPT)
    flags = "--megatron-root corp_megatron --experimental-attention-variant dsa --dsa-indexer-n-heads 4"
    flags += " --dsa-indexer-head-dim 8 --dsa-indexer-topk 4 --dsa-indexer-loss-coeff 0.5"
    done = subprocess.run(
        [sys.executable, "job.py", *flags.split(), "--dsa-indexer-use-sparse-loss"],
        capture_output=True,
        text=True,
        timeout=200,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stderr.splitlines()[-1])


def test_the_forks_model_trains_its_indexer(findings):
    assert len(findings["gradients"]) == 5
    assert all(gradient > 0 for gradient in findings["gradients"].values())


def test_the_log_gets_the_loss_of_each_step(findings):
    assert findings["logged"] > 0
    assert findings["again"] == 0


def test_no_second_megatron_is_loaded_and_every_site_is_applied(findings):
    assert findings["stock"] == []
    states = {state for _, state in findings["sites"]}
    assert states <= {"applied", "skipped"}
    for name in ("MLASelfAttention.__init__", "training_log", "parse_args"):
        assert any(target.endswith(name) and state == "applied" for target, state in findings["sites"]), name
