"""Sparse attention of MindSpeed-LLM and of Megatron with the translated flags: what is one function.

The formulas are written in fp64 from MindSpeed-LLM's sources (``dsa_indexer.py`` and
``multi_latent_attention.py`` of July 2026); each is a row of the table in ``docs/migrate.md``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from packaging.version import Version
from torch import Tensor

from mindspeed_dsa.features.dsa.model.feature import FLAGS
from mindspeed_dsa.tools.migrate.job import split
from mindspeed_dsa.tools.migrate.translate import translate

CASES = "tests.tools.migrate.indexer_step"
HEADS, SIZE, ROTARY, TOPK, EPSILON = 4, 16, 8, 6, 1e-2
SIZES = f"--index-n-heads {HEADS} --index-head-dim {SIZE} --index-topk {TOPK} --indexer-loss-coeff 0.5"
FUSED = "--use-sparse-flash-attn --use-fused-lightning-indexer-loss"
ABSORBED = f"--enable-dsa-indexer --enable-mla-absorb {SIZES} {FUSED}"
LINES = {
    "DeepSeek-V3.2": ABSORBED,
    "GLM-5.2": f"{ABSORBED} --apply-rope-no-in-complex --no-use-sparse-c8-indexer",
    "without absorption": f"--enable-dsa-indexer {SIZES}",
}
OVERRIDES = {
    "dsa_indexer_n_heads": HEADS,
    "dsa_indexer_head_dim": SIZE,
    "dsa_indexer_topk": TOPK,
    "dsa_indexer_loss_coeff": 0.5,
    "layernorm_epsilon": EPSILON,
}


def switches_of(line: str) -> dict[str, Any]:
    """Fields of the model that a command line has once it is translated for Megatron-core 0.16.1."""
    given = {each.flag: each.values for each in translate(split(line.split())[1], Version("0.16.1")).flags}
    found: dict[str, Any] = {}
    for flag in FLAGS:
        if flag.name in given:
            found[flag.dest] = flag.type(given[flag.name][0]) if flag.kind == "value" else True
        elif f"--no-{flag.name[2:]}" in given:
            found[flag.dest] = False
    return found


@pytest.fixture(scope="module")
def steps(pool: Any) -> Any:
    """One step of each line."""
    return {
        name: pool.run(f"{CASES}:one_step", 1, switches=switches_of(line), overrides=OVERRIDES)[0]
        for name, line in LINES.items()
    }


def theirs(step: dict[str, Any], line: str) -> Tensor:
    """Return MindSpeed-LLM's scores of all pairs, ``[batch, seq, seq]``, fp64, without a mask."""
    weight = {name: each.double() for name, each in step["parameters"].items()}
    x, latent = step["x"].double(), step["latent"].double()
    if (
        "--enable-mla-absorb" in line
    ):  # else a closure normalises a name of its own, and the indexer the old one
        root = latent.square().mean(-1, keepdim=True).add(EPSILON).sqrt()
        latent = latent / root * step["norm"].double()
    query = (latent @ weight["linear_wq_b.weight"].T).unflatten(-1, (HEADS, SIZE))
    key = F.layer_norm(
        x @ weight["linear_wk.weight"].T,
        (SIZE,),
        weight["k_norm.weight"],
        weight["k_norm.bias"],
        1e-6,  # whatever --norm-epsilon says
    )[:, :, None]
    in_pairs = "--apply-rope-no-in-complex" in line
    query, key = (turned_first(each, in_pairs) for each in (query, key))
    weights = x @ weight["linear_weights_proj.weight"].T * HEADS**-0.5 * SIZE**-0.5
    products = torch.einsum("sbhd,tbd->bsht", query, key[:, :, 0]).relu()
    return torch.einsum("bsht,sbh->bst", products, weights)


def turned_first(x: Tensor, in_pairs: bool) -> Tensor:
    """Rotate the first dimensions of ``[seq, batch, heads, dim]`` as complex numbers."""
    rotary, plain = x.split([ROTARY, SIZE - ROTARY], -1)
    pairs = rotary.unflatten(-1, (ROTARY // 2, 2)) if in_pairs else rotary.unflatten(-1, (2, ROTARY // 2)).mT
    angle = torch.arange(len(x)).double()[:, None] * 10000.0 ** (
        -torch.arange(0, ROTARY, 2).double() / ROTARY
    )
    turn = torch.polar(torch.ones_like(angle), angle)[:, None, None]
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn).mT.flatten(-2)
    return torch.cat([turned, plain], -1)


@pytest.mark.parametrize("name", LINES)
def test_scores_of_the_indexer(steps: Any, name: str) -> None:
    """Query, rotary dimensions, epsilon of the key norm, scale of weights, heads; Hadamard on or off."""
    step = steps[name]
    expected = theirs(step, LINES[name])
    torch.testing.assert_close(step["scores"].double(), expected, rtol=1e-4, atol=1e-5)
    for other in set(LINES) - {name}:
        assert not torch.allclose(expected, theirs(step, LINES[other]), rtol=1e-2), "the lines are told apart"


def masked(scores: Tensor) -> Tensor:
    """Hide keys behind the query."""
    length = scores.size(-1)
    return scores.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)


