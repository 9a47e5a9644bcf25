"""Models of treex and trees of treeo, saved and loaded."""

import importlib.util
import json
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import sharedtree as st
from tests.processes import program, run
from tests.serialise.drafts import Draft

# `importorskip` would import it without what JAX no longer has, and fail.
if importlib.util.find_spec("treex") is None:
    pytest.skip("treex is not installed", allow_module_level=True)

from sharedtree.compat import treeo as to, treex as tx
from tests.compat.treex_models import LAYERS, Block, Marked, Pair, X, assert_same, model_of, through_bytes

CALLS = {"Dropout": lambda m: m(X), "KeySeq": lambda m: m()}


def double(x):
    return 2 * x


def test_models_come_back():
    for name, (make, inputs) in LAYERS.items():
        model = model_of(make, inputs)
        loaded = through_bytes(model, trusted=[Block])
        assert_same(model, loaded)
        call = jax.jit(CALLS.get(name, lambda m, inputs=inputs: m(inputs)))
        np.testing.assert_array_equal(call(model), call(loaded))
        assert loaded.eval().training is False
        if name not in ("Dropout", "KeySeq", "Sequential"):
            model = make()
            loaded = through_bytes(model, trusted=[Block])
            assert_same(model, loaded)
            assert_same(model.init(3, inputs), loaded.init(3, inputs))


METRICS = {
    "Mean": lambda: tx.metrics.Mean(),
    "Reduce": lambda: tx.metrics.Reduce("sum"),
    "Accuracy": lambda: tx.metrics.Accuracy(num_classes=3),
    "Metrics": lambda: tx.metrics.Metrics([tx.metrics.MeanSquareError(), tx.metrics.MeanAbsoluteError()]),
}


@pytest.mark.parametrize("name", METRICS)
def test_metrics_come_back(name):
    metric, arguments = METRICS[name](), {"values": X} if name in ("Mean", "Reduce") else {"target": X, "preds": X + 1}
    if name == "Accuracy":
        arguments = {"target": jnp.array([0, 1, 2]), "preds": jnp.eye(3)[jnp.array([0, 1, 1])]}
    metric.update(**arguments)
    loaded = through_bytes(metric)
    assert_same(metric, loaded)
    metric.update(**arguments)
    loaded.update(**arguments)
    assert_same(metric.compute(), loaded.compute())
    loaded.reset()
    assert_same(METRICS[name]().compute(), loaded.compute()) if name in ("Reduce", "Accuracy") else None


def test_ties_are_kept_and_filtered_models_come_back():
    layer = tx.Linear(4).init(0, X)
    model = tx.Sequential(layer, layer)
    encoder = Block().init(0, X)
    encoder.again = encoder.first
    loaded = through_bytes([model, encoder, {"teacher": encoder}], trusted=[Block])
    assert loaded[0].layers[0] is loaded[0].layers[1]
    assert loaded[1].first is loaded[1].again
    assert loaded[2]["teacher"] is loaded[1]
    assert len(Draft(st.to_bytes([model, model])).tensors) == 2
    model = model_of(*LAYERS["Sequential"])
    parameters = model.filter(tx.Parameter)
    loaded = through_bytes([model, parameters])
    assert_same([model, parameters], loaded)
    assert jax.tree.structure(loaded[1]) == jax.tree.structure(loaded[0].filter(tx.Parameter))
    np.testing.assert_array_equal(loaded[0].merge(loaded[1]).layers[0].kernel, model.layers[0].kernel)


def test_tensors_have_plain_names():
    model = model_of(*LAYERS["Sequential"])
    data = st.to_bytes(model)
    tensors = safetensors.numpy.load(data)
    np.testing.assert_array_equal(tensors["layers[0].kernel"], model.layers[0].kernel)
    np.testing.assert_array_equal(tensors["layers[4].linear2.bias"], model.layers[4].linear2.bias)
    assert sorted(map(np.shape, tensors.values())) == sorted(map(np.shape, jax.tree.leaves(model)))
    assert_same(model.layers[4], st.from_bytes(data, select=".layers[4]"))
    # An array is named by the place that JAX meets first.
    shared = jnp.ones(2)
    tree = Pair(1, shared)
    tree.early = to.copy(Pair(shared, 2))  # a tree that nobody declared, and so a node
    jax.tree.leaves(tree)
    (path, _), *_ = jax.tree_util.tree_leaves_with_path(tree)
    assert "early" in jax.tree_util.keystr(path)
    assert list(Draft(st.to_bytes(tree)).tensors) == ["early.left"]


