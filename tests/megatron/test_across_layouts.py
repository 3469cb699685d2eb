"""Checkpoints loaded in another layout: state goes to its place, or is refused in one message.

``tests/distributed/test_resume.py`` covers whole checkpoints of all layouts.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mindspeed_dsa.megatron import across_layouts
from mindspeed_dsa.patches.errors import SettingsError
from tests.support import third_party
from tests.support.contexts import context

third_party.or_skip("megatron.core")


def group(experts: bool = False, wd_mult: float = 1.0, **more: Any) -> dict[str, Any]:
    identity = {"wd_mult": wd_mult, "lr_mult": 1.0, "is_expert_parallel": experts, "is_decoupled_lr": False}
    return {**identity, "max_lr": 1e-3, "min_lr": 0.0, **more}


def optimizer(*groups: dict[str, Any]) -> Any:
    return SimpleNamespace(optimizer=SimpleNamespace(param_groups=list(groups)))


def test_state_of_as_many_optimizers_is_left_alone() -> None:
    one = {"state": {}, "param_groups": [group(lr=1.0)]}
    two = {0: one, 1: one}
    assert across_layouts.fitted([optimizer(group())], one) is one
    assert across_layouts.fitted([optimizer(group())] * 2, two) is two
    assert across_layouts.fitted([optimizer(group())] * 2, [one, one]) == [one, one]


def test_every_group_gets_that_of_its_multipliers() -> None:
    """Covers the expert group, too; each group keeps its own parameters and kind."""
    saved = {
        0: {"param_groups": [group(lr=1.0, step=7), group(wd_mult=0.0, lr=2.0, step=7)], "state": {}},
        1: {"param_groups": [group(True, wd_mult=0.5, lr=3.0)], "state": {"common_step": 7}},
    }
    read = {"state": {0: "a", 1: "b"}, "param_groups": [{"params": [number]} for number in range(3)]}
    part = optimizer(group(wd_mult=0.0), group(wd_mult=0.5), group())
    fitted = across_layouts.fitted([part], {**saved, **read})
    assert fitted.keys() == {"state", "param_groups"}
    assert [(kept["lr"], kept["params"], kept["step"]) for kept in fitted["param_groups"]] == [
        (2.0, [0], 7),
        (3.0, [1], 7),
        (1.0, [2], 7),
    ]
    assert not any(kept["is_expert_parallel"] for kept in fitted["param_groups"])
    assert fitted["state"] == {0: "a", 1: "b", "common_step": 7}


def test_groups_of_other_multipliers_are_refused() -> None:
    saved = {0: {"param_groups": [group()], "state": {}}, 1: {"param_groups": [group(True)], "state": {}}}
    read = {"state": {}, "param_groups": [{"params": [0]}]}
    with pytest.raises(SettingsError, match=r"'wd_mult': 0\.25.*only .*'wd_mult': 1\.0.*add --no-load-optim"):
        across_layouts.fitted([optimizer(group(wd_mult=0.25))], {**saved, **read})


def test_the_optimizer_of_a_vocabulary_is_not_that_of_experts() -> None:
    """Covers a checkpoint with one of both, loaded by a layout with the other."""
    dense, other = ({"param_groups": [group(lr=lr, step=7)], "state": {}} for lr in (1.0, 2.0))
    read = {"state": {0: "a"}, "param_groups": [{"params": [0]}]}
    experts, vocabulary = optimizer(group(True)), optimizer(group())
    across_layouts.mark_vocabulary(vocabulary)
    for part, key, saved_key in ((experts, 1, 100), (vocabulary, 100, 1)):
        fitted = across_layouts.fitted([optimizer(group()), part], {0: dense, saved_key: other, key: read})
        assert fitted[0] is dense
        assert fitted.keys() == {0, key}
        (kept,) = fitted[key]["param_groups"]
        assert (kept["params"], kept["step"]) == ([0], 7)
        assert kept["is_expert_parallel"] == (part is experts)
        assert fitted[key]["state"] == {0: "a"}


def test_a_chain_with_its_own_vocabulary_is_left_alone() -> None:
    vocabulary = optimizer(group())
    across_layouts.mark_vocabulary(vocabulary)
    saved = {"param_groups": [group(lr=1.0)], "state": {}}
    state = {0: saved, 100: saved}
    assert across_layouts.fitted([optimizer(group()), vocabulary], state) is state


class Generators:
    """Generator states as Megatron describes them: ``unique_key`` contains the layout's shape."""

    unique_key = "rng_state/shard_0.0.0_1.2.1"


