"""TorchTitan's own training program on a CPU, with replacements for its device queries.

``python -m tests.hosts.torchtitan.on_cpu`` is a rank of ``torchrun -m torchtitan.train``. Every rank's log
and calls are written to ``$TITAN_RECORD/RANK.json``.
"""

from __future__ import annotations

import json
import os
import sys
import types
from collections import Counter
from pathlib import Path

import torch


def name_the_cpu() -> None:
    """Name the CPU as the device, with the trainer's device functions; call before TorchTitan's import."""
    torch._utils._get_available_device_type = lambda: "cpu"
    properties = types.SimpleNamespace(total_memory=1 << 34, name="cpu")
    for name, value in {
        "get_device_name": lambda device=None: "cpu",
        "get_device_properties": lambda device=None: properties,
        "reset_peak_memory_stats": lambda device=None: None,
        "empty_cache": lambda: None,
        "memory_stats": lambda device=None: {},
        "current_device": lambda: 0,  # PyTorch returns "cpu", which its own barrier does not take
    }.items():
        setattr(torch.cpu, name, value)


def sum_over_gloo() -> None:
    """Make FSDP sum gradients without a factor, because gloo has no sum with a factor."""
    from torch.distributed.fsdp import FSDPModule

    original = FSDPModule.set_gradient_divide_factor

    def set_gradient_divide_factor(self, factor: float) -> None:
        original(self, factor)
        self.set_force_sum_reduction_for_comms(True)

    FSDPModule.set_gradient_divide_factor = set_gradient_divide_factor


def as_newer_torch() -> None:
    """Add to a PyTorch before 2.14 the functions that TorchTitan 0.3 uses, and a correction of pipelines."""
    from torch.distributed.pipelining import schedules

    if hasattr(torch.distributed, "set_timeout"):
        return
    torch.distributed.set_timeout = lambda timeout, group=None: None
    for kind in (schedules.PipelineScheduleSingle, schedules.PipelineScheduleMulti):
        kind.step = taking_microbatches(kind.step)
    base = schedules._PipelineSchedule
    base._initialize_pp_stages = keeping_buffers(base._initialize_pp_stages)


def taking_microbatches(original):
    """Wrap a schedule's step so that it also takes split microbatches."""

    def step(self, *args, kwarg_mbs=None, arg_mbs=None, target_mbs=None, losses=None, **kwargs):
        if kwarg_mbs is None:
            return original(self, *args, losses=losses, **kwargs)
        for stage in getattr(self, "_stages", None) or [self._stage]:
            stage.has_backward = self._has_backward
            stage.clear_runtime_states()
        return self._step_microbatches(arg_mbs, kwarg_mbs, target_mbs, losses, **kwargs)

    return step


def keeping_buffers(original):
    """Wrap the preparation of pipeline stages so that it leaves the stages' buffers as they are.

    Before the first microbatch, PyTorch 2.13 runs each stage to learn the shapes of its outputs, every stage
    but the first one on uninitialised memory. TorchTitan's routers count these tokens as well, and the first
    update of the experts' biases depends on them. PyTorch's pull request 188763 restores the buffers.
    """

    @torch.no_grad()
    def initialize(self, stages, *args, **kwargs):
        from mindspeed_dsa.parallel.local_shards import local_of

        buffers = [each for stage in stages for each in stage.submod.named_buffers()]
        # This rank's parts: to compare DTensors is a collective operation.
        kept = [(name, local_of(buffer), local_of(buffer).clone()) for name, buffer in buffers]
        with torch.enable_grad():
            result = original(self, stages, *args, **kwargs)
        for name, buffer, value in kept:
            if not torch.equal(buffer, value):
                restored.append(name)
                buffer.copy_(value)
        return result

    return initialize


def count_integers() -> None:
    """Let histograms take integers, as on GPUs: TorchTitan 0.2's router counts its tokens with them."""
    original = torch.histc

    def histc(x, *args, **kwargs):
        return original(x.float(), *args, **kwargs).to(x.dtype)

    torch.histc = histc


def sort_without_triton() -> None:
    """Let TorchTitan 0.2's experts compute the order of their tokens on the CPU, by its own reference."""
    from functools import partial

    from torchtitan.models.moe import utils

    utils.generate_permute_indices = partial(utils.generate_permute_indices, use_cpu=True)


# -- records -----------------------------------------------------------------------------------

calls: Counter[str] = Counter()
moved: Counter[str] = Counter()
restored: list[str] = []


def count_calls() -> None:
    """Count the calls of the operators' functions that the converters use."""
    from mindspeed_dsa.integrations.torchtitan import latent_attention, layers

    for module, names in (
        (latent_attention, ("deepseek_sparse_attention",)),
        (layers, ("rms_norm", "permute", "unpermute", "grouped_matmul", "rotate")),
    ):
        for name in names:
            setattr(module, name, counted(name, getattr(module, name)))


def counted(name: str, function):
    def count(*args, **kwargs):
        if not torch.compiler.is_compiling():
            calls[name] += 1
        return function(*args, **kwargs)

    return count


