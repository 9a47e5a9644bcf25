"""A `where` sees the tree: it names what Equinox's `tree_at` makes of it, or is an error where it looks at leaves."""

import collections
import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import tree_util as jtu

import sharedtree as st
from tests.kinds import KINDS, nnx
from tests.strategies import Mutable, Pair

KEYS = jax.random.split(jax.random.key(0), 8)
MISMATCH = st.errors.SharingMismatchError


class Layers(eqx.Module):
    layers: Any
    scale: Any = 1.0


def linear(number, *, bias=True):
    return eqx.nn.Linear(2, 2, use_bias=bias, key=KEYS[number])


def some_biases():
    return Layers([linear(0), linear(1, bias=False), linear(2), linear(3, bias=False)])


def no_bias():
    return Layers([linear(0), linear(1, bias=False)])


def mlp():
    return eqx.nn.MLP(2, 2, 3, 2, key=KEYS[0])


def is_none(x):
    return x is None


def is_linear(x):
    return isinstance(x, eqx.nn.Linear)


def linear_weights(m):
    return [x.weight for x in jax.tree.leaves(m, is_leaf=is_linear) if is_linear(x)]


def new(number):
    return jnp.full((2, 2), float(number))


def news(count):
    return [new(i) for i in range(count)]


def outcome(lib_at, make, where, *args, **options):
    """The tree that comes out, or the class of error that both have."""
    try:
        return lib_at(where, make(), *args, **options)
    except ValueError:
        return ValueError


def assert_alike(ours, theirs):
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for (path, x), y in zip(jax.tree.leaves_with_path(ours), jax.tree.leaves(theirs), strict=True):
        same = np.array_equal(x, y) if eqx.is_array(x) else x is y or x == y
        assert same, (jtu.keystr(path), x, y)


TREE = [1, [2, {"a": 3, "b": 4}]]
MIXED = [1, 2, 0.5, "three", 3]

