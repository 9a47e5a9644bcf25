"""`sharedtree.tree.at` on DAGs: what is at each path as vanilla would have it, and shared wherever it is one object."""

import warnings
from typing import Any

import equinox as eqx
import hypothesis
import jax
import jax.numpy as jnp
import pytest
from hypothesis import strategies as hst

import sharedtree as st
from tests import strategies as dags
from tests.in_jax import assert_same_tree
from tests.models import Dense, Scale
from tests.strategies import node_at


class Net(eqx.Module):
    embed: Any
    head: Any
    extra: Any = None


def tied():
    w = jnp.arange(6.0).reshape(3, 2)
    return Net(Dense(w), Dense(w, jnp.zeros(3)))


def nodes_by_id(tree):
    """Every object of a tree that carries identity, each once, with its first path."""
    found = {}
    for path, obj, _ in dags.paths(tree):
        if dags.carries_identity(obj):
            found.setdefault(id(obj), (path, obj))  # alive in `tree`
    return list(found.values())


def expected(obj, instead, made, edited=True):
    """What `at` is to return: what is replaced is taken as it is, everything else is a copy, made once."""
    if edited and id(obj) in instead:
        return expected(instead[id(obj)], instead, made, edited=False)
    key = id(obj), edited and above(obj, instead)
    below = dags.children(obj)
    if dags.is_array(obj) or not (below or dags.carries_identity(obj)):
        return obj
    if key not in made or not dags.carries_identity(obj):
        made[key] = dags.with_children(obj, [expected(child, instead, made, edited) for _, child in below])
    return made[key]


def above(obj, instead):
    return any(id(child) in instead or above(child, instead) for _, child in dags.children(obj))


@hst.composite
def edits(draw):
    """A DAG, paths to one to three of its objects of which none is in another, and replacements.

    A replacement is new, or another object of the tree, or a new node over objects of the tree.
    """
    tree = draw(dags.dags())
    objects = [(path, obj) for path, obj in nodes_by_id(tree) if path]
    chosen = []
    for _ in range(draw(hst.integers(1, 3))):
        path, obj = draw(hst.sampled_from(objects))
        inner = {id(o) for _, o in nodes_by_id(obj)}  # alive in `tree`
        if any(id(obj) in {id(o) for _, o in nodes_by_id(other)} or id(other) in inner for _, other, _ in chosen):
            continue
        kind = draw(hst.sampled_from(["new", "node", "old", "wrapped"]))
        old = draw(hst.sampled_from(objects))[1]
        new = {
            "new": lambda: jnp.full((7,), 1.0),
            "node": lambda: dags.Record(jnp.full((5,), 2.0), None),
            "old": lambda old=old: old,
            "wrapped": lambda old=old, obj=obj: dags.Pair(old, [obj, old]),
        }[kind]()
        chosen.append((path, obj, new))
    return tree, chosen


@hypothesis.given(edits())
def test_at_equals_the_oracle_on_the_graph_in_values_and_in_sharing(edit):
    tree, chosen = edit
    where = lambda t: tuple(node_at(t, path) for path, _, _ in chosen)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            result = st.tree.at(where, tree, tuple(new for _, _, new in chosen))
        except st.UntiedWarning:
            return  # the tests below say when
    oracle = expected(tree, {id(obj): new for _, obj, new in chosen}, {})  # alive in `tree`
    if dags.partition(result) != dags.partition(oracle):
        # What a replaced node shared with the rest has been replaced there, too.
        assert any(isinstance(obj, type(new)) for _, obj, new in chosen)
        return
    assert_same_tree(result, oracle)


@hypothesis.given(dags.dags(), hst.data())
def test_what_replaces_a_node_by_a_changed_copy_replaces_its_shared_parts_everywhere(tree, data):
    """Doubling one node doubles exactly its arrays, wherever else they are, and no tie is lost."""
    path, _ = data.draw(hst.sampled_from(nodes_by_id(tree)))
    double = lambda x: 2 * x if isinstance(x, jax.Array) else x
    chosen = node_at(tree, path)
    inside = {id(x) for x in dags.unique_arrays([chosen], dags.Pair(chosen, None))}  # alive in `tree`
    result = st.tree.at(lambda t: node_at(t, path), tree, replace_fn=lambda node: dags.copy_dag(node, double))
    oracle = dags.copy_dag(tree, lambda x: double(x) if id(x) in inside else x)
    assert dags.partition(result) == dags.partition(oracle)
    assert_same_tree(result, oracle)


