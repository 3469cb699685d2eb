"""Checkpoints saved in one stage of DSA training and loaded in another.

Weights, iteration, data position and random generators are loaded. The optimizer starts over: zero moments,
step 0, and master weights copied from the loaded weights. The stage's name is stored in the optimizer's param
groups, because Megatron saves and loads them in every checkpoint format.

Does not import Megatron at module level, because it is loaded while Megatron is being imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from mindspeed_dsa.feature import Context
from mindspeed_dsa.features.dsa.stages import layers
from mindspeed_dsa.features.dsa.stages.parameters import is_indexers, learns
from mindspeed_dsa.megatron.dsa import Options
from mindspeed_dsa.patches.errors import SettingsError

_OPTIMIZER = "optimizer"
_STAGE, _DEFAULT = "stage_of_dsa", "sparse"
"""Key of the stage in a param group and in a distributed optimizer's state; missing: the default stage."""
_STAGE_OF_0_2 = "dsa_stage"
"""Key under which 0.2.0 saved the trained parameters and the step lag of the others."""
_MASTER = "master_param"
"""Key of master weights in a parameter's optimizer state, with the precision-aware optimizer."""
_BEGUN = "_mindspeed_dsa_begun_anew"
"""Attribute set on an optimizer that starts over; the next load of its parameter state is skipped."""

_Function = Callable[..., Any]


