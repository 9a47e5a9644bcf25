"""What is misused says so in words, and says what to do instead."""

import re
import types

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest

import sharedtree as st
from sharedtree.transforms._function_transform import FunctionTransform
from tests.strategies import Pair


class Callable(Pair):
    """A model that is a function, too."""

    def __call__(self, x):
        return x


W, X = jnp.ones((2, 3)), jnp.ones(2)
MODELS = [Pair(W, W + 1), Callable(W, W + 1), {"a": W, "b": W + 1}]


@st.preserve_identities
def one(model):
    raise AssertionError("it was called")


@st.preserve_identities
def several(model, x, *, scale=1):
    raise AssertionError("it was called")


NO_OPTIMIZERS = ("adam", optax.adam, 1e-3, None, optax.GradientTransformation, (optax.adam(1.0),))
EAGER = (st.jit, st.grad, st.value_and_grad, st.vmap, st.checkpoint)
WRONG = {
    r"needs an optax transformation.*sharedtree.optimizer\(optax.adam\(1e-3\)\)": [
        lambda wrong=wrong: st.optimizer(wrong) for wrong in NO_OPTIMIZERS
    ],
    r"`where` must be a function": [
        lambda where=where: st.tie({"a": X}, where) for where in (None, "a", 3, ("a", "b"))
    ],
    r"The arguments are in the wrong order.*sharedtree.tie\(model, lambda": [
        lambda m=m: st.tie(lambda m: list(m), m) for m in MODELS
    ],
    r"The arguments are in the wrong order.*sharedtree.untie\(model, lambda": [
        lambda m=m: st.untie(lambda m: m, m) for m in MODELS
    ],
    r"The arguments are in the wrong order.*sharedtree.tree.at\(lambda m: m.head.weight, model, new\)": [
        lambda m=m: st.tree.at(m, lambda m: m, 3) for m in MODELS
    ],
    r"was passed as a transform.*preserve_identities\(jax.jit\)\(f\)": [
        lambda: one(MODELS[0]),
        lambda: one(model=MODELS[0]),
        lambda: one(X),
        lambda: several(MODELS[0], X),
        lambda: several(MODELS[0], X, scale=3),
    ],
    r"takes a transform, not.*preserve_identities\(jax.jit\)": [
        lambda wrong=wrong: st.preserve_identities(wrong) for wrong in (5, None, "jit", [jax.jit], Pair(1, 2))
    ],
    r"callable": [lambda t=t, wrong=wrong: t(wrong)(X) for t in EAGER for wrong in (5, "text", Pair(1, 2))],
}


@pytest.mark.parametrize("said", WRONG)
def test_what_is_taken_for_something_else(said):
    for call in WRONG[said]:
        with pytest.raises(TypeError, match=f"(?s){said}"):
            call()


COMPUTING = [
    *("leaf.T", "leaf.shape", "leaf.at[0]", "leaf[0]", "leaf * 2", "2 - leaf", "-leaf", "leaf @ leaf", "leaf > 0"),
    *("leaf(3)", "list(leaf)", "float(leaf)", "len(leaf)", "jnp.transpose(leaf)", "jnp.asarray(leaf)", "jnp.sum(leaf)"),
]


def test_a_where_that_computes():
    model = Pair(jnp.ones(2), jnp.zeros(2))
    for code in COMPUTING:
        compute = eval(f"lambda leaf: {code}", {"jnp": jnp})
        for call in (
            lambda: st.tie(model, lambda m: (m.first, compute(m.second))),  # noqa: B023
            lambda: st.untie(model, lambda m: compute(m.second)),  # noqa: B023
            lambda: st.tree.at(lambda m: compute(m.second), model, 0),  # noqa: B023
        ):
            with pytest.raises(st.errors.SharingMismatchError, match=r"(?s)of a leaf|with a leaf.*do not compute"):
                call()


