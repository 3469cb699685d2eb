"""Checkpoint class that frees a function's outputs after their last use in forward, and recomputes them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mindspeed_dsa.feature import Context, Megatron
from mindspeed_dsa.features.memory.recompute_outputs.feature import Options
from mindspeed_dsa.megatron.low_precision import run_again
from mindspeed_dsa.parallel import saved_tensors
from mindspeed_dsa.parallel.saved_tensors import bytes_of
from mindspeed_dsa.parallel.weight_gradients import queued_as_now
from mindspeed_dsa.patches import versions

_is_checkpoint_valid = versions.private("torch.autograd:_is_checkpoint_valid", "recomputation of outputs")
_where: ContextVar[str] = ContextVar("where", default="a layer")


@contextlib.contextmanager
def within(what: str) -> Iterator[None]:
    """Set the name of the enclosed computation for error messages about its outputs."""
    token = _where.set(what)
    try:
        yield
    finally:
        _where.reset(token)


def keep_inputs(*linears: Any) -> None:
    """Let linear layers of Transformer Engine save their inputs, and quantise them again in backward.

    By default they save a quantised copy, beside which a freed and recomputed input saves nothing. Megatron
    does the same for its own recomputation of outputs. Other layers save their inputs anyway.

    Args:
        linears: modules, or ``None``.
    """
    for linear in linears:
        if hasattr(linear, "save_original_input"):  # since Transformer Engine 2.6
            linear.save_original_input = True


class RandomStates:
    """Snapshot of all random generator states that a function may draw from."""

    def __init__(self, megatron: Megatron) -> None:
        self._random = megatron("core.tensor_parallel.random")
        self._states = self._random._get_all_rng_states()

    def are_current(self) -> bool:
        """Return whether the generators still have the snapshot's states: no random number was drawn."""
        return _equal(self._states, self._random._get_all_rng_states())

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Restore the snapshot inside the block, and the current states afterwards."""
        with self._random._fork_rng():
            self._random._set_all_rng_states(*self._states)
            yield


def _equal(before: Any, now: Any) -> bool:
    if isinstance(before, Tensor):
        return torch.equal(before, now)
    if isinstance(before, dict):
        return before.keys() == now.keys() and all(_equal(value, now[name]) for name, value in before.items())
    if isinstance(before, (tuple, list)):
        return all(_equal(a, b) for a, b in zip(before, now, strict=True))
    return False  # generator objects share their state with the live generator, so they cannot be compared


class CheckpointWithoutOutput:
    """Replacement for Megatron's ``CheckpointWithoutOutput``, with the same interface.

    It differs from Megatron's class in four points:

    * Random states are kept and restored only if the function drew random numbers.
    * Outputs stay in memory if no input needs a gradient, or if their storage is shared with an input or is
      larger than the output.
    * The recomputed output is never in memory twice, and is freed once the consumer's backward has read it.
    * The recomputed output can be compared with the original, byte by byte.

    Args:
        megatron: Megatron package whose random generators are restored.
        verify: whether to compare the recomputed bytes with the forward's.
        fp8: fp8 argument of Megatron's class: true if the function may multiply in FP8 or FP4.
    """

    def __init__(self, megatron: Megatron, verify: bool, fp8: Any = None) -> None:
        self._megatron, self._verify, self._quantised = megatron, verify, bool(fp8)
        self._pending: _Pending | None = None

    def checkpoint(self, run_function: Callable[..., Any], *args: Tensor | None) -> Any:
        """Run the function without a graph and return its outputs, ready to be discarded.

        Args:
            run_function: function that returns a tensor or a tuple of tensors.
            args: its inputs, tensors or ``None``.
        """
        if not needs_gradient(args):
            return run_function(*args)
        if self._quantised:
            run_function = run_again(run_function)
        states = RandomStates(self._megatron)
        with torch.no_grad():
            outputs = run_function(*args)
        return self.attach(run_function, outputs, args, states)

    def attach(
        self,
        run_function: Callable[..., Any],
        outputs: Any,
        args: Sequence[Tensor | None],
        states: RandomStates,
    ) -> Any:
        """Connect outputs, which were computed without a graph, to an autograd node that can recompute them.

        Args:
            run_function: function of ``args`` that computes ``outputs`` again.
            outputs: tensor or tuple of tensors.
            args: inputs of the function; at least one needs a gradient.
            states: random states from before ``outputs`` were computed.
        """
        drawn_from = None if states.are_current() else states
        self._pending = _Pending(queued_as_now(run_function), drawn_from, self._verify)
        return _Recomputed.apply(self._pending, [outputs], *args)

    def discard_output_and_register_recompute(self, hook_tensor: Tensor) -> None:
        """Free the outputs' memory until the gradient of ``hook_tensor`` is computed.

        The outputs must not be read in the forward after this call.

        Args:
            hook_tensor: tensor computed from the outputs. The gradients of other tensors computed from the
                outputs must be computed later than the gradient of ``hook_tensor``.
        """
        pending, self._pending = self._pending, None
        # Without a gradient nothing was saved, and no hook would restore the outputs.
        if pending is not None and hook_tensor.requires_grad:
            pending.discard()
            hook_tensor.register_hook(pending.recompute)


def checkpoint_without_output(context: Context[Options]) -> type[CheckpointWithoutOutput]:
    """Build the class that Megatron's modules instantiate, with Megatron's constructor arguments."""

    class Checkpoint(CheckpointWithoutOutput):
        def __init__(self, fp8: Any = None, retain_input_tensors: bool = False) -> None:
            # `retain_input_tensors` protects memory that outputs share with inputs, which we never free.
            super().__init__(context.megatron, context.options.verify, fp8)

    return Checkpoint


def needs_gradient(args: Sequence[Tensor | None]) -> bool:
    """Return whether autograd will compute a gradient for any of the tensors."""
    return torch.is_grad_enabled() and any(arg is not None and arg.requires_grad for arg in args)


class _Pending:
    """State of one checkpointed call: the function to recompute, and the output storages to refill."""

    def __init__(self, run_function: Callable[..., Any], states: RandomStates | None, verify: bool) -> None:
        self._run, self._states, self._verify = run_function, states, verify
        self._where = _where.get()
        self._ctx: Any = None
        self._outputs: list[_Output] = []

    def created(self, ctx: Any, outputs: Sequence[Tensor]) -> None:
        """Store the autograd node and its outputs; decide which outputs may be freed."""
        self._ctx = ctx
        taken = {arg.untyped_storage().data_ptr() for arg in ctx.saved if arg is not None}
        for output in outputs:
            address = output.untyped_storage().data_ptr()
            # Outputs that alias an input or an earlier output must keep their memory.
            may_go = address not in taken and _is_whole(output)
            if may_go:
                saved_tensors.mark_freed(output)
            self._outputs.append(_Output(output, may_go))
            taken.add(address)
        ctx.saved = None

    def discard(self) -> None:
        for output in self._outputs:
            output.discard(self._verify)

    def recompute(self, _: Tensor) -> None:
        """Recompute the outputs with a graph, once the consumer's gradient is available."""
        if self._ctx is None:
            raise RuntimeError(
                f"mindspeed_dsa: {self._where}: a second backward through a recomputed output; use one "
                "backward, or switch off --recompute-activation-function and --recompute-norm"
            )
        if not _is_checkpoint_valid():
            raise RuntimeError(
                f"mindspeed_dsa: {self._where}: torch.autograd.grad and backward(inputs=...) do not reach "
                "what a recomputed output depends on; use backward(), or switch off "
                "--recompute-activation-function and --recompute-norm"
            )
        ctx, self._ctx = self._ctx, None
        # Detached copies: the backward of the recomputed graph must end at the inputs.
        inputs = [
            None if saved is None else saved.detach().requires_grad_(saved.requires_grad)
            for saved in ctx.saved_tensors
        ]
        with torch.enable_grad(), self._states.restored() if self._states else contextlib.nullcontext():
            recomputed = _as_tuple(self._run(*inputs))
        for output, again in zip(self._outputs, recomputed, strict=True):
            output.refill(again, self._where)
        ctx.inputs, ctx.outputs = inputs, recomputed
        self._run, self._states, self._outputs = _nothing, None, []


