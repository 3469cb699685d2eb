"""Jobs of TorchTitan 0.3's own training program on a device, one after the other in one process.

``python tests/npu/titan_jobs.py PLATFORM JOBS``: ``JOBS`` is a JSON list of ``[name, converters,
arguments]``, with names and options of converters, or null for a stock job. Each rank prints a line of JSON
for each job: steps with losses and norms of gradients, and the operators called.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from tests.hosts.torchtitan import on_cpu

MARK = "JOB "


def main() -> None:
    """Run the jobs on the platform."""
    platform, jobs = sys.argv[1], json.loads(sys.argv[2])
    if platform == "cpu":
        on_cpu.name_the_cpu()
    on_cpu.sum_over_gloo()  # HCCL also has no sum with a factor
    on_cpu.as_newer_torch()
    on_cpu.count_calls()
    import torchtitan.train
    from torchtitan.components.metrics import MetricsProcessor

    from mindspeed_dsa.features.dsa import problem
    from mindspeed_dsa.ops import backend

    # With all keys chosen, attention would be dense; and operators of an NPU need at least 1024 keys to
    # choose from.
    problem.every_key_is_chosen = lambda *_: False
    steps: list[Any] = []
    log = MetricsProcessor.log

    def logged(self: Any, step: int, average: float, largest: float, norm: float, **more: Any) -> Any:
        steps.append([step, float(average), float(norm)])
        return log(self, step, average, largest, norm, **more)

    MetricsProcessor.log = logged
    for name, converters, arguments in jobs:
        steps.clear()
        os.environ["TITAN_CONVERTERS"] = json.dumps(converters)
        config = "tiny" if converters is None else "converted"
        sys.argv = ["train", "--module", "tests.hosts.torchtitan", "--config", config, *arguments]
        torchtitan.train.main()
        called = [*on_cpu.calls, *(" ".join(names) for names in backend.calls())]
        print(MARK + json.dumps([name, {"steps": steps, "calls": called}]), flush=True)


if __name__ == "__main__":
    main()
