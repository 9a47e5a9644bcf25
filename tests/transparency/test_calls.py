"""How a wrapped function is called: signatures, exceptions, nesting, and without jit."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sharedtree as st
from tests.transparency.outcome import (
    FILTERED,
    TRANSFORMS,
    Data,
    Model,
    Raised,
    Registered,
    Returned,
    of,
    outcome,
    vec,
)

GRADS = (jax.grad, jax.value_and_grad, eqx.filter_grad, eqx.filter_value_and_grad)
BOTH = [pytest.param(plain, filtered, id=plain.__name__) for plain, filtered in FILTERED.items()]
EACH = [pytest.param(transform, id=name) for name, transform in TRANSFORMS.items() if "value_and" not in name]
ENCLOSED = [pytest.param(lambda x: x, id="bare"), pytest.param(Registered, id="registered")]


# --- ways to call ------------------------------------------------------------------------------------------------


def with_default(x, y=2.0):
    return jnp.sum(of(x) * of(y))


def variadic(x, *rest, **more):
    return jnp.sum(of(x)) + sum(jnp.sum(of(v)) * (i + 1) for i, v in enumerate([*rest, *more.values()]))


def keyword_only(x, *, y, z=1.0):
    return jnp.sum(of(x) * of(y) * z)


def positional_only(x, y, /):
    return jnp.sum(of(x) - of(y))


CALLS = {
    "default": (with_default, 1, {}),
    "default given": (with_default, 2, {}),
    "default given by name": (with_default, 1, {"y": 1}),
    "all by name": (with_default, 0, {"y": 1, "x": 2}),
    "variadic": (variadic, 3, {}),
    "variadic by name": (variadic, 2, {"z": 1, "b": 2, "a": 3}),
    "keyword only": (keyword_only, 1, {"y": 1}),
    "keyword only missing": (keyword_only, 1, {}),
    "positional only": (positional_only, 2, {}),
    "positional only by name": (positional_only, 1, {"y": 1}),
    "unknown name": (with_default, 1, {"q": 1}),
    "too many": (with_default, 3, {}),
    "none": (with_default, 0, {}),
    "partial": (functools.partial(keyword_only, y=3.0), 1, {}),
    "partial of positions": (functools.partial(variadic, 1.0, 2.0), 2, {"k": 1}),
    "Partial": (jax.tree_util.Partial(keyword_only, y=vec()), 1, {}),
    "lambda": (lambda *a: sum(jnp.sum(of(x)) for x in a), 2, {}),
    "bound method": (Model(vec()).__call__, 1, {}),
    "wrapped": (functools.wraps(with_default)(lambda *a, **k: with_default(*a, **k)), 1, {"y": 1}),
}


WRONG = ("keyword only missing", "positional only by name", "unknown name", "too many", "none")


@pytest.mark.parametrize("enclose", [*ENCLOSED, pytest.param(Model, id="equinox")])
@pytest.mark.parametrize("transform", EACH)
@pytest.mark.parametrize("name", CALLS)
def test_ways_to_call(name, transform, enclose):
    f, count, named = CALLS[name]
    if name == "bound method":  # whose module is closed over; it multiplies by what it is given
        enclose = lambda x: x

    def call(t, enclose):
        return t(f)(*[enclose(vec() + i) for i in range(count)], **{n: enclose(vec() * i) for n, i in named.items()})

    # A wrong number of arguments is reported as the transform itself does, whatever the arguments are.
    oracle = FILTERED.get(transform, transform) if enclose is Model and not named else transform
    want = outcome(lambda: call(transform, lambda x: x)) if name in WRONG else outcome(lambda: call(oracle, enclose))
    assert (type(want) is Raised) or name not in WRONG
    assert outcome(lambda: call(st.preserve_identities(transform), enclose)) == want


@pytest.mark.parametrize(("transform", "filtered"), BOTH)
def test_methods(transform, filtered):
    def make(wrap):
        class Layer(eqx.Module):
            weight: jax.Array

            @wrap
            def __call__(self, x):
                return jnp.sum(self.weight * x)

        return Layer(vec())

    want = outcome(lambda: jax.tree.leaves(make(filtered)(vec())))
    assert type(want) is Returned
    assert outcome(lambda: jax.tree.leaves(make(st.preserve_identities(transform))(vec()))) == want
    assert outcome(lambda: jax.tree.leaves(make(st.preserve_identities(filtered))(vec()))) == want


@pytest.mark.parametrize("transform", FILTERED.values())
def test_a_module_as_the_function(transform):
    for make in (lambda: Model(vec()), lambda: eqx.nn.Linear(3, "scalar", key=jax.random.key(0))):
        want = outcome(lambda: transform(make())(vec()))
        assert outcome(lambda: st.preserve_identities(transform)(make())(vec())) == want


# --- exceptions --------------------------------------------------------------------------------------------------


class OwnError(Exception):
    pass


@pytest.mark.parametrize("enclose", [*ENCLOSED, pytest.param(Model, id="equinox")])
@pytest.mark.parametrize("transform", EACH)
def test_the_functions_own_exception_arrives_as_it_is_and_the_next_call_works(transform, enclose):
    error, fails = OwnError("on purpose", 7), [True]

    def f(x):
        if fails[0]:
            raise error
        return jnp.sum(of(x))

    wrapped = st.preserve_identities(transform)(f)
    for _ in range(2):
        with pytest.raises(OwnError) as caught:
            wrapped(enclose(vec()))
        assert caught.value is error
    fails[0] = False
    plain = FILTERED.get(transform, transform) if enclose is Model else transform
    assert outcome(lambda: wrapped(enclose(vec()))) == outcome(lambda: plain(f)(enclose(vec())))


# --- nesting -----------------------------------------------------------------------------------------------------


def loss(x, y):
    return jnp.sum(jnp.sin(of(x)) * of(y) ** 2)


def nests(t):
    """Nests of transforms, made with `t(transform)` in place of each transform."""
    jit, grad, vmap, checkpoint = t(jax.jit), t(jax.grad), t(jax.vmap), t(jax.checkpoint)
    value_and_grad = t(jax.value_and_grad)
    return {
        "jit of grad": jit(grad(loss)),
        "grad of jit": grad(jit(loss)),
        "vmap of grad": vmap(grad(loss)),
        "jit of vmap": jit(vmap(loss)),
        "vmap of jit": vmap(jit(loss)),
        "grad of checkpoint": grad(checkpoint(loss)),
        "jit of grad of checkpoint of jit": jit(grad(checkpoint(jit(loss)))),
        "value_and_grad of vmap": value_and_grad(lambda x, y: jnp.sum(vmap(loss)(x, y))),
        "jit of jit": jit(jit(loss)),
        "checkpoint of vmap of jit": checkpoint(vmap(jit(loss))),
        "vmap of vmap": vmap(vmap(loss)),
        "grad of grad": grad(lambda x, y: of(jax.tree.map(jnp.sum, grad(loss)(x, y)))),
        "vanilla jit of grad": jax.jit(grad(loss)),
        "vanilla grad of jit": jax.grad(jit(loss)),
        "vanilla vmap of jit": jax.vmap(jit(loss)),
    }


@pytest.mark.parametrize("cls", [lambda x: x, Registered, Data, Model], ids=["bare", "hand", "dataclass", "equinox"])
@pytest.mark.parametrize("name", list(nests(lambda t: t)))
def test_nests(name, cls):
    x, y = jnp.arange(6.0).reshape(2, 3), jnp.ones((2, 3))
    call = lambda t: nests(t)[name](cls(x), cls(y))
    want = outcome(lambda: call(lambda t: t))
    assert type(want) is Returned
    assert outcome(lambda: call(st.preserve_identities)) == want


# --- without jit -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("enclose", [*ENCLOSED, pytest.param(Model, id="equinox")])
@pytest.mark.parametrize("transform", [case for case in EACH if case.values[0] is not jax.vmap])
@pytest.mark.parametrize("kind", ["array", "python", "numpy"])
def test_disable_jit(transform, enclose, kind):
    value = {"array": vec(), "python": 1.5, "numpy": np.ones(3, np.float32)}[kind]
    f = (lambda x: jnp.sum(of(x))) if transform in GRADS else (lambda x: (x, jax.tree.map(lambda a: a * 2, x)))
    plain = FILTERED.get(transform, transform) if enclose is Model else transform
    with jax.disable_jit():
        want = outcome(lambda: plain(f)(enclose(value)))
        found = outcome(lambda: st.preserve_identities(transform)(f)(enclose(value)))
    assert found == want


def test_disable_jit_runs_the_function_on_values():
    seen = []
    with jax.disable_jit():
        st.jit(lambda m: seen.append(m.leaf))(Model(vec()))
    assert not isinstance(seen[0], jax.core.Tracer)


def test_modules_by_name_keep_their_names_under_filter_jit():
    """Equinox sorts keyword arguments into the order of the signature."""
    f = lambda b, a: (b.leaf * 2, a.leaf, b, a)
    a, b = Model(vec()), Model(vec(2), [vec(1)])
    want = outcome(lambda: eqx.filter_jit(f)(a=a, b=b))
    assert type(want) is not Raised
    assert outcome(lambda: st.preserve_identities(eqx.filter_jit)(f)(a=a, b=b)) == want


@pytest.mark.parametrize("given", [(1.0,), (3, 1.0), (4, 1.0)])
def test_compiled_with_a_static_argument_is_called_without_it(given):
    f = lambda n, x: jnp.zeros(n) + x
    call = lambda t: t(f, static_argnums=0).lower(3, 1.0).compile()(*given)
    want = outcome(lambda: call(jax.jit))
    assert outcome(lambda: call(st.jit)) == want