class _Output:
    """Storage of one output: freed by ``discard``, filled again by ``refill``, then no longer referenced."""

    def __init__(self, output: Tensor, may_go: bool) -> None:
        # Once refilled, only the consumers that saved the output keep it alive.
        self._storage = output.untyped_storage()
        self._geometry = (output.storage_offset(), output.size(), output.stride())
        self._may_go = may_go
        self._gone = False
        self._expected: Tensor | None = None

    def discard(self, verify: bool) -> None:
        if self._may_go:
            if verify:
                self._expected = bytes_of(self._storage).to("cpu", copy=True)
            self._storage.resize_(0)
            self._gone = True

    def refill(self, again: Tensor, where: str) -> None:
        """Copy the recomputed output ``again`` into the original storage, then free ``again``."""
        if not self._gone:
            return
        if (again.storage_offset(), again.size(), again.stride()) != self._geometry or not _is_whole(again):
            raise RuntimeError(
                f"mindspeed_dsa: {where}: recomputed with shape {tuple(again.size())} and strides "
                f"{again.stride()}, in the forward it was {self._geometry}; it must not depend on anything "
                "but its inputs"
            )
        if self._expected is not None:
            _compare(bytes_of(again.untyped_storage()).cpu(), self._expected, again, where)
        with torch.no_grad():
            self._storage.resize_(again.untyped_storage().nbytes())
            self._storage.copy_(again.untyped_storage())
            # Backward needs the graph of `again`, not its values. If the graph saved the values, it holds
            # its own reference to them.
            again.data = again.new_empty(()).expand(again.size())


