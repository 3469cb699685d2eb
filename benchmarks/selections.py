"""Selections of keys: cost of FP8 and its agreement with bf16, cost of recording, and layers that share."""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from benchmarks import shared_layers
from benchmarks.registry import Metrics
from benchmarks.released import INDEX_DIM, MODELS
from mindspeed_dsa import log
from mindspeed_dsa.features.dsa.operands import Operands
from mindspeed_dsa.features.dsa.problem import IndexInputs, LossOptions, Problem
from mindspeed_dsa.features.dsa.selections.feature import Options
from mindspeed_dsa.features.dsa.selections.format import Header, Key, Recording
from mindspeed_dsa.features.dsa.selections.record import Recorder
from mindspeed_dsa.features.dsa.sparse_attention import sparse_attention
from mindspeed_dsa.megatron.selection_source import Chosen, LayerRows, RowRun
from mindspeed_dsa.ops.lightning_indexer import lightning_indexer, selected_scores
from mindspeed_dsa.ops.quantised_indexer import quantised_indexer

_EXAMPLES = str(Path(__file__).parents[1] / "examples")
_FACTORS = {"fp8": True, "fp8-plain": False}
"""Precisions by name in ``--dsa-indexer-precision``: whether their factors are powers of two."""
_ROUNDS = 7
_TRAINED = 200
"""Steps of the training; keys are compared at its begin and at its end."""
_COMPARED = 5
"""Number of steps whose keys are compared, at the begin and at the end."""
_LAYERS = 3
_MODEL = (
    f"--bf16 --num-layers {_LAYERS} --seq-length 512 --micro-batch-size 4 --global-batch-size 4 "
    f"--dsa-indexer-n-heads 16 --dsa-indexer-head-dim {INDEX_DIM} --dsa-indexer-topk 64 "
    "--dsa-indexer-loss-coeff 1.0 --eval-iters 0 --log-interval 50 --no-async-save"
)


def run(device: str, quick: bool = False, only: str | None = None) -> Metrics:
    """Return all metrics of the case.

    Args:
        device: device that selects keys; the model trains on a CPU.
        quick: tiny problems.
        only: comma-separated names of parts; default: all.
    """
    names = list(PARTS) if only is None else only.split(",")
    if unknown := set(names) - set(PARTS):
        raise SystemExit(f"selections: --only {', '.join(sorted(unknown))} is none of {', '.join(PARTS)}")
    metrics: dict[str, Any] = {}
    for name in names:
        metrics.update(PARTS[name](device, quick))
    return metrics


# -- fp8: time ---------------------------------------------------------------------------------


def fp8(device: str, quick: bool) -> Metrics:
    """Return time of selections in FP8 over bf16, by models' indexers; reported, without a bound."""
    rows, lengths = (16, (128,)) if quick else (256, (4096, 16384))
    return {
        "fp8_over_bf16": {
            name: {str(length): _ratios(MODELS[name], device, rows, length) for length in lengths}
            for name in ("deepseek-v3.2", "glm-5.2")
        }
    }


