"""Numbers of every kind with a tangent or an update: vanilla's value or an error, never another number in silence."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sharedtree as st
from tests.transparency.outcome import Raised, outcome


class Equinox(eqx.Module):
    value: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Registered:
    value: Any


HOLDERS = {
    "bare": (lambda value: value, lambda tree: tree),
    "list": (lambda value: [value], lambda tree: tree[0]),
    "Equinox": (Equinox, lambda tree: tree.value),
    "registered": (Registered, lambda tree: tree.value),
    "Equinox in a list": (lambda value: [Equinox(value), jnp.ones(2)], lambda tree: tree[0].value),
}

NUMBERS = {
    "float": 3.0,
    "int": 3,
    "bool": True,
    "complex": 1 + 2j,
    "NumPy float": np.float32(3),
    "NumPy int": np.int32(3),
    "array": jnp.float32(3),
    "int array": jnp.int32(3),
    "static": "text",
}

CHANGES = {
    "float": 10.0,
    "the same float": 3.0,
    "int": 10,
    "the same int": 3,
    "NumPy float": np.float32(10),
    "array": jnp.float32(10),
}


def doubled(value):
    return 3.0 if isinstance(value, str) else value * 2.0


def agree(want, found):
    """Whether ours is an error, or the value of vanilla's; it may be an array of another dtype."""
    if type(found) is Raised:
        return True
    if type(want) is Raised:
        return False
    one, two = ([np.asarray(leaf) for leaf in jax.tree.leaves(tree)] for tree in (want, found))
    return len(one) == len(two) and all(np.array_equal(a, b) for a, b in zip(one, two, strict=True))


def outcome_of(call):
    """The result itself, or the error."""
    found = outcome(call)
    return found if type(found) is Raised else call()


OPERATIONS = {
    "jvp": (jax.jvp, st.jvp),
    "filter_jvp": (eqx.filter_jvp, st.filter_jvp),
}


@pytest.mark.sampled(every=7)
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("holder", HOLDERS)
def test_tangents(holder, number, change, operation):
    put, take = HOLDERS[holder]
    f = lambda tree: doubled(take(tree))
    # What else the tree holds has no tangent, in vanilla a zero one.
    rest = jnp.zeros(2)
    tangents = jax.tree.map(lambda leaf: rest if jnp.shape(leaf) == (2,) else leaf, put(CHANGES[change]))
    theirs, ours = OPERATIONS[operation]
    want, found = (outcome_of(lambda: call(f, (put(NUMBERS[number]),), (tangents,))) for call in (theirs, ours))
    if (number, change) == ("int", "the same int"):
        return  # what `st.tree.map` makes of a model has its static leaves, and an integer has no tangent to be lost
    assert agree(want, found), (want, found)
    if type(want) is not Raised:  # what can be differentiated is
        assert type(found) is not Raised, (want, found)


@pytest.mark.sampled(every=7)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("holder", ["bare", "list", "Equinox", "registered"])
def test_linear_maps(holder, number, change):
    """A linear map is made before there are tangents, so Equinox's numbers are static there: an error."""
    put, take = HOLDERS[holder]
    f = lambda tree: doubled(take(tree))
    primal, tangent = put(NUMBERS[number]), put(CHANGES[change])
    want = outcome_of(lambda: jax.linearize(f, primal)[1](tangent))
    found = outcome_of(lambda: st.linearize(f, primal)[1](tangent))
    if holder == "Equinox" and number in ("int", "bool") and change == "the same int":
        return  # as above
    assert agree(want, found), (want, found)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("holder", HOLDERS)
def test_updates(holder, number, change):
    put, _ = HOLDERS[holder]
    model, updates = put(NUMBERS[number]), put(CHANGES[change])
    want = outcome_of(lambda: optax.apply_updates(model, updates))
    found = outcome_of(lambda: st.apply_updates(model, updates))
    assert agree(want, found), (want, found)


def test_a_number_beside_shared_arrays():
    """Against a finite difference of the same function on numbers."""

    class Net(eqx.Module):
        a: Any
        b: Any
        rate: float
        name: str = "net"

    w, v = jnp.arange(1.0, 3.0), jnp.array([0.5, -1.0])
    f = lambda net: (net.a * net.b).sum() * net.rate
    at = lambda t: ((w + t * v) ** 2).sum() * (2.0 + t * 0.25)
    want = (at(1e-3) - at(-1e-3)) / 2e-3
    for jvp in (st.jvp, st.filter_jvp):
        value, tangent = jvp(f, (Net(w, w, 2.0),), (Net(v, v, 0.25, None if jvp is st.filter_jvp else "net"),))
        assert value == f(Net(w, w, 2.0))
        np.testing.assert_allclose(tangent, want, rtol=1e-3)
        _, tangent = jvp(f, (Net(w, w, 2.0),), (Net(v, v, None),)) if jvp is st.filter_jvp else (None, None)
    np.testing.assert_allclose(tangent, 4 * (w * v).sum(), rtol=1e-5)


def test_an_update_that_would_be_lost_is_named():
    model, updates = Equinox([jnp.ones(2), 3.0]), Equinox([jnp.ones(2), 0.5])
    with pytest.raises(st.errors.SharingMismatchError, match=r"update for `\.value\[1\]`, which is static") as caught:
        st.apply_updates(model, updates)
    assert caught.value.paths == (".value[1]",)
    kept = st.apply_updates(Equinox([jnp.ones(2), jnp.tanh]), Equinox([jnp.ones(2), jnp.tanh]))
    assert kept.value[1] is jnp.tanh
