"""A small network on one machine: every rank in a network namespace of its own, behind a link of a given rate.

A star: one namespace is the switch, each rank has a cable to it, shaped at both ends. It needs root, Linux and iproute2;
`usable()` says so. Shaping is tbf with a burst of 256 kB and TCP reno; with a smaller burst
four senders reach half the rate.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType


def usable() -> bool:
    """Whether namespaces can be made here."""
    tools = sys.platform == "linux" and os.geteuid() == 0 and shutil.which("ip") and shutil.which("tc")
    if not tools:
        return False
    name = f"mw{os.getpid()}t"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode == 0
    if made:
        _do(f"ip netns del {name}")
    return made


def _do(command: str, *, check: bool = True) -> str:
    done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise RuntimeError(f"{command}: {done.stderr.strip()}")
    return done.stdout


def _sweep() -> None:
    """Remove what a run left that was killed: namespaces carry the number of their process."""
    for line in _do("ip netns list").splitlines():
        name = line.split()[0] if line.split() else ""
        found = re.fullmatch(r"mw(\d+)(s|t|r\d+)", name)
        if found and not Path(f"/proc/{found[1]}").exists():
            _do(f"ip netns del {name}", check=False)


class Star:
    """Namespaces of so many ranks around a switch; removed again whatever happens.

    with Star(4) as star:
        star.shape("200mbit")
        subprocess.Popen([*star.inside(0), "python", ...])
    """

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._mark = f"mw{os.getpid()}"

    def __enter__(self) -> Star:
        _sweep()
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that __exit__ runs
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._remove()

    def name(self, rank: int) -> str:
        return f"{self._mark}r{rank}"

    def address(self, rank: int) -> str:
        return f"10.77.0.{rank + 1}"

    def inside(self, rank: int) -> list[str]:
        """What stands before a command that is to run there; its device is `eth0`."""
        return ["ip", "netns", "exec", self.name(rank)]

    def shape(self, rate: str) -> None:
        """Every cable, both ways; "" removes the limit. May be changed while processes run."""
        for rank in range(self.ranks):
            for where, device in ((self.name(rank), "eth0"), (self._switch, f"port{rank}")):
                _do(f"tc -n {where} qdisc del dev {device} root", check=False)
                if rate:
                    _do(f"tc -n {where} qdisc add dev {device} root tbf rate {rate} burst 256kb latency 200ms")

    @property
    def _switch(self) -> str:
        return f"{self._mark}s"

    def _make(self) -> None:
        _do(f"ip netns add {self._switch}")
        _do(f"ip -n {self._switch} link add star type bridge")
        _do(f"ip -n {self._switch} link set star up")
        for rank in range(self.ranks):
            name = self.name(rank)
            _do(f"ip netns add {name}")
            _do(f"ip -n {name} link add eth0 type veth peer name port{rank} netns {self._switch}")
            _do(f"ip -n {self._switch} link set port{rank} master star up")
            _do(f"ip -n {name} addr add {self.address(rank)}/24 dev eth0")
            _do(f"ip -n {name} link set eth0 up")
            _do(f"ip -n {name} link set lo up")
            setting = "/proc/sys/net/ipv4/tcp_congestion_control"
            subprocess.run([*self.inside(rank), "sh", "-c", f"echo reno > {setting}"], capture_output=True, check=False)

    def _remove(self) -> None:
        for name in (*map(self.name, range(self.ranks)), self._switch):
            _do(f"ip netns del {name}", check=False)


def sent_bytes(device: str = "eth0") -> int:
    """Bytes that left this namespace, heads of packets included; 0 where there is no such device."""
    counter = Path(f"/sys/class/net/{device}/statistics/tx_bytes")
    return int(counter.read_text()) if counter.exists() else 0


class Pace:
    """A link that exists only in time: whoever sends waits as long as the bytes would take. For where no namespace is
    to be had; it knows nothing of packets, and all of a process's messages share it."""

    def __init__(self, bits_per_second: float) -> None:
        self.change(bits_per_second)
        self.sent = 0
        self._free = 0.0  # when the link has sent all it was given

    def change(self, bits_per_second: float) -> None:
        """Another link from now on; 0: no limit."""
        self._seconds = 8 / bits_per_second if bits_per_second else 0.0

    def __call__(self, size: int) -> None:
        self.sent += size
        now = time.monotonic()
        self._free = max(self._free, now) + size * self._seconds
        time.sleep(max(self._free - now, 0.0))
