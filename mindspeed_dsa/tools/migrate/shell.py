"""Reader of shell scripts: finds the command that starts the training, and expands its variables.

tree-sitter-bash parses the script. This module evaluates assignments, arrays, ``+=``, quotes, defaults and
arithmetic in the order of the text. Nothing is executed, because launch scripts may delete files and kill
processes. Expressions that only a shell can evaluate are kept as text.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from mindspeed_dsa.tools.migrate import words
from mindspeed_dsa.tools.migrate.job import FLAG, Source
from mindspeed_dsa.tools.migrate.words import Field, Held, Item

if TYPE_CHECKING:
    from tree_sitter import Node

_CONDITIONAL = ("if_statement", "for_statement", "c_style_for_statement", "while_statement", "case_statement")
_UNREAD = ("command_substitution", "process_substitution", "heredoc_body", "test_command", "comment")
"""Nodes that contain no assignments or commands of the script itself."""
_REDIRECTIONS = ("file_redirect", "heredoc_redirect", "herestring_redirect")
_VARIABLES = ("simple_expansion", "expansion")
_COMPUTED = ("command_substitution", "process_substitution", "ansi_c_string", "translated_string")
"""Nodes with values that only a shell can compute."""
_SPECIAL = ("string", "raw_string", "arithmetic_expansion", "concatenation", *_VARIABLES, *_COMPUTED)
"""Nodes of words other than plain text outside of quotes."""

_VARIABLE = re.compile(
    r"\$(?:(?P<bare>[A-Za-z_]\w*)|\{(?P<name>[A-Za-z_]\w*)(?P<all>\[[@*]\])?(?P<default>:?[-=].*)?\})",
    re.DOTALL,
)
_TEXT = re.compile(r"\\(?P<escaped>.)|(?P<variable>\$(?:[A-Za-z_]\w*|\d))|[^\\$]+|.", re.DOTALL)
_TEXT_IN_QUOTES = re.compile(_TEXT.pattern.replace("(?P<escaped>.)", r'(?P<escaped>[\n"\\$`])'), re.DOTALL)
_EXPANDED = frozenset("~*?[{")
"""Characters that a shell expands outside of quotes."""
_SUBSTITUTES = {
    # ADDRESS=<to be filled in by hand>, which a shell takes for redirections
    re.compile(rb"(?<==)<[^<>\n|&;()'\"]*>\S*"): b" ",
    # a continuation before an empty line or the end of the file
    re.compile(rb"\\\r?\n(?=[ \t\r]*(\n|$))|\\$"): b" ",
    # $NAME, which the grammar loses directly after another expansion; _parts finds it in the plain text
    re.compile(rb"(?<!\\)\$(?=\w)"): b"_",
}
"""Dict from text that the grammar cannot parse to its filler, repeated to keep byte positions."""

_ARITHMETIC: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}


class ShellError(Exception):
    """The script cannot be read; the message has the line."""


@dataclass(frozen=True)
class Start:
    """The command that starts the training.

    Attributes:
        launcher: words up to the script, as written.
        script: Python script or ``-m module``.
        words: words of the script's command line, with variables expanded.
        written: same words in shell notation; variables without flags are not expanded.
        rest: words for any number of flags, such as ``"$@"``, in shell notation.
        start, end: position of the command in the text.
        notes: sentences about skipped or doubtful parts of the script.
    """

    launcher: tuple[Source, ...]
    script: str
    words: tuple[str, ...]
    written: tuple[Source, ...]
    rest: tuple[Source, ...]
    start: int
    end: int
    notes: tuple[str, ...]


def read(text: str) -> Start:
    """Find the last command that starts a Python script with flags.

    Raises:
        ShellError: there is no such command, the text is not a shell script, or the parser is not installed.
    """
    code = text.encode()
    root = _tree(code)
    errors = _check(root, code) if root.has_error else []
    script = _Script(code, errors)
    script.take(root)
    if script.start is None:
        raise ShellError("; ".join(["no command in it starts a Python script with flags", *errors]))
    return script.start


def assignments(text: str) -> list[tuple[str, int, int]]:
    """Return the assignments of a script: name, and begin and end of the value in the text."""
    code = text.encode()
    assigned_values = []
    for node in _nodes(_tree(code)):
        value = node.child_by_field_name("value") if node.type == "variable_assignment" else None
        if value is not None and node.children[0].type == "variable_name":
            begin, end = (len(code[:place].decode()) for place in (value.start_byte, value.end_byte))
            assigned_values.append((_text(node.children[0], code), begin, end))
    return assigned_values


# -- the tree ----------------------------------------------------------------------------------


def _tree(code: bytes) -> Node:
    """Parse a script into a syntax tree, whose byte positions refer to ``code``."""
    try:
        import tree_sitter_bash
        from tree_sitter import Language, Parser
    except ModuleNotFoundError as error:
        raise ShellError("reading shell scripts needs pip install 'mindspeed_dsa[migrate]'") from error
    for pattern, filler in _SUBSTITUTES.items():
        code = pattern.sub(lambda match, filler=filler: filler * len(match[0]), code)  # type: ignore[misc]
    return Parser(Language(tree_sitter_bash.language())).parse(code).root_node


def _check(root: Node, code: bytes) -> list[str]:
    """Raise an error for unclosed quotes and brackets; return a note on the first other syntax error.

    Raises:
        ShellError: a quote, bracket or here-document is not closed; names its line.
    """
    notes: list[str] = []
    for node in _nodes(root):
        parent, line = node.parent, node.start_point[0] + 1
        if node.is_missing and parent is not None:
            opened, line = _text(parent.children[0], code), parent.start_point[0] + 1
            if parent.type == "array":
                opened = "the bracket of an array"
            elif node.type == "heredoc_end":
                opened = "the here-document " + _text(parent.children[1], code).strip("'\"\\")
            elif parent.type in ("expansion", "command_substitution", "arithmetic_expansion"):
                opened = "the quote `" if opened == "`" else f"the bracket {opened.lstrip('$')[:1]}"
            else:
                continue
            raise ShellError(f"line {line}: {opened} is never closed")
        if node.type != "ERROR":
            continue
        text = _text(node, code)
        if parent is not None and parent.type == "array":
            raise ShellError(f"line {line}: {text[:1]!r} stands in an array")
        if not code[node.end_byte :].strip() and text[:1] in ("'", '"') and text.count(text[0]) == 1:
            raise ShellError(f"line {line}: the quote {text[0]} is never closed")
        if not code[node.end_byte :].strip() and text.startswith("$(("):
            raise ShellError(f"line {line}: the bracket ( is never closed")
        if parent is not None and not notes:
            notes.append(f"line {line}: bash allows no {text.split(chr(10))[0]!r} there; it is not read")
    return notes


def _nodes(node: Node) -> Iterator[Node]:
    yield node
    for child in node.children:
        yield from _nodes(child)


def _text(node: Node, code: bytes) -> str:
    return code[node.start_byte : node.end_byte].decode()


# -- evaluation --------------------------------------------------------------------------------


class _Script:
    """Evaluates a script: keeps the values of its variables, and the last command that starts a training."""

    def __init__(self, code: bytes, notes: Sequence[str]) -> None:
        self.start: Start | None = None
        self._code = code
        self._variables: dict[str, Field | list[Field]] = {}
        self._doubtful: list[str] = []
        self._notes = list(notes)

    def take(self, node: Node, conditional: bool = False) -> None:
        """Evaluate the assignments and commands in a syntax tree node, in the order of the script."""
        if node.type == "variable_assignment":
            self._assign(node, conditional)
        elif node.type == "command":
            self._command(node, conditional)
        elif node.type not in _UNREAD:
            for child in node.children:
                self.take(child, conditional or node.type in _CONDITIONAL)

    def _assign(self, node: Node, conditional: bool) -> None:
        name, sign = node.children[0], _text(node.children[1], self._code)
        if name.type != "variable_name":  # an element of an array
            return
        key, value = _text(name, self._code), node.child_by_field_name("value")
        # The last assignment wins, although its branch may not run: the report has a note on it.
        if conditional:
            self._doubtful.append(key)
        new: Field | list[Field]
        if value is not None and value.type == "array":
            new = [field for element in value.named_children for field in self._words(element)]
        else:
            new = words.inlined(self._joined([] if value is None else [value]), key)
        old = self._variables.get(key)
        if sign == "+=" and isinstance(old, list):
            new = [*old, *(new if isinstance(new, list) else [new])]
        elif sign == "+=" and isinstance(old, tuple) and isinstance(new, tuple):
            new = (*old, *new)
        self._variables[key] = new

    def _command(self, node: Node, conditional: bool) -> None:
        nodes: list[Node] = []
        end, redirected = 0, False
        for child in node.children:
            if child.type == "variable_assignment":
                self._assign(child, conditional)
            elif child.type in _REDIRECTIONS:
                redirected = bool(nodes)
            else:
                nodes.append(child)
                end = end if redirected else child.end_byte
        if not nodes:
            return
        if _text(nodes[0], self._code) in ("source", "."):
            sourced = re.sub("[\"']", "", _text(nodes[-1], self._code))
            self._notes.append(f"line {node.start_point[0] + 1}: what {sourced} sets is not read")
        behind = node.parent.named_children[1:] if node.parent and node.next_named_sibling else []
        for redirection in behind:
            if redirection.type == "file_redirect":  # words behind it are the command's
                nodes += redirection.children_by_field_name("destination")[1:]
        self._look([field for word in nodes for field in self._words(word)], nodes[0].start_byte, end)

    def _look(self, written: list[Field], start: int, end: int) -> None:
        """Store a command in ``self.start`` if it starts a training.

        Args:
            written: words of the command, with variables as in the script.
            start: first byte of the command.
            end: byte after the command.
        """
        # In `values` all variables are expanded; `written` keeps those without flags.
        values = [field for word in written for field in words.fields(words.computed(word))]
        place = _script([words.shown(word) for word in values])
        if place is None or not any(words.shown(word).startswith("--") for word in values[place + 1 :]):
            return
        other = _script([words.shown(word) for word in written])
        if other is None:
            written, other = values, place
        script = words.shown(values[place])
        if place and words.shown(values[place - 1]) == "-m":
            script = f"-m {script}"
        launcher, rest = (
            written[: other + 1],
            [word for word in written[other + 1 :] if words.any_number(word)],
        )
        values = [word for word in values[place + 1 :] if not words.any_number(word)]
        written = [word for word in written[other + 1 :] if not words.any_number(word)]
        # Flags hidden in nested variables: use the expanded words in the new script, too.
        if _flags(values) != _flags(written):
            written = values
        notes = list(self._notes)
        if self.start is not None:
            notes.append(f"{self.start.script} is started before; only {script} is looked at")
        if self._doubtful:
            names = ", ".join(dict.fromkeys(self._doubtful))
            notes.append(
                f"variables that are set under a condition or in a loop are taken as last set: {names}"
            )
        notes += [
            f"{words.source(word)} stays at the end; flags that come by it are not looked at" for word in rest
        ]
        self.start = Start(
            tuple(map(words.source, launcher)),
            script,
            tuple(map(words.shown, values)),
            tuple(map(words.source, written)),
            tuple(map(words.source, rest)),
            len(self._code[:start].decode()),
            len(self._code[:end].decode()),
            tuple(notes),
        )

    def _words(self, node: Node) -> list[Field]:
        """Expand variables that hold flags, and split the result into words as a shell does."""
        return words.fields(self._parts(node))

    def _joined(self, nodes: Iterable[Node]) -> Field:
        """Evaluate nodes to one word without splitting at blanks, as in an assignment."""
        parts = [part for node in nodes for part in self._parts(node, assigned=True)]
        return tuple(" " if part is None else part for part in parts)

    def _parts(self, node: Node, assigned: bool = False) -> Iterator[Item]:
        """Yield the parts of a word. With ``assigned``, blanks do not split it, as in an assignment."""
        source = _text(node, self._code)
        if node.type in ("concatenation", "command_name"):
            for plain, run in groupby(node.children, lambda child: child.type not in _SPECIAL):
                children = list(run)
                if plain:
                    yield from self._plain(children[0].start_byte, children[-1].end_byte, assigned)
                else:
                    for child in children:
                        yield from self._parts(child, assigned)
        elif node.type == "string":
            yield from self._string(node)
        elif node.type == "raw_string":
            yield source[1:-1]
        elif node.type in _VARIABLES:
            yield from self._variable(source, assigned, node)
        elif node.type == "arithmetic_expansion":
            yield self._number(source, assigned)
        elif node.type in _COMPUTED:
            yield Held(source, assigned)
        elif node.type != "comment":
            yield from self._plain(node.start_byte, node.end_byte, assigned)

    def _string(self, node: Node) -> Iterator[Item]:
        """Yield the parts of a string in double quotes."""
        place = node.start_byte + 1
        yield ""
        for child in node.children:
            if child.type not in (*_VARIABLES, *_COMPUTED, "arithmetic_expansion"):
                continue
            source = _text(child, self._code)
            # The grammar includes blanks before the $ in the node, but they belong to the text.
            source = source[re.search(r"[$`]", source).start() :]  # type: ignore[union-attr]
            yield from self._plain(place, child.end_byte - len(source.encode()), True, _TEXT_IN_QUOTES)
            place = child.end_byte
            if child.type in _VARIABLES:
                yield from self._variable(source, True, child)
            elif child.type == "arithmetic_expansion":
                yield self._number(source, quoted=True)
            else:
                yield Held(source, quoted=True)
        yield from self._plain(place, node.end_byte - 1, True, _TEXT_IN_QUOTES)

    def _plain(self, start: int, end: int, quoted: bool, pattern: re.Pattern[str] = _TEXT) -> Iterator[Item]:
        """Yield a text without escaping backslashes; unquoted text with globs like ``*`` is unchanged."""
        for match in pattern.finditer(self._code[start:end].decode()):
            if match["variable"]:
                yield from self._variable(match[0], quoted)
            elif match["escaped"]:
                yield match["escaped"] if pattern is _TEXT else match["escaped"].strip("\n")
            elif not quoted and set(match[0]) & _EXPANDED:
                yield Held(match[0], False, (match[0],))
            else:
                yield match[0]

    def _variable(self, source: str, quoted: bool, node: Node | None = None) -> Iterator[Item]:
        """Yield a variable's value if it holds flags, else the variable itself."""
        match = _VARIABLE.fullmatch(source)
        value = self._variables.get(match["bare"] or match["name"]) if match else None
        if node is not None and match and match["default"] and value is None:
            sign = next(place for place, child in enumerate(node.children) if child.type[-1:] in "-=")
            value = self._joined(node.children[sign + 1 : -1])
        if isinstance(value, list) and match and match["all"]:
            for place, field in enumerate(value):
                if place:
                    yield None
                yield from field if quoted else words.split(field)
            return
        if isinstance(value, list):
            value = value[0] if value else ()
        elif value is None or not words.has_flags(value):
            yield Held(source, quoted, value)
            return
        yield from words.quoted(value) if quoted else words.split(value)

    def _number(self, source: str, quoted: bool) -> Held:
        def put(match: re.Match[str]) -> str:
            value = self._variables.get(match[1])
            number = words.value_text(value).strip() if isinstance(value, tuple) else ""
            return number if number.isdigit() else match[0]

        inner = source[3:-2] if source.startswith("$((") else source[2:-1]
        try:
            formula = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", put, inner).strip()
            return Held(source, quoted, (str(_evaluate(ast.parse(formula, mode="eval").body)),))
        except (SyntaxError, ValueError, ZeroDivisionError):
            return Held(source, quoted)


def _evaluate(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        return _ARITHMETIC[type(node.op)](_evaluate(node.left), _evaluate(node.right))
    raise ValueError(ast.dump(node))


def _flags(fields: Sequence[Field]) -> list[str]:
    return [word.partition("=")[0] for word in map(words.source, fields) if FLAG.match(word)]


def _script(words: Sequence[str]) -> int | None:
    """Return the index of the Python script, or of the module after ``-m`` if it is no launcher."""
    for place, word in enumerate(words):
        if word.endswith(".py") and not word.startswith("-"):
            return place
        if place and words[place - 1] == "-m" and not word.startswith("torch.distributed"):
            return place if "python" in words[0] or place > 1 else None
    return None
