"""The array in a variable of Flax NNX is the variable's value: two variables that hold one array are two, as in NNX."""

import re
import warnings

import hypothesis
import hypothesis.strategies as hst
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from safetensors import safe_open

import sharedtree as st
from tests.walks import in_python

SLOTS = {
    "param": lambda x: nnx.Param(x),
    "statistic": lambda x: nnx.BatchStat(x),
    "plain": lambda x: nnx.data(x),
    "in a list": lambda x: nnx.List([x]),
    "in a list of a variable": lambda x: nnx.Param([x]),
}
"""How a model may hold an array; the last three are objects that refer to it."""

VALUES = ("param", "statistic")

has_get_value = pytest.mark.skipif(not hasattr(nnx.Variable, "get_value"), reason="this Flax has no `get_value`")


class Holder(nnx.Module):
    def __init__(self, kinds, arrays):
        for i, (kind, array) in enumerate(zip(kinds, arrays, strict=True)):
            setattr(self, f"slot{i}", SLOTS[kind](array))


@hypothesis.given(hst.lists(hst.tuples(hst.sampled_from(sorted(SLOTS)), hst.integers(0, 1)), min_size=1, max_size=5))
@pytest.mark.parametrize("kind", ["jax", "numpy", "keys"])
def test_ties_are_those_of_what_refers_to_an_array(kind, slots):
    make = {"jax": lambda i: jnp.full(2, i), "numpy": lambda i: np.full(2, i), "keys": jax.random.key}[kind]
    arrays = [make(0), make(1)]
    model = Holder([each for each, _ in slots], [arrays[i] for _, i in slots])
    values = sum(each in VALUES for each, _ in slots)
    objects = len({i for each, i in slots if each not in VALUES})
    for context in (in_python, warnings.catch_warnings):
        with context():
            assert len(jax.tree.leaves(st.Dag(model))) == values + objects
            assert sum(len(tie.paths) for tie in st.ties(model) if tie.kind == "array") <= len(slots) - values
    first, (structure,) = jax.tree.flatten(st.Dag(model))[1], {jax.tree.structure(st.Dag(model))}
    with in_python():
        assert first == structure == jax.tree.structure(st.Dag(model))
    assert st.same_sharing(model, jax.jit(lambda dag: dag)(st.Dag(model)).tree)


class Critic(nnx.Module):
    def __init__(self, rngs):
        self.hidden, self.out = nnx.Linear(2, 3, rngs=rngs), nnx.Linear(3, 1, rngs=rngs)

    def __call__(self, x):
        return self.out(jnp.tanh(self.hidden(x)))


class Twins(nnx.Module):
    """Two critics that begin with the same arrays."""

    def __init__(self):
        self.one = Critic(nnx.Rngs(0))
        self.two = nnx.clone(self.one)


X = jnp.arange(8.0).reshape(4, 2)


def loss(twins, x):
    return (twins.one(x) ** 2).mean() + (jnp.cos(twins.two(x)) ** 2).sum()


def values_of(model):
    return jax.tree.leaves(nnx.to_pure_dict(nnx.state(model)))


@pytest.mark.slow
@pytest.mark.parametrize("donated", [(), (0,)], ids=["kept", "donated"])
def test_twins_train_as_under_nnx(donated):
    ours, theirs = Twins(), Twins()
    assert st.ties(ours) == ()
    reference = nnx.Optimizer(theirs, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)
    tx = st.optimizer(optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)
    state = tx.init(ours)

    def step(twins, state, x):
        gradient = st.grad(loss, wrt=nnx.Param)(twins, x)
        updates, state = tx.update(gradient, state, twins)
        return st.apply_updates(twins, updates), state

    step = st.jit(step, donate_argnums=donated)
    for _ in range(3):
        reference.update(theirs, nnx.grad(loss)(theirs, X))
        given = values_of(ours)
        ours, state = step(ours, state, X)
        assert all(array.is_deleted() for array in given) is bool(donated)
        for one, two in zip(values_of(ours), values_of(theirs), strict=True):
            np.testing.assert_allclose(one, two, rtol=1e-5)
    assert not np.allclose(ours.one.out.kernel[...], ours.two.out.kernel[...])


