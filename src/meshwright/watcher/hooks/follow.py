"""Followed names beside calls (attributes, locals, globals), and reports of their changes."""

from __future__ import annotations

from time import perf_counter_ns
from types import FrameType, FunctionType, ModuleType

import msgspec

from meshwright.watcher.events.events import Event
from meshwright.watcher.hooks.hooks import Recorder
from meshwright.watcher.hooks.objects import Names, Objects, Seen
from meshwright.watcher.values.snapshot import Change, Snapshot
from meshwright.watcher.values.thread import Thread
from meshwright.watcher.values.unchanged import makers
from meshwright.watcher.wrappers import Said

Where = tuple[str, int, str]  # file:line, depth, words


class Call(msgspec.Struct, eq=False):
    """Watched call that has begun; `pop` reads its key."""

    key: object
    start: int  # nanoseconds
    thing: object  # the first argument, if it is followed
    seen: Seen | None
    names: Snapshot | None  # local variables
    frame: int  # the identity of the running frame

    def __getitem__(self, index: int) -> object:
        return (self.key, self.start, self.frame)[index]


class Follower:
    """Follower of names, with the rules and output of a watch."""

    def __init__(self, recorder: Recorder, names: tuple[Names, Names, Names], said: Said, frames_up: int) -> None:
        self.recorder = recorder
        self.attributes, self.names, self.globals = names
        self.said, self.up, self.objects = said, frames_up, Objects(self.attributes)
        self._words, self._modules = bool(said), dict[int, Snapshot]()
        makers()  # builds the C code before the program goes on

    def look_at_names(
        self, names: Snapshot | None, frame: FrameType, followed: tuple[str, ...], found: list[Change]
    ) -> Snapshot | None:
        """Look at the followed local variables of a frame; append changes, and return the new snapshot."""
        held = frame.f_locals
        items = {name: held[name] for name in followed if name in held}
        if names is None:
            names = Snapshot(items, None)
        else:
            names.look(items, found)
        names.held = items  # until the next look, so that no other value gets the identity of one of these
        return names

    def look_at_globals(self, frame: FrameType, found: list[Change]) -> None:
        items = frame.f_globals
        seen = self._modules.get(id(items))
        if seen is None:
            self._modules[id(items)] = Snapshot(items, self._holds_global)
        else:
            seen.look(items, found)

    def _holds_global(self, name: str, value: object) -> bool:
        hidden = name.startswith("__") or isinstance(value, ModuleType | FunctionType | type)
        return not hidden and self.globals.hold(name)

    def say(self, thread: Thread, owner: str, changes: list[Change], where: Where) -> None:
        """Report changes of an owner: "Class.", "global ", or "" for local variables."""
        at, depth, text = where
        shift, emit = self.recorder.shift, self.recorder.emit
        for one in changes:
            words = text
            if self._words and one.event == "set":
                said = self.said.changed(one.old, one.new)
                words = f"{text}  {said}" if text and said else text or said
            now, name = perf_counter_ns() + shift, owner + one.name
            emit(Event(one.event, now, 0, thread.name, depth, name, at, None, one.old_text, one.new_text, words))