def _ratios(model: Any, device: str, rows: int, length: int) -> Metrics:
    """Select for the last rows of a sequence, in alternation; return ratios of CPU or device time."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(1, *shape, generator=generator).to(device, torch.bfloat16)

    index = (
        normal(rows, model.index_heads, INDEX_DIM),
        normal(length, INDEX_DIM),
        normal(rows, model.index_heads),
    )
    topk = min(model.topk, length // 4)
    ends = torch.arange(length - rows + 1, length + 1, device=device)
    found_keys: dict[str, Tensor] = {}

    def full() -> None:
        found_keys["full"] = lightning_indexer(*index, topk, ends=ends).topk_indices

    def quantised(name: str) -> Callable[[], None]:
        def select() -> None:
            found_keys[name] = quantised_indexer(*index, topk, ends=ends, powers_of_two=_FACTORS[name])

        return select

    def with_scores() -> None:
        quantised("fp8")()
        selected_scores(*index, found_keys["fp8"])

    ways = {"full": full, "fp8": quantised("fp8"), "fp8-plain": quantised("fp8-plain")}
    ways["fp8 with the loss's scores"] = with_scores
    times: dict[str, list[float]] = defaultdict(list)
    for _ in range(_ROUNDS + 1):
        for name, select in ways.items():
            times[name].append(_seconds(select, device))
    shares = [
        float(shared_layers.same_keys(found_keys["full"], found_keys[name], length).mean())
        for name in _FACTORS
    ]
    if min(shares) < 0.9:
        return {
            "failed": f"selections in FP8 have {min(shares):.1%} of their keys in common with those in bf16"
        }
    # Drop the first round: it compiles, or measures how to multiply.
    of_full = times["full"][1:]
    ratios = {
        name: round(statistics.median(one / other for one, other in zip(of_way[1:], of_full, strict=True)), 3)
        for name, of_way in times.items()
        if name != "full"
    }
    return {"bf16_ms": round(1e3 * statistics.median(of_full), 2), **ratios}


def _seconds(work: Callable[[], None], device: str) -> float:
    if device == "cpu":
        begin = time.process_time()
        work()
        return time.process_time() - begin
    module = torch.get_device_module(device)
    module.synchronize()
    begin = time.perf_counter()
    work()
    module.synchronize()
    return time.perf_counter() - begin


# -- agreement: of a trained model -------------------------------------------------------------


def agreement(device: str, quick: bool) -> Metrics:
    """Return the share of keys that bf16 and FP8 select alike, before and after training on real text.

    Rows that see no more than ``topk`` keys are left out. The model trains on the keys that bf16 selects.
    """
    steps = 2 * _COMPARED if quick else _TRAINED
    flags = [*_MODEL.split(), "--train-iters", str(steps)]
    if quick:
        flags += "--seq-length 128 --dsa-indexer-topk 16".split()
    with tempfile.TemporaryDirectory(prefix="selections-") as folder:
        shares = _train([*flags, "--output-dir", folder])
    if len(shares) != 2 * _COMPARED * _LAYERS:
        return {
            "failed": f"{len(shares)} selections of {_LAYERS} layers were compared in {2 * _COMPARED} steps"
        }
    parts = {"untrained": shares[: len(shares) // 2], "trained": shares[len(shares) // 2 :]}
    return {
        "same_keys": {
            when: {
                name: {
                    "all": round(statistics.mean(share[name] for share in some), 4),
                    **{
                        f"layer {layer + 1}": round(
                            statistics.mean(share[name] for share in some[layer::_LAYERS]), 4
                        )
                        for layer in range(_LAYERS)
                    },
                }
                for name in _FACTORS
            }
            for when, some in parts.items()
        }
    }


def _train(argv: list[str]) -> list[dict[str, float]]:
    """Train the example's model; return shares of the same keys, in the order in which layers selected."""
    if _EXAMPLES not in sys.path:
        sys.path.insert(0, _EXAMPLES)
    import mindspeed_dsa
    from mindspeed_dsa import session

    session.enable_from_argv(argv)
    try:
        from dsa_job import app

        with _compared(int(argv[argv.index("--train-iters") + 1])) as shares:
            if app.main(argv) != 0:
                raise SystemExit("selections: the example job failed; its messages are above")
        return shares
    finally:
        mindspeed_dsa.disable()


@contextmanager
def _compared(steps: int) -> Iterator[list[dict[str, float]]]:
    """Compare the selections of the first and the last steps, one for each layer in each step."""
    from mindspeed_dsa.features.dsa import sparse_attention

    select, shares = sparse_attention.select_keys, []
    calls = iter(range(steps * _LAYERS + 1))

    def watched(index: Any, topk: int, rows: Any, backend: str, **options: Any) -> Any:
        selection = select(index, topk, rows, backend, **options)
        if _COMPARED <= next(calls) // _LAYERS < steps - _COMPARED:
            return selection
        keys = index.key.shape[1]
        # Rows with at most topk keys select all of them in any precision.
        seen = torch.arange(1, keys + 1) > topk
        inputs = [x.detach() for x in (index.query, index.key, index.weights)]
        others = {
            name: quantised_indexer(*inputs, topk, powers_of_two=powers) for name, powers in _FACTORS.items()
        }
        shares.append(
            {
                name: float(shared_layers.same_keys(selection.topk_indices, other, keys)[:, seen].mean())
                for name, other in others.items()
            }
        )
        return selection

    with mock.patch.object(sparse_attention, "select_keys", watched):
        yield shares


