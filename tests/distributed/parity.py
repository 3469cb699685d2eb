"""Check that a parallel layout trains as one process does.

Both runs start from one checkpoint, hence from the same weights, see the same global batches and take five
steps by default. They are compared by the loss and the gradient norm of every step, and per parameter by

* the gradient of the first step. Both sides have the same weights, so only rounding differs, and a wrong
  scale shows that Adam would hide;
* the gradient of the last step, for errors that need several steps, such as a buffer reused too early;
* the update (final minus initial weights), for errors of the optimizer and of parameter gathering.

A difference is relative to the norm of the same parameter's gradient or update. A wrong gradient of one small
parameter (the indexer's norm bias, a norm weight, a router) is then an error of order one, although it hardly
changes the loss or the global gradient norm.

Rounding may decide a near tie in the top-k of a router or an indexer, and the two sides then differ by more
than rounding. The same holds for a product close to zero before the indexer's ReLU: the score stays the same
to rounding, but a head may or may not get a gradient. These flips are counted and printed. A layout that
misses a bound and has flips runs again with the reference's choices and signs forced. The bounds stay the
same.
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tests.support.example_job import RankOutcome
from tests.support.figures import tell
from tests.support.gradient_pieces import put_together
from tests.support.observe import Choices, Fault, Key
from tests.support.pool import WorkerPool

STEPS = 5
REFERENCES = 16
"""Number of reference outcomes that a lab caches."""
MODEL = """
    --num-layers 8 --hidden-size 64 --ffn-hidden-size 96 --num-attention-heads 4 --seq-length 32
    --q-lora-rank 32 --kv-lora-rank 32 --qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 16
    --dsa-indexer-n-heads 16 --dsa-indexer-head-dim 16 --dsa-indexer-topk 8 --dsa-indexer-loss-coeff 1.0
    --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --moe-shared-expert-intermediate-size 32
    --make-vocab-size-divisible-by 16 --init-method-std 0.1
"""  # large initial weights: attention is far from uniform, so the indexer has something to learn
TRAINING = """
    --micro-batch-size 2 --global-batch-size 8 --lr 1e-3 --lr-warmup-iters 0 --lr-decay-style constant
    --eval-iters 0 --no-plot --no-tensorboard
"""
TRAIN = "tests.support.example_job:train"
WEIGHTS_ALONE = "--save-interval 0 --no-save-optim --no-save-rng"

Tensors = dict[str, torch.Tensor]
HEADING = "parity with one process: largest relative differences over all steps"


@dataclass(frozen=True)
class Bounds:
    """Largest relative differences. In fp32, rounding causes at most a hundredth of them.

    The bounds of updates and of later steps are looser than the first gradient's. Adam divides by the
    gradient's size, so elements with hardly any gradient move as far as all others, in a direction set by
    rounding.
    """

    loss: float = 1e-4
    grad_norm: float = 5e-4
    first_gradient: float = 1e-4
    last_gradient: float = 5e-4
    update: float = 5e-3
    forced: bool = True
    """Whether a violation is excused if it is gone once the reference's choices are forced."""


FP32 = Bounds()


@dataclass(frozen=True)
class Layout:
    """A configuration of the job.

    Attributes:
        name: label in reports.
        world_size: number of ranks.
        flags: command-line flags of the job.
        model: model flags, also used by the reference.
        stock: whether the model is Megatron's dense GPT instead of the main job's model.
        switches: feature switches in addition to the job's own.
    """

    name: str
    world_size: int = 1
    flags: str = ""
    model: str = ""
    stock: bool = False
    switches: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """Result of a run. Tensors are full parameters by their names in a checkpoint.

    ``signs`` are the signs of the indexer heads' products with the selected keys. ``memory`` holds the counts
    of :func:`memory_events.counted`, summed over the ranks.
    """

    records: list[dict[str, Any]]
    weights: Tensors
    first_gradients: Tensors
    last_gradients: Tensors
    choices: Choices
    signs: Choices
    memory: Counter[str]


