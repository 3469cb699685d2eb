from __future__ import annotations

from argparse import Namespace

from mindspeed_dsa.features.operators.two_streams.validation import check_streams


def test_the_warm_up_stage_is_refused():
    """Half of the indexer's gradient was missing, silently."""
    args = Namespace(experimental_attention_variant="dsa", dsa_stage="warmup")
    (problem,) = check_streams(args, None)
    assert "--dsa-stage warmup" in problem
    args.dsa_stage = "sparse"
    assert not list(check_streams(args, None))
