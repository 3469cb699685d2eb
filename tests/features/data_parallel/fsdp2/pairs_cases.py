"""Worker functions: sharded weights with forward and backward in pairs, EP2 without a pipeline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

from benchmarks.memory.measure import storage_bytes
from mindspeed_dsa.features.data_parallel.fsdp2 import pairs as delayed
from mindspeed_dsa.features.data_parallel.fsdp2.pairs import Unit
from mindspeed_dsa.parallel.local_shards import local_of
from mindspeed_dsa.parallel.weight_gradients import WeightGradient
from tests.support import optimizer_job
from tests.support.model import gpt_model, per_token_loss, samples, start

STEPS, MICROBATCHES = 3, 3
# With the multi-token prediction layer there are three layers, and both directions run the second one at a
# time. That layer calls the embedding once more, between parts of other layers.
MODEL = {"num_layers": 2, "mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.1}


def train(
    switches: Mapping[str, Any],
    precision: str = "fp32",
    late: bool = True,
    fails: bool = False,
    overrides: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Take steps with an optimizer that clips, and evaluate before the last one.

    Args:
        switches: feature switches.
        precision: ``fp32`` or ``bf16``.
        late: whether the feature decides when weight gradients are computed; otherwise they are computed in
            backward.
        fails: whether the first step fails while some weight gradients are deferred, and is repeated.
        overrides: config fields that differ from the model's.
    """
    start({"use_torch_fsdp2": True, **switches}, ep=2)
    events = _Events()
    with ExitStack() as stack:
        for holder, name, value in (
            (optimizer_job, "gpt_model", lambda cfg: gpt_model(cfg, mtp=bool(cfg.mtp_num_layers))),
            (optimizer_job, "MICROBATCHES", MICROBATCHES),
            # Without deferral, weight gradients are computed in backward, as stock does.
            *([] if late else [(delayed.Late, "deferred", lambda self: nullcontext())]),
        ):
            stack.enter_context(mock.patch.object(holder, name, value))
        options: dict[str, Any] = {"precision": precision, "ep": 2, "clip": 0.1, "fsdp2": True}
        job = optimizer_job.assemble(**options, overrides={**MODEL, **(overrides or {})})
        if fails:
            events.failed = _failed(job)
        stack.enter_context(events.recorded(job))
        records = [optimizer_job.step(job, number) for number in range(STEPS - 1)]
        # The evaluation's gathers do not count.
        gathers = Counter(events.gathers)
        with torch.no_grad():
            evaluated = per_token_loss(job.model, samples(2))
        events.gathers = gathers
        records.append({**optimizer_job.step(job, STEPS - 1), "evaluated": evaluated.flatten().tolist()})
    weights = {name: local_of(each).detach() for name, each in job.model.named_parameters()}
    return {"records": records, "weights": weights, **events.found()}


def _failed(job: Any) -> int:
    """Run a step that fails; return the number of weight gradients deferred at that time."""
    waiting: list[int] = []
    run = delayed.Late.run

    def unlucky(self: Any) -> None:
        # The second call fails, after the first one has deferred some gradients.
        if waiting:
            raise ValueError("out of luck")
        waiting.append(len(self))
        run(self)

    with mock.patch.object(delayed.Late, "run", unlucky):
        try:
            optimizer_job.forward_backward(job, 0)
        except ValueError:
            # A failed step leaves FSDP2's iteration state half done.
            job.model.module.reset_iter_state()
            return waiting[0]
    return 0


class _Events:
    """Records gathers and reductions per unit, and memory when deferred gradients are computed."""

    def __init__(self) -> None:
        self.gathers: Counter[str] = Counter()
        self.reductions: Counter[str] = Counter()
        self.late: Counter[str] = Counter()
        self.alive: list[int] = []
        self.early: list[str] = []
        self.failed = 0
        self._units: list[Any] = []

    def found(self) -> dict[str, Any]:
        return {name: each for name, each in vars(self).items() if not name.startswith("_")}

    @contextmanager
    def recorded(self, job: Any) -> Iterator[None]:
        self._units = [
            unit for module in job.model.modules() for unit in vars(module).values() if isinstance(unit, Unit)
        ]
        gather, reduce = _fsdp_param_group.foreach_all_gather, _fsdp_param_group.foreach_reduce
        add = WeightGradient.add

        def gathered(parameters: Any, *args: Any) -> Any:
            self.gathers[_unit_name(parameters[0])] += 1
            return gather(parameters, *args)

        def reduced(parameters: Any, *args: Any) -> Any:
            name = _unit_name(parameters[0])
            self.reductions[name] += 1
            # A reduction with deferred gradients missing would be wrong.
            if any(len(unit.late) for unit in self._units if _has(unit, parameters[0])):
                self.early.append(name)
            return reduce(parameters, *args)

        def added(gradient: Any, *args: Any) -> None:
            for unit in self._units:
                if any(gradient._weight is weight for weight in _weights(unit)):
                    self.late[_unit_name(_groups(unit)[0].fsdp_params[0])] += 1
                    # Weights that are still gathered when a deferred gradient is computed.
                    self.alive.append(
                        storage_bytes(weight for one in self._units for weight in _weights(one))
                    )
            add(gradient, *args)

        with (
            mock.patch.object(_fsdp_param_group, "foreach_all_gather", gathered),
            mock.patch.object(_fsdp_param_group, "foreach_reduce", reduced),
            mock.patch.object(WeightGradient, "add", added),
        ):
            yield


def _groups(unit: Any) -> list[Any]:
    groups: list[Any] = unit.module._get_fsdp_state()._fsdp_param_groups
    return groups


def _has(unit: Any, parameter: Any) -> bool:
    return any(parameter is each for group in _groups(unit) for each in group.fsdp_params)


def _weights(unit: Any) -> list[Tensor]:
    return [each._unsharded_param for group in _groups(unit) for each in group.fsdp_params]


def _unit_name(parameter: Any) -> str:
    """Return the unit of a parameter: ``decoder.layers.0``, ``embedding``, ``output_layer``, else
    ``rest``.
    """
    parts = parameter._param_fqn.removeprefix("module.").split(".")
    if parts[0] in ("embedding", "output_layer"):
        return str(parts[0])
    # The multi-token prediction layer's projection is outside of its transformer layer.
    return ".".join(parts[:3]) if "layers" in parts and "eh_proj" not in parts else "rest"
