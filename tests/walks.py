"""Which walk is in use, for a test that compares the two."""

import contextlib
import types
from unittest import mock

from sharedtree import _graph, _native_walk
from sharedtree.transforms import _warm


@contextlib.contextmanager
def in_python():
    """A block in which nothing is done natively, by wrappers that are made in it."""
    with contextlib.ExitStack() as stack:
        for module in (_native_walk, _graph, _warm):
            stack.enter_context(mock.patch.object(module, "native", None))
        yield


@contextlib.contextmanager
def calls_in_c():
    """Collects of each call, of wrappers that are first called in the block, whether it was left to Python."""
    deferred = []

    def call(facts, args, kwargs):
        made = _native_walk.native.call(facts, args, kwargs)
        deferred.append(type(made) is _warm.Deferred and not made)
        return made

    native = types.SimpleNamespace(call=call, flags_of=_native_walk.native.flags_of)
    with mock.patch.object(_warm, "native", native):
        yield deferred
