"""The screen of ``doctor``: its length and width, its order, and its text about a fork."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mindspeed_dsa.features import all_features
from mindspeed_dsa.ops import backend
from mindspeed_dsa.tools.cli import doctor, doctor_operators, doctor_text

FLAGS = "--experimental-attention-variant dsa --use-fused-dsa --dsa-indexer-loss-coeff 0.01".split()


@pytest.fixture(scope="module")
def findings():
    return doctor.examine(FLAGS)


def told(findings, **changes):
    return " ".join(doctor.as_text({**findings, **changes}).split())


def test_the_answer_is_one_screen_and_begins_with_the_verdict(findings):
    lines = doctor.as_text(findings).splitlines()
    assert lines[0] == "no problems found"
    assert len(lines) < 40
    assert max(map(len, lines)) <= doctor_text.WIDTH
    problem = doctor.as_text({**findings, "problems": ["a " * 200]}).splitlines()
    assert problem[0].startswith("PROBLEM: a a")
    assert "no problems found" not in problem
    parts = doctor.as_text({**findings, "problems": ["cannot be:\n  - a\n  - b"]}).splitlines()
    assert parts[:3] == ["PROBLEM: cannot be:", "  - a", "  - b"]
    assert max(map(len, problem)) <= doctor_text.WIDTH


def test_an_error_of_the_environment_is_no_good_end(findings):
    error = {"level": "error", "check": "x", "who": "A=1", "what": "fails", "do": "unset A"}
    said = told(findings, environment=[error])
    assert said.startswith("PROBLEM: 1 error of the environment, below")
    assert "no problems found" not in said


def test_a_feature_of_which_every_site_is_skipped_is_not_needed_here(findings):
    states = {row["name"]: row["state"] for row in findings["features"]}
    assert states["dsa-backport"] == "not needed here"
    assert (states["fused-dsa"], states["swap-optimizer"]) == ("on", "off")
    said = told(findings)
    assert "not needed here, each of their sites is skipped: dsa-backport" in said
    assert "swap-optimizer" not in said
    everything = doctor.as_text(findings, True)
    assert "swap-optimizer" in everything
    assert all(site["target"] in everything for site in findings["sites"])


def test_what_a_backport_does_is_in_it(findings):
    """Example: fused-dsa on releases without DSA to patch."""
    states = {"dsa-backport": "on", "fused-dsa": doctor_text.NOT_NEEDED, "dsa-absorb": "off"}
    supplies = {"dsa-backport": ("fused-dsa", "dsa-absorb")}
    assert doctor_text.with_suppliers(states, supplies) == {**states, "fused-dsa": "in dsa-backport"}
    newer = {"dsa-kernel-backend": "on", "fused-dsa": doctor_text.NOT_NEEDED}
    supplies_newer = {each.name: each.supplies for each in all_features() if each.supplies}
    states_with_suppliers = doctor_text.with_suppliers(
        {"dsa-backport": doctor_text.NOT_NEEDED, **newer}, supplies_newer
    )
    assert states_with_suppliers["fused-dsa"] == "in dsa-kernel-backend"
    idle = {**states, "dsa-backport": doctor_text.NOT_NEEDED}
    assert doctor_text.with_suppliers(idle, supplies) == idle
    rows = [
        {**row, "state": "in dsa-backport"} if row["name"] == "fused-dsa" else row
        for row in findings["features"]
    ]
    assert "in dsa-backport: fused-dsa" in told(findings, features=rows)


def test_what_a_fork_changed_is_lost_or_kept(findings):
    lost = "this feature does not call it for layers with DSA, where your change would be lost"
    note = f"your fork changed this function; {lost}"
    site = SimpleNamespace(state="applied", target="m:f", features=["a"], notes=[note, "another note"])
    kept = SimpleNamespace(
        state="applied",
        target="m:g",
        features=["b"],
        notes=["your fork changed this function; this feature wraps it; check that its wrapper still fits"],
    )
    skipped = SimpleNamespace(state="skipped", target="m:h", features=["c"], notes=[note])
    said = told(findings, changes=doctor._changes([site, kept, skipped]))
    assert "LOST: a: your fork changed this function" in said
    assert "kept: b: your fork changed this function; this feature wraps it" in said
    assert " c: your fork" not in said
    assert "LOST: 1 change of this fork, below" in said[:200]
    assert "another note" not in said


def test_switches_without_a_model_are_noted():
    found = doctor.examine(["--use-fused-dsa"])
    assert "nothing here says --experimental-attention-variant dsa" in found["notes"][0]
    assert not found["problems"]


def test_operators_have_their_backend_and_why_not_the_fast_one(findings, monkeypatch):
    assert {row["operator"]: row["backend"] for row in findings["operators"]} == dict.fromkeys(
        ("lightning_indexer", "sparse_flash_attention", "indexer_kl_loss"), "cpu"
    )
    settings = SimpleNamespace(
        use_fused_dsa=True, experimental_attention_variant="dsa", platform="cuda", features_on=()
    )
    common = pytest.importorskip("mindspeed_dsa.ops.triton.common")
    monkeypatch.setattr(common.triton, "__version__", "3.3.0")
    rows = doctor_operators.examine(SimpleNamespace(settings=settings), SimpleNamespace(bf16=False))
    assert [row["backend"] for row in rows] == ["chunked"] * 3
    assert {row["dtype"] for row in rows} == {"float32"}
    said = told(findings, operators=rows)
    assert "operators, float32 on cuda:" in said
    assert "lightning_indexer: chunked; not triton: " in said
    assert "3.4" in rows[0]["skipped"][0]["why"]


def test_a_named_backend_is_asked_alone():
    import torch

    shape = backend.ShapeClass("cpu", torch.float32, (("heads", 4), ("head_dim", 32), ("topk", 16)))
    names = [name for name, *_ in backend.candidates("lightning_indexer", "chunked", shape)]
    assert names == ["chunked"]
    names = [name for name, *_ in backend.candidates("lightning_indexer", "auto", shape)]
    assert names == ["cpu", "reference"]
