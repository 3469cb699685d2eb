"""TorchTitan's own trainer with Adam's moments on the host: losses, checkpoints, bytes, refusals."""

from __future__ import annotations

from functools import cache

import pytest
import torch

pytest.importorskip("torchtitan.config.override", reason="TorchTitan 0.3: make test-hosts")

from torchtitan.components.optimizer import OptimizersContainer, default_adamw

from mindspeed_dsa import platforms
from mindspeed_dsa.integrations.torchtitan import npu_swap_optimizer, swapped_moments
from tests.hosts.torchtitan import jobs

TIMES = 4
SWAP = (
    "--override.imports",
    f'mindspeed_dsa.integrations.torchtitan.npu_swap_optimizer={{"times": {TIMES}}}',
)
LAYOUTS = {
    "one": (1, ()),
    "tp": (2, ("--parallelism.tensor_parallel_degree", "2")),
    "pp": (2, ("--parallelism.pipeline_parallel_degree", "2")),
    "fsdp-tp-ep": (
        4,
        ("--parallelism.tensor_parallel_degree", "2", "--parallelism.expert_parallel_degree", "2"),
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return jobs.files(tmp_path_factory.mktemp("swap-optimizer"))


@pytest.fixture(scope="module")
def saved(folder):
    """Return a cached function that runs a job on FSDP2 ranks and saves after steps 2 and 4."""

    @cache
    def run(name: str, *arguments: str) -> jobs.Record:
        return jobs.by_config(folder, 2, "--checkpoint.enable", "--dump_folder", name, *arguments)

    return run


@pytest.mark.parametrize("layout", jobs.quick_on_two(LAYOUTS))
def test_losses_and_weights_are_those_of_stock(folder, layout):
    ranks, arguments = LAYOUTS[layout]
    stock = jobs.by_config(folder, ranks, *arguments)
    ours = jobs.by_config(folder, ranks, *arguments, *SWAP)
    assert len(stock.steps) == 4
    assert ours.steps == stock.steps
    assert ours.weights == stock.weights
    # What the page says of PyTorch's pipelines: they change the counts of tokens, and no other buffer.
    changed = {name.rpartition(".")[2] for part in stock.parts for name in part["restored"]}
    assert changed == ({"tokens_per_expert_E"} if layout == "pp" else set())


def test_checkpoints_are_those_of_stock(folder, saved):
    stock, ours = saved("stock"), saved("ours", *SWAP)
    assert ours.steps == stock.steps
    for step in (2, 4):
        theirs = jobs.checkpoint(folder / "stock" / "checkpoint" / f"step-{step}")
        assert any(name.endswith(".exp_avg_sq") for name in theirs)
        jobs.assert_equal(jobs.checkpoint(folder / "ours" / "checkpoint" / f"step-{step}"), theirs)


@pytest.mark.parametrize(("writer", "reader"), [("stock", SWAP), ("ours", ())], ids=["load", "save"])
def test_a_job_goes_on_from_the_others_checkpoint(folder, saved, writer, reader):
    whole = saved("stock")
    saved("ours", *SWAP)
    load = ("--checkpoint.initial_load_path", f"{folder}/{writer}/checkpoint/step-2")
    all_of_it = ("--checkpoint.no-initial-load-model-only", "--dump_folder", f"from-{writer}")
    rest = jobs.by_config(folder, 2, "--checkpoint.enable", *load, *all_of_it, *reader)
    assert [step for step, _, _ in rest.steps] == [3, 4]
    assert rest.steps == whole.steps[2:]
    assert rest.weights == whole.weights


def test_an_asynchronous_save_is_not_changed_by_later_steps(folder, saved):
    saved("stock")
    saved("async", *SWAP, "--checkpoint.async_mode", "async")
    steps = [jobs.checkpoint(folder / name / "checkpoint" / "step-2") for name in ("async", "stock")]
    jobs.assert_equal(*steps)


def test_bytes_of_moments_on_the_host_and_of_parts_on_the_device(saved):
    stock, ours = saved("stock"), saved("ours", *SWAP)
    for theirs, part in zip(stock.parts, ours.parts, strict=True):
        assert theirs["moments"]["host"] == theirs["staging"] == part["moments"]["device"] == 0
        # Two fp32 moments of every weight.
        assert part["moments"]["host"] == theirs["moments"]["device"] > 0
        # Every parameter begins at a multiple of 64 columns, of 8 bytes.
        padded = part["moments"]["host"] + 8 * 63 * len(part["weights"])
        assert 0 < part["staging"] <= 3 / TIMES * padded


# -- refusals ----------------------------------------------------------------------------------


def adam(**options):
    return torch.optim.AdamW([torch.nn.Parameter(torch.ones(3))], **options)


@pytest.mark.parametrize("option", ["amsgrad", "capturable", "differentiable"])
def test_options_of_adam(option):
    optimizer = adam()
    optimizer.param_groups[0][option] = True
    with pytest.raises(ValueError, match=f"npu_swap_optimizer: {option} .* leave out {option}"):
        swapped_moments.check_optimizer(optimizer)


def test_another_optimizer():
    with pytest.raises(ValueError, match="SGD is another optimizer than torch's Adam or AdamW"):
        swapped_moments.check_optimizer(torch.optim.SGD([torch.nn.Parameter(torch.ones(3))]))


def test_weights_of_16_bits():
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))])
    with pytest.raises(ValueError, match=r"weights in torch.bfloat16 .*set training.dtype to float32"):
        swapped_moments.check_optimizer(optimizer)


