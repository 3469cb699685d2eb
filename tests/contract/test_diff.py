"""``python -m mindspeed_dsa diff`` on installed sources, wheels, checkouts and a changed fork."""

from __future__ import annotations

import json
import shutil
import zipfile
from pathlib import Path

import pytest

from mindspeed_dsa.__main__ import main
from mindspeed_dsa.feature import Feature, Requires
from mindspeed_dsa.features import everything
from mindspeed_dsa.patches.source_tree import SourceTree
from mindspeed_dsa.patches.spec import Patch
from mindspeed_dsa.session import records
from tests.support.drift_packages import write

INFO = 'MAJOR = 0\nMINOR = 16\nPATCH = 1\nPRE_RELEASE = ""\n'
FILES = {
    "megatron/core/package_info.py": INFO,
    "megatron/core/a.py": "def attend(query, key):\n    return query @ key\n",
    "megatron/core/b.py": "class Layer:\n    def forward(self, x): ...\n",
}
ROWS = (
    Patch("megatron.core.a:attend", "replace", "impl:f", "faster", params=("query",)),
    Patch("megatron.core.b:Layer.forward", "wrap", "impl:g", "counts", params=("x",)),
    Patch("megatron.core.b:Layer.gone", "wrap", "impl:g", "counts", required=False),
    Patch("megatron.core.b:Layer.future", "wrap", "impl:g", "counts", versions=">=0.17"),
    Patch("torch.cuda:current_device", "wrap", "impl:g", "no matter of Megatron"),
)


@pytest.fixture(autouse=True)
def one_feature(monkeypatch, tmp_path):
    """Declare a single feature, with a record made from the unchanged files."""
    monkeypatch.setattr(
        "mindspeed_dsa.tools.cli.diff.everything", lambda: (Feature("f", "does f", patches=ROWS),)
    )
    from mindspeed_dsa.patches.drift import Checker

    check = Checker(SourceTree.folder(write(tmp_path / "recorded", FILES)), "0.16.1")
    facts = {row.target: {"0.16.1": check.inspect(row)} for row in ROWS[:2]}
    monkeypatch.setattr("mindspeed_dsa.session.records.load", lambda: records.Records(facts))


def diff(capsys, *argv):
    status = main(["diff", *map(str, argv), "--json"])
    captured = capsys.readouterr()
    return status, json.loads(captured.out) if captured.out else captured.err


def states(found):
    return {site["target"].rpartition(":")[2]: site["state"] for site in found["features"][0]["sites"]}


def test_unchanged_checkout(tmp_path, capsys):
    status, result = diff(capsys, write(tmp_path / "checkout", FILES))
    assert status == 0
    assert result["release"] == "0.16.1"
    assert result["problems"] == []
    assert states(result) == {
        "attend": "ok",
        "Layer.forward": "ok",
        "Layer.gone": "missing",
        "Layer.future": "out-of-range",
    }


SUM = "4 targets: 2 ok, 1 missing, 1 out of range; 0 would stop a feature\n"


def test_text_sums_up_first_and_lists_targets_if_asked(tmp_path, capsys):
    folder = str(write(tmp_path / "checkout", FILES))
    assert main(["diff", folder]) == 0
    text = capsys.readouterr().out
    assert text.startswith("megatron 0.16.1 in ")
    assert text.split("\n", 1)[1].startswith(
        f"{SUM}\nparts of features that are lost:\n  f: megatron.core.b:Layer.gone"
    )
    assert text.endswith("\n\n--all lists every target\n")
    assert main(["diff", folder, "--all"]) == 0
    text = capsys.readouterr().out
    assert text.split("\n", 1)[1].startswith(SUM)
    assert "\nf\n  ok                replace megatron.core.a:attend\n" in text
    assert "missing           wrap    megatron.core.b:Layer.gone (optional)" in text


def test_changes_and_stops_are_told_without_all(tmp_path, capsys):
    fork = FILES | {"megatron/core/a.py": FILES["megatron/core/a.py"].replace("@", "*")}
    fork["megatron/core/b.py"] = "class Layer:\n    def forwards(self, x): ...\n"
    assert main(["diff", str(write(tmp_path / "fork", fork))]) == 1
    parts = capsys.readouterr().out.split("\n\n")
    assert parts[0].endswith("1 would stop a feature")
    assert parts[-3].startswith("would stop a feature:\n  f: megatron.core.b:Layer")
    assert parts[-2].startswith(
        "changed in these sources, and patched:\n  f: your fork changed this function"
    )


def test_a_release_fits_one_screen(monkeypatch, capsys):
    monkeypatch.undo()
    assert main(["diff", "installed"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines[1:])) <= 110