# What Equinox's documentation, FAQ, issues and own sources do with `tree_at`.
RECIPES = {
    "a leaf of nested containers": (lambda: TREE, lambda t: t[1][1]["a"], 5),
    "a layer": (mlp, lambda m: m.layers[-1], linear(1)),
    "a weight": (mlp, lambda m: m.layers[0].weight, jnp.zeros((3, 2))),
    "a weight by name": (lambda: linear(0), lambda m: getattr(m, "weight"), new(1)),  # noqa: B009
    "weight and bias": (mlp, lambda m: (m.layers[-1].weight, m.layers[-1].bias), (None, None)),
    "weights of all layers": (some_biases, linear_weights, news(4)),
    "weights of all layers, in a container": (lambda: {"a": mlp(), "b": [linear(1)]}, linear_weights, news(4)),
    "no layer at all": (lambda: {"a": jnp.ones(2)}, linear_weights, []),
    "biases that are there": (
        some_biases,
        lambda m: [layer.bias for layer in m.layers if layer.bias is not None],
        news(2),
    ),
    "layers without a bias": (some_biases, lambda m: [x.weight for x in m.layers if x.bias is None], news(2)),
    "leaves of a part": (some_biases, lambda m: jax.tree.leaves(m.layers[:2]), news(3)),
    "all leaves": (some_biases, jax.tree.leaves, news(7)),
    "leaves of a part, None among them": (
        some_biases,
        lambda m: jax.tree.leaves(m.layers[:2], is_leaf=is_none),
        news(4),
        {"is_leaf": is_none},
    ),
    "the only None": (no_bias, lambda m: m.layers[1].bias, new(1)),
    "the only None as a leaf": (no_bias, lambda m: m.layers[1].bias, new(1), {"is_leaf": is_none}),
    "one None of two as a leaf": (some_biases, lambda m: m.layers[3].bias, new(1), {"is_leaf": is_none}),
    "both None as leaves": (some_biases, lambda m: (m.layers[3].bias, m.layers[1].bias), news(2), {"is_leaf": is_none}),
    "a None and an array": (no_bias, lambda m: (m.layers[1].bias, m.layers[0].bias), news(2)),
    "a None of a tuple": (lambda: (None, None, 1), lambda t: t[0], True, {"is_leaf": is_none}),
    "what is None is looked for, as leaves": (
        some_biases,
        lambda m: [layer.bias for layer in m.layers if layer.bias is None],
        news(2),
        {"is_leaf": is_none},
    ),
    "a specification of what is trained": (
        lambda: jax.tree.map(lambda _: False, mlp()),
        lambda m: (m.layers[-1].weight, m.layers[-1].bias),
        (True, True),
    ),
    "in_axes": (
        lambda: jax.tree.map(lambda _: None, mlp()),
        lambda m: [layer.weight for layer in m.layers],
        [0, 0, 0],
        {"is_leaf": is_none},
    ),
    "an activation": (mlp, lambda m: m.activation, jnp.tanh),
    "a flag": (lambda: eqx.nn.Dropout(0.5), lambda m: m.inference, True),
    "numbers that are one object": (lambda: [0, 0, (0, True)], lambda t: (t[1], t[2][0]), (5, 6)),
    "an empty tuple": (lambda: [(), (), 1], lambda t: t[1], 7),
    "an empty list": (lambda: [[], [], 1], lambda t: t[1], 7),
    "what has the type that is asked for in the tree": (
        lambda: MIXED,
        lambda t: tuple(x for x, y in zip(t, MIXED, strict=True) if type(y) is int),
        (0, 0, 0),
    ),
    "shapes": (lambda: eqx.filter_eval_shape(mlp), lambda m: m.layers[0].weight, jnp.zeros((3, 2))),
    "leaves of shapes": (lambda: eqx.filter_eval_shape(no_bias), lambda m: jax.tree.leaves(m.layers), news(3)),
    "an attribute of a container of the last length": (
        some_biases,
        lambda m: m.layers[len(m.layers) - 1].weight,
        new(1),
    ),
    # Both refuse these: they depend on leaves.
    "filtered by eqx.is_array": (mlp, lambda m: [x for x in jax.tree.leaves(m) if eqx.is_array(x)], news(6)),
    "filtered by isinstance": (
        some_biases,
        lambda m: [x for x in jax.tree.leaves(m) if isinstance(x, jax.Array)],
        news(6),
    ),
    "filtered by type": (lambda: MIXED, lambda t: [x for x in t if type(x) is int], [0, 0, 0]),
    "filtered by value": (lambda: MIXED, lambda t: [x for x in t if x == 2], [0]),
    "one or the other by a leaf": (lambda: MIXED, lambda t: t[0] if t[3] == "three" else t[1], 0),
    "one or the other by the truth of a leaf": (lambda: [0, 1, 2], lambda t: t[1] if t[0] else t[2], 5),
    "a sequence of other lengths": (lambda: MIXED, lambda t: t[0] if isinstance(t[0], int) else [t[0], t[1]], 0),
    "filtered shapes": (
        lambda: eqx.filter_eval_shape(mlp),
        lambda m: [x for x in jax.tree.leaves(m) if isinstance(x, jax.ShapeDtypeStruct)],
        news(6),
    ),
    "computed": (lambda: TREE, lambda t: t[0] + 1, 5),
    "not in the tree": (lambda: TREE, lambda t: 17, 5),
    "None as leaves, looked for by another name": (
        some_biases,
        lambda m: [x.bias if x.bias is None else x.weight for x in m.layers],
        news(4),
        {"is_leaf": is_none},
    ),
}


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_of_equinox(name):
    make, where, replace, *options = RECIPES[name]
    options = options[0] if options else {}
    ours = outcome(st.tree.at, make, where, replace, **options)
    try:
        theirs = eqx.tree_at(where, make(), replace, **options)
    except (ValueError, TypeError):  # that it computes with a leaf is Python's own error there
        assert ours is ValueError
        return
    assert ours is not ValueError
    assert_alike(ours, theirs)


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_with_a_function(name):
    make, where, _, *options = RECIPES[name]
    options = options[0] if options else {}
    mark = lambda x: f"new instead of {jax.tree.structure(x)}"
    ours = outcome(st.tree.at, make, where, replace_fn=mark, **options)
    try:
        if name == "no layer at all":
            raise ValueError("an answer without nodes is an error here")
        theirs = eqx.tree_at(where, make(), replace_fn=mark, **options)
    except (ValueError, TypeError):
        assert ours is ValueError
        return
    if name == "an empty tuple":  # Equinox shows `replace_fn` its stand-in
        theirs = eqx.tree_at(where, theirs, mark(()))
    assert_alike(ours, theirs)


