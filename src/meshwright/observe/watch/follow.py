"""What is followed beside calls, attributes, locals and globals, and how a change of them is said."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter_ns
from types import FrameType, FunctionType, ModuleType

import msgspec

from meshwright.observe.watch.events import Event
from meshwright.observe.watch.hooks import Recorder, Thread
from meshwright.observe.watch.known import makers
from meshwright.observe.watch.objects import Names, Objects, Seen
from meshwright.observe.watch.snapshot import Change, Snapshot
from meshwright.observe.watch.wrappers import Said

Where = tuple[str, int, str]  # file:line, depth, words
Changes = Sequence[tuple[str, list[Change]]]  # "Class.", "global " or "", and names of that
NONE: Changes = ()


class Call(msgspec.Struct, eq=False):
    """A watched call that has begun; `pop` reads its key."""

    key: object
    start: int  # nanoseconds
    thing: object  # its first argument, where that is followed
    seen: Seen | None
    names: Snapshot | None  # of its local variables

    def __getitem__(self, index: int) -> object:
        return (self.key, self.start)[index]


class Follower:
    """What is followed, and how it is said."""

    def __init__(self, recorder: Recorder, names: tuple[Names, Names, Names], said: Said, frames_up: int) -> None:
        self.recorder = recorder
        self.attributes, self.names, self.globals = names
        self.said, self.up, self.objects = said, frames_up, Objects(self.attributes)
        self._words, self._modules = bool(said), dict[int, Snapshot]()
        self._locals, self._globals, self._filter = bool(self.names), bool(self.globals), self.names.filter()
        makers()  # what has to be built is built before the program goes on

    def look_at_frame(self, names: Snapshot | None, frame: FrameType) -> tuple[Snapshot | None, Changes]:
        """Its local variables, and what is different among them and its module's, by whose they are."""
        found: Changes = NONE
        if self._locals:
            items = frame.f_locals
            if type(items) is not dict:
                items = dict(items)  # from Python 3.13 on it only looks like one
            if names is None:
                names = Snapshot(items, self._filter)
            else:
                moved = names.known.moved(items)
                if moved or moved is None:
                    found = [("", names.changes(moved, items))]
        if self._globals:
            items = frame.f_globals
            seen = self._modules.get(id(items))
            if seen is None:
                self._modules[id(items)] = Snapshot(items, self._holds_global)
            elif changes := seen.look(items):
                found = [*found, ("global ", changes)]
        return names, found

    def _holds_global(self, name: str, value: object) -> bool:
        hidden = name.startswith("__") or isinstance(value, ModuleType | FunctionType | type)
        return not hidden and self.globals.hold(name)

    def say(self, thread: Thread, found: Changes, where: Where) -> None:
        at, depth, text = where
        shift, emit = self.recorder.shift, self.recorder.emit
        for owner, changes in found:
            for one in changes:
                words = text
                if self._words and one.event == "set":
                    said = self.said.changed(one.old, one.new)
                    words = f"{text}  {said}" if text and said else text or said
                now, name = perf_counter_ns() + shift, owner + one.name
                emit(Event(one.event, now, 0, thread.name, depth, name, at, None, one.old_text, one.new_text, words))
