"""Transforms without an adapter, on a `Dag` in the model's place: values, gradients and ties, and how they are refused.

The oracle is the same transform in vanilla JAX on the one array of the model, or numbers worked out by hand. The models
have that array at three paths, two of them in a shared layer, so that a gradient of one path is a third of the whole.
"""

import functools
import pathlib
import re

import equinox as eqx
import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
import pytest

import sharedtree as st
from sharedtree.transforms._transforms_without_adapter import _DAG_FORMS
from tests.strategies import Mutable

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "transforms.md"
W = jnp.array([[1.0, 4.0], [9.0, 16.0]])


class Net(eqx.Module):
    layer: eqx.nn.Linear
    again: eqx.nn.Linear
    head: jax.Array
    activation: object

    def __init__(self, weight):
        layer = eqx.nn.Linear(2, 2, use_bias=False, key=jax.random.key(0))
        self.layer = self.again = eqx.tree_at(lambda layer: layer.weight, layer, weight)
        self.head, self.activation = weight, jnp.tanh


@functools.cache
def class_of_nnx():
    nnx = pytest.importorskip("flax.nnx")

    class Model(nnx.Module):
        def __init__(self, weight):
            self.layer = nnx.Linear(2, 2, use_bias=False, rngs=nnx.Rngs(0))
            self.layer.kernel = nnx.Param(weight)
            self.again = self.layer
            self.head = self.layer.kernel
            self.activation = jnp.tanh

    return Model


def of_nnx(weight):
    return class_of_nnx()(weight)


def of_module(weight):
    layer = Mutable(weight=weight)
    return Mutable(layer=layer, again=layer, head=weight, activation=jnp.tanh)


MAKERS = {"Equinox": Net, "NNX": of_nnx, "a registered class": of_module}


@pytest.fixture(params=MAKERS)
def make(request):
    return MAKERS[request.param]


def paths_of(model):
    """The array at each of its paths."""
    layers = [getattr(layer, "weight", None) for layer in (model.layer, model.again)]
    if layers[0] is None:
        return [model.layer.kernel[...], model.again.kernel[...], model.head[...]]
    return [*layers, model.head]


def cubed(dag):
    """The sum of w³, of whose gradient each path has a third."""
    first, second, third = paths_of(dag.tree)
    return (first * second * third).sum()


def assert_tied(dag, weight):
    """A model with the ties of those above, its activation, and this weight."""
    model = dag.tree
    assert model.layer is model.again
    assert len(jax.tree.leaves(dag)) == 1
    assert model.activation is jnp.tanh
    for found in paths_of(model):
        np.testing.assert_allclose(found, weight, rtol=1e-5)


ones = functools.partial(jax.tree.map, jnp.ones_like)


def divide(linear, value):
    return jax.tree.map(jnp.divide, value, linear(ones(value)))


def newton(f, guess):
    def step(_, guess):
        value, slope = jax.jvp(f, (guess,), (ones(guess),))
        return jax.tree.map(lambda w, value, slope: w - value / slope, guess, value, slope)

    return jax.lax.fori_loop(0, 25, step, guess)


def root_of(a, guess, *, has_aux=False):
    """√a, in the tree of the guess."""
    solve = (lambda f, guess: (newton(f, guess), guess)) if has_aux else newton
    residual = lambda tree: jax.tree.map(lambda w: w * w - a, tree)
    return jax.lax.custom_root(residual, guess, solve, divide, has_aux=has_aux)


