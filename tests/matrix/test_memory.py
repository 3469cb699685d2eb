"""Memory features on the installed release: training is equal bit for bit, on and off."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from mindspeed_dsa.platforms.cpu import CpuPlatform
from tests.features.attention.packs import documents as packs
from tests.features.memory.pairs import FEATURES
from tests.matrix import model as tiny
from tests.matrix.record import at_work
from tests.support import memory_events, optimizer_job
from tests.support import model as job
from tests.support.memory_events import EVENTS
from tests.support.optimizer_training import COMPARED

pytestmark = pytest.mark.releases(">=0.12.1")

OPTIMIZERS = ("reuse-fp32-param", "swap-optimizer", "virtual-optimizer")
LAYERS = ("recompute-activation-function", "recompute-norm", "swap-attention")
LAYOUTS = {"TP2+SP": {"tp": 2}, "PP2 x VPP2": {"pp": 2, "vpp": 2}}
PLAIN = {"steps": 3, "skip": 1}
DISTRIBUTED = {**PLAIN, "distributed": True}
OVERLAP = {**DISTRIBUTED, "overlap": True}


def assert_only(counts, *features):
    """Check that the listed features were active, and no others."""
    assert {name for name, event in EVENTS.items() if event in counts} == set(features)


@pytest.mark.parametrize(
    ("ranks", "options"), [(1, PLAIN), (2, OVERLAP)], ids=["plain", "dp2, distributed, overlap"]
)
@pytest.mark.parametrize("feature", OPTIMIZERS)
def test_optimizers(pool, note, feature, ranks, options):
    note.begins("DP2, distributed optimizer, overlapped" if ranks > 1 else "one process", feature)
    off = pool.baseline(f"{__name__}:optimizer_steps", ranks, **options)
    on = pool.run(f"{__name__}:optimizer_steps", ranks, switches=FEATURES[feature], **options)
    for without, having in zip(off, on, strict=True):
        for what in COMPARED:
            assert having[what] == without[what], what
        assert having["placed"] != without["placed"]
        assert_only(having["counts"], feature)
        assert_only(without["counts"])
    note.trained(on)


def test_buckets_that_are_gathered_during_the_step(pool):
    """As on an accelerator, a bucket is gathered once its weights are updated, and only then."""
    off = pool.run(f"{__name__}:optimizer_steps", 2, **DISTRIBUTED)
    switches = FEATURES["swap-optimizer"]
    on = pool.run(f"{__name__}:optimizer_steps", 2, switches=switches, early=True, **DISTRIBUTED)
    for without, having in zip(off, on, strict=True):
        for what in COMPARED:
            assert having[what] == without[what], what
        # In the two of three steps that are not skipped.
        assert having["gathered"] == without["gathered"] > 0


@pytest.mark.parametrize("feature", OPTIMIZERS)
def test_checkpoints(pool, tmp_path, feature):
    """A checkpoint saved with the feature loads without it, and the other way around."""
    options = {"steps": 2, "distributed": True}
    whole = pool.baseline(f"{__name__}:optimizer_steps", 2, **{**options, "steps": 4})
    for number, (before, after) in enumerate(((FEATURES[feature], {}), ({}, FEATURES[feature]))):
        folder = tmp_path / str(number)
        folder.mkdir()
        save, load = {"save": str(folder)}, {"load": str(folder)}
        pool.run(f"{__name__}:optimizer_steps", 2, switches=before, folders=save, **options)
        resumed = pool.run(f"{__name__}:optimizer_steps", 2, switches=after, folders=load, first=2, **options)
        for expected, result in zip(whole, resumed, strict=True):
            for what in ("weights", "masters", "moments"):
                assert result[what] == expected[what], what
            assert result["records"] == expected["records"][2:]


@pytest.mark.releases(">=0.15")
@pytest.mark.parametrize("feature", [None, *OPTIMIZERS])
def test_jobs_resume_from_slices_of_buffers(pool, tmp_path, feature):
    """Megatron's default for the same layout; with torch's Adam, 0.15 could not save it."""
    options = {"steps": 2, "distributed": True, "switches": FEATURES[feature] if feature else {}}
    whole = pool.baseline(f"{__name__}:optimizer_steps", 2, **{**options, "steps": 4})
    ways = {"way": "dp_reshardable", **options}
    pool.run(f"{__name__}:optimizer_steps", 2, folders={"save": str(tmp_path)}, **ways)
    resumed = pool.run(f"{__name__}:optimizer_steps", 2, folders={"load": str(tmp_path)}, first=2, **ways)
    for expected, result in zip(whole, resumed, strict=True):
        for what in ("weights", "masters", "moments"):
            assert result[what] == expected[what], what
        assert result["records"] == expected["records"][2:]


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("feature", LAYERS)
def test_layers(pool, note, feature, name):
    note.begins(name, feature)
    layout = LAYOUTS[name]
    ranks = layout.get("tp", 1) * layout.get("pp", 1)
    layers = {"num_layers": 4, "moe_layer_freq": [0, 1, 0, 1]}
    arguments = {**layout, "overrides": layers, "num_microbatches": 2}
    off = pool.baseline(f"{__name__}:layer_step", ranks, switches={}, **arguments)
    on = pool.run(f"{__name__}:layer_step", ranks, switches=FEATURES[feature], **arguments)
    for without, having in zip(off, on, strict=True):
        assert having["losses"] == without["losses"]
        assert having["gradients"].keys() == without["gradients"].keys()
        for name, gradient in without["gradients"].items():
            assert torch.equal(having["gradients"][name], gradient), name
        assert_only(having["counts"], feature)
        assert_only(without["counts"])
    note.trained(on)


@pytest.mark.parametrize("name", LAYOUTS)
def test_megatrons_recomputed_norms(pool, name):
    """Covers Megatron's own module, without Transformer Engine."""
    layout = LAYOUTS[name]
    ranks = layout.get("tp", 1) * layout.get("pp", 1)
    layers = {"num_layers": 4, "moe_layer_freq": [0, 1, 0, 1]}
    modules = {"recompute_modules": ["layernorm"]}
    selective = {**layers, "recompute_granularity": "selective", **modules}
    off = pool.baseline(
        f"{__name__}:layer_step", ranks, switches={}, overrides=layers, num_microbatches=2, **layout
    )
    on = pool.run(
        f"{__name__}:layer_step", ranks, switches=modules, overrides=selective, num_microbatches=2, **layout
    )
    for without, having in zip(off, on, strict=True):
        assert having["losses"] == without["losses"]
        assert having["gradients"].keys() == without["gradients"].keys()
        for name, gradient in without["gradients"].items():
            assert torch.equal(having["gradients"][name], gradient), name
        assert_only(having["counts"], "recompute-norm")  # by the name that their outputs have there
        assert "recompute-outputs" in having["at work"]


FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
MTP = {"mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.1}
WITHOUT_MTP_REPAIR = {"mtp_recompute": False}


@pytest.mark.releases(">=0.16,<0.19")
@pytest.mark.parametrize("method", ["uniform", "block"])
def test_packs_in_recomputed_layers_of_multi_token_prediction(pool, note, method):
    note.begins("one process", "mtp-recompute")
    (plain,) = pool.baseline(f"{__name__}:packed_mtp_step", 1)
    (again,) = pool.run(f"{__name__}:packed_mtp_step", 1, overrides={**FULL, "recompute_method": method})
    assert any(name.startswith("mtp.") and gradient.any() for name, gradient in plain["gradients"].items())
    assert again["gradients"].keys() == plain["gradients"].keys()
    for name, gradient in plain["gradients"].items():
        assert torch.equal(again["gradients"][name], gradient), name
    note.trained([again])


@pytest.mark.releases(">=0.16,<0.18", quick=True)
def test_megatron_saves_the_description_of_packs_for_backward(pool):
    arguments = {"overrides": FULL, "switches": WITHOUT_MTP_REPAIR}
    (error,) = pool.run("tests.support.model:error_of", 1, case=f"{__name__}:packed_mtp_step", **arguments)
    assert "save_for_backward can only save variables" in error


@pytest.mark.releases(">=0.18,<0.19")
@pytest.mark.parametrize("padded", [False, True])
def test_the_padding_mask_of_recomputed_layers_of_multi_token_prediction(pool, padded):
    (plain,) = pool.baseline(f"{__name__}:padded_mtp_step", 1, padded=padded)
    (again,) = pool.run(f"{__name__}:padded_mtp_step", 1, padded=padded, overrides=FULL)
    assert again["loss"] == plain["loss"]
    for name, gradient in plain["gradients"].items():
        assert torch.equal(again["gradients"][name], gradient), name
    (other,) = pool.baseline(f"{__name__}:padded_mtp_step", 1, padded=not padded)
    router = next(name for name in plain["gradients"] if name.startswith("mtp.") and "router" in name)
    assert not torch.equal(other["gradients"][router], plain["gradients"][router])


@pytest.mark.releases(">=0.18,<0.19")
def test_megatron_recomputes_no_layer_of_multi_token_prediction(pool):
    arguments = {"overrides": FULL, "switches": WITHOUT_MTP_REPAIR}
    (error,) = pool.run(
        "tests.support.model:error_of", 1, case=f"{__name__}:padded_mtp_step", padded=False, **arguments
    )
    assert "unexpected keyword argument 'padding_mask'" in error


# -- functions that the ranks run -----------------------------------------------------------------


def packed_mtp_step(
    overrides: Mapping[str, Any] | None = None, switches: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the gradients of packs in a model with one MTP layer."""
    fields = {**MTP, **(overrides or {})}
    told = {name: fields[name] for name in ("mtp_num_layers", "recompute_granularity") if name in fields}
    result = packs.scripted_step(
        switches={**told, **(switches or {})},
        overrides={"num_layers": 2, **fields},
        builder="tests.matrix.model",
        config="config_with_experts",
    )
    return {**result, "at work": at_work()}


def padded_mtp_step(
    padded: bool, overrides: Mapping[str, Any] | None = None, switches: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return loss and gradients with a router auxiliary loss, which a padding mask changes."""
    fields = {**MTP, **(overrides or {})}
    told = {name: fields[name] for name in ("mtp_num_layers", "recompute_granularity") if name in fields}
    job.start({**told, **(switches or {})})
    balanced = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1}
    model = tiny.gpt_model(tiny.config_with_experts(**fields, **balanced))
    batch = job.samples(4)
    tokens, labels = batch[:, :-1], batch[:, 1:]
    mask = torch.zeros(tokens.shape, dtype=torch.bool)
    mask[:, -5:] = padded
    positions = torch.arange(tokens.size(1)).expand_as(tokens)
    loss = model(tokens, positions, None, labels=labels, padding_mask=mask if padded else None).mean()
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.item(), "gradients": gradients}


