"""The repairs in a complete fork of Megatron-core with another root package."""

from __future__ import annotations

import json
import os
import shutil
import sys

from tests.support import third_party, warm

SCRIPT = """
import contextlib, json, sys
from mindspeed_dsa.tools.cli import doctor
with contextlib.redirect_stdout(sys.stderr):
    findings = doctor.examine(["--experimental-attention-variant", "dsa", "--megatron-root", "corp_megatron"])
    findings["loaded"] = sorted(name for name in sys.modules if name.partition(".")[0] == "megatron")
print(json.dumps(findings))
"""


def test_every_site_is_applied_and_no_second_megatron_is_loaded(tmp_path):
    core = tmp_path / "corp_megatron" / "core"
    shutil.copytree(third_party.folder("megatron.core"), core, ignore=shutil.ignore_patterns("*.pyc"))
    for file in core.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        file.write_text(text.replace("megatron.core", "corp_megatron.core"), encoding="utf-8")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    done = warm.run([sys.executable, "-c", SCRIPT], timeout=200, env=env)
    assert done.returncode == 0, done.stderr
    findings = json.loads(done.stdout)
    assert findings["problems"] == []
    assert findings["loaded"] == []
    states = {site["target"]: site["state"] for site in findings["sites"]}
    assert states["corp_megatron.core.transformer.experimental_attention_variant.dsa:rotate_activation"] == (
        "applied"
    )
    failed = [target for target, state in states.items() if state in ("failed", "foreign")]
    assert failed == []
