"""Recurses without end after a deep model was walked: an error, and no crash."""

import functools
import sys

import optax

import sharedtree as st
from tests.deep import chain, free

model, found = chain(3_000), sys.getrecursionlimit()
state = st.optimizer(optax.sgd(0.1)).init(model)


class Endless:
    def __getattr__(self, name):
        return functools.reduce(lambda _, __: sorted([self], key=lambda x: getattr(x, name)), [1, 2])


try:
    Endless().x  # noqa: B018 -- it is asked for
except RecursionError:
    print("an error", sys.getrecursionlimit() == found, flush=True)
free(model)
