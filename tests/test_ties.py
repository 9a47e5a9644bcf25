"""Ties by hand: what they are, how they are made, undone, carried over and compared."""

import collections

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, strategies as hst

import sharedtree as st
from tests import strategies as dags
from tests.models import Opaque
from tests.strategies import Pair, node_at, paths_by_object, tower


class Linear(eqx.Module):
    weight: object
    bias: object = None
    name: str = eqx.field(static=True, default="linear")


def test_kinds_paths_and_sizes():
    layer, box, w = Linear(jnp.ones((2, 3)), jnp.ones(2)), [jnp.zeros(4)], jnp.zeros((5,), jnp.int8)
    tree = {"a": layer, "b": box, "c": [w, layer], "d": Pair(box, w), "e": jnp.ones(1)}
    assert st.ties(tree) == (
        st.Tie(("['a']", "['c'][1]"), "module", None, None, 32),
        st.Tie(("['b']", "['d'].first"), "container", None, None, 16),
        st.Tie(("['c'][0]", "['d'].second"), "array", (5,), np.dtype("int8"), 5),
    )


@given(tree=dags.dags())
def test_each_object_at_several_paths_is_listed_once(tree):
    assert [tie.paths for tie in st.ties(tree)] == [tuple(each) for each in paths_by_object(tree) if len(each) > 1]


def classes(tree, of):
    """The partition of the paths to what carries identity, by what they are in."""
    found = {}
    for path, obj in dags.occurrences(tree).items():
        found.setdefault(of(path, obj), set()).add(path)
    return frozenset(map(frozenset, found.values()))


@given(tree=dags.dags(), data=hst.data())
def test_tie_makes_one_of_what_is_at_some_paths_and_untie_two_of_what_is_at_one(tree, data):
    """In any order of the paths; the first is kept. All other ties stay."""
    twin = dags.twin(tree)
    some = data.draw(
        hst.permutations(
            sorted(data.draw(hst.sampled_from(sorted(map(sorted, dags.partition(tree)), key=str))), key=str)
        )
    )
    if len(some) > 1:
        tied = st.tie(twin, lambda t: tuple(node_at(t, path) for path in some))

        def place(path, _):
            return next(((True, path[len(one) :]) for one in some if path[: len(one)] == one), path)

        assert dags.partition(tied) == classes(twin, place)
        for path, obj in dags.occurrences(node_at(twin, some[0])).items():
            assert not dags.is_array(obj) or node_at(node_at(tied, some[0]), path) is obj
    one = data.draw(hst.sampled_from(sorted(filter(None, dags.occurrences(tree)), key=str)))
    loose = st.untie(tree, lambda t: node_at(t, one))
    assert dags.partition(loose) == classes(
        tree,
        lambda path, obj: (id(obj), path[: len(one)] == one, one[: len(path)] == path),  # alive in `tree`
    )


@given(tree=dags.dags())
def test_untie_undoes_everything_and_copies_what_parts(tree):
    before, twin, loose = dags.partition(tree), dags.twin(tree), st.untie(tree)
    assert dags.partition(loose) == dags.partition(twin)
    assert jax.tree.structure(loose) == jax.tree.structure(twin)
    for x, y in zip(jax.tree.leaves(loose), jax.tree.leaves(twin), strict=True):
        assert type(x) is type(y) or dags.is_array(x)
        np.testing.assert_array_equal(x, y)
    kept = {}
    for path, obj in dags.occurrences(tree).items():
        if dags.is_array(obj):
            first = kept.setdefault(id(obj), path)  # alive in `tree`
            assert (node_at(loose, path) is obj) == (path == first)
    arrays = [x for x in jax.tree.leaves(loose) if isinstance(x, jax.Array)]
    assert len({x.unsafe_buffer_pointer() for x in arrays}) == len(arrays)
    assert dags.partition(tree) == before