def optimizer_steps(
    folders: Mapping[str, str] | None = None, early: bool = False, way: str = "", **arguments: Any
) -> dict[str, Any]:
    """Run :func:`optimizer_job.train` with the model of any release; add the counted events.

    Args:
        folders: folders to ``load`` from and to ``save`` to.
        early: whether to load and gather as early as on an asynchronous device.
        way: format of the folders, as in ``optimizer_job.save_to``. Default: one that allows other layouts.
        arguments: arguments of ``optimizer_job.train``.
    """
    for name, folder in (folders or {}).items():
        arguments[name] = (way or _format(), folder)
    with (
        mock.patch.object(optimizer_job, "config", tiny.config_with_experts),
        mock.patch.object(optimizer_job, "gpt_model", tiny.gpt_model),
        mock.patch.object(CpuPlatform, "asynchronous", early),
        # Megatron-core 0.12 saves tensor shards with a function that numpy 2 removed.
        mock.patch.object(np, "product", np.prod, create=True),
        memory_events.counted() as counts,
        _gathers() as gathers,
    ):
        result = optimizer_job.train(**arguments)
    return {**result, "counts": dict(counts), "gathered": len(gathers), "at work": at_work()}


@contextlib.contextmanager
def _gathers() -> Iterator[list[Any]]:
    """Record the parts of buckets that Megatron gathered."""
    from megatron.core.distributed import param_and_grad_buffer

    buckets: list[Any] = []
    gather = param_and_grad_buffer.dist_all_gather_func

    def counting(output: Any, *args: Any, **kwargs: Any) -> Any:
        buckets.append(output.shape)
        return gather(output, *args, **kwargs)

    with mock.patch.object(param_and_grad_buffer, "dist_all_gather_func", counting):
        yield buckets


def layer_step(switches: Mapping[str, Any], **arguments: Any) -> dict[str, Any]:
    """Run :func:`tiny.one_step`, and add the counted events."""
    with mock.patch.object(tiny, "config", tiny.config_with_experts), memory_events.counted() as counts:
        result = tiny.one_step(switches, **arguments)
    return {**result, "counts": dict(counts), "at work": at_work()}


def _format() -> str:
    """Return the checkpoint format that allows another number of ranks."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    newer = getattr(DistributedOptimizer, "checkpoint_fully_reshardable_formats", ())
    return "fully_reshardable" if "fully_reshardable" in newer else "fully_sharded_model_space"
