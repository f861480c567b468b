"""Turn text into a folder of tokens: several processes tokenise pieces, and this one writes them in order.

The result depends on the sources and the tokenizer alone, not on the number of processes. Memory holds a few pieces for
each process, however long the sources are.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from pathlib import Path

from meshwright.base.parallel import workers as cores_for
from meshwright.base.processes import end_with_parent
from meshwright.errors import InputError
from meshwright.run.data.manifest import Manifest, Source
from meshwright.run.data.parsing import Parser, Tokens
from meshwright.run.data.prepared_folder import check_target, whole_folder
from meshwright.run.data.sources import PIECE, Piece, find_files, pieces
from meshwright.run.data.tokenizer import tokenizer_at
from meshwright.run.data.writing import SHARD, Writer

_AHEAD = 4  # pieces in flight for each process
Progress = Callable[[int, int], None]


def prepare(
    inputs: Sequence[str | Path], output: str | Path, *, tokenizer: str = "bytes", field: str = "text",
    skip_bad: bool = False, overwrite: bool = False, workers: int = 0, wait: bool = False,
    shard_bytes: int = SHARD, progress: Progress | None = None,
) -> Manifest | None:  # fmt: skip
    """Tokenise text files, JSONL and Parquet into `output`, which appears whole or not at all.

    `workers` is the number of processes, 0 for one per available core. With `wait`, a folder that another process is
    writing is waited for instead of refused; None means that it has finished. `progress` gets bytes done and bytes in
    all.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = (folder / "a.txt").write_text("hello")
    >>> made = prepare([folder / "a.txt"], folder / "tokens")
    >>> made.tokens, made.documents, made.vocabulary
    (6, 1, 257)
    """
    target = Path(os.path.realpath(output))  # links are followed
    if not wait:  # early, before long work; with `wait` it is checked under the lock
        check_target(target, overwrite=overwrite)
    parser = Parser(tokenizer_at(tokenizer), field, skip_bad)
    files = find_files(inputs)
    sources = tuple(Source(file=file, bytes=os.path.getsize(file)) for file in files)
    total = sum(source.bytes for source in sources)
    count = workers or cores_for(-(-total // PIECE))
    with whole_folder(target, overwrite=overwrite, wait=wait) as unfinished:
        if unfinished is None:
            return None
        with Writer(unfinished.path, parser.tokenizer, shard_bytes) as writer:
            done = 0
            for piece, found in _parsed(parser, pieces(files, field), count, unfinished.lock):
                writer.add(found)
                if piece.last and piece.kind == ".txt":
                    writer.end_document()
                done += piece.weight
                if progress:
                    progress(done, total)
        made = writer.manifest(tokenizer if tokenizer == "bytes" else os.path.abspath(tokenizer), sources)
        if not made.tokens:
            raise InputError(f"hold no text: {_nothing(made)}", file=", ".join(files[:3]), field=field)
        made.write(unfinished.path)
    return made


def _nothing(made: Manifest) -> str:
    return f"{len(made.sources)} files, {made.empty} empty documents, {made.skipped} bad lines"


_parser: Parser  # of a worker process, set at its start


def _start(parser: Parser, lock: int, parent: int) -> None:
    """Prepare a worker process: it ignores Ctrl-C, since its parent ends it, and computes with one thread.

    If the parent is killed, the system ends the worker; the folder's lock is released with the parent.
    """
    global _parser
    os.close(lock)
    end_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _parser = parser


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Delay Ctrl-C until the end of the block: a pool that is interrupted while it forks cannot be shut down."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: heard.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if heard:
        raise KeyboardInterrupt


def _work(piece: Piece) -> Tokens:
    return _parser(piece)


def _parsed(parser: Parser, every: Iterator[Piece], count: int, lock: int) -> Iterator[tuple[Piece, Tokens]]:
    """Yield every piece with its tokens, in order; only a few pieces are tokenised ahead."""
    if count == 1:
        yield from ((piece, parser(piece)) for piece in every)
        return
    facts = (parser, lock, os.getpid())
    pool = ProcessPoolExecutor(count, multiprocessing.get_context("fork"), initializer=_start, initargs=facts)
    waiting: deque[tuple[Piece, Future[Tokens]]] = deque()
    try:
        while True:
            with _undisturbed():
                for piece in islice(every, count * _AHEAD - len(waiting)):
                    waiting.append((piece, pool.submit(_work, piece)))
            if not waiting:
                return
            piece, future = waiting.popleft()
            yield piece, future.result()
    except BrokenProcessPool:
        raise InputError("a worker process was killed, perhaps for want of memory", file=piece.file) from None
    finally:
        pool.shutdown(cancel_futures=True)
