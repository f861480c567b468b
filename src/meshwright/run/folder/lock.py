"""The lock of a run's folder: one run writes, commits and renames there at a time.

`run.lock` names its owner and holds a counter that the owner renews every few seconds: a lease. It needs no lock of the
operating system, because shared file systems often have none that works. Only two operations must be atomic, and are so
on NFS too: creating a file that does not exist yet, and renaming.

- An owner on this machine can be checked directly: the folder is its own while its process lives, and free afterwards.
- An owner on another machine cannot. Its counter is watched by our own clock, as clocks of machines differ: a lock that
  does not change for the length of a lease belongs to a dead run.

A run that takes over from run X first creates `run.lock.X`, which only one can. It checks once more, and renames that
file to `run.lock`. If it dies in between, the next run takes over from it in the same way.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from meshwright.base.processes import started_at, state_of, this_machine
from meshwright.errors import InputError, TrainingFailed

NAME = "run.lock"
LEASE = 20.0  # seconds without a renewal after which a run on another machine is dead
RENEW = 4.0  # seconds between renewals: four may be late
_LOOK = 0.25  # seconds between checks of another run's lock
_LONGEST = 1 << 12  # bytes; a lock has a few hundred
_ROUNDS = 20  # attempts to take over; with more, something is wrong


@dataclass(frozen=True)
class Owner:
    """Process that holds a folder. An empty run: the lock cannot be read."""

    run: str = ""
    host: str = ""
    machine: str = ""
    pid: int = 0
    started: str = ""

    @staticmethod
    def here() -> Owner:
        """Return this process as the owner of a new run."""
        pid = os.getpid()
        return Owner(secrets.token_hex(6), socket.gethostname(), this_machine(), pid, started_at(pid))

    @property
    def seen(self) -> bool:
        """Return True if the process runs on this machine, where it can be checked."""
        return bool(self.run and self.machine) and self.machine == this_machine()

    def state(self) -> str:
        """Return the state of a process on this machine; empty if it has ended."""
        found = state_of(self.pid, self.started)
        return "" if found in ("Z", "X") else found

    def __str__(self) -> str:
        return (
            f"run {self.run} (process {self.pid} on {self.host})" if self.run else f"a run whose {NAME} is unreadable"
        )


@dataclass(frozen=True)
class _Held:
    """A lock as it was read."""

    file: Path
    content: bytes
    owner: Owner


class FolderLock:
    """A folder that this process holds; a thread renews its lease."""

    def __init__(self, file: Path, owner: Owner, handle: int, lease: float, renew: float) -> None:
        self.owner = owner
        self._file, self._handle, self._lease, self._every = file, handle, lease, renew
        self._count, self._renewed = 0, time.monotonic()
        self._taken = ""
        self._busy, self._closing = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._keep, name="folder lock", daemon=True)
        self._thread.start()

    def lost(self) -> bool:
        """Return True once another run has been seen to hold the folder."""
        return bool(self._taken)

    def check(self) -> None:
        """Raise if the folder is no longer ours; called before anything is committed."""
        try:
            if self._late():
                # Another run may be taking over right now: that must be seen before anything is committed.
                self._renew()
                self._closing.wait(self._every)
            self._look()
        except OSError as error:
            problem = f"the lock of the run's folder cannot be renewed: {error.strerror or error}"
            raise TrainingFailed(f"{self._file}: {problem}; nothing more is written there") from None
        if self._taken or self._closing.is_set():
            who = self._taken or "nobody: the lock was given back"
            raise TrainingFailed(f"{self._file}: the run's folder is now held by {who}; nothing more is written there")

    def release(self) -> None:
        """Release the folder, if it is still ours."""
        self._closing.set()
        self._thread.join(timeout=self._lease)
        with suppress(OSError):
            self._look()
            if not self._taken and not self._late():
                self._file.unlink()
        if not self._thread.is_alive():  # else a renewal hangs in a file system that does not respond
            os.close(self._handle)

    def _keep(self) -> None:
        while not self._closing.wait(self._every) and not self._taken:
            with suppress(OSError):  # the lease limits how long a failed write is harmless
                self._renew()
                self._look()

    def _renew(self) -> None:
        """Renew the lease in place, through the open file: another run's lock, renamed over ours, stays as it is."""
        with self._busy:
            self._count += 1
            os.pwrite(self._handle, _record(self.owner, self._count), 0)
            os.fsync(self._handle)
            self._renewed = time.monotonic()

    def _look(self) -> None:
        found = _read(self._file)
        if found is None:
            self._taken = "nobody: the lock was removed"
        elif found.owner.run != self.owner.run:
            self._taken = str(found.owner)

    def _late(self) -> bool:
        return time.monotonic() - self._renewed > self._lease