def loss_of(step: dict[str, Any], line: str, over_all_keys: bool = False) -> float:
    """Return MindSpeed-LLM's indexer loss, with ``1e-8`` in both logarithms.

    Args:
        step: of :func:`steps`.
        line: the flags.
        over_all_keys: whether heads are softmaxes over all keys, later ones too, as without the fused loss.
    """
    topk, indices = masked(theirs(step, line)).topk(TOPK, -1)
    seen = topk > -torch.inf
    main = torch.einsum("sbhd,tbhd->bhst", step["query"].double(), step["key"].double())
    main = main * step["softmax_scale"]
    if over_all_keys:
        indices = indices.masked_fill(~seen, main.size(-1) - 1)
    else:
        chosen = torch.zeros(main.size(0), main.size(2), main.size(3), dtype=torch.bool)
        main = main.masked_fill(~chosen.scatter(-1, indices, seen)[:, None], -torch.inf)
    target = F.normalize(main.softmax(-1).sum(1).gather(-1, indices), p=1, dim=-1)
    loss = F.kl_div((topk.softmax(-1) + 1e-8).log(), target + 1e-8, reduction="none")
    return 0.5 * loss.sum(-1).mean().item()


@pytest.mark.parametrize("name", LINES)
def test_the_indexers_loss(steps: Any, name: str) -> None:
    """Target of the selected keys, all heads alike; mean over rows and samples; the coefficient."""
    step = steps[name]
    assert step["loss"] == pytest.approx(loss_of(step, LINES[name]), rel=1e-4)


def test_the_loss_of_absorbed_attention_without_the_fused_one_is_another(steps: Any) -> None:
    """A head counts there by what it gives to the selected keys; the translation says so."""
    name = "DeepSeek-V3.2"
    other = loss_of(steps[name], LINES[name], over_all_keys=True)
    assert abs(other - steps[name]["loss"]) > 1e-2 * steps[name]["loss"]
    for left_out, said in (("", False), (" --use-fused-lightning-indexer-loss", True)):
        flags = split(LINES[name].replace(left_out, "").split())[1]
        outcome = translate(flags, Version("0.16.1")).outcomes[0]
        assert ("the indexer loss has other values" in outcome.why) == said


def test_rotary_dimensions_of_the_main_attention(pool: Any) -> None:
    """Neighbours are turned on both sides; Megatron writes them elsewhere, which no product sees."""
    (found,) = pool.run(f"{CASES}:main_rotary", 1, size=ROTARY)
    query, key = found["before"].double()
    angle = found["angles"].double()[..., : ROTARY // 2]
    turn = torch.polar(torch.ones_like(angle), angle)
    turned = [
        torch.view_as_real(torch.view_as_complex(each.unflatten(-1, (-1, 2)).contiguous()) * turn).flatten(-2)
        for each in (query, key)
    ]
    ours = torch.einsum("sbhd,tbhd->st", *found["after"].double())
    torch.testing.assert_close(ours, torch.einsum("sbhd,tbhd->st", *turned), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(found["after"][0], turned[0].float()), "the dimensions lie elsewhere"


@pytest.mark.parametrize(
    ("scales", "in_complex", "mscale", "all_dims"),
    [("1.0 1.0", True, 1.0, 1.0), ("1.0 0.5", True, 0.5, 0.5), ("1.0 0.5", False, 1.0, 0.5)],
)
def test_magnitudes_of_yarn(pool: Any, scales: str, in_complex: bool, mscale: float, all_dims: float) -> None:
    """In complex numbers MindSpeed-LLM turns by cosine and sine alone; scores have the magnitude always."""
    first, second = scales.split()
    line = (
        f"{ABSORBED} --multi-latent-attention --rope-scaling-type yarn --rope-scaling-factor 40 "
        f"--rope-scaling-mscale {first} --rope-scaling-mscale-all-dim {second}"
    )
    line += "" if in_complex else " --apply-rope-no-in-complex"
    given = {each.flag: each.value for each in translate(split(line.split())[1], Version("0.16.1")).flags}
    said = {"mscale": float(given["--mscale"]), "mscale_all_dim": float(given["--mscale-all-dim"])}
    assert said == {"mscale": mscale, "mscale_all_dim": all_dims}
    overrides = OVERRIDES | said | {"rope_type": "yarn", "rotary_scaling_factor": 40.0}
    (step,) = pool.run(f"{CASES}:one_step", 1, switches=switches_of(line), overrides=overrides)

    def magnitude(scale: float) -> float:
        return 0.1 * scale * torch.tensor(40.0).log().item() + 1

    ratio = 1.0 if in_complex else magnitude(float(first)) / magnitude(float(second))
    assert step["magnitude"] == pytest.approx(ratio)
    assert step["softmax_scale"] == pytest.approx(16**-0.5 * magnitude(float(second)) ** 2)
