"""MTP layers loaded from Hugging Face's files compute DeepSeek-V3's formula.

Section 2.2 of the technical report (arXiv:2412.19437), with the main model's output h after its last norm:
``h' = layer(eh_proj([norm(embedding of the next token); norm(h)]))`` and ``logits = head(norm(h'))``.
Transformers has no MTP layer. A one-layer model that takes embeddings is equivalent, once ``eh_proj`` has
been applied.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mindspeed_dsa import log
from mindspeed_dsa.features.checkpoints.hugging_face import loading
from tests.matrix import hugging_face
from tests.matrix import model as tiny
from tests.matrix.hugging_face import DEEPSEEK, EPSILON, GLM, SAMPLES, Model, job_of_any_release
from tests.support import model as job

pytest.importorskip("transformers", "5.20", reason="needs transformers >= 5.20: pip install '.[test]'")
pytestmark = pytest.mark.releases(">=0.12.1", quick=True)

HERE = "tests.matrix.test_prediction"
LAYERS = 3


@torch.no_grad()
def written(kind: str, folder: Path) -> dict[str, Tensor]:
    """Write files of a model with an MTP layer.

    Returns:
        logits ``[samples, length, vocabulary]`` of the model, and the MTP layer's logits by the formula.
    """
    from safetensors.torch import save_file

    torch.manual_seed(5)
    main = Model(kind, LAYERS).theirs().eval()
    layer = Model(kind, 1).theirs(first_k_dense_replace=0).eval()
    for parameter in (*main.parameters(), *layer.parameters()):
        parameter.normal_(std=0.2)
    layer.lm_head.weight.copy_(main.lm_head.weight)
    width = main.config.hidden_size
    mtp_weights = {
        "enorm.weight": 1 + 0.1 * torch.randn(width),
        "hnorm.weight": 1 + 0.1 * torch.randn(width),
        "eh_proj.weight": 0.2 * torch.randn(width, 2 * width),
        "shared_head.norm.weight": layer.model.norm.weight,
        "embed_tokens.weight": main.model.embed_tokens.weight,
        "shared_head.head.weight": main.lm_head.weight,
    }
    layer.save_pretrained(folder / "layer")
    main.save_pretrained(folder / "main")
    tensors = hugging_face.read_files(folder / "main")
    for name, tensor in hugging_face.read_files(folder / "layer").items():
        if name.startswith("model.layers.0."):
            tensors[name.replace("layers.0.", f"layers.{LAYERS}.", 1)] = tensor
    tensors |= {f"model.layers.{LAYERS}.{name}": tensor for name, tensor in mtp_weights.items()}
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
    main.config.num_nextn_predict_layers = 1
    main.config.save_pretrained(folder)

    with job_of_any_release(1, 0):
        tokens = job.samples(SAMPLES)[:, :-1]
    hidden = main.model(tokens, use_cache=False).last_hidden_state
    following = F.pad(tokens[:, 1:], (0, 1))  # Megatron appends token 0
    embedded = F.rms_norm(main.model.embed_tokens(following), (width,), mtp_weights["enorm.weight"], EPSILON)
    both = torch.cat([embedded, F.rms_norm(hidden, (width,), mtp_weights["hnorm.weight"], EPSILON)], dim=-1)
    predicted = layer(inputs_embeds=both @ mtp_weights["eh_proj.weight"].T, use_cache=False).logits
    return {"main": main.lm_head(hidden), "prediction": predicted}


def step(kind: str, folder: str) -> list[Tensor]:
    """Run a training step in a worker; return the logits of each call of the output layer."""
    build, logits = tiny.gpt_model, list[Tensor]()

    def gpt_model(*args: Any) -> Any:
        chunk = build(*args)
        hugging_face.poison(chunk)
        loading.load([chunk], Path(folder), chunk.config, log.get())
        chunk.output_layer.register_forward_hook(
            lambda module, inputs, output: logits.append(output[0].detach().clone().transpose(0, 1))
        )
        return chunk

    with job_of_any_release(1, 0), mock.patch.object(tiny, "gpt_model", gpt_model):
        fields = {**Model(kind, LAYERS).ours(), "mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.1}
        tiny.one_step({"use_fused_dsa": True}, fields, micro_batch_size=SAMPLES)
    return logits


@pytest.mark.parametrize("kind", [DEEPSEEK, pytest.param(GLM, marks=pytest.mark.full)])
def test_logits_of_both(pool: Any, tmp_path: Path, kind: str) -> None:
    expected = written(kind, tmp_path)
    (calls,) = pool.run(f"{HERE}:step", 1, kind=kind, folder=str(tmp_path))
    assert len(calls) == 2
    for name, theirs in expected.items():
        differences = [float((logits - theirs).abs().max()) for logits in calls]
        assert min(differences) <= 1e-4, (name, differences)
    assert (expected["main"] - expected["prediction"]).abs().max() > 0.1
