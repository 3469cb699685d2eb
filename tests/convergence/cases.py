"""What runs inside the pool's workers: the main job as its users start it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch

from tests.features.dsa.fused_cases import ties_to_the_lowest
from tests.support import observe
from tests.support.example_job import RankOutcome, train


def outcome(
    argv: Sequence[str],
    switches: Mapping[str, Any] | None = None,
    stable: bool = True,
    forced: observe.Choices | None = None,
    noise: float = 0.0,
) -> RankOutcome:
    """Records and choices of the job.

    Args:
        argv: flags of the job.
        switches: features to switch on.
        stable: Megatron's indexer decides ties as the operators do.
        forced: choices of indexers and routers to be made instead of the model's own.
        noise: relative change of one token's embedding before the first step.
    """
    rule = ties_to_the_lowest() if stable else contextlib.nullcontext()
    with rule, _disturbed(noise):
        return train(argv, switches=switches, forced=forced)


@contextlib.contextmanager
def _disturbed(noise: float) -> Iterator[None]:
    attach = observe.Observer.attach

    def disturb(self: observe.Observer, stepper: Any) -> None:
        with torch.no_grad():
            for chunk in stepper.model:
                embeddings = dict(chunk.named_parameters())["module.embedding.word_embeddings.weight"]
                embeddings[100] *= 1 + noise
        attach(self, stepper)

    with mock.patch.object(observe.Observer, "attach", disturb):
        yield
