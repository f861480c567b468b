"""Gather the facts of many files: in this process, with several processes, or on the nodes of a Ray cluster."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.base.processes import script_left_alone
from meshwright.errors import InputError, MeshwrightError
from meshwright.traces.rank.facts import RankFacts, digest
from meshwright.traces.reading import read_trace
from meshwright.traces.reading.cache.cache import keep, kept, stamp_of

if TYPE_CHECKING:
    from concurrent.futures import Future

Tell = Callable[[int, int], None]  # files done, and files in all
FEW = 20_000_000  # bytes of files below which starting processes takes longer than reading


@dataclass(frozen=True)
class Broken:
    """Unreadable file."""

    path: str
    why: str


def facts_of(path: str, cache: bool = True) -> RankFacts | Broken:
    """Return the facts of one file. Errors in a file are returned, not raised: a thousand others wait."""
    try:
        return _digested(path, cache)
    except InputError as error:
        error.file = ""
        return Broken(path, str(error))
    except OSError as error:
        return Broken(path, f"cannot be read: {error.strerror or error}")
    except MemoryError:
        return Broken(path, "does not fit into memory")


def _digested(path: str, cache: bool) -> RankFacts:
    if cache and (found := kept(path)):
        return digest(found)
    source = stamp_of(path)
    trace = read_trace(path)
    facts = digest(trace)  # before the cache is written: the Parquet library takes as much memory as this does
    return replace(facts, notes=(*facts.notes, *keep(trace, source))) if cache else facts


def gather(
    files: Sequence[Path], *, workers: int | None = None, ray: str | None = None, cache: bool = True,
    tell: Tell = lambda done, of: None,
) -> tuple[list[RankFacts], list[Broken]]:  # fmt: skip
    """Return the facts of all files, in their order, and the unreadable files.

    `ray` is the address of a cluster ("auto": the local one).
    """
    sizes = {str(file): _size(file) for file in files}
    workers = max(min(workers or os.cpu_count() or 1, len(files)), 1)
    if not files:
        return [], []
    if ray is not None:
        arriving = _by_ray(sizes, ray, cache)
    elif workers == 1 or sum(sizes.values()) < FEW:
        arriving = ((path, facts_of(path, cache)) for path in sizes)
    else:
        arriving = _by_processes(sizes, workers, cache)
    found: dict[str, RankFacts | Broken] = {}
    for path, facts in arriving:
        found[path] = facts
        tell(len(found), len(files))
    facts_in_order = [found[path] for path in sizes]
    return (
        [facts for facts in facts_in_order if isinstance(facts, RankFacts)],
        [facts for facts in facts_in_order if isinstance(facts, Broken)],
    )


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0


def _by_processes(sizes: dict[str, int], workers: int, cache: bool) -> Iterator[tuple[str, RankFacts | Broken]]:
    """Read with processes, the largest files first, so that none is left alone at the end.

    If a process dies, files are read one by one to find the cause.
    """
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor, as_completed
    from concurrent.futures.process import BrokenProcessPool

    # A fork server that has all modules: each worker starts as a copy within 10 ms.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["meshwright.traces.calm_numpy", __name__])
    left = dict.fromkeys(sorted(sizes, key=lambda path: -sizes[path]))
    now = workers
    while left:
        running: dict[Future[RankFacts | Broken], str] = {}
        try:
            with ProcessPoolExecutor(now, context) as pool:
                with script_left_alone():
                    for path in left:
                        running[pool.submit(facts_of, path, cache)] = path
                for done in as_completed(running):
                    facts = done.result()
                    del left[running[done]]
                    yield running[done], facts
        except BrokenProcessPool:
            for done, path in running.items():  # files that were read before the failure
                if path in left and not done.exception():
                    del left[path]
                    yield path, done.result()
            if now == 1 and left:
                path = next(iter(left))
                del left[path]
                yield path, Broken(path, "the process that read it was ended: was it out of memory?")
            now = 1 if now > 1 else workers


def _by_ray(sizes: dict[str, int], address: str, cache: bool) -> Iterator[tuple[str, RankFacts | Broken]]:
    """Read with one Ray task per file, on any node with a free core; nodes find files by the same path."""
    from meshwright.launchers.ray.driver import connected

    try:
        ray = connected("" if address == "auto" else address)
    except InputError as error:
        error.field = "--ray"
        raise
    try:
        task: Any = ray.remote(facts_of).options(num_cpus=1, max_retries=1)
        running = {
            task.remote(os.path.abspath(path), cache): path for path in sorted(sizes, key=lambda path: -sizes[path])
        }
        while running:
            ready, _ = ray.wait(list(running), num_returns=1)
            path = running.pop(ready[0])
            try:
                facts = ray.get(ready[0])
            except ray.exceptions.RayError as error:
                facts = Broken(path, f"the task that read it ended: {str(error).splitlines()[-1][:200]}")
            yield path, _at(facts, path)
    except ray.exceptions.RayError as error:
        raise MeshwrightError(f"the cluster of Ray ended: {str(error).splitlines()[0][:200]}") from None
    finally:
        ray.shutdown()


def _at(facts: RankFacts | Broken, path: str) -> RankFacts | Broken:
    """Return facts under the path that the user gave."""
    return replace(facts, path=path)
