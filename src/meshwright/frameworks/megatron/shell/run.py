"""Find the command that a shell script runs, with as much of bash as training scripts use.

Assignments, arrays, variables with defaults, sums of numbers and simple conditions are followed, as if the script were
started without arguments in an empty environment. Text that needs a program (`$(hostname)`, `[ -f x ]`) stays as
written. An undecidable condition counts as true, and variables set under it are recorded.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field

from meshwright.frameworks.megatron.shell.parse import Piece, Statement, Word, statements, words

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\+?)=")
_LOOPS, _LOOP_ENDS = {"case", "for", "while", "until", "select"}, {"esac", "done"}
_SKIPPED = {"then", "else", "do", "export", "exec", "time", "nohup", "local", "readonly", "declare", "sudo"}
_DEEPEST = 20  # variables inside the defaults of variables


@dataclass
class Branch:
    """State of reading inside an `if`: True if this part runs, and if one before it ran."""

    runs: bool
    done: bool
    sure: bool = True


@dataclass
class Script:
    """State while a script is read from top to bottom."""

    variables: dict[str, list[str]] = field(default_factory=dict)
    commands: list[list[str]] = field(default_factory=list)
    conditional: dict[str, str] = field(default_factory=dict)  # set under an undecidable condition, with the last value
    left_out: list[str] = field(default_factory=list)  # lists that the script uses but does not set
    branches: list[Branch] = field(default_factory=list)

    @property
    def runs(self) -> bool:
        return all(branch.runs for branch in self.branches)

    @property
    def sure(self) -> bool:
        return all(branch.sure for branch in self.branches)


def read_script(text: str) -> Script:
    """Run the assignments and collect the commands.

    >>> script = read_script('TP=${TP:-8}\\nA=(--bf16  # precision\\n)\\ntorchrun x.py --tp $TP ${A[@]}')
    >>> script.commands[-1]
    ['torchrun', 'x.py', '--tp', '8', '--bf16']
    """
    script = Script()
    condition: list[Statement] | None = None  # of an `if` or `elif` before its `then`
    last: bool | None = None  # result of the test before an && or ||
    for statement in statements(text):
        first = statement.first
        if first in {"if", "elif"}:
            if first == "if":
                script.branches.append(Branch(runs=True, done=False))
            condition = [Statement(statement.words[1:])]
        elif first == "then" and condition is not None:
            _decide(script, condition)
            condition = None
            _run(script, statement.words[1:])
        elif condition is not None:
            condition.append(statement)
        elif first in _LOOPS:
            script.branches.append(Branch(runs=True, done=True, sure=False))
        elif first in {"fi", *_LOOP_ENDS}:
            script.branches = script.branches[:-1]
        elif first == "else" and script.branches:
            branch = script.branches[-1]
            branch.runs, branch.done = not branch.done, True
            _run(script, statement.words[1:])
        elif (statement.joined, last) not in {("&&", False), ("||", True)}:
            last = truth(script, statement.words)
            _run(script, statement.words)
    return script


def _decide(script: Script, condition: list[Statement]) -> None:
    """Choose the part of an `if` that runs; of an undecidable one, the first."""
    found: bool | None = None
    for part in condition:
        if not part.words:
            continue
        said = truth(script, part.words)
        if part.joined == "||":
            found = True if True in (found, said) else None if None in (found, said) else False
        elif part.joined == "&&":
            found = False if False in (found, said) else None if None in (found, said) else True
        else:
            found = said
    branch = script.branches[-1]
    branch.runs = not branch.done and found is not False
    branch.sure = branch.sure and found is not None
    branch.done = branch.done or found is not False


_COMPARED = {"-eq": "==", "-ne": "!=", "=": "==", "==": "==", "!=": "!="}
_ORDERED = {"-gt": (1,), "-ge": (0, 1), "-lt": (-1,), "-le": (-1, 0)}


def truth(script: Script, test: list[Word]) -> bool | None:
    """Return the value of `[ "$X" = y ]`, `[[ -n $X ]]`, `true` or a variable; None if it is undecidable."""
    found = ["".join(_value(script, piece) for piece in word) for word in test]
    found = ["" if re.fullmatch(r"\$\{?\w+\}?", word) else word for word in found]  # not set: empty
    if found in (["true"], ["false"]):
        return found == ["true"]
    if len(found) < 3 or (found[0], found[-1]) not in {("[", "]"), ("[[", "]]")}:
        return None
    inner, turned = found[1:-1], False
    while inner and inner[0] == "!":
        inner, turned = inner[1:], not turned
    said = _tested(inner)
    return said if said is None else said != turned


def _tested(words_: list[str]) -> bool | None:
    if any("$" in word for word in words_):
        return None
    if len(words_) == 1:
        return bool(words_[0])
    if len(words_) == 2 and words_[0] in {"-n", "-z"}:
        return bool(words_[1]) == (words_[0] == "-n")
    if len(words_) != 3:
        return None
    left, how, right = words_
    if how in _COMPARED:
        return (left == right) == (_COMPARED[how] == "==")
    if how in _ORDERED and re.fullmatch(r"-?\d{1,9}", left) and re.fullmatch(r"-?\d{1,9}", right):
        return (int(left) > int(right)) - (int(left) < int(right)) in _ORDERED[how]
    return None


def _run(script: Script, statement: list[Word]) -> None:
    """Make assignments; any other statement is a command."""
    if not script.runs:
        return
    left = list(statement)
    while left and len(left[0]) == 1 and left[0][0].text in _SKIPPED:
        left.pop(0)
    before = dict(script.variables)
    while left and _assigns(left[0]):
        _assign(script, left.pop(0), left)
    if left:
        script.variables = before  # assignments before a command are its own
    expanded = [text for word in left for text in expand(script, word)]
    if expanded and expanded[0].startswith("--") and script.commands:
        script.commands[-1] += expanded  # a comment between continued lines ends the command only for bash
    elif expanded:
        script.commands.append(expanded)


def _assigns(word: Word) -> re.Match[str] | None:
    return None if word[0].variable or word[0].quoted else _ASSIGNMENT.match(word[0].text)


def _assign(script: Script, word: Word, rest: list[Word]) -> None:
    match = _ASSIGNMENT.match(word[0].text)
    assert match is not None
    name, adds = match[1], bool(match[2])
    value: Word = (Piece(word[0].text[match.end() :]), *word[1:])
    if value == (Piece(""),) and rest and rest[0] == (Piece("("),):
        rest.pop(0)
        items: list[str] = []
        while rest and (following := rest.pop(0)) != (Piece(")"),):
            items += expand(script, following)
        script.variables[name] = (script.variables.get(name, []) if adds else []) + items
        if not script.sure:
            script.conditional[name] = " ".join(items)
        return
    text = "".join(_value(script, piece) for piece in value)
    script.variables[name] = ["".join(script.variables.get(name, [])) + text] if adds else [text]
    if not script.sure:
        script.conditional[name] = text


def expand(script: Script, word: Word) -> list[str]:
    """Return a word as the shell passes it on: unquoted values are split, lists give all their items."""
    if len(word) == 1 and word[0].variable and (name := _list_name(word[0].text)):
        if name in script.variables:
            return [part for item in script.variables[name] for part in ([item] if word[0].quoted else item.split())]
        if word[0].text not in {"@", "*"}:
            script.left_out.append(name)
        return []
    fields, started = [""], False
    for piece in word:
        text = _value(script, piece)
        if piece.variable and not piece.quoted and not text.startswith("$"):
            parts = text.split()
            fields[-1] += parts[0] if parts else ""
            fields += parts[1:]
            started = started or bool(parts)
        else:
            fields[-1] += text
            started = True
    return fields if started else []


def _list_name(text: str) -> str:
    if text in {"@", "*"}:
        return text
    match = re.fullmatch(r"([A-Za-z_][A-Za-z0-9_]*)\[[@*]\]", text)
    return match[1] if match else ""


def _value(script: Script, piece: Piece, depth: int = 0) -> str:
    """Return the text of a piece; variables that the script does not set stay as written."""
    if not piece.variable:
        return piece.text
    text = piece.text
    if text.startswith("(("):
        return _sum(script, text[2:-2])
    name = _NAME.match(text) or re.match(r"\d+", text)
    if name is None or depth > _DEEPEST:
        return f"${{{text}}}" if not text.startswith("(") else f"${text}"
    rest = text[name.end() :]
    if name[0] in script.variables and not rest.startswith((":+", "#", "%", "/")):
        return " ".join(script.variables[name[0]])
    if default := re.match(r":?[-=]", rest):
        default_words = words(rest[default.end() :])
        return " ".join("".join(_value(script, part, depth + 1) for part in word) for word in default_words)
    return f"${{{text}}}"


def _sum(script: Script, text: str) -> str:
    """Evaluate whole numbers with + - * / %, variables with or without a dollar."""
    known = re.sub(r"\$?\{?([A-Za-z_][A-Za-z0-9_]*)\}?", lambda m: " ".join(script.variables.get(m[1], [m[0]])), text)
    try:
        return str(_number(ast.parse(known.strip()[:200], mode="eval").body))
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
        return f"$(({text}))"


def _number(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return int(node.value)
    if isinstance(node, ast.BinOp):
        left, right = _number(node.left), _number(node.right)
        if isinstance(node.op, ast.Add):
            return left + right
        if isinstance(node.op, ast.Sub):
            return left - right
        if isinstance(node.op, ast.Mult):
            return left * right
        if isinstance(node.op, ast.Div | ast.FloorDiv):
            return left // right
        if isinstance(node.op, ast.Mod):
            return left % right
    raise ValueError
