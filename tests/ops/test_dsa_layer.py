"""A layer's sparse attention as a library: function, module and documentation page.

Selections are compared with the formula; outputs, losses and gradients with dense masks in fp64.
"""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mindspeed_dsa.ops import dsa
from mindspeed_dsa.ops.lightning_indexer import cpu
from tests.ops import oracle
from tests.ops.random_inputs import indexer_inputs, packed_ranges

ROOT = Path(__file__).parents[2]
RECORD = Path(__file__).with_name("dsa_interface.json")
BATCH, ROWS, HEADS, DIM, VALUE, TOPK = 2, 24, 3, 10, 6, 7
SCALE = 0.3
INDEX_HEADS = 24
"""So many heads that no score is exactly 0, because torch.topk breaks ties arbitrarily."""


def main_inputs(absorbed, dtype=torch.float64):
    generator = torch.Generator().manual_seed(3)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    query = normal(BATCH, ROWS, HEADS, DIM)
    if absorbed:
        return query, normal(BATCH, ROWS, DIM), None
    return query, normal(BATCH, ROWS, HEADS, DIM), normal(BATCH, ROWS, HEADS, VALUE)


def expected(query, key, value, index, mask):
    """Return the output and the loss over the keys of ``mask``, in fp64."""
    if value is None:
        key, value = (x[:, :, None].expand(-1, -1, HEADS, -1) for x in (key, key[..., :VALUE]))
    scores = SCALE * torch.einsum("bthd,bshd->bths", query, key)
    counts = mask.any(-1)
    # Rows without a visible key give zeros, and count in the mean.
    probabilities = scores.masked_fill(~(mask | ~counts[..., None])[:, :, None], -torch.inf).softmax(-1)
    out = torch.einsum("bths,bshd->bthd", probabilities, value) * counts[..., None, None]
    rows = oracle.divergence(oracle.index_scores(*index), probabilities, mask | ~counts[..., None])
    return out, (rows * counts).mean()


def visible(starts, ends):
    position = torch.arange(ROWS)
    return ((starts[..., None] <= position) & (position < ends[..., None])).expand(BATCH, ROWS, ROWS)


CAUSAL = visible(*packed_ranges(ROWS))
HOLES = torch.arange(1, ROWS + 1).index_fill(0, torch.tensor([5, 11, 12]), 0)
ROW_KINDS = {
    "causal": ({}, CAUSAL),
    "packed": (
        {"form": dsa.RowForm((10, 14, 20, 4))},
        torch.stack([visible(*packed_ranges(*lengths))[0] for lengths in ((10, 14), (20, 4))]),
    ),
    "holes": (
        # Rows 5, 11 and 12 see no key, like padding inside of a document.
        {"ends": HOLES},
        visible(torch.zeros(ROWS), HOLES),
    ),
    "windows": (
        {"starts": (torch.arange(ROWS) - 11).clamp_min(0), "ends": torch.arange(ROWS) + 1},
        visible((torch.arange(ROWS) - 11).clamp_min(0), torch.arange(ROWS) + 1),
    ),
}


@pytest.mark.parametrize("rows", ROW_KINDS)
@pytest.mark.parametrize("stage", ["sparse", "warmup"])
@pytest.mark.parametrize("absorbed", [True, False], ids=["absorbed", "by head"])
def test_the_function_is_the_formula_with_gradients(rows, stage, absorbed):
    options, sees = ROW_KINDS[rows]
    main = main_inputs(absorbed)
    index = [x.double().requires_grad_() for x in indexer_inputs(BATCH, ROWS, heads=INDEX_HEADS)]
    result = dsa.deepseek_sparse_attention(
        *main,
        *index,
        topk=TOPK,
        softmax_scale=SCALE,
        value_dim=VALUE if absorbed else None,
        stage=stage,
        with_loss=True,
        **options,
    )
    mask = sees
    if stage == "sparse":
        ranked = oracle.index_scores(*index).masked_fill(~sees, -torch.inf).topk(TOPK, dim=-1).indices
        mask = torch.zeros_like(sees).scatter(-1, ranked, True) & sees
        assert torch.equal(oracle.selected_mask(result.topk_indices, ROWS), mask)
    else:
        assert result.topk_indices is None
    out, loss = expected(*main, index, mask)
    oracle.assert_close(result.out, out)
    oracle.assert_close(result.loss, loss)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    leaves = [x for x in (*main, *index) if x is not None]
    ours = torch.autograd.grad((result.out * weight).sum() + result.loss, leaves)
    theirs = torch.autograd.grad((out * weight).sum() + loss, leaves)
    for mine, reference in zip(ours, theirs, strict=True):
        oracle.assert_close(mine, reference, backward=True)


