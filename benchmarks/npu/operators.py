"""Each of torch_npu's operators beside the same computation in PyTorch: deviation, time, memory, refusals."""

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
"""By dtype of a result: norm of the difference over that of the reference; of indices the share that is not
selected. Both sides have the same inputs of 16 bits; the reference computes in fp32."""
ROUNDS = 3
Outputs = dict[str, Tensor]


@dataclass(frozen=True)
class Model:
    """Sizes of a model's layer, of one rank without tensor parallelism.

    Attributes:
        lengths: rows of one sequence.
        nope: dimensions of a head without position.
        value: dimensions of a head's value.
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
        """Return a released model's layer."""
        return cls(
            *(lengths, sizes.heads, sizes.index_heads, sizes.topk, sizes.nope, sizes.value, sizes.hidden)
        )

    @property
    def softmax_scale(self) -> float:
        """Width of the unabsorbed heads."""
        return float((self.nope + ROPE) ** -0.5)


FULL = {
    "DeepSeek-V3.2": Model.of(MODELS["deepseek-v3.2"], 4096, 8192),
    "GLM-5": Model.of(MODELS["glm-5"], 4096),
}
# As many entries as keys: narrower ones the operators do not take.
QUICK = {"tiny": Model((40,), 64, 8, 40, 128, 128, 64, 16, 4, 2, 32)}


class Problem:
    """One operator on one set of inputs, for any backend.

    Attributes:
        operator: its folder under ``mindspeed_dsa/ops``.
        inputs: what has gradients.
        forward: outputs of a backend.
        backward: gradients from a backend, its outputs, and what it starts from; by default autograd's, of
            the first output.
        start: what backward starts from, of a side's own outputs and of both sides' in order; by default
            drawn at random. It is not part of what is timed.
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
        """The backend in PyTorch that everything fits, in bounded memory where there is one."""
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
    """Normally distributed bf16 tensors on the device, drawn on the host: the same ones everywhere."""

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
    """Selection; the gradient of the scores at what both sides have selected."""
    inputs = _index_inputs(_Draw(), model, rows)

    def forward(backend: str) -> Outputs:
        indices, scores = lightning_indexer(*inputs.values(), model.topk, backend=backend)
        return {"topk_scores": scores, "topk_indices": indices}

    def start(outputs: Outputs, both: tuple[Outputs, Outputs]) -> Tensor:
        ours, theirs = (_as_mask(each["topk_indices"], rows) for each in both)
        indices = outputs["topk_indices"].long()
        # A gradient for each pair, wherever a side lists it.
        place = indices + 7 * torch.arange(rows, device=indices.device)[:, None]
        selected = (ours & theirs).gather(-1, indices.clamp_min(0)) & (indices >= 0)
        return (place % 13 - 6).float() * selected

    return Problem("lightning_indexer", inputs, forward, start=start)


def _attention(draw: _Draw, model: Model, rows: int) -> tuple[dict[str, Tensor], Tensor]:
    """Absorbed query, its rotary part, and key; and what the reference's indexer selects."""
    index = _index_inputs(draw, model, rows)
    with torch.no_grad():
        indices = lightning_indexer(*index.values(), model.topk, backend="chunked").topk_indices
    query, rotary = (draw(1, rows, model.heads, width) for width in (LATENT, ROPE))
    return {"query": query, "rotary query": rotary, "key": draw(1, rows, LATENT + ROPE)}, indices


def _attended(
    query: Tensor, rotary: Tensor, key: Tensor, indices: Tensor, model: Model, backend: str
) -> SparseAttentionOutput:
    """As training calls it: with the rotary part apart, and with what the host knows of the rows."""
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
    """Sparse flash attention."""
    inputs, indices = _attention(_Draw(), model, rows)

    def forward(backend: str) -> Outputs:
        found = _attended(*inputs.values(), indices, model, backend)
        return {"out": found.out, "lse": found.lse}

    return Problem("sparse_flash_attention", inputs, forward)


def loss(model: Model, rows: int) -> Problem:
    """The indexer's loss over selected keys."""
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
    """The indexer's loss over all keys, of the warm-up."""
    draw = _Draw()
    index = _index_inputs(draw, model, rows)
    query, key = (draw(1, rows, model.heads, model.nope + ROPE).detach() for _ in range(2))

    def forward(backend: str) -> Outputs:
        given = (*index.values(), query, key, model.softmax_scale)
        return {"loss": dense_indexer_kl_loss(*given, backend=backend)}

    return Problem("indexer_kl_loss", index, forward)


def dense(model: Model, rows: int) -> Problem:
    """Causal attention to all keys, by head."""
    draw = _Draw()
    widths = (model.nope + ROPE, model.nope + ROPE, model.value)
    inputs = [draw(1, rows, model.heads, width).detach() for width in widths]

    def forward(backend: str) -> Outputs:
        out, lse = dense_attention(*inputs, model.softmax_scale, causal=True, backend=backend)
        return {"out": out, "lse": lse}

    def backward(backend: str, outputs: Outputs, grad: Tensor) -> Outputs:
        found = dense_attention_backward(
            grad, *inputs, *outputs.values(), model.softmax_scale, causal=True, backend=backend
        )
        names = ("query", "key", "value")
        return {f"gradient of {name}": each for name, each in zip(names, found, strict=True)}

    return Problem("dense_attention", {}, forward, backward)


