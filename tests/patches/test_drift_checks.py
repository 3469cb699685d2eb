"""Drift checks report version ranges, missing parameters, changed code and forks."""

from __future__ import annotations

import ast
import textwrap
from dataclasses import replace

import pytest

from mindspeed_dsa.patches import source_tree
from mindspeed_dsa.patches.drift import Checker, fingerprint
from mindspeed_dsa.patches.source_tree import SourceTree
from tests.support.drift_packages import checker, patch, write

SOURCE = '''
def attend(query, key, *, scale=1.0):
    """Documented."""
    from megatron.core.layers import softmax

    return softmax(query @ key, f"{scale:>{8}.3f}")
'''


def known(tmp_path, release="0.16.1"):
    facts = checker(tmp_path / "recorded", {"megatron/core/a.py": SOURCE}).inspect(ATTEND)
    return {"megatron.core.a:attend": {release: facts.fingerprint}}


ATTEND = patch("megatron.core.a:attend", params=("query", "scale"))
REPLACED = patch("megatron.core.a:attend", "replace")


def states(findings):
    return [finding.state for finding in findings]


def test_nothing_to_say_when_all_is_as_known(tmp_path):
    check = checker(tmp_path, {"megatron/core/a.py": SOURCE}, version="0.16.1", known=known(tmp_path))
    assert check.check(ATTEND) == []
    assert check(ATTEND) == ([], [])


def test_out_of_range_is_not_looked_at(tmp_path):
    check = checker(tmp_path, {"megatron/core/b.py": ""}, version="0.17.0rc0")
    row = patch("megatron.core.a:attend", versions=">=0.16,<0.17.0a0")
    (finding,) = check.check(row)
    assert finding.state == "out-of-range"
    assert not finding.fatal
    assert "megatron 0.17.0rc0 is outside >=0.16,<0.17.0a0" in finding.message
    # In range, or with an unknown version, the file is looked at.
    inside = Checker(check.tree, version="0.16.2.dev1").check(row)
    assert states(inside) == ["missing"]
    assert states(Checker(check.tree, version=None).check(row)) == ["missing"]


def test_missing_parameters(tmp_path):
    check = checker(tmp_path, {"megatron/core/a.py": SOURCE})
    (finding,) = check.check(patch("megatron.core.a:attend", params=("query", "mask", "bias")))
    assert finding.state == "parameter"
    assert finding.fatal
    assert "no parameter mask, bias" in finding.message
    assert "it takes (query, key, scale) at " in finding.message
    assert "a.py:2" in finding.message
    problems, notes = check(patch("megatron.core.a:attend", params=("mask",)))
    assert len(problems) == 1
    assert notes == []


def test_var_keyword_takes_any_parameter(tmp_path):
    check = checker(tmp_path, {"megatron/core/a.py": "def attend(query, **kwargs): ...\n"})
    assert check.check(patch("megatron.core.a:attend", params=("mask",))) == []


def test_changed_function_and_what_it_means_for_each_kind(tmp_path):
    fork = SOURCE.replace("query @ key", "(query @ key) / 2")
    check = checker(tmp_path, {"megatron/core/a.py": fork}, version="0.16.1+corp", known=known(tmp_path))
    (replaced,) = check.check(REPLACED)
    assert replaced.state == "changed"
    assert not replaced.fatal
    lost = "your fork changed this function; this feature replaces it and your change would be lost"
    assert replaced.message.startswith(lost)
    assert "is not that of 0.16.1" in replaced.message
    (wrapped,) = check.check(ATTEND)
    assert "lost" not in wrapped.message
    (in_part,) = check.check(replace(ATTEND, in_place_of="layers with DSA"))
    assert "does not call it for layers with DSA, where your change would be lost" in in_part.message
    problems, notes = check(REPLACED)
    assert problems == []
    assert notes == [replaced.message]


def test_change_and_missing_parameter_are_both_reported(tmp_path):
    fork = SOURCE.replace("scale=1.0", "factor=1.0").replace("{scale:", "{factor:")
    check = checker(tmp_path, {"megatron/core/a.py": fork}, version="0.16.1", known=known(tmp_path))
    assert states(check.check(ATTEND)) == ["parameter", "changed"]


def test_release_that_was_never_recorded(tmp_path):
    same = checker(tmp_path, {"megatron/core/a.py": SOURCE}, version="0.16.2", known=known(tmp_path))
    assert same.check(REPLACED) == []
    fork = SOURCE.replace("query @ key", "key @ query")
    other = checker(tmp_path / "fork", {"megatron/core/a.py": fork}, version="0.16.2", known=known(tmp_path))
    (finding,) = other.check(REPLACED)
    assert finding.message.startswith("no known release has this function; this feature replaces it")
    assert "differs from 0.16.1" in finding.message


