"""What the CPU platform redirects, that torch itself goes on working, and that undo leaves nothing."""

from __future__ import annotations

import copy
import io
import operator
import os
import pickle
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator

import pytest
import torch
import torch.distributed.distributed_c10d
import torch.jit._builtins
import torch.utils.checkpoint
from torch.utils.data import DataLoader, TensorDataset

import mindspeed_dsa
from mindspeed_dsa.features.platform import cpu as declaration

MIB = 1 << 20
HOST = torch.device("cpu")


@pytest.fixture
def redirected() -> Iterator[None]:
    with mindspeed_dsa.enabled(mindspeed_platform="cpu"):
        yield


def owners() -> dict[str, dict[str, object]]:
    """Every dictionary that a row for torch may change, and those close to them."""
    modules = ["torch", "torch.cuda", "torch.jit._builtins", "torch.distributed", "torch.utils._device"]
    modules += [f"torch.cuda.{name}" for name in ("memory", "streams", "random", "graphs", "nvtx")]
    modules += ["torch.distributed.distributed_c10d"]
    found = {name: vars(sys.modules[name]) for name in modules}
    for cls in (torch.Tensor, torch.nn.Module, torch._C.TensorBase, torch.nn.Parameter):
        found[cls.__qualname__] = dict(vars(cls))
    return found


def snapshot() -> dict[str, dict[str, int]]:
    return {name: {key: id(value) for key, value in names.items()} for name, names in owners().items()}


def test_undo_leaves_the_very_same_objects():
    with mindspeed_dsa.enabled(mindspeed_platform="cpu"):
        torch.zeros(1, device="cuda").cuda()  # what torch fills in on first use is not the question
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
    targets = [patch.target for feature in declaration.FEATURES for patch in feature.patches]
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
    held = torch.ones(64 * MIB, dtype=torch.uint8, device="cuda")
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


# -- torch itself --------------------------------------------------------------------------------


def test_compiled_functions_of_the_user_still_compile(redirected):
    seen = []

    def backend(graph, inputs):
        seen.append(graph)
        return graph

    def function(x: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(3, device="cuda").type_as(x)
        return x.to("cuda").cuda() * 2 + mask + torch.arange(3, device=torch.cuda.current_device())

    compiled = torch.compile(function, fullgraph=True, backend=backend)
    assert torch.equal(compiled(torch.ones(3)), torch.tensor([2.0, 3.0, 4.0]))
    assert len(seen) == 1


@pytest.mark.full
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler")
def test_inductor_still_finds_its_way(redirected):
    compiled = torch.compile(lambda x: torch.relu(x) + torch.ones(3, device="cuda"), fullgraph=True)
    assert torch.equal(compiled(torch.tensor([-1.0, 0.0, 1.0])), torch.tensor([1.0, 1.0, 2.0]))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_scripted_functions_still_know_the_factories(redirected):
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.zeros(2) + torch.ones_like(x) + x

    assert torch.equal(torch.jit.script(function)(torch.ones(2)), torch.full((2,), 2.0))


def test_the_device_context_still_reaches_the_factories(redirected):
    with torch.device("meta"):
        assert torch.zeros(2).device.type == "meta"
        assert torch.tensor(1.0).device.type == "meta"


def test_tables_filled_while_redirected_serve_afterwards(tmp_path):
    """torch fills look-up tables on first use; in a fresh process that is under our redirections."""
    (tmp_path / "functions.py").write_text(
        "import torch\n"
        "def plus(x: torch.Tensor) -> torch.Tensor:\n    return torch.zeros(2) + torch.ones_like(x) + x\n"
        "def minus(x: torch.Tensor) -> torch.Tensor:\n    return torch.zeros(2) + torch.ones_like(x) - x\n"
    )
    _run(
        """
        import torch, mindspeed_dsa
        from functions import minus, plus

        def on_meta():
            with torch.device("meta"):
                return torch.zeros(2).device.type

        def compiled(function):
            torch._dynamo.reset()
            return torch.compile(function, fullgraph=True, backend=lambda graph, inputs: graph)

        with mindspeed_dsa.enabled(mindspeed_platform="cpu"):
            assert torch.jit.script(plus)(torch.ones(2)).sum() == 4
            assert compiled(plus)(torch.ones(2)).sum() == 4
            assert on_meta() == "meta"
        assert torch.jit.script(minus)(torch.ones(2)).sum() == 0
        assert compiled(minus)(torch.ones(2)).sum() == 0
        assert on_meta() == "meta"
        with mindspeed_dsa.enabled(mindspeed_platform="cpu"):
            assert compiled(plus)(torch.ones(2)).sum() == 4
        """,
        PYTHONPATH=f"{tmp_path}{os.pathsep}{os.getcwd()}",
    )


def test_a_loader_with_pin_memory_works(redirected):
    loader = DataLoader(TensorDataset(torch.arange(6.0)), batch_size=2, pin_memory=True, num_workers=1)
    assert [batch.tolist() for (batch,) in loader] == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_replays_dropout(redirected, reentrant):
    x = torch.ones(64, requires_grad=True)

    def block(value: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(value, 0.5) * value

    torch.manual_seed(3)
    out = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=reentrant, preserve_rng_state=True)
    torch.rand(7)
    out.sum().backward()
    assert torch.equal(x.grad, 2 * out.detach())  # d(m x^2)/dx = 2 m at x = 1: the same mask twice
    assert 0 < int((out == 0).sum()) < 64


def test_forked_generators_come_back(redirected):
    torch.manual_seed(5)
    with torch.random.fork_rng():
        torch.rand(3)
    first = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(first, torch.rand(3))


def test_tensors_copy_pickle_and_load(redirected):
    tensor = torch.nn.Parameter(torch.ones(2, device="cuda"))
    assert torch.equal(copy.deepcopy(tensor), tensor)
    assert torch.equal(pickle.loads(pickle.dumps(tensor)), tensor)
    file = io.BytesIO()
    torch.save({"weight": tensor, "make": torch.zeros}, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)["weight"], tensor)


