"""``--accept-mindspeed-flags``: a job's command line is translated before anyone reads it."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableSequence, Sequence

from packaging.version import InvalidVersion, Version

from mindspeed_dsa import log
from mindspeed_dsa.patches import versions
from mindspeed_dsa.patches.errors import SettingsError
from mindspeed_dsa.settings import ACCEPT_MINDSPEED, MEGATRON_ROOT, truth
from mindspeed_dsa.tools.migrate.job import split
from mindspeed_dsa.tools.migrate.translate import Translation, translate, words

_log = log.get("accept-mindspeed-flags")
_done: list[str] | None = None
"""The last command line that was translated: imported again, the one-liner finds it."""


def accept(argv: MutableSequence[str], environ: Mapping[str, str] | None = None) -> bool:
    """Translate a job's arguments in place, if they or the environment ask for it; says whether they did.

    Args:
        argv: without the program's name.
        environ: default: the process's environment.

    Raises:
        SettingsError: flags that change results are not served, or some contradict others; all of them in
        one message.
    """
    global _done
    environ = os.environ if environ is None else environ
    if argv == _done:
        return True
    asked = ACCEPT_MINDSPEED.name in argv
    if ACCEPT_MINDSPEED.env in environ:  # the environment outranks the command line
        try:
            asked = truth(environ[ACCEPT_MINDSPEED.env], ACCEPT_MINDSPEED.env)
        except ValueError as error:
            raise SettingsError(f"mindspeed_dsa: {error}") from error
    if not asked:
        return False
    end = argv.index("--") if "--" in argv else len(argv)
    given, rest = [word for word in argv[:end] if word != ACCEPT_MINDSPEED.name], argv[end:]
    first, flags = split(given)
    found = translate(flags, _release(given))
    _refuse(found)
    argv[:] = [*first, *words(found.flags), *rest]
    _done = list(argv)
    _report(found)
    return True


def _release(argv: Sequence[str]) -> Version | None:
    """Return the release of the Megatron that this job has; its fork's, where the command line names one."""
    names = [
        word.partition("=")[2] or following
        for word, following in zip(argv, [*argv[1:], ""], strict=False)
        if word.partition("=")[0] == MEGATRON_ROOT.name
    ]
    text = versions.of_megatron(names[-1] if names else str(MEGATRON_ROOT.default))
    try:
        return Version(text) if text else None
    except InvalidVersion:
        return None


def _refuse(found: Translation) -> None:
    problems = [*found.problems, *(f"{each.given}: {each.why}" for each in found.refused)]
    if problems:
        raise SettingsError(
            "mindspeed_dsa: --accept-mindspeed-flags: these flags are not served, and the job would compute "
            "something else without them, or they contradict others; `python -m mindspeed_dsa migrate "
            "SCRIPT` says more:" + "".join(f"\n  - {problem}" for problem in problems)
        )


def _report(found: Translation) -> None:
    """One line for each kind of change."""
    changed = [
        f"{each.given} -> {each.now}" for each in found.outcomes if each.now not in ("", str(each.given))
    ]
    if changed:
        _log.info("flags by Megatron's names: %s", "; ".join(changed), once=True)
    needless = [each.given.flag for each in found.of("not needed")]
    if needless:
        _log.info("not needed here: %s", ", ".join(needless), once=True)
    unserved = [f"{each.given.flag} ({each.why})" for each in found.of("not served")]
    if unserved:
        _log.warning("not served, same results without: %s", " ".join(unserved), once=True)
