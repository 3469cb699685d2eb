"""Hugging Face weights, and fine-tuning: translation of the flags that read and write a model."""

from __future__ import annotations

from pathlib import Path

import pytest
from packaging.version import Version

from mindspeed_dsa.tools.migrate import scripts
from mindspeed_dsa.tools.migrate.job import split
from mindspeed_dsa.tools.migrate.translate import Translation, translate, words


def translated(text: str, release: str = "0.16.1") -> Translation:
    return translate(split(text.split())[1], Version(release))


def command(text: str, release: str = "0.16.1") -> str:
    translation = translated(text, release)
    assert not translation.refused, translation.refused
    assert not translation.problems, translation.problems
    return " ".join(words(translation.flags))


# -- weights -----------------------------------------------------------------------------------

IMPORT = "--enable-hf2mg-convert --load /hf"
EXPORT = "--enable-mg2hf-convert --save /ckpt --save-interval 50"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (f"{IMPORT} --model-type-hf deepseek32", "--load-hf /hf"),
        (f"{IMPORT} --model-type-hf glm5 --mg-save-dir /c --hf-cfg-dir /hf", "--load-hf /hf"),
        (f"{IMPORT} --model-type-hf deepseek3 --save /ckpt", "--load-hf /hf --save /ckpt"),
        (IMPORT, "--load-hf /hf"),  # its config.json has the type
        ("--enable-hf2mg-convert --load $DIR --model-type-hf $KIND", "--load-hf $DIR"),
        ("--enable-hf2mg-convert --model-type-hf glm5", ""),
        (
            f"{EXPORT} --model-type-hf glm5",
            "--save-hf /ckpt/hf --save-hf-interval 50 --save /ckpt --save-interval 50",
        ),
        (
            f"{EXPORT} --model-type-hf glm5 --hf-save-dir /out --only-convert-last-checkpoint",
            "--save-hf /out --save /ckpt --save-interval 50",
        ),
        (
            f"{IMPORT} {EXPORT} --model-type-hf glm5 --save-layer-by-layer",
            "--load-hf /hf --save-hf /ckpt/hf --save-hf-interval 50 --save /ckpt --save-interval 50",
        ),
        (f"{EXPORT} --model-type-hf gemma2", "--save /ckpt --save-interval 50"),
        (f"{IMPORT} --model-type-hf qwen3", "--load-hf /hf"),
        (f"{IMPORT} --model-type-hf qwen3-moe", "--load-hf /hf"),
        (f"{IMPORT} --model-type-hf qwen25", "--load-hf /hf"),
        (f"{IMPORT} --model-type-hf qwen2-moe", "--load-hf /hf"),
        (f"{IMPORT} --model-type-hf llama2", "--load-hf /hf"),
        (
            f"{EXPORT} --model-type-hf mixtral --hf-save-dir /out --only-convert-last-checkpoint",
            "--save-hf /out --save /ckpt --save-interval 50",
        ),
        ("--enable-mg2hf-convert --model-type-hf glm5", ""),
        (f"{IMPORT} --ckpt-format torch", "--load-hf /hf --ckpt-format torch"),
        (
            f"{EXPORT} --ckpt-format torch --only-convert-last-checkpoint",
            "--save-hf /ckpt/hf --save /ckpt --save-interval 50 --ckpt-format torch_dist",
        ),
    ],
)
def test_folders_of_weights(old: str, new: str) -> None:
    assert command(old) == new
    assert command(new) == new


def test_a_model_whose_weights_are_not_converted_is_refused_by_name() -> None:
    translation = translated(f"{IMPORT} --model-type-hf bailing_mini")
    (refused,) = translation.refused
    assert refused.given.flag == "--enable-hf2mg-convert"
    assert "Weights of bailing_mini are not converted here" in refused.why
    assert "glm5 (glm_moe_dsa)" in refused.why
    assert "--load" in words(translation.flags), "nothing of it is half applied"
    (left_out,) = translated(f"{EXPORT} --model-type-hf bailing_mini").of("not served")
    assert not left_out.results


def test_iterations_are_counted_otherwise_without_finetune() -> None:
    for finetune, counted in (("", True), (" --finetune", False)):
        outcome = translated(f"{IMPORT} --model-type-hf glm5{finetune}").outcomes[0]
        assert ("one step fewer" in outcome.why) == counted
        assert "a restart goes on" in outcome.why


@pytest.mark.parametrize("weights", ["model-00001.safetensors", "pytorch_model.bin"])
def test_a_folder_that_mindspeed_llm_converts_unasked(tmp_path: Path, weights: str) -> None:
    line = f"--load {tmp_path} --save /ckpt --save-interval 5"
    assert command(line) == line
    for name in ("config.json", weights):
        (tmp_path / name).write_text("{}")
    new = f"--load-hf {tmp_path} --save-hf /ckpt/hf --save-hf-interval 5 --save /ckpt --save-interval 5"
    assert command(line) == new
    assert "unasked" in translated(line).outcomes[0].why


