"""Objects that misreport their class: wrapt proxies, lazy objects, mocks."""

from __future__ import annotations

from typing import Any


def is_a(thing: Any, types: type | tuple[type, ...]) -> bool:
    """``isinstance`` that checks the actual type only.

    ``isinstance`` also reads the object's ``__class__``: a proxy of a function then counts as a function, and
    a lazy object is loaded.
    """
    return issubclass(type(thing), types)
