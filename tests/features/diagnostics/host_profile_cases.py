"""Two training steps of the tiny model, of which the first is recorded; runs inside the pool's workers."""

from __future__ import annotations

import cProfile
from collections.abc import Callable
from typing import Any
from unittest import mock

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


def library(switches: dict[str, Any]) -> dict[str, Any]:
    """What this library's own lines cost in steps of the tiny model, when everything is built."""
    from mindspeed_dsa.features.diagnostics.steps import host_profile
    from tests.features.compilation.regions.cases import operator_by_operator

    job.start(switches)
    # All functions: which are the most costly depends on who else runs on the machine.
    with operator_by_operator(), mock.patch.object(host_profile, "_SHOWN", None):
        model = job.gpt_model(job.config()).train()
        return _profiled(lambda: job.per_token_loss(model, job.samples(2)), host_profile.own_share)


def library_off() -> dict[str, Any]:
    """The same of a plain GPT, with the library on and no feature."""
    import mindspeed_dsa

    mindspeed_dsa.enable()
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    from mindspeed_dsa.features.diagnostics.steps.host_profile import own_share

    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1234)
    cfg = TransformerConfig(num_layers=2, hidden_size=32, num_attention_heads=4, add_bias_linear=False)
    model = GPTModel(cfg, get_gpt_layer_local_spec(), job.VOCABULARY, job.SEQUENCE)
    return _profiled(lambda: job.per_token_loss(model, job.samples(2)), own_share)


def _profiled(forward: Callable[[], Any], own_share: Callable[[Any], Any]) -> dict[str, Any]:
    for _ in range(2):
        forward().mean().backward()
    functions = cProfile.Profile()
    functions.enable()
    for _ in range(5):
        forward().mean().backward()
    functions.disable()
    found: dict[str, Any] = own_share(functions)
    return found
