"""One rank of the layouts; prints its counts, one line of JSON for each layout.

``python -m benchmarks.plan.child NAME...`` with torchrun's environment.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.plan import counted
from benchmarks.plan.layouts import flags_of

ANSWER = "counted:"
EXAMPLES = Path(__file__).parents[2] / "examples"
_TEXT = "Layouts are counted. " * 400
_FILES = 6
COUNTED = 10
"""Counted steps; the least of their activations counts, as gloo frees its buffers late in most of them."""
CERTAIN = 20.0
"""Number added to the logits of the experts that a token is dealt to, and subtracted from the others'."""


def main(names: list[str]) -> None:
    """Count all layouts, one after the other."""
    sys.path.insert(0, str(EXAMPLES))
    from dsa_job.validation import World

    world = World.from_environment()
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text"
        text.mkdir()
        for number in range(_FILES):
            (text / f"{number}.txt").write_text(f"{number} {_TEXT}")
        dist.init_process_group("gloo", rank=world.rank, world_size=world.size)
        for name in names:
            data = ["--data", str(text), "--data-cache-path", str(Path(folder) / "cache")]
            found = count([*flags_of(name), *data])
            print(ANSWER + json.dumps({"layout": name, "rank": world.rank, **found}), flush=True)
        dist.destroy_process_group()


def count(flags: list[str]) -> dict[str, Any]:
    """Train with these flags and count all steps after the first, which is the warmup."""
    from dsa_job.arguments import parse_args
    from dsa_job.validation import World, check

    import mindspeed_dsa

    unattended = (
        f"--train-iters {1 + COUNTED} --lr-warmup-iters 0 --eval-iters 0 --no-save --no-tensorboard --no-plot"
    )
    args = parse_args([*flags, *unattended.split()])
    check(args, World.from_environment())
    # Megatron's flags, too: the command line of this process does not describe the trained job.
    switches = {flag: value for flag, value in vars(args).items() if flag in _switches() and value}
    mindspeed_dsa.enable(**{**switches, "multi_latent_attention": True})
    mindspeed_dsa.validate(args)
    try:
        return _train(args)
    finally:
        mindspeed_dsa.disable()


def _switches() -> set[str]:
    from mindspeed_dsa.features import everything

    return {flag.dest for feature in everything() for flag in feature.flags} - {"load", "save"}


def _train(args: Any) -> dict[str, Any]:
    from dsa_job import step, training
    from megatron.core import parallel_state
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.moe.router import TopKRouter

    counts: dict[str, Any] = {}
    moe_utils.get_moe_layer_wise_logging_tracker().clear()  # which is as long as the last layout's model
    before = counted.level()
    original = step.Stepper.train_step

    def train_step(self: Any, number: int, data: Any) -> Any:
        if number == 1:
            return original(self, number, data)
        result: list[Any] = []

        def run() -> None:
            result.append(original(self, number, data))

        with counted.collectives() as received:
            kept, peak = counted.activations(run)
        # gloo's threads free their buffers with a delay.
        counts["kept"] = min(kept, counts.get("kept", kept))
        counts["peak"] = min(peak, counts.get("peak", peak))
        counts["received"] = dict(received)
        return result[0]

    def end(stepper: Any) -> None:
        stepper.release()
        for chunk in stepper.model:
            for module in chunk.modules():
                if getattr(module, "input_tensor", None) is not None:
                    module.input_tensor = None  # received in the last microbatch
        counts.update(counted.state(stepper.model, stepper.optimizer, before))
        counts["pipeline_rank"] = parallel_state.get_pipeline_model_parallel_rank()

    gating = TopKRouter.gating

    def dealt(self: Any, hidden: Tensor) -> Tensor:
        return gating(self, hidden) + _dealt_evenly(self, hidden)

    with (
        mock.patch.object(step, "forward_step", counted.marked(step.forward_step)),
        mock.patch.object(step.Stepper, "train_step", train_step),
        mock.patch.object(TopKRouter, "gating", dealt),
    ):
        training.train(args, on_end=end)
    return counts


def _dealt_evenly(router: Any, hidden: Tensor) -> Tensor:
    """Return logits that give every expert, and every rank, as many tokens: a plan assumes no imbalance."""
    rows, experts, chosen = hidden[..., 0].numel(), router.config.num_moe_experts, router.topk
    first = torch.arange(rows).unsqueeze(1) * chosen + torch.arange(chosen)
    logits = torch.full((rows, experts), -CERTAIN).scatter_(1, first % experts, CERTAIN)
    return logits.view(*hidden.shape[:-1], experts)


if __name__ == "__main__":
    main(sys.argv[1:])
