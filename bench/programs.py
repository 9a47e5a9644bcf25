"""What a warm call costs of the programs that plain `jax.jit` takes, whatever their arguments are made of.

Each program goes on from what it returned, as a training loop does, with 24 arrays that the state is made of. Neither
side has anything to share, so what `sharedtree.jit` costs here, `jax.jit` costs beside it.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import sharedtree as st

from ._kinds import DATACLASS, DICT, KINDS, NNX, REGISTERED, STRUCT, imported
from ._loops import CALLS, increment
from ._measuring import Case, Effort, Subject
from ._names import JAX, SHAREDTREE

NUM_LEAVES = 24

Point = collections.namedtuple("Point", "x y")


class Program(NamedTuple):
    """A program.

    Attributes:
        function: of the state, and of `args` or `kwargs`; returns the next state.
        state: the first one.
        args: further arguments.
        kwargs: likewise, by name.
        options: of `jax.jit`.
    """

    function: Callable[..., Any]
    state: Any
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}  # noqa: RUF012 -- a default that nobody changes
    options: dict[str, Any] = {}  # noqa: RUF012 -- likewise


def _next(state: Any, *_: Any, **__: Any) -> Any:
    return increment(state)


def _dicts() -> Any:
    return KINDS[DICT](NUM_LEAVES)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class _Batch:
    x: Any
    y: Any


def _train_state() -> Program:
    state = imported("flax.training.train_state").TrainState
    made = state.create(apply_fn=_next, params=_dicts(), tx=optax.sgd(0.1))
    return Program(lambda state: state.apply_gradients(grads=state.params), made)


def _graph_and_state() -> Program:
    graph, state = imported("flax.nnx").split(KINDS[NNX](NUM_LEAVES))
    return Program(lambda state, graph: increment(state), state, (graph,))


def _numpy(make: Callable[[int], Any]) -> Program:
    batches = [_Batch(make(i), make(i + 1)) for i in range(NUM_LEAVES // 2)]
    return Program(lambda state, batches: state + batches[0].x.sum(), jnp.zeros(()), (batches,))


PROGRAMS: dict[str, Callable[[], Program]] = {
    "dicts": lambda: Program(_next, _dicts()),
    "dicts, integer keys": lambda: Program(_next, dict(enumerate(_dicts().values()))),
    "an optax state": lambda: Program(_next, optax.adam(1e-3).init(_dicts())),
    "registered dataclasses": lambda: Program(_next, KINDS[DATACLASS](NUM_LEAVES)),
    "a list of registered dataclasses": lambda: Program(_next, [_Batch(jnp.ones(2), jnp.ones(2)) for _ in range(12)]),
    "flax.struct": lambda: Program(_next, KINDS[STRUCT](NUM_LEAVES)),
    "registered nodes": lambda: Program(_next, KINDS[REGISTERED](NUM_LEAVES)),
    "namedtuples": lambda: Program(_next, [Point(jnp.ones(2), jnp.ones(2)) for _ in range(12)]),
    "NumPy arrays": lambda: _numpy(lambda i: np.full(2, i, np.float32)),
    "NumPy numbers": lambda: _numpy(np.float32),
    "Partials": lambda: Program(_next, [jax.tree_util.Partial(jnp.dot, jnp.ones(2), jnp.ones(2)) for _ in range(12)]),
    "a TrainState": _train_state,
    "a graphdef and a state": _graph_and_state,
    "dicts, donated": lambda: Program(_next, _dicts(), options={"donate_argnums": 0}),
    "dicts, a static argument": lambda: Program(_next, _dicts(), ("train",), options={"static_argnums": 1}),
    "dicts, keywords": lambda: Program(_next, _dicts(), kwargs={"rate": 0.1, "step": jnp.zeros(())}),
    "dicts, shardings": lambda: Program(
        _next, _dicts(), options=dict.fromkeys(("in_shardings", "out_shardings"), _here())
    ),
}


def _here() -> Any:
    return jax.sharding.SingleDeviceSharding(jax.devices()[0])


def name_of(program: str) -> str:
    """The name of a case."""
    return f"program, {NUM_LEAVES} leaves, {program}"


def cases(effort: Effort) -> list[Case]:
    """All of them."""
    return [_case(program, effort._replace(seconds=effort.seconds / 3)) for program in PROGRAMS]


def _case(program: str, effort: Effort) -> Case:
    def set_up(jit: Callable[..., Any]) -> Subject:
        function, state, args, kwargs, options = PROGRAMS[program]()
        step = jit(lambda *args, **kwargs: function(*args, **kwargs), **options)

        def run() -> None:
            nonlocal state
            for _ in range(CALLS):
                state = step(state, *args, **kwargs)
                jax.tree.leaves(state)[-1].block_until_ready()

        return Subject(run, lambda: jax.device_get(jax.tree.leaves(state)), CALLS)

    return Case(
        name=name_of(program),
        group="programs",
        parameters={"leaves": NUM_LEAVES, "program": program},
        implementations={JAX: functools.partial(set_up, jax.jit), SHAREDTREE: functools.partial(set_up, st.jit)},
        reference=JAX,
        effort=effort,
    )
