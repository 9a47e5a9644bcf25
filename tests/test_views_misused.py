"""What a view refuses, and what `tie(through=)` refuses: never a wrong number, and the fix in the message."""

import functools
import operator
import warnings

import equinox as eqx
import flax.linen as nn
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import sharedtree as st
from sharedtree.errors import SharingMismatchError, ViewError
from tests.processes import program

W = jnp.arange(6.0).reshape(2, 3)
CONTAINERS = st.Policy(containers=True)


class Net(eqx.Module):
    w: jax.Array
    kernel: object


def tied():
    return Net(W, st.View(jnp.transpose, W))


# --- a view is no array -----------------------------------------------------------------------------------------------

NAMES = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "lt", "le", "gt", "ge", "eq", "ne")
ARITHMETIC = [getattr(operator, name) for name in NAMES]
FUNCTIONS = {
    **{function.__name__: lambda view, function=function: function(view, W) for function in ARITHMETIC},
    **{f"r{function.__name__}": lambda view, function=function: function(W, view) for function in ARITHMETIC},
    "numpy array on the left": lambda view: np.ones(2) + view,
    "== 0": lambda view: view == 0,
    "negative": operator.neg,
    "bool": bool,
    "len": len,
    "iteration": list,
    "contains": lambda view: 1.0 in view,
    "index": lambda view: view[0],
    "slice": lambda view: view[:, 0],
    "shape": lambda view: view.shape,
    "dtype": lambda view: view.dtype,
    "T": lambda view: view.T,
    "value": lambda view: view.value,
    "sum": lambda view: view.sum(),
    "jnp.sin": jnp.sin,
    "jnp.asarray": jnp.asarray,
    "jnp.dot": lambda view: jnp.dot(view, W),
    "jnp.shape": jnp.shape,
    "np.asarray": np.asarray,
    "np.sum": np.sum,
    "relu": jax.nn.relu,
    "float": float,
    "vmap": jax.vmap(lambda k: k + 1),
    "st.vmap": st.vmap(lambda k: k + 1),
    "jit": jax.jit(lambda k: k + 1),
    "st.jit": st.jit(lambda k: k + 1),
    "grad": jax.grad(lambda k: (k**2).sum()),
    "st.grad": st.grad(lambda k: (k**2).sum()),
    "scan over it": lambda view: jax.lax.scan(lambda c, k: (c, k + 1), 0, view),
    "st.scan over it": lambda view: st.scan(lambda c, k: (c, k + 1), 0, view),
    "lax.map": lambda view: jax.lax.map(lambda k: k + 1, view),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_use_as_an_array_is_refused_with_the_call_that_opens_it(name):
    with pytest.raises(ViewError, match="is no array") as caught:
        FUNCTIONS[name](st.View(jnp.transpose, W))
    assert "unwrap" in str(caught.value) or "view[...]" in str(caught.value)
    assert isinstance(caught.value, TypeError)


def test_a_view_is_no_instance_and_has_no_attribute_of_an_array():
    view = st.View(jnp.transpose, W)
    assert not isinstance(view, jax.Array)
    assert not isinstance(view, np.ndarray)
    assert not hasattr(view, "shape")
    assert not callable(view)
    assert view == view  # noqa: PLR0124
    assert view != st.View(jnp.transpose, W)
    assert len({view, view}) == 1


@pytest.mark.parametrize("transform", [st.jit, st.grad, st.vmap, st.checkpoint])
def test_errors_of_lax_get_a_note(transform):
    with pytest.raises((TypeError, ValueError)) as caught:
        transform(lambda net: jax.lax.sin(net.kernel).sum())(tied())
    (note,) = [note for note in caught.value.__notes__ if "view" in note]
    assert "`net.kernel` is a view" in note
    assert "sharedtree.unwrap(model)" in note


def test_other_errors_get_none():
    with pytest.raises(ValueError, match="mine") as caught:
        st.jit(lambda net: (_ for _ in ()).throw(ValueError("mine")))(tied())
    assert not any("view" in note for note in getattr(caught.value, "__notes__", ()))


def of_nnx():
    class Tied(nnx.Module):
        def __init__(self):
            self.embed = nnx.Param(W)
            self.head = st.View(jnp.transpose, self.embed)

    return Tied()


def test_a_view_may_be_set_in_a_module_of_nnx():
    model = of_nnx()
    np.testing.assert_array_equal(model.head[...], W.T)
    np.testing.assert_array_equal(model.head.get_value(), W.T)
    assert bool(model.head)
    gradient = nnx.grad(lambda model: (model.head[...] ** 2).sum())(model)
    np.testing.assert_array_equal(jax.tree.leaves(gradient)[0], 2 * W)


SETTERS = {
    "value": lambda view: setattr(view, "value", W.T),
    "[...]": lambda view: operator.setitem(view, ..., W.T),
    "set_value": lambda view: view.set_value(W.T),
    "+=": lambda view: operator.setitem(view, ..., view[...] + 1),
    "of": lambda view: setattr(view, "of", ()),
    "replace_boxed": lambda view: view.replace_boxed(W.T),
}


@pytest.mark.parametrize("name", SETTERS)
def test_assigning_to_a_view_says_which_array_to_set(name):
    for view in (st.View(jnp.transpose, W), of_nnx().head):
        with pytest.raises(ViewError, match="has no value of its own") as caught:
            SETTERS[name](view)
        assert ".of[0]" in str(caught.value)


def test_nnx_is_told_of_the_brackets():
    with pytest.raises(ViewError, match=r"view\[\.\.\.\]"):
        _ = of_nnx().head.value


# --- what a view is made of -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments", [(), (W,), (jnp.transpose,), (jnp.transpose, 1.0), (jnp.transpose, tied()), (3, W)]
)
def test_a_view_is_made_of_a_function_and_arrays(arguments):
    with pytest.raises(TypeError):
        st.View(*arguments)


