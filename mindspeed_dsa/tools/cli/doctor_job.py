"""``doctor --job``: a job's command line, launcher and all, and the surroundings that it will meet."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from mindspeed_dsa import platforms, session
from mindspeed_dsa.environment import Surroundings
from mindspeed_dsa.feature import Feature
from mindspeed_dsa.features import all_features
from mindspeed_dsa.patches.errors import MindSpeedDSAError
from mindspeed_dsa.session import environment
from mindspeed_dsa.session.environment import installation
from mindspeed_dsa.tools.cli import doctor_arguments
from mindspeed_dsa.tools.planner import checkpoint, flags
from mindspeed_dsa.tools.planner.arguments import Switches

_LAUNCHED = {"--nproc-per-node": 1, "--nnodes": 1}
"""Options of torchrun that say how many ranks there are, and its defaults."""
_SPINS = "OMP_NUM_THREADS"


@dataclass(frozen=True)
class Command:
    """Command line of a job, taken apart.

    Attributes:
        launcher: words before the script.
        script: empty where the line begins with flags.
        flags: all that is the script's.
    """

    launcher: tuple[str, ...]
    script: str
    flags: tuple[str, ...]

    @classmethod
    def of(cls, words: Sequence[str], more: Sequence[str] = ()) -> Command:
        """Take ``[torchrun OPTIONS] [pretrain_gpt.py] FLAGS`` apart, to which ``more`` flags are added.

        A line that begins with a flag has no script.
        """
        place = next((index for index, word in enumerate(words) if word.endswith(".py")), None)
        if place is None or words[0].startswith("-"):
            return cls((), "", (*words, *more))
        return cls(tuple(words[:place]), words[place], (*words[place + 1 :], *more))

    @property
    def is_example(self) -> bool:
        """Return whether it is the example job, which has no parser of Megatron's."""
        return self.script.endswith(flags.EXAMPLE_SCRIPT)

    def variables(self) -> dict[str, str]:
        """Return the environment of a rank: this one's, and what the launcher will add."""
        found = dict(os.environ)
        if not self.launcher:
            return found
        values = {name: str(default) for name, default in _LAUNCHED.items()}
        words = [part for word in self.launcher for part in word.split("=", 1)]
        for word, value in pairwise(words):
            if (name := word.replace("_", "-")) in values:
                values[name] = value
        local, nodes = values.values()
        if not (local.isdigit() and nodes.isdigit()):  # as "gpu", or a range of nodes
            return found
        found.update(LOCAL_WORLD_SIZE=local, WORLD_SIZE=str(int(local) * int(nodes)))
        if int(local) > 1:
            found.setdefault(_SPINS, "1")  # torchrun's own default
        return found


def examine(
    command: Command, read: Sequence[str], running: session.Session | None
) -> list[environment.Found]:
    """Examine the surroundings of a job that has not begun.

    Args:
        command: its command line.
        read: the flags, by Megatron's names where they were MindSpeed's.
        running: the session that these flags have started; None where they could not.
    """
    words = [command.script or "pretrain_gpt.py", *read]
    args = _arguments(words, command.is_example, running)
    active = list(running.features) if running else _active(args)
    variables = command.variables()
    platform = running.settings.platform if running else _platform(args)
    root = running.settings.megatron_root if running else "megatron"
    path = sys.path if not command.script else [str(Path(command.script).parent), *sys.path[1:]]
    about = Surroundings(
        platform=platform,
        args=args,
        variables=variables,
        machine=installation.read(platform, root, variables, path),
    )
    about = environment.completed(about, active, lambda: checkpoint.size_of(words))
    return environment.examine(about, active)


def _arguments(
    words: Sequence[str], example: bool, running: session.Session | None = None
) -> argparse.Namespace:
    parser = doctor_arguments.parser_of(running)
    if example:
        parser.set_defaults(**flags.EXAMPLE, num_workers=0)
    args = argparse.Namespace()
    with contextlib.suppress(MindSpeedDSAError):  # which the job's parser reports
        parser.parse_known_args(list(words[1:]), args)
    return args


def _active(args: argparse.Namespace) -> list[Feature]:
    """Return the features that flags switch on where no session could start."""
    seen: Any = Switches(args)
    found = []
    for feature in all_features():
        with contextlib.suppress(Exception):  # one that asks for what is not installed
            found += [feature] if feature.is_active(seen) else []
    return found


def _platform(args: argparse.Namespace) -> str:
    """Return where the job would run; empty where nobody can tell, as without torch."""
    asked = getattr(args, "mindspeed_platform", None) or "auto"
    try:
        return platforms.detect(asked)
    except MindSpeedDSAError:
        return "" if asked == "auto" else str(asked)
