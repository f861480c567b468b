"""Scan events one by one, as scanner.c does: for text that contains invalid JSON, or is incomplete."""

from __future__ import annotations

import json
import re

from meshwright.traces.reading.scanner.compiled import Status

BLANK = re.compile(rb"[ \t\r\n]*")
BETWEEN = re.compile(rb"[ \t\r\n,]*")
STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.S)
WORD = re.compile(rb"[0-9a-zA-Z.+-]+")
SIGN = re.compile(rb'[{}\[\]]|"[^"\\]*(?:\\.[^"\\]*)*"|"', re.S)
Members = dict[str, bytes]


class Stopped(Exception):
    """Signal that the text ends here (MORE), or is no JSON (BAD)."""

    def __init__(self, status: Status) -> None:
        self.status = status


def items(text: bytes) -> tuple[list[Members | None], int, Status]:
    """Return the complete items of a list's text, with the members of those that are events.

    Return also the position reached, and why it stopped.

    >>> events, place, status = items(b'{"ph": "X", "a": nan}, 7, {"ph" "i"}')
    >>> events, place, status.name
    ([{'ph': b'"X"', 'a': b'nan'}, None], 26, 'BAD')
    """
    found: list[Members | None] = []
    place = 0
    while True:
        place = _after(BETWEEN, text, place)
        if place == len(text):
            return found, place, Status.MORE
        if text[place] == ord("]"):
            return found, place + 1, Status.DONE
        try:
            if text[place] == ord("{"):
                event, place = members(text, place)
                found.append(event)
            else:
                place = _value_end(text, place)
                found.append(None)
        except Stopped as stop:
            return found, place, stop.status


def members(text: bytes, place: int = 0, *, of_event: bool = True) -> tuple[Members, int]:
    """Return the values of an event, or of its args, by key (the last of equal keys), and the position after them."""
    found: Members = {}
    place = _after(BLANK, text, place + 1)
    if text[place : place + 1] == b"}":
        return found, place + 1
    while True:
        _expect(text, place, b'"')
        end = _value_end(text, place)
        key = said(text[place + 1 : end - 1])
        place = _after(BLANK, text, end)
        _expect(text, place, b":")
        place = _after(BLANK, text, place + 1)
        if of_event and key == "args" and text[place : place + 1] == b"{":
            _, end = members(text, place, of_event=False)
        else:
            end = _value_end(text, place)
        found[key] = text[place:end]
        place = _after(BLANK, text, end)
        if text[place : place + 1] == b"}":
            return found, place + 1
        _expect(text, place, b",")
        place = _after(BLANK, text, place + 1)


def _after(pattern: re.Pattern[bytes], text: bytes, place: int) -> int:
    found = pattern.match(text, place)
    return found.end() if found else place


def _expect(text: bytes, place: int, sign: bytes) -> None:
    if text[place : place + 1] != sign:
        raise Stopped(Status.BAD if place < len(text) else Status.MORE)


def said(raw: bytes) -> str:
    """Return the text of a key or a phase; invalid JSON never equals a known key."""
    text = raw.decode("utf-8", "replace")
    if "\\" not in text:
        return text
    try:
        return str(json.loads(f'"{text}"', strict=False))
    except ValueError:
        return ""


def _value_end(text: bytes, place: int) -> int:
    """Return the end of a value of any kind; brackets of both kinds count alike."""
    first = text[place : place + 1]
    if first == b'"':
        found = STRING.match(text, place)
        if not found:
            raise Stopped(Status.MORE)
        return found.end()
    if first not in (b"{", b"["):
        found = WORD.match(text, place)
        if found and found.end() < len(text):
            return found.end()
        raise Stopped(Status.MORE if found or place >= len(text) else Status.BAD)
    depth = 0
    for sign in SIGN.finditer(text, place):
        if sign[0] == b'"':
            break
        depth += {b"{": 1, b"[": 1, b"}": -1, b"]": -1}.get(sign[0], 0)
        if not depth:
            return sign.end()
    raise Stopped(Status.MORE)