@dataclass(frozen=True)
class Comparison:
    """Relative differences between a layout and its reference; per parameter, largest first.

    ``flips`` maps a kind (``"topk"``, ``"router"``, signs) to the number of choices that differ and to the
    number of all choices.
    """

    name: str
    loss: float
    grad_norm: float
    first_gradients: list[tuple[float, str]]
    last_gradients: list[tuple[float, str]]
    updates: list[tuple[float, str]]
    flips: dict[str, tuple[int, int]]

    def violations(self, bounds: Bounds) -> list[str]:
        """Return a line for every difference beyond its bound; NaN is beyond any bound."""
        compared = [("loss", self.loss, bounds.loss), ("gradient norm", self.grad_norm, bounds.grad_norm)]
        for what, values, bound in (
            ("first gradient", self.first_gradients, bounds.first_gradient),
            ("last gradient", self.last_gradients, bounds.last_gradient),
            ("update", self.updates, bounds.update),
        ):
            compared += [(f"{what} of {name}", value, bound) for value, name in values]
        return [
            f"{what}: {value:.1e}, bound {bound:.0e}" for what, value, bound in compared if not value <= bound
        ]

    def __str__(self) -> str:
        worst = (
            ("first gradient", self.first_gradients[0]),
            ("last gradient", self.last_gradients[0]),
            ("update", self.updates[0]),
        )
        lines = [
            f"{self.name}: loss {self.loss:.1e}, gradient norm {self.grad_norm:.1e}"
            + "".join(f", {kind} flips {count} of {total}" for kind, (count, total) in self.flips.items()),
            *(f"    worst {what} {value:.1e}  {name}" for what, (value, name) in worst),
        ]
        return "\n".join(lines)