@has_get_value
def test_one_of_them_can_be_selected():
    """The gradient of the other lacks nothing, so there is nothing to warn of."""
    gradient = st.grad(loss, wrt=lambda path, value: path[0] == "one")(Twins(), X)
    alone = nnx.grad(lambda one: (one(X) ** 2).mean())(Twins().one)
    np.testing.assert_allclose(gradient.one.out.kernel[...], alone.out.kernel[...], rtol=1e-5)
    assert gradient.two.out.kernel.get_value() is None


@has_get_value
def test_in_place_each_is_written_for_itself():
    def add(twins):
        twins.one.out.bias[...] += 1.0

    for transform in (
        st.jit,
        lambda f, in_place: st.vmap(f, in_axes=None, axis_size=2, in_place=in_place, out_axes=None),
    ):
        twins = Twins()
        before = twins.two.out.bias.get_value()
        transform(add, in_place=True)(twins)
        assert twins.two.out.bias.get_value() is before
        np.testing.assert_allclose(twins.one.out.bias[...], before + 1.0)


@has_get_value
def test_a_file_has_the_array_once(tmp_path):
    """Written and read as ever: what a loaded model holds in two variables are two values."""
    twins = Twins()
    st.save(tmp_path / "twins.safetensors", twins)
    with safe_open(tmp_path / "twins.safetensors", "numpy") as file:
        assert len([name for name in file.keys() if file.get_tensor(name).size]) == len(values_of(twins.one))  # noqa: SIM118
    loaded = st.load(tmp_path / "twins.safetensors", like=Twins())
    assert st.ties(loaded) == ()
    assert st.tree.equal(loaded, twins)


@has_get_value
def test_ties_are_made_of_variables():
    twins = Twins()
    with pytest.raises(st.errors.SharingMismatchError, match="two variables with one array are still two") as caught:
        st.tie(twins, lambda m: (m.one.out.kernel.get_value(), m.two.out.kernel.get_value()))
    names = {"model": twins, "sharedtree": st}
    exec(re.search("^    (model = .*)$", str(caught.value), re.MULTILINE)[1], names)
    assert names["model"].one.out.kernel is names["model"].two.out.kernel
    assert [tie.paths for tie in st.ties(names["model"])] == [(".one.out.kernel", ".two.out.kernel")]


@has_get_value
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)], ids=str)
def test_an_array_in_several_donated_arguments_is_given_away_once(order):
    """In two modules, and bare beside them."""
    twins = Twins()
    each = [twins.one, twins.two, twins.one.out.kernel.get_value()]
    given = [each[i] for i in order]
    expected = [np.asarray(x) + 1 for x in jax.tree.leaves(given)]
    out = st.jit(lambda *args: jax.tree.map(lambda x: x + 1, args), donate_argnums=(0, 1, 2))(*given)
    assert all(x.is_deleted() for x in jax.tree.leaves(given))
    for ours, right in zip(jax.tree.leaves(out), expected, strict=True):
        np.testing.assert_allclose(ours, right, rtol=1e-6)


def test_what_is_donated_and_kept_is_an_error():
    """Whoever keeps the array would find it deleted."""
    twins = Twins()
    with pytest.raises(st.errors.InconsistentSharingError, match="Donation deletes the array"):
        st.jit(lambda one, two: (one, two), donate_argnums=0)(twins.one, twins.two)
    st.jit(lambda one, two: (one, two))(twins.one, twins.two)


@has_get_value
def test_a_reference_in_variables_is_one():
    model = Holder(["param", "param"], [jnp.zeros(2)] * 2)
    ref = jax.new_ref(jnp.zeros(2))
    for variable in (model.slot0, model.slot1):
        object.__setattr__(variable, "_raw_value", ref)
    with in_python():
        assert len(jax.tree.leaves(st.Dag(model))) == 1
    assert len(jax.tree.leaves(st.Dag(model))) == 1
