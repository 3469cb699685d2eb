"""Worker functions: FSDP2 with features that move, free or recompute memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch.distributed.fsdp import FSDPModule

from benchmarks.memory.measure import storage_bytes
from mindspeed_dsa.parallel.local_shards import local_of
from mindspeed_dsa.platforms import host_pool
from tests.support import memory_events
from tests.support.model import start
from tests.support.optimizer_job import Job, assemble, places, state, step

STEPS = 3
# On a CPU, RMSNorm is several operations, so its recomputed gradient would round differently.
OVERRIDES = {"num_moe_experts": 6, "kv_lora_rank": 19, "normalization": "LayerNorm"}


def train(switches: Mapping[str, Any], overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Take steps with FSDP2 and memory features; return values to compare, or ``refused``."""
    from mindspeed_dsa import SettingsError

    shards: list[Any] = []
    with memory_events.counted() as counts, _watched(counts, shards):
        try:
            start({"use_torch_fsdp2": True, **switches}, ep=2)
            job = assemble(ep=2, overrides={**OVERRIDES, **(overrides or {})}, fsdp2=True)
        except SettingsError as error:
            return {"refused": str(error)}
        units = [module for module in job.model.modules() if isinstance(module, FSDPModule)]
        groups = [group for unit in units for group in unit._get_fsdp_state()._fsdp_param_groups]
        shards += [each for group in groups for each in group.fsdp_params]
        records = [step(job, number) for number in range(STEPS)]
    return {
        "records": records,
        "placed": places(job),
        "bytes of state": _bytes_of_state(job),
        "counts": dict(counts),
        **state(job),
    }


@contextmanager
def _watched(counts: Counter[str], shards: list[Any]) -> Iterator[None]:
    """Count layer passes that prefetch the layer below, and gathered weights that are moved."""
    from mindspeed_dsa.features.memory.swap_attention.layer_pass import LayerPass
    from mindspeed_dsa.features.memory.swap_attention.swapped_storage import SwappedStorage

    build, move = LayerPass.__init__, SwappedStorage.__init__

    def built(self: Any, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        # A pass knows the layer below if it prefetches that layer's tensors.
        counts["layers below found"] += self._previous is not None

    def moved(self: Any, storage: Any, *args: Any) -> None:
        # Gathered weights must not be copied to the host as activations.
        gathered = [tensor.data_ptr() for each in shards for tensor in each.all_gather_outputs]
        counts["gathered weights moved"] += storage.data_ptr() in gathered
        move(self, storage, *args)

    with (
        mock.patch.object(LayerPass, "__init__", built),
        mock.patch.object(SwappedStorage, "__init__", moved),
    ):
        yield


def _bytes_of_state(job: Job) -> float:
    """Return bytes of master weights and moments on the device, per element of this rank's shards."""
    tensors, count = [], 0
    for part in job.parts:
        for main in (master for group in part.optimizer.param_groups for master in group["params"]):
            moments = (part.optimizer.state[main][key] for key in ("exp_avg", "exp_avg_sq"))
            tensors += [local_of(tensor) for tensor in (main, *moments)]
            count += local_of(main).numel()
    # State in the pool of host buffers does not count.
    return storage_bytes(tensor for tensor in tensors if not host_pool.shared.holds(tensor)) / count
