"""Launch scripts as input and output: shell, YAML and Python."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from mindspeed_dsa.__main__ import main
from mindspeed_dsa.patches.errors import SettingsError
from mindspeed_dsa.tools.migrate import lists, scripts, shell
from mindspeed_dsa.tools.migrate.job import split
from mindspeed_dsa.tools.migrate.shell import ShellError

TRAIN = """#!/bin/bash
TP=2
ARGS="--qk-rope-head-dim 64 --tensor-model-parallel-size ${TP} --use-fused-swiglu --first-k-dense-replace 1
--num-layers 3 --fix-router --mine x"
torchrun --nproc_per_node 2 pretrain_gpt.py $ARGS | cat
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.sh"
    path.write_text(TRAIN)
    path.chmod(0o755)
    return path


def test_the_new_script_runs_what_the_old_one_would(script, tmp_path):
    """A fake torchrun prints its words, as the shell parses them."""
    new = scripts.write(scripts.migrate(script), overwrite=False)
    assert new.name == "train.mindspeed_dsa.sh"
    assert script.read_text() == TRAIN
    (tmp_path / "torchrun").write_text('#!/bin/sh\nprintf "%s|" "$@"\n')
    (tmp_path / "torchrun").chmod(0o755)
    done = subprocess.run(
        [str(new)], capture_output=True, text=True, env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, timeout=20
    )
    assert done.stdout == (
        "--nproc_per_node|2|pretrain_gpt.py|--qk-pos-emb-head-dim|64|--tensor-model-parallel-size|2|"
        "--moe-layer-freq|([0]*1+[1]*2)|--num-layers|3|--fix-router|--mine|x|"
    ), done.stderr
    text = new.read_text()
    assert "--tensor-model-parallel-size ${TP} " in text
    assert "# NOT SERVED, and results change without it: --fix-router:" in text
    assert "# Unknown, left as it is: --mine" in text
    # Translated again, there is nothing left to translate.
    again = scripts.migrate(new).translation
    assert not again.of("megatron")
    assert not again.of("not needed")


QUOTED = r"""
DATA="0.5 /a 0.5 /b"
NAME='a "b"'
ARGS="--data-path $DATA --use-fused-rmsnorm --moe-layer-freq ([0]*2) --run ${NAME}_x"
MORE=(--name "my $NAME" --save ~/ckpt --literal '$HOME' --list "$DATA")
torchrun $LAUNCH train.py $ARGS "${MORE[@]}" --out "$(echo "a  b")" --back `echo c` --some *.nothing \
    --neg=-1 --qk-rope-head-dim 8 ${SET:+--set} --none="" --esc a\$b "--s=x y" --mla-mm-split "$@" > out
"""


def test_words_are_split_quoted_and_expanded_as_in_the_old_script(tmp_path):
    old = tmp_path / "old.sh"
    old.write_text(QUOTED)
    new = scripts.write(scripts.migrate(old), overwrite=False)
    (tmp_path / "torchrun").write_text('#!/bin/bash\nprintf "%s\\0" "$@"\n')
    (tmp_path / "torchrun").chmod(0o755)
    ran = {}
    for script in (old, new):
        subprocess.run(
            ["bash", str(script), "--more", "p q"],
            cwd=tmp_path,
            env={"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": "/h", "LAUNCH": "--nnodes 2", "SET": "1"},
            timeout=20,
        )
        ran[script] = (tmp_path / "out").read_text().split("\0")[:-1]
    head, old_flags = ran[old][:3], {str(flag) for flag in split(ran[old][3:])[1]}
    assert head == ran[new][:3] == ["--nnodes", "2", "train.py"]
    gone = {"--use-fused-rmsnorm", "--mla-mm-split", "--qk-rope-head-dim 8"}
    made = {str(flag) for flag in split(ran[new][3:])[1]}
    assert gone < old_flags
    assert made == old_flags - gone | {"--qk-pos-emb-head-dim 8"}
    assert {"--data-path 0.5 /a 0.5 /b", "--out a  b", "--save /h/ckpt", "--more p q"} < made