@pytest.mark.sampled(every=2)
def test_a_root(make):
    dag = st.Dag(make(W))
    assert_tied(root_of(W, dag), [[1, 2], [3, 4]])
    solution, aux = root_of(W, dag, has_aux=True)
    assert_tied(solution, [[1, 2], [3, 4]])
    assert_tied(aux, W)
    ours = lambda a, guess: cubed(root_of(a, guess))
    vanilla = lambda a, guess: (root_of(a, guess) ** 3).sum()
    for way in (jax.grad, lambda f: jax.jit(jax.grad(f))):
        np.testing.assert_allclose(way(ours)(W, dag), way(vanilla)(W, W), rtol=1e-5)
    many = lambda f: jax.vmap(jax.grad(f), (0, None))
    both = jnp.stack([W, 2 * W])
    np.testing.assert_allclose(many(ours)(both, dag), many(vanilla)(both, W), rtol=1e-5)
    # Of a model that the function closes over, at all its paths: the root of w³ and its derivative, 1.5 √w.
    gradient = jax.grad(lambda dag: jax.tree.leaves(root_of(jnp.prod(jnp.stack(paths_of(dag.tree)), 0), dag))[0].sum())
    assert_tied(gradient(dag), 1.5 * jnp.sqrt(W))


@pytest.mark.parametrize("options", [{}, {"symmetric": True}, {"symmetric": True, "transpose_solve": None}])
def test_a_linear_system(make, options):
    dag = st.Dag(make(W))
    scale = jnp.array([[2.0, 4.0], [5.0, 8.0]])

    def solved(scale, b):
        matvec = lambda tree: jax.tree.map(lambda w: scale * w, tree)
        return jax.lax.custom_linear_solve(matvec, b, divide, **({"transpose_solve": divide} | options))

    assert_tied(solved(scale, dag), W / scale)
    assert_tied(jax.jit(solved)(scale, dag), W / scale)
    of_scale, of_b = jax.grad(lambda scale, dag: cubed(solved(scale, dag)), argnums=(0, 1))(scale, dag)
    vanilla = jax.grad(lambda scale, w: (solved(scale, w) ** 3).sum(), argnums=(0, 1))(scale, W)
    np.testing.assert_allclose(of_scale, vanilla[0], rtol=1e-5)
    assert_tied(of_b, vanilla[1])


def scaled(scale, dag):
    return jax.tree.map(lambda w: scale * w, dag)


def converted_by_jax(f, *args):
    converted, constants = jax.closure_convert(f, *args)
    return lambda *args: converted(*args, *constants)


CONVERTERS = {"JAX": converted_by_jax, "Equinox": eqx.filter_closure_convert}


@pytest.mark.parametrize("name", CONVERTERS)
def test_a_closure(make, name):
    convert, dag, scale = CONVERTERS[name], st.Dag(make(W)), jnp.array(2.0)
    # It closes over a model, or is given one.
    closing = lambda dag, x: convert(lambda x: x * cubed(dag), x)(x)
    given = lambda dag, x: cubed(convert(lambda dag: scaled(x, dag), dag)(dag))
    for ours, vanilla in ((closing, lambda w, x: x * (w**3).sum()), (given, lambda w, x: ((x * w) ** 3).sum())):
        for way in (lambda f: f, jax.jit):
            np.testing.assert_allclose(way(ours)(dag, scale), vanilla(W, scale), rtol=1e-6)
            of_dag, of_x = way(jax.grad(ours, argnums=(0, 1)))(dag, scale)
            want = jax.grad(vanilla, argnums=(0, 1))(W, scale)
            assert_tied(of_dag, want[0])
            np.testing.assert_allclose(of_x, want[1], rtol=1e-6)
    assert_tied(convert(lambda dag: scaled(scale, dag), dag)(st.Dag(make(3 * W))), 6 * W)


def test_a_converted_function_of_equinox_holds_the_weight_once(make):
    converted = (lambda dag: eqx.filter_closure_convert(lambda x: x * cubed(dag), jnp.array(1.0)))(st.Dag(make(W)))
    assert [leaf.shape for leaf in converted.consts] == [(2, 2)]
    np.testing.assert_allclose(eqx.filter_grad(lambda f: f(jnp.array(2.0)))(converted).consts[0], 6 * W**2)
    other = lambda: Mutable(weight=W)  # a model without the tie, which has no place
    with pytest.raises(ValueError, match="example arg"):
        eqx.filter_closure_convert(lambda dag, scale=W: scaled(scale, dag), st.Dag(make(W)))(st.Dag([other(), other()]))