@pytest.mark.parametrize(
    ("where", "count"),
    [
        (lambda m: m.layers[1].bias, None),
        (lambda m: m.layers[3].bias, None),
        (lambda m: (m.layers[3].bias, m.layers[1].bias), 2),
        (lambda m: [layer.bias for layer in m.layers], 4),
        (lambda m: [layer.bias for layer in m.layers if layer.bias is None], None),
        (lambda m: (m.layers[0].bias, m.layers[1].bias, m.layers[0].weight), 3),
    ],
)
def test_each_none_is_replaced_at_its_own_path(where, count):
    """Equinox refuses these unless `None` is a leaf, for it cannot tell one from the other."""
    replace = new(9) if count is None else news(count)
    if count is None and isinstance(where(some_biases()), list):
        with pytest.raises(MISMATCH, match="it is not clear which one"):
            st.tree.at(where, some_biases(), news(2))
        return
    theirs = eqx.tree_at(where, some_biases(), replace, is_leaf=is_none)
    assert_alike(st.tree.at(where, some_biases(), replace), theirs)
    assert_alike(st.tree.at(where, some_biases(), replace, is_leaf=is_none), theirs)


UNCLEAR = {
    "another number of nodes": lambda m: [m.layers[1].bias, *jax.tree.leaves(m.layers)],
    "another place": lambda m: [m.layers[1].bias, m.layers[0].weight if m.layers[1].bias is None else m.layers[0].bias],
    "a leaf instead": lambda m: m.layers[1].bias if m.layers[1].bias is None else m.layers[0].weight,
    "an error": lambda m: m.layers[1].bias if m.layers[1].bias is None else m.no_such_name,
    "an assertion": lambda m: [m.layers[1].bias] if not m.layers[1].bias else 1 / 0,
    "an attribute of what is None": lambda m: m.layers[1].bias and m.layers[1].bias.sub,
}


@pytest.mark.parametrize("name", UNCLEAR)
def test_a_none_that_cannot_be_told_is_an_error_that_offers_is_leaf(name):
    with pytest.raises(MISMATCH, match=r"(?s)`where` returned `None`.*is_leaf=lambda x: x is None") as caught:
        st.tree.at(UNCLEAR[name], some_biases(), new(1))
    assert caught.value.paths == (".layers[1].bias", ".layers[3].bias")
    assert "lambda m: m.layers[1].bias, model, new" in str(caught.value)
    with pytest.raises(MISMATCH, match=r"`where` returned `None`"):
        st.untie(some_biases(), UNCLEAR[name])


@pytest.mark.parametrize("make", [some_biases, mlp])
def test_a_none_that_is_not_in_the_tree(make):
    """As of a function that lacks its `return`."""
    for where in (lambda m: None, lambda m: [m.layers[0].weight, vars(m).get("x")]):
        for call in (
            lambda: st.tree.at(where, make(), new(1)),  # noqa: B023
            lambda: st.tie(make(), where),  # noqa: B023
            lambda: st.untie(make(), where),  # noqa: B023
        ):
            with pytest.raises(MISMATCH, match="`None`.* not part of the tree") as caught:
                call()
            assert "is_leaf" not in str(caught.value)