class _Recomputed(torch.autograd.Function):
    """Autograd node that stands in for the function's graph, and runs the recomputed graph's backward."""

    @staticmethod
    def forward(ctx: Any, pending: _Pending, computed: list[Any], *args: Tensor | None) -> Any:
        (outputs,) = computed  # in a list, so that autograd does not treat them as inputs
        ctx.save_for_backward(*args)
        ctx.saved = args  # `created` needs their addresses, and drops the references
        ctx.where = pending._where
        ctx.inputs = ctx.outputs = None
        pending.created(ctx, _as_tuple(outputs))
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if ctx.outputs is None:
            raise RuntimeError(
                f"mindspeed_dsa: {ctx.where}: the gradient of an output has come before that of its "
                "consumer, so the output is not recomputed; it has another consumer, which must not be"
            )
        inputs, outputs = ctx.inputs, ctx.outputs
        ctx.inputs = ctx.outputs = None
        pairs = [
            (output, grad)
            for output, grad in zip(outputs, grads, strict=True)
            if output.requires_grad and grad is not None
        ]
        # Weights inside the function get their gradients here, the detached inputs pass theirs on.
        torch.autograd.backward([output for output, _ in pairs], [grad for _, grad in pairs])
        return None, None, *(None if arg is None else arg.grad for arg in inputs)


def _nothing(*_: Any) -> Any:
    raise AssertionError("computed again already")


def _as_tuple(outputs: Any) -> tuple[Tensor, ...]:
    return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)


def _is_whole(tensor: Tensor) -> bool:
    """Return whether the tensor covers its whole storage."""
    return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()


def _compare(recomputed: Tensor, expected: Tensor, like: Tensor, where: str) -> None:
    if torch.equal(recomputed, expected):
        return
    ours, theirs = recomputed.view(like.dtype), expected.view(like.dtype)
    differing = int(
        (recomputed.view(-1, like.element_size()) != expected.view(-1, like.element_size())).any(1).sum()
    )
    largest = float((ours.double() - theirs.double()).abs().max())
    raise RuntimeError(
        f"mindspeed_dsa: --recompute-verify: {where}: {differing} of {ours.numel()} recomputed values differ "
        f"from those of the forward, by up to {largest:.3g}; the function is not deterministic, or its input "
        "was changed in place after it was read"
    )
