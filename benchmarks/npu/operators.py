"""torch_npu's operators compared with the same computation in PyTorch: deviation, time, memory, refusals."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.layer import is_out_of_memory
from benchmarks.parts import Tell
from benchmarks.released import INDEX_DIM, LATENT, MODELS, ROPE, Released
from mindspeed_dsa import platforms
from mindspeed_dsa.ops.backend import BackendUnavailable
from mindspeed_dsa.ops.dense_attention import dense_attention, dense_attention_backward
from mindspeed_dsa.ops.grouped_matmul import grouped_matmul
from mindspeed_dsa.ops.indexer_kl_loss import dense_indexer_kl_loss, indexer_kl_loss
from mindspeed_dsa.ops.lightning_indexer import lightning_indexer
from mindspeed_dsa.ops.moe_permute import permute, unpermute
from mindspeed_dsa.ops.rms_norm import rms_norm
from mindspeed_dsa.ops.rotary import rotate, rotation
from mindspeed_dsa.ops.row_ranges import TO_LAST_KEY
from mindspeed_dsa.ops.sparse_flash_attention import SparseAttentionOutput, sparse_flash_attention
from mindspeed_dsa.ops.swiglu import swiglu

EPS = 1e-6
BOUNDS = {torch.bfloat16: 2e-2, torch.float32: 5e-3, torch.int32: 2e-2, torch.int64: 0.0}
"""Bound by dtype of a result: norm of the difference over the norm of the reference.

For indices it bounds the fraction that is not selected. Both sides have the same 16-bit inputs; the reference
computes in fp32.
"""
ROUNDS = 3
Outputs = dict[str, Tensor]


@dataclass(frozen=True)
class Model:
    """Sizes of a model's layer on one rank, without tensor parallelism.

    Attributes:
        lengths: numbers of rows of one sequence.
        nope: width of a head's part without position.
        value: width of a head's value.
        local_experts: experts of one rank.
        expert_ffn: width of one expert.
    """

    lengths: tuple[int, ...]
    heads: int
    index_heads: int
    topk: int
    nope: int
    value: int
    hidden: int
    experts: int = 256
    local_experts: int = 8
    chosen_experts: int = 8
    expert_ffn: int = 2048

    @classmethod
    def of(cls, sizes: Released, *lengths: int) -> Model:
        """Return a released model's layer, with these lengths of sequences."""
        return cls(
            *(lengths, sizes.heads, sizes.index_heads, sizes.topk, sizes.nope, sizes.value, sizes.hidden)
        )

    @property
    def softmax_scale(self) -> float:
        """Softmax scale of the unabsorbed heads."""
        return float((self.nope + ROPE) ** -0.5)


FULL = {
    "DeepSeek-V3.2": Model.of(MODELS["deepseek-v3.2"], 4096, 8192),
    "GLM-5": Model.of(MODELS["glm-5"], 4096),
}
# As many entries as keys: the operators do not take shorter lists of entries.
QUICK = {"tiny": Model((40,), 64, 8, 40, 128, 128, 64, 16, 4, 2, 32)}


class Problem:
    """One operator on one set of inputs, for any backend.

    Attributes:
        operator: operator's folder under ``mindspeed_dsa/ops``.
        inputs: tensors that require gradients.
        forward: function from a backend to its outputs.
        backward: function from a backend, its outputs and the start to gradients; default: autograd of the
            first output.
        start: function from a side's own outputs, and both sides' in order, to backward's start; default:
            random numbers. It is not timed.
    """

    def __init__(
        self,
        operator: str,
        inputs: Mapping[str, Tensor],
        forward: Callable[[str], Outputs],
        backward: Callable[[str, Outputs, Tensor], Outputs] | None = None,
        start: Callable[[Outputs, tuple[Outputs, Outputs]], Tensor] | None = None,
    ) -> None:
        self.operator, self.inputs, self.forward = operator, inputs, forward
        self.backward = self._differentiated if backward is None else backward
        self.start = _random if start is None else start

    @property
    def reference(self) -> str:
        """PyTorch backend that fits: ``chunked`` (bounded memory) if there is one, else ``reference``."""
        chunked = find_spec(f"mindspeed_dsa.ops.{self.operator}.chunked")
        return "reference" if chunked is None else "chunked"

    def _differentiated(self, backend: str, outputs: Outputs, grad: Tensor) -> Outputs:
        output = next(iter(outputs.values()))
        grads = torch.autograd.grad(output, tuple(self.inputs.values()), grad, retain_graph=True)
        return {f"gradient of {name}": each for name, each in zip(self.inputs, grads, strict=True)}


def _random(outputs: Outputs, both: tuple[Outputs, Outputs]) -> Tensor:
    first = next(iter(outputs.values()))
    return torch.randn(first.shape, generator=torch.Generator().manual_seed(1)).to(first)


