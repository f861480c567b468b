"""Mutants: small mistakes put into functions, drawn by seed, and found again after files and names have moved.

A function is known by a digest of its code in which every name is a number. A mutant is such a digest and a place in it.
"""

from __future__ import annotations

import ast
import copy
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

SEED, COUNT = 24, 300
_OPPOSITE: dict[type, type] = {
    ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.LtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Add: ast.Sub, ast.Sub: ast.Add,
    ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """A place in a function: the digest of its code, and which of its places."""

    function: str
    place: int


def functions(source: Path) -> Iterator[tuple[Path, ast.FunctionDef]]:
    """Yield every function of a tree of source files that is longer than a stub."""
    for path in sorted(source.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef) and places(node):
                yield path, node


def digest(node: ast.FunctionDef) -> str:
    """Return a digest of a function's code that no renaming changes."""
    known: dict[str, str] = {}
    code = copy.deepcopy(node)
    code.decorator_list, code.returns = [], None
    if ast.get_docstring(code) is not None:
        code.body = code.body[1:] or [ast.Pass()]
    for each in ast.walk(code):
        for field in ("id", "attr", "arg", "name"):
            if isinstance(getattr(each, field, None), str):
                setattr(each, field, known.setdefault(getattr(each, field), str(len(known))))
        if hasattr(each, "annotation"):
            each.annotation = None
    return hashlib.sha256(ast.dump(code).encode()).hexdigest()[:16]


def places(node: ast.FunctionDef) -> list[ast.AST]:
    """Return what can be changed in a function, in the order of its code; not in its docstring, defaults or annotations."""
    found: list[ast.AST] = []
    for statement in node.body:
        for each in ast.walk(statement):
            if isinstance(each, ast.Compare | ast.BoolOp | ast.BinOp):
                operator = each.ops[0] if isinstance(each, ast.Compare) else each.op
                if type(operator) in _OPPOSITE:
                    found.append(each)
            elif isinstance(each, ast.UnaryOp):
                found += [each] if isinstance(each.op, ast.Not) else []
            elif isinstance(each, ast.Constant):
                found += [each] if type(each.value) in (int, float, bool) else []
    return found


def mutated(path: Path, function: ast.FunctionDef, place: int) -> str:
    """Return the text of a file with one place of a function changed."""
    tree = ast.parse(path.read_text("utf-8"))
    (own,) = (
        each for each in ast.walk(tree)
        if isinstance(each, ast.FunctionDef) and (each.lineno, each.name) == (function.lineno, function.name)
    )  # fmt: skip
    _change(places(own)[place])
    return ast.unparse(ast.fix_missing_locations(tree))


def _change(node: ast.AST) -> None:
    if isinstance(node, ast.Compare):
        node.ops[0] = _OPPOSITE[type(node.ops[0])]()
    elif isinstance(node, ast.BoolOp | ast.BinOp):
        node.op = _OPPOSITE[type(node.op)]()
    elif isinstance(node, ast.UnaryOp):
        node.op = ast.UAdd()  # `not x` -> truth of x, near enough: +x of a bool
    elif isinstance(node, ast.Constant):
        node.value = not node.value if isinstance(node.value, bool) else node.value + 1  # type: ignore[operator]


def drawn(source: Path, seed: int = SEED, count: int = COUNT) -> list[Mutant]:
    """Return so many mutants over all rooms: every place of every function is as likely as any other."""
    every = sorted(
        {Mutant(digest(node), i) for _, node in functions(source) for i in range(len(places(node)))}, key=repr
    )
    return Random(seed).sample(every, count)
