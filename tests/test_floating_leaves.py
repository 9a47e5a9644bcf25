"""`st.tree.norm` and `st.tree.cast`: optax's norm of the distinct arrays, and `astype` on each of them."""

import equinox as eqx
import hypothesis
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx

import sharedtree as st
from tests.strategies import Mutable, Pair, copy_dag, dags, is_array, partition, paths, tower, unique_arrays

W, V = jnp.array([3.0, 4.0]), jnp.array([[12.0]])


class Net(nnx.Module):
    """A tied variable, statistics, a key and a counter."""

    def __init__(self):
        self.embed = nnx.Dict(kernel=nnx.Param(W, tag="table", note=("vocabulary",)))
        self.head = nnx.Dict(kernel=self.embed.kernel)
        self.mean = nnx.BatchStat(V)
        self.rngs = nnx.Rngs(dropout=0)


def inexact(tree):
    """What counts: arrays, each once, and Python numbers where JAX traces them."""
    numbers = [
        obj.x for obj in {id(o): o for _, o, _ in paths(tree) if isinstance(o, Mutable)}.values() if "x" in vars(obj)
    ]
    return [x for x in unique_arrays(tree) if eqx.is_inexact_array_like(x)] + [x for x in numbers if type(x) is float]


@hypothesis.given(dags())
def test_the_norm_is_that_of_optax_of_each_array_once(tree):
    np.testing.assert_allclose(st.tree.norm(tree), optax.tree.norm(inexact(tree)), rtol=1e-6)


CASES = {
    "a tie in a dict": ({"a": W, "b": W}, 5.0),
    "two equal arrays": ({"a": W, "b": W + 0}, 50**0.5),
    "a tied module": (Pair(Pair(W, V), None), 13.0),
    "a shared module": ((lambda pair: Pair(pair, [pair]))(Pair(W, V)), 13.0),
    "an array": (W, 5.0),
    "a Dag": (st.Dag([W, W]), 5.0),
    "integers, keys, statics": ([W, jnp.array(7), jax.random.key(0), np.arange(3), True, 3], 5.0),
    "a Python number": ([W, 12.0], 13.0),
    "a complex number": ([jnp.array(3 + 4j), W, W], 50**0.5),
    "NumPy": ([np.array(W), np.float32(12)], 13.0),
    "None": (None, 0.0),
    "nothing that counts": ({"a": jnp.arange(3), "b": None}, 0.0),
    "a gradient": (lambda: st.grad(lambda dag: (dag.tree[0] * dag.tree[1]).sum() / 2)(st.Dag([W, W])), 5.0),
    "of NNX": (Net, 13.0),
    "more paths than can be walked": (tower(60, Mutable(a=W)), 5.0),
}


@pytest.mark.parametrize(("tree", "expected"), CASES.values(), ids=CASES)
def test_the_norm_worked_out_by_hand(tree, expected):
    found = st.tree.norm(tree() if callable(tree) and not isinstance(tree, st.Dag) and tree not in (W,) else tree)
    assert (found.shape, found.dtype) == ((), jnp.float32)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16, jnp.complex64])
@pytest.mark.slow
def test_the_norm_rounds_as_that_of_optax(dtype):
    """The same dtype, bit by bit, also where half precision rounds or overflows."""
    leaves = [jnp.linspace(-3, 300, 129).astype(dtype), jnp.full(3, 0.1).astype(dtype)]
    ours, theirs = st.tree.norm({"a": leaves[0], "b": leaves, "c": leaves[1]}), optax.tree.norm(leaves)
    assert (ours.dtype, ours.weak_type) == (theirs.dtype, theirs.weak_type)
    np.testing.assert_array_equal(ours, theirs)
    ours = st.tree.norm({})
    assert (ours.dtype, ours.weak_type) == (optax.tree.norm({}).dtype, optax.tree.norm({}).weak_type)
    if dtype is jnp.bfloat16:
        exact = np.sqrt(sum((np.asarray(leaf, np.float64) ** 2).sum() for leaf in leaves))
        np.testing.assert_allclose(st.tree.norm(st.tree.cast(leaves, jnp.float32)), exact, rtol=1e-6)


def test_the_norm_in_transforms():
    model = Pair(W, [W, V])
    np.testing.assert_allclose(st.jit(st.tree.norm)(model), 13)
    gradient = st.jit(st.grad(st.tree.norm))(model)
    assert gradient.first is gradient.second[0]
    np.testing.assert_allclose(gradient.first, W / 13, rtol=1e-6)
    stacked = st.tree.map(lambda x: jnp.stack([x, 2 * x]), model)
    np.testing.assert_allclose(st.vmap(st.tree.norm)(stacked), [13, 26], rtol=1e-6)
    # What clips inside an optimizer sees the same norm.
    clipped, _ = st.optimizer(optax.clip_by_global_norm(1.0)).update(model, optax.EmptyState())
    np.testing.assert_allclose(clipped.first, W / 13, rtol=1e-6)


