"""What the first call costs: trace and compile; and what comes on top of that.

A process reports on itself where the environment is to be another one:

    SHAREDTREE_NATIVE=0 python -m bench.compiling 204
"""

import functools
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax

from sharedtree.cli._demo import Sizes

from . import training
from ._kinds import KINDS, LAYERS
from ._loops import Loop, filtered, flat_list, nnx_model, plain_jax, sharedtree_model
from ._measuring import Case, Effort, Measured, Subject
from ._names import EQUINOX, FLAT, JAX, NNX, SHAREDTREE, UNTIED, WITHOUT_NATIVE
from ._processes import RESULT, reporting

FIRST_CALL = "first call"
"""From a function that was never called to its first result."""

AROUND = "first call without lowering and compiling"
"""That is tracing, and what comes before and after it. Lowering and compiling take long and are never equally long."""

WARM_CALL = "warm call"
"""The median of the later ones."""

UNITS = {FIRST_CALL: "s", AROUND: "s", WARM_CALL: "s"}

DEMO = "trace and compile, training step of the demo"

Made = tuple[Callable[[], Any], Callable[[], Any]]
"""A call, whose result is waited for; and the arrays that it has come to."""


def name_of(num_leaves: int) -> str:
    """The name of the case of a model of tiny arrays."""
    return f"trace and compile, {num_leaves:,} leaves, {LAYERS}"


def added(case: Measured) -> float:
    """What a first call adds to JAX's own, in warm calls without the native part."""
    pairs = zip(case.rounds[SHAREDTREE][AROUND], case.rounds[JAX][AROUND], strict=True)
    return statistics.median(ours - jaxs for ours, jaxs in pairs) / case.median(WITHOUT_NATIVE, WARM_CALL)


_lowering = 0.0
"""Seconds that JAX has spent so far on lowering and compiling."""


def _listen(event: str, duration_secs: float, **_: Any) -> None:
    global _lowering  # noqa: PLW0603 -- JAX tells it to a function
    if event.endswith(("/jaxpr_to_mlir_module_duration", "/backend_compile_duration")):
        _lowering += duration_secs


jax.monitoring.register_event_duration_secs_listener(_listen)


def _subject(make: Callable[[], Made], repeats: int = 1) -> Subject:
    """Each run makes new functions, so that nothing is in any cache, and calls each a few times."""
    results: list[Any] = []

    def once() -> dict[str, float]:
        call, values = make()
        seconds: list[float] = []
        around = -_lowering
        for i in range(13):
            start = time.perf_counter()
            jax.block_until_ready(call())
            seconds.append(time.perf_counter() - start)
            if i == 0:
                around += _lowering
                results[:] = [jax.device_get(values())]
                gc.collect()  # tracing leaves garbage, which is not the next calls' to pay for
        return {FIRST_CALL: seconds[0], AROUND: seconds[0] - around, WARM_CALL: statistics.median(seconds[3:])}

    def run() -> dict[str, float]:
        found = [once() for _ in range(repeats)]
        return {name: statistics.median(each[name] for each in found) for name in UNITS}

    return Subject(run, lambda: jax.tree.leaves(results), measures=True)


def _first_step(start: training.Start, sizes: Sizes) -> Subject:
    """Of the training step, compared by the loss: that of the untied twin begins the same."""
    windows = training.make_windows(sizes)

    def make() -> Made:
        made = start(sizes, training.ROWS)
        jax.block_until_ready(made.unique)
        state, loss = made.state, None

        def call() -> Any:
            nonlocal state, loss
            *state, loss = made.step(*state, windows)
            return loss

        return call, lambda: loss

    return _subject(make)


def _of_model(make_loop: Callable[[Any], Loop], num_leaves: int, repeats: int = 1) -> Subject:
    def make() -> Made:
        step, state, _, last, values = make_loop(KINDS[LAYERS](num_leaves))

        def call() -> Any:
            nonlocal state
            state = step(state)
            return last(state)

        return call, lambda: values(state)

    return _subject(make, repeats)


LOOPS: dict[str, Callable[[Any], Loop]] = {
    FLAT: flat_list,
    SHAREDTREE: sharedtree_model,
    JAX: plain_jax,
    EQUINOX: filtered,
    NNX: nnx_model,
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
            units=UNITS,
            warm_up=0 if effort.quick else 1,
            tolerance=1e-4,
        )
    ]
    return found + [_case(num_leaves, few) for num_leaves in ((24,) if effort.quick else (24, 204, 1004))]


def _case(num_leaves: int, effort: Effort) -> Case:
    in_python = functools.partial(reporting, "compiling", str(num_leaves), SHAREDTREE_NATIVE="0")
    repeats = 1 if effort.quick else max(1, 200 // num_leaves)  # the less there is to do, the noisier it is
    here = {name: functools.partial(_of_model, loop, num_leaves, repeats) for name, loop in LOOPS.items()}
    return Case(
        name=name_of(num_leaves),
        group="compiling",
        parameters={"leaves": num_leaves},
        implementations={**here, WITHOUT_NATIVE: in_python},
        reference=JAX,
        effort=effort,
        units=UNITS,
        warm_up=1,
    )


if __name__ == "__main__":
    _of_model(sharedtree_model, 24).run()  # the first function of a process pays for what JAX sets up once
    subject = _of_model(sharedtree_model, int(sys.argv[1]))
    numbers = subject.run()
    print(json.dumps({RESULT: [each.tolist() for each in subject.result()], **numbers}))
