"""A vanilla transform that unties a model is named, with ours in its place; one that is not to blame never is.

The oracle is written by hand: for each program, what its user called, and on which line.
"""

import inspect
import re
import types
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import sharedtree as st
from tests import vanilla_transforms
from tests.models import Leaf, Net
from tests.vanilla_transforms import VANILLA, double, is_small, loss, tied

OF_TREES = lambda m: jax.tree.map(lambda x: 2 * x, m)

VARIANTS = {
    "an upper bound that is traced": (
        "jax.lax.fori_loop",
        lambda m: jax.lax.fori_loop(0, m.embed.weight[0, 0].astype(int), lambda _, m: double(m), m),
    ),
    "a function that returns what it got": ("jax.jit", lambda m: jax.jit(lambda m: m)(m)),
    "jax.remat": ("jax.checkpoint", lambda m: jax.remat(double)(m)),
    "a tie that is made anew": ("jax.grad", lambda m: jax.grad(loss)(double(m))),
    "a model that is closed over": (
        "jax.jit",
        lambda m: jax.jit(lambda x: st.tree.map(lambda y: x * y, m))(2.0),
    ),
    "a model that is closed over in a scan": (
        "jax.lax.fori_loop",
        lambda m: jax.lax.fori_loop(0, 3, lambda i, _: st.tree.map(lambda x: x * i, m), m),
    ),
    "a training step": (
        "jax.jit",
        lambda m: jax.jit(lambda m: st.apply_updates(m, jax.grad(loss)(m)))(m),
    ),
    "one in another": ("jax.jit", lambda m: jax.jit(jax.vmap(double))(m)),
    "one in another that leaves no operation": ("jax.vmap", lambda m: jax.vmap(jax.jit(double))(m)),
    "a gradient through a scan": ("jax.grad", lambda m: jax.grad(lambda m: loss(VANILLA["jax.lax.scan"](m)))(m)),
}
"""What is called there → the function."""


def said(function, wrapped=st.jit):
    """The warning of a function, and the line that it names."""
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        wrapped(lambda m: function(m))(tied())
    (warning,) = record
    assert warning.category is st.UntiedWarning
    text = str(warning.message)
    assert len(text.splitlines()) <= 8
    return text


def called(text):
    """What a warning says was called, and where."""
    found = re.findall(r"`([\w.]+)`, called at (\S+):(\d+), made an array for each path", text)
    return [(name, filename, int(line)) for name, filename, line in found]


def line_of(function):
    return inspect.getsourcelines(function)[1]


@pytest.mark.parametrize("title", VANILLA)
def test_the_transform_is_named_with_ours_in_its_place(title):
    function = VANILLA[title]
    for wrapped in (st.jit, st.checkpoint):
        text = said(function, wrapped)
        assert called(text) == [(title, vanilla_transforms.__file__, line_of(function))]
        (first, _) = re.findall(r"^    (.*)$", text, re.MULTILINE)
        assert re.search(rf"sharedtree\.{title.rpartition('.')[2]}\(", first)
        assert "retie" not in text


@pytest.mark.parametrize("name", VARIANTS)
def test_variants(name):
    title, function = VARIANTS[name]
    ((found, filename, line),) = called(said(function))
    assert (found, filename) == (title, __file__)
    assert line - line_of(function) in (0, 1)


@pytest.mark.parametrize("title", ["jax.jit", "jax.vmap", "jax.lax.scan", "jax.checkpoint", "jax.lax.cond"])
def test_what_unties_inside_is_named_too(title):
    """Both fixes are needed."""
    by = {
        "jax.jit": lambda m: jax.jit(OF_TREES)(m),
        "jax.vmap": lambda m: jax.vmap(OF_TREES)(m),
        "jax.lax.scan": lambda m: jax.lax.scan(lambda c, _: (OF_TREES(c), None), m, None, length=2)[0],
        "jax.checkpoint": lambda m: jax.checkpoint(OF_TREES)(m),
        "jax.lax.cond": lambda m: jax.lax.cond(is_small(m), OF_TREES, OF_TREES, m),
    }
    text = said(by[title])
    assert called(text) == [(title, __file__, line_of(by[title]))]
    assert f"sharedtree.{title.rpartition('.')[2]}(" in text
    assert "model = sharedtree.tree.map(f, model)" in text


def of_a_library(source, **names):
    """A function of an installed library."""
    module = types.ModuleType("library")
    vars(module).update(names)
    exec(compile(inspect.cleandoc(source), "/usr/lib/site-packages/library.py", "exec"), vars(module))
    return module


LIBRARY = of_a_library(
    """
    def double(model):
        return st.tree.map(lambda x: 2 * x, model)

    jitted, filter_jitted = jax.jit(double), eqx.filter_jit(double)
    mapped, checkpointed, both = jax.vmap(double), jax.checkpoint(double), jax.vmap(jitted)
    """,
    st=st,
    jax=jax,
    eqx=eqx,
)


def weights(model):
    return model.embed.weight, model.head.weight


def rebuilt(weights):
    return Net(*map(Leaf, weights))