def test_the_loss_reaches_the_indexer_and_the_output_the_model_alone():
    main = main_inputs(False, torch.float32)
    index = [x.requires_grad_() for x in indexer_inputs(BATCH, ROWS, heads=INDEX_HEADS)]
    options = {"topk": TOPK, "softmax_scale": SCALE}
    result = dsa.deepseek_sparse_attention(*main, *index, with_loss=True, **options)
    of_loss = torch.autograd.grad(result.loss, [*main, *index], retain_graph=True, allow_unused=True)
    of_out = torch.autograd.grad(result.out.sum(), [*main, *index], allow_unused=True)
    assert [x is None for x in of_loss] == [True] * 3 + [False] * 3
    assert [x is None for x in of_out] == [False] * 3 + [True] * 3
    without = dsa.deepseek_sparse_attention(*main, *index, **options)
    assert without.loss is None
    assert torch.equal(without.out, result.out)


@pytest.mark.parametrize("absorbed", [True, False], ids=["absorbed", "by head"])
def test_rows_that_see_no_more_than_topk_attend_densely(absorbed):
    main = main_inputs(absorbed)
    index = [x.double().requires_grad_() for x in indexer_inputs(BATCH, ROWS, heads=INDEX_HEADS)]
    result = dsa.deepseek_sparse_attention(
        *main,
        *index,
        topk=ROWS,
        softmax_scale=SCALE,
        value_dim=VALUE if absorbed else None,
        with_loss=True,
    )
    out, loss = expected(*main, index, CAUSAL)
    assert result.topk_indices is None
    oracle.assert_close(result.out, out)
    oracle.assert_close(result.loss, loss)


@pytest.mark.parametrize("rows", [{"form": dsa.RowForm()}, {"ends": torch.tensor([ROWS - 1, ROWS])}])
@pytest.mark.parametrize("topk", [TOPK, ROWS], ids=["sparse", "dense"])
def test_rows_behind_a_cache_are_the_last_rows(rows, topk):
    main = main_inputs(False, torch.float32)
    index = indexer_inputs(BATCH, ROWS, heads=INDEX_HEADS)
    options = {"topk": topk, "softmax_scale": SCALE}
    whole = dsa.deepseek_sparse_attention(*main, *index, **options)
    last = dsa.deepseek_sparse_attention(
        main[0][:, -2:],
        *main[1:],
        index.query[:, -2:],
        index.key,
        index.weights[:, -2:],
        **rows,
        **options,
    )
    oracle.assert_close(last.out, whole.out[:, -2:].detach())
    if topk == TOPK:
        assert torch.equal(last.topk_indices.sort(-1).values, whole.topk_indices[:, -2:].sort(-1).values)


