"""New flags in the places of the old ones: a shell runs the new script, and edits to it take effect."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from mindspeed_dsa.tools.migrate import scripts
from mindspeed_dsa.tools.migrate.job import split

SCRIPT = r"""#!/bin/bash
TP=2
LOAD="a folder"
DISTRIBUTED_ARGS="--nproc_per_node $TP --nnodes 1"

MODEL_ARGS="
    --multi-latent-attention \
    --first-k-dense-replace 1 \
    --mla-mm-split \
    --num-layers 3 \
    --qk-rope-head-dim 64
"
GPT_ARGS=(
    --normalization RMSNorm --use-fused-rmsnorm --transformer-impl local  # of MindSpeed's
    # the rate
    --lr 1.0e-5
    --tensor-model-parallel-size ${TP}
    --shape-order SBH
    "--n-group" "4"
)
if true; then
    GPT_ARGS+=(--tokenizer-type PretrainedFromHF --tokenizer-name-or-path "$LOAD")
fi
torchrun $DISTRIBUTED_ARGS posttrain_gpt.py \
    $MODEL_ARGS \
    "${GPT_ARGS[@]}" \
    --mla-fa-without-pad \
    --bf16 \
    --norm-topk-prob | cat
"""


def ran(script: Path) -> list[str]:
    """Return the words that a fake torchrun gets."""
    fake = script.parent / "torchrun"
    fake.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    fake.chmod(0o755)
    done = subprocess.run(
        ["bash", str(script)],
        capture_output=True,
        text=True,
        env={"PATH": f"{script.parent}:/usr/bin:/bin"},
        timeout=20,
    )
    assert not done.stderr
    return done.stdout.splitlines()


@pytest.fixture
def new(tmp_path: Path) -> Path:
    script = tmp_path / "train.sh"
    script.write_text(SCRIPT)
    return scripts.write(scripts.migrate(script), overwrite=False)


def test_what_the_new_script_starts(new: Path) -> None:
    first, flags = split(ran(new))
    assert first == []
    assert [str(flag) for flag in flags] == [
        "--nproc_per_node 2",
        "--nnodes 1 pretrain_gpt.py",
        "--multi-latent-attention",
        "--moe-layer-freq ([0]*1+[1]*2)",
        "--num-layers 3",
        "--qk-pos-emb-head-dim 64",
        "--normalization RMSNorm",
        "--use-fused-rmsnorm",
        "--transformer-impl local",
        "--lr 1.0e-5",
        "--tensor-model-parallel-size 2",
        "--moe-router-num-groups 4",
        "--tokenizer-type HuggingFaceTokenizer",
        "--tokenizer-model a folder",
        "--bf16",
    ]


def test_flags_stay_where_they_stood(new: Path) -> None:
    """No dead line is left: comments and arrays stay, and edits in them take effect."""
    text = new.read_text()
    assert "have no effect" not in text
    assert text.startswith("#!/bin/bash\n# Made of train.sh by ")
    assert text.count("--lr") == 1
    assert "    # the rate\n    --lr 1.0e-5\n    --tensor-model-parallel-size ${TP}\n" in text
    assert (
        "    --moe-layer-freq ([0]*1+[1]*2) \\\n    --num-layers 3 \\\n    --qk-pos-emb-head-dim 64\n" in text
    )
    assert '    "${GPT_ARGS[@]}" \\\n    --bf16 \\\n' in text
    new.write_text(text.replace("1.0e-5", "7e-6"))
    assert "7e-6" in ran(new)


def test_flags_that_are_not_found_go_behind_the_command(tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text('A="--mla-mm"\nB="$A-split --swiglu --bf16"\ntorchrun pretrain_gpt.py $B\n')
    migrated = scripts.migrate(script)
    assert "# Note: All flags stand in the command; arrays and strings above it" in migrated.text
    assert ran(scripts.write(migrated, overwrite=False)) == [
        "pretrain_gpt.py",
        "--swiglu",
        "--bf16",
    ]


def test_a_value_that_a_string_cannot_hold_goes_behind_the_command(tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text(
        'L="a b"\nA="--bf16 --model-type-hf glm5 --enable-hf2mg-convert"\n'
        'torchrun pretrain_gpt.py $A --load "$L" > /dev/stdout\n'
    )
    new = scripts.write(scripts.migrate(script), overwrite=False)
    assert ran(new) == ["pretrain_gpt.py", "--bf16", "--load-hf", "a b"]
    assert 'A="--bf16"\n' in new.read_text()