def test_what_carries_no_identity_is_never_a_tie():
    values = [jnp.ones(2), [], Pair((), ()), Pair(None, None), Pair("text", "text"), Pair(3, 3)]
    values += [Pair(jax.nn.relu, jax.nn.relu), [np.float32(1)] * 2, [1.0, 1.0], [jnp.ones(2), jnp.ones(2)]]
    assert [st.ties(tree) for tree in values] == [()] * len(values)


@pytest.mark.parametrize(
    "make", [list, dict, collections.OrderedDict, collections.deque, lambda: collections.defaultdict(int)]
)
def test_mutable_containers_are_tied_even_if_empty(make):
    box = make()
    (tie,) = st.ties(Pair(box, box))
    assert (tie.paths, tie.kind, tie.nbytes) == ((".first", ".second"), "container", 0)
    assert st.ties(Pair(make(), make())) == ()


LEAVES = {
    "jax": lambda: jnp.ones((2, 3)),
    "numpy": lambda: np.ones((2, 3), np.float32),
    "bfloat16": lambda: jnp.ones((2, 3), jnp.bfloat16),
    "abstract": lambda: jax.ShapeDtypeStruct((2, 3), jnp.float32),
    "key": lambda: jax.random.key(0),
    "ref": lambda: jax.new_ref(jnp.ones((2, 3))),
}


@pytest.mark.parametrize("kind", LEAVES)
def test_every_kind_of_array_carries_identity(kind):
    leaf = LEAVES[kind]()
    (tie,) = st.ties({"x": leaf, "y": leaf})
    nbytes = {"bfloat16": 12, "key": 8}.get(kind, 24)
    assert tie == st.Tie(("['x']", "['y']"), "array", leaf.shape, leaf.dtype, nbytes)
    assert st.ties({"x": leaf, "y": LEAVES[kind]()}) == ()
    tied = st.tie({"x": leaf, "y": LEAVES[kind]()}, lambda m: (m["x"], m["y"]))
    assert tied["x"] is tied["y"] is leaf
    loose = st.untie(tied)
    assert loose["x"] is leaf
    assert loose["y"] is not leaf
    assert type(loose["y"]) is type(leaf)
    assert (loose["y"].shape, loose["y"].dtype) == (leaf.shape, leaf.dtype)
    assert st.retie(loose, like=tied)["y"] is leaf
    if kind == "ref":
        loose["y"][...] = jnp.zeros((2, 3))
        np.testing.assert_array_equal(leaf[...], jnp.ones((2, 3)))


def test_exponentially_many_paths_cost_nothing():
    height = 40
    tree, twin = tower(height, jnp.ones(2)), tower(height, jnp.zeros(2))
    half = dags.Record(*[tower(height - 1, jnp.ones(2)) for _ in range(2)])
    found = st.ties(tree)
    assert len(found) == height
    assert found[0].paths == (".left", ".right")
    assert found[1].paths == (".left.left", ".left.right")
    assert found[-1].kind == "array"
    assert len(st.tree.leaves(tree)) == 1
    new = st.tree.map(lambda x, y: x + y, tree, twin)
    assert new.left is new.right
    assert new.left.left is new.right.right
    assert st.same_sharing(tree, twin)
    assert st.same_sharing(tree, new)
    assert not st.same_sharing(tree, half)
    joined = st.retie(half, like=tree)
    assert joined.left is joined.right
    tied = st.tie(half, lambda m: (m.left, m.right))
    assert tied.left is tied.right
    assert st.count_parameters(tree) == 2
    assert st.tree.equal(tree, tower(height, jnp.ones(2)))
    assert not st.tree.equal(tree, half)
    replaced = st.tree.at(lambda m: m.right.left.right, tree, 3)
    assert replaced.left.left.left == 3
    kept, rest = st.tree.partition(tree, eqx.is_array)
    assert kept.left is kept.right
    assert st.same_sharing(st.tree.combine(kept, rest), tree)
    out = st.jit(lambda m: st.tree.map(lambda x: x + 1, m))(tree)
    dag = jax.jit(lambda d: jax.tree.map(lambda x: x + 1, d))(st.Dag(tree))
    assert out.left is out.right
    assert dag.tree.left is dag.tree.right
    assert st.tree.equal(out, dag.tree)
    assert len(jax.tree.leaves(dag)) == 1


