"""Jobs that search for the layers that need an indexer; they run inside the pool's workers."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from mindspeed_dsa.features.dsa.selection_search import job as search_job
from mindspeed_dsa.features.dsa.selection_search.greedy import Request
from mindspeed_dsa.megatron.selection_source import PLACE, current
from tests.matrix import model as tiny
from tests.matrix import steps
from tests.support import model as job

LAYERS = 4
MODEL = {"num_layers": LAYERS, "moe_layer_freq": [0, 1] * (LAYERS // 2), "hidden_dropout": 0.1}
_DEFAULT_SWITCHES = {"use_fused_dsa": True}


def search(
    folder: str,
    reuses: bool = True,
    layers_kept: int | None = 2,
    microbatches: int = 2,
    switches: Mapping[str, Any] | None = None,
    overrides: Mapping[str, Any] | None = None,
    stop_after: int | None = None,
    checkpoint: str = "checkpoint",
    seed: int = 0,
    **layout: Any,
) -> dict[str, Any]:
    """Run a job that searches; return its results, the number of layer runs, and its exit status.

    Args:
        folder: folder of the search.
        reuses: whether outputs of earlier evaluations are used.
        layers_kept: number of layers that compute in the end.
        microbatches: number of calibration microbatches.
        switches: features besides the search; by default, fused DSA.
        overrides: fields of the model's configuration.
        stop_after: number of evaluations after which the job is killed; None for none.
        checkpoint: name of the checkpoint in the request.
        seed: seed of the job's data.
        **layout: sizes of the parallel groups.
    """
    Path(folder).mkdir(exist_ok=True)
    Request(checkpoint, layers_kept, microbatches).write(Path(folder))
    switches = _DEFAULT_SWITCHES if switches is None else switches
    evaluators: list[search_job.Evaluator] = []
    make, weigh = search_job.Evaluator, search_job.Evaluator.loss
    found: dict[str, Any] = {"status": None, "error": ""}
    evaluated = 0

    def making(*args: Any) -> search_job.Evaluator:
        evaluators.append(make(*args))
        return evaluators[-1]

    def weighing(self: Any, pattern: str, layer: int | None = None) -> float:
        nonlocal evaluated
        if evaluated == stop_after:
            raise KeyboardInterrupt
        evaluated += 1
        return weigh(self, pattern, layer if reuses else None)

    run = search_job.run

    def running(*args: Any) -> Any:
        found["results"] = run(*args)
        return found["results"]

    with (
        mock.patch.object(search_job, "Evaluator", making),
        mock.patch.object(make, "loss", weighing),
        mock.patch.object(search_job, "run", running),
        mock.patch.object(job, "samples", partial(job.samples, seed=seed)),
    ):
        try:
            steps.step(
                {**switches, "dsa_search_selections": folder},
                {**MODEL, **(overrides or {})},
                num_microbatches=4,
                micro_batch_size=2,
                **layout,
            )
        except SystemExit as exit:
            found["status"] = exit.code
        except KeyboardInterrupt:
            found["status"] = "killed"
        except Exception as error:
            found["error"] = f"{type(error).__name__}: {error}"
    found["evaluated"] = evaluated
    if evaluators:
        evaluator = evaluators[0]
        found["runs"] = dict(evaluator.layer_runs)
        found["firsts"] = evaluator.firsts
        found["left"] = _left(evaluator)
    return found


def _left(evaluator: search_job.Evaluator) -> list[str]:
    """Return what a search has left in the model."""
    layers = evaluator._layers
    left = [f"forward of {each.number}" for each in layers if "forward" in vars(each.module)]
    left += [f"place of {each.number}" for each in layers if PLACE in vars(each.attention)]
    left += [f"evaluation of {each.number}" for each in layers if not each.module.training]
    return left + (["a selection"] if current().latest is not None else [])


def losses_of_built_models(patterns: list[str], **layout: Any) -> dict[str, float]:
    """Return the loss in evaluation of models that are built with a pattern, without a search."""
    found = {}
    for pattern in patterns:
        with steps.job_of_any_release(1, 0):
            job.start(_DEFAULT_SWITCHES, **layout)
            cfg = tiny.config(**{**steps.MODEL, **MODEL, "dsa_indexer_topk_pattern": pattern})
            model = tiny.gpt_model(cfg).eval()
            with torch.no_grad():
                data = job.samples(4 * 2).view(4, 2, -1)[:2]
                means = [float(job.per_token_loss(model, tokens).mean()) for tokens in data]
            found[pattern] = sum(means) / len(means)
            _end()
    return found


def _end() -> None:
    from megatron.core import parallel_state

    import mindspeed_dsa

    mindspeed_dsa.disable()
    parallel_state.destroy_model_parallel()
