"""Locks that are free in the child of a fork.

The child has one thread. A lock that another thread held when the process was forked would stay taken in it for ever,
since nobody is there to give it back. So every lock of the package is made anew in the child. What it guards is then as
that thread left it. Hence two rules for whoever holds one: no code of a user runs meanwhile, since it may wait for
anything; and what is guarded is fit to be seen after each step.
"""

import os
import threading
import weakref
from typing import Any

_all_locks: "weakref.WeakSet[Lock]" = weakref.WeakSet()


class Lock:
    """A lock for `with`. The thread that has it may take it again, as a finalizer does that runs while it is held."""

    __slots__ = ("__weakref__", "_lock")

    def __init__(self) -> None:
        self.renew()
        _all_locks.add(self)

    def renew(self) -> None:
        """Makes it free, whoever has it."""
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: Any) -> None:
        try:
            self._lock.release()
        except RuntimeError:
            # A finalizer has forked the process while this was held, and this is the child, where nobody holds it.
            return


def _renew_all() -> None:
    for lock in list(_all_locks):
        lock.renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_all)