def tie(tree, *keys, through=jnp.transpose):
    return st.tie(tree, lambda tree: [tree[key] for key in keys], through=through)


def test_shape_and_dtype_must_be_those_of_the_target():
    with pytest.raises(
        SharingMismatchError, match=r"returns float32\[2, 3\], and `\['b'\]` is float32\[3, 2\]"
    ) as caught:
        tie({"a": W, "b": W.T}, "a", "b", through=jnp.abs)
    assert caught.value.paths == ("['a']", "['b']")
    with pytest.raises(SharingMismatchError, match=r"astype\(jnp.bfloat16\)"):
        tie({"a": W, "b": W.T.astype(jnp.bfloat16)}, "a", "b")
    with pytest.raises(SharingMismatchError, match="that returns"):
        tie({"a": W, "b": W.T}, "a", "b", through=lambda w: (w, w))


def test_an_error_of_the_function_says_where_it_comes_from():
    with pytest.raises(TypeError) as caught:
        tie({"a": W, "b": W.T}, "a", "b", through=jnp.dot)
    assert any("called `dot`" in note for note in caught.value.__notes__)


def test_stacked_layers():
    stacked = jnp.arange(12.0).reshape(2, 2, 3)
    through = functools.partial(jnp.swapaxes, axis1=-1, axis2=-2)
    model = tie({"a": stacked, "b": jnp.zeros((2, 3, 2))}, "a", "b", through=through)
    assert str(model["b"]) == "View(swapaxes[axis1=-1, axis2=-2], float32[2, 2, 3])"
    np.testing.assert_array_equal(st.unwrap(model)["b"], stacked.swapaxes(1, 2))
    # Inside a scan over the layers, the function gets one layer.
    _, out = st.scan(lambda c, m: (c, st.unwrap(m)["b"]), 0, model, policy=CONTAINERS)
    np.testing.assert_array_equal(out, stacked.swapaxes(1, 2))


def test_an_array_that_is_computed_from_itself_is_refused():
    square = {"a": jnp.eye(2), "b": jnp.ones((2, 2))}
    with pytest.raises(SharingMismatchError, match="computed from itself"):
        tie(square, "a", "a")
    with pytest.raises(SharingMismatchError, match=r"`\['b'\]` is computed from `\['a'\]`"):
        tie(tie(square, "a", "b"), "b", "a")


