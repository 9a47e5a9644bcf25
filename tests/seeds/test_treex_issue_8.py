"""treex issue 8: a module with two counters that are one object. Calling it increments the first; the second follows.

With `sharedtree.Module`, with and without `jit`, and by code that knows of vanilla JAX only.
"""

import jax
import jax.numpy as jnp
import optax
import pytest

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


@pytest.mark.parametrize(
    "transform",
    [lambda f: f, st.jit, st.checkpoint, st.preserve_identities(jax.jit), lambda f: st.jit(st.jit(f))],
    ids=["none", "jit", "checkpoint", "preserve_identities", "jit of jit"],
)
def test_the_second_follows_the_first(transform):
    model = transform(called)(Model())
    assert model.first is model.second
    assert (int(model.first.count), int(model.second.count)) == (1, 1)


def test_vanilla_jit_makes_two_of_them():
    model = jax.jit(called)(Model())
    assert model.first is not model.second
    assert (int(model.first.count), int(model.second.count)) == (1, 0)


def test_in_place_the_callers_own_counter_counts():
    model = Model()
    counter = model.first
    call = st.jit(Model.__call__, in_place=True)
    assert [int(call(model)) for _ in range(3)] == [1, 2, 3]
    assert model.first is model.second is counter
    assert int(counter.count) == 3


def test_one_object_in_two_arguments():
    counter = Counter()

    @st.jit
    def f(one, other):
        one()
        return other.count, jnp.array(one is other)

    count, is_one = f(counter, counter)
    assert (int(count), bool(is_one)) == (1, True)


def test_two_counters_are_not_one():
    model = Model()
    model.second = Counter()
    model = st.jit(called)(model)
    assert (int(model.first.count), int(model.second.count)) == (1, 0)


def test_sharing_is_part_of_the_cache_key():
    traces = []

    @st.jit
    def f(model):
        traces.append(model.first is model.second)
        return model.first.count

    shared, parted = Model(), Model()
    parted.second = Counter()
    for model in (shared, parted, shared, parted):
        f(model)
    assert traces == [True, False]


class Tied(st.Module):
    def __init__(self):
        self.embed = self.head = st.parameter(jnp.ones(3))

    def __call__(self, x):
        return (self.embed * self.head * x).sum()


def test_optax_by_a_dag():
    """`Dag` is a vanilla pytree, so optax has one slot for the tied weight, and `jax.grad` one gradient."""
    x, tx = jnp.arange(3.0), optax.adam(0.1)
    dag = st.Dag(Tied())
    state = tx.init(dag)
    gradient = jax.grad(lambda dag: dag.tree(x))(dag)
    assert len(jax.tree.leaves(gradient)) == 1
    updates, state = tx.update(gradient, state, dag)
    after = optax.apply_updates(dag, updates).tree
    assert after.embed is after.head
    weight = jnp.ones(3)
    bare = jax.grad(lambda w: (w * w * x).sum())(weight)
    expected = optax.apply_updates(weight, tx.update(bare, tx.init(weight), weight)[0])
    assert jnp.allclose(after.embed, expected)