def arguments(ep: int = 1, etp: int | None = None, **more: Any) -> Any:
    sizes = {"tensor_model_parallel_size": 2, "expert_model_parallel_size": ep}
    defaults = {
        "use_distributed_optimizer": True,
        "finetune": False,
        "no_load_optim": False,
        "no_load_rng": False,
    }
    return SimpleNamespace(
        **{**sizes, "expert_tensor_parallel_size": etp, "world_size": 2, **defaults, **more}
    )


def load(
    monkeypatch: pytest.MonkeyPatch, saved: Any, args: Any, format_: str | None, keys: set[str]
) -> dict[str, Any]:
    """Return the arguments of Megatron's function, when called as by ``load_checkpoint``."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import serialization

    monkeypatch.setattr(
        dist_checkpointing,
        "load_content_metadata",
        lambda preloaded_state_dict: (
            format_ and {"distrib_optim_sharding_type": format_, "chained_optim_avoid_prefix": True}
        ),
    )
    monkeypatch.setattr(serialization, "load_sharded_metadata", lambda folder: keys)
    asked: list[Any] = []

    def original(load_dir: str, args: Any, rank0: bool, sharded_state_dict: Any, **more: Any) -> Any:
        asked.append(sharded_state_dict)
        return {"args": saved}, "folder/iter_0000002", False, "global"

    function = across_layouts.load_base_across(original, context("moe-tp-extend-ep"))
    function("folder", arguments(ep=8), rank0=True, checkpointing_context=None)  # arguments as passed
    function("folder", args, rank0=True, checkpointing_context=None)
    wanted = {"model": {}, "rng_state": Generators()}
    function("folder", args, rank0=False, sharded_state_dict=wanted, checkpointing_context=None)
    assert len(asked) == 3
    found: dict[str, Any] = asked[-1]
    return found


def test_slices_of_buffers_are_refused_in_another_layout_of_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    divided = {"context_parallel_size": 2, "cp_shard_vocabulary": True}
    with pytest.raises(SettingsError, match=r"vocabulary over context parallel 1 there and 2 here"):
        load(monkeypatch, arguments(), arguments(**divided), "dp_reshardable", set())
    message = (
        r"folder/iter_0000002 has .*expert parallel 1 there and 2 here, expert tensor parallel 2 there and 1 "
        r"here.* as dp_reshardable.*--dist-ckpt-optim-fully-reshardable.*, or add --no-load-optim"
    )
    with pytest.raises(SettingsError, match=message):
        load(monkeypatch, arguments(), arguments(2, 1), "dp_reshardable", set())
    chunks = {"pipeline_model_parallel_size": 2, "schedules_method": "dualpipev"}
    with pytest.raises(SettingsError, match=r"V 0 there and 1 here.* as dp_reshardable"):
        load(monkeypatch, arguments(), arguments(**chunks), "dp_reshardable", set())
    for args, format_ in (
        (arguments(2, 1, no_load_optim=True), "dp_reshardable"),
        (arguments(2, 1, use_distributed_optimizer=False), "dp_reshardable"),
        (arguments(2, 1), "fully_reshardable"),
        (arguments(**chunks), "fully_reshardable"),
        (arguments(2, 1), "none"),
        (arguments(world_size=4), None),
        (arguments(world_size=4), "dp_reshardable"),
    ):
        assert load(monkeypatch, arguments(), args, format_, {Generators.unique_key})["model"] == {}


def test_names_by_optimizer_are_refused_where_there_are_others(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = arguments(2, 1, use_distributed_optimizer=False)
    with pytest.raises(SettingsError, match=r"a Megatron before 0\.14.*the expert parallel size that it has"):
        load(monkeypatch, arguments(), plain, None, set())
    assert load(monkeypatch, arguments(4, 1), plain, None, {Generators.unique_key})["model"] == {}


def test_generators_begin_anew_where_they_were_saved_for_other_ranks(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    here = arguments(2, 1)
    with caplog.at_level("WARNING", logger="mindspeed_dsa"):
        asked = load(monkeypatch, arguments(), here, "none", {"rng_state/shard_0.0_1.2"})
    assert "rng_state" not in asked
    assert here.no_load_rng
    assert "generators for another layout; they begin anew" in caplog.text
    same = arguments(2, 1)
    assert "rng_state" in load(monkeypatch, arguments(), same, "none", {Generators.unique_key})
    assert not same.no_load_rng