def test_keys_of_another_layer_are_attended_to_without_an_indexer():
    main = main_inputs(False)
    index = [x.double() for x in indexer_inputs(BATCH, ROWS, heads=INDEX_HEADS)]
    options = {"topk": TOPK, "softmax_scale": SCALE}
    first = dsa.deepseek_sparse_attention(*main, *index, **options)
    keys = dsa.IndexerOutput(first.topk_indices, None)
    doubled = [2 * x for x in main]
    second = dsa.deepseek_sparse_attention(*doubled, None, None, None, selected=keys, **options)
    out, _ = expected(*doubled, index, oracle.selected_mask(first.topk_indices, ROWS))
    oracle.assert_close(second.out, out)
    assert second.topk_indices is first.topk_indices


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("absorbed", [True, False], ids=["absorbed", "by head"])
def test_scores_of_another_layer_are_enough_for_the_loss(absorbed, backend):
    main = main_inputs(absorbed)
    index = [x.double().requires_grad_() for x in indexer_inputs(BATCH, ROWS, heads=INDEX_HEADS)]
    mask = torch.ones(BATCH, ROWS, dtype=torch.bool)
    mask[0, :9] = False
    options = {"topk": TOPK, "softmax_scale": SCALE, "value_dim": VALUE if absorbed else None}
    options |= {"with_loss": True, "row_mask": mask, "backend": backend}
    selected = dsa.lightning_indexer(*index, TOPK)
    whole = dsa.deepseek_sparse_attention(*main, *index, selected=selected, **options)
    theirs = torch.autograd.grad(whole.loss, index, retain_graph=True)
    given = dsa.IndexerOutput(selected.topk_indices, selected.topk_scores.detach().requires_grad_())
    alone = dsa.deepseek_sparse_attention(*main, None, None, None, selected=given, **options)
    oracle.assert_close(alone.loss, whole.loss)
    (slope,) = torch.autograd.grad(alone.loss, given.topk_scores)
    for ours, expected_slope in zip(
        torch.autograd.grad(selected.topk_scores, index, slope), theirs, strict=True
    ):
        oracle.assert_close(ours, expected_slope)
    keys = dsa.IndexerOutput(selected.topk_indices, None)
    with pytest.raises(ValueError, match="the loss can take their scores"):
        dsa.deepseek_sparse_attention(*main, None, None, None, selected=keys, **options)


WRONG = {
    "stage": ({"stage": "dense"}, "stage must be .sparse. or .warmup., got .dense."),
    "value_dim": ({"value_dim": 4}, "value_dim goes with an absorbed key"),
    "form and ends": ({"form": dsa.RowForm(), "ends": torch.arange(ROWS)}, "pass one or the other"),
    "form": ({"form": dsa.RowForm((5,))}, "do not fill"),
    "no indexer": ({"index_key": None}, "need the indexer's query, key and weights"),
}


@pytest.mark.parametrize("name", WRONG)
def test_bad_input_is_named(name):
    options, message = WRONG[name]
    index = {f"index_{name}": x for name, x in indexer_inputs(BATCH, ROWS)._asdict().items()}
    arguments = {"topk": TOPK, "softmax_scale": SCALE, **index, **options}
    main = main_inputs(False, torch.float32)
    with pytest.raises(ValueError, match=message):
        dsa.deepseek_sparse_attention(*main, **arguments)


NARROW = torch.zeros(BATCH, ROWS, HEADS, DIM)
UNLIKE = {
    "value wider than its key": (
        (NARROW, NARROW, torch.zeros(BATCH, ROWS, HEADS, DIM + 1)),
        {},
        "no wider than keys, 10; got 11",
    ),
    "fewer heads of keys": (
        (NARROW, NARROW[:, :, :1], NARROW[:, :, :1]),
        {},
        r"key must be \[2, keys, 3, 10\]",
    ),
    "another batch": ((NARROW, NARROW[:1], NARROW[:1]), {}, r"key must be \[2, keys, 3, 10\]"),
    "fewer values than keys": ((NARROW, NARROW, NARROW[:, :1]), {}, r"value must be \[2, 24, 3, value_dim\]"),
    "a wider value_dim": (
        (NARROW, NARROW[:, :, 0], None),
        {"value_dim": DIM + 1},
        r"lie in \[1, 10\], got 11",
    ),
    "another dtype": ((NARROW, NARROW.bfloat16(), NARROW), {}, "must have the dtype and device of query"),
    "no keys to select": ((NARROW, NARROW, NARROW), {"topk": 0}, "topk must be at least 1, got 0"),
}