def test_replacements_that_contradict_one_another_are_an_error_and_one_given_twice_is_one():
    both, inner = (lambda m: (m.embed.weight, m.head.weight)), lambda m: (m.head, m.head.bias)
    for where, new, error, paths in (
        (both, (jnp.ones(2), jnp.zeros(2)), st.errors.InconsistentSharingError, (".embed.weight", ".head.weight")),
        (
            inner,
            (Dense(jnp.ones(2), jnp.ones(1)), jnp.ones(3)),
            st.errors.SharingMismatchError,
            (".head", ".head.bias"),
        ),
    ):
        with pytest.raises(error, match="two different replacements|inside it") as caught:
            st.tree.at(where, tied(), new)
        assert caught.value.paths == paths
    for new in (jnp.ones(2), 5, None, (1, 2), "text"):
        result = st.tree.at(lambda m: (m.embed.weight, m.head.weight), tied(), (new, new))
        assert result.embed.weight is new
        assert result.head.weight is new


def test_what_a_replacement_keeps_of_the_shared_part_needs_no_tying():
    model = tied()
    lora = Net(model.head, jnp.ones((3, 1)))  # holds what it replaces
    result = st.tree.at(lambda m: m.head, model, lora)
    assert result.head.embed.weight is result.embed.weight is model.embed.weight
    result = st.tree.at(lambda m: m.head, model, replace_fn=lambda h: eqx.tree_at(lambda h: h.bias, h, jnp.ones(3)))
    assert result.head.weight is result.embed.weight is model.embed.weight


@pytest.mark.parametrize("new", [None, eqx.nn.Identity(), Dense(None), 3, [jnp.ones(1)]])
def test_taking_a_tied_part_away_is_quiet(new):
    result = st.tree.at(lambda m: m.head, tied(), new)
    assert result.embed.weight.shape == (3, 2)


LOST = {
    "another shape": lambda m: Dense(jnp.ones((4, 2)), jnp.zeros(4)),
    "another class": lambda m: Net(Dense(jnp.ones((3, 2))), None),
    "another dtype": lambda m: Dense(jnp.ones((3, 2), jnp.bfloat16), jnp.zeros(3)),
}


@pytest.mark.parametrize("kind", LOST)
def test_a_tie_that_cannot_be_kept_is_said(kind):
    model = tied()
    new = LOST[kind](model)
    with pytest.warns(st.UntiedWarning, match=r"`\.embed\.weight` and `\.head\.weight` were one object") as caught:
        result = st.tree.at(lambda m: m.head, model, new)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert result.head is new
    with st.Context(st.Policy(on_untie="error")), pytest.raises(st.errors.UntiedError) as error:
        st.tree.at(lambda m: m.head, model, new)
    assert error.value.paths == (".embed.weight", ".head.weight")
    with st.Context(st.Policy(on_untie="ignore")):
        st.tree.at(lambda m: m.head, model, new)


def test_two_replaced_nodes_that_shared_a_part_say_so_once():
    model = tied()
    new = (Dense(jnp.ones((3, 2))), Dense(jnp.zeros((3, 2)), jnp.zeros(3)))
    with pytest.warns(st.UntiedWarning) as caught:
        st.tree.at(lambda m: (m.embed, m.head), model, new)
    assert len(caught) == 1
    block = Net(model.embed, model.head)  # a tie of modules with ties inside is one tie
    model = Net(block, [block])
    fresh = lambda: jax.tree.map(lambda x: x + 1, st.untie(block))
    with pytest.warns(st.UntiedWarning) as caught:
        st.tree.at(lambda m: (m.embed.embed, m.embed.head), model, replace_fn=lambda _: fresh().embed)
    assert len(caught) == 1


def test_sharing_between_replacements_and_with_the_tree_is_kept():
    a, b, c = (Dense(jnp.full(2, float(i))) for i in range(3))
    model = Net(a, b, c)
    result = st.tree.at(lambda m: m.head, model, model.extra)
    assert result.head is result.extra
    swapped = st.tree.at(lambda m: (m.embed, m.head), model, (b, a))
    assert swapped.embed.weight is b.weight
    assert swapped.head.weight is a.weight
    new = Dense(jnp.ones(3))
    result = st.tree.at(lambda m: (m.embed, m.head), model, ([new, c], (new,)))
    assert result.embed[0] is result.head[0] is new
    assert result.embed[1] is result.extra
    edited = st.tree.at(lambda m: (m.embed, m.head.weight), model, (b, jnp.ones(3)))  # what was there before
    assert edited.embed.weight is b.weight
    assert edited.head.weight.shape == (3,)


def test_a_node_is_never_a_predicate():
    ones = lambda *shape: jnp.ones(shape)
    mlp = eqx.nn.Sequential([Scale(ones(2, 2)), eqx.nn.Lambda(jnp.tanh), Scale(ones(2))])
    for choose in (lambda x: x.ndim == 2, lambda x: False):
        spec = jax.tree.map(lambda x, choose=choose: eqx.is_array(x) and choose(x), mlp)
        for ours, theirs in zip(st.tree.partition(mlp, spec), eqx.partition(mlp, spec), strict=True):
            assert_same_tree(ours, theirs)
        assert_same_tree(st.tree.filter(mlp, spec), eqx.filter(mlp, spec))
    with pytest.raises(st.errors.SharingMismatchError, match="`filter_spec` does not fit"):
        st.tree.partition(mlp, jax.tree_util.Partial(eqx.is_array))


