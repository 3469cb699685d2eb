"""The reader of imports finds all upward imports; ``test_layers.py`` relies on it."""

from __future__ import annotations

import pytest

from tests.support.import_graph import Sources, circles, upward

PACKAGE = "mindspeed_dsa"
LEVEL = {"log": 0, "patches": 1, "features": 2, "session": 3, "": 4}
SMALL = {
    "__init__": "",
    "log": "",
    "patches.__init__": "",
    "patches.engine": "",
    "session": "",
    "features.__init__": "",
    "features.memory.__init__": "",
    "features.memory.swap": "",
}


def upward_of(folder, texts):
    """Write modules by name below a folder; return their upward imports."""
    for name, content in texts.items():
        file = folder.joinpath(*name.split(".")).with_suffix(".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    return upward(Sources(folder, PACKAGE), LEVEL)


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("log", "import mindspeed_dsa.session\n"),
        ("log", "from mindspeed_dsa import session\n"),
        ("log", "from mindspeed_dsa import disable\n"),
        ("log", "def f():\n    from mindspeed_dsa.session import current\n"),
        (
            "log",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from mindspeed_dsa.session import S\n",
        ),
        ("log", "from . import session\n"),
        ("patches.engine", "from ..session import current\n"),
        ("patches.__init__", "from ..features.memory import swap\n"),
        ("patches.engine", "IMPL = 'mindspeed_dsa.session:current'\n"),
        ("patches.engine", "HERE = 'mindspeed_dsa.features'\nIMPL = f'{HERE}.memory.swap:out'\n"),
        ("patches.engine", "import_module(f'mindspeed_dsa.features.{kind}')\n"),
        ("features.memory.swap", "import_module('mindspeed_dsa.session')\n"),
    ],
)
def test_an_upward_import_is_seen(tmp_path, module, text):
    found = upward_of(tmp_path, {**SMALL, module: text})
    importer = f"{PACKAGE}.{module}".removesuffix(".__init__")
    assert found
    assert all(text.startswith(f"{importer}:") for text in found)


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("session", "import mindspeed_dsa.log\nfrom mindspeed_dsa.features.memory import swap\n"),
        ("session", '"""The text of mindspeed_dsa.session goes to mindspeed_dsa.json."""\n'),
        ("log", "FILE = 'mindspeed_dsa.json'\nNAME = f'mindspeed_dsa.{feature}'\n"),
        ("patches.engine", "from . import engine\nfrom mindspeed_dsa import log\n"),
    ],
)
def test_other_imports_are_allowed(tmp_path, module, text):
    assert upward_of(tmp_path, {**SMALL, module: text}) == []


def test_a_circle_is_found():
    edges = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set(), "e": {"a", "e"}}
    assert circles(edges) == [["b", "c"]]
