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


def test_objects_of_nnx_are_refused_in_both_directions():
    nnx = pytest.importorskip("flax.nnx", exc_type=ImportError)
    layer = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    with pytest.raises(st.UnserialisableError, match="`sharedtree:Dag`"):
        st.to_bytes(st.Dag([layer]))
    draft = Draft(st.to_bytes([st.Dag([1]), layer]))
    nodes = draft.manifest["nodes"]
    (dag,) = [node for node in nodes if node[0] == "registered" and len(node[3]) == 1 and node[4] == [".tree"]]
    objects = [i for i, node in enumerate(nodes) if node[0] == "object"]
    nodes.append([*dag[:3], [objects[-1]], dag[4]])
    draft.manifest["root"] = len(nodes) - 1
    with pytest.raises(st.FormatError, match="an object of Flax NNX"):
        st.from_bytes(draft.file(with_digests=True), trusted=["flax"])


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
    with pytest.raises(st.FormatError, match="holds one thing too often"):
        st.from_bytes(data)
    st.inspect(data)


def test_the_bound_holds_for_what_is_written_too():
    long = [None] * 40_000
    with pytest.raises(st.UnserialisableError, match="shared so often"):
        st.to_bytes([st.Dag(long) for _ in range(40)])
    assert len(through_a_file([st.Dag(long) for _ in range(10)])) == 10
