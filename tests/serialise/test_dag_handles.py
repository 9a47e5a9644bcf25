"""`st.Dag` in files: as its model, which is the very one that is elsewhere in the tree."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sharedtree as st

from .drafts import Draft


def linear(seed=0):
    return eqx.nn.Linear(2, 2, key=jax.random.key(seed))


def through_a_file(tree, **options):
    return st.from_bytes(st.to_bytes(tree), **options)


def test_a_dag_comes_back_with_its_ties_and_its_structure():
    layer = linear()
    dag = st.Dag({"embed": layer, "head": layer, "w": [jnp.ones(3)] * 2})
    data = st.to_bytes({"dag": dag, "dag again": dag, "model": dag.tree, "another": st.Dag(dag.tree)})
    saved = st.from_bytes(data)
    again = saved["dag"]
    assert type(again) is st.Dag
    assert again.structure is dag.structure
    assert again.tree["embed"] is again.tree["head"]
    assert len(jax.tree.leaves(again)) == 3
    for one, two in zip(jax.tree.leaves(again), jax.tree.leaves(dag), strict=True):
        np.testing.assert_array_equal(one, two)
    assert saved["dag again"] is again is not saved["another"]
    assert again.tree is saved["model"]  # the one beside it
    assert saved["another"].tree["w"] is saved["model"]["w"]
    assert st.from_bytes(data, select="['dag'].tree['w'][0]").tolist() == [1, 1, 1]


def test_a_template_with_a_dag():
    dag = st.Dag([linear(), jnp.zeros(2)])
    for like in (dag, jax.eval_shape(lambda: dag)):
        loaded = through_a_file(dag, like=like)
        np.testing.assert_array_equal(loaded.tree[0].weight, dag.tree[0].weight)
    with pytest.raises(st.errors.StructureMismatchError):
        through_a_file(dag, like=st.Dag([linear(), jnp.zeros(3)]))


class Counter(st.Module):
    def __init__(self):
        self.count = st.state_field(jnp.zeros(()))


def test_a_dag_of_a_module():
    model = Counter()
    saved = through_a_file([model, st.Dag([model, model])], trusted=[Counter])
    assert saved[1].tree[0] is saved[0]


class Picky:
    def __init__(self, w):
        if type(w) is str:
            raise RuntimeError("no text")
        self.w = w


st.register_node(Picky, lambda picky: ((picky.w,), None), lambda _, children: Picky(*children))


def test_what_its_model_would_not_say_is_refused():
    static = jax.tree.map(lambda _: 3.0, st.Dag([linear()]))  # a number is static in a module of Equinox
    unbuilt = jax.tree.map(lambda _: "text", st.Dag(Picky(jnp.ones(2))))
    for dag in (static, unbuilt):
        with pytest.raises(st.errors.UnserialisableError, match="`\\['dag'\\]` is a `Dag` that holds something else"):
            st.to_bytes({"dag": dag})
    numbers = jax.tree.map(lambda _: 3.0, st.Dag({"w": jnp.ones(2)}))  # and a leaf elsewhere
    assert through_a_file(numbers).tree == {"w": 3.0}


def test_a_dag_of_objects_of_nnx():
    nnx = pytest.importorskip("flax.nnx", exc_type=ImportError)
    pytest.importorskip("flax", minversion="0.12.1")
    layer = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    saved = through_a_file([layer, st.Dag([layer, layer])], trusted=["flax"])
    assert saved[1].tree[0] is saved[1].tree[1] is saved[0]


def test_a_model_that_was_changed_since_is_not_saved_for_what_the_dag_holds():
    model = {"w": jnp.zeros(3)}
    dag = st.Dag(model)
    model["w"] = jnp.ones(3)
    with pytest.raises(st.errors.UnserialisableError, match="the model was changed"):
        st.to_bytes(dag)
    assert through_a_file(st.Dag(dag.tree)).tree["w"].tolist() == [1, 1, 1]


W, V = jnp.ones(2), jnp.zeros(2)
LAYER = linear()
OTHERS = [
    ({"a": W, "b": V, "c": W}, {"a": W, "b": V, "c": V}),  # another tie
    ({"a": W, "b": W}, {"a": W, "b": 1 * W}),  # no tie
    ([eqx.nn.Dropout(0.5)], [eqx.nn.Dropout(0.25)]),  # a static field
    ([LAYER], [[LAYER.weight, LAYER.bias]]),  # another class
    ({"a": W, "b": [W, W]}, {"a": W}),  # more paths
]


@pytest.mark.parametrize(("saved", "template"), OTHERS)
def test_models_of_dags_are_compared_with_a_template(saved, template):
    data = st.to_bytes({"dag": st.Dag(saved)})
    assert jax.tree.structure(st.from_bytes(data, like={"dag": st.Dag(saved)})) is not None
    with pytest.raises(st.errors.StructureMismatchError, match="dag"):
        st.from_bytes(data, like={"dag": st.Dag(template)})
    for held, like in ((data, {"dag": st.Dag(template)}), (st.to_bytes({"dag": saved}), {"dag": st.Dag(saved)})):
        with pytest.raises(st.errors.StructureMismatchError, match=r"has a `Dag`(.|\n)*at `\['dag'\]`") as caught:
            st.from_bytes(held, like=like, strict=False)
        assert set(caught.value.paths) == {"['dag']"}


def dag_file(edit):
    draft = Draft(st.to_bytes(st.Dag([["int"], "text"])))
    edit(draft.manifest["nodes"], draft.manifest)
    return draft.file(with_digests=True)


def test_forged_dags():
    for place, new in ((slice(2, 3), ["aux"]), (slice(3, 5), [[0, 0], [".tree", ".more"]]), (slice(3, 5), [[], []])):
        with pytest.raises(st.errors.FormatError):
            st.from_bytes(dag_file(lambda nodes, _, place=place, new=new: nodes[-1].__setitem__(place, new)))


def many_dags(nodes, manifest):
    """Each takes the same long list apart: work that would be quadratic in the size of the file."""
    kind = nodes[-1][1]
    nodes[:] = [["list", [None] * 40_000], *[["registered", kind, None, [0], [".tree"]] for _ in range(40)]]
    nodes.append(["list", list(range(1, 41))])
    manifest["root"] = 41


def doubled(nodes, manifest):
    """2^40 paths, for each of which a Dag would have a leaf."""
    kind = nodes[-1][1]
    nodes[:] = [["list", [None]], *[["tuple", [i, i]] for i in range(40)]]
    nodes.append(["registered", kind, None, [40], [".tree"]])
    manifest["root"] = 41


def test_their_work_is_bounded():
    for edit in (many_dags, doubled):
        data = dag_file(edit)
        assert st.from_bytes(data) is not None  # nothing is taken apart
        st.inspect(data)
        with pytest.raises(st.errors.FormatError, match="holds one thing too often to be compared"):
            st.from_bytes(data, like=[1])