def test_other_errors_of_a_where_are_its_own():
    class Marker:
        pass

    def wrong(_):
        raise TypeError("my own")

    model = Pair(jnp.ones(2), jnp.zeros(2))
    with pytest.raises(AttributeError, match="'Pair' object has no attribute 'third'"):
        st.tie(model, lambda m: (m.first, m.third))
    with pytest.raises(AttributeError, match="'Marker' object has no attribute 'x'"):
        st.tie(model, lambda m: Marker().x)
    with pytest.raises(TypeError, match="my own"):
        st.tie(model, wrong)


def test_modules_that_can_be_called_may_be_either():
    w = jnp.ones(2)

    class First(eqx.Module):
        scale: jax.Array

        def __call__(self, m):
            return m.first

    model = Callable(w, w + 1)
    assert st.tree.at(First(w), model, 3).first == 3
    assert st.tree.at(lambda m: m.first, model, 3).first == 3
    tied = st.tie(model, lambda m: (m.first, m.second))
    assert tied.first is tied.second


def failing(*_):
    raise KeyError("mine")


def keyword_only(*, k):
    return k


def same(x):
    return x


def product(w, x):
    return w * x


def by_vjp(lib, f, fwd, bwd):
    made = lib.custom_vjp(f)
    made.defvjp(fwd, bwd)
    return made


def by_jvp(lib, f, rule):
    made = lib.custom_jvp(f)
    made.defjvp(rule)
    return made


FLAG, TREE = jnp.array(True), {"w": jnp.ones(2)}
# Of functions of plain arrays, and of models where that is said; `lib` is this package, or JAX.
VANILLAS = {
    "branches": [
        lambda lib: lib.cond(True, same, same),
        lambda lib: lib.cond(True, same),
        lambda lib: lib.cond(True, same, same, X, operand=X),
        lambda lib: lib.cond(None, same, same, X),
        lambda lib: lib.cond(X, same, same, X),
        lambda lib: lib.cond("text", same, same, X),
        lambda lib: lib.cond(True, same, same, "text"),
        lambda lib: lib.cond(True, same, lambda x: "text", X),
        lambda lib: lib.cond(True, same, same, X, other=3),
        lambda lib: lib.cond(True, same, lambda x: (x, x), X),
        lambda lib: lib.cond(True, lambda x: {"a": x}, lambda x: {"b": x}, X),
        lambda lib: lib.cond(True, same, lambda x: x[0], X),
        lambda lib: lib.cond(True, failing, same, X),
        lambda lib: lib.cond(True, same, failing, X),
        lambda lib: lib.switch(0, [], X),
        lambda lib: lib.switch(0.5, [same, same], X),
        lambda lib: lib.switch(jnp.arange(2), [same, same], X),
        lambda lib: lib.switch(0, [same, same, lambda x: x[0]], X),
        lambda lib: lib.switch(0, [same, same, failing], X),
    ],
    "loops": [
        lambda lib: lib.scan(lambda c, _: (c, None)),
        lambda lib: lib.scan(lambda c, _: c, X, length=2),
        lambda lib: lib.scan(lambda c, _: (c, None), X),
        lambda lib: lib.scan(lambda c, _: ((c, c), None), X, length=2),
        lambda lib: lib.scan(lambda c: (c, None), X, length=2),
        lambda lib: lib.scan(lambda c, _: (c, None), X, lenght=2),
        lambda lib: lib.scan(),
    ],
    "derivatives": [
        lambda lib: lib.jvp(lambda m: m.first, Pair(X, X), Pair(X, X)),
        lambda lib: lib.jvp(jnp.sin, (1.0,), (1.0, 2.0)),
        lambda lib: lib.jvp(jnp.sin, (1.0,), [1.0]),
        lambda lib: lib.jvp(jnp.sin, (1.0,)),
        lambda lib: lib.vjp(jnp.sin, 1.0)[1](1.0, 2.0),
        lambda lib: lib.vjp(lambda x: (x, x), 1.0)[1](1.0),
        lambda lib: lib.vjp(jnp.sin, 1.0, has_aux=True),
        lambda lib: lib.vjp(3, 1.0),
    ],
    "rules": [
        lambda lib: lib.custom_vjp(product)(X, X),
        lambda lib: lib.custom_jvp(product)(X, X),
        lambda lib: lib.custom_vjp(product, nondiff=1),
        lambda lib: lib.grad(by_vjp(lib, jnp.sin, same, lambda kept, y: (y,)))(1.0),
        lambda lib: lib.grad(by_jvp(lib, jnp.sin, lambda primals, tangents: primals[0]))(1.0),
        lambda lib: lib.grad(by_vjp(lib, jnp.sin, lambda x: (x, x), lambda kept, y: (y, y)))(1.0),
        lambda lib: lib.grad(by_vjp(lib, jnp.sin, lambda x: (x, x), lambda kept, y: (X,)))(1.0),
        lambda lib: by_vjp(lib, product, lambda x: (x, x), lambda kept, y: (X,))(1.0),
        lambda lib: by_vjp(lib, keyword_only, keyword_only, keyword_only)(k=1.0),
    ],
    # The transform itself says so, whatever it is called with beside it.
    "no function": [
        call
        for wrong in (3, None, "text")
        for call in (
            lambda lib, wrong=wrong: lib.scan(wrong, TREE, X),
            lambda lib, wrong=wrong: lib.while_loop(wrong, same, TREE),
            lambda lib, wrong=wrong: lib.while_loop(lambda carry: FLAG, wrong, TREE),
            lambda lib, wrong=wrong: lib.fori_loop(0, 3, wrong, TREE),
            lambda lib, wrong=wrong: lib.map(wrong, TREE),
            lambda lib, wrong=wrong: lib.associative_scan(wrong, TREE),
            lambda lib, wrong=wrong: lib.cond(FLAG, wrong, same, TREE),
            lambda lib, wrong=wrong: lib.cond(FLAG, same, wrong, TREE),
            lambda lib, wrong=wrong: lib.switch(0, [same, wrong], TREE),
            lambda lib, wrong=wrong: lib.switch(0, wrong, TREE),
        )
    ],
}
VANILLA = types.SimpleNamespace(**vars(jax) | vars(jax.lax))


