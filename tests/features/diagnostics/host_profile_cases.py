"""Two training steps of the tiny model, of which the first is recorded; runs inside the pool's workers."""

from __future__ import annotations

from typing import Any

from torch.nn.modules import module as torch_modules

from tests.support import model as job

STEPS = 2


def train(file: str | None) -> dict[str, Any]:
    """Losses of both steps, and how many hooks on all modules are left."""
    job.start({} if file is None else {"host_profile": file, "host_profile_step": 1})
    cfg = job.config()
    model = job.gpt_model(cfg)
    losses = [job.train_step(cfg, [model], list(job.samples(4).split(2))) for _ in range(STEPS)]
    hooks = len(torch_modules._global_forward_hooks) + len(torch_modules._global_forward_pre_hooks)
    return {"losses": [float(each["lm loss"]) for step in losses for each in step], "hooks": hooks}
