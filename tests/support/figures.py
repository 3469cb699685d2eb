"""Figures found by tests, printed when pytest ends, and numbers of a benchmark's nested table.

A figure is part of its test's report, because other processes than the printing one may run the tests.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

_PROPERTY = "figure"
_found: list[tuple[str, str]] = []


def numbers(metrics: Mapping[str, Any]) -> Iterator[Any]:
    """Yield all leaves of a nested table."""
    for value in metrics.values():
        if isinstance(value, dict):
            yield from numbers(value)
        else:
            yield value


def tell(heading: str, line: str) -> None:
    """Print a line for the running test below a heading when pytest ends."""
    _found.append((heading, line))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    item.user_properties.extend((_PROPERTY, figure) for figure in _found)
    _found.clear()
    return (yield)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    lines = defaultdict(list)
    for reports in terminalreporter.stats.values():
        for report in reports:
            # The last of a test's three reports has the properties of all.
            if getattr(report, "when", "") == "teardown":
                for _, (heading, line) in (each for each in report.user_properties if each[0] == _PROPERTY):
                    lines[heading].append(line)
    for heading, each in sorted(lines.items()):
        terminalreporter.section(heading)
        terminalreporter.write_line("\n".join(each))
