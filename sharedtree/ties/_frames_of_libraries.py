"""Finds the library to which a frame of a traceback belongs."""

import pathlib
import sys
from functools import cache

TRACED = "FunctionTrace.call_with"
"""Name of our method that calls the traced function. Frames further out are not part of that function."""


@cache
def package_of(filename: str) -> str | None:
    """Returns the name of the library that a file belongs to. None for a file of the user's program."""
    path = pathlib.Path(filename)
    for name in ("jax", "jaxlib", "equinox", "optax", "flax", "sharedtree"):
        module = sys.modules.get(name)
        # A package may be spread over several folders. A library that was never imported has none.
        for folder in getattr(module, "__path__", ()):
            if path.is_relative_to(folder):
                return name
    return None
