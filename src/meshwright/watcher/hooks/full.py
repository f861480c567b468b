"""Hooks that also look at attributes, locals, globals and wrappers."""

from __future__ import annotations

import sys
from types import CodeType
from typing import Any

from meshwright.watcher.hooks.follow import Follower
from meshwright.watcher.hooks.hooks import Hooks, error_text
from meshwright.watcher.hooks.points import decode, points_of
from meshwright.watcher.hooks.site import CodeSite
from meshwright.watcher.hooks.steps import Steps, parts_of
from meshwright.watcher.values.unchanged import makers


class Full:
    """Hooks of one code object, with everything that is followed."""

    def __init__(self, follow: Follower, code: CodeType) -> None:
        site, self._said, self._up = CodeSite(code), follow.said, follow.up
        self._attributes = bool(follow.attributes) and site.is_method()
        holds = follow.attributes.hold if self._attributes else lambda _: False
        names, globals_ = follow.names.hold, follow.globals.hold
        self._points = points_of(code, decode(code), attributes=holds, names=names, globals_=globals_)
        self._frames = bool(follow.names or follow.globals) and self._points.frames
        parts, make = parts_of(follow, site, attributes=self._attributes, frames=self._frames), makers().steps
        # these do not refer to us: a cycle would keep the code alive
        self._steps: Any = Steps(parts, follow, frames=self._frames) if make is None or follow.globals else make(parts)

    def hooks(self) -> Hooks:
        points, steps = self._points.at, self._steps
        if not (self._attributes or self._frames):
            points = {}
        elif not self._attributes:
            points = {at: one for at, one in points.items() if one.frame or one.whole}
        return Hooks(
            steps.start, steps.leave, self._suspend, self._resume, self._raised, steps.point if points else None, points,
            wants_self=self._attributes,
        )  # fmt: skip

    def _resume(self) -> None:
        self._steps.wake(sys._getframe(self._up))

    def _suspend(self, value: object, at: int) -> None:
        self._steps.stop("yield", self._said.returned, value, sys._getframe(self._up), at)

    def _raised(self, error: BaseException | None = None) -> None:
        gone, frame = error or sys.exc_info()[1], sys._getframe(self._up)
        if isinstance(gone, GeneratorExit):
            self._steps.stop("end", lambda *_: "closed", gone, frame, None)
        else:
            self._steps.stop("raise", lambda *_: error_text(gone), gone, frame, None)
