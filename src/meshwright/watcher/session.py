"""A watch from its start to its stop."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from types import CodeType, TracebackType
from typing import TYPE_CHECKING, Any

from meshwright.errors import InputError, shorten
from meshwright.watcher import spawned
from meshwright.watcher.events.rank import rank_of_process
from meshwright.watcher.events.stream import Stream
from meshwright.watcher.hooks.follow import Follower
from meshwright.watcher.hooks.full import Full
from meshwright.watcher.hooks.hooks import CallsOnly, Hooks, Recorder
from meshwright.watcher.hooks.objects import Names
from meshwright.watcher.targets import targets as aims
from meshwright.watcher.wrappers import wrapper_named

if TYPE_CHECKING or sys.version_info >= (3, 12):
    from meshwright.watcher.monitoring import FRAMES_UP, Monitored
else:
    from meshwright.watcher.bytecode.rewrite import FRAMES_UP
    from meshwright.watcher.bytecode.rewrite import Rewritten as Monitored


class Watch:
    """Watch that follows the targets' calls and changes until it is stopped: `with meshwright.watch(...)`.

    >>> import json, os, tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> with Watch("json:dumps", output=os.path.join(folder.name, "run")):
    ...     _ = json.dumps([1])
    >>> from meshwright.watcher.events.events import read
    >>> [(event.event, event.name) for event in read(os.path.join(folder.name, "run.rank0.jsonl"))]
    [('start', 'watch'), ('run', 'dumps'), ('end', 'dumps'), ('stop', 'watch')]
    >>> folder.cleanup()
    """

    def __init__(
        self, targets: Any, *, attributes: Any = False, locals: Any = False, globals: Any = False,  # noqa: A002
        ranks: Iterable[int] | None = None, wrapper: Any = None, output: str | os.PathLike[str] | None = None,
        _parent: int | None = None,
    ) -> None:  # fmt: skip
        self._asked = {"attributes": attributes, "locals": locals, "globals": globals, "wrapper": wrapper}
        self._parent = _parent  # the rank of a watched parent, in a child process
        many = targets if isinstance(targets, list | tuple | set | frozenset) else [targets]
        self._targets = [aims.target_of(one) for one in many]
        self._names = (
            Names(_names("attributes", attributes)), Names(_names("locals", locals)), Names(_names("globals", globals))
        )  # fmt: skip
        self._ranks = _ranks(ranks)
        self._wrapper = wrapper_named(wrapper)
        self._output = _output(output)
        self._stream: Stream | None = None
        self._recorder: Recorder | None = None
        self._backend: Monitored | None = None

    def start(self) -> Watch:
        """Start watching, as on entering the `with` block."""
        if self._backend is not None:
            raise InputError("has been started already", field="watch")
        found = [aims.resolve(one) for one in self._targets]  # errors are the same on every rank
        if self.wanted():
            self._install(found)
        return self

    def add(self, more: dict[aims.Target, aims.Found]) -> None:
        """Watch additional code, which was found as these targets."""
        self._targets += [target for target in more if target not in self._targets]  # a module may be imported again
        self._install(list(more.values()))

    def _install(self, found: list[aims.Found]) -> None:
        functions = [one for each in found for one in each.functions]
        codes = [code for each in found for code in each.codes]
        self.backend().install(functions, codes, any(each.others for each in found))

    def wanted(self) -> bool:
        """Return True if this process is among the requested ranks, or may turn out to be."""
        here = rank_of_process()
        return self._ranks is None or here is None or here in self._ranks

    def backend(self) -> Monitored:
        """Return the backend that hooks code; created with the stream when it is first needed."""
        if self._backend is None:
            self._stream = Stream(self._output, self._ranks, self._parent)
            self._recorder = Recorder(self._stream)
            follower = Follower(self._recorder, self._names, self._wrapper, FRAMES_UP)
            recorder, more = self._recorder, any(map(bool, (*self._names, self._wrapper)))

            def make(code: CodeType) -> Hooks:
                return Full(follower, code).hooks() if more else CallsOnly(recorder, code).hooks()

            self._backend = Monitored(make)
            spawned.carry(id(self), self._for_children)
        return self._backend

    def _for_children(self) -> dict[str, Any]:
        output = None if self._output is None else os.path.abspath(self._output)
        parent = self._stream.taken_rank() if self._stream is not None else None
        named = [aims.name_of(one) for one in self._targets]
        return {**self._asked, "targets": named, "ranks": self._ranks, "output": output, "_parent": parent}

    def stop(self) -> None:
        """Restore everything and write the remaining events."""
        if self._backend is not None and self._recorder is not None and self._stream is not None:
            self._recorder.on = False
            spawned.drop(id(self))
            self._backend.remove()
            self._stream.close()
        self._backend = None

    def __enter__(self) -> Watch:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def _names(field: str, asked: Any) -> bool | list[str]:
    if isinstance(asked, bool):
        return asked
    many = [part.strip() for part in asked.split(",")] if isinstance(asked, str) else asked
    if not isinstance(many, list | tuple | set | frozenset) or not all(isinstance(one, str) and one for one in many):
        raise InputError("expected True, or names", field=field, valid="True, 'loss', 'loss,grad*', ['loss', 'step']")
    return True if "*" in many else list(many)


def _ranks(asked: Iterable[int] | None) -> frozenset[int] | None:
    if asked is None:
        return None
    try:
        many = frozenset(asked)
    except TypeError:
        many = frozenset([None])  # type: ignore[list-item]
    if not many or not all(isinstance(one, int) and not isinstance(one, bool) and one >= 0 for one in many):
        raise InputError("expected ranks", field="ranks", valid="numbers from 0, such as [0, 3]")
    return many


def _output(asked: str | os.PathLike[str] | None) -> str | None:
    if asked is None:
        return None
    if not isinstance(asked, str | os.PathLike) or not isinstance(path := os.fspath(asked), str):
        raise InputError(f"is {shorten(repr(asked), 40)}", field="output", valid="a name for files, such as 'run'")
    folder = os.path.dirname(path) or "."
    if not os.path.basename(path) or not os.path.isdir(folder):
        raise InputError(
            f"there is no folder '{folder}'" if os.path.basename(path) else "names no file", field="output"
        )
    if not os.access(folder, os.W_OK):
        raise InputError(f"'{folder}' cannot be written", field="output")
    return path
