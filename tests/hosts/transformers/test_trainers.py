"""Programs around a model: transformers' Trainer, PEFT, accelerate's hooks."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import Dataset

from mindspeed_dsa.integrations.transformers import apply_dsa
from tests.hosts.transformers.models import build, close, tokens

pytestmark = pytest.mark.full


class Repeated(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        row = tokens(8)[index]
        return {"input_ids": row, "labels": row}


@pytest.mark.parametrize("accumulated", [1, 4])
def test_the_trainer_trains_indexers_and_reports_the_sum(tmp_path, accumulated):
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    def train(batch, steps, accumulate):
        model = build("deepseek_v32")
        apply_dsa(model, loss_coeff=0.5)
        arguments = TrainingArguments(
            output_dir=str(tmp_path), per_device_train_batch_size=batch, max_steps=2, logging_steps=1,
            gradient_accumulation_steps=accumulate, learning_rate=1e-3, max_grad_norm=0.0,
            save_strategy="no", report_to=[], use_cpu=True, lr_scheduler_type="constant", weight_decay=0.0,
        )  # fmt: skip
        trainer = Trainer(model=model, args=arguments, train_dataset=Repeated())
        trainer.get_train_dataloader = lambda: torch.utils.data.DataLoader(Repeated(), batch_size=batch)
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        return losses, {name: x.detach().clone() for name, x in model.named_parameters()}

    losses, weights = train(8, 2, 1)
    start = dict(build("deepseek_v32").named_parameters())
    assert not any(torch.equal(x, start[name]) for name, x in weights.items() if ".indexer.w" in name)
    found, of_parts = train(8 // accumulated, 2, accumulated)
    assert found == pytest.approx(losses, rel=1e-3)
    # Adam's first steps are as large for gradients of almost zero.
    assert [name for name in weights if not close(of_parts[name], weights[name], 5e-3)] == []


def adapted(before, **options):
    peft = pytest.importorskip("peft")
    model = build("deepseek_v32")
    config = peft.LoraConfig(r=2, lora_alpha=8, init_lora_weights=False, **options)
    if before:
        apply_dsa(model, loss_coeff=0.5)
        return peft.get_peft_model(model, config)
    model = peft.get_peft_model(model, config)
    apply_dsa(model, loss_coeff=0.5)
    return model


@pytest.mark.parametrize("before", [True, False], ids=["use first", "PEFT first"])
@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["q_b_proj", "kv_b_proj", "wq_b", "wk", "weights_proj"]},
        {"target_modules": ["kv_b_proj"], "modules_to_save": ["indexer"]},
    ],
    ids=["adapters", "whole indexers"],
)
def test_peft_trains_adapters_of_indexers(options, before):
    torch.manual_seed(3)
    model = adapted(before, **options)
    output = model(input_ids=tokens(), labels=tokens(), use_cache=False)
    output.loss.backward()
    trained = {name for name, x in model.named_parameters() if x.requires_grad and x.grad is not None}
    assert any("indexer" in name for name in trained)
    assert any("kv_b_proj" in name for name in trained)
    ours = output.logits.detach()
    inner = model.get_base_model()
    state = {name: x.clone() for name, x in model.state_dict().items()}
    torch.manual_seed(3)
    import peft

    theirs = peft.get_peft_model(
        build("deepseek_v32"), peft.LoraConfig(r=2, lora_alpha=8, init_lora_weights=False, **options)
    )
    theirs.load_state_dict(state)
    assert inner is not theirs.get_base_model()
    assert close(ours, theirs(input_ids=tokens()).logits)


@pytest.mark.parametrize("before", [True, False], ids=["use first", "accelerate first"])
def test_accelerate_moves_weights_of_layers_that_are_offloaded(before):
    accelerate = pytest.importorskip("accelerate")
    model = build("deepseek_v32").eval()
    expected = model(tokens()).logits
    if before:
        in_use = apply_dsa(model)
    model = accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    if not before:
        in_use = apply_dsa(model)
    with torch.no_grad():
        assert close(model(tokens()).logits, expected)
    in_use.undo()
    with torch.no_grad():
        assert close(model(tokens()).logits, expected)