def test_manager_is_told_nothing_about_other_packages(tmp_path):
    # torch sets attributes from C code that its Python sources do not show, so absence proves nothing there.
    check = checker(tmp_path, {"megatron/core/a.py": SOURCE}, version="0.16.1")
    row = patch("argparse:made_from_c", versions="<0.1")
    assert check(row) == ([], [])
    assert states(check.check(row)) == ["missing"], "nor is the version one of Megatron's"


def test_fork_with_another_root(tmp_path):
    """A renamed root package is no change; a changed function is one."""
    fork = SOURCE.replace("megatron", "corp_megatron")
    options = {"version": "0.16.1", "known": known(tmp_path), "root": "corp_megatron"}
    row = REPLACED.under_root("corp_megatron")
    assert checker(tmp_path / "same", {"corp_megatron/core/a.py": fork}, **options).check(row) == []
    # The eight is the width in the format of `scale`.
    changed = fork.replace("8", "9")
    findings = checker(tmp_path / "new", {"corp_megatron/core/a.py": changed}, **options).check(row)
    assert states(findings) == ["changed"]


@pytest.mark.parametrize(
    "same",
    [
        SOURCE.replace("Documented.", "Documented better."),
        SOURCE.replace('    """Documented."""\n', "    # comment\n\n"),
        SOURCE.replace("query @ key", "(query  # why\n        @ key)"),
        SOURCE.replace("query, key, *, scale=1.0)", "query: T, key, *, scale: float = 1.0) -> T"),
        SOURCE.replace('f"{scale:>{8}.3f}"', "f'{scale:>{8}.3f}'"),
    ],
    ids=["docstring", "comment", "layout", "annotations", "quotes"],
)  # fmt: skip
def test_fingerprint_ignores_what_does_not_run(same):
    assert same != SOURCE
    assert _print(same) == _print(SOURCE)


@pytest.mark.parametrize(
    "other",
    [
        SOURCE.replace("1.0", "1"),
        SOURCE.replace(">{8}", "<{8}"),
        SOURCE.replace("*, scale", "scale"),
        SOURCE.replace("query @ key", "query * key"),
        SOURCE.replace("def", "@jit\ndef"),
        SOURCE.replace("return ", "yield "),
        SOURCE.replace("layers import softmax", "layers import softmax as softmax"),
        SOURCE.replace("query, key", "query, /, key"),
    ],
    ids=["constant", "format", "keyword-only", "operator", "decorator", "yield", "alias", "positional-only"],
)
def test_fingerprint_sees_what_runs(other):
    assert other != SOURCE
    assert _print(other) != _print(SOURCE)


def test_fingerprint_is_the_same_under_every_python():
    """Fingerprints recorded under Python 3.11 agree under 3.10 to 3.13, with f-strings, match and lambdas."""
    text = '''
    class A:
        """Doc."""
        size: int = 3
        """Attribute doc."""
        def f(self, /, *args, x: int = 1, **kw) -> str:
            match args:
                case [1, *rest] if rest: return f"{x!r:>{self.size}}" f"{kw=}" "tail"
                case {"k": v, **more}: return lambda y=v: (yield y)
            with open(b"a") as a, open("b"): return [*a, {**kw}, -0.5e3, 1j, ...]
    '''
    assert _print(text) == "e62095f0c08164a2"


def test_alternative_definitions_are_all_part_of_the_fingerprint(tmp_path):
    text = "if FLAG:\n    def f(): return 1\nelse:\n    def f(): return 2\n"
    first = checker(tmp_path / "a", {"megatron/core/a.py": text})
    second = checker(tmp_path / "b", {"megatron/core/a.py": text.replace("2", "3")})
    row = patch("megatron.core.a:f")
    assert first.inspect(row).fingerprint != second.inspect(row).fingerprint


def test_only_modules_with_sites_are_parsed_and_each_once(tmp_path, monkeypatch):
    # Typical size of a check: 200 sites in 200 modules, among 2000 modules.
    body = "".join(f"def name_{i}(x, factor={i}):\n    return x * factor + {i}\n\n" for i in range(50))
    files = {f"megatron/pkg_{i // 100}/stub_{i}.py": body for i in range(2000)}
    tree = SourceTree.folder(write(tmp_path, files))
    rows = [patch(f"megatron.pkg_{i // 10}.stub_{10 * i}:name_{i % 50}", params=("x",)) for i in range(200)]
    parsed, parse = [], source_tree.scope_of_text
    monkeypatch.setattr(source_tree, "scope_of_text", lambda text: parsed.append(text) or parse(text))
    recorded = {row.target: {"1.0": "0" * 16} for row in rows}
    check = Checker(tree, version="1.0", known=recorded)
    states_found = [finding.state for row in rows for finding in check.check(row)]
    assert states_found == ["changed"] * 200
    assert len(parsed) == 200


def _print(text):
    return fingerprint([ast.parse(textwrap.dedent(text)).body[0]])