def on_host(dag):
    assert dag.tree.layer is dag.tree.again
    assert dag.tree.activation is jnp.tanh
    return jax.tree.map(lambda w: 2 * np.asarray(w), dag)


def shapes_of(dag):
    return jax.eval_shape(lambda dag: dag, dag)


CALLBACKS = {
    "pure_callback": lambda f, dag: jax.pure_callback(f, shapes_of(dag), dag, vmap_method="sequential"),
    "io_callback": lambda f, dag: jax.experimental.io_callback(f, shapes_of(dag), dag),
    "filter_pure_callback": lambda f, dag: eqx.filter_pure_callback(f, dag, result_shape_dtypes=shapes_of(dag)),
}


@pytest.mark.parametrize("name", CALLBACKS)
def test_a_callback_with_a_result(make, name):
    call, dag = functools.partial(CALLBACKS[name], on_host), st.Dag(make(W))
    for way in (lambda f: f, jax.jit):
        assert_tied(way(call)(dag), 2 * W)
    made = jax.custom_vjp(call)
    made.defvjp(lambda dag: (made(dag), None), lambda _, d: (scaled(2.0, d),))
    assert_tied(jax.grad(lambda dag: cubed(made(dag)))(dag), jax.grad(lambda w: ((2 * w) ** 3).sum())(W))


def test_a_callback_under_vmap_and_scan(make):
    call = functools.partial(CALLBACKS["pure_callback"], on_host)
    dag = st.Dag(make(W))
    many = jax.vmap(call)(jax.tree.map(lambda w: jnp.stack([w, 3 * w]), dag))
    assert_tied(jax.tree.map(lambda w: w[1], many), 6 * W)
    assert_tied(jax.lax.scan(lambda dag, _: (call(dag), None), dag, length=3)[0], 8 * W)


def test_a_callback_without_a_result(make):
    seen = []

    def host(word, dag):
        seen.append((word, dag.tree.layer is dag.tree.again, np.asarray(paths_of(dag.tree)[2]).tolist()))

    jax.jit(lambda dag: jax.debug.callback(host, "traced", dag))(st.Dag(make(W)))
    jax.debug.callback(host, "eager", st.Dag(make(W)))
    jax.effects_barrier()
    assert sorted(seen) == [("eager", True, W.tolist()), ("traced", True, W.tolist())]


def test_a_callback_that_returns_another_number_of_arrays(caplog):
    dag = st.Dag(Net(W))
    with pytest.raises(Exception, match="(?i)number of outputs|outputs.*mismatch|mismatch"):
        jax.block_until_ready(jax.pure_callback(lambda dag: st.Dag(st.untie(dag.tree)), shapes_of(dag), dag))


def counters():
    nnx = pytest.importorskip("flax.nnx")

    class OfNNX(nnx.Module):
        def __init__(self):
            self.count = nnx.Variable(jnp.zeros(()))

        def __call__(self):
            self.count[...] = self.count[...] + 1
            return np.asarray(self.count[...])

    class OfModule(st.Module):
        def __init__(self):
            self.count = jnp.zeros(())

        def __call__(self):
            self.count = self.count + 1
            return np.asarray(self.count)

    return OfNNX(), OfModule()


@pytest.mark.parametrize("call", [jax.pure_callback, jax.experimental.io_callback])
def test_what_a_model_changes_on_the_host_is_lost(call):
    """In silence: warnings are errors here. What is returned is not lost."""
    shape = jax.ShapeDtypeStruct((), jnp.float32)
    for model in counters():
        for way in (lambda f: f, jax.jit):
            assert way(lambda dag: call(lambda dag: dag.tree(), shape, dag))(st.Dag(model)) == 1
        count = model.count if isinstance(model, st.Module) else model.count[...]
        assert count == 0


