"""One rule for whatever a feature measures: deterministic training refuses it before anything is built."""

from __future__ import annotations

import ast
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
from tests.support.import_graph import Sources

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
    # folder of the feature: its name, switches that leave something to be measured, and those that do not
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
    """What imports ``timed`` is here, and its validation has ``check_measured``."""
    sources = Sources(Path(mindspeed_dsa.__file__).parent, PACKAGE)

    def folders_that_import(function):
        module, features = f"{PACKAGE}.megatron.measured", f"{PACKAGE}.features."
        importers = (
            name
            for name, tree in sources.trees.items()
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module == module
            if function in {alias.name for alias in node.names}
        )
        return {".".join(name.removeprefix(features).split(".")[:2]) for name in importers}

    assert folders_that_import("timed") == set(FEATURES)
    assert folders_that_import("check_measured") == set(FEATURES)


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
