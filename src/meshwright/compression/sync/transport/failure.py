"""What is said when a peer is lost, and how all processes come to say the same.

Who waits for a process that itself waits for a third one blames the wrong one. So every process writes down for whom it
waited, in the store that joined them, and then follows the accounts to one who wrote none: that one is lost.
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
    """A process died, hung, or sent something that cannot be read; names it and the bucket of gradients."""

    exit_code = 1

    def __init__(self, problem: str, *, peers: Sequence[int] = (), bucket: int = -1, step: int = -1) -> None:
        self.problem, self.peers, self.bucket, self.step = problem, tuple(peers), bucket, step
        super().__init__(problem)


@dataclass(frozen=True)
class Fault:
    """What one process saw."""

    peer: int  # for whom it waited; -1 where a collective does not say
    reason: str
    step: int
    bucket: int
    sure: bool = False  # the peer is at fault whatever it says itself: it sent something that cannot be read


class Failed(Exception):
    """Carries a fault from where it is seen to where all agree on it."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        super().__init__(fault.reason)


@dataclass(frozen=True)
class Witness:
    """One process among those that keep accounts in a store."""

    store: Any
    rank: int
    names: Sequence[str]  # of all ranks: the host each runs on
    grace: float = 2.0  # seconds to wait for the accounts of others

    def verdict(self, fault: Fault) -> PeerLost:
        """Write down what was seen here, read what others saw, and say who is at fault."""
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
        if seen.bucket < 0:  # it failed between messages: say where this process stood
            seen = replace(seen, step=fault.step, bucket=fault.bucket)
        where = f"bucket {seen.bucket} of step {seen.step}"
        return PeerLost(f"{who}: {seen.reason}, {where}", peers=peers, bucket=seen.bucket, step=seen.step)

    def confess(self, error: Exception) -> Exception:
        """This process itself cannot go on, for instance because a codec failed: others, who wait for it, are told why."""
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
    """From what a rank saw to what the last one saw that it indirectly waited for.

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
    """Whether who holds a store is still there: PyTorch, asked for something of one that is gone, writes pages of frames.

    A process that was killed closes its sockets one after the other. One that still takes a connection may be about to go,
    and then breaks it at once; one that lives says nothing before it is asked.
    """
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    if not getattr(store, "host", ""):
        return True  # no store of the network
    try:
        with socket.create_connection((store.host, store.port), seconds) as connection:
            connection.settimeout(LINGERS)
            return bool(connection.recv(1))
    except TimeoutError:
        return True
    except OSError:
        return False


def default_store() -> Any:
    """The store of the default process group; not public, seen in torch 2.11 and 2.13."""
    return distributed_c10d._get_default_store()
