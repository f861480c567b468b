"""Words of the command that a shell script runs: as much of bash as training scripts use.

Assignments, arrays, quotes, comments, continued lines, variables with defaults and sums of numbers are read; what a
program would have to be run for (`$(hostname)`) stays as it is written. Branches are all taken, and said to be.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\+?)=")
_OPENS, _CLOSES = {"if", "case", "for", "while"}, {"fi", "esac", "done"}
_SKIPPED = {"then", "else", "elif", "do", "export", "exec", "time", "nohup", "local", "readonly", "declare", "sudo"}
_DEEPEST = 20  # variables inside the defaults of variables


@dataclass(frozen=True)
class Piece:
    """A part of a word: text as it is, or a variable to be looked up."""

    text: str
    variable: bool = False
    quoted: bool = False


Word = tuple[Piece, ...]


@dataclass
class Script:
    """What is known while a script is read from top to bottom."""

    variables: dict[str, list[str]] = field(default_factory=dict)
    commands: list[list[str]] = field(default_factory=list)
    conditional: dict[str, str] = field(default_factory=dict)  # variables set in a branch, with their last value
    left_out: list[str] = field(default_factory=list)  # lists that the script uses and does not set


def read_script(text: str) -> Script:
    """Run the assignments, keep the commands.

    >>> script = read_script('TP=${TP:-8}\\nA=(--bf16  # precision\\n)\\ntorchrun x.py --tp $TP ${A[@]}')
    >>> script.commands[-1]
    ['torchrun', 'x.py', '--tp', '8', '--bf16']
    """
    script, depth = Script(), 0
    for statement in _statements(text):
        first = statement[0][0].text if len(statement[0]) == 1 and not statement[0][0].quoted else ""
        depth += (first in _OPENS) - (first in _CLOSES)
        if first in _OPENS | _CLOSES:
            continue
        _run(script, statement, inside=depth > 0)
    return script


def _run(script: Script, statement: list[Word], *, inside: bool) -> None:
    words = list(statement)
    while words and len(words[0]) == 1 and words[0][0].text in _SKIPPED:
        words.pop(0)
    before = dict(script.variables)
    while words and _assigns(words[0]):
        _assign(script, words.pop(0), words, inside=inside)
    if words:
        script.variables = before  # assignments before a command are its own
    expanded = [text for word in words for text in expand(script, word)]
    if expanded and expanded[0].startswith("--") and script.commands:
        script.commands[-1] += expanded  # a comment between continued lines ends the command only for bash
    elif expanded:
        script.commands.append(expanded)


def _assigns(word: Word) -> re.Match[str] | None:
    return None if word[0].variable or word[0].quoted else _ASSIGNMENT.match(word[0].text)


def _assign(script: Script, word: Word, rest: list[Word], *, inside: bool) -> None:
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
        return
    text = "".join(_value(script, piece) for piece in value)
    script.variables[name] = ["".join(script.variables.get(name, [])) + text] if adds else [text]
    if inside:
        script.conditional[name] = text


def expand(script: Script, word: Word) -> list[str]:
    """A word as the shell hands it over: unquoted values are split, lists give all their items."""
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
    """The text of a piece; what the script does not set stays as it is written."""
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
        words = _words(rest[default.end() :])
        return " ".join("".join(_value(script, part, depth + 1) for part in word) for word in words)
    return f"${{{text}}}"


def _sum(script: Script, text: str) -> str:
    """Whole numbers with + - * / %, variables with or without a dollar."""
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


def _statements(text: str) -> Iterator[list[Word]]:
    """Runs of words; a list in parentheses goes on over line ends."""
    statement: list[Word] = []
    depth = 0
    for word in _words(text):
        if word == (Piece("("),):
            depth += 1
        elif word == (Piece(")"),):
            depth = max(depth - 1, 0)
        if word != (Piece("\n"),):
            statement.append(word)
        elif not depth and statement:
            yield statement
            statement = []
    if statement:
        yield statement


def _words(text: str) -> Iterator[Word]:
    """Words, with a line end where a command ends; redirections are dropped."""
    at, pieces, skip = 0, list[Piece](), False

    def flush() -> Iterator[Word]:
        nonlocal pieces, skip
        if pieces and not skip:
            yield tuple(pieces)
        if pieces:
            pieces, skip = [], False

    while at < len(text):
        char = text[at]
        if char in " \t\r":
            yield from flush()
            at += 1
        elif char == "\\" and text[at + 1 : at + 2] in {"\n", "\r"}:
            yield from flush()
            at = text.find("\n", at) + 1
        elif char in "\n;&|{}" and not (char in "{}" and pieces):
            yield from flush()
            yield (Piece("\n"),)
            at += 1
        elif char in "()":
            yield from flush()
            yield (Piece(char),)
            at += 1
        elif char == "#" and not pieces:
            end = text.find("\n", at)
            at = len(text) if end < 0 else end
        elif char in "<>":
            pieces = [] if len(pieces) == 1 and pieces[0].text.isdecimal() else pieces
            yield from flush()
            at += len(re.match(r"[<>&]+", text[at:])[0])  # type: ignore[index]
            skip = True
        else:
            found, at = _piece(text, at)
            pieces += found
    yield from flush()


def _piece(text: str, at: int) -> tuple[list[Piece], int]:
    """The next part of a word, and where it ends."""
    char = text[at]
    if char == "'":
        end = text.find("'", at + 1)
        end = len(text) if end < 0 else end
        return [Piece(text[at + 1 : end], quoted=True)], end + 1
    if char == '"':
        return _double_quoted(text, at + 1)
    if char == "\\":
        return [Piece(text[at + 1 : at + 2], quoted=True)], at + 2
    if char in "$`":
        piece, end = _variable(text, at, quoted=False)
        return [piece], end
    match = re.compile(r"[^\s'\"\\$`;&|()<>]+").match(text, at)
    assert match is not None
    return [Piece(match[0])], match.end()


def _double_quoted(text: str, at: int) -> tuple[list[Piece], int]:
    found, plain = list[Piece](), ""
    while at < len(text) and text[at] != '"':
        if text[at] == "\\" and text[at + 1 : at + 2] in {'"', "\\", "$", "`", "\n"}:
            plain += text[at + 1].replace("\n", "")
            at += 2
        elif text[at] in "$`":
            piece, at = _variable(text, at, quoted=True)
            found += [Piece(plain, quoted=True), piece] if plain else [piece]
            plain = ""
        else:
            plain += text[at]
            at += 1
    return [*found, *([Piece(plain, quoted=True)] if plain or not found else [])], at + 1


def _variable(text: str, at: int, *, quoted: bool) -> tuple[Piece, int]:
    """`$X`, `${X...}`, `$(...)`, `$((...))`, and what stands between backquotes."""
    if text[at] == "`":
        end = text.find("`", at + 1)
        end = len(text) if end < 0 else end
        return Piece(f"({text[at + 1 : end]})", True, quoted), end + 1
    following = text[at + 1 : at + 2]
    if following in {"{", "("}:
        end = _closing(text, at + 1)
        inner = text[at + 2 : end] if following == "{" else text[at + 1 : end + 1]
        return Piece(inner, True, quoted), end + 1
    name = _NAME.match(text, at + 1)
    if name:
        return Piece(name[0], True, quoted), name.end()
    if following and (following in "@*#?!$" or following.isdigit()):
        return Piece(following, True, quoted), at + 2
    return Piece("$", quoted=True), at + 1


def _closing(text: str, at: int) -> int:
    """Where the bracket at `at` closes."""
    opening = text[at]
    closing = {"{": "}", "(": ")"}[opening]
    depth = 0
    for i in range(at, len(text)):
        depth += (text[i] == opening) - (text[i] == closing)
        if depth == 0:
            return i
    return len(text)
