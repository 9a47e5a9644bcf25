"""Which library a frame of a traceback belongs to."""

import pathlib
import sys
from functools import cache

TRACED = "FunctionTrace.call_with"
"""Our function that has called the function which is traced. What is further out is not part of that function."""


@cache
def package_of(filename: str) -> str | None:
    """Which of the libraries a file is part of; None if it is the user's."""
    path = pathlib.Path(filename)
    for name in ("jax", "jaxlib", "equinox", "optax", "flax", "sharedtree"):
        module = sys.modules.get(name)
        for folder in getattr(module, "__path__", ()):
            if path.is_relative_to(folder):
                return name
    return None