@pytest.mark.skipif(not hasattr(jax.custom_vjp, "defvjp_with_logs"), reason="this JAX has no such rules")
def test_rules_that_log(make):
    f = jax.custom_vjp(cubed)
    f.defvjp_with_logs(lambda dag: (f(dag), dag), lambda dag, y: ((jax.tree.map(lambda w: 6 * w * y, dag),), {"y": y}))
    value, pullback = jax.vjp(f, st.Dag(make(W)))
    (gradient,), logs = pullback.with_logs(2.0)
    np.testing.assert_allclose(value, (W**3).sum())
    assert logs["y"] == 2
    assert_tied(gradient, 12 * W)
    assert_tied(jax.grad(f)(st.Dag(make(W))), 6 * W)
    # In a function of a model, under a transform of ours.
    gradient = st.grad(lambda model: f(st.Dag(model)))(make(W))
    assert gradient.layer is gradient.again
    np.testing.assert_allclose(paths_of(gradient)[2], 6 * W)


REFUSED = {
    jax.lax.custom_root: "jax.lax.custom_root",
    jax.lax.custom_linear_solve: "jax.lax.custom_linear_solve",
    jax.closure_convert: "jax.closure_convert",
    eqx.filter_closure_convert: "equinox.filter_closure_convert",
    jax.pure_callback: "jax.pure_callback",
    jax.experimental.io_callback: "jax.experimental.io_callback",
    eqx.filter_pure_callback: "equinox.filter_pure_callback",
    jax.debug.callback: "jax.debug.callback",
}


def test_the_table_has_all_of_them():
    assert _DAG_FORMS.keys() == REFUSED.keys()
    section = PAGE.read_text(encoding="utf-8").partition("\n## Transforms that need no adapter\n")[2]
    missing = [name for name in REFUSED.values() if name.rpartition(".")[2].removeprefix("filter_") not in section]
    assert missing == []


WRAPPED = {
    "alone": st.preserve_identities,
    "with options": lambda transform: st.preserve_identities(transform, in_place=True),
    "with a policy": lambda transform: st.preserve_identities(transform, policy=st.Policy(containers=True)),
    "partial": lambda transform: st.preserve_identities(functools.partial(transform, has_aux=True)),
    "as the model of another": lambda transform: st.register_transform(lambda f: f, transform),
    "as the model of another with operands": lambda transform: st.register_transform(
        lambda f, x: f(x), transform, takes_operands=True
    ),
}


@pytest.mark.parametrize("wrap", WRAPPED.values(), ids=WRAPPED)
@pytest.mark.parametrize("transform", REFUSED, ids=REFUSED.values())
def test_it_is_refused_when_it_is_wrapped(transform, wrap):
    name = re.escape(REFUSED[transform])
    with pytest.raises(TypeError, match=rf"does not wrap `{name}`(.|\n)*“Transforms that need no adapter”(.|\n)*:\n"):
        wrap(transform)


@pytest.mark.parametrize("transform", [eqx.filter_custom_vjp, eqx.filter_custom_jvp, eqx.filter_pmap])
def test_what_equinox_has_of_its_own_is_refused_then_too(transform):
    for wrap in WRAPPED.values():
        with pytest.raises(TypeError, match="whose own rules"):
            wrap(transform)


def test_an_adapter_of_ones_own_is_used():
    """In a copy of the transform, for the table is that of the process."""

    def solver(*args, **options):
        return jax.lax.custom_root(*args, **options)

    def adapter(call, args, **options):
        return "own"

    st.register_transform(solver, adapter, takes_operands=True)
    assert st.preserve_identities(solver)(lambda x: x, 1.0) == "own"


