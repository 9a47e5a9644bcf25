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
    differing,
    of,
    outcome,
    vec,
)

GRADS = (jax.grad, jax.value_and_grad, eqx.filter_grad, eqx.filter_value_and_grad)
BOTH = [pytest.param(plain, filtered, id=plain.__name__) for plain, filtered in FILTERED.items()]
CALLED = {name: transform for name, transform in TRANSFORMS.items() if "value_and" not in name}
EACH = [pytest.param(transform, id=name) for name, transform in CALLED.items()]


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
ALL_ENCLOSED = [lambda x: x, Registered, Model]


def cases_of_calls():
    """Each way with `jax.jit` and with three other transforms daily, and with all in the slow leg."""
    for i, name in enumerate(CALLS):
        for j, (transform, t) in enumerate(CALLED.items()):
            marks = () if t is jax.jit or (i + j) % 3 == 0 else pytest.mark.slow
            yield pytest.param(name, t, i + j, id=f"{name}-{transform}", marks=marks)


@pytest.mark.parametrize(("name", "transform", "turn"), [*cases_of_calls()])
def test_ways_to_call(name, transform, turn):
    """With arguments of which one is bare, one in a registered class, and one in Equinox's, in turns."""
    f, count, named = CALLS[name]

    def enclosed(i):
        # The module of a bound method is closed over; it multiplies by what it is given.
        enclose = (lambda x: x) if name == "bound method" else ALL_ENCLOSED[(i + turn) % 3]
        return enclose(vec() + i)

    args = [enclosed(i) for i in range(count)]
    kwargs = {key: enclosed(i) for key, i in named.items()}
    want = outcome(lambda: transform(f)(*args, **kwargs))
    assert type(want) is Raised or name not in WRONG
    assert outcome(lambda: st.preserve_identities(transform)(f)(*args, **kwargs)) == want


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


class OwnError(Exception):
    pass


@pytest.mark.parametrize("transform", EACH)
def test_the_functions_own_exception_arrives_as_it_is_and_the_next_call_works(transform):
    error, fails = OwnError("on purpose", 7), [True]

    def f(xs):
        if fails[0]:
            raise error
        return sum(jnp.sum(of(x)) for x in xs)

    args = [enclose(vec()) for enclose in ALL_ENCLOSED]
    wrapped = st.preserve_identities(transform)(f)
    for _ in range(2):
        with pytest.raises(OwnError) as caught:
            wrapped(args)
        assert caught.value is error
    fails[0] = False
    assert outcome(lambda: wrapped(args)) == outcome(lambda: transform(f)(args))


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


# What is differentiated or mapped first, and what is beside it.
PAIRS = {
    "bare, equinox": (lambda x: x, Model),
    "registered, bare": (Registered, lambda x: x),
    "dataclass, registered": (Data, Registered),
    "equinox, dataclass": (Model, Data),
}


@pytest.mark.parametrize(
    ("name", "pair"),
    [
        pytest.param(name, pair, marks=() if (i + j) % 4 == 0 else pytest.mark.slow)
        for i, name in enumerate(nests(lambda t: t))
        for j, pair in enumerate(PAIRS)
    ],
)
def test_nests(name, pair):
    x, y = jnp.arange(6.0).reshape(2, 3), jnp.ones((2, 3))
    one, other = PAIRS[pair]
    call = lambda t: nests(t)[name](one(x), other(y))
    want = outcome(lambda: call(lambda t: t))
    assert type(want) is Returned
    assert outcome(lambda: call(st.preserve_identities)) == want


@pytest.mark.parametrize("is_equinox", [False, True])
@pytest.mark.parametrize("transform", [t for t in CALLED.values() if t is not jax.vmap])
def test_disable_jit(transform, is_equinox):
    kinds = {"array": vec(), "python": 1.5, "numpy": np.ones(3, np.float32)}
    classes = {"equinox": Model} if is_equinox else {"bare": lambda x: x, "registered": Registered}
    cases = {f"{kind}, {place}": put(x) for kind, x in kinds.items() for place, put in classes.items()}
    total = lambda xs: sum(jnp.sum(of(x)) for x in xs.values())
    f = total if transform in GRADS else (lambda xs: (xs, jax.tree.map(lambda a: a * 2, xs)))
    plain = FILTERED.get(transform, transform) if is_equinox else transform
    seen = []
    with jax.disable_jit():
        assert differing(cases, plain(f), st.preserve_identities(transform)(f)) == {}
        st.jit(lambda m: seen.append(m.leaf))(Model(vec()))
    assert not isinstance(seen[0], jax.core.Tracer)


def test_modules_by_name_under_filter_jit_and_what_is_compiled_with_a_static_argument():
    """Equinox sorts keyword arguments into the order of the signature; what is compiled is called without the other."""
    f = lambda b, a: (b.leaf * 2, a.leaf, b, a)
    a, b = Model(vec()), Model(vec(2), [vec(1)])
    want = outcome(lambda: eqx.filter_jit(f)(a=a, b=b))
    assert type(want) is not Raised
    assert outcome(lambda: st.preserve_identities(eqx.filter_jit)(f)(a=a, b=b)) == want
    f = lambda n, x: jnp.zeros(n) + x
    theirs, ours = (t(f, static_argnums=0).lower(3, 1.0).compile() for t in (jax.jit, st.jit))
    for given in ((1.0,), (3, 1.0), (4, 1.0)):
        assert outcome(lambda: ours(*given)) == outcome(lambda: theirs(*given)), given
