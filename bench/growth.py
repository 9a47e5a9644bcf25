"""What a call costs as the model grows, from 10 leaves to 100,000: what it costs for each of them should stay the same.

Two shapes of work, since JAX cannot compile a function of 100,000 results: the memory that it needs for that grows with
the square of their number, and 23 GB were not enough. So up to 10,000 leaves everything goes in and out, and up to
100,000 everything goes in and one block comes out, which is put back into the model.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax

import sharedtree as st

from ._loops import Loop, flat_list, increment, increment_once, looping, plain_jax, sharedtree_model
from ._measuring import Case, Effort, Subject
from ._models import FIELDS, Model, make_model
from ._names import FLAT, JAX, SHAREDTREE

BOTH_WAYS = "in and out"
ONE_WAY = "in"


def name_of(num_leaves: int, way: str) -> str:
    """The name of a case."""
    return f"growth, {num_leaves:,} leaves {way}"


def _flat_one_way(model: Model) -> Loop:
    first = jax.jit(lambda arrays: [x + 1 for x in arrays[:8]])

    def step(arrays: list[Any]) -> list[Any]:
        arrays[:8] = first(arrays)
        return arrays

    return flat_list(model)._replace(step=step, last=lambda arrays: arrays[7], values=lambda arrays: arrays[:8])


def _model_one_way(loop: Loop, first: Callable[[Model], Any]) -> Loop:
    def step(model: Model) -> Model:
        model.blocks[0] = first(model)
        return model

    return loop._replace(
        step=step,
        last=lambda model: model.blocks[0].shift,
        values=lambda model: [getattr(model.blocks[0], name) for name in FIELDS],
    )


def _sharedtree_one_way(model: Model) -> Loop:
    return _model_one_way(sharedtree_model(model), st.jit(lambda model: increment_once(model.blocks[0])))


def _jax_one_way(model: Model) -> Loop:
    return _model_one_way(plain_jax(model), jax.jit(lambda model: increment(model.blocks[0])))


LOOPS: dict[str, dict[str, Callable[[Model], Loop]]] = {
    BOTH_WAYS: {FLAT: flat_list, SHAREDTREE: sharedtree_model, JAX: plain_jax},
    ONE_WAY: {FLAT: _flat_one_way, SHAREDTREE: _sharedtree_one_way, JAX: _jax_one_way},
}


def cases(effort: Effort) -> list[Case]:
    """Both shapes, at powers of ten."""
    largest = {BOTH_WAYS: 100, ONE_WAY: 1000} if effort.quick else {BOTH_WAYS: 10_000, ONE_WAY: 100_000}
    powers = (10, 100, 1000, 10_000, 100_000)
    return [_case(size, way, effort) for way, most in largest.items() for size in powers if size <= most]


def _case(num_leaves: int, way: str, effort: Effort) -> Case:
    def set_up(loop: Callable[[Model], Loop]) -> Subject:
        return looping(loop(make_model(num_leaves)))

    return Case(
        name=name_of(num_leaves, way),
        group="growth",
        parameters={"leaves": num_leaves, "way": way},
        implementations={name: functools.partial(set_up, loop) for name, loop in LOOPS[way].items()},
        reference=FLAT,
        effort=effort if num_leaves < 10_000 else effort._replace(seconds=2 * effort.seconds),
    )
