"""Models whose layers share selections, trained with all patterns and losses; and what ``served`` costs.

All runs are jobs of the example on real text. A finished run has a file in :data:`FOLDER`, and is not
repeated.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.figures import SHARED_LAYERS
from benchmarks.registry import Metrics

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "runs" / "selections-layers"
LAYERS, UNIFORM = 8, "CSSSCSSS"
KEPT = UNIFORM.count("C")
_SEEDS = (1, 2, 3)
_MODEL = (
    f"--num-layers {LAYERS} --micro-batch-size 2 --global-batch-size 2 --dsa-indexer-loss-coeff 1.0 "
    "--eval-iters 0 --save-interval 0 --no-async-save --no-save-optim --no-tensorboard --no-plot"
).split()
_SIZES = "--seq-length 256 --dsa-indexer-topk 32 --train-iters 300".split()
_QUICK = "--seq-length 64 --dsa-indexer-topk 16 --train-iters 3".split()
_HELDOUT = 32
"""Number of held-out microbatches, of two sequences each."""
_COMPARED = 8
"""Number of held-out microbatches whose keys are kept, to compare them with those of other models."""
_CALIBRATION = 16
"""Number of microbatches of a search."""


def layers(quick: bool) -> Metrics:
    """Return figures of the trained models, and of the searches."""
    if not quick:
        return _run(FOLDER, _SEEDS, quick)
    with tempfile.TemporaryDirectory(prefix="selections-layers-") as folder:
        return _run(Path(folder), _SEEDS[:1], quick)


def _run(folder: Path, seeds: Sequence[int], quick: bool) -> Metrics:
    sizes = _QUICK if quick else _SIZES
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    searches = {}
    for seed in seeds:
        jobs = _Jobs(folder / f"seed {seed}", [*_MODEL, *sizes, "--seed", str(seed)], quick)
        full = jobs.trained("C" * LAYERS, "own")
        searches[str(seed)] = searched = jobs.searched()
        models = {"indexer in each layer": full}
        for name, pattern in {"uniform": UNIFORM, "searched": searched["pattern"]}.items():
            for losses in ("own", "served"):
                models[f"{name}, {losses}"] = jobs.trained(pattern, losses)
        for name, model in models.items():
            loss = model["heldout_loss"]
            found[name].append({**model, "above_full": loss - full["heldout_loss"]})
    return {
        "shared_layers": {name: _over_seeds(models) for name, models in found.items()},
        "searches": searches,
    }


def _over_seeds(models: Sequence[Mapping[str, Any]]) -> Metrics:
    """Return each figure's mean, its spread (standard deviation over seeds), and its values."""
    result: dict[str, Any] = {}
    for figure in SHARED_LAYERS:
        values = [model[figure] for model in models]
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        result[figure] = {
            "mean": round(statistics.mean(values), 4),
            "spread": round(spread, 4),
            "of_seeds": " ".join(f"{value:.4f}" for value in values),
        }
    by_layer = zip(*(model["recall_by_layer"] for model in models), strict=True)
    result["recall_by_layer"] = {
        f"layer {layer}": round(statistics.mean(values), 4) for layer, values in enumerate(by_layer, 1)
    }
    result["patterns"] = " ".join(model["pattern"] for model in models)
    return result