@pytest.mark.parametrize("spec", [eqx.nn.Identity(), 1, "yes", None, jax.tree_util.Partial(eqx.is_array)])
def test_what_is_neither_a_boolean_nor_a_function_is_refused(spec):
    with pytest.raises(ValueError):
        eqx.partition([jnp.ones(2)], [spec])
    with pytest.raises(st.errors.SharingMismatchError, match="`filter_spec`") as caught:
        st.tree.partition([jnp.ones(2)], [spec])
    assert caught.value.paths == ("[0]",)


def placed(halves):
    return [[(jax.tree_util.keystr(path), leaf) for path, leaf in jax.tree.leaves_with_path(half)] for half in halves]


@hypothesis.given(dags.dags(), hst.data())
def test_a_specification_has_a_boolean_at_every_leaf(tree, data):
    none = st.tree.filter(tree, False, replace=False)
    assert jax.tree.structure(none) == jax.tree.structure(jax.tree.map(lambda _: False, tree))
    assert all(leaf is False for leaf in jax.tree.leaves(none))
    one = data.draw(hst.sampled_from([*jax.tree.leaves(tree), None]))
    for spec in (none, jax.tree.map(lambda leaf: leaf is one, tree)):
        both = placed(st.tree.partition(tree, spec)), placed(eqx.partition(tree, spec))
        for ours, theirs in zip(*both, strict=True):
            assert [path for path, _ in ours] == [path for path, _ in theirs]
            assert all(x is y for (_, x), (_, y) in zip(ours, theirs, strict=True))


@hypothesis.given(dags.dags())
def test_static_values_in_a_specification_are_no_filters(tree):
    spec = st.tree.map(lambda _: False, tree)
    wrong = [jax.tree_util.keystr(p) for p, x in jax.tree.leaves_with_path(spec) if not isinstance(x, bool)]
    for call in (st.tree.partition, st.tree.filter):
        if not wrong:
            call(tree, spec)
            continue
        with pytest.raises(st.errors.SharingMismatchError, match="`filter_spec` has") as caught:
            call(tree, spec)
        # What is in a shared module is named once.
        assert caught.value.paths[0] == wrong[0]
        assert set(caught.value.paths) <= set(wrong)
        complete = st.tree.filter(spec, lambda leaf: isinstance(leaf, bool), replace=False)
        assert not [x for x in jax.tree.leaves(st.tree.partition(tree, complete)[0]) if x is not True]


def never(_):
    raise AssertionError("a static function of the model was called")


@pytest.mark.parametrize("left", [never, eqx.is_array, jax.nn.relu, jnp.float32, eqx.nn.Linear])
def test_a_function_where_the_tree_has_one_is_never_called(left):
    """Whether it is the model's own, that of another model, or one that could be a filter."""
    tree = {"a": Dense(jnp.ones(2), never), "b": [Dense(jnp.ones(2), 1)]}
    spec = {"a": Dense(True, left), "b": eqx.is_array}
    with pytest.raises(st.errors.SharingMismatchError, match=r"`filter_spec` has .* at `\['a'\].bias`") as caught:
        st.tree.partition(tree, spec)
    assert caught.value.paths == ("['a'].bias",)
    kept, rest = st.tree.partition(tree, {"a": Dense(True, False), "b": eqx.is_array})
    assert (kept["a"].bias, rest["a"].bias) == (None, never)
    assert rest["b"][0].bias == 1


def test_a_function_said_for_a_node_or_for_what_is_none_is_a_filter():
    tree = [Dense(jnp.ones(2), abs), Dense(jnp.ones(2), "text"), Dense(jnp.ones(2))]
    for spec in (eqx.is_array, [callable, callable, True], [eqx.is_array, Dense(True, callable), Dense(callable)]):
        ours, theirs = st.tree.partition(tree, spec), eqx.partition(tree, spec)
        for mine, expected in zip(ours, theirs, strict=True):
            assert_same_tree(mine, expected)


def test_one_place_has_one_replacement():
    """`equinox.tree_at` takes the last one."""
    layer = {"weight": jnp.ones(2)}
    with pytest.raises(st.errors.InconsistentSharingError, match="with two different replacements") as caught:
        st.tree.at(lambda m: (m["weight"], m["weight"]), layer, (jnp.zeros(2), jnp.ones(2)))
    assert caught.value.paths == ("['weight']",)