DEPENDING = {
    "eqx.is_array": lambda m: [x for x in jax.tree.leaves(m) if eqx.is_array(x)],
    "isinstance": lambda m: [x for x in jax.tree.leaves(m) if isinstance(x, jax.Array)],
    "not isinstance": lambda m: [x for x in jax.tree.leaves(m) if not isinstance(x, jax.Array)],
    "a number": lambda m: m.layers[0].bias if m.scale == 1.0 else m.layers[2].bias,
    "the truth of a number": lambda m: (m.layers[0].bias, m.layers[2].bias if not m.scale else m.layers[0].bias),
    "the order": lambda m: [m.layers[0].bias, m.layers[2].bias][:: 1 if isinstance(m.scale, float) else -1],
    "one instead of several": lambda m: m.layers[0] if isinstance(m.scale, float) else [m.layers[0], m.layers[2]],
}


@pytest.mark.parametrize("name", DEPENDING)
def test_a_where_that_looks_at_leaves_is_an_error_for_all_three(name):
    model = some_biases()
    if name == "the truth of a number":
        model = Layers(model.layers, 0.0)
    for call in (
        lambda: st.tree.at(DEPENDING[name], model, replace_fn=lambda x: x),
        lambda: st.tie(model, DEPENDING[name]),
        lambda: st.untie(model, DEPENDING[name]),
    ):
        with pytest.raises(
            MISMATCH, match=r"`where` must not depend on the leaves.*\n.*the structure of the tree only"
        ):
            call()
    with pytest.raises(ValueError, match="must not\\s+depend on the leaves"):
        eqx.tree_at(DEPENDING[name], model, replace_fn=lambda x: x)


def test_an_error_on_the_tree_only_is_its_own():
    def where(m):
        if isinstance(m.scale, float):
            raise KeyError("my own")
        return m.layers[0].weight, m.layers[1].weight

    for call in (st.tie, st.untie, lambda m, w: st.tree.at(w, m, news(2))):
        with pytest.raises(KeyError, match="my own"):
            call(some_biases(), where)


def test_an_empty_answer_is_an_error_where_something_was_to_be_done():
    model = some_biases()
    with pytest.raises(MISMATCH, match="`where` returned no node.*replace_fn"):
        st.tree.at(lambda m: [], model, replace_fn=lambda x: x)
    with pytest.raises(MISMATCH, match="`where` returned no node.*undone"):
        st.untie(model, lambda m: [])
    with pytest.raises(MISMATCH, match="returned 0 nodes, and a tie needs two"):
        st.tie(model, lambda m: [])
    with pytest.raises(ValueError, match="returned 0 nodes, but `replace` has 2"):
        st.tree.at(lambda m: [], model, news(2))
    assert_alike(st.tree.at(lambda m: [], model, []), model)  # nothing was to be done


# --- ties -------------------------------------------------------------------------------------------------------------


def tied():
    shared = linear(0)
    return Layers([shared, linear(1, bias=False), shared, eqx.nn.Linear(2, 2, key=KEYS[2])])


def test_both_paths_of_a_tie_are_one_node_for_at_and_two_for_untie():
    model = tied()
    both = lambda m: (m.layers[0].weight, m.layers[2].weight)
    for where, replace in ((both, (one := new(1), one)), (lambda m: m.layers[2].weight, one)):
        result = st.tree.at(where, model, replace)
        theirs = eqx.tree_at(both, st.untie(model), (one, one))
        assert_alike(result, theirs)
        assert result.layers[0] is result.layers[2]
    loose = st.untie(model, lambda m: m.layers[2])
    assert loose.layers[0] is not loose.layers[2]
    assert loose.layers[0].weight is model.layers[0].weight
    leaves = st.untie(model, lambda m: jax.tree.leaves(m.layers[2]))
    assert leaves.layers[0].weight is not leaves.layers[2].weight
    again = st.tie(leaves, lambda m: [layer.bias for layer in m.layers[:3] if layer.bias is not None])
    assert again.layers[0].bias is again.layers[2].bias