def test_weights_on_the_host(monkeypatch):
    monkeypatch.setattr(type(platforms.current()), "device_type", "cuda")
    with pytest.raises(ValueError, match=r"on 'cpu' .*leave out training.enable_cpu_offload"):
        swapped_moments.check_optimizer(adam())


def test_no_parts():
    with pytest.raises(ValueError, match="times is 0: a step has at least one part"):
        npu_swap_optimizer(default_adamw(), times=0)


def test_moments_in_bf16():
    config = default_adamw()
    config.implementation = "fused_opt_states_bf16"
    with pytest.raises(ValueError, match="'fused_opt_states_bf16' has moments in bf16"):
        npu_swap_optimizer(config)


def test_optimizers_that_are_built_in_another_way():
    class Other(OptimizersContainer.Config):
        pass

    with pytest.raises(ValueError, match=r"is .*Other, which builds optimizers in its own way"):
        npu_swap_optimizer(Other())


def test_a_device_without_a_backend(monkeypatch):
    monkeypatch.setattr(swapped_moments, "device_type", "xpu")
    with pytest.raises(ValueError, match=r"npu_swap_optimizer: .*no backend for 'xpu' devices"):
        swapped_moments.swap_moments([adam()], 4)


# -- states ------------------------------------------------------------------------------------


def test_a_step_that_fails_in_the_middle_is_neither_continued_nor_saved():
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(400)) for _ in range(2)], foreach=False)
    (swapped,) = swapped_moments.swap_moments([optimizer], 8)
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.ones(400)
    optimizer.step()
    before = {key: dict(value) for key, value in optimizer.state_dict()["state"].items()}
    kept = {key: {name: x.clone() for name, x in state.items()} for key, state in before.items()}
    update, updates = swapped._step, []

    def unlucky() -> None:
        updates.append(None)
        if len(updates) == 2:
            raise ZeroDivisionError
        update()

    swapped._step = unlucky
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    for refused in (optimizer.step, optimizer.state_dict):
        with pytest.raises(RuntimeError, match="npu_swap_optimizer: a step of this optimizer failed"):
            refused()
    groups = [{**optimizer.param_groups[0], "params": [0, 1]}]
    optimizer.load_state_dict({"state": kept, "param_groups": groups})
    for key, state in optimizer.state_dict()["state"].items():
        for name, value in state.items():
            assert value.equal(kept[key][name])


def test_moments_of_a_dtensor_stay_on_the_host(pool):
    assert pool.run("tests.hosts.torchtitan.sharded:moments_like_meta_weights", world_size=2) == [True, True]


def test_a_gradient_that_is_a_sum_of_ranks_is_summed(pool):
    assert pool.run("tests.hosts.torchtitan.sharded:step_with_partial_gradients", world_size=2) == [0.0, 0.0]