def test_variables_of_a_script_stay_variables(tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text(
        'LOAD="/my hf"\nSAVE=/ckpt\ntorchrun pretrain_gpt.py --load "$LOAD" --save $SAVE --save-interval 9 '
        "--enable-hf2mg-convert --enable-mg2hf-convert --model-type-hf glm5\n"
    )
    text = scripts.migrate(script, Version("0.16.1")).text
    for line in ('--load-hf "$LOAD"', "--save-hf $SAVE/hf", "--save-hf-interval 9"):
        assert line in text
    assert "--load " not in text


# -- fine-tuning -------------------------------------------------------------------------------

TUNE = "--stage sft --is-instruction-dataset"
SFT = (
    "--sft --sft-tokenizer-prompt-format default --sft-mask-prompts --no-create-attention-mask-in-dataloader"
)
TOKENIZER = "--tokenizer-type PretrainedFromHF --tokenizer-name-or-path /t"
CHATS = "--tokenizer-type SFTTokenizer --tokenizer-model /t"


@pytest.mark.parametrize("release", ["0.17.1", "0.18.2", "0.19.0"])
@pytest.mark.parametrize(
    ("old", "new"),
    [
        (f"{TUNE} --prompt-type qwen3 --no-pad-to-seq-lengths {TOKENIZER}", f"{SFT} {CHATS}"),
        (f"{TUNE} --neat-pack --pack --reset-attention-mask {TOKENIZER}", f"{SFT} {CHATS}"),
        (f"{TUNE} --no-shuffle --padded-samples --data-path a {TOKENIZER}", f"{SFT} --data-path a {CHATS}"),
        (TUNE, f"{SFT} --tokenizer-type SFTTokenizer"),
    ],
)
def test_supervised_fine_tuning(release: str, old: str, new: str) -> None:
    assert command(old, release) == new
    assert command(new, release) == new


@pytest.mark.parametrize(
    ("text", "release", "said"),
    [
        (TUNE, "0.12.1", "has no --sft"),
        (TUNE, "0.16.1", "prompts of two Nemotron models"),
        (f"{TUNE} --micro-batch-size 2", "0.18.2", "--micro-batch-size of 1"),
        (f"{TUNE} --pack", "0.19.0", "conversations see each other"),
        (f"{TUNE} --reset-attention-mask", "0.19.0", "Turns of a conversation"),
        ("--stage dpo --is-pairwise-dataset", "0.19.0", "Only --stage sft with --is-instruction-dataset"),
    ],
)
def test_fine_tuning_that_is_refused_says_why(text: str, release: str, said: str) -> None:
    refused = {each.given.flag: each.why for each in translated(text, release).refused}
    assert said in refused["--stage"]


def test_every_flag_of_refused_fine_tuning_has_the_reason() -> None:
    refused = translated(f"{TUNE} --neat-pack --pack --no-pad-to-seq-lengths", "0.16.1").refused
    assert len(refused) == 5
    assert len({each.why for each in refused}) == 1


def test_fine_tuning_reads_text() -> None:
    found = translated(f"{TUNE} --tokenizer-not-use-fast --handler-name AlpacaStyle", "0.19.0")
    why = {each.given.flag: each.why for each in found.outcomes}
    assert "always takes the fast tokenizer" in why["--tokenizer-not-use-fast"]
    assert "need no handler" in why["--handler-name"]


@pytest.mark.parametrize("flag", ["--attention-mask-type", "--cp-attention-mask-type"])
@pytest.mark.parametrize(
    ("others", "is_refused"),
    [
        ("--reset-attention-mask --context-parallel-algo ulysses_cp_algo", False),
        ("--reset-attention-mask --context-parallel-algo megatron_cp_algo", True),
        ("--context-parallel-algo ulysses_cp_algo", True),
    ],
)
def test_general_masks_are_causal_where_heads_are_exchanged(flag: str, others: str, is_refused: bool) -> None:
    found = translated(f"--bf16 {flag} general {others} --context-parallel-size 2", "0.19.0")
    assert (flag in [each.given.flag for each in found.refused]) == is_refused


def test_data_of_mindspeed_llm_are_not_those_of_sft() -> None:
    found = translated(f"{TUNE} --data-path /data", "0.19.0")
    (data,) = (each for each in found.outcomes if each.given.flag == "--data-path")
    assert '{"messages": [' in data.why


def test_the_script_of_fine_tuning_is_megatrons_own_one(tmp_path: Path) -> None:
    (tmp_path / "posttrain_gpt.py").write_text(
        "from mindspeed_llm import megatron_adaptor\n"
        "from mindspeed_llm.tasks.posttrain.launcher import AutoTrainer\n"
    )
    script = tmp_path / "tune.sh"
    script.write_text(f"torchrun posttrain_gpt.py {TUNE}\n")
    migrated = scripts.migrate(script, Version("0.19.0"))
    assert "cannot be used" in migrated.notes[-1]
    assert "core_v0.19.0 serves all flags; core_v0.12.1 does not: --stage" in migrated.notes[0]
    assert "torchrun pretrain_gpt.py" in migrated.text