def test_several_paths_are_untied_at_once():
    w = jnp.ones(2)
    loose = st.untie([w, w, w, w], lambda m: (m[1], m[3]))
    assert loose[0] is loose[2]
    assert len({id(x) for x in loose}) == 3


def test_the_sequence_of_nodes_may_be_one_that_the_tree_holds():
    tree = Pair([Linear(jnp.ones(2)), Linear(jnp.zeros(2))], None)
    tied = st.tie(tree, lambda m: m.first)
    assert tied.first[0] is tied.first[1]
    assert tied.first[1].weight is tree.first[0].weight


TRANSPOSED = "    model = sharedtree.tie(model, lambda m: (m['first'], m['second']), through=jnp.transpose)"
ALIKE = "    model = sharedtree.tie(model, lambda m: (m['first'].weight, m['second'].weight))"


@pytest.mark.parametrize(
    ("one", "two", "parts"),
    [
        (jnp.ones((2, 3)), jnp.ones((3, 2)), ["float32[2, 3]", "float32[3, 2]", TRANSPOSED]),
        (jnp.ones((2, 3)), jnp.ones((4, 3)), ["float32[2, 3]", "float32[4, 3]"]),
        (jnp.ones(2), jnp.ones(2, jnp.int32), ["float32[2]", "int32[2]"]),
        (Linear(jnp.ones(2)), Linear(jnp.ones(2), name="other"), ["name='linear'", "name='other'", ALIKE]),
        (Linear(jnp.ones(2), 1), Linear(jnp.ones(2), 2), ["static value 1", "static value 2", ALIKE]),
        (Linear(jnp.ones(2)), Pair(jnp.ones(2), None), ["`Linear`", "`Pair`", ALIKE.replace("].weight)", "].first)")]),
        (Linear(jnp.ones(2)), jnp.ones(2), ["`Linear`", "float32[2]"]),
        ([jnp.ones(2)], [jnp.ones(2)] * 2, ["`list`", ALIKE.replace(".weight", "[0]")]),
        (Linear(1, jnp.ones(1)), Linear(1, jnp.ones(3)), ["`['first'].bias`", "float32[1]", "float32[3]"]),
        ({"x": jnp.ones(2)}, {"y": jnp.ones(2)}, ["'x'", "'y'", "sharedtree.tie("]),
        (Linear([jnp.ones(2), jnp.ones(3)]), [jnp.ones(3), jnp.ones(2)], ["`Linear`", "`list`"]),
    ],
)
def test_what_cannot_be_one_object_is_an_error_with_both_ends_and_the_fix(one, two, parts):
    with pytest.raises(st.errors.SharingMismatchError) as retied:
        st.retie({"first": one, "second": two}, like={"first": (w := jnp.ones(2)), "second": w})
    with pytest.raises(st.errors.SharingMismatchError) as caught:
        st.tie({"first": one, "second": two}, lambda m: (m["first"], m["second"]))
    assert retied.value.paths == caught.value.paths
    text = str(caught.value)
    for part in ["`['first']", "`['second']", "cannot be one object", *parts]:
        assert part in text
    assert ("logits = x @ model.embed.weight.T" in text) is not any("sharedtree.tie" in part for part in parts)
    assert len(caught.value.paths) == 2
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("call", "where", "message"),
    [
        (st.tie, lambda m: (), "returned 0 node.*needs two"),
        (st.tie, lambda m: m[:1], "returned 1 node.*needs two"),
        (st.tie, lambda m: (m[0], jnp.ones(2)), "`jax.Array` that is not part of the tree"),
        (st.untie, lambda m: (m[0], np.ones(2)), "`ndarray` that is not part of the tree"),
        (st.tie, lambda m: (m[1], m[1][0]), "cannot be one object"),
    ],
)
def test_what_cannot_be_tied_or_untied(call, where, message):
    with pytest.raises(st.errors.SharingMismatchError, match=message):
        call([jnp.ones(2), [[jnp.ones(2)], jnp.ones(2)]], where)


