"""Parsing of a job's command line for ``doctor``: values as the job reads them, and unknown flags."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import math
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from mindspeed_dsa import session, settings
from mindspeed_dsa.features import all_flags
from mindspeed_dsa.megatron.pipeline_chunks import LAYOUT, stages_of
from mindspeed_dsa.patches import versions
from mindspeed_dsa.patches.compose import with_context
from mindspeed_dsa.patches.errors import SettingsError
from mindspeed_dsa.patches.site import load
from mindspeed_dsa.tools.migrate import megatron_flags

_FAMILIES = ("dsa", "index", "indexer")
"""First words of DSA flags, in this library, in Megatron and in MindSpeed."""
_PARSE = "megatron.training.arguments:parse_args"
_RANKS = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")


class JobParser(argparse.ArgumentParser):
    """Parser for a job's command line, with Megatron's flags and ours.

    An invalid value is recorded instead of ending the process, and parsing continues.

    Attributes:
        whose: name of the parser's owner, for messages.
        refused: messages about invalid values.
    """

    def __init__(self) -> None:
        super().__init__(add_help=False, allow_abbrev=False)
        self.whose = ""
        self.refused: list[str] = []

    @property
    def names(self) -> frozenset[str]:
        """All option strings of the parser's flags, such as ``--seed``."""
        return frozenset(self._option_string_actions)

    def error(self, message: str) -> NoReturn:
        """Raise an error with argparse's message, where argparse would exit.

        Raises:
            SettingsError: always.
        """
        raise SettingsError(message)

    def _get_value(self, action: argparse.Action, text: str) -> Any:
        try:
            return super()._get_value(action, text)
        except argparse.ArgumentError as error:
            self.refused.append(str(error))
            return text

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            self.refused.append(str(error))


def parser_of(running: session.Session | None) -> JobParser:
    """Build the job's parser under a session: Megatron's flags, and the flags that features add.

    Args:
        running: session; None if starting it failed. Flags added by patches of ``parse_args`` are then
            missing.
    """
    root = running.settings.megatron_root if running else settings.MEGATRON_ROOT.default
    made = _megatrons(root)
    if running is not None:
        for feature in running.features:
            for patch in feature.patches_for(running.settings):
                inside = not versions.outside(patch, lambda _: versions.of_megatron(root))
                if patch.target == _PARSE and inside:
                    _extend(made, with_context(load(patch.impl), running.contexts[feature.name]))
    session.add_arguments(made)
    return made


def _megatrons(root: str) -> JobParser:
    """Build Megatron's parser from the installed Megatron-LM, else from the record of its releases."""
    made = JobParser()
    try:
        megatron_flags.add_installed(made, root)
        made.whose = "Megatron's parser"
    except Exception:  # only megatron-core is installed, or a requirement of Megatron-LM is missing
        made = JobParser()
        release = versions.of_megatron(root)
        megatron_flags.add_recorded(made, versions.parsed(release))
        made.whose = f"Megatron-LM {release}" if release else "Megatron-LM"
    return made


