"""`jax.Ref`s where vanilla JAX refuses them: those that have an identity here, and those that are refused here, too."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sharedtree as st
from tests.transparency.outcome import Model, Registered


def reference():
    return jax.new_ref(jnp.zeros(2))


def count(*refs):
    """Writes to each of them, and returns what the first one holds then."""
    for ref in refs:
        ref[...] = ref[...] + 1
    return refs[0][...]


# Call a transform of a function of two references with one that is both of them.
TWICE = {
    "jit": lambda module, ref: module.jit(count)(ref, ref),
    "jit, in a list": lambda module, ref: module.jit(lambda refs: count(*refs))([ref, ref]),
    "jit, by name": lambda module, ref: module.jit(lambda *, a, b: count(a, b))(a=ref, b=ref),
    "jit, in a module": lambda module, ref: module.jit(lambda m, ref: count(m.leaf, ref))(Registered(ref), ref),
    "vmap": lambda module, ref: module.vmap(count)(ref, ref),
    "checkpoint": lambda module, ref: module.checkpoint(count)(ref, ref),
}


def test_one_reference_given_twice_is_one_inside():
    for name, call in TWICE.items():
        if name != "checkpoint":  # of which it depends on the version of JAX
            with pytest.raises(ValueError, match="only one reference to a mutable array"):
                call(jax, reference())
        ref = reference()
        np.testing.assert_array_equal(call(st, ref), [2, 2])
        np.testing.assert_array_equal(ref[...], [2, 2])
    seen = []
    st.jit(lambda a, b, c: seen.append((a is b, a is c)))(ref := reference(), ref, reference())
    assert seen == [(True, False)]


# What jitted functions of a reference return, and how it is found in the result.
RETURNED = {
    "alone": (lambda ref: ref, lambda result: result),
    "in a dict": (lambda ref: {"ref": ref, "count": count(ref)}, lambda result: result["ref"]),
    "twice": (lambda ref: (ref, ref), lambda result: result[result[0] is not result[1]]),
    "in a new module": (lambda ref: Model([ref]), lambda result: result.leaf[0]),
}


def test_a_reference_that_jit_returns_is_the_callers_own():
    for f, find in RETURNED.values():
        ref = reference()
        assert find(st.jit(f)(ref)) is ref
        with pytest.raises((ValueError, TypeError)):  # an Equinox module takes more than references to refuse
            jax.jit(f)(ref)
    for make in (Registered, Model):
        model = make(reference())
        same = st.jit(lambda m: (count(m.leaf), m)[1])(model)
        assert same is model
        np.testing.assert_array_equal(same.leaf[...], [1, 1])


OUTER = reference()

REFUSED = {
    "a new one": lambda module, ref: module.jit(lambda x: jax.new_ref(x))(jnp.ones(2)),
    "one that the function closes over": lambda module, ref: module.jit(lambda x: OUTER)(jnp.ones(2)),
    "closed over, and an argument": lambda module, ref: module.jit(lambda x: count(ref, x))(ref),
    "returned under checkpoint": lambda module, ref: module.checkpoint(lambda ref: ref)(ref),
}


def test_what_is_no_argument_of_jits_is_refused_as_by_vanilla_jax():
    for name, call in REFUSED.items():
        for module in (jax, st):
            with pytest.raises(ValueError, match="mutable array reference"):
                pytest.fail(f"{name}: {call(module, reference())}")
    f = st.preserve_identities(jax.jit, policy=st.Policy(pass_through=False))(lambda ref: ref)
    with pytest.raises(ValueError, match="mutable array references cannot be returned"):
        f(ref := reference())
    with pytest.raises(st.errors.InconsistentSharingError) as caught:
        st.vmap(lambda a, b: a[...], in_axes=(0, None))(ref, Model([ref]))
    assert caught.value.paths == ("a", "b.leaf[0]")