def test_metadata_is_the_class_s_own_or_one_object():
    one, two = (st.from_bytes(st.to_bytes(model_of(*LAYERS["MLP"]))) for _ in range(2))
    for name, metadata in vars(one)["_field_metadata"].items():
        assert vars(two)["_field_metadata"][name] is metadata
        assert tx.MLP._field_metadata.get(name, metadata) is metadata
    assert jax.tree.structure(one) == jax.tree.structure(two)
    # The dictionary of it is each instance's own, though treeo's instances may have one in common.
    model = model_of(*LAYERS["Linear"])
    twin = jax.tree.map(lambda x: x + 1, model)
    assert vars(twin)["_field_metadata"] is vars(model)["_field_metadata"]
    a, b = st.from_bytes(st.to_bytes([model, twin]))
    assert vars(a)["_field_metadata"] is not vars(b)["_field_metadata"]
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(jnp.add, a, b)
    assert tx.Linear(2)._field_metadata is not vars(a)["_field_metadata"]


def test_metadata_of_an_instance_s_own_comes_back():
    block = Block().init(0, X)
    block = block.update_field_metadata("scale", kind=tx.BatchStat).update_field_metadata("table", opaque=True)
    pair = Pair(jnp.ones(1), 2).update_field_metadata("left", node=False)
    loaded = through_bytes([block, pair], trusted=[Block, Pair])
    assert_same([block, pair], loaded)
    assert loaded[0].field_metadata["scale"].kind is tx.BatchStat
    assert loaded[0].field_metadata["table"].opaque is True
    assert not loaded[1].field_metadata["left"].node
    with pytest.raises(st.errors.UntrustedTypeError, match="Marked"):
        through_bytes(Pair(1, 2).update_field_metadata("left", kind=Marked), trusted=[Pair])
    loaded = through_bytes(Pair(1, 2).update_field_metadata("left", kind=Marked), trusted=[Pair, Marked])
    assert loaded.field_metadata["left"].kind is Marked


def test_what_treeo_noted_of_a_value_that_is_gone_keeps_nothing_from_being_saved():
    pair = Pair(1, 2)
    pair.more, pair.other, pair.number = double, jnp.ones(1), None
    jax.tree.leaves(pair)  # notes kinds: a function's, an array's, None's
    pair.more, pair.other, pair.number = 1, None, 2
    loaded = through_bytes(pair, trusted=[Pair])
    assert (loaded.more, loaded.other, loaded.number) == (1, None, 2)
    assert loaded.field_metadata["number"].kind is type(None)


class Plain(to.Tree):
    """No dataclass, and attributes that nobody declared."""

    weight: Any = to.node()
    rate: float = 0.5

    def __init__(self, weight):
        self.weight = weight
        self.child = Pair(weight, {"a": [weight]})
        self.hashable = to.Hashable((1, 2))


class Strange(to.Tree):
    """A class with a flatten function of its own, which is asked."""

    def __init__(self, x):
        self.x = x

    def tree_flatten(self):
        return (self.x,), None

    @classmethod
    def tree_unflatten(cls, aux, children):
        return cls(*children)


def test_trees_of_treeo():
    weight = jnp.ones(2)
    tree = [Plain(weight), Pair(weight, np.ones(1), {"k": (1,)}), to.NOTHING, tx.Named("n", weight)]
    loaded = through_bytes(tree, trusted=[Plain, Pair])
    assert_same(tree, loaded)
    assert loaded[0].child.right["a"][0] is loaded[1].left
    (strange,) = through_bytes([Strange(weight)], trusted=[Strange])
    np.testing.assert_array_equal(strange.x, weight)


def load_draft(draft):
    return st.load(draft.file(with_digests=True), trusted=[Pair, Plain])


def test_fields_that_came_and_went():
    draft = Draft(st.to_bytes(Pair(1, 2, "n")))
    (entry,) = [entry for entry in draft.manifest["types"] if entry["name"].endswith("Pair")]
    node = draft.manifest["nodes"][-1]
    place = entry["fields"].index("note")
    del entry["fields"][place], node[2][place]
    assert load_draft(draft).note == "none"  # the default
    entry["fields"].append("gone")
    node[2].append("x")
    with pytest.raises(st.errors.StructureMismatchError, match="gone"):
        load_draft(draft)
    renames = {f"{Pair.__module__}:Pair.gone": "note"}
    assert st.load(draft.file(with_digests=True), trusted=[Pair], renames=renames).note == "x"
    entry["fields"].remove("left")
    del node[2][0]
    with pytest.raises(st.errors.StructureMismatchError, match="left"):
        st.load(draft.file(with_digests=True), trusted=[Pair], renames=renames)
    draft = Draft(st.to_bytes(Plain(jnp.ones(1))))
    (entry,) = [entry for entry in draft.manifest["types"] if entry["name"].endswith("Plain")]
    entry["missing"].remove("rate")
    assert load_draft(draft).rate == 0.5  # of the class, as in an instance that was just made