# -- recording: bytes, and time of a step ------------------------------------------------------


class _Layer(NamedTuple):
    operands: Operands
    index: IndexInputs
    leaves: list[Tensor]


def recording(device: str, quick: bool) -> Metrics:
    """Return bytes of a recording over int32 keys, and attention's time with recording over without.

    The time is of forward and backward with the indexer loss, in alternation. Recording is a smaller part of
    a whole step with projections and experts, and of attention with more heads than these.
    """
    rows, topk, rounds = (160, 32, 1) if quick else (4096, 1024, 5)
    layer = _layer(rows, device, 2 if quick else 16)
    times: dict[str, list[float]] = {"without": [], "recording": []}
    with tempfile.TemporaryDirectory() as folder:
        header = Header(topk, 1, 0, (1,))
        recorder = Recorder(Options(record=Path(folder)), header, 0, log.get("benchmark"))
        _step(layer, topk, None, 0)
        for step in range(1, rounds + 1):
            for name, taker in (("without", None), ("recording", recorder)):
                begin = time.perf_counter()
                _step(layer, topk, taker, step)
                times[name].append(time.perf_counter() - begin)
        recorder.close()
        written = sum(file.stat().st_size for file in Path(folder).iterdir())
        begin = time.perf_counter()
        recorded = Recording.open(Path(folder)).array(1, 0)
        reading = time.perf_counter() - begin
    if recorded.shape != (rows, 1, topk) or not (recorded[-1] >= 0).all():
        return {"failed": f"a recording of {rows} rows came back as {recorded.shape}"}
    return {
        "bytes_over_int32": round(written / (rounds * recorded.nbytes), 4),
        "recording_step_ratio": round(min(times["recording"]) / min(times["without"]), 4),
        "step_s": round(min(times["without"]), 3),
        "reading_a_layer_s": round(reading, 3),
    }


def _layer(rows: int, device: str, heads: int) -> _Layer:
    """Build operands of DeepSeek-V3.2's widths."""
    torch.manual_seed(0)

    def leaf(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device).requires_grad_()

    latent, rope, value = 512, 64, 128
    of_attention = [
        leaf(rows, 1, heads, latent + rope),
        leaf(rows, 1, 1, latent + rope),
        leaf(heads, value, latent),
    ]
    of_index = [leaf(1, rows, heads, INDEX_DIM), leaf(1, rows, INDEX_DIM), leaf(1, rows, heads)]
    operands = Operands(*of_attention, (latent + rope) ** -0.5)
    return _Layer(operands, IndexInputs(*of_index), [*of_attention, *of_index])


def _step(layer: _Layer, topk: int, recorder: Recorder | None, step: int) -> None:
    rows = layer.operands.query.shape[0]
    problem = Problem(layer.operands, topk, loss=LossOptions(1.0, on_chosen_keys=True))
    result = sparse_attention(problem, layer.index)
    if recorder is not None:
        of_layer = LayerRows(1, lambda: [RowRun(0, rows, 0, rows)], 1, rows, rows, topk)
        recorder.take(Key(step, 0, 1), of_layer, Chosen(result.topk_indices))
    assert result.loss is not None
    (result.out.sum() + result.loss).backward()
    for leaf in layer.leaves:
        leaf.grad = None


PARTS: dict[str, Callable[[str, bool], Metrics]] = {
    "fp8": fp8,
    "agreement": agreement,
    "recording": recording,
    "layers": lambda device, quick: shared_layers.layers(quick),
    "served": lambda device, quick: shared_layers.served(quick),
}
