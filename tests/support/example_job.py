"""The main job on the ranks of a pool; what ``parity.py`` compares is collected here."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import torch

from tests.support import dense, memory_events
from tests.support.gradient_pieces import Piece
from tests.support.observe import Choices, Fault, Key, Observer, Place

EXAMPLES = str(Path(__file__).absolute().parents[2] / "examples")


@dataclass(frozen=True)
class RankOutcome:
    """What one rank saw of a job: the job's own record of every step, the rank's choices, memory events.

    ``rows`` says where its rows lie in the whole sequence, ``[microbatch, row]`` for each kind of choice;
    ``gradients`` are the rank's pieces of those of the first and the last step, if they were asked for.
    """

    records: list[dict[str, Any]]
    place: Place
    rows: dict[Key, npt.NDArray[np.int64]]
    choices: Choices
    memory: Counter[str]
    gradients: list[list[Piece]]


def train(
    argv: Sequence[str],
    *,
    stock: bool = False,
    switches: Mapping[str, Any] | None = None,
    gradients: bool = False,
    forced: Choices | None = None,
    fault: Fault | None = None,
    signs: bool = False,
) -> RankOutcome:
    """Run the job of ``examples/`` with these flags.

    Args:
        argv: flags of ``pretrain_dsa.py``.
        stock: train Megatron's dense GPT instead, with nothing of ours switched on but the platform.
        switches: for ``mindspeed_dsa.enable``, beside those that the job sets.
        gradients: as for :class:`Observer`, and so are the next two.
        forced: choices to be made.
        fault: a gradient to spoil.
        signs: whether the signs of indexers' products are among the choices.
    """
    if EXAMPLES not in sys.path:
        sys.path.insert(0, EXAMPLES)
    from dsa_job.arguments import parse_args
    from dsa_job.validation import World, check

    import mindspeed_dsa

    # Whether DSA is fused, the switches say: the job's own default would be heard by its parser alone.
    args = parse_args(["--no-use-fused-dsa", *argv])
    if stock:
        from mindspeed_dsa import session

        session.enable_from_argv(
            []
        )  # what importing the one-liner does, for the first time as for later ones
    else:
        check(args, World.from_environment())
        mindspeed_dsa.enable(
            experimental_attention_variant=args.experimental_attention_variant or "none",
            multi_latent_attention=True,
            transformer_impl=args.transformer_impl,
            **(switches or {}),
        )
        mindspeed_dsa.validate(args)

    from dsa_job import training

    observer = Observer(args, gradients, forced, fault, signs)
    stepper_class = training.Stepper

    def watched_stepper(*parts: Any) -> Any:
        stepper = stepper_class(*parts)
        observer.attach(stepper)
        return stepper

    with (
        mock.patch.object(training, "Stepper", watched_stepper),
        observer.watching_fused_indexers(),
        dense.instead_of_dsa(stock),
        memory_events.counted() as memory,
    ):
        records = training.train(args)
    assert observer.place is not None
    wants_fused = bool((switches or {}).get("use_fused_dsa"))
    assert (observer.fused_selections > 0) == wants_fused, f"{observer.fused_selections} fused selections"
    steps = [dict(record) for record in records]
    return RankOutcome(steps, observer.place, observer.rows, observer.choices, memory, observer.gradients)


def read(checkpoints: Sequence[tuple[str, int]]) -> list[dict[str, torch.Tensor]]:
    """All tensors of distributed checkpoints, whole, by their names in them.

    Args:
        checkpoints: folders and steps.
    """
    from megatron.core import dist_checkpointing

    contents = [
        dist_checkpointing.load_plain_tensors(str(Path(folder) / f"iter_{step:07d}"))
        for folder, step in checkpoints
    ]
    return [{k: v for k, v in content.items() if isinstance(v, torch.Tensor)} for content in contents]
