"""treex issue 8: a module with two counters that are one object. Calling it increments the first; the second follows.

With `sharedtree.Module`, with and without `jit`, and by code that knows of vanilla JAX only.
"""

import jax
import jax.numpy as jnp

import sharedtree as st


class Counter(st.Module):
    def __init__(self, count=0):
        self.count = jnp.array(count)

    def __call__(self):
        self.count = self.count + 1
        return self.count


class Model(st.Module):
    def __init__(self):
        self.first = self.second = Counter()

    def __call__(self):
        return self.first()


def called(model):
    model()
    return model


def test_the_second_follows_the_first():
    for transform in (lambda f: f, st.jit, st.checkpoint, st.preserve_identities(jax.jit), lambda f: st.jit(st.jit(f))):
        model = transform(called)(Model())
        assert model.first is model.second
        assert (int(model.first.count), int(model.second.count)) == (1, 1)
    # In place, the caller's own counter counts.
    model = Model()
    counter = model.first
    call = st.jit(Model.__call__, in_place=True)
    assert [int(call(model)) for _ in range(3)] == [1, 2, 3]
    assert model.first is model.second is counter
    assert int(counter.count) == 3
    # Vanilla `jit` makes two of them, and two counters are not one.
    model = jax.jit(called)(Model())
    assert model.first is not model.second
    assert (int(model.first.count), int(model.second.count)) == (1, 0)
    model = st.jit(called)(model)
    assert (int(model.first.count), int(model.second.count)) == (2, 0)


def test_one_object_in_two_arguments():
    counter = Counter()

    @st.jit
    def f(one, other):
        one()
        return other.count, jnp.array(one is other)

    count, is_one = f(counter, counter)
    assert (int(count), bool(is_one)) == (1, True)