def test_what_was_tied_becomes_one_view_at_all_of_its_places():
    kernel = jnp.zeros((3, 2))
    model = tie({"a": W, "b": kernel, "c": [kernel]}, "a", "b")
    assert model["b"] is model["c"][0]
    assert model["b"].of[0] is W


def test_a_view_of_a_view_is_made_by_tying_twice():
    model = tie(tie({"a": W, "b": W.T, "c": W.T}, "a", "b"), "b", "c", through=jnp.negative)
    assert model["c"].of[0] is model["b"]
    np.testing.assert_array_equal(st.unwrap(model)["c"], -W.T)


def test_one_place_has_one_value():
    model = tie({"a": W, "b": W.T}, "a", "b")
    with pytest.raises(SharingMismatchError, match="is a view already"):
        tie(model, "a", "b")


def test_only_arrays_are_tied_through_a_function():
    layer = eqx.nn.Linear(2, 3, key=jax.random.key(0))
    with pytest.raises(SharingMismatchError, match="needs arrays"):
        tie({"a": layer, "b": W}, "a", "b")
    with pytest.raises(SharingMismatchError, match="needs arrays"):
        st.tie({"a": layer, "b": W}, lambda m: (m["a"].weight, m["a"]), through=jnp.transpose)
    with pytest.raises(SharingMismatchError, match="1 node"):
        st.tie({"a": W}, lambda m: (m["a"],), through=jnp.transpose)
    with pytest.raises(TypeError, match="`through` is a function"):
        tie({"a": W, "b": W.T}, "a", "b", through="transpose")


def test_variables_of_nnx_are_named_themselves():
    model = nnx.Dict(a=nnx.Param(W), b=nnx.Param(W.T))
    with pytest.raises(SharingMismatchError, match="through=through"):
        st.tie(model, lambda m: (m.a.get_raw_value(), m.b.get_raw_value()), through=jnp.transpose)