class _Draw:
    """Source of normal bf16 tensors on the device, drawn on the host: the same ones everywhere."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(0)
        self.device = platforms.current().device

    def __call__(self, *shape: int, scale: float = 1.0) -> Tensor:
        drawn = torch.randn(shape, generator=self._generator) * scale
        return drawn.to(self.device, torch.bfloat16).requires_grad_()

    def integers(self, high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=self._generator).to(self.device)


def _index_inputs(draw: _Draw, model: Model, rows: int) -> dict[str, Tensor]:
    scale = (model.index_heads * INDEX_DIM) ** -0.5
    return {
        "index query": draw(1, rows, model.index_heads, INDEX_DIM),
        "index key": draw(1, rows, INDEX_DIM),
        "index weights": draw(1, rows, model.index_heads, scale=scale),
    }


def indexer(model: Model, rows: int) -> Problem:
    """Build the selection, and the gradient of the scores at both sides' selected keys."""
    inputs = _index_inputs(_Draw(), model, rows)

    def forward(backend: str) -> Outputs:
        indices, scores = lightning_indexer(*inputs.values(), model.topk, backend=backend)
        return {"topk_scores": scores, "topk_indices": indices}

    def start(outputs: Outputs, both: tuple[Outputs, Outputs]) -> Tensor:
        ours, theirs = (_as_mask(each["topk_indices"], rows) for each in both)
        indices = outputs["topk_indices"].long()
        # One gradient for each (query, key) pair, wherever a side lists it.
        place = indices + 7 * torch.arange(rows, device=indices.device)[:, None]
        selected = (ours & theirs).gather(-1, indices.clamp_min(0)) & (indices >= 0)
        # Whole numbers from -6 to 6 are exact in every dtype.
        return (place % 13 - 6).float() * selected

    return Problem("lightning_indexer", inputs, forward, start=start)


def _attention(draw: _Draw, model: Model, rows: int) -> tuple[dict[str, Tensor], Tensor]:
    """Return absorbed query, its rotary part and key, and the selection of the reference's indexer."""
    index = _index_inputs(draw, model, rows)
    with torch.no_grad():
        indices = lightning_indexer(*index.values(), model.topk, backend="chunked").topk_indices
    query, rotary = (draw(1, rows, model.heads, width) for width in (LATENT, ROPE))
    return {"query": query, "rotary query": rotary, "key": draw(1, rows, LATENT + ROPE)}, indices


def _attended(
    query: Tensor, rotary: Tensor, key: Tensor, indices: Tensor, model: Model, backend: str
) -> SparseAttentionOutput:
    """Attend as in training: with a separate rotary part, and with the rows' form known on the host."""
    return sparse_flash_attention(
        query,
        key,
        indices,
        model.softmax_scale,
        value_dim=LATENT,
        query_rope=rotary,
        form=TO_LAST_KEY,
        backend=backend,
    )


def attention(model: Model, rows: int) -> Problem:
    """Build sparse flash attention."""
    inputs, indices = _attention(_Draw(), model, rows)

    def forward(backend: str) -> Outputs:
        found = _attended(*inputs.values(), indices, model, backend)
        return {"out": found.out, "lse": found.lse}

    return Problem("sparse_flash_attention", inputs, forward)


def loss(model: Model, rows: int) -> Problem:
    """Build the indexer's loss over selected keys."""
    draw = _Draw()
    index = _index_inputs(draw, model, rows)
    main, indices = _attention(draw, model, rows)
    query, rotary, key = (each.detach() for each in main.values())
    with torch.no_grad():
        lse = _attended(query, rotary, key, indices, model, "chunked").lse

    def forward(backend: str) -> Outputs:
        given = (*index.values(), query, key, indices, model.softmax_scale)
        told = indexer_kl_loss(*given, lse=lse, query_rope=rotary, form=TO_LAST_KEY, backend=backend)
        return {"loss": told}

    return Problem("indexer_kl_loss", index, forward)


def dense_loss(model: Model, rows: int) -> Problem:
    """Build the indexer's loss over all keys, from the warm-up stage."""
    draw = _Draw()
    index = _index_inputs(draw, model, rows)
    query, key = (draw(1, rows, model.heads, model.nope + ROPE).detach() for _ in range(2))

    def forward(backend: str) -> Outputs:
        given = (*index.values(), query, key, model.softmax_scale)
        return {"loss": dense_indexer_kl_loss(*given, backend=backend)}

    return Problem("indexer_kl_loss", index, forward)


