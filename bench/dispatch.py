"""What a call costs beside the computation, without ties, with one, and with one block that is everywhere."""

import functools
from collections.abc import Callable

from ._loops import (
    brainstate_model,
    filtered,
    flat_list,
    nnx_model,
    nnx_split,
    plain_jax,
    sharedtree_model,
)
from ._measuring import Case, Effort, Subject, UnavailableError
from ._models import BLOCKS, LAYERS, NO_TIES, ONE_BLOCK, ONE_TIE, Model, make_layers, make_model
from ._names import BRAINSTATE, EQUINOX, FLAT, JAX, NNX, NNX_CACHED, NNX_SPLIT, SHAREDTREE

LOOPS: dict[str, Callable[[Model], Subject]] = {
    FLAT: flat_list,
    SHAREDTREE: sharedtree_model,
    JAX: plain_jax,
    EQUINOX: filtered,
    NNX_SPLIT: nnx_split,
    NNX_CACHED: functools.partial(nnx_model, cached=True),
    NNX: nnx_model,
    BRAINSTATE: brainstate_model,
}

_SHOWN_EVERYWHERE = (flat_list, sharedtree_model, plain_jax, filtered)

REUSED = 400
"""Leaves of one block of eight arrays that occurs fifty times."""


def name_of(num_leaves: int, sharing: str, shape: str = BLOCKS) -> str:
    """The name of a case."""
    return f"dispatch, {num_leaves:,} leaves, {shape}, {sharing}"


def cases(effort: Effort) -> list[Case]:
    """All of them; the quick ones are small."""
    sizes = (24, 204) if effort.quick else (24, 204, 1004, 10004)
    chosen = [(size, sharing, BLOCKS) for size in sizes for sharing in (NO_TIES, ONE_TIE, ONE_BLOCK)]
    chosen += [(size, NO_TIES, LAYERS) for size in sizes[:3]]
    return [_case(*each, effort) for each in [*chosen, (REUSED, ONE_BLOCK, BLOCKS)]]


def _case(num_leaves: int, sharing: str, shape: str, effort: Effort) -> Case:
    def set_up(loop: Callable[[Model], Subject]) -> Subject:
        if num_leaves > 10_000 and sharing == ONE_TIE and loop not in _SHOWN_EVERYWHERE:
            raise UnavailableError(f"takes a minute at {num_leaves:,} leaves, which the case without ties has spent")
        return loop(make_layers(num_leaves) if shape == LAYERS else make_model(num_leaves, sharing))

    return Case(
        name=name_of(num_leaves, sharing, shape),
        group="dispatch",
        parameters={"leaves": num_leaves, "shape": shape, "sharing": sharing},
        implementations={name: functools.partial(set_up, loop) for name, loop in LOOPS.items()},
        reference=FLAT,
        effort=effort,
        warm_up=1 if num_leaves > 10_000 else 2,
    )
