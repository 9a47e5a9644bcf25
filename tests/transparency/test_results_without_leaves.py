"""Results that hold no array, under every transform's option for results: the same as vanilla's, or the same error."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import sharedtree as st
from tests.transparency.outcome import Raised, Returned, outcome, vec

MESH = Mesh(np.array(jax.devices()[:1]), ("d",))

OPTIONS = {
    "jit": lambda out: {"out_shardings": out},
    "vmap": lambda out: {"out_axes": out},
    "pmap": lambda out: {"out_axes": out},
    "shard_map": lambda out: {"mesh": MESH, "in_specs": PartitionSpec(), "out_specs": out},
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Empty:
    """A module without a leaf."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Holder:
    part: Any


EMPTY = {
    "()": (),
    "None": None,
    "{}": {},
    "[]": [],
    "((),)": ((),),
    "(None,)": (None,),
    "{'a': ()}": {"a": ()},
    "Empty()": Empty(),
    "Holder(())": Holder(()),
    "(Empty(), {})": (Empty(), {}),
    "EmptyState()": optax.EmptyState(),
}
RESULTS = {
    **{name: lambda x, value=value: value for name, value in EMPTY.items()},
    "x": lambda x: x,
    "(x,)": lambda x: (x,),
}


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("transform", OPTIONS)
@pytest.mark.parametrize("out", EMPTY)
def test_an_option_without_a_label(transform, out):
    options, wrong = OPTIONS[transform](EMPTY[out]), {}
    for name, f in RESULTS.items():
        arrays = vec()[None]
        want = outcome(lambda: getattr(jax, transform)(f, **options)(arrays))
        found = outcome(lambda: getattr(st, transform)(f, **options)(arrays))
        is_right = found == want
        if type(want) is type(found) is Raised and not is_right:
            # With modules the message of ours says more. JAX itself fails on an assertion where a misfit has no leaf.
            is_right = isinstance(found.error, type(want.error)) or type(want.error) is AssertionError
        if not is_right:
            wrong[name] = want, found
    assert wrong == {}


@pytest.mark.parametrize("optimizer", [optax.sgd(0.1), optax.identity(), optax.chain(optax.identity(), optax.sgd(0.1))])
def test_the_state_of_an_optimizer_without_slots(optimizer):
    params = {"w": jnp.ones(3)}
    sharding = NamedSharding(MESH, PartitionSpec())
    shardings = jax.tree.map(lambda _: sharding, jax.eval_shape(optimizer.init, params))
    want = outcome(lambda: jax.jit(optimizer.init, out_shardings=shardings)(params))
    assert type(want) is Returned
    assert outcome(lambda: st.jit(optimizer.init, out_shardings=shardings)(params)) == want
    assert outcome(lambda: st.jit(optimizer.init, out_shardings=shardings, in_place=True)(params)) == want


@pytest.mark.parametrize("transform", OPTIONS)
def test_what_is_changed_in_place_is_written_beside_a_result_without_leaves(transform):
    holder = Holder(vec()[None])

    def double(holder):
        holder.part = 2 * holder.part
        return ()

    assert getattr(st, transform)(double, **OPTIONS[transform](()), in_place=True)(holder) == ()
    np.testing.assert_array_equal(holder.part, 2 * vec()[None])
