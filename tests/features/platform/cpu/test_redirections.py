"""Redirections of the CPU platform, and their complete undo."""

from __future__ import annotations

import operator
import sys

import torch
import torch.distributed.distributed_c10d
import torch.jit._builtins

import mindspeed_dsa
from mindspeed_dsa.features.platform.cpu import feature as declaration
from tests.support.memory import fresh_memory

MIB = 1 << 20
HOST = torch.device("cpu")


def owners() -> dict[str, dict[str, object]]:
    """Return every dict that a patch for torch may change, and related ones."""
    modules = ["torch", "torch.cuda", "torch.jit._builtins", "torch.distributed", "torch.utils._device"]
    modules += [f"torch.cuda.{name}" for name in ("memory", "streams", "random", "graphs", "nvtx")]
    modules += ["torch.distributed.distributed_c10d"]
    namespaces = {name: vars(sys.modules[name]) for name in modules}
    for cls in (torch.Tensor, torch.nn.Module, torch._C.TensorBase, torch.nn.Parameter):
        namespaces[cls.__qualname__] = dict(vars(cls))
    return namespaces


def snapshot() -> dict[str, dict[str, int]]:
    return {name: {key: id(value) for key, value in names.items()} for name, names in owners().items()}


def test_undo_leaves_the_very_same_objects():
    with mindspeed_dsa.enabled(mindspeed_platform="cpu"):
        # torch fills caches on first use, which is not part of this test.
        torch.zeros(1, device="cuda").cuda()
    before = snapshot()
    with mindspeed_dsa.enabled(mindspeed_platform="cpu"):
        changed = snapshot()
        assert changed["torch.cuda"] != before["torch.cuda"]
        assert changed["Tensor"] != before["Tensor"]
        assert changed["torch"] != before["torch"]
    assert snapshot() == before


def test_every_row_for_torch_is_applied(redirected):
    import torch._dynamo

    assert torch._dynamo
    states = {site["target"]: site["state"] for site in mindspeed_dsa.report()}
    targets = [patch.target for patch in declaration.CPU.patches]
    assert {states[target] for target in targets if target.startswith("torch")} == {"applied"}


# -- tensors -------------------------------------------------------------------------------------

FACTORIES = [
    lambda **kw: torch.tensor([1.0], **kw),
    lambda **kw: torch.as_tensor([1.0], **kw),
    lambda **kw: torch.scalar_tensor(1.0, **kw),
    lambda **kw: torch.empty(2, **kw),
    lambda **kw: torch.empty_strided((2,), (1,), **kw),
    lambda **kw: torch.zeros(2, **kw),
    lambda **kw: torch.ones(2, **kw),
    lambda **kw: torch.full((2,), 3.0, **kw),
    lambda **kw: torch.empty_like(torch.ones(2), **kw),
    lambda **kw: torch.zeros_like(torch.ones(2), **kw),
    lambda **kw: torch.ones_like(torch.ones(2), **kw),
    lambda **kw: torch.full_like(torch.ones(2), 3.0, **kw),
    lambda **kw: torch.arange(3, **kw),
    lambda **kw: torch.linspace(0, 1, 3, **kw),
    lambda **kw: torch.eye(2, **kw),
    lambda **kw: torch.rand(2, **kw),
    lambda **kw: torch.randn(2, **kw),
    lambda **kw: torch.randint(3, (2,), **kw),
    lambda **kw: torch.randperm(3, **kw),
    lambda **kw: torch.rand_like(torch.ones(2), **kw),
    lambda **kw: torch.randn_like(torch.ones(2), **kw),
]


def test_each_redirected_factory_makes_cpu_tensors(redirected):
    assert len(FACTORIES) == len(declaration._FACTORIES)
    for make in FACTORIES:
        for device in ("cuda", "cuda:0", 0, torch.device("cuda"), torch.device("cuda", 0)):
            assert make(device=device).device == HOST