IN_PLACE = {
    "custom_vjp": lambda f, **o: st.custom_vjp(f, **o),
    "custom_jvp": lambda f, **o: st.custom_jvp(f, **o),
    "custom_gradient": lambda f, **o: st.preserve_identities(jax.custom_gradient)(f, **o),
    "custom_vmap": lambda f, **o: st.preserve_identities(jax.custom_batching.custom_vmap)(f, **o),
}


def with_rules(made):
    """The function under rules, whichever it takes."""
    for name, rules in (("defvjp", 2), ("defjvp", 1), ("def_vmap", 1)):
        if hasattr(made, name):
            getattr(made, name)(*[lambda *args: args] * rules)
            break
    return made


@pytest.mark.parametrize("name", IN_PLACE)
def test_rules_in_place_are_refused_before_anything_is_called(name):
    def never(model):
        raise AssertionError("it was called")

    model = Mutable(w=jnp.ones(2))
    f, plain = (with_rules(IN_PLACE[name](never, **options)) for options in ({"in_place": True}, {}))
    for call in (f, st.jit(lambda model: f(model))):
        with pytest.raises(ValueError, match=r"writes nothing back(.|\n)*in_place=False") as raised:
            call(model)
        assert "return the objects that it changes" in str(raised.value)
    with st.Context(st.Policy(in_place=True)), pytest.raises(ValueError, match="writes nothing back"):
        plain(model)


def test_what_a_function_with_rules_changes_is_returned():
    """As the message says; against the rule by hand."""

    @st.custom_vjp
    def f(model, x):
        return x * model.w, model.count + 1

    f.defvjp(
        lambda model, x: (f(model, x), (model, x)),
        lambda kept, y: (Mutable(w=kept[1] * y[0], count=None), 3 * (kept[0].w * y[0]).sum()),
    )

    def step(model, x):
        y, model.count = f(model, x)
        return y.sum()

    model = Mutable(w=jnp.array([1.0, 2.0]), count=jnp.array(0))
    value, gradient = st.value_and_grad(step, argnums=1, in_place=True)(model, 2.0)
    assert (value, gradient, model.count) == (6, 9, 1)


def test_state_that_rules_lose_is_said():
    """The outer transform writes back, the rules do not, and no fix says that they could."""
    nnx = pytest.importorskip("flax.nnx")

    class Counting(nnx.Module):
        def __init__(self):
            self.scale, self.count = nnx.Param(jnp.array(2.0)), nnx.Variable(jnp.zeros(()))

        def __call__(self, x):
            self.count[...] += 1
            return x * self.scale[...]

    f = st.custom_vjp(lambda model, x: model(x))
    f.defvjp(lambda model, x: (x * model.scale[...], x), lambda x, y: (None, y))
    with pytest.warns(st.errors.LostChangeWarning, match=r"count") as warned:
        st.jit(lambda model, x: f(model, x), in_place=True)(Counting(), 3.0)
    (message,) = [str(each.message) for each in warned]
    assert message.endswith(
        "If you do not need the change, say so:\n    inner = sharedtree.custom_vjp(f, in_place=False)"
    )


@pytest.mark.parametrize("option", ["with_logs", "remat", "with_accums"])
def test_options_of_custom_gradient_that_change_its_rules(option):
    wrap = lambda: st.preserve_identities(jax.custom_gradient)(lambda net: (net, lambda y: y), **{option: True})
    try:
        jax.custom_gradient(lambda x: (x, lambda y: y), **{option: True})
    except TypeError:
        with pytest.raises(TypeError):
            wrap()
        return
    with pytest.raises(TypeError, match=rf"(?s)`{option}`.*jax\.custom_gradient\(lambda dag: f\(dag\.tree\), {option}"):
        wrap()


@pytest.mark.skipif(not jax.custom_gradient.__kwdefaults__, reason="this JAX has no options of it")
def test_options_of_custom_gradient_that_are_off_change_nothing():
    f = st.preserve_identities(jax.custom_gradient)(lambda x: (x * 2, lambda y: 5 * y), with_logs=False)
    assert jax.grad(f)(1.0) == 5