class Lab:
    """Runs layouts from common initial weights, and caches the outcomes of their references.

    Args:
        pool: worker processes.
        folder: directory for data and checkpoints.
        steps: number of steps per run.
        timeout_s: time limit per run, in seconds.
    """

    def __init__(self, pool: WorkerPool, folder: Path, steps: int = STEPS, timeout_s: float = 240.0) -> None:
        self._pool, self._folder, self._steps, self._timeout_s = pool, folder, steps, timeout_s
        self._runs = 0
        self._initial: dict[tuple[str, bool], Path] = {}
        self._initial_tensors: dict[Path, Tensors] = {}
        self._references: dict[str, Outcome] = {}
        (folder / "text").mkdir()
        # The text of a module from the standard library is training data for all layouts.
        (folder / "text" / "input.py").write_text(inspect.getsource(argparse))

    def one_process(self, layout: Layout) -> Outcome:
        """Return the outcome of the layout's model in one process, without features."""
        return self.reference(
            Layout(f"{layout.name}, in one process", model=layout.model, stock=layout.stock)
        )

    def reference(self, layout: Layout) -> Outcome:
        """Return the cached outcome of :meth:`run` for a layout that serves as reference."""
        # Layouts with the same settings share an outcome, whatever their names.
        key = repr(replace(layout, name="", flags=" ".join(layout.flags.split())))
        outcome = self._references.pop(key, None) or self.run(layout)
        # Moved to the end, so that the first entry is the least recently used one.
        self._references[key] = outcome
        if len(self._references) > REFERENCES:
            del self._references[next(iter(self._references))]
        return outcome

    def run(
        self,
        layout: Layout,
        forced: Choices | None = None,
        fault: Fault | None = None,
        function: str = TRAIN,
        **arguments: Any,
    ) -> Outcome:
        """Train all steps from the initial weights of the layout's model.

        Args:
            layout: configuration to run.
            forced: routing and key choices that replace the model's own.
            fault: gradient to corrupt.
            function: import path of the rank's entry point: :func:`example_job.train` or a wrapper of it.
            **arguments: keyword arguments of ``function``.
        """
        self._runs += 1
        final = self._folder / f"final-{self._runs}"
        flags = (
            f"--train-iters {self._steps} --load {self._initial_weights(layout)} --finetune --save {final}"
        )
        ranks = self._train(
            layout,
            f"{layout.flags} {flags}",
            gradients=True,
            forced=forced,
            fault=fault,
            function=function,
            **arguments,
        )
        assert len(ranks[0].records) == self._steps
        first, last = (
            _layer_by_layer(put_together(itertools.chain.from_iterable(pieces)))
            for pieces in zip(*(rank.gradients for rank in ranks), strict=True)
        )
        memory = sum((rank.memory for rank in ranks), Counter())
        signs = merge(ranks)
        # The ranks record choices and signs in one dict.
        choices = {key: signs.pop(key) for key in list(signs) if key[0] != "sign"}
        return Outcome(ranks[0].records, self._read(final, self._steps), first, last, choices, signs, memory)

    def resume(
        self, layout: Layout, step: int, into: Layout | None = None
    ) -> tuple[list[Any], list[Tensors]]:
        """Train all steps without a stop, and train again from a checkpoint of that run.

        Args:
            layout: configuration of the uninterrupted run.
            step: step after which the checkpoint is written.
            into: configuration of the resumed run. Default: ``layout``.

        Returns:
            the records of both runs after ``step``, and the contents of both last checkpoints.
        """
        self._runs += 1
        whole, resumed = (self._folder / f"{what}-{self._runs}" for what in ("whole", "resumed"))
        into = into or layout
        keep = f"--train-iters {self._steps} --save-interval {step}"
        first = self._train(layout, f"{layout.flags} {keep} --save {whole}", saving="")
        load = f"--load {whole} --ckpt-step {step}"
        second = self._train(into, f"{into.flags} {keep} --save {resumed} {load}", saving="")
        files = [(str(folder), self._steps) for folder in (whole, resumed)]
        contents = self._pool.run("tests.support.example_job:read", 1, checkpoints=files)[0]
        return [first[0].records[step:], second[0].records], contents

    def compare(self, layout: Layout, outcome: Outcome, reference: Outcome | None = None) -> Comparison:
        """Return the differences from ``reference``, by default from one process."""
        saved = self._initial_weights(layout)
        if saved not in self._initial_tensors:
            self._initial_tensors[saved] = self._read(saved, 0)
        reference = reference or self.one_process(layout)
        return compare(layout.name, outcome, reference, self._initial_tensors[saved])

    def check(
        self, layout: Layout, bounds: Bounds | None = FP32, reference: Outcome | None = None
    ) -> Outcome:
        """Run the layout, compare it with its reference and return its outcome.

        Without bounds, both have to be bit-identical.

        Raises:
            AssertionError: some difference is out of bounds; the message lists all of them.
        """
        reference = reference or self.one_process(layout)
        outcome = self.run(layout)
        if bounds is None:
            assert_same_bits(outcome, reference)
            return outcome
        comparison = self.compare(layout, outcome, reference)
        tell(HEADING, str(comparison))
        problems = comparison.violations(bounds)
        # A flip excuses a difference only if it is gone with forced choices.
        if problems and bounds.forced and any(count for count, _ in comparison.flips.values()):
            again = self.run(layout, forced={**reference.choices, **reference.signs})
            forced = self.compare(layout, again, reference)
            tell(HEADING, f"again with forced choices, {forced}")
            problems = forced.violations(bounds)
        assert not problems, f"{layout.name} differs from one process:\n" + "\n".join(problems)
        return outcome

    def _initial_weights(self, layout: Layout) -> Path:
        key = layout.model, layout.stock
        if key not in self._initial:
            folder = self._folder / f"initial-{len(self._initial)}"
            alone = Layout("initial weights", model=layout.model, stock=layout.stock)
            self._train(alone, f"--train-iters 0 --save {folder}")
            self._initial[key] = folder
        return self._initial[key]

    def _train(
        self,
        layout: Layout,
        flags: str,
        saving: str = WEIGHTS_ALONE,
        function: str = TRAIN,
        **arguments: Any,
    ) -> list[RankOutcome]:
        data = f"--data {self._folder / 'text'} --data-cache-path {self._folder / 'cache'}"
        return self._pool.run(
            function,
            layout.world_size,
            timeout_s=self._timeout_s,
            argv=f"{MODEL} {layout.model} {TRAINING} {saving} {data} {flags}".split(),
            stock=layout.stock,
            switches=dict(layout.switches),
            signs=True,
            **arguments,
        )

    def _read(self, folder: Path, step: int) -> Tensors:
        named = [(str(folder), step)]
        return _layer_by_layer(*self._pool.run("tests.support.example_job:read", 1, checkpoints=named)[0])


def _layer_by_layer(tensors: Tensors) -> Tensors:
    return {name: value for stack in tensors.items() for name, value in _by_layer(*stack)}