class _Jobs:
    """Jobs of one seed, with their results in files.

    Args:
        folder: folder of the results.
        flags: flags of all jobs.
        quick: whether the jobs are tiny.
    """

    def __init__(self, folder: Path, flags: Sequence[str], quick: bool) -> None:
        self._folder, self._quick, self._flags = folder, quick, list(flags)
        self._cache = ["--data-cache-path", str(folder.parent / "cache")]
        folder.mkdir(parents=True, exist_ok=True)

    def trained(self, pattern: str, losses: str) -> dict[str, Any]:
        """Train a model; return its figures on held-out text, and the share of keys that the full one has.

        Args:
            pattern: letters of the layers.
            losses: value of ``--dsa-indexer-loss-layers``.
        """
        keys = self._folder / f"{pattern} {losses}.pt"
        full = "S" not in pattern
        flags = [] if full else ["--dsa-indexer-topk-pattern", pattern, "--dsa-indexer-loss-layers", losses]
        saved = ["--save", str(self._checkpoints)] if full else ["--no-save"]

        def train() -> dict[str, Any]:
            begin, figures = time.monotonic(), dict[str, Any]()

            def measure(args: Any, stepper: Any) -> None:
                figures.update(_figures(args, stepper, keys, 2 if self._quick else _HELDOUT))

            records = _train([*self._flags, *flags, *self._cache, *saved], measure)
            figures["training_loss"] = statistics.mean(each["lm_loss"] for each in records[-10:])
            return {**figures, "pattern": pattern, "seconds": round(time.monotonic() - begin)}

        result = self._kept(f"{pattern} {losses}", flags, train)
        of_full = torch.load(self._folder / f"{'C' * LAYERS} own.pt")
        topk, length = of_full.shape[-1], of_full.shape[-2]
        seen = torch.arange(1, length + 1) > topk
        equal = same_keys(of_full, torch.load(keys), length)[..., seen]
        return {**result, "equal_keys": float(equal.mean())}

    def searched(self) -> dict[str, Any]:
        """Search the model with an indexer in each layer; compare with a search that reuses nothing."""
        folder = self._folder / "search"
        job = [*self._flags, *self._cache, "--no-save"]
        microbatches = 2 if self._quick else _CALIBRATION

        def search() -> dict[str, Any]:
            report = self._folder / "search-report.json"
            command = [sys.executable, "-m", "mindspeed_dsa", "selections", "search", str(self._checkpoints)]
            command += ["--layers-kept", str(KEPT), "--microbatches", str(microbatches)]
            command += ["--output", str(folder), "--json", str(report), "--"]
            command += [sys.executable, str(ROOT / "examples" / "pretrain_dsa.py"), *job]
            before = _of_children()
            paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
            subprocess.run(
                [*command, "--output-dir", str(folder / "runs")],
                env=environment,
                stdout=sys.stderr,
                check=True,
            )
            seconds = _of_children() - before
            found = json.loads(report.read_text(encoding="utf-8"))
            steps = [(each["pattern"], each["loss"]) for each in found["steps"]]
            begin = time.process_time()
            plain = self._plain_search(job, folder)
            pairs = list(zip(steps, plain, strict=True))
            return {
                "pattern": found["pattern"],
                "evaluations": found["evaluations"],
                "processor_seconds": round(seconds, 1),
                "plain_processor_seconds": round(time.process_time() - begin, 1),
                "same_choices_as_plain": "yes" if all(one[0] == other[0] for one, other in pairs) else "no",
                "largest_difference_of_losses": max(abs(one[1] - other[1]) for one, other in pairs),
                "loss_before": round(steps[0][1], 4),
                "loss_after": round(steps[-1][1], 4),
                "uniform_loss_after": round(found["steps"][-1]["uniform_loss"], 4),
            }

        return self._kept("search", [str(KEPT), str(microbatches)], search)

    @property
    def _checkpoints(self) -> Path:
        return self._folder / "checkpoints"

    def _kept(self, name: str, flags: Sequence[str], work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the result in the file of this name, or do the work if there is none with these flags."""
        file, words = self._folder / f"{name}.json", [*self._flags, *flags]
        if file.exists():
            before = json.loads(file.read_text(encoding="utf-8"))
            if before["flags"] == words:
                return dict(before["result"])
        result = work()
        file.write_text(json.dumps({"flags": words, "result": result}, indent=1) + "\n", encoding="utf-8")
        print(f"{self._folder.name}, {name}: {result}", file=sys.stderr, flush=True)
        return result

    def _plain_search(self, job: Sequence[str], folder: Path) -> list[tuple[str, float]]:
        """Return patterns and losses of the same greedy steps, with all layers computed for each pattern."""
        steps: list[tuple[str, float]] = []

        def search(evaluator: Any, *_: Any) -> None:
            with evaluator.evaluating():
                pattern = evaluator.start
                steps.append((pattern, evaluator.loss(pattern)))
                while pattern.count("C") > KEPT:
                    # From above, because of equal losses the highest layer shares.
                    layers = [layer for layer in reversed(range(1, LAYERS)) if pattern[layer] == "C"]
                    tried = [f"{pattern[:layer]}S{pattern[layer + 1 :]}" for layer in layers]
                    losses = {each: evaluator.loss(each) for each in tried}
                    pattern = min(losses, key=lambda each: losses[each])
                    steps.append((pattern, losses[pattern]))

        from mindspeed_dsa.features.dsa.selection_search import job as search_job

        words = [*job, "--load", str(self._checkpoints), "--finetune", "--dsa-search-selections", str(folder)]
        with mock.patch.object(search_job, "run", search):
            try:
                _train(words, lambda *_: None)
            except SystemExit:
                return steps
            finally:
                if torch.distributed.is_initialized():
                    torch.distributed.destroy_process_group()
        raise RuntimeError("the job trained and did not search")


def _of_children() -> float:
    """Return the processor seconds of all ended child processes."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


# -- jobs ----------------------------------------------------------------------------------------


def _train(argv: Sequence[str], on_end: Callable[[Any, Any], None]) -> list[Any]:
    """Run the example job in this process; return its records.

    Args:
        argv: flags of the job.
        on_end: function of the job's arguments and its ``Stepper``, called after the last step.
    """
    examples = str(ROOT / "examples")
    if examples not in sys.path:
        sys.path.insert(0, examples)
    import mindspeed_dsa
    from mindspeed_dsa import session

    session.enable_from_argv(argv)
    try:
        from dsa_job import app, training
        from dsa_job.arguments import parse_args
        from dsa_job.tokenizers import build_tokenizer
        from dsa_job.validation import World, check, padded_vocab_size
        from megatron.core.transformer.moe import moe_utils

        moe_utils.get_moe_layer_wise_logging_tracker().clear()  # as long as the model of the job before
        args = parse_args(argv)
        check(args, World.from_environment())
        app.enable_features(args)
        args.padded_vocab_size = padded_vocab_size(args, build_tokenizer(None).vocab_size)
        return training.train(args, on_end=lambda stepper: on_end(args, stepper))
    finally:
        mindspeed_dsa.disable()


def _batches(args: Any, stepper: Any, heldout: int) -> Any:
    """Return the job's training batches, or so many microbatches of held-out text."""
    from dsa_job import data
    from dsa_job.tokenizers import build_tokenizer

    tokenizer = build_tokenizer(None)
    wanted = argparse.Namespace(**{**vars(args), "eval_iters": heldout})
    training, others = data.build_datasets(wanted, tokenizer, data.build_corpus(wanted, tokenizer))
    return data.batches(wanted, others if heldout else training, 0, len(stepper.model))


# -- quality -------------------------------------------------------------------------------------


def _figures(args: Any, stepper: Any, keys: Path, microbatches: int) -> dict[str, Any]:
    """Return held-out loss and recall, and save the selected keys."""
    batches = _batches(args, stepper, microbatches)
    with watched_attention(args.num_layers) as shares:
        loss = stepper.evaluate(batches, microbatches)
    by_layer = [shares[layer :: args.num_layers] for layer in range(args.num_layers)]
    recalls = [statistics.mean(each["recall"] for each in layer) for layer in by_layer]
    selected = [torch.cat([each["keys"] for each in layer[:_COMPARED]]) for layer in by_layer]
    torch.save(torch.stack(selected), keys)
    return {
        "heldout_loss": loss,
        "recall": statistics.mean(recalls),
        "recall_by_layer": recalls,
        "attention": statistics.mean(each["attention"] for each in shares),
    }


@contextmanager
def watched_attention(layers: int) -> Iterator[list[dict[str, Any]]]:
    """Compare each layer's selection with its own attention over all visible keys.

    Yields:
        List that gets an entry for each call of a layer, in the order of calls: ``recall``, the share of the
        ``topk`` keys with the highest attention probability (mean over heads) that the layer's selection has;
        ``attention``, the sum of the probabilities of the selected keys; ``keys``, the selection as int16.
        Query tokens that see at most ``topk`` keys are left out of the shares.
    """
    from mindspeed_dsa.features.dsa import core_attention
    from mindspeed_dsa.features.dsa.loss import attention_mass

    attend, shares = core_attention.sparse_attention, list[dict[str, Any]]()

    def watched(problem: Any, index: Any) -> Any:
        result = attend(problem, index)
        (selected,) = result.topk_indices
        batch, rows, topk = selected.shape
        positions = torch.arange(rows, dtype=torch.int32)
        visible = torch.where(positions <= positions[:, None], positions, -1)  # [rows, keys]
        probabilities = attention_mass(problem, visible.expand(batch, rows, rows).contiguous())
        best = probabilities.topk(topk, dim=-1).indices  # [batch, rows, topk]
        seen = positions >= topk
        on_selected = probabilities.gather(-1, selected.long().clamp_min(0)).sum(-1)
        shares.append(
            {
                "recall": float(same_keys(best, selected, rows)[:, seen].mean()),
                "attention": float(on_selected[:, seen].mean()),
                "keys": selected.to(torch.int16),
            }
        )
        return result

    with mock.patch.object(core_attention, "sparse_attention", watched):
        yield shares
    assert len(shares) % layers == 0, "each layer attends once in a forward"


def same_keys(one: Tensor, other: Tensor, keys: int) -> Tensor:
    """Return the share of a row's keys that the other selection also has, ``[..., rows]``, NaN without keys.

    Args:
        one: key positions ``[..., rows, topk]``, -1 for empty entries.
        other: key positions of the other selection, likewise.
        keys: number of keys.
    """
    # Empty entries mark an extra column, which is cut off.
    masks = [
        torch.zeros(*x.shape[:-1], keys + 1, dtype=torch.bool, device=x.device).scatter_(
            -1, x.long().masked_fill(x < 0, keys), True
        )[..., :keys]
        for x in (one, other)
    ]
    return (masks[0] & masks[1]).sum(-1) / masks[0].sum(-1)


# -- cost of served ------------------------------------------------------------------------------

_FORMS = {
    "kept": ((), "S"),
    "recomputed": (
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1".split(),
        "C",
    ),
    "loss in backward": (("--use-dsa-absorb", "--dsa-fuse-kl-in-backward"), ""),
}
"""Flags of jobs whose memory is counted, and letters of the layers that keep a tensor ``[tokens, topk]``."""


def served(quick: bool) -> Metrics:
    """Return time and memory of ``served`` beside ``own``, in jobs of the uniform pattern."""
    sizes = _QUICK if quick else _SIZES
    with tempfile.TemporaryDirectory(prefix="selections-served-") as folder:
        flags = [*_MODEL, *sizes, "--train-iters", "2", "--no-save", "--data-cache-path", folder]
        flags += ["--dsa-indexer-topk-pattern", UNIFORM, "--dsa-indexer-loss-layers", "served"]
        return {
            "served_time": _time(flags, 2 if quick else 25),
            "served_memory": {
                form: _memory([*flags, *more], sum(map(UNIFORM.count, letters)))
                for form, (more, letters) in _FORMS.items()
            },
        }


def _time(flags: Sequence[str], rounds: int) -> Metrics:
    """Return CPU time of steps without indexer loss, with ``own`` and with ``served``, which take turns."""
    times: dict[str, list[float]] = {"none": [], "own": [], "served": []}

    def measure(args: Any, stepper: Any) -> None:
        batches, steps = _batches(args, stepper, 0), itertools.count(args.train_iters + 1)
        for _ in range(rounds + 1):
            for losses, seconds in times.items():
                with _loss_of(losses, stepper):
                    begin = time.process_time()
                    stepper.train_step(next(steps), batches)
                    seconds.append(time.process_time() - begin)

    _train(flags, measure)
    # Drop the first round, which measures how to multiply.
    rows = list(zip(*(seconds[1:] for seconds in times.values()), strict=True))
    share = statistics.median(1 - none / own for none, own, _ in rows)
    ratio = statistics.median(of_served / own for _, own, of_served in rows)
    bound = (1 + 3 * share) * 1.05
    return {
        "own_step_ms": round(1e3 * statistics.median(own for _, own, _ in rows), 1),
        "share_of_loss": round(share, 4),
        "served_over_own": round(ratio, 4),
        "bound": round(bound, 4),
        "holds": "yes" if ratio <= bound else "no",
    }


def _memory(flags: Sequence[str], tensors: int) -> Metrics:
    """Return bytes that ``served`` keeps between forward and backward beyond ``own``, and the formula's.

    Args:
        flags: flags of the job.
        tensors: number of fp32 tensors ``[tokens, topk]``, by the formula.
    """
    from benchmarks.plan import counted

    kept: dict[str, list[float]] = {"own": [], "served": []}
    one = 0

    def measure(args: Any, stepper: Any) -> None:
        nonlocal one
        from dsa_job import step

        one = 4 * args.dsa_indexer_topk * args.micro_batch_size * args.seq_length
        batches, steps = _batches(args, stepper, 0), itertools.count(args.train_iters + 1)
        # The number of tokens of each expert changes with the weights, and kept bytes with it.
        with (
            mock.patch.object(stepper.optimizer, "step", return_value=(True, 0.0, None)),
            mock.patch.object(step, "forward_step", counted.marked(step.forward_step)),
        ):
            batch = [next(batches[0])]
            for losses, found in [*kept.items()] * 3:
                with _loss_of(losses, stepper):
                    run = partial(stepper.train_step, next(steps), [iter(batch)])
                    found.append(counted.activations(run)[0])

    _train(flags, measure)
    # The allocator frees some buffers late: the least of three steps counts.
    more = min(kept["served"]) - min(kept["own"])
    return {
        "own_bytes": min(kept["own"]),
        "served_more_bytes": more,
        "formula_bytes": tensors * one,
        # Without such tensors: over one of them.
        "error": round(abs(more - tensors * one) / (max(tensors, 1) * one), 5),
    }


@contextmanager
def _loss_of(losses: str, stepper: Any) -> Iterator[None]:
    """Train in the block with ``own`` or ``served``, or without an indexer loss for ``none``."""
    from mindspeed_dsa.features.dsa import core_attention

    call_of = core_attention.call_of

    def changed(*given: Any) -> Any:
        call = call_of(*given)
        loss_layers = "own" if losses == "none" else losses
        return replace(call, options=replace(call.options, loss_layers=loss_layers))

    weight = 0.0 if losses == "none" else stepper.args.dsa_indexer_loss_coeff
    with (
        mock.patch.object(core_attention, "call_of", changed),
        mock.patch.object(stepper.config, "dsa_indexer_loss_coeff", weight),
    ):
        yield