def name_stage(original: _Function, context: Context[Options]) -> _Function:
    """Decorate optimizer constructors to store the stage's name in the param groups.

    Also warns if weight decay would shrink indexers that have no loss.
    """
    stage = context.options.stage

    def __init__(self: Any, optimizer: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        groups = getattr(optimizer, "param_groups", ())
        parameters = [param for group in groups for param in group["params"] if is_indexers(param)]
        if (getattr(config, "weight_decay", 0.0) or 0.0) > 0 and any(
            not learns(param) for param in parameters
        ):
            context.log.warning(
                "indexers have no loss (--dsa-indexer-loss-coeff is 0), and --weight-decay %g shrinks them "
                "with every step; keep them as they are with --dsa-stage frozen",
                config.weight_decay,
                once=True,
            )
        if stage != _DEFAULT:
            for group in groups:
                group[_STAGE] = stage
        original(self, optimizer, config, *args, **kwargs)

    return __init__


def save_stage(original: _Function, context: Context[Options]) -> _Function:
    """Decorate ``DistributedOptimizer.sharded_state_dict`` to store the stage as an unsharded entry."""
    stage = context.options.stage

    def sharded_state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        state = original(self, *args, **kwargs)
        return state if stage == _DEFAULT else {**state, _STAGE: stage}

    return sharded_state_dict


def load_across_stages(original: _Function, context: Context[Options]) -> _Function:
    """Decorate ``dist_checkpointing.load`` to skip optimizer state that another stage has saved."""

    def load(sharded_state_dict: Any, checkpoint_dir: Any, *args: Any, **kwargs: Any) -> Any:
        models = context.state(layers.Models)
        if models.config is None or not isinstance(sharded_state_dict, dict):
            return original(sharded_state_dict, checkpoint_dir, *args, **kwargs)
        checkpoints: Any = context.megatron("core.dist_checkpointing.serialization")
        tensors = checkpoints.load_sharded_metadata(str(checkpoint_dir))
        shapes = {key: tuple(getattr(tensor, "global_shape", ())) for key, tensor in tensors.items()}
        wanted = layers.checked(sharded_state_dict, checkpoint_dir, shapes, context)
        if _OPTIMIZER not in wanted:
            return original(wanted, checkpoint_dir, *args, **kwargs)
        common = checkpoints.load_common_state_dict(str(checkpoint_dir)).get(_OPTIMIZER)
        # A checkpoint without indexers is a dense model's, whether it names a stage or not.
        stage = _stage_of(common) if any(map(layers.of_indexer, shapes)) else "dense"
        if stage == context.options.stage:
            return original(wanted, checkpoint_dir, *args, **kwargs)
        rest = {key: value for key, value in wanted.items() if key != _OPTIMIZER}
        result = original(rest, checkpoint_dir, *args, **kwargs)
        loaded = result[0] if isinstance(result, tuple) else result
        # Enough for load_state, which then starts the optimizer over.
        loaded[_OPTIMIZER] = {_STAGE: stage}
        return result

    return load


def load_state(original: _Function, context: Context[Options]) -> _Function:
    """Decorate ``load_state_dict`` of optimizers to start over if another stage has saved the state."""
    here = context.options.stage

    def load_state_dict(self: Any, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        vars(self).pop(_BEGUN, None)
        stage = _stage_of(state_dict)
        if stage == here:
            return original(self, state_dict, *args, **kwargs)
        if getattr(self, "is_stub_optimizer", False):
            return None  # no parameters; its state does not name a stage
        context.log.info(
            "--dsa-stage %s: the checkpoint is of stage %s; weights, iteration, data and generators go on, "
            "and the optimizer begins anew",
            here,
            stage,
            once=True,
        )
        parts = getattr(self, "chained_optimizers", [self])
        if isinstance(state_dict, list) and len(state_dict) != len(parts) and hasattr(parts[0], "buffers"):
            raise SettingsError(
                f"--dsa-stage {here}: the checkpoint is of stage {stage} and has the state of "
                f"{len(state_dict)} distributed optimizers, where this stage has {len(parts)}; load it with "
                "--no-load-optim, or save with --ckpt-format torch_dist"
            )
        for part in parts:
            _begin_anew(part)
        return None

    return load_state_dict


def load_parameters(original: _Function) -> _Function:
    """Decorate ``load_parameter_state_from_dp_zero`` to do nothing after the optimizer has started over."""

    def load_parameter_state_from_dp_zero(self: Any, *args: Any, **kwargs: Any) -> Any:
        return None if vars(self).pop(_BEGUN, False) else original(self, *args, **kwargs)

    return load_parameter_state_from_dp_zero


def _stage_of(state: Any) -> str:
    """Return the stage that saved an optimizer state, or the state of a chained optimizer."""
    for part in _parts(state):
        if any(key in part.get(_STAGE_OF_0_2, ()) for key in ("trained", "lag")):
            raise SettingsError(
                "--dsa-stage: the checkpoint has the optimizer's state as mindspeed_dsa 0.2.0 saved it in or "
                "after another stage than sparse, which is not read; load it with --no-load-optim"
            )
        if _STAGE in part:
            return str(part[_STAGE])
        for group in part.get(_OPTIMIZER, part).get("param_groups", ()):
            if _STAGE in group:
                return str(group[_STAGE])
    return _DEFAULT


def _parts(state: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(state, list):
        yield from (part for part in state if isinstance(part, Mapping))
    elif isinstance(state, Mapping):
        yield state
        yield from (part for key, part in state.items() if isinstance(key, int))


@torch.no_grad()
def _begin_anew(part: Any) -> None:
    """Reset an optimizer's state tensors, which were already allocated for loading."""
    inner = getattr(part, "optimizer", None)
    if inner is None or getattr(part, "is_stub_optimizer", False):
        return
    for holder in (*inner.state.values(), *inner.param_groups):
        for name in ("step", "exp_avg", "exp_avg_sq", "momentum_buffer"):
            value = holder.get(name)
            if isinstance(value, torch.Tensor):
                value.zero_()
            elif value is not None:
                holder[name] = type(value)(0)
    if not hasattr(inner, "sub_optimizers"):  # reload_model_params below handles master weights in those
        for parameter in [key for key, entry in inner.state.items() if _MASTER in entry]:
            # Transformer Engine's optimizer keeps its own master weights, which Megatron leaves uninitialised
            # and does not reload. Without state, the first step makes them from the weights.
            del inner.state[parameter]
    if isinstance(inner, torch.optim.Adam | torch.optim.AdamW):
        for entry in inner.state.values():
            # Megatron allocates moments before loading and expects the step in the checkpoint: add it here.
            entry.setdefault("step", torch.zeros(()))
    part.reload_model_params()
    vars(part)[_BEGUN] = True
