"""Functions and classes that count what is done with them."""

import collections

import jax


def counted(function):
    """Returns the function, and a list that grows by one each time it is traced."""
    traces = []

    def inner(*args, **kwargs):
        traces.append(1)
        return function(*args, **kwargs)

    return inner, traces


@jax.tree_util.register_pytree_node_class
class Counting:
    """A node that counts how often instances are flattened and unflattened, in `Counting.counts`."""

    counts = collections.Counter()

    def __init__(self, a, b):
        self.a, self.b = a, b

    def tree_flatten(self):
        self.counts["flatten"] += 1
        return (self.a, self.b), None

    @classmethod
    def tree_unflatten(cls, aux, children):
        cls.counts["unflatten"] += 1
        return cls(*children)