def dense(model: Model, rows: int) -> Problem:
    """Build causal attention to all keys, by head."""
    draw = _Draw()
    widths = (model.nope + ROPE, model.nope + ROPE, model.value)
    inputs = [draw(1, rows, model.heads, width).detach() for width in widths]

    def forward(backend: str) -> Outputs:
        out, lse = dense_attention(*inputs, model.softmax_scale, causal=True, backend=backend)
        return {"out": out, "lse": lse}

    def backward(backend: str, outputs: Outputs, grad: Tensor) -> Outputs:
        gradients = dense_attention_backward(
            grad, *inputs, *outputs.values(), model.softmax_scale, causal=True, backend=backend
        )
        names = ("query", "key", "value")
        return {f"gradient of {name}": gradient for name, gradient in zip(names, gradients, strict=True)}

    return Problem("dense_attention", {}, forward, backward)


def experts(model: Model, rows: int) -> Problem:
    """Build the first product of one rank's experts, which get one row for each choice of a token."""
    draw = _Draw()
    inputs = {
        "rows": draw(rows * model.chosen_experts, model.hidden),
        "weight": draw(model.local_experts, model.hidden, 2 * model.expert_ffn, scale=model.hidden**-0.5),
    }
    owner = draw.integers(model.local_experts, rows * model.chosen_experts)
    counts = owner.cpu().bincount(minlength=model.local_experts)

    def forward(backend: str) -> Outputs:
        return {"out": grouped_matmul(*inputs.values(), counts, backend=backend)}

    return Problem("grouped_matmul", inputs, forward)


def permutation(model: Model, rows: int) -> Problem:
    """Build the permutation of rows to their experts, and of their sums back."""
    draw = _Draw()
    inputs = {"tokens": draw(rows, model.hidden)}
    order = torch.rand(rows, model.experts, generator=torch.Generator().manual_seed(2)).argsort(-1)
    # Each token ranks the experts at random; the first ones are its choice.
    routing = (order < model.chosen_experts).to(draw.device)
    count = rows * model.chosen_experts

    def forward(backend: str) -> Outputs:
        moved = permute(inputs["tokens"], routing, rows=count, topk=model.chosen_experts, backend=backend)
        back = unpermute(moved.tokens, moved.row_map, rows, backend=backend)
        return {"back": back, "permuted": moved.tokens}

    return Problem("moe_permute", inputs, forward)


def norm(model: Model, rows: int) -> Problem:
    """Build RMSNorm of the hidden states."""
    draw = _Draw()
    inputs = {"hidden": draw(rows, 1, model.hidden), "weight": draw(model.hidden)}
    return Problem(
        "rms_norm", inputs, lambda backend: {"out": rms_norm(*inputs.values(), EPS, backend=backend)}
    )


def gated(model: Model, rows: int) -> Problem:
    """Build SwiGLU of the rows of one rank's experts."""
    inputs = {"gate and up": _Draw()(rows * model.chosen_experts, 2 * model.expert_ffn)}
    return Problem("swiglu", inputs, lambda backend: {"out": swiglu(*inputs.values(), backend=backend)})


def rotated(model: Model, rows: int) -> Problem:
    """Build rotary embedding of the heads' positional part."""
    draw = _Draw()
    inputs = {"heads": draw(rows, 1, model.heads, ROPE)}
    steps = 1e4 ** -(torch.arange(0, ROPE, 2).float() / ROPE)
    angles = (torch.arange(rows).float()[:, None] * steps).repeat(1, 2)[:, None, None].to(draw.device)

    def forward(backend: str) -> Outputs:
        states = inputs["heads"]
        return {"out": rotate(states, rotation(angles, 1.0, "halves", states, backend))}

    return Problem("rotary", inputs, forward)


PROBLEMS: dict[str, dict[str, Callable[[Model, int], Problem]]] = {
    "indexer": {"Lightning Indexer": indexer},
    "attention": {"sparse flash attention": attention},
    "loss": {"indexer loss, sparse": loss},
    "dense_loss": {"indexer loss, dense (warm-up)": dense_loss},
    "dense": {"dense attention": dense},
    "experts": {"grouped experts": experts, "permutation of tokens": permutation},
    "small": {"RMSNorm": norm, "SwiGLU": gated, "rotary embedding": rotated},
}
"""Problems by part. An operator that leaves the device in a bad state costs only its own part's figures."""


def run(part: str, quick: bool, tell: Tell) -> dict[str, Any]:
    """Return results of :func:`compared` by model, rows and operator.

    Args:
        part: key of :data:`PROBLEMS`.
        quick: one tiny model.
        tell: callback that gets the results so far.
    """
    results: dict[str, Any] = {}
    for name, problem in _problems(part, quick):
        try:
            results[name] = compared(problem(), 1 if quick else ROUNDS)
        except Exception as error:  # results of other operators are valid without it
            results[name] = {"error": f"{type(error).__name__}: {error}"[:500]}
        tell(results)
    return results