@pytest.mark.parametrize("name", VANILLAS)
def test_errors_are_those_of_vanilla_jax(name):
    for i, call in enumerate(VANILLAS[name]):
        errors = []
        for lib in (st, VANILLA):
            with pytest.raises(Exception) as caught:  # noqa: PT011 -- whatever it is
                call(lib)
            # A function is named with the place where it is.
            said = re.sub(r" at (0x|/)\S+", "", str(caught.value))
            errors.append((caught.type, said))
        assert errors[0] == errors[1], i


FUNCTIONS = {
    "one": (jax.nn.relu, [""]),
    "wrapped": (st.jit(jnp.sin), [""]),
    "a lambda": (lambda x: x, [""]),
    "a class": (float, [""]),
    "an optimizer": (optax.sgd(0.1), [".init", ".update"]),
    "one of ours": (st.optimizer(optax.sgd(0.1)), [".init", ".update"]),
    "in a container": ({"act": [jax.nn.relu]}, ["['act'][0]"]),
}
# The wrapper, what is vanilla, and how the two are called.
TAKING_ARRAYS = {
    "jit": (st.jit, jax.jit, eqx.filter_jit, lambda f: f),
    "jit in place": (lambda f: st.jit(f, in_place=True), jax.jit, eqx.filter_jit, lambda f: f),
    "lower": (st.jit, jax.jit, eqx.filter_jit, lambda f: getattr(f, "lower", f)),
    "eval_shape": (st.jit, jax.jit, eqx.filter_jit, lambda f: getattr(f, "eval_shape", f)),
    "checkpoint": (st.checkpoint, jax.checkpoint, eqx.filter_checkpoint, lambda f: f),
    "grad": (st.grad, jax.grad, eqx.filter_grad, lambda f: f),
    "value_and_grad": (st.value_and_grad, jax.value_and_grad, eqx.filter_value_and_grad, lambda f: f),
    "jacrev": (st.jacrev, jax.jacrev, eqx.filter_jacrev, lambda f: f),
    "vmap": (st.vmap, jax.vmap, eqx.filter_vmap, lambda f: f),
}