def test_a_template():
    model = model_of(*LAYERS["Sequential"])
    data = st.to_bytes(model)
    assert_same(model, st.from_bytes(data, like=model_of(*LAYERS["Sequential"])))
    with pytest.raises(st.errors.StructureMismatchError, match=r"features_out.*3.*4"):
        st.from_bytes(data, like=tx.Sequential(tx.Linear(4), *model.layers[1:]))
    with pytest.raises(st.errors.StructureMismatchError, match="training"):
        st.from_bytes(data, like=model.eval())
    block = Block().init(0, X)
    shapes = st.Dag(block)
    shapes = jax.eval_shape(lambda: shapes).tree
    assert_same(block.scale, st.from_bytes(st.to_bytes(block), like=shapes).scale)


def test_a_process_that_has_not_imported_treex(tmp_path):
    model = model_of(*LAYERS["Sequential"])
    path = tmp_path / "model.safetensors"
    st.save(path, model)
    code = program("untrusted_treex")
    leaves = json.loads(run(code, path, options=("-W", "error")))
    assert len(leaves) == len(jax.tree.leaves(model))
    for found, leaf in zip(leaves, jax.tree.leaves(model), strict=True):
        np.testing.assert_array_equal(np.asarray(found, leaf.dtype), leaf)


def test_a_package_beside_a_file_is_not_run(tmp_path):
    st.save(tmp_path / "model.safetensors", model_of(*LAYERS["Linear"]))
    code = program("treex_beside_a_file")
    printed = run(code, cwd=tmp_path, options=("-W", "error"))
    assert printed.count("    import sharedtree.compat.treex") == 4
    assert not (tmp_path / "ran").exists()
    assert "\\n" not in printed


def test_what_has_code_in_it_is_refused_with_a_fix_that_works(tmp_path):
    import flax.linen
    import optax

    def make(seed):
        model = tx.Sequential(tx.FlaxModule(flax.linen.Dense(3)), tx.Linear(2)).init(seed, X)
        return {"model": model, "optimizer": tx.Optimizer(optax.adam(1e-2)).init(model)}

    model = make(0)
    with pytest.raises(st.errors.UnserialisableError) as refused:
        st.to_bytes(model)
    assert refused.value.paths == ("['model'].layers[0]", "['optimizer']")
    save, load = dict.fromkeys(re.findall(r"`([^`]*sharedtree\.(?:save|load)\(.*?)`(?:[.,])", str(refused.value)))
    names: dict[str, Any] = {"sharedtree": st, "path": tmp_path / "leaves.safetensors", "model": model}
    exec(save, names)
    names["model"] = make(1)
    exec(load, names)
    np.testing.assert_array_equal(names["model"]["model"](X), model["model"](X))
    assert_same(jax.tree.leaves(names["model"]), jax.tree.leaves(model))


REFUSED = [
    (lambda: tx.Dropout(0.5), ".next_key.key", r"was not initialised(.|\n)*init\(key, inputs\)"),
    (lambda: tx.Sequential(tx.Linear(2), tx.Dropout(0.1)), ".layers[1].next_key.key", "was not initialised"),
    (lambda: tx.Sequential(tx.Linear(2), lambda x: x), ".layers[1].f", "a lambda"),
    (lambda: tx.losses.MeanSquaredError(), "", "make it anew"),
    (lambda: tx.LossAndLogs(losses=tx.losses.MeanSquaredError()), ".losses.losses['mean_squared", "make it anew"),
    *[
        (lambda changes=changes: [Pair(1, 2).update_field_metadata("left", **changes)], "[0]", "metadata of `left`")
        for changes in ({"kind": "text"}, {"node": 1}, {"opaque": jnp.add})
    ],
]


def test_refusals():
    for tree, path, told in REFUSED:
        with pytest.raises(st.errors.UnserialisableError, match=told) as refused:
            st.to_bytes(tree())
        (found,) = refused.value.paths
        assert found.startswith(path)
    assert through_bytes(tx.Initializer(jax.random.normal)).f is jax.random.normal


def test_a_function_of_the_user_s_needs_trust():
    data = st.to_bytes(tx.Lambda(double))
    with pytest.raises(st.errors.UntrustedTypeError, match="double"):
        st.from_bytes(data)
    assert st.from_bytes(data, trusted=[double])(3) == 6
    assert st.from_bytes(data, like=tx.Lambda(double)).f is double