def _extend(parser: JobParser, decorate: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Add the flags that a decorator of ``parse_args`` passes as ``extra_args_provider``."""

    # Stands in for Megatron's function: only runs the provider on our parser, and reads no argv.
    def parse_args(extra_args_provider: Any = None, *args: Any, **kwargs: Any) -> Any:
        return parser if extra_args_provider is None else extra_args_provider(parser)

    decorate(parse_args)()


def read(
    parser: JobParser, running: session.Session, argv: Sequence[str], whole: bool
) -> tuple[argparse.Namespace, list[str]]:
    """Parse a command line as a job does, up to Megatron's ``validate_args``.

    Args:
        parser: job's parser.
        running: session started with these flags.
        argv: flags.
        whole: whether ``argv`` has all of the job's flags. If so, missing flags get Megatron's defaults, else
            the result lacks them.

    Returns:
        The arguments, and messages about unparsable words and values.
    """
    if not whole:
        ours = {flag.dest for flag in (*settings.GENERAL_FLAGS, *all_flags()) if not flag.megatron}
        for action in parser._actions:
            action.default = action.default if action.dest in ours else argparse.SUPPRESS
    args = argparse.Namespace()
    problems = []
    try:
        _, rest = parser.parse_known_args(list(argv), args)
        strays = _strays(rest)
        problems += [
            f"{word!r} is neither a flag nor the value of one; flags begin with --" for word in strays
        ]
    except SettingsError as error:
        problems.append(f"{parser.whose} refuses this command line: {error}")
    problems += [f"{parser.whose} refuses this command line: {each}" for each in parser.refused]
    for dest, setting in running.settings.chosen().items():
        setattr(args, dest, setting.value)
    # Features take a missing attribute for a release without pipeline layouts, so set it to None.
    if not whole and LAYOUT in parser.names:
        args.__dict__.setdefault(LAYOUT[2:].replace("-", "_"), None)
    return args, problems


def _strays(rest: Sequence[str]) -> list[str]:
    """Return the unparsed words that are neither a flag nor the value of one."""
    # Words after an unknown flag may be its values: how many it takes is unknown.
    strays, after = [], False
    for word in rest:
        after = after or word.startswith("--")
        strays += [] if after else [word]
    return strays


def derive(args: argparse.Namespace, world: int = 0) -> list[str]:
    """Set the arguments that ``validate_args`` derives from others and that checks of features read.

    Args:
        args: complete arguments of a job, already rewritten by the features.
        world: number of ranks; 0 if it is unknown.

    Returns:
        A problem if the layout does not divide the ranks.
    """
    tensor, stages, context = (getattr(args, name) for name in _RANKS)
    if not all(isinstance(size, int) and size > 0 for size in (tensor, stages, context)):
        return []
    args.gtp_weight_remat_size = max(
        (getattr(args, "tensor_parallel_num_weight_shards", None) or 1) // tensor, 1
    )
    ranks = tensor * stages * context * args.gtp_weight_remat_size
    args.world_size = world or ranks
    args.data_parallel_size = max(world // ranks, 1) if world else 0
    if args.expert_tensor_parallel_size is None:
        args.expert_tensor_parallel_size = tensor
    # As validate_args does: without tensor parallelism there is no sequence parallelism.
    if tensor == 1:
        args.sequence_parallel = False
    chunks = getattr(args, "num_virtual_stages_per_pipeline_rank", None)
    layers = args.num_layers_per_virtual_pipeline_stage
    if chunks is None and layers and args.num_layers:
        chunks = max(args.num_layers // stages // layers, 1)
    with contextlib.suppress(ValueError):  # a malformed layout, which Megatron refuses itself
        if layout := stages_of(getattr(args, "pipeline_model_parallel_layout", None)):
            chunks = len(layout) // stages
    args.virtual_pipeline_model_parallel_size = chunks if chunks and chunks > 1 else None
    experts = args.expert_tensor_parallel_size * (args.expert_model_parallel_size or 1) * stages
    needed = math.lcm(ranks, experts)
    if world % needed == 0:
        return []
    problem = (
        f"{world} ranks are no multiple of {needed}, which TP {tensor} x PP {stages} x CP {context} and EP "
        f"{args.expert_model_parallel_size} need; start {-(-world // needed) * needed}, or change the layout"
    )
    return [problem]


def unknown_flags(argv: Sequence[str], of_the_job: Sequence[str], parser: JobParser, root: str) -> list[str]:
    """Return a message, with similar names, for each flag that neither this library nor Megatron has.

    Args:
        argv: words of the command line.
        of_the_job: words that the job's own parser also reads. Its own flags are allowed, so only unknown DSA
            flags and misspelt flags are reported.
        parser: job's parser.
        root: Megatron's top-level package.
    """
    names, release = parser.names, versions.parsed(versions.of_megatron(root))
    messages = []
    for token in dict.fromkeys([*argv, *of_the_job]):
        name = token.partition("=")[0]
        if not name.startswith("--") or name in names:
            continue
        about_dsa = name[2:].removeprefix("no-").partition("-")[0] in _FAMILIES
        if token in of_the_job and not about_dsa and not settings.misspelt(name, names):
            continue
        # --use-x resembles --no-use-x, but has the opposite meaning: suggest only flags of the same sense.
        negated = name.startswith("--no-")
        near = sorted(each for each in names if each.startswith("--no-") == negated)
        close = difflib.get_close_matches(name, near, n=3 if about_dsa else 1, cutoff=0.75)
        hint = f"; did you mean {' or '.join(close)}?" if close else ""
        having = megatron_flags.record().get(name, ())
        hint = (
            f"; Megatron-LM {megatron_flags.lacks(name, release) or ', '.join(having)} has it"
            if having
            else hint
        )
        aside = "" if token in of_the_job else " (flags of the job's own parser belong after --)"
        messages.append(f"{name} is a flag neither of this library nor of {parser.whose}{hint}{aside}")
    return messages
