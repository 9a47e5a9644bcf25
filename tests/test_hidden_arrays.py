"""Objects of unregistered classes that hold arrays: an error where a tree is asked about, a static value elsewhere."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sharedtree as st


class Scale:
    """A normaliser, as people write them."""

    def __init__(self, weight):
        self.weight = weight

    def __call__(self, x):
        return self.weight * x


class Slotted:
    __slots__ = ("not_set", "weight")

    def __init__(self, weight):
        self.weight = weight

    def __call__(self, x):
        return self.weight * x


class Silent:
    def __init__(self, weight):
        self.layers = {"first": [(weight,)]}


class Refusing(list):
    """A list of which only its own class knows how to iterate over it."""

    def __iter__(self):
        raise RuntimeError("nobody has asked for the items")


class Named(dict):
    """A dictionary with an attribute."""

    weight: object


W = jnp.ones(2)

HOLDERS = {
    "callable": Scale(W),
    "NumPy": Scale(np.ones(2)),
    "slots": Slotted(W),
    "not callable": Silent(W),
    "one in another": Scale(Scale(W)),
    "bound method": Scale(W).__call__,
    "bound method of a module": Scale(eqx.nn.Identity()).__init__.__func__.__get__(eqx.nn.Lambda(W)),
    "partial": functools.partial(jnp.dot, W),
    "partial by keyword": functools.partial(jnp.dot, b=W),
    "partial of one": functools.partial(Scale(W)),
}

PLACES = {
    "alone": lambda obj: obj,
    "list": lambda obj: [W, obj],
    "dict": lambda obj: {"a": (1, {"b": obj})},
}

ASKED = {
    "ties": st.ties,
    "untie": st.untie,
    "copy": st.copy,
    "count_parameters": st.count_parameters,
    "Dag": st.Dag,
    "optimizer": st.optimizer(optax.adam(0.1)).init,
    "flatten": st.tree.flatten,
    "structure": st.tree.structure,
    "leaves": st.tree.leaves,
    "leaves_with_path": st.tree.leaves_with_path,
    "map": lambda tree: st.tree.map(lambda x: x, tree),
    "filter": lambda tree: st.tree.filter(tree, True),
    "partition": lambda tree: st.tree.partition(tree, eqx.is_array),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.sampled(every=3)
def test_asked_about(holder, place):
    tree = PLACES[place](HOLDERS[holder])
    for ask in ASKED.values():
        for _ in range(2):  # known structures, too
            with pytest.raises(st.errors.UnregisteredTypeError, match="nothing can see them|can be seen"):
                ask(tree)
    with pytest.raises(TypeError):
        st.to_bytes(Scale(W))


def asked_of_all(*trees):
    """Nothing is refused. Optax refuses a tree in which there is nothing to optimise."""
    for tree in trees:
        for name, ask in ASKED.items():
            if name != "optimizer" or st.count_parameters(tree):
                ask(tree)


def closing_over(x):
    return W * x


def decorated():
    @functools.wraps(closing_over)
    def f(x):
        return closing_over(x)

    f.cache = [W]
    return f


FUNCTIONS = {
    "function": closing_over,
    "closure": lambda x, w=W: w * x,
    "decorated": decorated(),
    "jitted": jax.jit(closing_over),
    "ours": st.jit(closing_over),
    "with a rule": jax.nn.relu,
    "ufunc": jnp.add,
    "class": Scale,
    "builtin": abs,
    "partial of no arrays": functools.partial(jnp.dot, 2.0),
    "callable without arrays": Scale(2.0),
    "optimizer": optax.adam(0.1),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_are_leaves(name):
    asked_of_all(FUNCTIONS[name], [W, FUNCTIONS[name]])
    assert st.count_parameters([W, FUNCTIONS[name]]) == 2


@pytest.mark.parametrize("holder", ["callable", "slots", "bound method", "partial"])
def test_a_static_value_where_the_library_says_so(holder):
    obj = HOLDERS[holder]
    asked_of_all(eqx.nn.Lambda(obj), jax.tree_util.Partial(obj), [eqx.nn.Lambda(obj), W])
    np.testing.assert_array_equal(st.filter_jit(lambda f, x: f(x))(obj, W), obj(W))
    np.testing.assert_array_equal(st.filter_grad(lambda x, f: f(x).sum())(W, obj), W)


def test_subclasses_of_containers():
    """Their own code is not called, and their attributes are searched as well as their items."""
    with pytest.raises(st.errors.UnregisteredTypeError, match="`Refusing`"):
        st.count_parameters([Refusing([W])])
    assert st.count_parameters([W, Named(a=1), Refusing([1])]) == 2
    named = Named(b=1)
    named.weight = W
    with pytest.raises(st.errors.UnregisteredTypeError, match="`Named`"):
        st.count_parameters([W, named])


def test_paths():
    with pytest.raises(st.errors.UnregisteredTypeError, match=r"`Scale` at `\['a'\]\[1\]`") as caught:
        st.ties({"a": (1, Scale(W))})
    assert caught.value.paths == ("['a'][1]",)
    with pytest.raises(st.errors.UnregisteredTypeError, match=r"register_pytree_node\(Scale, flatten, unflatten\)"):
        st.ties(Scale(W).__call__)