def test_factories_keep_other_devices_and_arguments(redirected):
    assert torch.zeros(2, device="meta").device.type == "meta"
    made = torch.full((2, 3), 5, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    assert made.shape == (2, 3)
    assert made.dtype is torch.bfloat16
    assert made.requires_grad
    assert torch.zeros(2, device=torch.cuda.current_device()).device == HOST


def test_pinned_factories_make_ordinary_memory(redirected):
    assert torch.equal(torch.tensor([1, 2], device="cpu", pin_memory=True).cuda(), torch.tensor([1, 2]))
    assert not torch.empty(4, pin_memory=True).is_pinned()


def test_moves_to_cuda_stay_here(redirected):
    tensor = torch.ones(2)
    for moved in (tensor.cuda(), tensor.cuda(0, non_blocking=True), tensor.to("cuda"), tensor.to(device=0)):
        assert moved is tensor
    assert tensor.to("cuda", torch.float64).dtype is torch.float64
    assert tensor.to(torch.int32).dtype is torch.int32
    assert tensor.to(torch.ones(1, dtype=torch.half)).dtype is torch.half
    assert tensor.to("meta").device.type == "meta"


def test_modules_move_and_leave_meta(redirected):
    module = torch.nn.Linear(2, 2)
    weight = module.weight
    assert module.cuda().to("cuda").weight is weight
    with torch.device("meta"):
        empty = torch.nn.Linear(2, 2)
    assert empty.weight.device.type == "meta"
    assert empty.to_empty(device=torch.device("cuda")).weight.device == HOST


def test_pin_memory_gives_memory_of_its_own(redirected):
    tensor = torch.ones(2)
    pinned = tensor.cpu().pin_memory()
    tensor.zero_()
    assert torch.equal(pinned, torch.ones(2))


def test_type_names_equal_both_ways(redirected):
    name = torch.ones(2, dtype=torch.bfloat16).type()
    assert name == "torch.cuda.BFloat16Tensor"
    assert name == "torch.BFloat16Tensor"
    assert name in ["torch.cuda.HalfTensor", "torch.cuda.BFloat16Tensor"]
    assert name != "torch.cuda.HalfTensor"
    assert not operator.ne(name, "torch.cuda.BFloat16Tensor")
    assert {name: 1}["torch.BFloat16Tensor"] == 1
    assert torch.zeros(1, device="meta").type() != "torch.cuda.FloatTensor"


def test_type_conversions_and_checks_mean_the_cpu_type(redirected):
    assert torch.ones(2).type("torch.cuda.HalfTensor").dtype is torch.half
    assert torch.ones(2).type(torch.cuda.LongTensor).dtype is torch.int64
    assert torch.ones(2).type(torch.float64).dtype is torch.float64
    assert isinstance(torch.ones(2), torch.cuda.FloatTensor)
    assert not isinstance(torch.ones(2), torch.cuda.HalfTensor)
    assert torch.cuda.LongTensor(2, 3).fill_(0).sum() == 0


# -- torch.cuda ----------------------------------------------------------------------------------


def test_the_device_is_the_cpu_and_cuda_is_still_not_there(redirected):
    assert torch.cuda.current_device() == HOST
    assert torch.cuda.device_count() == 1
    assert torch.cuda.get_device_capability() == (0, 0)
    torch.cuda.set_device(0)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    if not torch.backends.cuda.is_built():
        assert not torch.cuda.is_available()


def test_memory_figures_are_those_of_the_process(redirected):
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    held = fresh_memory(64 * MIB)
    assert 60 * MIB < torch.cuda.memory_allocated() - before < 80 * MIB
    del held
    assert torch.cuda.memory_allocated() < before + 20 * MIB
    assert torch.cuda.max_memory_allocated() > before + 60 * MIB
    stats = torch.cuda.memory_stats()
    assert stats["allocated_bytes.all.peak"] > before + 60 * MIB
    assert stats["reserved_bytes.all.current"] < before + 20 * MIB
    free, total = torch.cuda.mem_get_info()
    assert 0 < free < total
    assert torch.cuda.device_memory_used() <= total


def test_streams_and_events_keep_their_contracts(redirected):
    side = torch.cuda.Stream(device="cuda", priority=-1)
    default = torch.cuda.default_stream()
    assert torch.cuda.current_stream() is default
    with torch.cuda.stream(side):
        assert torch.cuda.current_stream() is side
        tensor = torch.ones(2, device="cuda")
        tensor.record_stream(side)
    assert torch.cuda.current_stream() is default
    default.wait_stream(side)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    side.record_event(start)
    end.record(side)
    default.wait_event(end)
    assert start.elapsed_time(end) >= 0
    assert not torch.cuda.is_current_stream_capturing()
    with torch.cuda.nvtx.range("forward"):
        torch.cuda.nvtx.mark("inside")


def test_the_device_generator_is_the_host_generator(redirected):
    torch.cuda.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    state = torch.cuda.get_rng_state()
    assert torch.equal(torch.rand(3), expected)
    torch.cuda.random.set_rng_state(state)
    assert torch.equal(torch.rand(3), expected)
    torch.cuda.set_rng_state_all([state])
    assert torch.equal(torch.rand(3), expected)
    assert torch.cuda.initial_seed() == 11


def test_process_groups_asked_of_nccl_are_gloo_groups(redirected, tmp_path):
    import torch.distributed as dist

    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=torch.device("cuda:0"))
    try:
        assert dist.get_backend() == "gloo"
        group = dist.new_group([0], backend="nccl")
        assert dist.get_backend(group) == "gloo"
        total = torch.ones(2, device="cuda")
        dist.all_reduce(total, group=group)
    finally:
        dist.destroy_process_group()
