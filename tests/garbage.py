"""When Python collects garbage, which is whenever it likes: what is counted then is not what a test does.

A collection calls back JAX, ends what other tests left behind, and has the package forget structures that nobody holds.
"""

import contextlib
import gc
from collections.abc import Iterator


def collect_all() -> None:
    """Collects what is garbage, and what is garbage only without that: an entry of a weak table may hold more."""
    for _ in range(3):
        gc.collect()


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Collects no garbage on its own. Whoever counts what is alive calls `collect_all` first, which takes a second."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
