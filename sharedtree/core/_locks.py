"""Locks that are free in the child of a fork.

The child has one thread. If another thread of the parent held a lock at the fork, the lock would stay taken in the
child for ever, since that thread is not there to release it. So each lock of the package is renewed in the child. The
guarded data is then as the other thread left it, perhaps between two steps. Hence two rules for code that holds a lock:

- it runs no code of users, which may wait for anything;
- after each step the guarded data is valid.
"""

import os
import threading
import weakref
from typing import Any

_all_locks: "weakref.WeakSet[Lock]" = weakref.WeakSet()


class Lock:
    """A lock for `with`.

    A thread that holds it may take it again, as a finalizer does that runs in this thread meanwhile.
    """

    __slots__ = ("__weakref__", "_lock")

    def __init__(self) -> None:
        self.renew()
        _all_locks.add(self)

    def renew(self) -> None:
        """Makes the lock free, whichever thread holds it."""
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: Any) -> None:
        try:
            self._lock.release()
        except RuntimeError:
            # A finalizer forked the process while this thread held the lock. In the child it was renewed, so nobody
            # holds it.
            return


def _renew_all() -> None:
    """Renews all locks, in the child of a fork."""
    for lock in list(_all_locks):
        lock.renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_all)