def test_retie_a_gradient_with_none_and_subtrees_where_the_model_has_leaves():
    w = jnp.ones(2)
    model = Pair(Linear(w, jnp.arange(2)), Linear(w, jnp.arange(2)))
    gradient = Pair(Linear(jnp.zeros(2), None), Linear(jnp.zeros(2), None))
    new = st.retie(gradient, like=model)
    assert new.first.weight is new.second.weight
    assert new.first.bias is None
    new = st.retie([{"m": jnp.ones(1)}, {"m": jnp.ones(1)}], like=[model.first.weight] * 2)
    assert new[0] is new[1]


@pytest.mark.parametrize("tree", [[jnp.ones(2)], (jnp.ones(2), jnp.ones(2)), {"a": jnp.ones(2)}], ids=repr)
def test_retie_on_another_shape_is_an_error(tree):
    w = jnp.ones(2)
    with pytest.raises(st.errors.SharingMismatchError, match="differ in shape at `.first`") as caught:
        st.retie(Pair(tree, 1), like=Pair([w, w], 1))
    assert caught.value.paths == (".first",)


def test_same_sharing_looks_at_ties_and_shape_only_and_takes_a_gradient():
    w, v = jnp.ones(2), jnp.zeros((3, 3))
    assert st.same_sharing({"a": w, "b": w}, {"a": v, "b": v})
    assert not st.same_sharing([w], (w,))
    assert not st.same_sharing([w], [w, w])
    assert st.same_sharing(Pair(w, [w, jnp.arange(2)]), Pair(v, [v, None]))


def test_assert_same_sharing_names_every_difference_in_both_directions():
    w, v = jnp.ones(2), jnp.ones(3)
    with pytest.raises(st.errors.SharingMismatchError) as caught:
        st.assert_same_sharing([w, w, v, jnp.ones(3)], [w, jnp.ones(2), v, v])
    text = str(caught.value)
    assert "`[0]` and `[1]` are one object in the first tree only" in text
    assert "`[2]` and `[3]` are one object in the second tree only" in text
    assert "b = sharedtree.retie(sharedtree.untie(b), like=a)" in text
    assert caught.value.paths == ("[0]", "[1]", "[2]", "[3]")
    st.assert_same_sharing([w, w], [v, v])


def test_count_parameters():
    w = jnp.ones((2, 3))
    abstract = jax.ShapeDtypeStruct((5,), jnp.float32)
    rest = [np.ones(4), abstract, abstract, jnp.arange(9), jax.random.key(0), 2.0, jnp.ones((), complex)]
    model = Pair(Linear(w, w), rest)
    assert st.count_parameters(model) == 6 + 4 + 5 + 1
    assert st.count_parameters([1.5, 2]) == 1
    assert st.count_parameters([]) == 0


OF_A_TREE = [st.ties, st.untie, st.count_parameters, st.tree.flatten, st.tree.structure, st.tree.leaves]
OF_A_TREE += [st.tree.leaves_with_path, st.optimizer(optax.adam(0.1)).init]
OF_MORE = [lambda x: st.tie(x, lambda m: (m, m)), lambda x: st.retie(x, like=x), lambda x: st.assert_same_sharing(x, x)]


@pytest.mark.parametrize("call", [*OF_A_TREE, *OF_MORE])
def test_an_object_that_cannot_be_taken_apart_is_refused(call):
    fixes = r"(?s)register_pytree_node\(.*Opaque.*sharedtree.register_node\(.*Opaque, flatten, unflatten\)"
    with pytest.raises(st.errors.UnregisteredTypeError, match=fixes) as caught:
        call(Opaque(jnp.ones(2)))
    assert isinstance(caught.value, TypeError)
