"""Progress of reading and writing: a function that is called, or a bar."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Literal

from ._writing import Progress

ProgressOption = Progress | Literal[True] | None
"""A function (bytes done, bytes in all), True for a bar in the terminal, or None."""


@contextlib.contextmanager
def showing(progress: ProgressOption, what: str) -> Iterator[Callable[[int, int], Any] | None]:
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
