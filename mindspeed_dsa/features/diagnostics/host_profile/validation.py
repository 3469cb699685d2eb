"""What a host profile needs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mindspeed_dsa.features.diagnostics.host_profile.options import Options


def profile_wanted(settings: Any) -> bool:
    """Whether a file is named, or a step, which is refused without one."""
    return settings.host_profile is not None or settings.host_profile_step is not None


def check_profile(args: Any) -> list[str]:
    """Steps that the run reaches, and a file that can be one."""
    return list(_problems(args))


def _problems(args: Any) -> Iterator[str]:
    step, last = Options.of(args).step, getattr(args, "train_iters", None)
    if step < 1:
        yield f"--host-profile-step is {step}; steps of a run are counted from 1"
    elif last is not None and step >= last:
        yield (
            f"--host-profile-step {step} and the step after it are never reached: --train-iters is {last}; "
            "make more steps, or name an earlier one"
        )
    if Path(args.host_profile).is_dir():
        yield f"--host-profile {args.host_profile} is a folder; name a file"
