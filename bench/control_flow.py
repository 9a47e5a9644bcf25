"""A scan, a cond and a vjp over a model with a tied weight, beside vanilla JAX on a model that has one copy of it.

The program that is compiled is the same, so what can cost is tracing, and the way in and out of an eager call.
"""

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp

import sharedtree as st

from ._measuring import Case, Effort, Subject
from ._names import BY_HAND, SHAREDTREE

SCAN, COND, VJP = "scan", "cond", "vjp"

EAGER = "eager call"
"""Of a function that was called before."""

TRACED = "trace"
"""Of the same within `jit`, by functions that are new."""

COMPILED = "compiled call"
"""Of what that was compiled to."""

UNITS = {EAGER: "s", TRACED: "s", COMPILED: "s"}

WIDTH, ROWS, STEPS = 64, 64, 10


class Layer(eqx.Module):
    weight: jax.Array
    bias: jax.Array

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.tanh(x @ self.weight + self.bias)


class Tied(eqx.Module):
    """A model that uses one array twice, and holds it in two places."""

    embed: jax.Array
    layers: list[Layer]
    head: jax.Array

    def __call__(self, x: jax.Array) -> jax.Array:
        return _through(self.layers, x @ self.embed) @ self.head.T


class OneCopy(eqx.Module):
    """The same, which holds it in one."""

    embed: jax.Array
    layers: list[Layer]

    def __call__(self, x: jax.Array) -> jax.Array:
        return _through(self.layers, x @ self.embed) @ self.embed.T


def _through(layers: list[Layer], x: jax.Array) -> jax.Array:
    for layer in layers:
        x = layer(x)
    return x


class Library(NamedTuple):
    """What the work is written with."""

    model: Callable[[jax.Array, list[Layer]], Any]
    jit: Any
    scan: Any
    cond: Any
    vjp: Any
    map: Any


LIBRARIES = {
    SHAREDTREE: Library(lambda w, layers: Tied(w, layers, w), st.jit, st.scan, st.cond, st.vjp, st.tree.map),
    BY_HAND: Library(OneCopy, jax.jit, jax.lax.scan, jax.lax.cond, jax.vjp, jax.tree.map),
}


def _scan(library: Library) -> Callable[..., Any]:
    def step(model: Any, x: jax.Array) -> tuple[Any, jax.Array]:
        return library.map(lambda a: 0.99 * a, model), model(x).sum()

    return lambda model, xs: library.scan(step, model, xs)


def _cond(library: Library) -> Callable[..., Any]:
    def smaller(model: Any, x: jax.Array) -> tuple[Any, jax.Array]:
        return library.map(lambda a: 0.99 * a, model), model(x).sum()

    def same(model: Any, x: jax.Array) -> tuple[Any, jax.Array]:
        return model, model(2 * x).sum()

    return lambda model, xs: library.cond(xs[0, 0, 0] > 0, smaller, same, model, xs[0])


def _vjp(library: Library) -> Callable[..., Any]:
    def loss(model: Any, x: jax.Array) -> jax.Array:
        return jnp.square(model(x)).sum()

    def pulled_back(model: Any, xs: jax.Array) -> Any:
        value, back = library.vjp(loss, model, xs[0])
        return value, back(jnp.ones(()))

    return pulled_back


WORK = {SCAN: _scan, COND: _cond, VJP: _vjp}
"""Name → library → a new function of a model and inputs."""


def name_of(work: str, num_leaves: int) -> str:
    """The name of a case."""
    return f"{work}, tied model of {num_leaves} leaves"


def _subject(make: Callable[[Library], Callable[..., Any]], library: Library, num_layers: int, calls: int) -> Subject:
    keys = jax.random.split(jax.random.key(0), num_layers + 1)
    weights = [0.1 * jax.random.normal(key, (WIDTH, WIDTH)) for key in keys]
    model = library.model(weights[0], [Layer(weight, jnp.zeros(WIDTH)) for weight in weights[1:]])
    xs = jnp.linspace(0.1, 1.0, STEPS * ROWS * WIDTH).reshape(STEPS, ROWS, WIDTH)
    eager = make(library)
    compiled = library.jit(make(library))

    def seconds(run: Callable[[], Any]) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            jax.block_until_ready(run())
        return (time.perf_counter() - start) / calls

    def run() -> dict[str, float]:
        return {
            EAGER: seconds(lambda: eager(model, xs)),
            TRACED: statistics.median(seconds(lambda: library.jit(make(library)).trace(model, xs)) for _ in range(3)),
            COMPILED: seconds(lambda: compiled(model, xs)),
        }

    # Each leaf once: the tied one is at two paths of the one model, and at one of the other.
    return Subject(run, lambda: jax.device_get(st.tree.leaves(compiled(model, xs))), measures=True)


def cases(effort: Effort) -> list[Case]:
    """Each kind of work, at two sizes."""
    sizes = (2,) if effort.quick else (10, 100)
    few = effort._replace(rounds=1 if effort.quick else 15)
    return [
        Case(
            name=name_of(work, 2 * size + 1),
            group="control flow",
            parameters={"leaves": 2 * size + 1, "work": work},
            implementations={
                name: functools.partial(_subject, make, library, size, 1 if effort.quick else 3)
                for name, library in LIBRARIES.items()
            },
            reference=BY_HAND,
            effort=few,
            units=UNITS,
            warm_up=1,
            tolerance=1e-5,
        )
        for work, make in WORK.items()
        for size in sizes
    ]