def experts(model: Model, rows: int) -> Problem:
    """The first product of one rank's experts, which get as many rows as there are choices."""
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
    """Rows to their experts, and their sums back."""
    draw = _Draw()
    inputs = {"tokens": draw(rows, model.hidden)}
    order = torch.rand(rows, model.experts, generator=torch.Generator().manual_seed(2)).argsort(-1)
    routing = (order < model.chosen_experts).to(draw.device)
    count = rows * model.chosen_experts

    def forward(backend: str) -> Outputs:
        moved = permute(inputs["tokens"], routing, rows=count, topk=model.chosen_experts, backend=backend)
        back = unpermute(moved.tokens, moved.row_map, rows, backend=backend)
        return {"back": back, "permuted": moved.tokens}

    return Problem("moe_permute", inputs, forward)


def norm(model: Model, rows: int) -> Problem:
    """RMSNorm of the hidden states."""
    draw = _Draw()
    inputs = {"hidden": draw(rows, 1, model.hidden), "weight": draw(model.hidden)}
    return Problem(
        "rms_norm", inputs, lambda backend: {"out": rms_norm(*inputs.values(), EPS, backend=backend)}
    )


def gated(model: Model, rows: int) -> Problem:
    """SwiGLU of the rows of one rank's experts."""
    inputs = {"gate and up": _Draw()(rows * model.chosen_experts, 2 * model.expert_ffn)}
    return Problem("swiglu", inputs, lambda backend: {"out": swiglu(*inputs.values(), backend=backend)})


def rotated(model: Model, rows: int) -> Problem:
    """Rotary embedding of the heads' positional part."""
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
"""By part. An operator that leaves the device in a bad state costs the figures of its own part only."""


def run(part: str, quick: bool, tell: Tell) -> dict[str, Any]:
    """By model, rows and operator what :func:`compared` returns.

    Args:
        part: of :data:`PROBLEMS`.
        quick: one tiny model.
        tell: called with what is found so far.
    """
    found: dict[str, Any] = {}
    for name, problem in _problems(part, quick):
        try:
            found[name] = compared(problem(), 1 if quick else ROUNDS)
        except Exception as error:  # what the others find is worth as much without it
            found[name] = {"error": f"{type(error).__name__}: {error}"[:500]}
        tell(found)
    return found


def _problems(part: str, quick: bool) -> Iterator[tuple[str, Callable[[], Problem]]]:
    for name, model in (QUICK if quick else FULL).items():
        for rows in model.lengths:
            for what, make in PROBLEMS[part].items():
                yield f"{what}, {name}, {rows} rows", partial(make, model, rows)


def compared(problem: Problem, rounds: int) -> dict[str, Any]:
    """One operator beside its reference: what both return, take and need.

    Returns:
        ``refused``: why the operator does not take the call. Otherwise ``apart``, the deviation by result;
        ``wrong``, those beyond their bound; by direction ``ms``, ``reference_ms``, ``speedup`` and
        ``extra_peak_mib`` of both. Without ``apart`` the reference does not fit, as ``reference`` says.
    """
    found: dict[str, Any] = {"reference": problem.reference}
    try:
        ours = problem.forward("npu")
    except BackendUnavailable as error:
        return {**found, "refused": str(error)}
    try:
        theirs: Outputs | None = problem.forward(problem.reference)
    except RuntimeError as error:
        if not is_out_of_memory(str(error)):
            raise
        theirs, found["reference"] = None, f"{problem.reference} does not fit into the device's memory"
    both = (ours, ours if theirs is None else theirs)
    sides = {"": ("npu", ours, problem.start(ours, both))}
    if theirs is not None:
        sides["reference_"] = (problem.reference, theirs, problem.start(theirs, both))
        gradients = [problem.backward(*side) for side in sides.values()]
        found["apart"], found["wrong"] = apart({**ours, **gradients[0]}, {**theirs, **gradients[1]})
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
        found[direction] = figures
    return found


def apart(ours: Outputs, theirs: Outputs) -> tuple[dict[str, float], dict[str, str]]:
    """By result how far both sides are apart, and a sentence for each that is beyond its bound."""
    found: dict[str, float] = {}
    wrong: dict[str, str] = {}
    for name, expected in theirs.items():
        result = ours[name]
        bound = BOUNDS[expected.dtype]
        found[name] = _distance(result, expected)
        if not found[name] <= bound:
            wrong[name] = f"{found[name]:.1e} from the reference's, more than {bound:.0e}"
    return found, wrong


def _distance(result: Tensor, expected: Tensor) -> float:
    if not expected.is_floating_point():
        rows = expected.shape[-2]
        ours, theirs = (_as_mask(each, rows) for each in (result, expected))
        missing = (theirs & ~ours).sum().item() + (ours & ~theirs).sum().item()
        return missing / 2 / max(theirs.sum().item(), 1)
    ours, theirs = (each.detach().float() for each in (result, expected))
    if theirs.isinf().any():
        # Scores: -inf where there is no entry; sides may list those of one value in another order.
        ours, theirs = (each.sort(-1, descending=True).values for each in (ours, theirs))
        if not torch.equal(ours.isinf(), theirs.isinf()):
            return float("inf")
        ours, theirs = (each.masked_fill(each.isinf(), 0) for each in (ours, theirs))
    return float((ours - theirs).norm() / theirs.norm().clamp_min(1e-30))


def _as_mask(indices: Tensor, keys: int) -> Tensor:
    """``[..., keys]`` bool: which keys are listed, -1 none."""
    outside = indices.masked_fill(indices < 0, keys).long()
    mask = torch.zeros((*indices.shape[:-1], keys + 1), dtype=torch.bool, device=indices.device)
    return mask.scatter_(-1, outside, True)[..., :keys]


def _measured(call: Callable[[], object], rounds: int) -> tuple[float, float]:
    """Median of the milliseconds between events on the device, and MiB at the peak beyond those before."""
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
