"""Deterministic training refuses every measuring feature before anything is built."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import pytest

import mindspeed_dsa
from mindspeed_dsa.features import shipped
from mindspeed_dsa.features.moe.batch_overlap.feature import check_choice
from mindspeed_dsa.features.tensor_parallel.overlap.feature import check_tuned
from mindspeed_dsa.megatron.configuration import require
from mindspeed_dsa.patches.errors import SettingsError
from tests.support.contexts import context

PACKAGE = "mindspeed_dsa"
EXPERTS = {
    "num_experts": 8,
    "expert_model_parallel_size": 2,
    "expert_tensor_parallel_size": 1,
    "tensor_model_parallel_size": 2,
    "moe_token_dispatcher_type": "alltoall",
    "transformer_impl": "local",
}
FEATURES = {
    # feature's folder: its name, switches that leave something to measure, and switches that do not
    "moe.balanced_experts": (
        "balanced-moe-experts",
        {"balanced_moe_experts": True, "balanced_moe_link_rate": 25.0},
        {"balanced_moe_matmul_rate": 100.0},
    ),
    "moe.batch_overlap": (
        "moe-batch-overlap",
        {"moe_batch_overlap": True},
        {"moe_batch_overlap_always": True},
    ),
    "tensor_parallel.overlap": ("ascend-coc", {"use_ascend_coc": True}, {"coc_parallel_num": 4}),
}


@pytest.mark.parametrize("folder", FEATURES)
def test_deterministic_training_refuses_what_is_measured(folder):
    name, measured, fixed = FEATURES[folder]
    (feature,) = (feature for feature in shipped() if feature.name == name)

    def problems(**arguments):
        return list(feature.problems(SimpleNamespace(**{**EXPERTS, **arguments})))

    (problem,) = problems(**measured, deterministic_mode=True)
    assert "measures" in problem
    assert "which --deterministic-mode rules out" in problem
    assert "--no-deterministic-mode" in problem  # how the example job's default is switched off
    (option,) = fixed
    assert "--" + option.replace("_", "-") in problem
    assert problems(**measured) == []
    assert problems(**measured, **fixed, deterministic_mode=True) == []


def test_every_feature_that_measures_asks_the_same_function():
    """Every module that imports ``timed`` is listed here, and its validation has ``check_measured``."""
    folder, module = Path(mindspeed_dsa.__file__).parent, f"{PACKAGE}.megatron.measured"
    imported = defaultdict(set)  # by whom, in names relative to ``features``
    for file in folder.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        if "measured" not in text:  # spares most files their parsing
            continue
        owner = ".".join(file.relative_to(folder).parts[1:3])
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and node.module == module:
                for alias in node.names:
                    imported[alias.name].add(owner)
    assert imported["timed"] == set(FEATURES)
    assert imported["check_measured"] == set(FEATURES)


@pytest.mark.parametrize(
    ("check", "options"),
    [(check_choice, SimpleNamespace(switched_on=True, always=False)), (check_tuned, None)],
    ids=["halves", "chunks"],
)
def test_a_configuration_without_megatrons_parser_is_refused(check, options):
    its = context("a feature", options)
    require(its, check, SimpleNamespace(deterministic_mode=False))
    with pytest.raises(SettingsError, match="--deterministic-mode rules out"):
        require(its, check, SimpleNamespace(deterministic_mode=True))
