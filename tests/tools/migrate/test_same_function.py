"""Sparse attention of MindSpeed-LLM and of Megatron with the translated flags computes the same function.

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
    """Return the model's fields for a command line translated for Megatron-core 0.16.1."""
    flags = {each.flag: each.values for each in translate(split(line.split())[1], Version("0.16.1")).flags}
    switches: dict[str, Any] = {}
    for flag in FLAGS:
        if flag.name in flags:
            switches[flag.dest] = flag.type(flags[flag.name][0]) if flag.kind == "value" else True
        elif f"--no-{flag.name[2:]}" in flags:
            switches[flag.dest] = False
    return switches


@pytest.fixture(scope="module")
def steps(pool: Any) -> Any:
    """Run one step for each line."""
    return {
        name: pool.run(f"{CASES}:one_step", 1, switches=switches_of(line), overrides=OVERRIDES)[0]
        for name, line in LINES.items()
    }


def theirs(step: dict[str, Any], line: str) -> Tensor:
    """Return MindSpeed-LLM's scores of all pairs, ``[batch, seq, seq]``, fp64, without a mask."""
    weight = {name: tensor.double() for name, tensor in step["parameters"].items()}
    x, latent = step["x"].double(), step["latent"].double()
    if (
        "--enable-mla-absorb" in line
    ):  # else a closure normalises another variable, and the indexer reads the old one
        root = latent.square().mean(-1, keepdim=True).add(EPSILON).sqrt()
        latent = latent / root * step["norm"].double()
    query = (latent @ weight["linear_wq_b.weight"].T).unflatten(-1, (HEADS, SIZE))
    key = F.layer_norm(
        x @ weight["linear_wk.weight"].T,
        (SIZE,),
        weight["k_norm.weight"],
        weight["k_norm.bias"],
        1e-6,  # for any --norm-epsilon
    )[:, :, None]
    in_pairs = "--apply-rope-no-in-complex" in line
    query, key = (turned_first(tensor, in_pairs) for tensor in (query, key))
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
    """The lines cover query, rotary dimensions, key norm epsilon, scale of weights, heads and Hadamard."""
    step = steps[name]
    expected = theirs(step, LINES[name])
    torch.testing.assert_close(step["scores"].double(), expected, rtol=1e-4, atol=1e-5)
    for other in set(LINES) - {name}:
        assert not torch.allclose(expected, theirs(step, LINES[other]), rtol=1e-2), "the lines are told apart"


def masked(scores: Tensor) -> Tensor:
    """Hide keys after the query."""
    length = scores.size(-1)
    return scores.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)


def loss_of(step: dict[str, Any], line: str, over_all_keys: bool = False) -> float:
    """Return MindSpeed-LLM's indexer loss, with ``1e-8`` in both logarithms.

    Args:
        step: result of :func:`steps`.
        line: flags.
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
    """Target of the selected keys, equal heads, mean over rows and samples, and the coefficient agree."""
    step = steps[name]
    assert step["loss"] == pytest.approx(loss_of(step, LINES[name]), rel=1e-4)


def test_the_loss_of_absorbed_attention_without_the_fused_one_is_another(steps: Any) -> None:
    """A head counts there by its probability on the selected keys; the translation says so."""
    name = "DeepSeek-V3.2"
    other = loss_of(steps[name], LINES[name], over_all_keys=True)
    assert abs(other - steps[name]["loss"]) > 1e-2 * steps[name]["loss"]
    for left_out, said in (("", False), (" --use-fused-lightning-indexer-loss", True)):
        flags = split(LINES[name].replace(left_out, "").split())[1]
        outcome = translate(flags, Version("0.16.1")).outcomes[0]
        assert ("the indexer loss has other values" in outcome.why) == said


def test_rotary_dimensions_of_the_main_attention(pool: Any) -> None:
    """Both sides rotate neighbours; Megatron stores them in another order, which no product depends on."""
    (rotated,) = pool.run(f"{CASES}:main_rotary", 1, size=ROTARY)
    query, key = rotated["before"].double()
    angle = rotated["angles"].double()[..., : ROTARY // 2]
    turn = torch.polar(torch.ones_like(angle), angle)
    turned = [
        torch.view_as_real(torch.view_as_complex(each.unflatten(-1, (-1, 2)).contiguous()) * turn).flatten(-2)
        for each in (query, key)
    ]
    ours = torch.einsum("sbhd,tbhd->st", *rotated["after"].double())
    torch.testing.assert_close(ours, torch.einsum("sbhd,tbhd->st", *turned), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(rotated["after"][0], turned[0].float()), "the dimensions lie elsewhere"


@pytest.mark.parametrize(
    ("scales", "in_complex", "mscale", "all_dims"),
    [
        pytest.param("1.0 1.0", True, 1.0, 1.0, marks=pytest.mark.full),
        ("1.0 0.5", True, 0.5, 0.5),
        pytest.param("1.0 0.5", False, 1.0, 0.5, marks=pytest.mark.full),
    ],
)
def test_magnitudes_of_yarn(pool: Any, scales: str, in_complex: bool, mscale: float, all_dims: float) -> None:
    """With complex numbers MindSpeed-LLM rotates without the magnitude; scores always have it."""
    first, second = scales.split()
    line = (
        f"{ABSORBED} --multi-latent-attention --rope-scaling-type yarn --rope-scaling-factor 40 "
        f"--rope-scaling-mscale {first} --rope-scaling-mscale-all-dim {second}"
    )
    line += "" if in_complex else " --apply-rope-no-in-complex"
    flags = {each.flag: each.value for each in translate(split(line.split())[1], Version("0.16.1")).flags}
    said = {"mscale": float(flags["--mscale"]), "mscale_all_dim": float(flags["--mscale-all-dim"])}
    assert said == {"mscale": mscale, "mscale_all_dim": all_dims}
    overrides = OVERRIDES | said | {"rope_type": "yarn", "rotary_scaling_factor": 40.0}
    (step,) = pool.run(f"{CASES}:one_step", 1, switches=switches_of(line), overrides=overrides)

    def magnitude(scale: float) -> float:
        return 0.1 * scale * torch.tensor(40.0).log().item() + 1

    ratio = 1.0 if in_complex else magnitude(float(first)) / magnitude(float(second))
    assert step["magnitude"] == pytest.approx(ratio)
    assert step["softmax_scale"] == pytest.approx(16**-0.5 * magnitude(float(second)) ** 2)
