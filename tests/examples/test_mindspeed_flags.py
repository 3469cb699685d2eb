"""The job trains the same with MindSpeed-LLM's names of its flags as with Megatron's."""

from __future__ import annotations

from pathlib import Path

from .conftest import JobServer, results

THEIRS = (
    "--accept-mindspeed-flags --enable-dsa-indexer --index-n-heads 8 --index-head-dim 8 --index-topk 8 "
    "--indexer-loss-coeff 0.05 --qk-rope-head-dim 8 --moe-intermediate-size 16 --first-k-dense-replace 1 "
    "--n-shared-experts 1 --shape-order SBH --moe-zero-memory level0 --swap-optimizer"
).split()
MEGATRONS = (
    "--experimental-attention-variant dsa --dsa-indexer-loss-coeff 0.05 --dsa-indexer-use-sparse-loss "
    "--dsa-indexer-rope-first --moe-layer-freq ([0]*1+[1]*1)"
).split()


def test_losses_are_those_with_megatrons_names(jobs: JobServer, tmp_path: Path) -> None:
    theirs = jobs.run(tmp_path / "theirs", *THEIRS)
    assert theirs.code == 0, theirs.output
    assert "not served, same results without: --moe-zero-memory" in theirs.output
    assert "swap-optimizer" in theirs.output
    megatrons = jobs.run(tmp_path / "megatrons", *MEGATRONS)
    assert megatrons.code == 0, megatrons.output
    assert "swap-optimizer" not in megatrons.output
    assert results(tmp_path / "theirs") == results(tmp_path / "megatrons")
    assert len(results(tmp_path / "theirs")) == 6
