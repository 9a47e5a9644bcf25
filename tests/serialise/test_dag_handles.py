"""`st.Dag` in files: as its model, which is the very one that is elsewhere in the tree."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
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
    again = through_a_file(dag)
    assert type(again) is st.Dag
    assert again.structure is dag.structure
    assert again.tree["embed"] is again.tree["head"]
    assert len(jax.tree.leaves(again)) == 3
    for one, two in zip(jax.tree.leaves(again), jax.tree.leaves(dag), strict=True):
        np.testing.assert_array_equal(one, two)


def test_its_model_is_the_one_beside_it():
    model = [linear()]
    saved = through_a_file({"model": model, "dag": st.Dag(model), "again": st.Dag(model)})
    assert saved["dag"].tree is saved["model"]
    assert saved["again"].tree[0] is saved["model"][0]
    assert saved["dag"] is not saved["again"]


def test_one_dag_at_two_paths_is_one():
    dag = st.Dag([jnp.ones(2)])
    first, second = through_a_file([dag, dag])
    assert first is second


def test_the_state_of_an_optimizer_goes_on_as_if_it_had_not_been_saved():
    weight = jnp.arange(3.0)
    tx = optax.adam(1e-1)

    @jax.jit
    def step(dag, state):
        gradient = jax.grad(lambda d: jnp.sum(d.tree["embed"] ** 2 * d.tree["head"]))(dag)
        updates, state = tx.update(gradient, state)
        return optax.apply_updates(dag, updates), state

    dag = st.Dag({"embed": weight, "head": weight})
    before = step(dag, tx.init(dag))
    saved = through_a_file(before)
    assert jax.tree.structure(saved) == jax.tree.structure(before)
    for one, two in zip(jax.tree.leaves(step(*saved)), jax.tree.leaves(step(*before)), strict=True):
        np.testing.assert_array_equal(one, two)
    assert saved[0].tree["embed"] is saved[0].tree["head"]


def test_a_template_with_a_dag(tmp_path):
    dag = st.Dag([linear(), jnp.zeros(2)])
    st.save(tmp_path / "dag", dag)
    like = jax.eval_shape(lambda: dag)
    np.testing.assert_array_equal(st.load(tmp_path / "dag", like=dag).tree[0].weight, dag.tree[0].weight)
    assert type(like) is st.Dag
    with pytest.raises(st.StructureMismatchError):
        st.load(tmp_path / "dag", like=st.Dag([linear(), jnp.zeros(3)]))


def test_a_part_of_a_dag():
    data = st.to_bytes({"run": st.Dag({"w": jnp.arange(2)})})
    assert st.inspect(data).arrays[0].name == "['run'].tree['w']"
    assert st.from_bytes(data, select="['run'].tree['w']").tolist() == [0, 1]


class Counter(st.Module):
    def __init__(self):
        self.count = st.state_field(jnp.zeros(()))


def test_a_dag_of_a_module():
    model = Counter()
    saved = through_a_file([model, st.Dag([model, model])], trusted=[Counter])
    assert saved[1].tree[0] is saved[0]


def test_what_its_model_would_not_say_is_refused():
    dag = jax.tree.map(lambda _: 3.0, st.Dag([linear()]))  # a number is static in a module of Equinox
    with pytest.raises(st.UnserialisableError, match="`\\['dag'\\]` is a `Dag` that holds something else"):
        st.to_bytes({"dag": dag})
    numbers = jax.tree.map(lambda _: 3.0, st.Dag({"w": jnp.ones(2)}))  # and a leaf elsewhere
    assert through_a_file(numbers).tree == {"w": 3.0}


def test_a_dag_of_objects_of_nnx():
    nnx = pytest.importorskip("flax.nnx", exc_type=ImportError)
    pytest.importorskip("flax", minversion="0.12.1")
    layer = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    saved = through_a_file([layer, st.Dag([layer, layer])], trusted=["flax"])
    assert saved[1].tree[0] is saved[1].tree[1] is saved[0]


class Noting:
    """Counts what is asked of its instances."""

    asked = 0

    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        type(self).asked += 1
        return isinstance(other, Noting)

    def __hash__(self):
        type(self).asked += 1
        return 0


def flattened(noting):
    Noting.asked += 1
    return (noting.value,), None


st.register_node(Noting, flattened, lambda _, children: Noting(*children))


def test_nothing_is_asked_of_a_model_before_the_dag_is_used():
    data = st.to_bytes([st.Dag([Noting(jnp.ones(2))]), Noting(jnp.ones(2))])
    alone = st.to_bytes([[Noting(jnp.ones(2))], Noting(jnp.ones(2))])
    counts = []
    for each in (data, alone):
        Noting.asked = 0
        loaded = st.from_bytes(each, trusted=[Noting])
        counts.append(Noting.asked)
    assert counts[0] == counts[1]
    assert len(jax.tree.leaves(st.from_bytes(data, trusted=[Noting])[0])) == 1
    assert type(loaded[0][0]) is Noting


def test_a_model_that_was_changed_since_is_not_saved_for_what_the_dag_holds():
    model = {"w": jnp.zeros(3)}
    dag = st.Dag(model)
    model["w"] = jnp.ones(3)
    with pytest.raises(st.UnserialisableError, match="the model was changed"):
        st.to_bytes(dag)
    assert through_a_file(st.Dag(dag.tree)).tree["w"].tolist() == [1, 1, 1]


class Picky:
    def __init__(self, w):
        if type(w) is str:
            raise RuntimeError("no text")
        self.w = w


st.register_node(Picky, lambda picky: ((picky.w,), None), lambda _, children: Picky(*children))


def test_a_model_that_cannot_be_built_is_listed():
    dag = jax.tree.map(lambda _: "text", st.Dag(Picky(jnp.ones(2))))
    with pytest.raises(st.UnserialisableError, match="`\\['d'\\]` is a `Dag` that holds something else"):
        st.to_bytes({"d": dag})


W, V = jnp.ones(2), jnp.zeros(2)
LAYER = linear()
OTHERS = {
    "another tie": ({"a": W, "b": V, "c": W}, {"a": W, "b": V, "c": V}),
    "no tie": ({"a": W, "b": W}, {"a": W, "b": 1 * W}),
    "a static field": ([eqx.nn.Dropout(0.5)], [eqx.nn.Dropout(0.25)]),
    "another class": ([LAYER], [[LAYER.weight, LAYER.bias]]),
    "more paths": ({"a": W, "b": [W, W]}, {"a": W}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_models_of_dags_are_compared_with_a_template(name):
    saved, template = OTHERS[name]
    data = st.to_bytes({"dag": st.Dag(saved)})
    assert jax.tree.structure(st.from_bytes(data, like={"dag": st.Dag(saved)})) is not None
    with pytest.raises(st.StructureMismatchError, match="dag"):
        st.from_bytes(data, like={"dag": st.Dag(template)})
    for held, like in ((data, {"dag": st.Dag(template)}), (st.to_bytes({"dag": saved}), {"dag": st.Dag(saved)})):
        with pytest.raises(st.StructureMismatchError, match=r"has a `Dag`(.|\n)*at `\['dag'\]`") as caught:
            st.from_bytes(held, like=like, strict=False)
        assert set(caught.value.paths) == {"['dag']"}


def dag_file(edit):
    draft = Draft(st.to_bytes(st.Dag([["int"], "text"])))
    edit(draft.manifest["nodes"], draft.manifest)
    return draft.file(with_digests=True)


def with_aux(nodes, _):
    nodes[-1][2] = "aux"


def with_two_models(nodes, _):
    nodes[-1][3:] = [[0, 0], [".tree", ".more"]]


def without_a_model(nodes, _):
    nodes[-1][3:] = [[], []]


@pytest.mark.parametrize("edit", [with_aux, with_two_models, without_a_model], ids=lambda edit: edit.__name__)
def test_forged_dags(edit):
    with pytest.raises(st.FormatError):
        st.from_bytes(dag_file(edit))


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


@pytest.mark.parametrize("edit", [many_dags, doubled], ids=lambda edit: edit.__name__)
def test_their_work_is_bounded(edit):
    data = dag_file(edit)
    assert st.from_bytes(data) is not None  # nothing is taken apart
    st.inspect(data)
    with pytest.raises(st.FormatError, match="holds one thing too often to be compared"):
        st.from_bytes(data, like=[1])