def test_what_may_hold_flags_is_not_lost_in_silence(tmp_path):
    script = tmp_path / "train.sh"
    script.write_text("if true; then TP=2; fi\npython train.py --mla-mm-split $EXTRA --tp $TP ${MORE[@]}\n")
    migrated = scripts.migrate(script)
    assert migrated.text.splitlines()[-1] == "python train.py --tp $TP ${MORE[@]}"
    for text in (
        "$EXTRA is not set in the script, and is left out with --mla-mm-split: flags in it must be added",
        "${MORE[@]} stays at the end; flags that come by it are not looked at",
        "variables that are set under a condition or in a loop are taken as last set: TP",
    ):
        assert text in migrated.notes
        assert f"# Note: {text}\n" in migrated.text


def test_an_existing_script_stays_unless_told_otherwise(script):
    migrated = scripts.migrate(script)
    migrated.new_path.write_text("mine")
    with pytest.raises(SettingsError, match="is there already; --overwrite replaces it"):
        scripts.write(migrated, overwrite=False)
    assert migrated.new_path.read_text() == "mine"
    scripts.write(migrated, overwrite=True)
    assert "qk-pos-emb-head-dim" in migrated.new_path.read_text()


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (
            [
                "import torch",
                "from mindspeed_llm import megatron_adaptor",
                "def f():",
                "    from mindspeed_llm.training import x",
            ],
            (
                "cannot be used, for it imports MindSpeed in line 4: take Megatron-LM's own pretrain_gpt.py "
                "(`git clone --branch core_v0.16.1 https://github.com/NVIDIA/Megatron-LM`), with "
                "`import mindspeed_dsa.megatron_adaptor` as its first line"
            ),
        ),
        (
            ["import mindspeed.megatron_adaptor"],
            "line 1: `import mindspeed.megatron_adaptor` becomes `import mindspeed_dsa.megatron_adaptor`",
        ),
        (["import torch"], "put `import mindspeed_dsa.megatron_adaptor` before its first import"),
        (["import mindspeed_dsa.megatron_adaptor"], None),
    ],
)
def test_the_program_to_start(script, lines, said):
    script.write_text("torchrun pretrain_gpt.py --bf16\n")
    (script.parent / "pretrain_gpt.py").write_text("\n".join(lines) + "\n")
    megatron, *notes = scripts.migrate(script).notes
    assert megatron == "Megatron-LM: core_v0.12.1, core_v0.16.1 and core_v0.19.0 serve all flags"
    assert [note.partition("pretrain_gpt.py")[2].lstrip(",: ") for note in notes] == (
        [] if said is None else [said]
    )


def test_a_program_that_is_not_there(script):
    script.write_text("torchrun pretrain_gpt.py --noop-layers 1 --num-layers 4 --fix-router\n")
    megatron, program = scripts.migrate(script).notes
    assert megatron.startswith("Megatron-LM: none of 0.12.1, 0.16.1, 0.19.0 serves all flags")
    assert "take Megatron-LM's own pretrain_gpt.py (`git clone --branch core_v0.19.0 " in program
    assert program.endswith("MindSpeed-LLM's imports MindSpeed-LLM in other lines too, and is of no use")
    script.write_text("torchrun mine.py --bf16\n")
    note = scripts.migrate(script).notes[1]
    assert note.startswith("mine.py: `import mindspeed_dsa.megatron_adaptor` becomes its first line")


def test_the_other_scripts_are_reported_beside_one_that_cannot_be_read(tmp_path, capsys):
    wrapper, script = tmp_path / "wrapper.sh", tmp_path / "train.sh"
    wrapper.write_text("ls\n")
    script.write_text("torchrun pretrain_gpt.py --bf16\n")
    assert main(["migrate", "--dry-run", str(wrapper), str(script)]) == 2
    said = capsys.readouterr()
    assert f"{script}: 1 flags" in said.out
    assert f"{wrapper}: no command in it starts a Python script with flags" in said.err


@pytest.mark.parametrize(
    ("text", "program", "said"),
    [
        ("cd /x\npython convert_ckpt_v2.py --load-dir a", "convert_ckpt_v2.py", "weights import"),
        ("python ./preprocess_data.py --input a", "preprocess_data.py", "tools/preprocess_data.py"),
        ("torchrun $D ../inference.py --tp 1 | tee log", "inference.py", "weights export"),
        ("torchrun evaluation.py --tp 1", "evaluation.py", "engines such as vLLM"),
        ("torchrun train_fsdp2.py job.yaml", "train_fsdp2.py", "TorchTitan"),
    ],
)
def test_scripts_that_are_no_training(script, capsys, text, program, said):
    """Their flags belong to other programs: none is called unknown, and no script is written."""
    script.write_text(f"{text}\n# pretrain_gpt.py comes later\n")
    assert main(["migrate", str(script)]) == 1
    out = capsys.readouterr().out
    assert out.startswith(f"{script}: {program} ")
    assert said in out
    assert len(out.splitlines()) == 2
    assert not scripts.migrate(script).new_path.exists()
    script.write_text(f"{text}\ntorchrun pretrain_gpt.py --bf16\n")
    assert main(["migrate", str(script)]) == 0


