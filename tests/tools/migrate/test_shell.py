"""Shell scripts, in the forms that people write."""

from __future__ import annotations

import sys

import pytest

from mindspeed_dsa.tools.migrate import shell
from mindspeed_dsa.tools.migrate.shell import ShellError


def started(text):
    return shell.read(text)


SCRIPT = r"""#!/bin/bash
# --not-a-flag in a comment
export CUDA_DEVICE_MAX_CONNECTIONS=1
NPUS=8 NODES=2
WORLD=$(($NPUS * ${NODES}))
TP=${TP:-2}
DATA="a path"
echo "starts --with $TP" > log

LAUNCH="
    --nproc_per_node $NPUS \
    --nnodes $NODES
"
ARGS="
    --tensor-model-parallel-size ${TP} \
    --swap-optimizer \
    --rope 'x y' \
"
MORE=(
    --data-path "$DATA"   # a comment in an array
    --lr 1e-5
)
MORE+=(--seed "$1" --world $WORLD)
cat << 'END' > hosts
torchrun --nothing here.py --but text
END

torchrun $LAUNCH pretrain_gpt.py \
    $ARGS \
    "${MORE[@]}" \
    --out "$(date +%F)/x" 2>&1 | tee log.txt
echo done
"""


def test_variables_arrays_continuations_comments_and_heredocs():
    start = started(SCRIPT)
    assert start.script == "pretrain_gpt.py"
    assert start.launcher == (
        "torchrun",
        "--nproc_per_node",
        "$NPUS",
        "--nnodes",
        "$NODES",
        "pretrain_gpt.py",
    )
    assert start.words == tuple(
        "--tensor-model-parallel-size|2|--swap-optimizer|--rope|'x|y'|--data-path|a "
        "path|--lr|1e-5|--seed|$1|--world|16|"
        "--out|$(date +%F)/x".split("|")
    )
    assert start.written[:2] == ("--tensor-model-parallel-size", "${TP}")
    assert start.written[6:8] == ("--data-path", '"$DATA"')
    assert SCRIPT[start.start : start.end].startswith("torchrun $LAUNCH")
    assert SCRIPT[start.end :] == " 2>&1 | tee log.txt\necho done\n"
    assert not start.notes


@pytest.mark.parametrize(
    ("text", "script", "words"),
    [
        ("python train.py --a 1", "train.py", ("--a", "1")),
        ("python train.py --a \\", "train.py", ("--a",)),
        ("python -m pack.train --a 1", "-m pack.train", ("--a", "1")),
        ("python -m torch.distributed.launch --nproc 2 train.py --a", "train.py", ("--a",)),
        ("A=1 B=2 nohup msrun --worker_num=8 train.py --a=1 &", "train.py", ("--a=1",)),
        ("if true; then\n  python train.py --a\nfi", "train.py", ("--a",)),
        ("X=' --a 1 --b'\npython train.py$X", "train.py", ("--a", "1", "--b")),
        ("X='a'\nX+=' --b'\npython train.py --$X", "train.py", ("--a", "--b")),
        ('declare -a X=(--a)\npython train.py ${X[*]} --b "c d"', "train.py", ("--a", "--b", "c d")),
        ("X=(--a '1 2')\npython train.py \"${X[@]}\"", "train.py", ("--a", "1 2")),
        ("python a.py --a; python train.py --b", "train.py", ("--b",)),
        ("python train.py --a $X/$Y.json --b", "train.py", ("--a", "$X/$Y.json", "--b")),
        ("X=<to fill in>/x\nY=2\npython train.py --a $Y $X --b", "train.py", ("--a", "2", "--b")),
        ("X=--a\nX=\"$X --b ${Y:-'c d'}\"\npython $Z/train.py $X", "$Z/train.py", ("--a", "--b", "c", "d")),
        ("python train.py --a {1,2}$X $'b'", "train.py", ("--a", "{1,2}$X", "$'b'")),
    ],
)
def test_commands_that_start_a_training(text, script, words):
    found = started(text)
    assert (found.script, found.words) == (script, words)


def test_what_stands_before_the_command_stays():
    text = "if true; then A=1 python train.py --a > out; fi"
    start = started(text)
    assert text[start.start : start.end] == "python train.py --a"


def test_without_the_parser_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "tree_sitter_bash", None)
    with pytest.raises(ShellError, match=r"needs pip install 'mindspeed_dsa\[migrate\]'"):
        started("python train.py --a")


def test_doubts_are_said():
    text = "source env.sh\nif [ $A ]; then TP=2; else TP=4; fi\npython a.py --x\n"
    text += "python train.py --tp $TP --n $UNSET\n"
    found = started(text)
    assert found.words == ("--tp", "4", "--n", "$UNSET")
    assert found.notes == (
        "line 1: what env.sh sets is not read",
        "a.py is started before; only train.py is looked at",
        "variables that are set under a condition or in a loop are taken as last set: TP",
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('python train.py --a "b\n', 'line 1: the quote " is never closed'),
        ("\nX='--a\npython train.py", "line 2: the quote ' is never closed"),
        ("X=(--a\n", "line 1: the bracket of an array is never closed"),
        ("X=${A\n", "line 1: the bracket { is never closed"),
        ("cat <<END\nmore\n", "line 1: the here-document END is never closed"),
        ("X=(--a | b)", "line 1: '|' stands in an array"),
        ("echo hello\n", "no command in it starts a Python script with flags"),
        ("", "no command in it starts a Python script with flags"),
    ],
)
def test_what_cannot_be_read_is_one_message(text, said):
    with pytest.raises(ShellError) as caught:
        started(text)
    assert str(caught.value) == said
