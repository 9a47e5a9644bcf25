"""Locks that are free in the child of a fork.

The child has one thread. If another thread of the parent held a lock at the fork, the lock would stay taken in the
child for ever, since that thread is not there to release it. So each lock of the package is made free in the child. The
data that it guards is then as the other thread had left it, perhaps between two steps. Hence two rules for code that
holds a lock:

- it runs no code of users, because such code may wait for anything;
- after each step of it, the guarded data is valid.
"""

import os
import threading
import weakref
from typing import Any

_all_locks: "weakref.WeakSet[Lock]" = weakref.WeakSet()
"""All living locks of this process."""


class Lock:
    """A lock, to be used in a `with` statement.

    A thread that holds it may take it again: a finalizer may run in the middle of this thread's work and need the lock.
    """

    __slots__ = ("__weakref__", "_lock")

    def __init__(self) -> None:
        self.renew()
        _all_locks.add(self)

    def renew(self) -> None:
        """Makes the lock free, whichever thread of the parent held it. To be called in the child of a fork."""
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: Any) -> None:
        try:
            self._lock.release()
        except RuntimeError:
            # The process was forked inside of the `with` statement, by a finalizer, and this is the child. There the
            # lock was made free, so there is nothing to release.
            return


def _renew_all() -> None:
    """Makes all locks free. Python calls it in the child of a fork."""
    for lock in list(_all_locks):
        lock.renew()


# Windows has no fork.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_all)
