"""Objects that lie about their class: wrapt proxies, lazy objects, mocks."""

from __future__ import annotations

from typing import Any


def is_a(thing: Any, types: type | tuple[type, ...]) -> bool:
    """``isinstance`` that asks the type alone.

    ``isinstance`` also asks the object for its ``__class__``: a proxy of a function passes for a
    function, and a lazy object wakes up to answer.
    """
    return issubclass(type(thing), types)