def count_bytes() -> None:
    """Count the bytes of keys and of their gradients that this rank receives."""
    from mindspeed_dsa.context_parallel import gather

    for kind, name in (("keys", "_launch"), ("gradients", "start_sum")):
        setattr(gather._Transfer, name, counting(kind, getattr(gather._Transfer, name)))


def counting(kind: str, function):
    def count(self, *args):
        from mindspeed_dsa.context_parallel import gather

        exchange = gather.exchange_pairs

        def counted_exchange(sends, receives, group):
            got = [x for rank, each in enumerate(receives) if rank != group.rank() for x in each]
            again = " again" if kind == "keys" and torch._C._current_graph_task_id() != -1 else ""
            moved[kind + again] += sum(x.nbytes for x in got)
            return exchange(sends, receives, group)

        gather.exchange_pairs = counted_exchange
        try:
            return function(self, *args)
        finally:
            gather.exchange_pairs = exchange

    return count


def keep_gradients(trainer, gradients: dict[str, torch.Tensor]) -> None:
    """Copy the gradients of the first step when they are clipped, whole."""
    import torchtitan.distributed.utils as utils

    clip = utils.clip_grad_norm_

    def clipped(*args, **kwargs):
        utils.clip_grad_norm_ = clip
        for part in trainer.model_parts:
            for name, parameter in part.named_parameters():
                if parameter.grad is not None:
                    gradient = parameter.grad
                    whole = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
                    gradients[name] = whole.detach().clone()
        return clip(*args, **kwargs)

    utils.clip_grad_norm_ = clipped


def count_staging(sizes: list[int]) -> None:
    """Note the bytes of staging buffers of every step with moments on the host."""
    from mindspeed_dsa.optimizers.step_pipeline import Pipeline

    prefetch = Pipeline.prefetch

    def prefetched(self):
        prefetch(self)
        sizes.append(self.staging)

    Pipeline.prefetch = prefetched


def moments(optimizers) -> dict[str, int]:
    """Return the bytes of Adam's moments in our memory of the host, and elsewhere."""
    from mindspeed_dsa.optimizers.moments import MOMENTS
    from mindspeed_dsa.parallel.local_shards import local_of
    from mindspeed_dsa.platforms import host_pool

    sizes = {"host": 0, "device": 0}
    for optimizer in optimizers:
        for state in optimizer.state.values():
            for moment in (local_of(state[name]) for name in MOMENTS):
                sizes["host" if host_pool.shared.holds(moment) else "device"] += moment.nbytes
    return sizes


def graphs() -> dict[str, int]:
    """Return how many graphs were compiled, and how often a graph ended at something that none can record."""
    if "torch._dynamo" not in sys.modules:
        return {"graphs": 0, "breaks": 0}
    from torch._dynamo.utils import counters

    return {"graphs": counters["stats"]["unique_graphs"], "breaks": sum(counters["graph_break"].values())}


def record(folder: Path) -> None:
    """Write the record after training: logged steps, calls, losses, squares of the weights, bytes, graphs."""
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.train import Trainer

    steps, log, train = [], MetricsProcessor.log, Trainer.train
    staging: list[int] = []
    count_staging(staging)

    def logged(self, step, average, largest, norm, *args, **kwargs):
        steps.append((step, float(average), float(norm)))
        return log(self, step, average, largest, norm, *args, **kwargs)

    prepare, tokens = Trainer.post_dataloading_process, []

    def prepared(self, input_dict, labels):
        given = input_dict["input"]
        tokens.append(int((given * torch.arange(1, given.shape[1] + 1, device=given.device)).sum()))
        return prepare(self, input_dict, labels)

    def weights(trainer):
        return {name: whole(x) for part in trainer.model_parts for name, x in part.named_parameters()}

    def trained(self):
        initial, gradients = weights(self), {}
        keep_gradients(self, gradients)
        train(self)
        torch.save(gradients, folder / f"{os.environ['RANK']}.pt")
        from mindspeed_dsa.integrations.torchtitan import indexer_losses

        losses = [indexer_losses(part) for part in self.model_parts]
        result = {"steps": steps, "calls": calls, "indexer_losses": losses}
        result |= {"moments": moments(self.optimizers), "staging": max(staging, default=0)} | graphs()
        result |= {"tokens": tokens, "initial": initial, "weights": weights(self), "moved": moved}
        result["restored"] = restored
        (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(result))

    MetricsProcessor.log, Trainer.train, Trainer.post_dataloading_process = logged, trained, prepared


def whole(parameter) -> float:
    """Return the sum of squares of a parameter over all ranks' parts."""
    parameter = parameter.detach()
    parameter = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    return float(parameter.double().square().sum())


if __name__ == "__main__":
    name_the_cpu()
    sum_over_gloo()
    as_newer_torch()
    import torchtitan.config
    import torchtitan.train

    by_model = hasattr(torchtitan.config, "JobConfig")  # 0.2
    if by_model:
        from tests.hosts.torchtitan import flavors

        count_integers()
        sort_without_triton()
        flavors.add()
    if "TITAN_RECORD" in os.environ:
        count_calls()
        count_bytes()
        record(Path(os.environ["TITAN_RECORD"]))
    if by_model:
        torchtitan.train.main(torchtitan.train.Trainer)
    else:
        torchtitan.train.main()