@pytest.mark.parametrize("number", [0, 2])
def test_untie_parts_the_path_that_was_named(number):
    """Of three paths of one array each can be named, though on the tree itself they are one object."""
    w = jnp.ones(2)
    loose = st.untie({"a": w, "b": [None, w], "c": w}, lambda m: [m["a"], m["b"][1], m["c"]][number])
    others = [x for i, x in enumerate([loose["a"], loose["b"][1], loose["c"]]) if i != number]
    assert others[0] is others[1]
    assert [loose["a"], loose["b"][1], loose["c"]][number] is not others[0]


def test_untie_sees_none_as_none():
    w = jnp.ones(2)
    pairs = [Pair(w, None), Pair(w, w), Pair(None, w)]
    loose = st.untie(pairs, lambda m: [pair.second for pair in m if pair.second is not None])
    assert loose[0].first is loose[1].first is w
    assert len({id(x) for x in (w, loose[1].second, loose[2].second)}) == 3  # all are alive here
    assert loose[0].second is loose[2].first is None


def test_a_where_that_asks_whether_paths_are_one_object_is_refused_by_untie():
    w = jnp.ones(2)
    where = lambda m: [m["b"]] if m["a"] is m["b"] else [m["c"]]
    with pytest.raises(MISMATCH, match="must not depend on the leaves"):
        st.untie({"a": w, "b": w, "c": jnp.ones(2)}, where)


# --- the trees of every kind ------------------------------------------------------------------------------------------


def steps(path):
    """Follows a path as a user writes it."""

    def step(obj, key):
        if isinstance(key, jtu.GetAttrKey):
            return getattr(obj, key.name)
        return obj[key.idx if isinstance(key, jtu.SequenceKey) else key.key]

    return lambda tree: functools.reduce(step, path, tree)


def named_paths(tree):
    """The paths to all nodes and leaves of a tree, `None` included, that a user can write."""
    found = {}
    for path, _ in jtu.tree_leaves_with_path(tree, is_leaf=is_none):
        found |= dict.fromkeys(path[:length] for length in range(len(path) + 1))
    allowed = jtu.GetAttrKey | jtu.SequenceKey | jtu.DictKey
    return [path for path in found if all(isinstance(key, allowed) for key in path)]


CANNOT_BE_SORTED = {"dictionaries by numbers"}
"""JAX has no paths for these."""


@pytest.mark.filterwarnings("ignore:A JAX array is being set as static", "ignore:'.value' access is now deprecated")
@pytest.mark.parametrize("name", sorted(KINDS.keys() - CANNOT_BE_SORTED))
def test_every_path_of_every_kind_is_found_on_the_tree_itself(name):
    tree = KINDS[name]()
    for path in named_paths(tree):
        there = steps(path)
        try:
            there(tree)
        except (AttributeError, TypeError, KeyError):
            continue  # the keys of some classes are no attributes
        seen = []
        marked = st.tree.at(there, tree, replace_fn=lambda x: seen.append(x) or "marked")  # noqa: B023
        assert there(marked) == "marked"
        (replaced,) = seen
        assert replaced is there(tree)
        st.untie(tree, there)


@jax.tree_util.register_pytree_node_class
class Fresh:
    """Its flatten function makes a new list and a new dictionary each time."""

    def __init__(self, layers, options):
        self.layers, self.options = layers, options

    def tree_flatten(self):
        return (list(self.layers), dict(self.options)), "aux"

    @classmethod
    def tree_unflatten(cls, aux, children):
        return cls(*children)


def test_children_that_are_made_anew_each_time_are_found_by_their_parts():
    w, b = jnp.ones(2), jnp.zeros(2)
    tree = Pair(Fresh((w, w), {"b": b}), [w])
    result = st.tree.at(lambda m: m.first.options, tree, {"b": 3})
    assert result.first.options == {"b": 3}
    result = st.tree.at(lambda m: m.first.options["b"], tree, 4)
    assert result.first.options == {"b": 4}
    result = st.tree.at(lambda m: m.first.layers[0], tree, b)
    assert result.first.layers[0] is result.first.layers[1] is result.second[0] is b
    with pytest.raises(MISMATCH, match="must not depend on the leaves"):
        other = Fresh([w, b], {"b": b})
        st.tree.at(
            lambda m: m[0].options if isinstance(m[2], int) else m[1].options, [other, Fresh([w, w], {"b": w}), 3], 0
        )


