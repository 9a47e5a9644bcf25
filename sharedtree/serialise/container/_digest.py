"""Digests of data: one CRC-32 for each started chunk of 4 MiB, worked out on other threads than the one that waits.

A digest finds what disks, networks and copies do to a file. It does not find a forger, who writes the digest too.
CRC-32 is what the standard library has that is about as fast as memory is copied. It finds every single flipped bit,
every burst of up to 32 bits, and all else but one change in 2³².

Chunks bound what must be read to check a part of a tensor, and are what threads share out among themselves. Reading,
writing and `zlib.crc32` all let go of the interpreter lock, so two threads suffice to hide one behind the other.
"""

import collections
import os
import threading
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any

CHUNK_BYTES = 4 * 2**20

_MAX_BEHIND = 3  # buffers that wait for the second thread; they bound the memory held by copied pieces
_MAX_THREADS = 4  # past this, memory is the limit


def num_chunks(nbytes: int) -> int:
    """How many digests a tensor has."""
    return -(-nbytes // CHUNK_BYTES)


class RunningDigests:
    """The digests of one tensor, whose bytes come in buffers of any size, in order."""

    def __init__(self) -> None:
        self._finished: list[int] = []
        self._crc = 0
        self._filled = 0  # bytes of the unfinished chunk seen so far

    def update(self, buffer: memoryview) -> None:
        """Takes the next bytes."""
        if not self._filled and len(buffer) < CHUNK_BYTES:  # small tensors, as fast as can be
            self._crc = zlib.crc32(buffer)
            self._filled = len(buffer)
            return
        while len(buffer):
            part = buffer[: CHUNK_BYTES - self._filled]
            self._crc = zlib.crc32(part, self._crc)
            self._filled += len(part)
            if self._filled == CHUNK_BYTES:
                self._finish_chunk()
            buffer = buffer[len(part) :]

    def result(self) -> list[int]:
        """The digests of all bytes taken; call it once, at the end."""
        if self._filled:
            self._finish_chunk()
        return self._finished

    def _finish_chunk(self) -> None:
        self._finished.append(self._crc)
        self._crc = self._filled = 0


class SecondThread:
    """A thread that runs jobs in order, a few behind the one that submits them. It starts with the first job."""

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None
        self._waiting: collections.deque[Future[None]] = collections.deque()

    def __enter__(self) -> "SecondThread":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._executor is not None:
            self._executor.shutdown(wait=True, cancel_futures=kind is not None)

    def submit(self, job: Callable[..., None], *args: Any) -> None:
        """Runs `job(*args)` on the thread; waits first if it is too far behind."""
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, "sharedtree-digest")
        while len(self._waiting) >= _MAX_BEHIND:
            self._waiting.popleft().result()
        self._waiting.append(self._executor.submit(job, *args))

    def wait(self) -> None:
        """Returns when every job has run; raises what one of them raised."""
        while self._waiting:
            self._waiting.popleft().result()


def run_jobs(jobs: Iterable[Callable[[], None]], num_threads: int | None = None) -> None:
    """Runs independent jobs on several threads, of which the caller's is one.

    Args:
        jobs: taken from the iterable one by one, as threads become free.
        num_threads: default: one for each core that this process may use, at most four.

    Raises:
        Exception: the first that a job raises. No job is started after it, and none is still running.
    """
    taken, errors = iter(jobs), list[BaseException]()
    lock = threading.Lock()  # generators may not be advanced by two threads at once

    def work() -> None:
        while not errors:
            try:
                with lock:
                    job = next(taken, None)
                if job is None:
                    return
                job()
            except BaseException as error:  # noqa: BLE001  raised again below, on the caller's thread
                errors.append(error)

    threads = [
        threading.Thread(target=work, name=f"sharedtree-read-{i}")
        for i in range(1, _default_threads() if num_threads is None else num_threads)
    ]
    for thread in threads:
        thread.start()
    work()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def _default_threads() -> int:
    affinity = getattr(os, "sched_getaffinity", None)  # Linux only
    return min(_MAX_THREADS, len(affinity(0)) if affinity is not None else os.cpu_count() or 1)
