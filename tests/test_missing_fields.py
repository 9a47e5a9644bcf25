"""Attributes that Equinox only marks as missing are missing: a module that came back from Equinox is the one it was."""

import copy
import pickle
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

import sharedtree as st
from sharedtree.libraries import _equinox

from .strategies import Layer, Pair, dags, twin


class Gapped(eqx.Module):
    """Two fields have defaults that are never set, one of them static; a third is set if asked."""

    weight: jax.Array
    child: Any
    bias: Any = None
    flag: Any = eqx.field(static=True, default=None)
    extra: Any = None

    def __init__(self, weight: Any, child: Any = None, extra: Any = None) -> None:
        self.weight, self.child = weight, child
        if extra is not None:
            self.extra = extra

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x if self.child is None else self.child(x)
        return x * self.weight

    def forward(self, x: jax.Array) -> jax.Array:
        """A method."""
        return self(x)


class Bare(eqx.Module):
    """Nothing is ever set."""

    first: Any = None
    second: Any = eqx.field(static=True, default=None)

    def __init__(self) -> None:
        pass


def gapped(extra: Any = None) -> Gapped:
    inner = Gapped(jnp.full(2, 3.0))
    return Gapped(jnp.full(2, 2.0), inner, extra)


def modules() -> dict[str, Any]:
    key = jax.random.key(0)
    layer = eqx.nn.Linear(2, 2, key=key)
    return {
        "gapped": gapped(),
        "gapped, one more": gapped(extra=jnp.ones(2)),
        "bare": Pair(Bare(), jnp.ones(2)),
        "in containers": Pair([gapped()], {"a": (gapped(), Bare())}),
        "Linear": layer,
        "Sequential": eqx.nn.Sequential([layer, eqx.nn.Lambda(jax.nn.relu), eqx.nn.Dropout(0.5)]),
        "GRU": eqx.nn.GRUCell(2, 2, key=key),
        "bound method": gapped().forward,
        "partial": eqx.Partial(gapped().forward, x=jnp.ones(2)),
        "filter_vmap of a module": eqx.filter_vmap(gapped()),
        "filter_vmap of a method": eqx.filter_vmap(gapped().forward),
        "filter_jit of a partial": eqx.filter_jit(eqx.Partial(gapped())),
        "plain": Layer(jnp.ones(2), jax.nn.relu, [jnp.ones(2)]),
    }


OPERATIONS = {
    "tree.map": lambda m: jax.tree.map(lambda x: x, m),
    "flatten and unflatten": lambda m: jax.tree.unflatten(jax.tree.structure(m), jax.tree.leaves(m)),
    "apply_updates": lambda m: eqx.apply_updates(
        m, jax.tree.map(lambda x: jnp.zeros_like(x) if eqx.is_inexact_array(x) else None, m)
    ),
    "filter_jit": lambda m: eqx.filter_jit(lambda m: m)(m),
    "filter_vmap": lambda m: eqx.filter_vmap(lambda m: m, axis_size=2, in_axes=None, out_axes=None)(m),
    "filter_eval_shape": lambda m: eqx.combine(eqx.filter(m, eqx.is_array), eqx.filter_eval_shape(lambda m: m, m)),
    "tree_at": lambda m: eqx.tree_at(lambda t: jax.tree.leaves(t)[0], m, replace_fn=lambda x: x),
    "partition and combine": lambda m: eqx.combine(*eqx.partition(m, eqx.is_array)),
    "inference_mode": lambda m: eqx.nn.inference_mode(m, value=False),
    "copy": lambda m: copy.copy(jax.tree.map(lambda x: x, m)),
    "twice": lambda m: jax.tree.map(lambda x: x, jax.tree.map(lambda x: x, m)),
}


COMPILED = ("filter_jit", "filter_vmap")


def structures_agree(one: Any, other: Any) -> None:
    assert st.tree.structure(one) is st.tree.structure(other)
    assert [path for path, _ in st.tree.leaves_with_path(one)] == [path for path, _ in st.tree.leaves_with_path(other)]
    st.assert_same_sharing(one, other)


@pytest.mark.slow
def test_what_equinox_makes_of_a_module_has_its_structure():
    for name, module in modules().items():
        for operation, made in OPERATIONS.items():
            if operation in COMPILED and name not in ("gapped", "in containers", "bound method"):
                continue
            assert st.tree.structure(made(module)) is st.tree.structure(module), (name, operation)


@pytest.mark.parametrize("name", ["gapped", "gapped, one more", "bare", "in containers", "Linear", "GRU"])
def test_a_copied_marker_is_a_marker(name):
    """Copying and pickling make other instances of it."""
    module = modules()[name]
    for made_again in (copy.deepcopy, lambda tree: pickle.loads(pickle.dumps(tree))):
        copied = made_again(jax.tree.map(lambda x: x, module))
        structures_agree(module, copied)
        structures_agree(module, jax.tree.map(lambda x: x, copied))


@given(dags())
def test_what_equinox_makes_of_a_random_dag_has_the_structure_of_its_twin(tree):
    tree = twin(Pair(tree, Gapped(jnp.ones(2), Bare())))
    structures_agree(tree, jax.tree.map(lambda x: x, tree))
    structures_agree(tree, st.tree.map(lambda x: x, jax.tree.map(lambda x: x, tree)))


def test_marked_modules_and_unmarked_ones_share_a_trace_and_a_value_is_told_from_a_marker():
    seen = []

    @st.jit
    def total(m):
        seen.append(sorted(vars(m)))
        return sum(jax.tree.leaves(m))

    plain, full = gapped(), gapped(extra=jnp.ones(2))
    for _ in range(2):
        for each in (plain, *(operation(plain) for operation in OPERATIONS.values())):
            assert total(each).tolist() == [5.0, 5.0]
        assert total(full).tolist() == total(jax.tree.map(lambda x: x, full)).tolist() == [6.0, 6.0]
    assert seen == [["child", "weight"], ["child", "extra", "weight"]]


TRANSFORMS = {
    "jit": lambda f: st.jit(f),
    "vmap": lambda f: st.vmap(f),
    "grad": lambda f: st.grad(lambda x: st.checkpoint(f)(x).sum()),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=list(TRANSFORMS))
def test_a_marked_module_is_a_function_like_any_other(transform):
    """Its `__name__` is a marker, too, which no function can have for a name."""
    model = gapped()
    x = jnp.arange(4.0).reshape(2, 2)
    for each in (model, model.forward, eqx.filter_vmap(model), eqx.Partial(model)):
        expected = transform(lambda x, each=each: each(x))(x)
        np.testing.assert_array_equal(transform(OPERATIONS["tree.map"](each))(x), expected)


def test_a_marked_module_is_saved_without_its_markers():
    for name in ("gapped", "in containers", "bare"):
        module = modules()[name]
        marked = jax.tree.map(lambda x: x, module)
        classes = {"trusted": [Gapped, Bare, Pair]}
        loaded = st.from_bytes(st.to_bytes(marked), **classes)
        assert not any(_equinox.is_missing(v) for v in vars(loaded).values())
        structures_agree(loaded, module)
        assert st.to_bytes(marked) == st.to_bytes(module)


def test_what_stays_is_what_equinox_wrote():
    """The names that `module_update_wrapper` really copied are data, and stay."""
    wrapped = eqx.filter_vmap(gapped().forward)
    made = st.tree.map(lambda x: x, jax.tree.map(lambda x: x, wrapped))
    assert made.__name__ == wrapped.__name__ == "forward"
    assert made.__doc__ == "A method."
