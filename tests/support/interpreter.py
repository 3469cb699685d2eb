"""Triton's interpreter, with less to do between the operations of a kernel.

Whenever a kernel calls a function, which ``tl.sum`` is as well, the interpreter searches ``triton.language``
for functions that it has to replace. In a launch there are none left after the first search: without the
others, the tests of kernels take half of their time.
"""

from __future__ import annotations

from typing import Any


def search_once_per_launch() -> None:
    """Replace the interpreter's search; what it finds, and puts back after the launch, stays the same."""
    from triton.runtime import interpreter

    patch, restore = interpreter._patch_lang, interpreter._LangPatchScope.restore
    languages = (interpreter.tl, interpreter.tl.core)
    searched: set[tuple[bool, ...]] = set()

    def patch_unless_done(fn: Any) -> Any:
        seen = list(map(id, fn.__globals__.values()))
        visible = tuple(id(each) in seen for each in languages)
        if visible in searched:
            return interpreter._LangPatchScope()
        searched.add(visible)
        return patch(fn)

    def restore_and_forget(self: Any) -> None:
        searched.clear()
        restore(self)

    interpreter._patch_lang = patch_unless_done
    interpreter._LangPatchScope.restore = restore_and_forget
