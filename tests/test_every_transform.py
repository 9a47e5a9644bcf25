"""Whatever takes a function: a right answer, or an error that says what to do; never a private object of the package.

The functions are found in JAX and Equinox themselves, so one that a new version brings is tried, too.
"""

import functools
import inspect

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import tree_util as jtu
from jax.sharding import PartitionSpec

import sharedtree as st
from tests.strategies import Pair

FUNCTIONS = {
    *("body_fun", "branches", "callback", "computation", "cond_fun", "f", "fn", "fun", "func", "function"),
    *("matvec", "true_fun"),
}
NO_TRANSFORMS = {"default_serialise_filter_spec", "default_deserialise_filter_spec", "Partial"}  # `f` is a file there
OPTIONS = {
    "shard_map": {
        "mesh": lambda: jax.make_mesh((1,), ("i",)),
        "in_specs": lambda: PartitionSpec(),
        "out_specs": lambda: PartitionSpec(),
    },
}


def parameters(function):
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}


def found():
    for module in (jax, jax.lax, eqx):
        for name in sorted(vars(module)):
            obj = getattr(module, name) if not name.startswith("_") else None
            if callable(obj) and FUNCTIONS & parameters(obj).keys() and name not in NO_TRANSFORMS:
                yield pytest.param(obj, id=f"{module.__name__}.{name}")


def tied():
    w = jnp.array([[2.0]])
    return Pair(w, w)


def untied():
    return Pair(jnp.array([[2.0]]), jnp.array([[3.0]]))


def loss(*models):
    pairs = jax.tree.leaves(models, is_leaf=lambda x: type(x) is Pair)
    return sum(((m.first * m.second) ** 2).sum() + m.first.sum() for m in pairs)


def same(model, *others):
    return model


# How it is called; (transform, function, what makes a model) → what comes out.
CALLS = {
    "one": lambda transform, f, model: transform(f)(model()),
    "twice the same": lambda transform, f, model: (lambda m: transform(f)(m, m))(model()),
    "in a container": lambda transform, f, model: transform(f)({"m": (model(),)}),
    "operand": lambda transform, f, model: transform(f, model()),
    "operands": lambda transform, f, model: transform(f, (model(),), (model(),)),
    "applied only": lambda transform, f, model: transform(f),
}
PAIRS = {how: [(loss, tied)] for how in CALLS} | {
    "one": [(loss, tied), (loss, untied), (same, tied), (same, untied)],
    "in a container": [(same, tied)],
}


def options_of(transform):
    return {name: make() for name, make in OPTIONS.get(getattr(transform, "__name__", ""), {}).items()}


def private_parts(tree):
    """Objects of the package itself in a result, other than wrapped functions and what users are given."""
    public = (st.Dag, *(type(st.preserve_identities(t)(lambda x: x)) for t in (jax.jit, jax.grad, jax.vmap)))
    nodes, everything = [tree], []
    while nodes:
        node = nodes.pop()
        everything.append(node)
        level = jtu.default_registry.flatten_one_level(node)
        nodes.extend(() if level is None else level[0])
    inside = [x for x in everything if type(x).__module__.startswith("sharedtree") and not callable(x)]
    return [x for x in inside if not isinstance(x, public)] or [w for w in ("Packed(", "Operand(") if w in repr(tree)]


def is_clear(error, vanilla):
    if type(error) is type(vanilla) and str(error) == str(vanilla):
        return True
    text = str(error)
    private = ("Packed", "Operand", "Differentiated", "missing ", "_Learned")
    wrong = (IndexError, KeyError, AttributeError, AssertionError, NotImplementedError)
    return not isinstance(error, wrong) and not any(word in text for word in private)


def outcome(run):
    try:
        return run(), None
    except Exception as error:
        return None, error


def leaves(tree):
    return [np.asarray(x) for x in jax.tree.leaves(tree) if eqx.is_array_like(x) or isinstance(x, jax.Array)]


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("transform", list(found()))
def test_a_right_answer_or_an_error_that_says_what_to_do(transform):
    options = options_of(transform)
    # Some are refused when they are wrapped, so that is a part of each call.
    ours = lambda *args: st.preserve_identities(transform)(*args, **options)
    vanilla = functools.partial(transform, **options)
    for how, call in CALLS.items():
        for function, model in PAIRS[how]:
            got, error = outcome(lambda: call(ours, function, model))  # noqa: B023
            is_compared = model is untied and how in ("one", "in a container")
            if error is None and not is_compared:
                assert not private_parts(got), (how, got)
                continue
            want, vanilla_error = outcome(lambda: call(vanilla, function, model))  # noqa: B023
            if error is not None:
                assert is_clear(error, vanilla_error), f"{how}: {type(error).__name__}: {error}"
                continue
            assert not private_parts(got), (how, got)
            if vanilla_error is None:
                for one, two in zip(leaves(got), leaves(want), strict=True):
                    np.testing.assert_allclose(one, two, rtol=1e-6, err_msg=how)


def test_those_that_are_found_are_those_that_matter():
    names = {param.id for param in found()}
    assert names >= {"jax.jit", "jax.hessian", "jax.vjp", "jax.lax.scan", "jax.lax.cond", "equinox.filter_vmap"}
    assert names >= {"jax.pure_callback", "jax.custom_vjp", "jax.lax.custom_root", "equinox.filter_closure_convert"}
