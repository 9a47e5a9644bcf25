"""Work that several threads do at the same time."""

import contextlib
import sys
import threading

from tests.processes import HANGS

COUNT = 8


@contextlib.contextmanager
def switching_often():
    """A block in which Python switches between threads as often as it can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def at_once(work, count=COUNT):
    """Returns what `work(i)` returns in each of the threads, which begin together. Raises what one of them raises."""
    start, results, errors = threading.Barrier(count), [None] * count, []

    def run(i):
        try:
            start.wait()
            results[i] = work(i)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(count)]
    with switching_often():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(HANGS)
    assert not any(thread.is_alive() for thread in threads), "they wait for one another"
    if errors:
        raise errors[0]
    return results
