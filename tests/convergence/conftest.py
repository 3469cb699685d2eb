from __future__ import annotations

from typing import Any

from tests.distributed.conftest import pool

__all__ = ["pool"]

REPORT: list[str] = []


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if REPORT:
        terminalreporter.section("twenty steps beside Megatron's own DSA")
        for line in REPORT:
            terminalreporter.write_line(line)
