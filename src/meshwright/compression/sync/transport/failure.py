"""The error for a lost peer, on which all ranks agree.

A rank that waits for one that itself waits for a third blames the wrong one. So every rank records in the store for
which rank it waited, and then follows these accounts to a rank without one: that one is lost.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch.distributed import distributed_c10d

from meshwright.errors import MeshwrightError

LINGERS = 0.2  # seconds within which a process that is being ended has closed all its sockets


class PeerLost(MeshwrightError):
    """Error: a rank died, hung, or sent something unreadable; names it and the bucket of gradients."""

    exit_code = 1

    def __init__(self, problem: str, *, peers: Sequence[int] = (), bucket: int = -1, step: int = -1) -> None:
        self.problem, self.peers, self.bucket, self.step = problem, tuple(peers), bucket, step
        super().__init__(problem)


@dataclass(frozen=True)
class Fault:
    """Fault as one rank saw it."""

    peer: int  # for which it waited; -1 if a collective does not tell
    reason: str
    step: int
    bucket: int
    sure: bool = False  # the peer is at fault whatever it reports: it sent something unreadable


class Failed(Exception):
    """Exception that carries a fault from where it is seen to where all ranks agree on it."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        super().__init__(fault.reason)


@dataclass(frozen=True)
class Witness:
    """One rank among those that keep accounts in a store."""

    store: Any
    rank: int
    names: Sequence[str]  # of all ranks: their hosts
    grace: float = 2.0  # seconds to wait for the accounts of others

    def verdict(self, fault: Fault) -> PeerLost:
        """Record the fault seen here, read those of others, and return the agreed error."""
        settled: list[tuple[Fault, tuple[int, ...]]] = [(fault, (fault.peer,) if fault.peer >= 0 else ())]

        def settle() -> None:
            with suppress(RuntimeError, OSError):
                if _answers(self.store, self.grace):
                    settled.append(self._settle(fault))

        # The store may have died with its process, and then answers late or never.
        thread = threading.Thread(target=settle, daemon=True)
        thread.start()
        thread.join(2 * self.grace)
        seen, peers = settled[-1]
        who = ", ".join(f"rank {peer} ({self.names[peer]})" for peer in peers) or "a rank that is not known"
        if seen.bucket < 0:  # it failed between messages: report the position of this rank
            seen = replace(seen, step=fault.step, bucket=fault.bucket)
        where = f"bucket {seen.bucket} of step {seen.step}"
        return PeerLost(f"{who}: {seen.reason}, {where}", peers=peers, bucket=seen.bucket, step=seen.step)

    def confess(self, error: Exception) -> Exception:
        """Report that this rank itself cannot go on, for example because a codec failed, to the ranks that wait for it."""
        fault = Fault(self.rank, f"failed: {type(error).__name__}: {error}", -1, -1, sure=True)

        def tell() -> None:
            with suppress(RuntimeError, OSError):
                if _answers(self.store, self.grace):
                    self.store.set(str(self.rank), json.dumps(asdict(fault)))

        thread = threading.Thread(target=tell, daemon=True)
        thread.start()
        thread.join(self.grace)
        return error

    def _settle(self, fault: Fault) -> tuple[Fault, tuple[int, ...]]:
        self.store.set(str(self.rank), json.dumps(asdict(fault)))
        until = time.monotonic() + self.grace
        while True:
            accounts = self._accounts()
            last = blamed(accounts, self.rank)
            if last.sure or time.monotonic() > until:
                missing = tuple(rank for rank in range(len(self.names)) if rank not in accounts)
                return last, ((last.peer,) if last.peer >= 0 else missing)
            time.sleep(0.05)

    def _accounts(self) -> dict[int, Fault]:
        written = (rank for rank in range(len(self.names)) if self.store.check([str(rank)]))
        return {rank: Fault(**json.loads(self.store.get(str(rank)))) for rank in written}


def blamed(accounts: dict[int, Fault], rank: int) -> Fault:
    """Follow what a rank saw to what the last one saw for which it indirectly waited.

    >>> waits = {0: Fault(1, "late", 5, 2), 1: Fault(2, "closed", 5, 2)}  # 0 waits for 1, 1 for 2, which says nothing
    >>> blamed(waits, 0).peer
    2
    """
    sure = [account for account in accounts.values() if account.sure]
    if sure:
        return sure[0]
    seen, last = {rank}, accounts[rank]
    while last.peer in accounts and last.peer not in seen:
        seen.add(last.peer)
        last = accounts[last.peer]
    return last


def _answers(store: Any, seconds: float) -> bool:
    """Return True if the store's host still responds: PyTorch prints pages of frames if asked for a store that is gone.

    A killed process closes its sockets one after the other. One that accepts a connection may be about to end, and then
    breaks it at once; a living one is silent until asked.
    """
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    if not getattr(store, "host", ""):
        return True  # no store on the network
    try:
        with socket.create_connection((store.host, store.port), seconds) as connection:
            connection.settimeout(LINGERS)
            return bool(connection.recv(1))
    except TimeoutError:
        return True
    except OSError:
        return False


def default_store() -> Any:
    """Return the store of the default process group; not public, seen in torch 2.11 and 2.13."""
    return distributed_c10d._get_default_store()