@pytest.mark.parametrize("name", TAKING_ARRAYS)
def test_a_function_as_an_argument_is_told_what_takes_it(name):
    """The error is JAX's, with its text; what is added is a way to call it, which works."""
    ours, vanilla, equinox, method = TAKING_ARRAYS[name]
    model = Pair(jnp.ones(2), jnp.ones(2))

    def f(given, model):
        return jnp.float32(0)

    for function, paths in FUNCTIONS.values():
        given = [function, jnp.ones(2)]
        with pytest.raises(TypeError) as expected:
            method(vanilla(f))(given, jnp.ones(2))
        with pytest.raises(TypeError) as caught:
            method(ours(f))(given, model)
        assert caught.type is expected.type
        text, added, fix = str(caught.value).rsplit("\n", 2)
        assert text.partition("<")[0] == str(expected.value).partition("<")[0]
        assert all(f"`given[0]{path}`" in added for path in paths)
        assert fix == f"    f = sharedtree.preserve_identities(equinox.{equinox.__name__})(f)"
        names = {"sharedtree": st, "equinox": eqx, "f": f}
        exec(fix.strip(), names)
        names["f"](given, model)


@pytest.mark.parametrize(
    "call",
    [
        lambda: st.jit(lambda f, x: x, static_argnums=0)(abs, "text"),
        lambda: st.jit(lambda x: x)("text"),
        lambda: st.grad(lambda x, f: x, argnums=1)(1.0, abs),
        lambda: st.grad(lambda x, f: jnp.sin("text"))(1.0, abs),
        lambda: st.vmap(lambda x, f: x, in_axes=(0, None))("text", abs),
    ],
)
def test_what_else_is_refused_is_told_nothing_of_functions(call):
    """Nor is a function blamed that is where it may be."""
    with pytest.raises(TypeError) as caught:
        call()
    assert "sharedtree" not in str(caught.value)


@pytest.mark.parametrize("wrong", [st.jit(jnp.sin), st.grad(jnp.sin), st.custom_vjp(jnp.sin)], ids=repr)
def test_a_wrapped_function_is_named_by_what_made_it(wrong):
    """JAX prints the class of what it refuses, and the names of ours are private."""
    x = jnp.ones(2)
    calls = (
        lambda: st.jit(abs)(wrong),
        lambda: jax.jit(abs)(wrong),
        lambda: st.jit(lambda x: wrong)(x),
        lambda: st.grad(lambda x: wrong)(x),
        lambda: st.vmap(lambda x: wrong)(x),
        lambda: st.scan(lambda c, x: (c, x), wrong, x),
        lambda: st.cond(True, lambda x: wrong, lambda x: wrong, x),
        lambda: st.vjp(lambda x: wrong, x),
        lambda: st.jit(lambda x: jnp.sin(wrong))(x),
    )
    for call in calls:
        with pytest.raises(TypeError, match="<class 'sharedtree.preserve_identities'>") as caught:
            call()
        assert "sharedtree.transforms" not in str(caught.value)
    with pytest.raises(TypeError, match="OwnTransform"):
        st.jit(abs)(OwnTransform(jax.jit, abs, None, {}))


class OwnTransform(FunctionTransform):
    """The adapter of a user, whose name is the user's."""


def test_sizes_that_differ_are_said_in_the_words_of_jax():
    def f(x, y, *, z=0):
        return x

    for args, kwargs in (
        ((jnp.ones(2), jnp.ones(3)), {}),
        ((jnp.ones(2),), {"y": jnp.ones(3)}),
        (({"a": jnp.ones(2)}, jnp.ones(2)), {"z": [jnp.ones(1)]}),
    ):
        messages = []
        for vmap in (st.vmap, jax.vmap):
            with pytest.raises(ValueError, match="inconsistent sizes") as error:
                vmap(f)(*args, **kwargs)
            messages.append(str(error.value))
        assert messages[0] == messages[1]