@hypothesis.given(dags())
def test_a_cast_is_that_of_each_array_with_the_same_ties(tree):
    change = lambda x: x.astype(jnp.bfloat16) if eqx.is_inexact_array_like(x) else x
    new, expected = st.tree.cast(tree, jnp.bfloat16), copy_dag(tree, change)
    assert partition(new) == partition(expected)
    assert jax.tree.structure(new) == jax.tree.structure(expected)
    for one, two in zip(jax.tree.leaves(new), jax.tree.leaves(expected), strict=True):
        if is_array(two):
            assert (type(one), one.dtype) == (type(two), two.dtype)
        np.testing.assert_array_equal(one, two)


UNTOUCHED = {
    "an integer": jnp.array(7),
    "a boolean": jnp.array(True),
    "a key": jax.random.key(0),
    "keys in NumPy's integers": np.asarray(jax.random.PRNGKey(0)),
    "a complex number": jnp.array(1j),
    "a Python number": 2.5,
    "None": None,
    "what has the dtype": jnp.ones(2, jnp.bfloat16),
    "NumPy that has the dtype": np.ones(2, ml_dtypes.bfloat16),
}


@pytest.mark.parametrize("leaf", UNTOUCHED.values(), ids=UNTOUCHED)
def test_a_cast_leaves_alone_what_is_no_other_precision(leaf):
    assert st.tree.cast([leaf, W], jnp.bfloat16)[0] is leaf
    assert st.tree.cast(Pair(leaf, [leaf]), jnp.bfloat16).first is leaf


def test_a_cast_of_numpy_of_weak_types_and_of_abstract_arrays():
    array, scalar = st.tree.cast([np.ones(2), np.float64(2)], jnp.float16)
    assert (type(array), array.dtype, scalar.dtype) == (np.ndarray, np.float16, np.float16)
    (strong,) = st.tree.cast([jnp.asarray(1.0)], jnp.float32)
    assert jnp.asarray(1.0).weak_type
    assert not strong.weak_type
    abstract = st.tree.cast(st.eval_shape(lambda: Pair(W, W)), "bfloat16")
    assert abstract.first is abstract.second
    assert (abstract.first.shape, abstract.first.dtype) == ((2,), jnp.bfloat16)


def test_a_cast_of_nnx_keeps_classes_metadata_and_ties():
    net = Net()
    new = st.tree.cast(net, jnp.bfloat16)
    assert type(new) is Net
    assert new.embed.kernel is new.head.kernel
    assert (type(new.embed.kernel), type(new.mean)) == (nnx.Param, nnx.BatchStat)
    assert new.embed.kernel.get_metadata() == net.embed.kernel.get_metadata()
    assert new.embed.kernel[...].dtype == new.mean[...].dtype == jnp.bfloat16
    assert new.rngs.dropout.key[...].dtype == net.rngs.dropout.key[...].dtype
    assert new.rngs.dropout.count[...].dtype == net.rngs.dropout.count[...].dtype
    assert net.embed.kernel[...].dtype == jnp.float32


def test_the_gradient_through_a_cast_is_in_the_precision_of_the_master():
    master = Pair(W, [W, jnp.array(3)])

    def loss(model):
        half = st.tree.cast(model, jnp.bfloat16)
        assert half.first is half.second[0]
        assert half.first.dtype == jnp.bfloat16
        return (half.first * half.second[0]).sum().astype(jnp.float32)

    gradient = st.jit(st.grad(loss))(master)
    assert gradient.first is gradient.second[0]
    assert (gradient.first.dtype, gradient.second[1]) == (jnp.float32, None)
    np.testing.assert_allclose(gradient.first, 2 * W)


NO_DTYPES = {
    "integers": (jnp.int32, "the dtype int32"),
    "booleans": (bool, "the dtype bool"),
    "complex numbers": (jnp.complex64, "the dtype complex64"),
    "None": (None, "no dtype"),
    "no name of one": ("half of it", "no dtype"),
    "keys": (jax.random.key(0).dtype, "no dtype"),
}


@pytest.mark.parametrize(("dtype", "text"), NO_DTYPES.values(), ids=NO_DTYPES)
def test_a_cast_to_what_is_no_floating_point_dtype_is_refused(dtype, text):
    with pytest.raises(TypeError, match=f"takes a floating-point dtype, and .* is {text}"):
        st.tree.cast({"a": W}, dtype)


def test_a_reference_is_read_by_the_norm_and_refused_by_a_cast():
    ref = jax.new_ref(W)
    np.testing.assert_allclose(st.tree.norm(Pair(ref, [ref, V])), 13)
    with pytest.raises(TypeError, match=r"cannot change the dtype of a `jax.Ref`.* float32"):
        st.tree.cast(Pair(ref, V), jnp.bfloat16)
    assert st.tree.cast(Pair(jax.new_ref(jnp.array(1)), V), jnp.bfloat16).second.dtype == jnp.bfloat16
