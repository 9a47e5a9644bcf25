"""Much data is a matter of chunks of 4 MiB: each has a digest, threads share them out, and progress is told.

A digest is the CRC-32 of a chunk. It finds what disks, networks and copies do to a file, not a forger, who writes the
digest too. CRC-32 is what the standard library has that is about as fast as memory is copied. It finds every single
flipped bit, every burst of up to 32 bits, and all else but one change in 2³². Reading, writing and `zlib.crc32` all let
go of the interpreter lock, so two threads suffice to hide one behind another.
"""

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

CHUNK_BYTES = 4 * 2**20

SMALL = 64 * 2**10
"""Tensors below this are read and written together with their neighbours: a call costs about as much as their bytes."""

Progress = Callable[[int, int], Any]
"""Called with how many bytes of data are done and how many there are; perhaps on another thread, once at a time."""

ProgressOption = Progress | Literal[True] | None
"""A function (bytes done, bytes in all), True for a bar in the terminal, or None."""


def num_chunks(nbytes: int) -> int:
    """How many digests a tensor has."""
    return -(-nbytes // CHUNK_BYTES)


def run_jobs(jobs: Iterable[Callable[[], None]], num_threads: int | None = None) -> None:
    """Runs independent jobs on several threads, of which the caller's is one.

    Raises the first error that a job raises. No job is started after it, and none is still running.
    """
    if num_threads is None:  # one for each core that this process may use; past four, memory is the limit
        num_threads = min(4, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    taken, errors, lock = iter(jobs), list[BaseException](), threading.Lock()

    def work() -> None:
        try:
            while not errors:
                with lock:  # generators may not be advanced by two threads at once
                    job = next(taken, None)
                if job is None:
                    return
                job()
        except BaseException as error:  # noqa: BLE001  raised again below, on the caller's thread
            errors.append(error)

    threads = [threading.Thread(target=work, name=f"sharedtree-read-{i}") for i in range(1, num_threads)]
    for thread in threads:
        thread.start()
    work()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def counting(progress: Progress | None, total: int) -> Callable[[int], None]:
    """A function to call with the bytes just done, from any thread."""
    done, lock = 0, threading.Lock()

    def report(nbytes: int) -> None:
        nonlocal done
        if progress is not None:
            with lock:
                done += nbytes
                progress(done, total)

    return report


@contextlib.contextmanager
def showing(progress: ProgressOption, what: str) -> Iterator[Progress | None]:
    """The function to call, while the bar, if there is one, is shown."""
    if progress is not True:
        yield progress
        return
    try:
        from tqdm.auto import tqdm
    except ImportError:
        raise ImportError(
            "A progress bar needs tqdm:\n    pip install tqdm\nOr pass a function: progress=lambda done, total: ..."
        ) from None
    with tqdm(desc=what, unit="B", unit_scale=True, unit_divisor=1024) as bar:

        def report(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield report
