"""No test leaves a patch behind; Triton is imported so that its kernels can be interpreted."""

from __future__ import annotations

import os
import sys

import pytest


def _import_triton() -> None:
    """Import Triton before anybody else does: its own library is interpretable or not from then on.

    Only during the import is the variable set: Megatron's kernels and processes started by tests see what
    the user set. With TRITON_INTERPRET=0 kernels are compiled, and their tests need a GPU.
    """
    before = os.environ.get("TRITON_INTERPRET")
    os.environ.setdefault("TRITON_INTERPRET", "1")
    try:
        import triton
        import triton.experimental.gluon  # noqa: F401  what the first launch imports
    except ModuleNotFoundError:
        pass
    finally:
        if before is None:
            del os.environ["TRITON_INTERPRET"]


_import_triton()

pytest_plugins = ["tests.figures"]


@pytest.fixture(autouse=True)
def _no_patches_left():
    """Undo the session's patches after each test, whatever the test did."""
    yield
    session = sys.modules.get("mindspeed_dsa.session")
    if session is not None and session.current() is not None:
        session.disable()
