"""Worker functions: jobs that pass through training stages by their checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import mindspeed_dsa
from mindspeed_dsa import log
from mindspeed_dsa.megatron.optimizer import is_sharded, model_parameters
from mindspeed_dsa.parallel.local_shards import local_of
from tests.support import optimizer_job as optimizers
from tests.support.counting import logged
from tests.support.model import global_names, start

STEPS = 2


def chain(
    stages: Sequence[str],
    folder: str,
    way: str,
    ep: int = 1,
    pp: int = 1,
    steps: Sequence[int] = (),
    weights_alone: bool = False,
    **options: Any,
) -> list[dict[str, Any]]:
    """Train some steps per stage, each stage from the checkpoint of the previous one.

    Args:
        stages: names of the stages.
        folder: existing directory for the checkpoints.
        way: checkpoint format, as in :func:`optimizers.save_to`.
        ep: expert parallel size.
        pp: pipeline parallel size.
        steps: number of steps per stage. Default: :data:`STEPS`.
        weights_alone: whether only weights are loaded, as with ``--no-load-optim``.
        **options: options of :func:`optimizers.assemble`, and ``switches``.

    Returns:
        per stage, its records and log, and its :func:`found` state after loading and at the end.
    """
    results, done = [], 0
    plain = {name: value for name, value in options.items() if name != "switches"}
    for number, stage in enumerate(stages):
        start({"dsa_stage": stage, **options.get("switches", {})}, ep=ep, pp=pp)
        overrides = {"pipeline_model_parallel_size": pp, **options.get("overrides", {})}
        job = optimizers.assemble(**{**plain, "ep": ep, "overrides": overrides})
        log.forget()  # such log lines appear once per process
        with logged("mindspeed_dsa") as lines:
            if number:
                optimizers.load_from(job, way, str(Path(folder, str(number - 1))), weights_alone)
        loaded = found(job)
        count = steps[number] if steps else STEPS
        records = [optimizers.step(job, each) for each in range(done, done + count)]
        done += count
        Path(folder, str(number)).mkdir(exist_ok=True)
        optimizers.save_to(job, way, str(Path(folder, str(number))))
        told = [line for line in lines if "the optimizer begins anew" in line]
        results.append({"loaded": loaded, "records": records, "told": told, "end": found(job)})
        mindspeed_dsa.disable()
        import_module("megatron.core.parallel_state").destroy_model_parallel()
    return results


def found(job: Any) -> dict[str, dict[str, Any]]:
    """Return this rank's weights, moments, master weights and steps by parameter name."""
    optimizers.gather(job)
    inside = job.model.module
    # bf16 models are wrapped once more.
    model = getattr(inside, "module", inside)
    names = {id(parameter): name for name, parameter in global_names(model).items()}
    result: dict[str, dict[str, Any]] = {"weights": {}, "moments": {}, "masters": {}, "steps": {}}
    for name, parameter in global_names(model).items():
        result["weights"][name] = local_of(parameter.detach()).clone()
    for part in job.parts:
        mine: dict[str, dict[str, Any]] = {"moments": {}, "masters": {}, "steps": {}}
        groups = zip(part.optimizer.param_groups, model_parameters(part), strict=True)
        for group, parameters in groups:
            for main, parameter in zip(group["params"], parameters, strict=True):
                state, name = part.optimizer.state.get(main, {}), names[id(parameter)]
                # A distributed optimizer has a part of the parameter, from this offset on.
                offset = part._get_model_param_range_map(parameter)["param"].start if is_sharded(part) else 0
                if "exp_avg" in state:
                    moments = torch.stack([state["exp_avg"].flatten(), state["exp_avg_sq"].flatten()])
                    mine["moments"][name] = (offset, moments)
                    mine["steps"][name] = (0, state["step"].clone().reshape(1))
                # A parameter that is its own master has no entry.
                if is_sharded(part) or main is not parameter:
                    mine["masters"][name] = (offset, local_of(main.detach()).flatten().clone())
        for what, pieces in mine.items():
            result[what] |= _put_together(pieces, part)
    return result


def _put_together(pieces: dict[str, Any], part: Any) -> dict[str, Tensor]:
    """Join the shards of all data parallel ranks if the optimizer is distributed."""
    everyone = [pieces]
    if is_sharded(part):
        everyone = [{}] * part.data_parallel_group.size()
        torch.distributed.all_gather_object(everyone, pieces, group=part.data_parallel_group)
    pieces_of: dict[str, dict[int, Tensor]] = {}
    for shards in everyone:
        for name, (offset, piece) in shards.items():
            # Parts are joined in the order of their offsets.
            pieces_of.setdefault(name, {})[offset] = piece
    return {
        name: torch.cat([parts[offset] for offset in sorted(parts)], dim=-1)
        for name, parts in pieces_of.items()
    }


def differing(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> list[str]:
    """Return the names of values that differ in a bit, or that only one of both has."""
    both = first.keys() & second.keys()
    return sorted(first.keys() ^ second.keys()) + [n for n in both if not torch.equal(first[n], second[n])]


def lines_of_build(coefficient: float) -> list[str]:
    """Return the log of building a model and its optimizer."""
    with logged("mindspeed_dsa") as lines:
        optimizers.build(overrides={"dsa_indexer_loss_coeff": coefficient})
    return lines


def error_of_state_dict() -> str:
    """Return the error of a model whose state dict lacks a layer's indexer."""
    model = optimizers.build().model.module.module
    state = model.state_dict()
    try:
        model.load_state_dict(
            {name: each for name, each in state.items() if "layers.1.self_attention.core" not in name}
        )
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"
