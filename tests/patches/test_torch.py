"""Patched functions under torch: compile, jit, autograd, modules, saving."""

from __future__ import annotations

import copy
import io

import pytest

from mindspeed_dsa.patches import PatchError
from tests.patches.house import load, patch, states

torch = pytest.importorskip("torch")

FILES = {
    "house/__init__.py": "",
    "house/ops.py": """
        import torch

        def scale(x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @torch.jit.ignore
        def helper(x: torch.Tensor) -> torch.Tensor:
            return x

        class Cube(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                ctx.save_for_backward(x)
                return x**3

            @staticmethod
            def backward(ctx, grad):
                (x,) = ctx.saved_tensors
                return 3 * x**2 * grad

        class Layer(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = torch.nn.Parameter(torch.ones(2))

            def forward(self, x):
                return self.mix(x)

            def mix(self, x):
                return self.weight * x
        """,
    "house/model.py": """
        import torch
        from house.ops import scale

        def run(x):
            return scale(x) + 1

        # A caller that compiles on its own account, as Megatron's jit_fuser does.
        compiled = torch.compile(run, backend="eager")

        @torch.compile(backend="eager")
        def fused(x):
            return x + 10

        def use_fused(x):
            return fused(x)
        """,
    "house_impl.py": """
        import torch
        CALLS = []

        def negated(original):
            def wrapper(*args, **kwargs):
                return -original(*args, **kwargs)
            return wrapper

        def tenfold(x: torch.Tensor) -> torch.Tensor:
            return x * 10

        def mixed(self, x):
            return self.weight * -x

        def counted(original):
            def wrapper(*args, **kwargs):
                CALLS.append(original.__qualname__)
                return original(*args, **kwargs)
            return wrapper
        """,
}


@pytest.fixture
def ops(house):
    house.write(FILES)
    # Forgets the code that other tests compiled.
    torch._dynamo.reset()
    yield house
    torch._dynamo.reset()


ONE = torch.ones(1)


def value(tensor):
    return tensor.sum().item()


def test_compiled_before_and_after_patching_and_undoing(ops):
    """The compiler's guard on the caller's global notices both the patch and its undo."""
    model = load("house.model")
    assert value(model.compiled(ONE)) == 3
    manager = ops.armed(patch("ops:scale", impl="house_impl:negated"))
    assert value(model.compiled(ONE)) == -1
    manager.undo()
    assert value(model.compiled(ONE)) == 3


def test_patched_before_the_first_compilation(ops):
    manager = ops.armed(patch("ops:scale", impl="house_impl:negated"))
    model = load("house.model")
    assert value(model.compiled(ONE)) == value(torch.compile(model.run, backend="eager")(ONE)) == -1
    manager.finalize()


def test_a_compiled_original_runs_under_the_patch_and_the_patch_under_a_compiled_caller(ops):
    model = load("house.model")
    assert value(model.fused(ONE)) == 11
    ops.armed(patch("model:fused", impl="house_impl:negated"))
    assert value(model.fused(ONE)) == -11
    caller = torch.compile(model.use_fused, backend="eager")
    assert value(caller(ONE)) == -11, "marks of torch.compile on the original would send it around the patch"


@pytest.mark.parametrize(("kind", "impl"), [("wrap", "negated"), ("replace", "mixed")])
def test_methods_of_compiled_modules(ops, kind, impl):
    # No guard watches a class's methods, so patching and undoing have to reset the compiler's cache.
    layer = load("house.ops").Layer()
    compiled = torch.compile(layer, backend="eager")
    assert value(compiled(ONE)) == 2
    manager = ops.armed(patch("ops:Layer.mix", kind, f"house_impl:{impl}"))
    assert value(layer(ONE)) == -2
    assert value(compiled(ONE)) == -2
    manager.undo()
    assert value(compiled(ONE)) == 2


def test_a_stale_reference_behind_a_compiled_wrapper_is_found(ops):
    # The holder is the wrapper made by torch.compile, which holds the original past any guard.
    ops.write(
        {
            "guest.py": """
                import torch
                from house.ops import scale

                fast = torch.compile(scale, backend="eager")
                """
        }
    )
    load("guest")
    manager = ops.manager(patch("ops:scale", impl="house_impl:negated"))
    manager.arm()
    with pytest.raises(PatchError, match=r"still held by .*(compile|eval_frame|scale)"):
        manager.finalize()


def test_jit_script_sees_the_replacement(ops):
    ops.armed(patch("ops:scale", "replace", "house_impl:tenfold"))
    scripted = torch.jit.script(load("house.model").scale)
    assert value(scripted(ONE)) == 10


def test_jit_marks_are_kept(ops):
    ops.armed(patch("ops:helper", impl="house_impl:counted"))
    assert torch._jit_internal.is_ignored_fn(load("house.ops").helper)


def test_autograd_function(ops):
    cube = load("house.ops").Cube
    manager = ops.armed(
        patch("ops:Cube.forward", impl="house_impl:counted"),
        patch("ops:Cube.backward", impl="house_impl:negated"),
    )
    x = torch.full((1,), 2.0, requires_grad=True)
    cube.apply(x).backward()
    assert load("house_impl").CALLS == ["Cube.forward"]
    assert x.grad.item() == -12
    manager.undo()
    x.grad = None
    cube.apply(x).backward()
    assert x.grad.item() == 12


def test_modules_with_patched_methods_are_copied_and_saved(ops):
    layer = load("house.ops").Layer()
    ops.armed(patch("ops:Layer.forward", impl="house_impl:negated"), patch("ops:Layer.__init__"))
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    twins = [copy.deepcopy(layer), torch.load(buffer, weights_only=False), load("house.ops").Layer()]
    assert [value(twin(ONE)) for twin in twins] == [-2] * 3
    assert states(ops.managers[-1]) == ["applied"] * 2