@pytest.mark.parametrize("stage", ["sparse", "warmup"])
@pytest.mark.parametrize("name", UNLIKE)
def test_operands_that_do_not_fit_are_named_where_attention_is_dense(name, stage):
    # PyTorch's attention would broadcast these operands and silently compute another function.
    main, options, message = UNLIKE[name]
    options = {"topk": ROWS, "softmax_scale": SCALE, "stage": stage, **options}
    with pytest.raises(ValueError, match=message):
        dsa.deepseek_sparse_attention(*main, *indexer_inputs(BATCH, ROWS), **options)


def test_nothing_to_attend_to_is_nothing_in_every_form():
    main = [x[:0] for x in main_inputs(False, torch.float32)]
    index = [x[:0] for x in indexer_inputs(BATCH, ROWS)]
    for options, _ in (ROW_KINDS["windows"], ROW_KINDS["causal"]):
        result = dsa.deepseek_sparse_attention(*main, *index, topk=ROWS, softmax_scale=SCALE, **options)
        assert result.out.shape == (0, ROWS, HEADS, VALUE)


def test_without_numpy_the_indexer_is_the_slow_one(monkeypatch):
    # torch runs without NumPy, but the fast selection on CPUs needs it.
    monkeypatch.setattr(
        cpu, "find_spec", lambda name: None if name == "numpy" else pytest.fail(f"{name} was asked for")
    )
    with pytest.raises(dsa.BackendUnavailable, match="needs NumPy, which is not installed"):
        # Five heads: a shape class that no other test uses, because choices are cached.
        dsa.lightning_indexer(*indexer_inputs(BATCH, ROWS, heads=5), TOPK, backend="cpu")


@pytest.mark.full
def test_compiled_models_run_the_operators_between_graphs():
    module = dsa.DeepSeekSparseAttention(
        dsa.Indexer(12, heads=4, head_dim=8, rope_dim=4), topk=TOPK, softmax_scale=SCALE
    )
    hidden, main = torch.randn(BATCH, ROWS, 12), main_inputs(False, torch.float32)

    def step(hidden, *main):
        out, loss, _ = module(hidden * 2, *main, angles=torch.ones(ROWS, 2))
        return out.square().sum() + loss

    leaves = [*main, *module.parameters()]
    plain = step(hidden, *main)
    compiled = torch.compile(step, backend="aot_eager")(hidden, *main)
    assert torch.equal(compiled, plain)
    for mine, theirs in zip(
        torch.autograd.grad(compiled, leaves), torch.autograd.grad(plain, leaves), strict=True
    ):
        assert torch.allclose(mine, theirs, rtol=1e-5, atol=1e-6)


# -- module ------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", ["first", "last"])
@pytest.mark.parametrize("layout", ["halves", "pairs"])
def test_the_indexer_is_the_formula(layout, at):
    # The expected rotation multiplies complex numbers, in fp64.
    torch.manual_seed(1)
    indexer = dsa.Indexer(12, 9, heads=4, head_dim=8, rope_dim=6, rope_layout=layout, rope_at=at).double()
    hidden, latent = (torch.randn(BATCH, ROWS, width, dtype=torch.float64) for width in (12, 9))
    angles = torch.rand(BATCH, ROWS, 3, dtype=torch.float64)
    query, key, weights = indexer(hidden, latent, angles)

    def turned(x):
        x = x if at == "first" else x.roll(6, -1)
        first, second = (x[..., 0:6:2], x[..., 1:6:2]) if layout == "pairs" else (x[..., :3], x[..., 3:6])
        z = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles)[:, :, None]
        return torch.cat([z.real, z.imag, x[..., 6:]], dim=-1)

    plain_query = (latent @ indexer.wq_b.weight.T).view(BATCH, ROWS, 4, 8)
    plain_key = torch.layer_norm(hidden @ indexer.wk.weight.T, (8,), None, None, 1e-6)[:, :, None]
    # The layout decides the order of coordinates; dot products do not depend on it.
    products = torch.einsum("bthd,bsd->bths", query, key)
    oracle.assert_close(products, torch.einsum("bthd,bsid->bths", turned(plain_query), turned(plain_key)))
    projected = (hidden.float() @ indexer.weights_proj.weight.T.float()).double()
    assert torch.allclose(weights.double(), projected * (4 * 8) ** -0.5, rtol=1e-5, atol=1e-7)