def test_a_yaml_file_of_fsdp2(tmp_path, capsys):
    job = tmp_path / "job.yaml"
    job.write_text("model:\n  model_id: glm52\nparallel:\n  fsdp_size: 512\n")
    assert main(["migrate", str(job), str(job)]) == 1
    out = capsys.readouterr().out
    assert f"{job}: This file trains by FSDP2" in out
    pages = re.findall(r"docs/[\w/]+\.md", out)
    assert pages
    assert all((Path(__file__).parents[3] / page).is_file() for page in pages)
    assert "no training by Megatron: see above" in out
    assert not scripts.migrate(job).new_path.exists()


def test_yaml(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(
        "model:\n  qk_rope_head_dim: 64\n  swiglu: true\n  bias_gelu_fusion: false\n  "
        "masked-softmax-fusion: true\n"
        "  mtp_num_layers: null\ntraining:\n  --data-path: [1, a, 2, b]\n  extra: --use-fused-swiglu --bf16\n"
    )
    migrated = scripts.migrate(path)
    assert migrated.translation.counts()["flags"] == 6
    assert migrated.text.splitlines()[1:] == [
        'qk-pos-emb-head-dim: "64"',
        "swiglu: true",
        "no-bias-gelu-fusion: true",
        'data-path: ["1", "a", "2", "b"]',
        "use-fused-swiglu: true",
        "bf16: true",
    ]
    assert lists.of_yaml(migrated.text)[:3] == ["--qk-pos-emb-head-dim", "64", "--swiglu"]


def test_nested_lists_of_yaml_are_words():
    text = "data-path: [[0.5, a], [0.5, b]]\nparts:\n- lr: -1.0e-3\n- {name: -x}\n"
    assert lists.of_yaml(text) == ["--data-path", "0.5", "a", "0.5", "b", "--lr=-0.001", "--name=-x"]


def test_python_lists(tmp_path):
    path = tmp_path / "args.py"
    path.write_text(
        "import sys\nTP = 2\nsome = ['--small']\nmodel = ['--num-layers', str(4), '--qk-rope-head-dim', 64]\n"
        "model += ('--lr 1e-4'.split())\nmodel.append('--bf16')\nmodel.extend(['--use-fused-rmsnorm'])\n"
        "command = ['pretrain_gpt.py', *model, f'--tensor-model-parallel-size={TP}', '--seed', SEED]\n"
    )
    migrated = scripts.migrate(path)
    assert migrated.script == "pretrain_gpt.py"
    place: dict[str, list[str]] = {}
    exec(migrated.text, place)
    assert place["ARGUMENTS"] == (
        "pretrain_gpt.py --num-layers 4 --qk-pos-emb-head-dim 64 --lr 1e-4 --bf16 "
        "--tensor-model-parallel-size 2 "
        "--seed <SEED>".split()
    )


@pytest.mark.parametrize(
    ("read", "text", "said"),
    [
        (lists.of_python, "a = [", "line 1: '[' was never closed"),
        (lists.of_python, "a = [1, 2]", "no list of arguments in it is built of literals"),
        (lists.of_yaml, "a: [", "while parsing a flow node"),
        (lists.of_yaml, "- 1", "there are no flags in it"),
        (lists.of_yaml, "a: [--x, [1, 2]]", "a list in it holds words of a command line, and other lists"),
        (lists.of_yaml, "args: --a 'b", "no closing quotation"),
        (shell.read, "ls", "no command in it starts a Python script with flags"),
    ],
)
def test_what_cannot_be_read(read, text, said):
    with pytest.raises(ShellError) as caught:
        read(text)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_that_cannot_be_read(tmp_path):
    for path in (tmp_path / "none.sh", tmp_path):
        with pytest.raises(SettingsError, match="cannot be read"):
            scripts.migrate(path)
    (tmp_path / "bytes.sh").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SettingsError, match="cannot be read"):
        scripts.migrate(tmp_path / "bytes.sh")
