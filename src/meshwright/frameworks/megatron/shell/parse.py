"""Parse a shell script into words and statements: quotes, comments, continued lines, variables."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PLAIN = re.compile(r"""[^ \t\r\n'"\\$`;&|()<>]+""")  # of a word, up to what has a meaning
_END, _OPEN, _CLOSE = "\n", "(", ")"


@dataclass(frozen=True)
class Piece:
    """Part of a word: literal text, or a variable to be looked up."""

    text: str
    variable: bool = False
    quoted: bool = False


Word = tuple[Piece, ...]


@dataclass(frozen=True)
class Statement:
    """Words up to the end of a command, and its join to the one before: nothing, && or ||."""

    words: list[Word]
    joined: str = ""

    @property
    def first(self) -> str:
        """First word, if it is plain text."""
        word = self.words[0]
        return word[0].text if len(word) == 1 and not word[0].quoted and not word[0].variable else ""


def statements(text: str) -> Iterator[Statement]:
    """Yield the statements; a list in parentheses continues over line ends."""
    found, depth, joined = list[Word](), 0, ""
    for word in words(text):
        mark = word[0].text if len(word) == 1 and not word[0].quoted and not word[0].variable else ""
        depth = max(depth + (mark == _OPEN) - (mark == _CLOSE), 0)
        if mark not in {_END, "&&", "||"}:
            found.append(word)
        elif not depth:
            if found:
                yield Statement(found, joined)
            found, joined = [], "" if mark == _END else mark
    if found:
        yield Statement(found, joined)


def words(text: str) -> Iterator[Word]:
    """Yield the words, with a line end after each command, and && and || as they are; redirections are dropped."""
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
            both = text[at : at + 2] if text[at : at + 2] in {"&&", "||"} else ""
            yield (Piece(both or _END),)
            at += 2 if both else 1
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
    """Return the next part of a word, and its end."""
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
    match = _PLAIN.match(text, at)
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
    """Return the variable in `$X`, `${X...}`, `$(...)`, `$((...))`, or the text between backquotes."""
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
    """Return the position where the bracket at `at` closes."""
    opening = text[at]
    closing = {"{": "}", "(": ")"}[opening]
    depth = 0
    for i in range(at, len(text)):
        depth += (text[i] == opening) - (text[i] == closing)
        if depth == 0:
            return i
    return len(text)
