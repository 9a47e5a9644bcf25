"""Which walk is in use, for a test that compares the two."""

import contextlib
from unittest import mock

from sharedtree.core import _pack_and_unpack
from sharedtree.transforms import _caller_side
from sharedtree.transforms._function_transform import FunctionTransform


@contextlib.contextmanager
def in_python():
    """A block in which nothing is done natively, by wrappers that are made in it."""
    with contextlib.ExitStack() as stack:
        for module in (_pack_and_unpack, _caller_side):
            stack.enter_context(mock.patch.object(module, "native", None))
        yield


@contextlib.contextmanager
def calls_in_python():
    """Collects the arguments of each call that is left to Python."""
    left = []
    go_on = FunctionTransform.go_on

    def noting(self, deferred, policy, args, kwargs):
        if deferred == ():
            left.append(args)
        return go_on(self, deferred, policy, args, kwargs)

    with mock.patch.object(FunctionTransform, "go_on", noting):
        yield left
