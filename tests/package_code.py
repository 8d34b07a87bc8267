"""The package's own code, as the tests read it that look for what must not be in it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import weightsync

ROOT = Path(weightsync.__file__).parent


@cache
def parse_package() -> dict[str, ast.Module]:
    """Return each module's tree by its dotted name."""
    trees = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = ("weightsync", *path.relative_to(ROOT).with_suffix("").parts)
        trees[".".join(parts).removesuffix(".__init__")] = ast.parse(path.read_text(encoding="utf-8"))
    return trees


@dataclass(frozen=True)
class Call:
    """One call: in which function of which module, and of what, as far as it is written there."""

    module: str
    function: str
    name: str
    """``os.open``, ``self._thread.join``; what is computed stands as ``?``."""
    node: ast.Call
    awaited: bool

    @property
    def method(self) -> str:
        return self.name.rpartition(".")[2]

    @property
    def where(self) -> str:
        return f"{self.module}:{self.function}"

    def __str__(self) -> str:
        return f"{self.where} line {self.node.lineno}: {ast.unparse(self.node)[:120]}"

    def keyword(self, name: str) -> ast.expr | None:
        return next((each.value for each in self.node.keywords if each.arg == name), None)


def calls_in(module: str, tree: ast.AST) -> Iterator[Call]:
    yield from _walk(module, "", tree, awaited=False)


def _walk(module: str, function: str, node: ast.AST, *, awaited: bool) -> Iterator[Call]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        function = f"{function}.{node.name}".removeprefix(".")
    if isinstance(node, ast.Call):
        yield Call(module, function, dotted(node.func), node, awaited)
    for child in ast.iter_child_nodes(node):
        yield from _walk(module, function, child, awaited=isinstance(node, ast.Await))


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return "?"


def imports_in(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