def _problems(part: str, quick: bool) -> Iterator[tuple[str, Callable[[], Problem]]]:
    for name, model in (QUICK if quick else FULL).items():
        for rows in model.lengths:
            for what, make in PROBLEMS[part].items():
                yield f"{what}, {name}, {rows} rows", partial(make, model, rows)


def compared(problem: Problem, rounds: int) -> dict[str, Any]:
    """Compare one operator with its reference.

    Returns:
        ``refused``: the operator's reason to decline the call. Otherwise ``apart``, the deviation by result;
        ``wrong``, deviations beyond their bound; by direction ``ms``, ``reference_ms``, ``speedup`` and
        ``extra_peak_mib`` of both. Without ``apart`` the reference does not fit, as ``reference`` says.
    """
    comparison: dict[str, Any] = {"reference": problem.reference}
    try:
        ours = problem.forward("npu")
    except BackendUnavailable as error:
        return {**comparison, "refused": str(error)}
    try:
        theirs: Outputs | None = problem.forward(problem.reference)
    except RuntimeError as error:
        if not is_out_of_memory(str(error)):
            raise
        theirs, comparison["reference"] = None, f"{problem.reference} does not fit into the device's memory"
    both = (ours, ours if theirs is None else theirs)
    sides = {"": ("npu", ours, problem.start(ours, both))}
    if theirs is not None:
        sides["reference_"] = (problem.reference, theirs, problem.start(theirs, both))
        gradients = [problem.backward(*side) for side in sides.values()]
        comparison["apart"], comparison["wrong"] = apart({**ours, **gradients[0]}, {**theirs, **gradients[1]})
        del gradients
    for direction in ("forward", "backward"):
        figures: dict[str, float] = {}
        for side, (backend, outputs, grad) in sides.items():
            if direction == "forward":
                call: Callable[[], object] = partial(problem.forward, backend)
            else:
                call = partial(problem.backward, backend, outputs, grad)
            figures[f"{side}ms"], figures[f"{side}extra_peak_mib"] = _measured(call, rounds)
        if "reference_ms" in figures:
            figures["speedup"] = figures["reference_ms"] / figures["ms"]
        comparison[direction] = figures
    return comparison


def apart(ours: Outputs, theirs: Outputs) -> tuple[dict[str, float], dict[str, str]]:
    """Return deviations by result, and a sentence for each deviation beyond its bound."""
    deviations: dict[str, float] = {}
    wrong: dict[str, str] = {}
    for name, expected in theirs.items():
        result = ours[name]
        bound = BOUNDS[expected.dtype]
        deviations[name] = _distance(result, expected)
        if not deviations[name] <= bound:
            wrong[name] = f"{deviations[name]:.1e} from the reference's, more than {bound:.0e}"
    return deviations, wrong


def _distance(result: Tensor, expected: Tensor) -> float:
    if not expected.is_floating_point():
        rows = expected.shape[-2]
        ours, theirs = (_as_mask(tensor, rows) for tensor in (result, expected))
        # A wrong key is missing on one side and extra on the other: half of the sum is the number of keys.
        missing = (theirs & ~ours).sum().item() + (ours & ~theirs).sum().item()
        return missing / 2 / max(theirs.sum().item(), 1)
    ours, theirs = (tensor.detach().float() for tensor in (result, expected))
    if theirs.isinf().any():
        # Scores are -inf where there is no entry; both sides may order equal scores differently.
        ours, theirs = (tensor.sort(-1, descending=True).values for tensor in (ours, theirs))
        if not torch.equal(ours.isinf(), theirs.isinf()):
            return float("inf")
        ours, theirs = (tensor.masked_fill(tensor.isinf(), 0) for tensor in (ours, theirs))
    return float((ours - theirs).norm() / theirs.norm().clamp_min(1e-30))


def _as_mask(indices: Tensor, keys: int) -> Tensor:
    """Return ``[..., keys]`` bool: whether a row lists the key; -1 lists none."""
    # Entries of -1 mark an extra column, which is cut off.
    outside = indices.masked_fill(indices < 0, keys).long()
    mask = torch.zeros((*indices.shape[:-1], keys + 1), dtype=torch.bool, device=indices.device)
    return mask.scatter_(-1, outside, True)[..., :keys]


def _measured(call: Callable[[], object], rounds: int) -> tuple[float, float]:
    """Return median milliseconds between events on the device, and peak MiB above the level before."""
    platform = platforms.current()
    call()
    platform.synchronize()
    before = platform.memory().current
    platform.reset_peak_memory()
    times = []
    for _ in range(rounds):
        begin, end = platform.new_event(timing=True), platform.new_event(timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times), max(platform.memory().peak - before, 0) / 2**20
