"""``--accept-mindspeed-flags``: translate MindSpeed's flags of a running job before Megatron parses them."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableSequence, Sequence

from packaging.version import Version

from mindspeed_dsa import log
from mindspeed_dsa.patches import versions
from mindspeed_dsa.patches.errors import SettingsError
from mindspeed_dsa.settings import ACCEPT_MINDSPEED, MEGATRON_ROOT, truth
from mindspeed_dsa.tools.migrate.job import split
from mindspeed_dsa.tools.migrate.translate import Translation, translate, words

_log = log.get("accept-mindspeed-flags")
_done: list[str] | None = None
"""Last translated command line, so that a second import of the adaptor does not translate again."""


def accept(argv: MutableSequence[str], environ: Mapping[str, str] | None = None) -> bool:
    """Translate a job's arguments in place if the flag or the environment requests it; return whether it did.

    Args:
        argv: arguments without the program's name.
        environ: environment variables; default: the process's own.

    Raises:
        SettingsError: flags that change results have no equivalent, or contradict others; lists all of them.
    """
    global _done
    environ = os.environ if environ is None else environ
    if argv == _done:
        return True
    asked = ACCEPT_MINDSPEED.name in argv
    if ACCEPT_MINDSPEED.env in environ:  # the environment overrides the command line, as for every flag
        try:
            asked = truth(environ[ACCEPT_MINDSPEED.env], ACCEPT_MINDSPEED.env)
        except ValueError as error:
            raise SettingsError(f"mindspeed_dsa: {error}") from error
    if not asked:
        return False
    # Words after -- are for the job's own parser.
    end = argv.index("--") if "--" in argv else len(argv)
    own_words, rest = [word for word in argv[:end] if word != ACCEPT_MINDSPEED.name], argv[end:]
    first, flags = split(own_words)
    translation = translate(flags, _release(own_words))
    _refuse(translation)
    argv[:] = [*first, *words(translation.flags), *rest]
    _done = list(argv)
    _report(translation)
    return True


def _release(argv: Sequence[str]) -> Version | None:
    """Return the release of the job's Megatron, or of the fork that ``--megatron-root`` names."""
    names = [
        word.partition("=")[2] or following
        for word, following in zip(argv, [*argv[1:], ""], strict=False)
        if word.partition("=")[0] == MEGATRON_ROOT.name
    ]
    return versions.parsed(versions.of_megatron(names[-1] if names else str(MEGATRON_ROOT.default)))


def _refuse(found: Translation) -> None:
    problems = [*found.problems, *(f"{each.given}: {each.why}" for each in found.refused)]
    if problems:
        raise SettingsError(
            "mindspeed_dsa: --accept-mindspeed-flags: these flags are not served, and the job would compute "
            "something else without them, or they contradict others; `python -m mindspeed_dsa migrate "
            "SCRIPT` says more:" + "".join(f"\n  - {problem}" for problem in problems)
        )


def _report(found: Translation) -> None:
    """Log the translated flags, one line per kind of change."""
    changed = [
        f"{outcome.given} -> {outcome.now}"
        for outcome in found.outcomes
        if outcome.now not in ("", str(outcome.given))
    ]
    if changed:
        _log.info("flags by Megatron's names: %s", "; ".join(changed), once=True)
    needless = [outcome.given.flag for outcome in found.of("not needed")]
    if needless:
        _log.info("not needed here: %s", ", ".join(needless), once=True)
    unserved = [f"{outcome.given.flag} ({outcome.why})" for outcome in found.of("not served")]
    if unserved:
        _log.warning("not served, same results without: %s", " ".join(unserved), once=True)