def _by_layer(name: str, value: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Split a stack of all layers' parameters, which uniform models save, into one parameter per layer."""
    prefix = "decoder.layers."
    if not name.startswith(prefix) or name[len(prefix)].isdigit():
        return [(name, value)]
    return [(f"{prefix}{layer}.{name[len(prefix) :]}", part) for layer, part in enumerate(value)]


def merge(ranks: Sequence[RankOutcome]) -> Choices:
    """Merge the choices that the ranks recorded into choices of the global batch.

    Raises:
        AssertionError: two tensor parallel ranks chose differently for the same tokens.
    """
    merged: Choices = {}
    for key in sorted({key for rank in ranks for key in rank.choices}):
        by_data_rank = []
        # Ranks of other pipeline stages do not have this layer.
        holders = [rank for rank in ranks if key in rank.choices]
        for data in sorted({rank.place.data for rank in holders}):
            group = [rank for rank in holders if rank.place.data == data]
            of_context = [
                [rank for rank in group if rank.place.context == context]
                for context in range(group[0].place.context_size)
            ]
            joined = np.concatenate([_of_tensor_ranks(key, ranks) for ranks in of_context], axis=2)
            # Context parallel ranks may hold any rows, so rows are sorted by their position.
            order = np.concatenate([ranks[0].rows[key] for ranks in of_context], axis=1).argsort(axis=1)
            by_data_rank.append(np.stack([each[:, own] for each, own in zip(joined, order, strict=True)]))
        # [microbatch, data rank, ...]: Megatron deals a global batch to the data parallel ranks in turn.
        whole = np.stack(by_data_rank, axis=1)
        merged[key] = whole.reshape(-1, *whole.shape[2:])
    return merged


def _of_tensor_ranks(key: Key, group: list[RankOutcome]) -> npt.NDArray[np.bool_]:
    """Merge the choices of the tensor parallel ranks with the same context parallel rank."""
    group.sort(key=lambda rank: rank.place.tensor)
    parts = [rank.choices[key] for rank in group]
    # With sequence parallelism, each rank routes its part of the sequence.
    if key[0] == "router" and group[0].place.sequence_parallel:
        return np.concatenate(parts, axis=2)
    assert all(np.array_equal(part, parts[0]) for part in parts), (
        f"{key}: tensor parallel ranks chose differently for the same tokens"
    )
    return parts[0]


def compare(name: str, outcome: Outcome, reference: Outcome, initial: Tensors) -> Comparison:
    """Return the relative differences of two outcomes that began with the same weights."""
    assert len(outcome.records) == len(reference.records) > 0
    assert outcome.choices.keys() == reference.choices.keys()
    pairs = list(zip(outcome.records, reference.records, strict=True))
    flips: dict[str, tuple[int, int]] = {}
    ours = {**outcome.choices, **outcome.signs}
    for key, theirs in {**reference.choices, **reference.signs}.items():
        # [microbatch, batch, query token, ...], cut to the reference's shape: padded tokens go.
        of_data = ours[key][(slice(None), slice(None), *map(slice, theirs.shape[2:]))]
        differing = (of_data != theirs).any(axis=-1)  # one token's experts or keys, or one key's signs
        count, total = flips.get(key[0], (0, 0))
        flips[key[0]] = count + int(differing.sum()), total + differing.size
    return Comparison(
        name=name,
        loss=max(abs(one["lm_loss"] / other["lm_loss"] - 1) for one, other in pairs),
        grad_norm=max(abs(one["grad_norm"] / other["grad_norm"] - 1) for one, other in pairs),
        first_gradients=_worst(outcome.first_gradients, reference.first_gradients),
        last_gradients=_worst(outcome.last_gradients, reference.last_gradients),
        updates=_worst(_minus(outcome.weights, initial), _minus(reference.weights, initial)),
        flips=flips,
    )


def assert_same_bits(ours: Outcome, theirs: Outcome, norm: bool = True) -> None:
    """Check that two outcomes are bit-identical in everything that :func:`compare` looks at.

    Args:
        ours: outcome under test.
        theirs: expected outcome.
        norm: whether the global gradient norm is compared. Its rounding depends on how parameters are
            sharded.
    """
    for what in ("lm_loss", "grad_norm")[: 1 + norm]:
        assert [record[what] for record in ours.records] == [record[what] for record in theirs.records], what
    for what in ("first_gradients", "last_gradients", "weights"):
        mine, others = getattr(ours, what), getattr(theirs, what)
        assert mine.keys() == others.keys()
        assert [name for name in others if not mine[name].equal(others[name])] == [], what


def _minus(weights: Tensors, initial: Tensors) -> Tensors:
    assert weights.keys() == initial.keys()
    return {name: weights[name].double() - initial[name].double() for name in initial}


def _worst(ours: Tensors, theirs: Tensors) -> list[tuple[float, str]]:
    assert ours.keys() == theirs.keys()
    differences = [(relative(ours[name], theirs[name]), name) for name in theirs]
    # NaN comes first: it is beyond every bound.
    return sorted(differences, key=lambda pair: (not math.isnan(pair[0]), -pair[0], pair[1]))


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Return the norm of the difference relative to the norm of ``theirs``; infinity if only ``theirs`` is
    zero.
    """
    difference, size = (ours.double() - theirs.double()).norm().item(), theirs.double().norm().item()
    if size == 0:
        return 0.0 if difference == 0 else math.inf
    return difference / size
