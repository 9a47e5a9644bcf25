"""Labels, masks and filters that say one thing of an array and another of a view that is computed from it.

A plain tie with two labels is an error, a cut with a warning, or a gradient with a warning. So is a view with a label
that its array has not. A view with None follows its array, and a function is asked at the array's own path only.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import sharedtree as st
from sharedtree.errors import InconsistentSharingError
from tests.walks import in_python

W = jnp.arange(6.0).reshape(2, 3)


class Net(eqx.Module):
    """The view comes before the array in the order of the leaves."""

    head: object
    embed: jax.Array
    bias: jax.Array


def model():
    return Net(st.View(jnp.transpose, W), W, jnp.ones(2))


def loss(net):
    return (st.unwrap(net).head ** 2).sum() + net.bias.sum()


def view(label):
    return st.View._unflatten(jnp.transpose, ((label,),))


@pytest.fixture(params=["native", "python"], autouse=True)
def walk(request):
    if request.param == "python":
        with in_python():
            yield
    else:
        yield


# What a prefix has in the place of the view: one label for it, a view of a label.
FORMS = {"a label for the view": lambda label: label, "a label below the view": view}
forms = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


# --- masks and labels of optax ----------------------------------------------------------------------------------------


def parted(labels):
    kinds = {"train": optax.sgd(1.0), "freeze": optax.set_to_zero()}
    return st.optimizer(optax.multi_transform(kinds, labels))


def updates_of(tx, net):
    return tx.update(st.tree.map(jnp.ones_like, net), tx.init(net), net)[0]


@forms
def test_two_labels_of_optax_are_refused(form):
    with pytest.raises(InconsistentSharingError) as caught:
        parted(Net(form("freeze"), "train", "train")).init(model())
    assert caught.value.paths == (".embed", ".head.of[0]")
    assert caught.value.treatments == ("'train'", "'freeze'")
    with pytest.raises(InconsistentSharingError):
        st.optimizer(optax.masked(optax.sgd(1.0), Net(form(True), False, True))).init(model())


@forms
@pytest.mark.parametrize("label", ["train", None])
def test_a_view_without_a_label_or_with_the_same_follows_its_array(form, label):
    updates = updates_of(parted(Net(form(label), "train", "freeze")), model())
    np.testing.assert_array_equal(updates.embed, -jnp.ones((2, 3)))
    assert updates.head.of[0] is updates.embed
    np.testing.assert_array_equal(updates.bias, jnp.zeros(2))


def test_a_label_for_a_whole_module_holds_for_the_view_in_it():
    net = {"embed": W, "head": {"kernel": st.View(jnp.transpose, W), "bias": jnp.ones(2)}}
    with pytest.raises(InconsistentSharingError, match=r"\['head'\]\['kernel'\]\.of\[0\]"):
        parted({"embed": "train", "head": "freeze"}).init(net)
    parted({"embed": "train", "head": "train"}).init(net)


def by_name(path, leaf):
    return "train" if "embed" in jax.tree_util.keystr(path) else "freeze"


def test_a_rule_by_path_is_asked_at_the_own_path():
    # JAX asks at each path, so the labels differ. `st.tree` asks once for each array.
    with pytest.raises(InconsistentSharingError):
        parted(jax.tree_util.tree_map_with_path(by_name, model())).init(model())
    trees = [st.tree.map_with_path(by_name, model()), lambda net: jax.tree_util.tree_map_with_path(by_name, net)]
    for labels in trees:
        updates = updates_of(parted(labels), model())
        np.testing.assert_array_equal(updates.embed, -jnp.ones((2, 3)))
        np.testing.assert_array_equal(updates.bias, jnp.zeros(2))


def test_a_view_whose_array_is_nowhere_else_keeps_its_label():
    net = Net(st.View(jnp.transpose, W), W + 1, jnp.ones(2))
    updates = updates_of(parted(Net("freeze", "train", "train")), net)
    np.testing.assert_array_equal(updates.head.of[0], jnp.zeros((2, 3)))
    np.testing.assert_array_equal(updates.embed, -jnp.ones((2, 3)))


# --- filters ----------------------------------------------------------------------------------------------------------


@forms
def test_a_tree_of_booleans_with_two_answers_is_refused(form):
    for spec in (Net(form(False), True, True), Net(form(True), False, True)):
        with pytest.raises(InconsistentSharingError, match=r"\.head\.of\[0\]"):
            st.tree.partition(model(), spec)
        with pytest.raises(InconsistentSharingError, match=r"\.head\.of\[0\]"):
            st.tree.partition(st.Dag(model()), spec)
        with pytest.raises(InconsistentSharingError, match=r"\.head\.of\[0\]"):
            st.optimizer(optax.sgd(1.0), wrt=spec).init(model())


def test_the_fix_fits_a_tree_that_ends_above_the_view():
    with pytest.raises(InconsistentSharingError) as caught:
        st.tree.partition(model(), Net(False, True, True))
    assert "tree_at" not in str(caught.value)


@forms
def test_a_gradient_of_one_of_two_answers_warns(form):
    with pytest.warns(st.UntiedWarning, match=r"`net\.embed` lacks what flows through `net\.head\.of\[0\]`"):
        gradient = st.grad(loss, wrt=Net(form(False), True, True))(model())
    np.testing.assert_array_equal(gradient.embed, jnp.zeros((2, 3)))
    with pytest.warns(st.UntiedWarning, match=r"`net\.head\.of\[0\]` lacks what flows through `net\.embed`"):
        gradient = st.grad(loss, wrt=Net(form(True), False, True))(model())
    np.testing.assert_array_equal(gradient.head.of[0], 2 * W)


@forms
@pytest.mark.parametrize("answer", [True, None])
def test_a_filter_follows_the_array(form, answer):
    spec = Net(form(answer), True, False)
    kept, rest = st.tree.partition(model(), spec)
    assert kept.embed is kept.head.of[0] is W
    assert rest.embed is rest.head.of[0] is None
    gradient = st.grad(loss, wrt=spec)(model())
    assert gradient.embed is gradient.head.of[0]
    np.testing.assert_array_equal(gradient.embed, 2 * W)
    assert gradient.bias is None
    updates = updates_of(st.optimizer(optax.sgd(1.0), wrt=spec), model())
    np.testing.assert_array_equal(updates.embed, -jnp.ones((2, 3)))


def test_functions_in_a_tree_are_asked_at_the_own_path():
    paths = []

    def ask(path, value):
        paths.append(path)
        return path == ("embed",)

    kept, _ = st.tree.partition(model(), Net(ask, ask, False))
    assert kept.embed is W
    assert set(paths) == {("embed",)}


def test_a_variable_of_nnx_with_two_answers_is_refused():
    variable = nnx.Param(W)
    net = Net(st.View(jnp.transpose, variable), variable, jnp.ones(2))
    with pytest.raises(InconsistentSharingError, match=r"net\.head\.of\[0\]"):
        st.grad(lambda net: (net.head[...] ** 2).sum(), wrt=Net(False, True, True))(net)


# --- states -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [model, lambda: {"head": st.View(jnp.transpose, W), "embed": W, "bias": jnp.ones(2)}])
def test_a_state_keeps_by_the_own_path(make):
    kept = st.state(make(), keep=lambda path, value: path[0] == "embed")
    assert kept["embed"] is kept["head"]["of"][0] is W
    assert kept["bias"] == ()
    kept = st.state(make(), keep=lambda path, value: path[0] == "head")
    assert kept["embed"] == kept["head"]["of"][0] == ()


@forms
def test_a_tree_of_booleans_for_a_state(form):
    kept = st.state(model(), keep=Net(form(None), True, False))
    assert kept["embed"] is kept["head"]["of"][0] is W
    for embed in (True, False):
        with pytest.raises(InconsistentSharingError, match=r"`\.head\.of\[0\]`"):
            st.state(model(), keep=Net(form(not embed), embed, True))


def test_a_state_of_variables_and_of_views_of_views():
    variable = nnx.Param(W)
    inner = st.View(jnp.transpose, variable)
    tree = {"a": st.View(jnp.negative, inner), "b": inner, "c": variable}
    assert st.state(tree, keep=lambda path, value: path == ("c",))["a"]["of"][0]["of"][0] is W
    assert st.state(tree, keep=lambda path, value: path[0] != "c")["c"] == ()
    # The array has no place of its own here, but the view has.
    loose = {"a": st.View(jnp.negative, inner), "b": inner}
    assert st.state(loose, keep=lambda path, value: path[0] == "b")["a"]["of"][0]["of"][0] is W


# --- axes -------------------------------------------------------------------------------------------------------------


def stacked():
    return st.tree.map(lambda x: jnp.stack([x, 2 * x]), model())


@forms
def test_a_view_without_an_axis_follows_its_array(form):
    for axis in (0, None):
        out = st.vmap(lambda net: st.unwrap(net).head, in_axes=(Net(form(axis), 0, None),))(stacked())
        np.testing.assert_array_equal(out, jnp.stack([W.T, 2 * W.T]))


@forms
def test_two_axes_cut_the_tie_with_a_warning(form):
    net = st.tree.map(lambda x: jnp.stack([x, 2 * x]), model())
    net = st.tree.at(lambda net: net.embed, net, jnp.stack([W, W]).swapaxes(0, 1))
    with pytest.warns(st.UntiedWarning, match=r"`net\.head\.of\[0\]`: in_axes 1"):
        out = st.vmap(lambda net: net.head[...] + net.embed.T, in_axes=(Net(form(1), 0, None),))(net)
    np.testing.assert_array_equal(out, jnp.stack([net.embed[:, i].T + net.embed[i].T for i in range(2)]))


# --- placements -------------------------------------------------------------------------------------------------------


@pytest.fixture
def mesh():
    return jax.make_mesh((1,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])


PLACERS = {
    "device_put": st.device_put,
    "in_shardings": lambda net, prefix: st.jit(lambda net: net.embed, in_shardings=(prefix,))(net),
    "out_shardings": lambda net, prefix: st.jit(lambda net: st.tree.map(lambda x: x + 0, net), out_shardings=prefix)(
        net
    ),
    "with_sharding_constraint": lambda net, prefix: st.jit(lambda net: st.with_sharding_constraint(net, prefix))(net),
}


@forms
@pytest.mark.parametrize("name", PLACERS)
def test_two_placements_are_refused(name, form, mesh):
    rows, columns = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("d",), (None, "d")))
    with pytest.raises(InconsistentSharingError, match=r"\.head\.of\[0\]`: .*P\(None, 'd'\)"):
        PLACERS[name](model(), Net(form(columns), rows, rows))


@forms
@pytest.mark.parametrize("name", PLACERS)
def test_a_view_without_a_placement_follows_its_array(name, form, mesh):
    rows = NamedSharding(mesh, PartitionSpec("d"))
    for sharding in (rows, None):
        result = PLACERS[name](model(), Net(form(sharding), rows, rows))
        if name in ("device_put", "out_shardings"):
            assert result.head.of[0] is result.embed
            assert result.embed.sharding.spec == PartitionSpec("d")
