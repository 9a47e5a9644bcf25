"""What a call costs as the model grows, from 10 leaves to 100,000: what it costs for each of them should stay the same.

Everything goes in, and one block comes out, which is put back into the model. JAX cannot compile a function of 100,000
results: the memory that it needs for that grows with the square of their number, and 23 GB were not enough.
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


def name_of(num_leaves: int) -> str:
    """The name of a case."""
    return f"growth, {num_leaves:,} leaves"


def _flat(model: Model) -> Loop:
    first = jax.jit(lambda arrays: [x + 1 for x in arrays[:8]])

    def step(arrays: list[Any]) -> list[Any]:
        arrays[:8] = first(arrays)
        return arrays

    return flat_list(model)._replace(step=step, last=lambda arrays: arrays[7], values=lambda arrays: arrays[:8])


def _model(loop: Loop, first: Callable[[Model], Any]) -> Loop:
    def step(model: Model) -> Model:
        model.blocks[0] = first(model)
        return model

    return loop._replace(
        step=step,
        last=lambda model: model.blocks[0].shift,
        values=lambda model: [getattr(model.blocks[0], name) for name in FIELDS],
    )


def _sharedtree(model: Model) -> Loop:
    return _model(sharedtree_model(model), st.jit(lambda model: increment_once(model.blocks[0])))


def _jax(model: Model) -> Loop:
    return _model(plain_jax(model), jax.jit(lambda model: increment(model.blocks[0])))


LOOPS: dict[str, Callable[[Model], Loop]] = {FLAT: _flat, SHAREDTREE: _sharedtree, JAX: _jax}


def cases(effort: Effort) -> list[Case]:
    """At powers of ten."""
    return [_case(size, effort) for size in ((10, 1000) if effort.quick else (10, 100, 1000, 10_000, 100_000))]


def _case(num_leaves: int, effort: Effort) -> Case:
    def set_up(loop: Callable[[Model], Loop]) -> Subject:
        return looping(loop(make_model(num_leaves)))

    return Case(
        name=name_of(num_leaves),
        group="growth",
        parameters={"leaves": num_leaves},
        implementations={name: functools.partial(set_up, loop) for name, loop in LOOPS.items()},
        reference=FLAT,
        effort=effort if num_leaves < 10_000 else effort._replace(seconds=2 * effort.seconds),
    )