NOT_TO_BLAME = {
    "a function of trees around it": lambda m: jax.tree.map(lambda x: jax.vmap(lambda y: 2 * y)(x), m),
    "a call for each leaf": lambda m: rebuilt([jax.vmap(lambda y: 2 * y)(x) for x in weights(m)]),
    "a compiled call for each leaf": lambda m: rebuilt([jax.jit(lambda y: 2 * y)(x) for x in weights(m)]),
    "a gradient for each leaf": lambda m: rebuilt([jax.grad(lambda x: (x**2).sum())(x) for x in weights(m)]),
    "a scan for each leaf": lambda m: rebuilt(
        [jax.lax.scan(lambda c, _: (2 * c, None), x, None, length=2)[0] for x in weights(m)]
    ),
    "untied before a jit": lambda m: jax.jit(double)(OF_TREES(m)),
    "untied before a scan": lambda m: VANILLA["jax.lax.scan"](OF_TREES(m)),
    "untied before a cond": lambda m: VANILLA["jax.lax.cond"](OF_TREES(m)),
    "untied before a gradient": lambda m: jax.grad(loss)(OF_TREES(m)),
    "untied before a vmap": lambda m: jax.vmap(double)(OF_TREES(m)),
    "untied after it": lambda m: OF_TREES(st.jit(double)(m)),
    "functions that JAX has jitted": lambda m: rebuilt([jnp.where(x > 0, x, 1.0) for x in weights(m)]),
    "functions that are jitted themselves": lambda m: rebuilt([jnp.cumsum(x, 0) for x in weights(m)]),
    "loops in JAX": lambda m: rebuilt([x * jax.random.poisson(jax.random.key(0), 3.0) for x in weights(m)]),
    "two values by two lines in one call": lambda m: rebuilt(
        jax.jit(lambda m: (2 * m.embed.weight, 3 * m.head.weight))(m)
    ),
    "two values by hand under vmap": lambda m: jax.vmap(
        lambda m: Net(Leaf(2 * m.embed.weight), Leaf(3 * m.head.weight))
    )(m),
    "bare weights under vmap": lambda m: rebuilt(jax.vmap(lambda a, b: (2 * a, 3 * b))(*weights(m))),
    "a compiled call for each leaf under vmap": lambda m: jax.vmap(
        lambda m: rebuilt([jax.jit(lambda y: 2 * y)(x) for x in weights(m)])
    )(m),
    "one value twice under vmap": lambda m: rebuilt(jax.vmap(lambda x: (2 * x, 3 * x))(m.embed.weight)),
    "what is beside a gradient": lambda m: jax.value_and_grad(
        lambda m: (m.embed.weight.sum(), rebuilt((2 * m.embed.weight, 3 * m.head.weight))), has_aux=True
    )(m)[0][1],
    "bare weights under jvp": lambda m: rebuilt(jax.jvp(lambda a, b: (2 * a, 3 * b), weights(m), weights(m))[0]),
    "two values by hand under filter_vmap": lambda m: eqx.filter_vmap(
        lambda m: Net(Leaf(2 * m.embed.weight), Leaf(3 * m.head.weight))
    )(m),
    "a factor for each path in a loop": lambda m: jax.lax.fori_loop(
        0, 3, lambda _, m: rebuilt([x * k for x, k in zip(weights(m), (2.0, 3.0), strict=True)]), m
    ),
    "a factor for each path under jit": lambda m: jax.jit(
        lambda m: rebuilt([x * k for x, k in zip(weights(m), (2.0, 3.0), strict=True)])
    )(m),
    "one computation by hand under jit": lambda m: jax.jit(
        lambda m: Net(Leaf(jnp.sin(m.embed.weight)), Leaf(jnp.sin(m.head.weight)))
    )(m),
    "a factor for each path in a scan": lambda m: jax.lax.scan(
        lambda m, _: (rebuilt([x * k for x, k in zip(weights(m), (2.0, 3.0), strict=True)]), None), m, None, length=2
    )[0],
    "jitted by a library": lambda m: LIBRARY.jitted(m),
    "filter_jitted by a library": lambda m: LIBRARY.filter_jitted(m),
    "mapped by a library": lambda m: LIBRARY.mapped(m),
    "checkpointed by a library": lambda m: LIBRARY.checkpointed(m),
    "jitted and mapped by a library": lambda m: LIBRARY.both(m),
}


@pytest.mark.parametrize("name", NOT_TO_BLAME)
@pytest.mark.parametrize("wrapped", [st.jit, st.vmap, lambda f: st.jit(st.vmap(f))], ids=["jit", "vmap", "jit of vmap"])
def test_what_is_not_to_blame_is_not_named(name, wrapped):
    if wrapped is not st.jit and name.startswith("untied before a cond"):
        pytest.skip("its predicate would be batched")
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        wrapped(lambda m: NOT_TO_BLAME[name](m))(tied())
    for warning in record:
        names = {title for title, _, _ in called(str(warning.message))}
        assert not names & set(VANILLA)
        assert not re.search(r"sharedtree\.(?!tree\.|retie|untie)\w+\(", str(warning.message))
    assert record or wrapped is not st.jit


def test_a_cached_trace_names_it_again():
    """JAX has the inner program already, whose operations were made in another call."""
    step = jax.jit(double)
    for _ in range(2):
        text = said(lambda m: step(m))
        assert [title for title, _, _ in called(text)] == ["jax.jit"]


def test_a_target_that_began_as_the_model_is_no_fault_of_a_scan_alone():
    def follow(both):
        new = double(both.embed)
        return Net(new, st.incremental_update(new, both.head, 0.5))

    model = eqx.nn.Linear(2, 2, key=jax.random.key(0))
    step = lambda both: jax.lax.scan(lambda c, _: (follow(c), None), both, None, length=2)[0]
    with pytest.warns(st.UntiedWarning) as record:
        st.jit(step)(Net(model, model))
    assert not any(called(str(warning.message)) for warning in record)
