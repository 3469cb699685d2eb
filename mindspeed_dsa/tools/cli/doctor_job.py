"""``doctor --job``: split a job's complete command line, and check the environment for this job."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
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
"""torchrun's options for the number of ranks, with their defaults."""
_TORCHRUN = {"torchrun", "torch.distributed.run", "torch.distributed.launch"}
_SCHEDULERS = {"srun", "mpirun", "mpiexec"}
_TASKS = ("-n", "-np", "--ntasks")
"""Their options for the number of ranks."""
_SPINS = "OMP_NUM_THREADS"


@dataclass(frozen=True)
class Command:
    """A job's command line, split into launcher, script and flags.

    Attributes:
        launcher: words before the script.
        script: path of the script; empty if the line starts with a flag.
        flags: words after the script.
    """

    launcher: tuple[str, ...]
    script: str
    flags: tuple[str, ...]

    @classmethod
    def of(cls, words: Sequence[str], more: Sequence[str] = ()) -> Command:
        """Split ``[torchrun OPTIONS] [pretrain_gpt.py] FLAGS``, and append the flags of ``more``.

        A line that starts with a flag has no script.
        """
        place = next((index for index, word in enumerate(words) if word.endswith(".py")), None)
        if place is None or words[0].startswith("-"):
            return cls((), "", (*words, *more))
        if Path(words[place]).name == "run_megatron.py" and words[place + 1 :]:  # it runs the next script
            place += 1
        return cls(tuple(words[:place]), words[place], (*words[place + 1 :], *more))

    @property
    def is_example(self) -> bool:
        """Whether this is the example job, which does not use Megatron's parser."""
        return self.script.endswith(flags.EXAMPLE_SCRIPT)

    def variables(self) -> dict[str, str]:
        """Return a rank's environment: this process's variables, and those that the launcher adds."""
        environ = dict(os.environ)
        assigned = takewhile(lambda word: word == "env" or "=" in word, self.launcher)
        environ |= dict(word.split("=", 1) for word in assigned if "=" in word)
        programs = {Path(word).name for word in self.launcher}
        words = [part for word in self.launcher for part in word.split("=", 1)]
        values = {word.replace("_", "-"): value for word, value in pairwise(words)}
        if not programs & _TORCHRUN:
            if programs & _SCHEDULERS:
                tasks = next((value for name, value in pairwise(words) if name in _TASKS), "")
                environ.update({"WORLD_SIZE": tasks} if tasks.isdigit() else {})
            return environ
        local, nodes = (values.get(name, str(default)) for name, default in _LAUNCHED.items())
        if not (local.isdigit() and nodes.isdigit()):  # e.g. "gpu", or a range of nodes such as "1:4"
            environ.pop("WORLD_SIZE", None)
            return environ
        environ.update(LOCAL_WORLD_SIZE=local, WORLD_SIZE=str(int(local) * int(nodes)))
        if int(local) > 1:
            environ.setdefault(_SPINS, "1")  # torchrun sets it for more than one process per node
        return environ


def examine(
    command: Command, read: Sequence[str], running: session.Session | None
) -> list[environment.Found]:
    """Check variables, limits, disk and packages for a job that has not started.

    Args:
        command: job's command line.
        read: job's flags, with MindSpeed's flags replaced by Megatron's.
        running: session started with these flags; None if starting it failed.
    """
    words = [command.script or "pretrain_gpt.py", *read]
    args = _arguments(words, command.is_example, running)
    active = list(running.features) if running else _active(args)
    variables = command.variables()
    platform = running.settings.platform if running else _platform(args)
    root = running.settings.megatron_root if running else "megatron"
    # As Python does for a script, put its folder first, in place of this command's.
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
    with contextlib.suppress(MindSpeedDSAError):  # `doctor` reports unparsable flags elsewhere
        parser.parse_known_args(list(words[1:]), args)
    return args


def _active(args: argparse.Namespace) -> list[Feature]:
    """Return the features that the flags switch on; needs no session."""
    seen: Any = Switches(args)
    features = []
    for feature in all_features():
        with contextlib.suppress(Exception):  # a feature's is_active may need a package that is not installed
            features += [feature] if feature.is_active(seen) else []
    return features


def _platform(args: argparse.Namespace) -> str:
    """Return the job's platform; empty if it cannot be detected, e.g. without torch."""
    asked = getattr(args, "mindspeed_platform", None) or "auto"
    try:
        return platforms.detect(asked)
    except MindSpeedDSAError:
        return "" if asked == "auto" else str(asked)
