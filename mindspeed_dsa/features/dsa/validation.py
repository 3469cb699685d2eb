"""Checks of the combinations of fused DSA and its warm-up stage."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from mindspeed_dsa import platforms
from mindspeed_dsa.megatron.dsa import PARTS, Options

_PACKAGES = {"triton": ("triton", "pip install triton"), "npu": ("torch_npu", "pip install torch_npu")}
_HOMES = {"cpu": "cpu", "triton": "cuda", "npu": "npu"}


def check_fused(args: Any) -> Sequence[str]:
    """Report invalid combinations; absent arguments are not checked."""
    chosen = Options.of(args)
    problems = []
    if getattr(args, "experimental_attention_variant", "dsa") != "dsa":
        problems.append(
            "these switches speed up DSA, and the model has none: add --experimental-attention-variant dsa "
            "or omit them"
        )
    package, command = _PACKAGES.get(chosen.backend, ("", ""))
    if package and find_spec(package) is None:
        problems.append(
            f"--dsa-backend {chosen.backend} needs the package {package}, which is not installed: {command}, "
            "or use --dsa-backend auto"
        )
    problems += _platform_problems(chosen.backend)
    problems += bf16_problems(chosen.cpu_bf16)
    if chosen.fuse_kl_in_backward:
        problems += _fuse_problems(chosen, args)
    if getattr(args, "delay_wgrad_compute", False) and chosen.absorb:
        problems.append(
            "the absorbed form has no delayed weight gradients; omit --delay-wgrad-compute or add "
            "--no-use-dsa-absorb"
        )
    return problems


def _platform_problems(backend: str) -> list[str]:
    """Report a named backend that does not support this platform; shapes are checked at the first call."""
    home, platform, interpreter = _HOMES.get(backend), platforms.current().name, ""
    if home in (None, platform):
        return []
    if backend == "triton" and platform == "cpu":
        if os.environ.get("TRITON_INTERPRET") == "1":
            return []
        interpreter = ", or set TRITON_INTERPRET=1 to run its kernels in the interpreter (slow, for tests)"
    problem = f"--dsa-backend {backend} runs on platform {home}, and this is {platform}"
    return [f"{problem}; use --dsa-backend auto{interpreter}"]


def bf16_problems(way: str) -> list[str]:
    """Report a way to multiply bf16 on CPUs that this process cannot go."""
    if way == "auto":
        return []
    if platforms.current().name != "cpu":
        return [f"--dsa-cpu-bf16 {way} is for platform cpu, and this is {platforms.current().name}; omit it"]
    from mindspeed_dsa.ops.cpu.bf16 import why_not_native

    problem = why_not_native() if way == "native" else ""
    return [f"--dsa-cpu-bf16 {way}: {problem}"] if problem else []


def _fuse_problems(chosen: Options, args: Any) -> list[str]:
    if chosen.warmup:
        problem = "--dsa-fuse-kl-in-backward needs the attention's backward, which --dsa-stage warmup lacks"
        return [f"{problem}; omit it"]
    problems = []
    chosen_parts = (chosen.absorb, chosen.indexer, chosen.attention, chosen.kl_loss)
    missing = [name for name, on in zip(PARTS, chosen_parts, strict=True) if not on]
    if missing:
        ways = [] if getattr(args, "use_fused_dsa", False) else ["add --use-fused-dsa"]
        refused = [_flag("no_" + name) for name in missing if getattr(args, name, None) is False]
        ways += [f"omit {', '.join(refused)}"] if refused else []
        problems.append(
            f"--dsa-fuse-kl-in-backward needs all four fused parts, and {', '.join(map(_flag, missing))} "
            f"{'is' if len(missing) == 1 else 'are'} off; {' and '.join(ways)}"
        )
    if not getattr(args, "dsa_indexer_use_sparse_loss", True):
        problems.append(
            "--dsa-fuse-kl-in-backward has the probabilities of the chosen keys only; add "
            "--dsa-indexer-use-sparse-loss or omit it"
        )
    return problems


def _flag(dest: str) -> str:
    return "--" + dest.replace("_", "-")


def check_stage(args: Any) -> Sequence[str]:
    """Check the warm-up stage, which trains the indexer by its loss alone."""
    problems = []
    if getattr(args, "experimental_attention_variant", "dsa") != "dsa":
        problems.append(
            "--dsa-stage warmup trains DSA's indexer, and the model has none; add "
            "--experimental-attention-variant dsa"
        )
    if not (getattr(args, "dsa_indexer_loss_coeff", 1.0) or 0.0) > 0:
        problems.append(
            "--dsa-stage warmup trains by the indexer loss alone; set --dsa-indexer-loss-coeff above 0"
        )
    return problems
