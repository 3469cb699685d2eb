"""Reader of argument lists in Python files, and of flags in YAML files."""

from __future__ import annotations

import ast
import shlex
from collections.abc import Mapping
from typing import Any

from mindspeed_dsa.tools.migrate import megatron_flags
from mindspeed_dsa.tools.migrate.shell import ShellError


def of_python(text: str) -> list[str]:
    """Return the longest argument list that a Python file builds from literals.

    Follows lists and tuples of literals, joined with ``+``, ``+=``, ``*NAME``, ``append`` and ``extend``,
    ``split()`` of a string, and f-strings of literals, in the order of the file. Nothing is executed.

    Raises:
        ShellError: the text is not valid Python, or has no such list.
    """
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise ShellError(f"line {error.lineno}: {error.msg}") from error
    except ValueError as error:  # a null byte
        raise ShellError(str(error)) from error
    names: dict[str, Any] = {}
    lists_found: list[list[str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt):
            _follow(node, names)
        if isinstance(node, ast.expr) and isinstance(value := _value(node, names), list):
            lists_found.append(value)
    lists_found += [value for value in names.values() if isinstance(value, list)]
    lists = [
        [str(word) for word in words]
        for words in lists_found
        if any(str(word).startswith("--") for word in words)
    ]
    if not lists:
        raise ShellError("no list of arguments in it is built of literals")
    return max(lists, key=len)


def _follow(node: ast.stmt, names: dict[str, Any]) -> None:
    """Apply a statement to the dict from name to known value."""
    if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
        names[node.targets[0].id] = _value(node.value, names)
    elif (
        isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name) and isinstance(node.op, ast.Add)
    ):
        old, new = names.get(node.target.id), _value(node.value, names)
        names[node.target.id] = old + new if type(old) is type(new) and old is not None else None
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        _follow_call(node.value, names)


def _follow_call(call: ast.Call, names: dict[str, Any]) -> None:
    """Apply a call of ``append`` or ``extend`` to a known list."""
    if len(call.args) != 1 or not isinstance(call.func, ast.Attribute):
        return
    if not isinstance(call.func.value, ast.Name):
        return
    held, new = names.get(call.func.value.id), _value(call.args[0], names)
    if isinstance(held, list) and call.func.attr == "append" and new is not None:
        names[call.func.value.id] = [*held, new]
    elif isinstance(held, list) and call.func.attr == "extend" and isinstance(new, list):
        names[call.func.value.id] = [*held, *new]


def _value(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """Evaluate an expression to a list, string or number; None if it is not built from literals."""
    if isinstance(node, ast.Constant) and isinstance(node.value, (str, int, float)):
        return node.value
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, (ast.List, ast.Tuple)):
        words: list[Any] = []
        for item in node.elts:
            value = _value(item.value if isinstance(item, ast.Starred) else item, names)
            # Keep unknown words as <expression>, so that the words around them stay readable.
            if value is None:
                value = f"<{ast.unparse(item)}>"
            words += value if isinstance(item, ast.Starred) and isinstance(value, list) else [value]
        return words
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = _value(node.left, names), _value(node.right, names)
        return left + right if type(left) is type(right) and left is not None else None
    if isinstance(node, ast.JoinedStr):
        pieces = [
            _value(piece.value if isinstance(piece, ast.FormattedValue) else piece, names)
            for piece in node.values
        ]
        return None if None in pieces else "".join(map(str, pieces))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and not node.args:
        text = _value(node.func.value, names)
        return text.split() if isinstance(text, str) and node.func.attr == "split" else None
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "str"
        and len(node.args) == 1
    ):
        value = _value(node.args[0], names)
        return None if value is None else str(value)
    return None


def parsed(text: str) -> Any:
    """Parse a YAML file.

    Raises:
        ShellError: the text is not valid YAML, or PyYAML is not installed.
    """
    try:
        import yaml  # type: ignore[import-untyped]
    except ModuleNotFoundError as error:
        raise ShellError("reading YAML needs PyYAML: pip install pyyaml") from error
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ShellError(" ".join(str(error).split())) from error


def of_yaml(text: str) -> list[str]:
    """Return the flags of a YAML file as words of a command line.

    Keys are flags, with or without leading dashes, with dashes or underscores; sections are ignored. ``true``
    is a flag without value, ``false`` its ``--no-`` form if Megatron has one, a list several values. A list
    or string with words that begin with two dashes is a command line.

    Raises:
        ShellError: the text is not valid YAML or has no flags, or PyYAML is not installed.
    """
    words = list(_flags(parsed(text)))
    if not any(word.startswith("--") for word in words):
        raise ShellError("there are no flags in it")
    return words


def _flags(data: Any) -> list[str]:
    words: list[str] = []
    if isinstance(data, Mapping):
        for key, value in data.items():
            if isinstance(value, Mapping) or _is_command_line(value) or _holds_sections(value):
                words += _flags(value)
            else:
                words += _flag(str(key).lstrip("-").replace("_", "-"), value)
    elif _is_command_line(data):
        if any(isinstance(word, (Mapping, list)) for word in data):
            raise ShellError("a list in it holds words of a command line, and other lists or sections")
        for word in data if isinstance(data, list) else [data]:
            whole = str(word).startswith("--") or data is word
            words += _split(str(word)) if whole else [str(word)]
    elif isinstance(data, list):
        for item in data:
            words += _flags(item)
    return words


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ShellError(f"{text!r}: {str(error).lower()}") from error


def _is_command_line(value: Any) -> bool:
    if isinstance(value, str):
        return value.lstrip().startswith("--") or " --" in value
    return isinstance(value, list) and any(isinstance(item, str) and item.startswith("--") for item in value)


def _flag(name: str, value: Any) -> list[str]:
    if value is None:
        return []
    if isinstance(value, bool):
        # Megatron's negative flags begin with --no- or --disable-, as --disable-bias-linear.
        negative = next(
            (f"--{no}-{name}" for no in ("no", "disable") if f"--{no}-{name}" in megatron_flags.record()), ""
        )
        if value and negative and f"--{name}" not in megatron_flags.record():
            return []  # true is the default, and only the --no- form exists
        return [f"--{name}"] if value else [negative] if negative else []
    values = [str(each) for each in _flat(value)]
    if len(values) == 1 and values[0].startswith("-"):
        return [f"--{name}={values[0]}"]
    return [f"--{name}", *values]


def _flat(value: Any) -> list[Any]:
    """Return the words of a value; nested lists, such as data paths with weights, are flattened."""
    return [word for item in value for word in _flat(item)] if isinstance(value, list) else [value]


def _holds_sections(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(item, Mapping) for item in value)