def refuse_if_held(folder: str | Path) -> None:
    """Refuse a folder that a living process of this machine holds; checked before anything starts."""
    with suppress(OSError):  # the run itself reports what cannot be read
        held = _last(Path(folder) / NAME)
        if held and held.owner.seen and held.owner.state():
            raise _refusal(held)


def take(folder: str | Path, *, lease: float = LEASE, renew: float = RENEW) -> FolderLock:
    """Return the lock of a folder, taken over from a dead run if need be; refuse one that a living run holds."""
    file, mine = Path(folder) / NAME, Owner.here()
    for _ in range(_ROUNDS):
        with suppress(FileExistsError):
            return FolderLock(file, mine, _created(file, mine), lease, renew)
        held = _last(file)
        if held and _is_dead(held, lease):
            handle = _succeed(file, held, mine)
            if handle is not None:
                return FolderLock(file, mine, handle, lease, renew)
    raise InputError("is taken and given back by others again and again", file=str(folder), field="--output")


def _is_dead(held: _Held, lease: float) -> bool:
    """Return true if the owner is dead, false if the lock has passed to another meanwhile; refuse a living one."""
    owner = held.owner
    if owner.seen:
        if owner.state():
            raise _refusal(held)
        return True
    print(f"{held.file}: held by {owner}; waiting {lease:g} s for a sign of life", file=sys.stderr)  # noqa: T201
    until = time.monotonic() + lease
    while time.monotonic() < until:
        time.sleep(min(_LOOK, lease / 4))
        now = _read(held.file)
        if now is None or now.owner.run != owner.run:
            return False
        if now.content != held.content:
            raise _refusal(now)
    return True


def _refusal(held: _Held) -> InputError:
    stopped = ", which is stopped" if held.owner.seen and held.owner.state() in ("T", "t") else ""
    valid = "another folder, or the same once that run has ended"
    return InputError(f"is in use by {held.owner}{stopped}", file=str(held.file.parent), field="--output", valid=valid)


def _succeed(file: Path, dead: _Held, mine: Owner) -> int | None:
    """Take over from a dead owner; return None if another run does, or has done so."""
    claim = _claim(file, dead)
    try:
        handle = _created(claim, mine)
    except FileExistsError:
        return None
    chain = _chain(file)
    if [held.owner for held in chain[-2:]] == [dead.owner, mine] and chain[-2].content == dead.content:
        os.replace(claim, file)
        for held in chain[1:-1]:  # owners that died while they took over
            held.file.unlink(missing_ok=True)
        return handle
    os.close(handle)
    claim.unlink(missing_ok=True)
    return None


def _last(file: Path) -> _Held | None:
    chain = _chain(file)
    return chain[-1] if chain else None


def _chain(file: Path) -> list[_Held]:
    """Return the lock, then the lock of the run taking over from its owner, and so on."""
    found: list[_Held] = []
    held = _read(file)
    while held is not None and len(found) < _ROUNDS:
        found.append(held)
        held = _read(_claim(file, held))
    return found


def _claim(file: Path, held: _Held) -> Path:
    """Return the file that one run creates to take over from an owner."""
    return file.with_name(f"{NAME}.{held.owner.run}" if held.owner.run else f"{held.file.name}.unreadable")


def _read(file: Path) -> _Held | None:
    """Read a lock; one that is being created gets a moment to become readable."""
    for moment in (0.0, 0.02, 0.08, 0.2):
        time.sleep(moment)
        try:
            with file.open("rb") as opened:
                content = opened.read(_LONGEST)
        except FileNotFoundError:
            return None
        owner = _owner_in(content)
        if owner.run:
            break
    return _Held(file, content, owner)


def _owner_in(content: bytes) -> Owner:
    with suppress(ValueError, TypeError, RecursionError):
        table = json.loads(content)
        known = {each.name: table[each.name] for each in fields(Owner) if each.name in table}
        owner = Owner(**known)
        texts = (owner.run, owner.host, owner.machine, owner.started)
        if all(isinstance(text, str) for text in texts) and isinstance(owner.pid, int) and owner.run.isalnum():
            return owner
    return Owner()


def _record(owner: Owner, count: int) -> bytes:
    """Return the text of a lock. Its length is the same for every count, so that renewals need no space."""
    return json.dumps({"format": "meshwright-lock", "version": 1, **asdict(owner), "renewed": f"{count:012}"}).encode()


def _created(file: Path, owner: Owner) -> int:
    """Create a lock that must not exist yet; remove it if the disk has no room."""
    handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        text = _record(owner, 0)
        while text:
            text = text[os.write(handle, text) :]
        os.fsync(handle)
    except BaseException:
        os.close(handle)
        file.unlink(missing_ok=True)
        raise
    return handle
