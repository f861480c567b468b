"""Facts of a program's source that its code lacks before it has run: bases of classes, named lambdas, imports."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from types import CodeType


class Outline:
    """Outline of a program's source: its classes, imports and named lambdas.

    >>> outline = Outline("from far import Far\\nclass A: ...\\nclass B(A, Far): ...\\nclass C(B): ...")
    >>> outline.bases("C"), outline.from_elsewhere("C")
    (['B', 'A'], ['far:Far'])
    """

    def __init__(self, source: str | bytes) -> None:
        self.classes: dict[str, list[str]] = {}  # bases as they are written
        self._lambdas: dict[str, ast.Lambda] = {}
        self._imported: dict[str, tuple[str, str]] = {}  # name -> module, and the name in it
        self._visit(ast.parse(source).body, "")

    def _visit(self, body: Iterable[ast.AST], outer: str) -> None:
        for one in body:
            if isinstance(one, ast.ClassDef):
                self.classes[outer + one.name] = [ast.unparse(base) for base in one.bases]
                self._visit(one.body, f"{outer}{one.name}.")
            elif isinstance(one, ast.Assign | ast.AnnAssign) and isinstance(one.value, ast.Lambda):
                for name in one.targets if isinstance(one, ast.Assign) else [one.target]:
                    self._lambdas[outer + ast.unparse(name)] = one.value
            elif isinstance(one, ast.Import):
                for alias in one.names:
                    whole = alias.name if alias.asname else alias.name.partition(".")[0]
                    self._imported[alias.asname or whole] = whole, ""
            elif isinstance(one, ast.ImportFrom):
                for alias in one.names:
                    self._imported[alias.asname or alias.name] = "." * one.level + (one.module or ""), alias.name
            elif not isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                self._visit(ast.iter_child_nodes(one), outer)  # if, try, with

    def bases(self, name: str) -> list[str]:
        """Return the classes of this source that a class inherits from, in Python's lookup order."""
        asked = [base for base in self._above(name) if base in self.classes]
        return list(reversed(dict.fromkeys(reversed(asked))))  # one that is reached twice comes last

    def from_elsewhere(self, name: str) -> list[str]:
        """Return bases from other modules, as targets."""
        others = [base for base in self._above(name) if base not in self.classes]
        return list(dict.fromkeys(target for base in others if (target := self.target_of(base))))

    def target_of(self, name: str) -> str:
        """Return the original name of an imported name, or ""."""
        first, _, rest = name.partition(".")
        if first not in self._imported:
            return ""
        module, what = self._imported[first]
        if rest and "." in rest and not what:  # torch.nn.Module
            module, rest = f"{module}.{rest.rpartition('.')[0]}", rest.rpartition(".")[2]
        elif rest and what and what[0].islower():  # nn.Module, after "from torch import nn"
            module, what = f"{module}.{what}", ""
        return f"{module}:{'.'.join(part for part in (what, rest) if part)}"

    def _above(self, name: str, below: tuple[str, ...] = ()) -> Iterator[str]:
        for base in self.classes.get(name, ()):
            beside = f"{name.rpartition('.')[0]}.{base}"
            here = beside if beside in self.classes else base
            if here not in (*below, name):  # a class may have the name of its base
                yield here
                yield from self._above(here, (*below, name))

    def lambda_of(self, code: CodeType, name: str) -> Iterator[CodeType]:
        """Yield the code of `name = lambda ...`: code objects of lambdas have no name, but a position."""
        found = self._lambdas.get(name)
        if found is None:
            return
        for one in _all(code):
            if one.co_name == "<lambda>" and _lies_in(one, found):
                yield one
                return  # others are inside it


def _lies_in(code: CodeType, node: ast.Lambda) -> bool:
    """Return True if the code is this lambda.

    Several on one line differ by columns, which Python 3.12 omits if only a constant is returned.
    """
    first, last = (node.lineno, node.col_offset), (node.end_lineno or 0, node.end_col_offset or 0)
    places = [(line, end, left, right) for line, end, left, right in code.co_positions() if line and end and right]
    return code.co_firstlineno == node.lineno and all(
        first <= (line, left or 0) and (end, right or 0) <= last for line, end, left, right in places
    )


def _all(code: CodeType) -> Iterator[CodeType]:
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield one
            yield from _all(one)
