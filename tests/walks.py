"""Which walk is in use, for a test that compares the two."""

import contextlib
from unittest import mock

from sharedtree import _graph, _native_walk


@contextlib.contextmanager
def in_python():
    """A block in which nothing is done natively."""
    with mock.patch.object(_native_walk, "native", None), mock.patch.object(_graph, "native", None):
        yield
