"""Hooks of MkDocs that make this repository's pages a site: its files, their order, the reference.

Pages link to each other, and to files of the repository, relative to where they lie. They are published in
the same places, with ``README.md`` as the first page, so that every link works in a checkout and on the site.
"""

from __future__ import annotations

import ast
import logging
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
PAGES = (
    *("*.md", "docs/**/*.md", "examples/*/README.md", "mindspeed_dsa/ops/*/README.md"),
    "tests/npu/device/README.md",
)
PACKAGE = "mindspeed_dsa"
SOURCES = ROOT / "runs" / "site-sources"
REFERENCE = "docs/reference.md"
INDEX, FEATURES, CHINESE = "docs/README.md", "docs/features/README.md", "docs/zh/README.md"
PUBLIC = (
    "mindspeed_dsa",
    "mindspeed_dsa.ops.dsa",
    "mindspeed_dsa.transformers",
    "mindspeed_dsa.rl",
    "mindspeed_dsa.weights",
)
"""Modules whose ``__all__`` is the public interface."""
LINK = re.compile(r"(?<=\]\()(?!\w+:)([^)#\s]+)(?=[)#])")
ROLE = re.compile(r":(?:func|class|meth|attr|data|mod|exc):`")
CODE = re.compile(r"^( *)```.*?^\1```|`[^`\n]*`", re.M | re.S)
_log = logging.getLogger("mkdocs.hooks.site")


def on_startup(**_: Any) -> None:
    """Copy the package to where mkdocstrings reads it.

    mkdocstrings passes over folders without ``__init__.py``, and shows roles such as ``:func:`` as they are
    written.
    """
    shutil.rmtree(SOURCES, ignore_errors=True)
    shutil.copytree(ROOT / PACKAGE, SOURCES / PACKAGE, ignore=shutil.ignore_patterns("__pycache__"))
    for path in list((SOURCES / PACKAGE).rglob("*")):
        if path.is_dir():
            (path / "__init__.py").touch()
        elif path.suffix == ".py":
            path.write_text(ROLE.sub("`", path.read_text(encoding="utf-8")), encoding="utf-8")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Take the repository's pages, and the files that they link to, in place of what lies in ``docs_dir``."""
    for file in list(files):
        if file.src_dir == config.docs_dir:
            files.remove(file)
    pages = [path.relative_to(ROOT).as_posix() for pattern in PAGES for path in sorted(ROOT.glob(pattern))]
    linked = {name for page in pages for name in _linked(page) if (ROOT / name).is_file()}
    for name in (*pages, *sorted(linked.difference(pages))):
        files.append(File(name, str(ROOT), config.site_dir, config.use_directory_urls))
    files.append(File.generated(config, REFERENCE, content=reference()))
    config.nav = navigation(pages)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Have links to folders lead to the page in them, as a forge does."""

    def to_page(found: re.Match[str]) -> str:
        target = ROOT / page.file.src_uri
        folder = target.parent / found[0]
        return f"{found[0].rstrip('/')}/README.md" if (folder / "README.md").is_file() else found[0]

    return LINK.sub(to_page, markdown)


def _linked(page: str) -> Iterator[str]:
    """Yield the files of the repository that a page links to."""
    text = CODE.sub("", (ROOT / page).read_text(encoding="utf-8"))
    for target in LINK.findall(text):
        yield os.path.normpath(PurePosixPath(page).parent / target)


def navigation(pages: list[str]) -> list[Any]:
    """Build the site's order from the pages' own indices.

    Sections are those tables of ``docs/README.md`` whose first column is a page; what no index names is at
    the end, by folder, so that a page that is forgotten there is found here.
    """
    left = dict.fromkeys(page for page in pages if page != "README.md")
    nav: list[Any] = [{"mindspeed_dsa": "README.md"}, {"All pages": _take(left, INDEX)}]
    for title, table in _sections(INDEX):
        rows = [row for row in _rows(INDEX, table) if row[1] in left]
        entries = [{name: _take(left, page)} for name, page in rows]
        if entries:
            nav.append({title: entries})
        if any(page == FEATURES for _, page in rows):
            nav.append({"Features by kind": list(_kinds(left))})
    nav.append({"API reference": REFERENCE})
    chinese = {name: page for name, page in _rows(CHINESE, _read(CHINESE)) if page in left}
    if CHINESE in left:
        nav.append(
            {"中文": [_take(left, CHINESE), *({name: _take(left, page)} for name, page in chinese.items())]}
        )
    for title, folder in (("Pages of operators", "mindspeed_dsa/"), ("Examples", "examples/"), ("More", "")):
        rest = [page for page in left if page.startswith(folder)]
        if rest:
            nav.append({title: [_take(left, page) for page in rest]})
    return nav


def _kinds(left: dict[str, None]) -> Iterator[dict[str, Any]]:
    for title, table in _sections(FEATURES):
        entries = [{name: _take(left, page)} for name, page in _rows(FEATURES, table) if page in left]
        if entries:
            yield {title.partition(":")[0]: entries}


def _take(left: dict[str, None], page: str) -> str:
    del left[page]
    return page


def _sections(page: str) -> list[tuple[str, str]]:
    found = re.split(r"^## (.*)$", _read(page), flags=re.M)[1:]
    return list(zip(found[::2], found[1::2], strict=True))


def _rows(page: str, text: str) -> Iterator[tuple[str, str]]:
    """Yield title and page of links to pages, each page once: those that begin a row, or are in no table."""
    seen = set()
    for line in text.splitlines():
        begin = r"^\| " if line.startswith("|") else ""
        for title, target in re.findall(rf"{begin}\[([^\]]+)\]\((?!\w+:)([^)#]+\.md)\)", line):
            name = os.path.normpath(PurePosixPath(page).parent / target)
            if name not in seen:
                seen.add(name)
                yield title, name


def _read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def reference() -> str:
    """Write the page from which mkdocstrings makes the reference: each public name under its module."""
    parts = ["# API reference\n"]
    for module in PUBLIC:
        parts.append(f"## {module}\n")
        parts += [f"::: {module}.{name}\n" for name in _exported(module)]
    return "\n".join(parts)


def _exported(module: str) -> list[str]:
    """Read ``__all__`` without importing the module, which may need torch."""
    place = ROOT / module.replace(".", "/")
    file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and any(
            getattr(name, "id", "") == "__all__" for name in node.targets
        ):
            found: list[str] = ast.literal_eval(node.value)
            return found
    raise ValueError(f"{file} has no __all__")
