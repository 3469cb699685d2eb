"""YaRN flags of latent attention: frequencies follow the formula, and bad arguments are refused.

Runs on the release of the quick tests, too.
"""

from __future__ import annotations

import math
from argparse import Namespace

import pytest
import torch
from packaging.specifiers import SpecifierSet

from mindspeed_dsa.features.attention.latent_yarn.feature import FIELDS, Options, check_yarn
from mindspeed_dsa.patches import versions

pytestmark = pytest.mark.releases(">=0.12.1,<0.21", quick=True)

CASES = "tests.features.attention.latent_yarn.stretched_angles"
RELEASE = str(versions.of_megatron())
LACKS_ORIGINAL = RELEASE in SpecifierSet("<0.14", prereleases=True)
GLM = {"yarn_original_max_position_embeddings": 202752}
KIMI = {"yarn_beta_fast": 1.0, "yarn_beta_slow": 1.0}


def frequencies(size: int, base: float, factor: float, original: float, fast: float, slow: float):
    """Return YaRN's frequencies, fp64 ``[size / 2]`` (arXiv 2309.00071, section 3.2).

    A dimension turns ``original * base^(-2i/size) / 2 pi`` times within the original length. Above ``fast``
    turns its frequency is kept, and below ``slow`` turns it is divided by the factor. A linear ramp connects
    both; its ends are whole dimensions, as in DeepSeek's code.
    """

    def dimension(turns: float) -> float:
        return size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = max(math.floor(dimension(fast)), 0), min(math.ceil(dimension(slow)), size - 1)
    plain = base ** (-torch.arange(0, size, 2).double() / size)
    ramp = ((torch.arange(size // 2).double() - low) / (max(high - low, 0.001))).clamp(0, 1)
    return plain / factor * ramp + plain * (1 - ramp)


@pytest.mark.parametrize(
    ("switches", "said"),
    [
        ({}, (4096, 32, 1)),
        (GLM, (202752, 32, 1)),
        (KIMI, (4096, 1, 1)),
        ({"yarn_beta_fast": 256.0, "yarn_beta_slow": 8.0}, (4096, 256, 8)),
    ],
    ids=["Megatron's", "GLM-5", "Kimi-K2", "both turns"],
)
def test_frequencies_are_those_of_the_formula(pool, switches, said):
    if LACKS_ORIGINAL and switches is GLM:
        pytest.skip("this release reads --max-position-embeddings")
    overrides = {"qk_pos_emb_head_dim": 16, "rotary_scaling_factor": 40.0, "rotary_base": 10000}
    (angles,) = pool.run(f"{CASES}:angles", 1, switches=switches, overrides=overrides)
    expected = frequencies(16, 10000, 40, *said)
    for part in ("main", "indexer"):
        torch.testing.assert_close(angles[part], expected.repeat(2), rtol=1e-5, atol=1e-7)
    if switches:
        stock = frequencies(16, 10000, 40, 4096, 32, 1)
        assert not torch.allclose(expected, stock, rtol=1e-3), "the case tells them apart"


def test_a_field_that_is_passed_and_a_setting(pool):
    values = {"beta_fast": 8.0, "beta_slow": 2.0}
    switches = {f"yarn_{name}": value for name, value in values.items()}
    (found,) = pool.run(f"{CASES}:made", 1, switches=switches, overrides={"beta_fast": 8.0})
    assert {name: found[name] for name in values} == values
    (said,) = pool.run(f"{CASES}:refused", 1, switches=switches, overrides={"beta_fast": 9.0})
    assert "beta_fast=9.0 is passed to it, and --yarn-beta-fast says 8.0" in said
    (said,) = pool.run(f"{CASES}:refused", 1, switches=switches, overrides={"rope_type": "rope"})
    assert "--rope-type rope has no YaRN" in said


@pytest.mark.parametrize(
    ("release", "args", "values", "said"),
    [
        ("0.16.1", {"multi_latent_attention": True}, {"yarn_beta_fast": 8.0}, None),
        ("0.16.1", {"multi_latent_attention": False}, {"yarn_beta_fast": 8.0}, "for latent attention alone"),
        ("0.19.0", {"multi_latent_attention": False}, {"yarn_beta_fast": 8.0}, None),
        ("0.13.1", {}, GLM, "--max-position-embeddings; say it there"),
        ("0.12.1", {}, {"yarn_beta_slow": 2.0}, None),
        ("0.16.1", {}, {"yarn_beta_slow": 0.0}, "--yarn-beta-slow 0.0: use a number above 0"),
        ("0.16.1", {}, {"yarn_beta_slow": 33.0}, "--yarn-beta-fast 32.0 is below --yarn-beta-slow 33.0"),
    ],
)
def test_arguments_that_cannot_be(release, args, values, said):
    args = Namespace(**args, **values)
    options = Options({FIELDS[name]: value for name, value in values.items()}, release)
    problems = list(check_yarn(args, options))
    assert len(problems) == (said is not None)
    assert said is None or said in problems[0]
