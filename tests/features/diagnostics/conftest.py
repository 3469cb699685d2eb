from __future__ import annotations

import sys

import pytest

import mindspeed_dsa
from mindspeed_dsa import features
from mindspeed_dsa.features.diagnostics.steps.feature import INITIAL_WEIGHTS, STEP_METRICS
from tests.support import training_loop as loop


@pytest.fixture
def megatron(tmp_path, monkeypatch, request):
    """Return the root package of a Megatron fork that has a training loop."""
    root = loop.write(tmp_path, getattr(request, "param", "0.16"))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("MINDSPEED_DSA_MEGATRON_ROOT", root)
    # The fork is too small for the platform's redirections and for DSA.
    monkeypatch.setattr(features, "built_in", lambda: (STEP_METRICS, INITIAL_WEIGHTS))
    yield root
    mindspeed_dsa.disable()
    for name in [name for name in sys.modules if name.partition(".")[0] == root]:
        del sys.modules[name]
