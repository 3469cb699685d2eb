"""Checkpoints of stacked expert weights, in the format of ``SequentialMLP``.

*Weights.* State dict hooks translate between stacks and single experts. In a distributed checkpoint, each
stack is a ``ShardedTensorFactory`` that produces its experts' shards. Megatron passes optimizer state through
the same factory, so checkpoints with and without stacks are interchangeable, including moments.

*Optimizer state in formats that identify parameters by order.* The format ``torch`` numbers parameters in
model order. The distributed optimizer, in the formats ``torch`` and ``dp_zero_gather_scatter``, writes whole
buffers with the parameters in reverse order. Megatron's order is fc1 and fc2 of one expert, then of the next
expert. Stacks have fc1 of all experts, then fc2 of all, so this module reorders.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, takewhile
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from mindspeed_dsa.feature import Megatron
from mindspeed_dsa.features.moe.grouped_experts.feature import ALIGNMENT, GAPS, LEGACY, SLICES
from mindspeed_dsa.features.moe.grouped_experts.linear import Stack, runs, stack_of
from mindspeed_dsa.megatron.attribute_override import AttributeOverride
from mindspeed_dsa.megatron.optimizer import model_parameters
from mindspeed_dsa.parallel.local_shards import cut_of, local_of

# -- weights --------------------------------------------------------------------------------------


def expert_keys(experts: Any, prefix: str, name: str) -> list[str]:
    """Return the state dict keys of linear layer ``name`` for all local experts."""
    return [f"{prefix}local_experts.{index}.{name}.weight" for index in range(experts.num_local_experts)]


def translate_names(experts: Any) -> None:
    """Install hooks that give grouped experts the state dict keys of ``SequentialMLP``."""
    experts._register_state_dict_hook(_to_experts)
    experts.register_load_state_dict_pre_hook(_from_experts)


def _linears(experts: Any) -> list[tuple[str, Any]]:
    return [(name, getattr(experts.mlp, name)) for name in ("linear_fc1", "linear_fc2")]


def _to_experts(experts: Any, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    for name, linear in _linears(experts):
        key = f"{prefix}mlp.{name}.weight"
        # With keep_vars the state dict holds the parameters: Megatron looks them up in its optimizers, and
        # replaces them by the entries of sharded_state_dict.
        if key in state_dict and not isinstance(state_dict[key], torch.nn.Parameter):
            stack = state_dict.pop(key)
            state_dict.update(zip(expert_keys(experts, prefix, name), linear.by_expert(stack), strict=True))


def _from_experts(experts: Any, state_dict: dict[str, Any], prefix: str, *unused: Any) -> None:
    for name, linear in _linears(experts):
        keys = expert_keys(experts, prefix, name)
        if all(key in state_dict for key in keys):
            state_dict[f"{prefix}mlp.{name}.weight"] = linear.stack([state_dict.pop(key) for key in keys])
        for key in keys:
            # Megatron's layers save an empty entry next to every weight.
            state_dict.pop(key.removesuffix("weight") + "_extra_state", None)


def sharded_stack(linear: Any, shards: Sequence[Any], megatron: Megatron) -> Any:
    """Build a ``ShardedTensorFactory`` of expert shards, for this rank's part of a stack.

    Args:
        linear: grouped linear layer with the stack.
        shards: Megatron's ``ShardedTensor`` for each expert's weight, or a factory of two for a gated layer.
            Their ``replica_id`` treats ranks with different shards of a stack as replicas.
        megatron: accessor of Megatron's modules.
    """
    mapping: Any = megatron("core.dist_checkpointing.mapping")
    first = shards[0]
    # Keys are equal, or differ in the expert's number. Later, pipeline stages rename the beginning of a key,
    # and optimizer state prepends its kind; so only the tail is replaced.
    letters = zip(*(shard.key for shard in shards), strict=False)
    common = sum(1 for _ in takewhile(lambda each: len(set(each)) == 1, letters))
    tails = [shard.key[common:] for shard in shards]

    def made(index: int, key: str, data: Tensor, **facts: Any) -> Any:
        key = key.removesuffix(tails[0]) + tails[index]
        if isinstance(shards[index], mapping.ShardedTensorFactory):
            return replace(shards[index], key=key, data=data, **facts).build()
        return replace(shards[index], key=key, data=data, dtype=data.dtype, **facts)

    def merged(index: int, loaded: Any) -> Tensor:
        shard = shards[index]
        whole: Tensor = shard.merge_fn(loaded) if isinstance(shard, mapping.ShardedTensorFactory) else loaded
        return whole

    @torch.no_grad()
    def build(key: str, stack: Tensor, replica_id: Any, flattened_range: slice | None) -> Any:
        if flattened_range is None:
            return [
                made(index, key, matrix.contiguous(), replica_id=replica_id)
                for index, matrix in enumerate(linear.by_expert(stack))
            ]
        # A flat range of matrices [in, out] is no flat range of matrices [out, in].
        if linear.layout != "nk":
            raise RuntimeError(
                "moe-grouped-gemm: optimizer state in flat pieces (fully_sharded_model_space) has the "
                "order of matrices [out, in]; add --gemm-weight-layout nk, or --no-save-optim and "
                "--no-load-optim"
            )
        return {
            str(index): made(index, key, piece, replica_id=replica_id, flattened_range=within)
            for index, piece, within in _flat_pieces(stack, flattened_range, linear.weight[0].numel())
        }

    @torch.no_grad()
    def merge(loaded: Any) -> Tensor:
        if isinstance(loaded, dict):
            return torch.cat([merged(int(index), piece) for index, piece in loaded.items()])
        whole: Tensor = linear.stack([merged(index, shard) for index, shard in enumerate(loaded)])
        return whole

    replica_id, weight = first.replica_id, linear.weight
    if isinstance(weight, DTensor):
        # Megatron considers ranks with different shards to be replicas; count only copies of this shard.
        replica_id = (*replica_id[:-1], cut_of(weight).replica)
    # Optimizers find the shard by its storage.
    return mapping.ShardedTensorFactory(first.key, local_of(weight), build, merge, replica_id)


def _flat_pieces(flat: Tensor, place: slice, size: int) -> Iterator[tuple[int, Tensor, slice]]:
    """Split a flat range of a stack by expert: yield expert, entries, and range in the expert's matrix."""
    # size 6, place 4:14 -> expert 0 at 4:6, expert 1 at 0:6, expert 2 at 0:2
    for index in range(place.start // size, -(-place.stop // size)):
        start, stop = max(place.start, index * size), min(place.stop, (index + 1) * size)
        if start < stop:
            offset = index * size
            yield index, flat[start - place.start : stop - place.start], slice(start - offset, stop - offset)


# -- optimizer state by numbers -------------------------------------------------------------------

_MASTERS = "fp32_from_fp16_params"


def save_single_experts(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``ChainedOptimizer.state_dict``: convert stacks to single experts, per child optimizer."""

    @functools.wraps(original)
    def state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        state = original(self, *args, **kwargs)
        parts = self.chained_optimizers
        if len(parts) == 1:
            return _translate(parts[0], state, _spread)
        return [_translate(part, each, _spread) for part, each in zip(parts, state, strict=True)]

    return state_dict


def load_single_experts(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``ChainedOptimizer.load_state_dict``: convert single experts to stacks, if not stacked yet."""

    @functools.wraps(original)
    def load_state_dict(self: Any, state_dict: Any) -> Any:
        parts = self.chained_optimizers
        if len(parts) == 1:
            return original(self, _of_stacks(parts[0], state_dict))
        if len(parts) == len(state_dict):
            keys = sorted(state_dict) if isinstance(state_dict, dict) else range(len(parts))
            state_dict = [_of_stacks(part, state_dict[key]) for part, key in zip(parts, keys, strict=True)]
        return original(self, state_dict)

    return load_state_dict


def _of_stacks(part: Any, state: Any) -> Any:
    """Convert a state of single experts to stacks; return a state of stacks unchanged."""
    inner = _torch_state(state)
    if inner is None:
        return state
    groups = model_parameters(part)
    # Number of entries per group in a state of single experts.
    single = [sum(len(param) if stack_of(param) else 1 for param in group) for group in groups]
    if [len(group["params"]) for group in inner["param_groups"]] != single:
        return state
    stacked = {local_of(param).shape for param in chain(*groups) if stack_of(param)}
    if any(tensor.shape in stacked for tensor in _tensors(state, inner)):
        return state  # stacked already; with one expert per rank the counts above are equal
    return _translate(part, state, _gather)


def _torch_state(state: Any) -> Any:
    """Return the torch optimizer's state dict inside ``state``, or ``None`` if there is none."""
    inner = state.get("optimizer", state) if isinstance(state, dict) else {}
    # Some formats keep the parameter numbers elsewhere.
    numbered = all("params" in group for group in inner.get("param_groups", ()))
    return inner if "state" in inner and "param_groups" in inner and numbered else None


def _tensors(state: Any, inner: Any) -> Iterator[Tensor]:
    yield from chain(*state.get(_MASTERS, ()))
    for entry in inner["state"].values():
        if isinstance(entry, dict):
            yield from (value for value in entry.values() if isinstance(value, Tensor))


def _translate(part: Any, state: Any, entries: Callable[[list[Any], list[Any]], Iterator[Any]]) -> Any:
    """Copy one optimizer's state; convert its per-parameter entries with ``entries`` and renumber them."""
    inner = _torch_state(state)
    groups = model_parameters(part) if inner is not None else []
    if not any(stack_of(param) for param in chain(*groups)):
        return state
    numbered: dict[Any, Any] = {}
    param_groups = []
    count = 0
    for parameters, group in zip(groups, inner["param_groups"], strict=True):
        translated = list(entries(parameters, [inner["state"].get(number) for number in group["params"]]))
        numbers = range(count, count + len(translated))
        count += len(translated)
        numbered |= {n: entry for n, entry in zip(numbers, translated, strict=True) if entry is not None}
        param_groups.append({**group, "params": list(numbers)})
    inner = {**inner, "state": numbered, "param_groups": param_groups}
    if "optimizer" not in state:
        return inner
    # fp32 master weights, numbered alike.
    masters = zip(part.float16_groups, state[_MASTERS], strict=True)
    return {**state, "optimizer": inner, _MASTERS: [list(entries(*pair)) for pair in masters]}


def _spread(parameters: list[Any], entries: list[Any]) -> Iterator[Any]:
    """Convert entries of stacks to entries of single experts' matrices."""
    rest = iter(entries)
    for run in runs(parameters):
        stacked = [next(rest) for _ in run]
        if stack_of(run[0]) is None:
            yield from stacked
        else:
            # Stacks of fc1 and fc2 with 2 experts: fc1 and fc2 of expert 0, then fc1 and fc2 of expert 1.
            split = [_split(entry, each) for entry, each in zip(stacked, run, strict=True)]
            yield from chain(*zip(*split, strict=True))


def _gather(parameters: list[Any], entries: list[Any]) -> Iterator[Any]:
    """Convert entries of single experts' matrices to entries of stacks."""
    rest = iter(entries)
    for run in runs(parameters):
        if stack_of(run[0]) is None:
            yield next(rest)
        else:
            # A run of fc1 and fc2 stacks takes fc1 and fc2 of expert 0, then of expert 1, and so on.
            single = [next(rest) for _ in range(len(run) * len(run[0]))]
            yield from (_join(single[index :: len(run)], each) for index, each in enumerate(run))


def _split(entry: Any, parameter: Any) -> list[Any]:
    """Split a stack's entry by expert. Scalars such as Adam's step are copied to each expert."""
    if isinstance(entry, dict):
        parts = {name: _split(value, parameter) for name, value in entry.items()}
        return [{name: each[index] for name, each in parts.items()} for index in range(len(parameter))]
    if isinstance(entry, Tensor):
        stack = stack_of(parameter)
        if stack is not None and entry.shape == parameter.shape:
            return [matrix.contiguous() for matrix in stack.by_expert(entry.detach())]
        return [entry.clone() for _ in parameter]
    return [entry] * len(parameter)


def _join(entries: Sequence[Any], parameter: Any) -> Any:
    first = entries[0]
    if isinstance(first, dict):
        return {name: _join([each[name] for each in entries], parameter) for name in first}
    if isinstance(first, Tensor):
        stack = stack_of(parameter)
        if stack is not None and first.dim() == parameter.dim() - 1:
            return stack.stack(entries)
        return first.clone()
    return first


# -- whole buffers of the distributed optimizer ---------------------------------------------------


def save_buffers_of_single_experts(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap methods that save the whole buffers of all data parallel ranks: reorder to single experts."""

    @functools.wraps(original)
    def save(self: Any, *args: Any, **kwargs: Any) -> Any:
        parts = getattr(self, "chained_optimizers", None)
        # The gathering method is overridden only for this call: fully_reshardable uses it too, and locates
        # parameters in its result.
        if parts is None:
            return original(_gathering_single_experts(self), *args, **kwargs)
        if len(parts) > 1:  # a single child saves by its own method, which is wrapped too
            self = AttributeOverride(
                self, chained_optimizers=[_gathering_single_experts(each) for each in parts]
            )
        return original(self, *args, **kwargs)

    return save


def _gathering_single_experts(optimizer: Any) -> Any:
    """Override ``get_parameter_state_dp_zero`` to return the buffers in the order of single experts."""
    if not hasattr(optimizer, "get_parameter_state_dp_zero") or not _check_places(optimizer):
        return optimizer

    def get_parameter_state_dp_zero(*args: Any, **kwargs: Any) -> Any:
        state = optimizer.get_parameter_state_dp_zero(*args, **kwargs)
        if state is not None:
            _reorder(optimizer, state, _single_from_stacks)
        return state

    return AttributeOverride(optimizer, get_parameter_state_dp_zero=get_parameter_state_dp_zero)


def load_buffers_of_single_experts(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``DistributedOptimizer.load_parameter_state_from_dp_zero``: reorder the buffers to stacks."""

    @functools.wraps(original)
    def load_parameter_state_from_dp_zero(self: Any, state_dict: Any, **kwargs: Any) -> Any:
        if _check_places(self) and kwargs.get("update_legacy_format"):
            raise RuntimeError(f"moe-grouped-gemm: {LEGACY}")
        if state_dict is not None:
            _reorder(self, state_dict, _stacks_from_single)
        return original(self, state_dict, **kwargs)

    return load_parameter_state_from_dp_zero


def refuse_slices_of_buffers(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``DistributedOptimizer`` methods that save or load per-rank buffer slices: reject stacks."""

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        parameters = (parameter for buffer in self.buffers for parameter in buffer.param_index_map)
        if any(stack_of(parameter) for parameter in parameters):
            raise RuntimeError(f"moe-grouped-gemm: {SLICES}")
        return original(self, *args, **kwargs)

    return method


def _check_places(optimizer: Any) -> bool:
    """Return whether the optimizer has stacks. Raise if a buffer could have gaps between parameters."""
    # Megatron aligns each parameter to 64 entries. It saves no gap between two buckets, and where a bucket
    # ends depends on the parameters' sizes. So no gaps are allowed at all.
    parameters = [param for buffer in optimizer.buffers for param in buffer.param_index_map]
    matrices = {param[0].numel() for param in parameters if stack_of(param)}
    sizes = matrices
    if matrices and optimizer.ddp_config.overlap_grad_reduce:
        # Overlapped reduction uses several buckets, whose ends depend on all sizes.
        sizes = matrices | {param.numel() for param in parameters if not stack_of(param)}
    odd = [size for size in sorted(sizes) if size % ALIGNMENT]
    if odd:
        raise RuntimeError(f"moe-grouped-gemm: {GAPS} (one has {odd[0]})")
    return bool(matrices)


def _reorder(optimizer: Any, state: Any, reorder: Callable[[Tensor, list[Any]], Tensor]) -> None:
    """Apply ``reorder`` in place to all runs of stacks in an optimizer's saved buffers."""
    for index, buffer in enumerate(optimizer.buffers):
        segments = [(place, run) for place, run in _places(buffer) if stack_of(run[0])]
        for tensors in state[index].values():
            for tensor in tensors.values():
                if isinstance(tensor, Tensor):
                    for place, run in segments:
                        tensor[place] = reorder(tensor[place], run)


def _places(buffer: Any) -> Iterator[tuple[slice, list[Any]]]:
    """Yield each group of adjacent parameters from :func:`runs`, after its range in the saved buffer."""
    # gaps: entries of padding before each bucket, which the saved buffer omits.
    gaps, before = [], 0
    for (start, stop), bucket in zip(buffer.bucket_indices, buffer.buckets, strict=True):
        gaps.append(before)
        before += stop - start - bucket.numel_unpadded
    indices = buffer.param_index_map
    for run in runs(sorted(indices, key=lambda each: indices[each][0])):
        (begin, _, first), (_, end, last) = indices[run[0]], indices[run[-1]]
        yield slice(begin - gaps[first], end - gaps[last]), run


def _single_from_stacks(segment: Tensor, run: list[Any]) -> Tensor:
    """Reorder a run from stacks to single experts: last expert first, its matrices in the run's order."""
    parts = segment.split([param.numel() for param in run])
    views = [_stack(param).by_expert(part.view(param.shape)) for part, param in zip(parts, run, strict=True)]
    experts = reversed(list(zip(*views, strict=True)))
    return torch.cat([matrix.reshape(-1) for expert in experts for matrix in expert])


def _stacks_from_single(segment: Tensor, run: list[Any]) -> Tensor:
    """Reorder a run from single experts to stacks; inverse of :func:`_single_from_stacks`."""
    sizes = [param[0].numel() for param in run]
    parts = segment.split(sizes * len(run[0]))
    stacks = []
    for index, param in enumerate(run):
        shape = _stack(param).by_expert(param)[0].shape
        matrices = [part.view(shape) for part in reversed(parts[index :: len(run)])]
        stacks.append(_stack(param).stack(matrices).view(-1))
    return torch.cat(stacks)


def _stack(parameter: Any) -> Stack:
    stack = stack_of(parameter)
    assert stack is not None
    return stack