# -- Megatron ------------------------------------------------------------------------------------


def test_fused_functions_of_megatron_stay_eager():
    pytest.importorskip("megatron.core")
    code = """
    import mindspeed_dsa, torch
    compiled = torch.compile
    mindspeed_dsa.enable(mindspeed_platform="cpu")
    from megatron.core.fusions.fused_bias_swiglu import swiglu
    assert not hasattr(swiglu, "_torchdynamo_orig_callable"), "compiled"
    assert torch.compile is compiled
    import megatron.core.jit as jit
    mindspeed_dsa.finalize()
    assert torch.compile is compiled
    mindspeed_dsa.disable()
    assert jit.jit_fuser is compiled
    """
    _run(code)


def test_the_tracker_keeps_streams_of_random_numbers_apart(redirected, caplog):
    random = pytest.importorskip("megatron.core.tensor_parallel.random")
    tracker = random.CudaRNGStatesTracker()
    tracker.add("model", 7)
    torch.manual_seed(5)
    with tracker.fork("model"):
        inside = torch.rand(4)
    outside = torch.rand(4)
    with tracker.fork("model"):
        further = torch.rand(4)
    torch.manual_seed(5)
    assert torch.equal(outside, torch.rand(4))
    torch.manual_seed(7)
    assert torch.equal(torch.cat([inside, further]), torch.cat([torch.rand(4), torch.rand(4)]))
    assert "CPU RNG state changed" not in caplog.text
    with pytest.raises(ZeroDivisionError), tracker.fork("model"):
        1 / 0  # noqa: B018
    random.logging.getLogger(random.__name__).warning("CPU RNG state changed for another reason")
    assert "for another reason" in caplog.text


def test_recomputation_in_megatron_replays_dropout(redirected):
    random = pytest.importorskip("megatron.core.tensor_parallel.random")
    random.initialize_rng_tracker(force_reset=True)
    random.get_cuda_rng_tracker().add("model-parallel-rng", 9)
    x = torch.ones(64, requires_grad=True)

    def block(value: torch.Tensor) -> torch.Tensor:
        with random.get_cuda_rng_tracker().fork():
            value = torch.nn.functional.dropout(value, 0.5)
        return torch.nn.functional.dropout(value, 0.5) * value

    out = random.checkpoint(block, False, x)
    torch.rand(7)
    out.sum().backward()
    expected = torch.where(out == 0, 0.0, 2 * out.detach())
    assert torch.equal(x.grad, expected)
    assert 0 < int((out == 0).sum()) < 64


def test_softmax_takes_the_torch_path(redirected):
    softmax = pytest.importorskip("megatron.core.fusions.fused_softmax")
    from megatron.core.transformer.enums import AttnMaskType

    module = softmax.FusedScaleMaskSoftmax(
        input_in_fp16=False,
        input_in_bf16=True,
        attn_mask_type=AttnMaskType.causal,
        scaled_masked_softmax_fusion=True,
        mask_func=lambda scores, mask: scores.masked_fill(mask, -10000.0),
        softmax_in_fp32=True,
        scale=None,
    )
    scores = torch.zeros(1, 4, 32, 32, dtype=torch.bfloat16)  # batch, heads, queries, keys
    probabilities = module(scores, None)
    assert torch.allclose(probabilities[0, 0, 3, :5].float(), torch.tensor([0.25, 0.25, 0.25, 0.25, 0.0]))


def _run(code: str, **environment: str) -> None:
    """Run a program in a fresh interpreter."""
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)]
    result = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, **environment}
    )
    assert result.returncode == 0, result.stderr