def test_classes_with_one_instance_and_containers_of_other_kinds():
    tree = [collections.OrderedDict(a=None, b=()), collections.defaultdict(list, a=None), collections.deque([None, ()])]
    for where in (lambda m: m[0]["a"], lambda m: m[0]["b"], lambda m: m[1]["a"], lambda m: m[2][0], lambda m: m[2][1]):
        assert where(st.tree.at(where, tree, 5)) == 5
    assert jax.tree.leaves(st.tree.at(jax.tree.leaves, [1, (), None, {}, 2], [3, 4])) == [3, 4]


def test_tracers_and_mutable_modules():
    model = Mutable(a=jnp.ones(2), b=None)
    result = st.tree.at(lambda m: m.b, model, 3)
    assert (result.a is model.a, result.b) == (True, 3)

    @st.jit
    def f(m):
        m = st.tree.at(lambda m: [x.bias for x in m.layers if x.bias is not None], m, replace_fn=lambda b: b + 1)
        with pytest.raises(MISMATCH, match="must not depend on the leaves"):
            st.tree.at(lambda m: [x for x in jax.tree.leaves(m) if eqx.is_array(x)], m, replace_fn=lambda b: b)
        return m

    result = f(some_biases())
    np.testing.assert_array_equal(result.layers[0].bias, some_biases().layers[0].bias + 1)


@pytest.mark.skipif(nnx is None, reason="Flax is not installed")
def test_variables_of_nnx():
    layers = lambda: nnx.List([nnx.Linear(2, 2, rngs=nnx.Rngs(0)), nnx.Linear(2, 2, use_bias=False, rngs=nnx.Rngs(1))])
    model, param = layers(), nnx.Param(new(1))
    assert st.tree.at(lambda m: m[0].kernel, model, param)[0].kernel is param
    result = st.tree.at(lambda m: m[0].kernel[...], model, new(1))
    assert type(result[0].kernel) is nnx.Param
    np.testing.assert_array_equal(result[0].kernel[...], new(1))
    result = st.tree.at(lambda m: m[0].kernel.get_value(), model, new(1))
    np.testing.assert_array_equal(result[0].kernel[...], new(1))
    with pytest.raises(MISMATCH, match="computes with a leaf"):
        st.tree.at(lambda m: m[0].kernel[0], model, 0)
    both = st.tie(model, lambda m: [layer.kernel for layer in m])
    assert both[0].kernel is both[1].kernel
    assert st.untie(both, lambda m: m[1].kernel)[0].kernel is not both[1].kernel
    biased = st.tree.at(lambda m: [x.bias for x in m if x.bias is not None], model, replace_fn=lambda b: b)
    np.testing.assert_array_equal(biased[0].bias[...], model[0].bias[...])
    with pytest.raises(MISMATCH, match="must not depend on the leaves"):
        st.tree.at(lambda m: [x for x in jax.tree.leaves(m) if eqx.is_array(x)], model, replace_fn=lambda x: x)


def test_where_and_get_of_a_shared_layer_of_equinox_see_none_and_may_not_look_at_leaves():
    pytree = [linear(0), linear(1, bias=False), linear(2)]
    biases = lambda m: [x.bias for x in m if x.bias is not None]
    shared = eqx.nn.Shared(pytree, lambda m: biases(m)[1], lambda m: biases(m)[0])
    plain = st.unwrap_shared(shared)
    assert plain[0].bias is plain[2].bias
    assert_alike(plain, shared())
    arrays = lambda m: [x for x in jax.tree.leaves(m) if isinstance(x, jax.Array)]
    shared = eqx.nn.Shared([jnp.ones(2), jnp.zeros(2)], lambda m: m[1], lambda m: m[0])
    object.__setattr__(shared, "get", lambda m: arrays(m)[:1])
    with pytest.raises(MISMATCH, match="its `get` must not depend on the leaves"):
        st.unwrap_shared([shared])
