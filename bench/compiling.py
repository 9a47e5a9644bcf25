"""What the first call costs: trace and compile; and what the generated code of the calls after it costs to make."""

import functools
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax

import sharedtree as st
from sharedtree._demo._model import Sizes

from . import training
from ._loops import increment, increment_once
from ._measuring import Case, Effort, Subject
from ._models import Model, import_nnx, make_model, occurrences, to_nnx
from ._names import EQUINOX, FLAT, JAX, NNX, SHAREDTREE, UNTIED

FIRST_CALL = "first call"
"""From a function that was never called to its first result."""

PLANS = "plans"
"""What the second and the third call took longer than later ones. These make the plans, where there are any."""

DEMO = "trace and compile, training step of the demo"

Call = Callable[[], Any]


def name_of(num_leaves: int) -> str:
    """The name of the case of a model of tiny arrays."""
    return f"trace and compile, {num_leaves:,} leaves"


def _subject(make: Callable[[], Call]) -> Subject:
    """Each run makes a new function, so that nothing is in any cache, and calls it a few times."""
    results: list[Any] = []

    def run() -> dict[str, float]:
        call = make()
        seconds: list[float] = []
        for i in range(8):
            start = time.perf_counter()
            result = call()
            jax.block_until_ready(result)
            seconds.append(time.perf_counter() - start)
            if i == 0:
                results.append(jax.device_get(result))
                gc.collect()  # tracing leaves garbage, which is not the next calls' to pay for
        first, second, third, *later = seconds
        return {FIRST_CALL: first, PLANS: second + third - 2 * statistics.median(later)}

    return Subject(run, lambda: jax.tree.leaves(results[:1]), measures=True)


def _first_step(start: training.Start, sizes: Sizes) -> Subject:
    """Of the training step, compared by the loss: that of the untied twin begins the same."""
    windows = training.make_windows(sizes)

    def make() -> Call:
        made = start(sizes, training.ROWS)
        jax.block_until_ready(made.unique)
        state = made.state

        def call() -> Any:
            nonlocal state
            *state, loss = made.step(*state, windows)
            return loss

        return call

    return _subject(make)


def _repeatedly(step: Callable[[Any], Any], state: Any, values: Callable[[Any], Sequence[Any]]) -> Call:
    def call() -> Any:
        nonlocal state
        state = step(state)
        return values(state)

    return call


def _flat(model: Model) -> Call:
    return _repeatedly(jax.jit(lambda arrays: [x + 1 for x in arrays]), occurrences(model), lambda arrays: arrays)


def _sharedtree(model: Model) -> Call:
    return _repeatedly(st.jit(lambda model: increment_once(model)), model, occurrences)


def _jax(model: Model) -> Call:
    return _repeatedly(jax.jit(lambda model: increment(model)), model, occurrences)


def _equinox(model: Model) -> Call:
    return _repeatedly(eqx.filter_jit(lambda model: increment(model)), model, occurrences)


def _nnx(model: Model) -> Call:
    nnx = import_nnx()
    network = to_nnx(model)
    update = nnx.jit(lambda network: nnx.update(network, increment(nnx.state(network))))

    def step(network: Any) -> Any:
        update(network)
        return network

    return _repeatedly(step, network, lambda network: [variable.get_value() for variable in occurrences(network)])


IMPLEMENTATIONS: dict[str, Callable[[Model], Call]] = {
    FLAT: _flat,
    SHAREDTREE: _sharedtree,
    JAX: _jax,
    EQUINOX: _equinox,
    NNX: _nnx,
}


def cases(effort: Effort) -> list[Case]:
    """The training step, and a model of many tiny arrays."""
    sizes = training.SMALL if effort.quick else Sizes()
    few = effort._replace(rounds=1 if effort.quick else 7)
    found = [
        Case(
            name=DEMO,
            group="compiling",
            parameters={},
            implementations={
                name: functools.partial(_first_step, start, sizes) for name, start in training.ALL.items()
            },
            reference=UNTIED,
            effort=few,
            units={FIRST_CALL: "s", PLANS: "s"},
            warm_up=0 if effort.quick else 1,
            tolerance=1e-4,
        )
    ]
    found += [_case(num_leaves, few) for num_leaves in ((204,) if effort.quick else (204, 1004))]
    return found


def _case(num_leaves: int, effort: Effort) -> Case:
    def set_up(implementation: Callable[[Model], Call]) -> Subject:
        return _subject(lambda: implementation(make_model(num_leaves)))

    return Case(
        name=name_of(num_leaves),
        group="compiling",
        parameters={"leaves": num_leaves},
        implementations={name: functools.partial(set_up, each) for name, each in IMPLEMENTATIONS.items()},
        reference=JAX,
        effort=effort,
        units={FIRST_CALL: "s", PLANS: "s"},
        warm_up=1,
    )
