"""Models with many shared parts: work grows as they do, and what is said about them stays short.

Work is counted in lines of the package that Python runs, for a model and for one four times as wide.
"""

import pathlib
import sys
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest

import sharedtree as st
from tests.garbage import no_collection

FOLDER = str(pathlib.Path(st.__file__).parent)
WIDTHS = 16, 64


class Layer(eqx.Module):
    w: jax.Array
    b: jax.Array


class Model(eqx.Module):
    layers: list
    again: list


def of_layers(n):
    """Each layer is at two paths."""
    layers = [Layer(jnp.arange(2.0) + i, jnp.zeros(2)) for i in range(n)]
    return Model(layers, layers[::-1])


def star(n):
    """One array is at all paths."""
    w = jnp.arange(2.0)
    return Model([w] * n, [])


def copies(tree):
    return jax.tree.map(lambda x: x + 0, tree)


def anew(tree):
    return st.tree.map(lambda x: x + 0, tree)


def first(m):
    return m.layers[0].w.sum() if isinstance(m.layers[0], Layer) else m.layers[0].sum()


def layers_anew(m):
    return Model([Layer(layer.w, layer.b) for layer in m.layers], [])


def updated_without_ties(m):
    optimizer = st.optimizer(optax.sgd(0.1))
    return optimizer.update(copies(m), optimizer.init(m), copies(m))


def called_with_copies(m):
    jitted = st.jit(lambda m: first(m))
    jitted(m)
    return jitted(copies(m))


def with_wrappers(m):
    return [eqx.nn.Shared((layer, layer), lambda pair: pair[1], lambda pair: pair[0]) for layer in m.layers]


def with_a_chain(m):
    """Each in the place of the next."""
    return eqx.nn.Shared([jnp.zeros(1) + i for i in range(4 * len(m.layers))], lambda m: m[1:], lambda m: m[:-1])


RIGHT = {
    "jit": lambda m: st.jit(lambda m: m)(m),
    "results": lambda m: st.eval_shape(lambda m: st.tree.map(lambda x: x + 1, m), m),
    "in place": lambda m: st.jit(lambda m: None, in_place=True)(m),
    "grad": lambda m: st.grad(first)(m),
    "vmap": lambda m: st.vmap(first, in_axes=(st.tree.map(lambda _: 0, m),))(m),
    "vjp": lambda m: st.vjp(first, m)[1](jnp.ones(())),
    "jvp": lambda m: st.jvp(first, (m,), (m,)),
    "scan": lambda m: st.make_jaxpr(lambda m: st.scan(lambda c, _: (c, None), m, length=2))(m),
    "cond": lambda m: st.make_jaxpr(lambda m: st.cond(True, lambda m: m, anew, m))(m),
    "cuts": lambda m: st.vmap(lambda a, b: first(a), in_axes=(0, None))(m, layers_anew(m)) if m.again else None,
    "explain": lambda m: str(st.explain(st.jit(first), m)),
    "ties": st.ties,
    "tie": lambda m: st.tie(m, lambda t: tuple(jax.tree.leaves(t.layers))),
    "untie": st.untie,
    "retie": lambda m: st.retie(copies(m), like=m),
    "unwrap_shared": lambda m: st.unwrap_shared(with_wrappers(m)),
    "unwrap_shared, a chain": lambda m: st.unwrap_shared(with_a_chain(m)),
    "tree.at": lambda m: st.tree.at(lambda t: t.layers, m, m.layers[::-1]),
    "optimizer": lambda m: st.optimizer(optax.sgd(0.1)).init(m),
    "files": lambda m: st.from_bytes(st.to_bytes(m), like=m),
}

WRONG = {
    "lost ties": lambda m: st.make_jaxpr(lambda m: copies(m))(m),
    "lost between calls": called_with_copies,
    "other sharing": lambda m: st.assert_same_sharing(m, copies(m)),
    "two treatments": lambda m: st.vmap(lambda a, b: 1, in_axes=(0, None))(m, m),
    "differentiated or not": lambda m: st.grad(lambda a, b: 1.0)(m, m),
    "partial gradients": lambda m: st.grad(lambda a, b: first(a))(m, Model(jax.tree.leaves(m.layers), [])),
    "carry": lambda m: st.make_jaxpr(lambda m: st.scan(lambda c, _: (copies(c), None), m, length=2))(m),
    "branches": lambda m: st.make_jaxpr(lambda m: st.cond(True, lambda m: m, copies, m))(m),
    "map": lambda m: st.tree.map(lambda a, b: a, m, copies(m)),
    "tangents": lambda m: st.jvp(first, (m,), (copies(m),)),
    "program": lambda m: st.jit(first).lower(m).compile()(copies(m)),
    "update": updated_without_ties,
}


def said_by(case, model):
    """What was raised or warned."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            case(model)
        except st.SharedTreeError as error:
            return [str(error).partition("\n--------")[0]]
    return [str(one.message) for one in caught]


def lines_run_in(case, model):
    count = 0

    def in_package(frame, event, _):
        nonlocal count
        count += event == "line"
        return in_package

    before = sys.gettrace()
    sys.settrace(lambda frame, event, arg: in_package if frame.f_code.co_filename.startswith(FOLDER) else None)
    try:
        said_by(case, model)
    finally:
        sys.settrace(before)
    return count


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("make", [of_layers, pytest.param(star, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", [*RIGHT, *WRONG])
def test_work_grows_with_the_width_and_what_is_said_stays_short(case, make):
    run = {**RIGHT, **WRONG}[case]
    with no_collection():  # what is remembered of a structure makes the next time cheaper
        said = [said_by(run, make(n)) for n in WIDTHS]
        small, large = (lines_run_in(run, make(n)) for n in WIDTHS)
    assert large <= 6 * small, (small, large)
    for text in said[1]:
        assert len(text) < 4_000, text


def test_what_is_right_is_said_to_be_so():
    assert [name for name, case in RIGHT.items() if name != "cuts" and said_by(case, of_layers(3))] == []
    said = {name: said_by(case, of_layers(3)) for name, case in WRONG.items()}
    assert [name for name, texts in said.items() if not texts] == []
