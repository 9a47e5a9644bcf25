"""One scenario for each message about views that offers code."""

import warnings

import equinox as eqx
import flax.linen as nn
import flax.serialization
import jax
import jax.numpy as jnp
import optax
from flax import nnx

import sharedtree as st
from sharedtree.errors import InconsistentSharingError, SharingMismatchError, ViewError
from sharedtree.linen import TrainState
from tests.fix_scenarios import again, of
from tests.fixes import scenarios
from tests.models import Leaf, Net

W = jnp.arange(4.0).reshape(2, 2)
WIDE = jnp.arange(6.0).reshape(2, 3)


def net():
    return Net(Leaf(W), Leaf(W + 1))


def with_view():
    return tie(net(), jnp.transpose)


def tie(model, through):
    return st.tie(model, lambda m: (m.embed.weight, m.head.weight), through=through)


class Kernel(eqx.Module):
    kernel: object


def variable_with_view():
    embedding = nnx.Param(W)
    return {"view": st.View(jnp.transpose, embedding), "value": W + 5}


class Linen(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        return nn.Dense(5, name="head")(nn.Embed(5, 3, name="embed")(tokens))


def linen_in_nnx():
    return nnx.bridge.lazy_init(nnx.bridge.ToNNX(Linen(), nnx.Rngs(0)), jnp.array([1, 2]))


class Tokens(nnx.Module):
    def __init__(self):
        self.tokens, self.bias = nnx.Param(W), nnx.Param(W)
        self.head = nnx.Dict(bias=nnx.Param(W), kernel=st.View(jnp.transpose, self.tokens))


def asked_by_nnx(wrt):
    loss = lambda model: (model.head.kernel[...] * model.head.bias[...]).sum()
    call = lambda model, wrt: st.grad(loss, wrt=wrt)(model)

    def after(model, wrt):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            call(model, wrt)

    return of(call, st.UntiedWarning, after, model=Tokens(), tx=optax.sgd(0.1), wrt=wrt, nnx=nnx)


def product(model):
    return model.head.weight @ model.embed.weight


def params():
    return st.tie({"a": WIDE, "b": WIDE.T}, lambda p: (p["a"], p["b"]), through=jnp.transpose)


def has_shape(shape):
    def check(view):
        assert view[...].shape == shape

    return check


scenarios(
    a_view_of_what_is_no_function=lambda: of(lambda: st.View(W, W), TypeError, has_shape((2, 2)), array=W),
    a_view_of_no_array=lambda: of(lambda: st.View(jnp.transpose), TypeError, has_shape((2, 2)), array=W),
    a_view_of_a_module=lambda: of(
        lambda model: st.View(jnp.transpose, model.embed), TypeError, has_shape((2, 2)), model=net()
    ),
    a_view_that_is_multiplied=lambda: again(product, ViewError, model=with_view()),
    a_view_of_a_variable_that_is_multiplied=lambda: of(
        lambda view: view + 1,
        ViewError,
        lambda array: array + 1,
        model=with_view(),
        **variable_with_view(),
    ),
    a_view_in_lax=lambda: again(st.jit(lambda model: jax.lax.sin(model.head.weight)), ValueError, model=with_view()),
    a_view_with_an_index=lambda: of(
        lambda view: view[0], ViewError, lambda array: array[0], view=st.View(jnp.transpose, W)
    ),
    a_view_of_a_variable_that_is_set=lambda: of(
        lambda view, value: view.set_value(value),
        ViewError,
        lambda view, value: (view[...] == value.T).all() or 1 / 0,
        **variable_with_view(),
    ),
    a_view_that_is_set=lambda: of(
        lambda model, value: setattr(model.head.kernel, "value", value),
        ViewError,
        lambda model: (st.unwrap(model).head.kernel == 7).all() or 1 / 0,
        model=Net(Leaf(W), Kernel(st.View(jnp.transpose, W))),
        value=jnp.full((2, 2), 7.0),
    ),
    a_view_in_a_file_of_flax=lambda: of(
        lambda params: flax.serialization.to_bytes(params),
        ViewError,
        lambda data: len(data) or 1 / 0,
        params=params(),
        flax=flax,
    ),
    a_view_without_an_array=lambda: of(
        lambda tree: st.unwrap(tree), ViewError, lambda leaves: leaves, tree=eqx.filter(with_view(), lambda _: False)
    ),
    a_view_in_the_place_of_a_view=lambda: again(
        lambda model: tie(model, jnp.transpose), SharingMismatchError, model=with_view(), array=W + 1
    ),
    a_module_through_a_function=lambda: of(
        lambda model: st.tie(model, lambda m: (m.embed, m.head), through=jnp.transpose),
        SharingMismatchError,
        lambda model: st.unwrap(model),
        model=net(),
    ),
    an_array_through_no_function=lambda: of(
        lambda model: tie(model, "transpose"), TypeError, lambda model: st.unwrap(model), model=net()
    ),
    an_array_that_is_computed_from_itself=lambda: again(
        lambda model: tie(model, jnp.transpose), SharingMismatchError, model=Net(Leaf(W), Leaf(W))
    ),
    transposed_arrays=lambda: of(
        lambda model: st.tie(model, lambda m: (m.embed.weight, m.head.weight)),
        SharingMismatchError,
        lambda model: st.unwrap(model).head.weight.shape == (3, 2) or 1 / 0,
        model=Net(Leaf(WIDE), Leaf(WIDE.T)),
    ),
    transposed_variables=lambda: of(
        lambda model: st.tie(model, lambda m: (m.a, m.b)),
        SharingMismatchError,
        lambda model: model.b[...].shape == (3, 2) or 1 / 0,
        model=nnx.Dict(a=nnx.Param(WIDE), b=nnx.Param(WIDE.T)),
    ),
    a_view_of_another_dtype=lambda: again(
        tie,
        SharingMismatchError,
        model=Net(Leaf(W), Leaf(W.astype(jnp.bfloat16))),
        through=jnp.transpose,
        transpose=jnp.transpose,
    ),
    a_view_of_another_shape=lambda: again(
        tie, SharingMismatchError, model=Net(Leaf(WIDE), Leaf(WIDE.T)), through=jnp.abs
    ),
    labels_of_a_view_and_of_its_array=lambda: again(
        lambda model, param_labels: st.optimizer(
            optax.multi_transform({"train": optax.sgd(0.1), "freeze": optax.set_to_zero()}, param_labels)
        ).init(model),
        InconsistentSharingError,
        model=with_view(),
        param_labels=Net(Leaf("train"), Leaf("freeze")),
        rule=lambda path, leaf: "freeze" if "head" in jax.tree_util.keystr(path) else "train",
    ),
    booleans_of_a_view_and_of_its_array=lambda: again(
        lambda model, spec: st.tree.partition(model, spec),
        InconsistentSharingError,
        model=with_view(),
        spec=Net(Leaf(True), Leaf(st.View._unflatten(jnp.transpose, [(False,)]))),
        eqx=eqx,
    ),
    a_parameter_of_linen_in_a_module_of_nnx=lambda: of(
        lambda model, through, places: st.tie(model, places, through=through),
        SharingMismatchError,
        lambda out: out.shape == (2, 5) or 1 / 0,
        model=linen_in_nnx(),
        places=lambda m: (m.embed["embedding"], m.head["kernel"]),
        through=jnp.transpose,
        x=jnp.array([1, 2]),
        nnx=nnx,
    ),
    a_filter_that_nnx_asks_about_a_view=lambda: asked_by_nnx(lambda path, value: path[0] == "tokens"),
    a_filter_that_nnx_asks_about_a_view_alone=lambda: asked_by_nnx(lambda path, value: path[0] == "head"),
    a_state_from_before_the_tie=lambda: again(
        lambda optimizer, state, model: optimizer.update(st.tree.map(jnp.ones_like, model), state, model),
        SharingMismatchError,
        model=with_view(),
        optimizer=st.optimizer(optax.adam(0.1)),
        state=st.optimizer(optax.adam(0.1)).init(net()),
    ),
    a_training_state_from_before_the_tie=lambda: again(
        lambda state: state.apply_gradients(grads=st.tree.map(jnp.ones_like, state.params)),
        SharingMismatchError,
        state=TrainState.create(apply_fn=None, params={"a": WIDE, "b": WIDE.T}, tx=optax.adam(0.1)).replace(
            params=params()
        ),
    ),
    an_optimizer_of_nnx_from_before_the_tie=lambda: again(
        lambda model, optimizer: st.jit(
            lambda model, optimizer: optimizer.update(model, st.grad(lambda m: m.head.kernel[...].sum())(model)),
            in_place=True,
        )(model, optimizer),
        ValueError,
        model=Tokens(),
        optimizer=nnx.Optimizer(
            nnx.Dict(head=nnx.Dict(bias=nnx.Param(W), kernel=nnx.Param(W)), tokens=nnx.Param(W), bias=nnx.Param(W)),
            optax.adam(0.1),
            wrt=nnx.Param,
        ),
        tx=optax.adam(0.1),
        wrt=nnx.Param,
        nnx=nnx,
    ),
    a_hijax_variable=lambda: of(
        lambda value: st.tie([nnx.Param(value, hijax=True), nnx.Param(value)], lambda m: m),
        SharingMismatchError,
        lambda variable: st.tie([variable, nnx.Param(W)], lambda m: m),
        value=W,
        nnx=nnx,
    ),
    a_view_of_a_hijax_variable=lambda: of(
        lambda value: st.View(jnp.transpose, nnx.Param(value, hijax=True)),
        TypeError,
        lambda variable: st.View(jnp.transpose, variable),
        value=W,
        nnx=nnx,
    ),
)