def test_fork_with_another_root_and_one_changed_function(tmp_path, capsys):
    fork = {name.replace("megatron/", "src/corp_megatron/"): text for name, text in FILES.items()}
    fork["src/corp_megatron/core/a.py"] = fork["src/corp_megatron/core/a.py"].replace("@", "*")
    folder = write(tmp_path / "fork", fork)
    for named in (folder, folder / "src", folder / "src" / "corp_megatron"):
        status, result = diff(capsys, named, "--root", "corp_megatron")
        assert status == 0
        assert states(result)["attend"] == "changed"
        assert states(result)["Layer.forward"] == "ok"
        (message,) = result["features"][0]["sites"][0]["messages"]
        assert message.startswith("your fork changed this function; this feature replaces it")
        assert "corp_megatron" in message
    status, message = diff(capsys, folder)
    assert status == 2
    assert "there is no package megatron.core" in message
    assert "but there is corp_megatron" in message
    assert "--megatron-root" in message


def test_required_target_that_is_gone_or_takes_other_parameters(tmp_path, capsys):
    files = dict(FILES)
    files["megatron/core/a.py"] = "def attend(q, k): ...\n"
    files["megatron/core/b.py"] = "class Layer:\n    def forwards(self, x): ...\n"
    status, result = diff(capsys, write(tmp_path / "new", files))
    assert status == 1
    assert states(result)["attend"] == "parameter"
    assert states(result)["Layer.forward"] == "missing"
    assert len(result["problems"]) == 2
    assert "f: megatron.core.a:attend has no parameter query" in result["problems"][0]
    assert "is it forwards now?" in result["problems"][1]


def test_feature_that_refuses_the_release_does_not_fail(tmp_path, capsys, monkeypatch):
    refusing = Feature("f", "does f", patches=ROWS, requires=Requires(versions={"megatron-core": ">=0.17"}))
    monkeypatch.setattr("mindspeed_dsa.tools.cli.diff.everything", lambda: (refusing,))
    files = {**FILES, "megatron/core/a.py": ""}
    status, result = diff(capsys, write(tmp_path / "old", files))
    assert status == 0
    assert result["features"][0]["refused"] == "it needs megatron-core >=0.17"
    assert states(result)["attend"] == "missing"


def test_wheel_and_release(tmp_path, capsys, monkeypatch):
    write(tmp_path / "checkout", FILES)
    wheel = tmp_path / "cache" / "megatron_core-0.16.1-cp312-x.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in FILES:
            archive.write(tmp_path / "checkout" / name, name)
    monkeypatch.setattr("mindspeed_dsa.tools.compat.refresh.cache_folder", lambda: wheel.parent)
    for named in (wheel, "0.16.1"):
        status, result = diff(capsys, named)
        assert status == 0
        assert result["source"] == wheel.name
        assert states(result)["attend"] == "ok"


def test_sources_that_do_not_say_their_release(tmp_path, capsys):
    files = {**FILES, "megatron/core/package_info.py": ""}
    folder = write(tmp_path / "checkout", files)
    status, result = diff(capsys, folder)
    assert result["release"] is None
    assert status == 1, "without a release no range can be applied, and Layer.future is not there"
    status, result = diff(capsys, folder, "--release", "0.16.1")
    assert status == 0
    assert result["release"] == "0.16.1"


@pytest.mark.parametrize("named", ["nonsense", Path(__file__)])
def test_what_is_no_source_is_refused(named, capsys):
    status, message = diff(capsys, named)
    assert status == 2
    assert str(named) in message


def test_installed_megatron_with_the_real_features(monkeypatch, capsys):
    monkeypatch.undo()
    status, result = diff(capsys, "installed")
    assert result["problems"] == []
    assert status == 0
    assert [row["name"] for row in result["features"]] == [feature.name for feature in everything()]


def test_real_fork_of_the_installed_release(monkeypatch, capsys, tmp_path):
    """Megatron-core copied under another name, imports rewritten, one patched function edited."""
    monkeypatch.undo()
    core = Path(SourceTree().module("megatron.core").file).parent
    fork = tmp_path / "corp_megatron" / "core"
    shutil.copytree(core, fork, ignore=shutil.ignore_patterns("*.so", "*.pyc", "__pycache__"))
    for file in fork.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        file.write_text(text.replace("megatron.core", "corp_megatron.core"), encoding="utf-8")
    status, result = diff(capsys, tmp_path, "--megatron-root", "corp_megatron")
    assert status == 0, result["problems"]
    assert _changed(result) == []
    module = fork / "models" / "common" / "language_module" / "language_module.py"
    text = module.read_text(encoding="utf-8")
    edited = text.replace(
        "super().__init__(config=config)", "super().__init__(config=config)\n        self.own = 1"
    )
    assert edited != text
    module.write_text(edited, encoding="utf-8")
    status, result = diff(capsys, tmp_path, "--megatron-root", "corp_megatron")
    assert status == 0, "drift is reported, it does not stop a feature"
    assert _changed(result) == ["LanguageModule.__init__"]


def _changed(found):
    sites = [site for feature in found["features"] for site in feature["sites"]]
    return [site["target"].rpartition(":")[2] for site in sites if site["state"] == "changed"]
