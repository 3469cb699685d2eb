"""``--accept-mindspeed-flags``: arguments that a job's parser gets, and refusals."""

from __future__ import annotations

import argparse
import logging
import sys

import pytest

import mindspeed_dsa
from mindspeed_dsa import session
from mindspeed_dsa.features.platform.without_apex.feature import switch_off_missing_fusions
from mindspeed_dsa.patches.errors import SettingsError
from mindspeed_dsa.tools.migrate import accept
from tests.support import warm

FLAG = "--accept-mindspeed-flags"
ENV = "MINDSPEED_DSA_ACCEPT_MINDSPEED_FLAGS"


@pytest.fixture(autouse=True)
def nothing_done(monkeypatch):
    monkeypatch.setattr(accept, "_done", None)


def accepted(text, environ=None):
    argv = text.split()
    asked = accept.accept(argv, environ or {})
    return argv if asked else None


def test_only_those_who_ask():
    assert accepted("--qk-rope-head-dim 8 --use-fused-rmsnorm") is None
    assert accepted("--qk-rope-head-dim 8", {ENV: "1"}) == ["--qk-pos-emb-head-dim", "8"]
    assert accepted(f"{FLAG} --qk-rope-head-dim 8", {ENV: "0"}) is None
    assert accepted("", {ENV: "1"}) == []
    assert accepted("-- --qk-rope-head-dim 8", {ENV: "1"}) == ["--", "--qk-rope-head-dim", "8"]
    with pytest.raises(SettingsError, match=f"{ENV}=perhaps"):
        accepted("", {ENV: "perhaps"})


def test_the_parser_sees_present_names(caplog):
    with caplog.at_level(logging.INFO, "mindspeed_dsa"):
        argv = accepted(
            f"first {FLAG} --qk-rope-head-dim 24 --shape-order SBH --moe-zero-memory level0 "
            f"--swap-optimizer "
            "--mine a -- --qk-rope-head-dim 4"
        )
    assert argv == "first --qk-pos-emb-head-dim 24 --swap-optimizer --mine a -- --qk-rope-head-dim 4".split()
    texts = [record.getMessage() for record in caplog.records]
    assert texts[0] == "flags by Megatron's names: --qk-rope-head-dim 24 -> --qk-pos-emb-head-dim 24"
    assert texts[1] == "not needed here: --shape-order"
    assert texts[2].startswith("not served, same results without: --moe-zero-memory (Memory only")
    assert len(texts) == 3


def test_imported_again_the_one_liner_finds_what_it_has_done():
    argv = f"{FLAG} --qk-rope-head-dim 8".split()
    assert accept.accept(argv, {})
    assert accept.accept(argv, {})
    assert argv == ["--qk-pos-emb-head-dim", "8"]


def test_everything_that_is_refused_is_one_message():
    argv = (
        f"{FLAG} --fix-router --bf16 --rmsnorm-weight-in-fp32 --n-group 2 --moe-router-num-groups 4".split()
    )
    before = list(argv)
    with pytest.raises(SettingsError) as caught:
        accept.accept(argv, {})
    lines = str(caught.value).splitlines()
    assert lines[0].startswith(f"mindspeed_dsa: {FLAG}: these flags are not served")
    assert [line.split()[1].rstrip(":") for line in lines[1:]] == [
        "--n-group",
        "--fix-router",
        "--rmsnorm-weight-in-fp32",
    ]
    assert argv == before


def test_the_release_of_the_job_decides(monkeypatch):
    monkeypatch.setattr(accept.versions, "of_megatron", {"megatron": "0.16.1", "corp": "0.12.1"}.get)
    assert accepted(f"{FLAG} --shared-expert-gate") == ["--moe-shared-expert-gate"]
    for root in ("--megatron-root corp", "--megatron-root=corp"):
        with pytest.raises(SettingsError, match=r"Megatron-core 0\.12\.1 does not have it"):
            accepted(f"{FLAG} {root} --shared-expert-gate")


def test_absorbed_attention_switches_the_normalised_query_on(monkeypatch):
    """It computes the function of MindSpeed-LLM's pretraining scripts with DSA, at the job's own switches."""
    monkeypatch.setattr(accept.versions, "of_megatron", lambda root="megatron": "0.16.1")
    on = {}
    for absorb in ("", " --enable-mla-absorb"):
        argv = accepted(f"{FLAG} --enable-dsa-indexer --mindspeed-platform cpu{absorb}")
        on[absorb] = session.resolve({}, argv)[0]
    assert on[" --enable-mla-absorb"].dsa_indexer_normalised_query
    assert not on[""].dsa_indexer_normalised_query
    assert on[""].dsa_indexer_rope_first


def test_code_is_told_where_the_switch_belongs():
    with pytest.raises(SettingsError, match=f"set {ENV}=1"):
        mindspeed_dsa.enable(accept_mindspeed_flags=True)


def test_fusions_whose_modules_are_missing_are_switched_off():
    args = argparse.Namespace(gradient_accumulation_fusion=True, masked_softmax_fusion=False)
    (said,) = switch_off_missing_fusions(args)
    assert (
        said
        == "gradient_accumulation_fusion is switched off: fused_weight_gradient_mlp_cuda is not installed"
    )
    assert args == argparse.Namespace(gradient_accumulation_fusion=False, masked_softmax_fusion=False)
    assert not switch_off_missing_fusions(args)


@pytest.mark.parametrize(("flags", "loaded"), [([], False), ([FLAG], True)], ids=["without", "with"])
def test_only_a_job_that_asks_for_it_loads_the_translator(flags, loaded):
    code = f"import mindspeed_dsa.megatron_adaptor, sys; print({accept.__name__!r} in sys.modules)"
    done = warm.run([sys.executable, "-c", code, *flags])
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(loaded)]
