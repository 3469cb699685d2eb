"""Implementations are loaded after the import of their target, possibly during other imports."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from mindspeed_dsa.features import shipped

_FETCH = """
import importlib, json, sys
import torch  # as a session does, which asks it for the platform
import wrapt

fetched = []

def fetch(target, implementation):
    def hook(module):
        importlib.import_module(implementation)
        fetched.append(target)
    wrapt.register_post_import_hook(hook, target)

rows = [row for row in json.loads(sys.argv[1]) if row[0] not in sys.modules]
for target, implementation in rows:
    fetch(target, implementation)
for target, _ in rows:
    importlib.import_module(target)
print(len(rows), len(fetched))
"""


@pytest.mark.full
def test_implementations_load_while_torch_imports_their_target():
    """An import of a module that is still being imported would fail only in a fresh process."""
    rows = {
        (patch.target.partition(":")[0], patch.impl.partition(":")[0])
        for feature in shipped()
        for patch in feature.patches
        if patch.target.startswith("torch.")
    }
    done = subprocess.run(
        [sys.executable, "-c", _FETCH, json.dumps(sorted(rows))], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    asked, fetched = map(int, done.stdout.split())
    assert asked == fetched > 0
