"""Taking a model apart and putting it together, without any transform around it."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax

import sharedtree as st

from ._measuring import Case, Effort, Subject
from ._models import (
    NO_TIES,
    ONE_BLOCK,
    Model,
    import_brainstate,
    import_nnx,
    make_model,
    occurrences,
    to_brainstate,
    to_nnx,
)

SHAREDTREE = "sharedtree.tree"
JAX = "jax.tree"
EQUINOX = "equinox.partition and combine"
NNX = "nnx.split and merge"
BRAINSTATE = "brainstate.graph.treefy_split and treefy_merge"

CALLS = 10

Pair = tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Sequence[Any]]]
"""Takes apart; puts together what that gives; and the arrays of what is then there, tied ones at each path."""


def _sharedtree(model: Model) -> Pair:
    def together(apart: Any) -> Model:
        leaves, structure = apart
        return st.tree.unflatten(structure, leaves)

    return lambda: st.tree.flatten(model), together, occurrences


def _jax(model: Model) -> Pair:
    def together(apart: Any) -> Model:
        leaves, treedef = apart
        return jax.tree.unflatten(treedef, leaves)

    return lambda: jax.tree.flatten(model), together, occurrences


def _equinox(model: Model) -> Pair:
    return lambda: eqx.partition(model, eqx.is_array), lambda apart: eqx.combine(*apart), occurrences


def _nnx(model: Model) -> Pair:
    nnx = import_nnx()
    network = to_nnx(model)
    return (
        lambda: nnx.split(network),
        lambda apart: nnx.merge(*apart),
        lambda network: [variable.get_value() for variable in occurrences(network)],
    )


def _brainstate(model: Model) -> Pair:
    brainstate = import_brainstate()
    network = to_brainstate(model)
    return (
        lambda: brainstate.graph.treefy_split(network),
        lambda apart: brainstate.graph.treefy_merge(*apart),
        lambda network: [state.value for state in occurrences(network)],
    )


PAIRS: dict[str, Callable[[Model], Pair]] = {
    SHAREDTREE: _sharedtree,
    JAX: _jax,
    EQUINOX: _equinox,
    NNX: _nnx,
    BRAINSTATE: _brainstate,
}


def cases(effort: Effort) -> list[Case]:
    """Apart and together, at several sizes."""
    sizes = [(24, NO_TIES), (204, NO_TIES), (204, ONE_BLOCK)]
    if not effort.quick:
        sizes += [(1004, NO_TIES), (1004, ONE_BLOCK), (10004, NO_TIES)]
    return [_case(what, *size, effort) for size in sizes for what in ("flatten", "unflatten")]


def _case(what: str, num_leaves: int, sharing: str, effort: Effort) -> Case:
    def set_up(pair: Callable[[Model], Pair]) -> Subject:
        apart, together, arrays = pair(make_model(num_leaves, sharing))
        ready = apart()

        def flatten() -> None:
            for _ in range(CALLS):
                apart()

        def unflatten() -> None:
            for _ in range(CALLS):
                together(ready)

        run = flatten if what == "flatten" else unflatten
        return Subject(run, lambda: jax.device_get(list(arrays(together(apart())))), CALLS)

    return Case(
        name=f"{what}, {num_leaves:,} leaves, {sharing}",
        group="flattening",
        parameters={"leaves": num_leaves, "sharing": sharing},
        implementations={name: functools.partial(set_up, pair) for name, pair in PAIRS.items()},
        reference=JAX,
        effort=effort._replace(seconds=effort.seconds / 3),
    )