def test_the_indexer_is_that_of_hy_v4():
    modeling = pytest.importorskip("transformers.models.hy_v4.modeling_hy_v4")
    sizes = {"hidden_size": 12, "q_lora_rank": 9, "index_n_heads": 24, "index_head_dim": 8}
    config = SimpleNamespace(**sizes, qk_rope_head_dim=6, index_topk=TOPK, rms_norm_eps=1e-3)
    theirs = modeling.HYV4Indexer(config, 0)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_()
    norm = {"key_norm_dtype": torch.float32, "key_norm_eps": 1e-3}
    ours = dsa.Indexer(12, 9, heads=24, head_dim=8, rope_dim=6, rope_at="last", dtype=torch.bfloat16, **norm)
    theirs.wq_b.bfloat16()
    theirs.wk.bfloat16()
    ours.load_state_dict(theirs.state_dict())
    assert ours.k_norm.weight.dtype == torch.float32
    hidden, latent = (torch.randn(BATCH, ROWS, width).bfloat16() for width in (12, 9))
    angles = torch.rand(ROWS, 3)
    twice = torch.cat([angles, angles], -1)[None].expand(BATCH, -1, -1)
    rotary = twice.cos().bfloat16(), twice.sin().bfloat16()
    mask = torch.zeros(BATCH, ROWS, ROWS).masked_fill(~CAUSAL, -torch.inf)
    chosen = theirs(hidden, latent, rotary, mask, None)
    found = dsa.lightning_indexer(*ours(hidden, latent, angles), TOPK).topk_indices
    their_mask = oracle.selected_mask(chosen, ROWS) & CAUSAL
    # Rotations are rounded in other places, so keys with nearly equal scores may change places.
    same = (oracle.selected_mask(found, ROWS) & their_mask).sum() / their_mask.sum()
    assert same > 0.97


def test_the_indexer_under_autocast_has_operands_of_one_dtype_and_weights_of_its_projection():
    # On accelerators, a norm under autocast returns fp32. The hook imitates that.
    indexer = dsa.Indexer(12, heads=4, head_dim=8, rope_dim=0)
    indexer.k_norm.register_forward_hook(lambda module, given, out: out.float())
    hidden = torch.randn(BATCH, ROWS, 12)
    plain = indexer(hidden)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        query, key, weights = indexer(hidden)
    assert query.dtype == key.dtype == torch.bfloat16
    assert torch.equal(weights, plain.weights)


def test_the_module_trains_its_indexer_alone_and_when_asked():
    module = dsa.DeepSeekSparseAttention(
        dsa.Indexer(12, heads=4, head_dim=8, rope_dim=0), topk=TOPK, softmax_scale=SCALE
    )
    hidden = torch.randn(BATCH, ROWS, 12, requires_grad=True)
    main = main_inputs(False, torch.float32)
    result = module(hidden, *main)
    result.loss.backward()
    assert all(parameter.grad is not None for parameter in module.parameters())
    assert hidden.grad is None
    assert module(hidden, *main, with_loss=False).loss is None
    with torch.no_grad():
        assert module(hidden, *main).loss is None
    assert module.eval()(hidden, *main).loss is None
    module.train().stage = "warmup"
    warm = module(hidden, *main)
    out, _ = expected(*(x.double() for x in main), [x.double() for x in module.indexer(hidden)], CAUSAL)
    assert torch.allclose(warm.out.double(), out, atol=1e-5)
    assert warm.loss is not None
    assert warm.topk_indices is None