class OfLinen(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        return nn.Dense(5, name="head")(nn.Embed(5, 3, name="embed")(tokens))


class AroundLinen(nnx.Module):
    def __init__(self, rngs):
        self.tokens = nnx.Embed(5, 3, rngs=rngs)
        self.wrapped = nnx.bridge.lazy_init(nnx.bridge.ToNNX(OfLinen(), rngs), jnp.array([1]))
        self.layer = nnx.Linear(3, 5, rngs=rngs)


def test_a_parameter_of_linen_in_a_module_of_nnx_is_refused():
    model = AroundLinen(nnx.Rngs(0))
    with pytest.raises(SharingMismatchError, match=r"`\.wrapped\.head\['kernel'\]` cannot be a view") as caught:
        st.tie(model, lambda m: (m.wrapped.embed["embedding"], m.wrapped.head["kernel"]), through=jnp.transpose)
    assert "lambda p: (p['embed']['embedding'], p['head']['kernel'])" in str(caught.value)
    assert "state = model.wrapped.to_nnx__module, nnx.state(model.wrapped, nnx.Param)" in str(caught.value)
    with pytest.raises(SharingMismatchError, match="by a module of NNX"):
        st.tie(model, lambda m: (m.tokens.embedding, m.wrapped.head["kernel"]), through=jnp.transpose)
    # A layer of NNX may be computed from a parameter of Linen.
    tied = st.tie(model, lambda m: (m.wrapped.embed["embedding"], m.layer.kernel), through=jnp.transpose)
    np.testing.assert_array_equal(tied.layer.kernel[...], tied.wrapped.embed["embedding"][...].T)
    assert tied.wrapped(jnp.array([1])).shape == (1, 5)


def test_hijax_variables_are_refused():
    """Flax 0.12.12 itself cannot differentiate a function of a module with one of them at two paths."""
    model = nnx.Dict(a=nnx.Param(W, hijax=True), b=nnx.Param(W.T), c=nnx.Param(W))
    for where, through in ((lambda m: (m.a, m.b), jnp.transpose), (lambda m: (m.b, m.a), jnp.transpose)):
        with pytest.raises(SharingMismatchError, match="hijax") as caught:
            st.tie(model, where, through=through)
        assert caught.value.paths == (".a",)
    with pytest.raises(SharingMismatchError, match="hijax"):
        st.tie(model, lambda m: (m.c, m.a))
    with pytest.raises(TypeError, match="hijax"):
        st.View(jnp.transpose, model.a)


# --- functions --------------------------------------------------------------------------------------------------------


def test_a_lambda_works_and_is_refused_by_save_with_its_place():
    model = tie({"a": W, "b": W.T}, "a", "b", through=lambda w: w.T)
    np.testing.assert_array_equal(st.unwrap(model)["b"], W.T)
    with pytest.raises(st.errors.UnserialisableError, match="Move it to module level") as caught:
        st.to_bytes(model)
    assert caught.value.paths == ("['b']<aux>",)


class Method:
    def transposed(self, w):
        return w.T


def test_save_refuses_what_is_no_named_function():
    for through in (Method().transposed, eqx.nn.Lambda(jnp.transpose)):
        with pytest.raises(st.errors.UnserialisableError):
            st.to_bytes({"a": W, "b": st.View(through, W)})


def test_a_function_that_is_made_anew_on_each_call_retraces_and_says_so():
    call = st.jit(lambda net: st.unwrap(net).kernel)

    def call_anew():
        for _ in range(4):
            call(Net(W, st.View(lambda w: w.T, W)))

    with pytest.warns(st.RetraceWarning, match=r"net\.kernel"):
        call_anew()


def test_a_partial_that_is_made_anew_does_not():
    call = st.jit(lambda net: st.unwrap(net).kernel)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(4):
            call(Net(W, st.View(functools.partial(jnp.swapaxes, axis1=0, axis2=1), W)))


# --- gradients that are split -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("grad", [jax.grad, eqx.filter_grad, lambda loss: jax.jit(jax.grad(loss))])
def test_a_gradient_of_vanilla_transforms_is_refused_by_what_comes_next(grad):
    loss = lambda net: (st.unwrap(net).kernel @ net.w).sum()
    gradient = grad(loss)(tied())
    tx = st.optimizer(optax.sgd(0.1))
    with pytest.raises(SharingMismatchError, match=r"`\.w` and `\.kernel\.of\[0\]`"):
        tx.update(gradient, tx.init(tied()), tied())
    with pytest.raises(SharingMismatchError, match=r"`\.w` and `\.kernel\.of\[0\]`"):
        st.apply_updates(tied(), gradient)


def test_a_state_from_before_the_tie_is_refused():
    loose = Net(W, W.T)
    net = st.tie(loose, lambda net: (net.w, net.kernel), through=jnp.transpose)
    gradient = st.tree.map(jnp.ones_like, net)
    for tx in (optax.adam(0.1), optax.chain(optax.clip(1.0), optax.masked(optax.adam(0.1), Net(True, True)))):
        tx = st.optimizer(tx)
        with pytest.raises(SharingMismatchError, match="`.kernel` is a view") as caught:
            tx.update(gradient, tx.init(loose), net)
        assert caught.value.paths == (".kernel",)
        tx.update(gradient, tx.init(net), net)
    # An error about something else stays.
    tx = st.optimizer(optax.adam(0.1))
    with pytest.raises(ValueError, match="incompatible|shape"):
        tx.update(st.tree.map(lambda x: jnp.ones(7), net), tx.init(net), net)


def test_a_tie_that_a_function_loses_is_named():
    with pytest.warns(st.UntiedWarning, match=r"`net\.w` and `net\.kernel\.of\[0\]`"):
        st.jit(lambda net: jax.tree.map(lambda x: x + 1, net))(tied())


def test_an_opened_model_has_lost_no_tie():
    opened = st.jit(lambda net: st.unwrap(net))(tied())
    np.testing.assert_array_equal(opened.kernel, W.T)


def test_containers_without_the_policy_are_warned_of():
    params = tie({"a": W, "b": W.T}, "a", "b")
    by_hand = {"a": W, "b": st.View(jnp.transpose, W)}
    for tree in (params, by_hand):
        with pytest.warns(st.UntiedWarning, match=r"\['a'\]` and `p\['b'\]\.of\[0\]` are one array"):
            st.grad(lambda p: (st.unwrap(p)["b"] @ p["a"]).sum())(tree)


def test_a_view_without_arrays_is_refused():
    for tree in (eqx.filter(tied(), lambda _: False), jax.tree.map(lambda _: 1.0, tied())):
        with pytest.raises(ViewError, match="cannot be computed"):
            st.unwrap(tree)


@pytest.mark.parametrize("function", [jnp.stack, lambda arrays: arrays[0], lambda arrays: None])
def test_one_object_in_the_place_of_all_sources_is_refused(function):
    """A map over tuples reaches the tuple of sources. An array in its place would be read row by row."""
    is_tuple = lambda node: isinstance(node, tuple)
    model = {"w": jnp.ones((2, 3)), "v": st.View(jnp.add, jnp.ones((2, 3)), jnp.ones((2, 3)))}
    mapped = jax.tree.map(lambda part: function(part) if is_tuple(part) else part, model, is_leaf=is_tuple)
    with pytest.raises(ViewError, match="in the place of its arrays"):
        st.unwrap(mapped)


def test_norm_and_cast_take_the_source_once():
    model = tied()
    np.testing.assert_allclose(st.tree.norm(model), jnp.linalg.norm(W), rtol=1e-6)
    cast = st.tree.cast(model, jnp.bfloat16)
    assert cast.w is cast.kernel.of[0]
    assert cast.w.dtype == jnp.bfloat16


# --- files of others --------------------------------------------------------------------------------------------------


def test_flax_serialization_is_told_what_to_use():
    params = tie({"a": W, "b": W.T}, "a", "b")
    with pytest.raises(ViewError, match=r"flax\.serialization\.to_bytes\(sharedtree\.unwrap\(params\)\)"):
        flax.serialization.to_bytes(params)
    again = flax.serialization.msgpack_restore(flax.serialization.to_bytes(st.unwrap(params)))
    np.testing.assert_array_equal(again["b"], W.T)


# --- imports ----------------------------------------------------------------------------------------------------------


def test_views_import_no_flax_and_know_it_when_it_comes_later(python, tmp_path):
    code = program("views_without_flax")
    python(tmp_path, "-c", code)


# --- a view of several arrays, and of views ---------------------------------------------------------------------------


def weight_norm(g, v):
    return g * v / jnp.linalg.norm(v, axis=0)


def low_rank(w, a, b):
    return jax.lax.stop_gradient(w) + a @ b


def in_bfloat16(w):
    return w.astype(jnp.bfloat16)


def test_weight_norm():
    g, v = jnp.array([2.0, 3.0, 4.0]), W + 1
    net = Net(jnp.ones(()), st.View(weight_norm, g, v))
    gradient = st.grad(lambda net: (st.unwrap(net).kernel ** 3).sum())(net)
    expected = jax.grad(lambda g, v: (weight_norm(g, v) ** 3).sum(), argnums=(0, 1))(g, v)
    for leaf, answer in zip(gradient.kernel.of, expected, strict=True):
        np.testing.assert_allclose(leaf, answer, rtol=1e-5)
    assert [path for path, _ in st.tree.leaves_with_path(net)][1] == (
        jax.tree_util.GetAttrKey("kernel"),
        jax.tree_util.GetAttrKey("of"),
        jax.tree_util.SequenceKey(0),
    )


def test_low_rank_with_a_shared_base():
    a, b = jnp.ones((2, 1)), jnp.ones((1, 3))
    net = Net(W, st.View(low_rank, W, a, b))
    gradient = st.grad(lambda net: (st.unwrap(net).kernel * net.w).sum())(net)
    expected = jax.grad(lambda w, a, b: (low_rank(w, a, b) * w).sum(), argnums=(0, 1, 2))(W, a, b)
    assert gradient.w is gradient.kernel.of[0]
    for leaf, answer in zip(gradient.kernel.of, expected, strict=True):
        np.testing.assert_allclose(leaf, answer, rtol=1e-5)


def test_a_master_copy():
    net = Net(W, st.View(in_bfloat16, W))
    gradient = st.grad(lambda net: (st.unwrap(net).kernel ** 2).sum().astype(jnp.float32))(net)
    assert gradient.w.dtype == jnp.float32
    np.testing.assert_allclose(gradient.w, 2 * W)


def test_a_view_of_a_view_and_one_view_at_two_places():
    inner = st.View(jnp.transpose, W)
    outer = st.View(in_bfloat16, inner)
    model = {"w": W, "inner": inner, "outer": outer, "again": outer}
    opened = st.unwrap(model)
    assert opened["outer"] is opened["again"]
    np.testing.assert_array_equal(opened["outer"], W.T.astype(jnp.bfloat16))
    np.testing.assert_array_equal(outer[...], opened["outer"])
    dag = st.Dag(model)
    gradient = jax.grad(lambda dag: st.unwrap(dag.tree)["outer"].sum().astype(jnp.float32))(dag).tree
    np.testing.assert_array_equal(gradient["w"], jnp.ones((2, 3)))
    assert st.from_bytes(st.to_bytes({"w": W, "b": st.View(jnp.abs, inner)}))["b"].of[0].of[0].shape == (2, 3)


def test_a_long_chain_of_views_needs_no_recursion():
    view = W
    for _ in range(3000):
        view = st.View(jnp.asarray, view)
    assert view[...] is W
    assert st.unwrap([view])[0] is W


# --- opening ----------------------------------------------------------------------------------------------------------


def test_unwrap_makes_anew_only_what_is_above_a_view():
    layer = eqx.nn.Linear(2, 3, key=jax.random.key(0))
    model = {"layers": [layer, layer], "head": tied()}
    opened = st.unwrap(model)
    assert opened["layers"] is model["layers"]
    assert opened["head"].w is W
    assert type(opened["head"]) is Net
    assert st.unwrap(model["layers"]) is model["layers"]
    assert st.unwrap(model["head"].kernel).shape == (3, 2)


def test_state_beside_a_view_is_written_back():
    class Counting(nnx.Module):
        def __init__(self):
            self.embed = nnx.Param(W)
            self.head = st.View(jnp.transpose, self.embed)
            self.count = nnx.BatchStat(jnp.zeros(()))

    model = Counting()

    @st.jit(in_place=True)
    def step(model):
        opened = st.unwrap(model)
        opened.count[...] += 1
        return opened.head.sum()

    for _ in range(2):
        step(model)
    assert model.count[...] == 2
    assert type(model.head) is st.View


def test_listing_and_printing_call_no_function():
    def through(w):
        raise AssertionError("called")

    model = Net(W, st.View(through, W))
    assert len(st.ties(model)) == 1
    assert "through" in repr(model)
    st.summary(model)
    st.count_parameters(model)
    st.tree.map(lambda x: x, model)
    st.copy(model)
    st.untie(model)


def test_towers_of_views_are_printed_and_opened_in_no_time():
    view = st.View(jnp.add, W, W)
    for _ in range(200):
        view = st.View(jnp.maximum, view, view)
    model = {"w": W, "view": view}
    assert repr(view) == "View(maximum, View(maximum, ...), View(maximum, ...))"
    assert len(str(st.summary(model))) < 10**6
    st.ties(model)
    st.explain(st.jit(lambda model: 0, policy=CONTAINERS), model)
    np.testing.assert_array_equal(st.unwrap(model)["view"], 2 * W)
    np.testing.assert_array_equal(view[...], 2 * W)
    assert st.from_bytes(st.to_bytes(model))["view"].of[0] is not None


def test_many_sources_and_arguments_are_named_in_part():
    view = st.View(functools.partial(jnp.add, *range(20)), *[W] * 20)
    model = [W, view]
    (text,) = st.ties(model)[0].views
    assert text.endswith("([0], [0], [0], [0], [0], [0], [0], [0], ...)")
    assert "7, ...]" in text