def test_the_former_spelling_of_warmup_is_the_stage():
    options = {"topk": TOPK, "softmax_scale": SCALE}
    operands = *main_inputs(False, torch.float32), *indexer_inputs(BATCH, ROWS)
    former, plain = (
        dsa.deepseek_sparse_attention(*operands, stage=stage, **options) for stage in ("warm-up", "warmup")
    )
    assert former.topk_indices is None
    assert torch.equal(former.out, plain.out)


def test_the_module_gives_what_the_function_does():
    module = dsa.DeepSeekSparseAttention(
        dsa.Indexer(12, heads=4, head_dim=8, rope_dim=0), topk=TOPK, softmax_scale=SCALE
    )
    hidden, main = (
        torch.randn(1, BATCH * ROWS, 12),
        [x.flatten(0, 1)[None] for x in main_inputs(False, torch.float32)],
    )
    rows = {"form": dsa.RowForm((30, 18)), "reduction": "sum"}
    ours = module(hidden, *main, **rows)
    theirs = dsa.deepseek_sparse_attention(
        *main, *module.indexer(hidden), topk=TOPK, softmax_scale=SCALE, with_loss=True, **rows
    )
    for mine, reference in zip(ours, theirs, strict=True):
        assert torch.equal(mine, reference)


# -- the interface and its page ----------------------------------------------------------------


def interface():
    """Return each exported name with its parameters, its fields, or its value."""
    entries = {}
    for name in dsa.__all__:
        thing = getattr(dsa, name)
        if hasattr(thing, "_fields"):
            entries[name] = list(thing._fields)
        elif inspect.isfunction(thing) or inspect.isclass(thing):
            called = thing.__init__ if inspect.isclass(thing) else thing
            parameters = inspect.signature(called).parameters.values()
            entries[name] = [str(one.replace(annotation=inspect.Parameter.empty)) for one in parameters]
            if issubclass(type(thing), type) and issubclass(thing, torch.nn.Module):
                forward = inspect.signature(thing.forward).parameters.values()
                entries[f"{name}.forward"] = [
                    str(one.replace(annotation=inspect.Parameter.empty)) for one in forward
                ]
        else:
            entries[name] = str(thing)
    return entries


def test_the_interface_is_the_recorded_one():
    """A change of the interface needs a new INTERFACE number and a new record; see its docstring."""
    current = interface()
    assert json.loads(RECORD.read_text()) == current, (
        f"write this to {RECORD.relative_to(ROOT)}:\n{json.dumps(current, indent=1)}"
    )


def test_the_page_names_everything_that_is_exported():
    page = (ROOT / "docs/hosts/operators.md").read_text()
    assert [name for name in dsa.__all__ if f"`{name}" not in page] == []


def run_example(capsys, example):
    """Return the losses of the model and the indexer, at the first and at the last step."""
    torch.manual_seed(0)
    exec(compile(example, "docs/hosts/operators.md", "exec"), {"__name__": "page"})
    lines = [tuple(map(float, line.split())) for line in capsys.readouterr().out.splitlines()]
    return lines[0][1:], lines[-1][1:]


def test_the_example_of_the_page_trains_model_and_indexer(capsys):
    page = (ROOT / "docs/hosts/operators.md").read_text()
    (example,) = re.findall(r"## A layer that trains\n.*?```python\n(.*?)```", page, re.DOTALL)
    assert not re.search("megatron", example, re.IGNORECASE)
    (first, _), (last, of_indexer) = run_example(capsys, example)
    assert last < 0.5 * first
    without = example.replace("(loss + indexer_loss).backward()", "loss.backward()")
    assert without != example
    _, (_, of_untrained) = run_example(capsys, without)
    assert of_indexer < 0.8 * of_untrained
