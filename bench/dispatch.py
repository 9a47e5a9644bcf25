"""What a call costs beside the computation: of models in every kind of class, and of those with ties."""

import functools
from collections.abc import Callable
from typing import Any

from ._kinds import BLOCKS, DATACLASS, KINDS, LAYERS, NNX as NNX_KIND, REGISTERED, STRUCT
from ._loops import (
    Loop,
    brainstate_model,
    filtered,
    flat_list,
    looping,
    nnx_cached,
    nnx_model,
    nnx_split,
    plain_jax,
    sharedtree_filtered,
    sharedtree_in_place,
    sharedtree_model,
)
from ._measuring import Case, Effort, Subject
from ._models import NO_TIES, ONE_BLOCK, ONE_TIE, make_model
from ._names import (
    BRAINSTATE,
    EQUINOX,
    FLAT,
    IN_PLACE,
    JAX,
    NNX,
    NNX_CACHED,
    NNX_SPLIT,
    SHAREDTREE,
    SHAREDTREE_FILTERED,
)

Loops = dict[str, Callable[[Any], Loop]]

_BASIC: Loops = {FLAT: flat_list, SHAREDTREE: sharedtree_model, JAX: plain_jax}
_OTHERS: Loops = {NNX_SPLIT: nnx_split, NNX_CACHED: nnx_cached, NNX: nnx_model, BRAINSTATE: brainstate_model}

OF_CLASSES: Loops = {**_BASIC, EQUINOX: filtered, SHAREDTREE_FILTERED: sharedtree_filtered}
OF_NNX: Loops = {**_BASIC, IN_PLACE: sharedtree_in_place, **_OTHERS}
OF_TIES: Loops = {**_BASIC, EQUINOX: filtered, **_OTHERS}

REUSED = 400
"""Leaves of one block of eight arrays that occurs fifty times."""


MANY = 10_004
"""Leaves of the largest model, which take JAX a minute to compile."""


def name_of(num_leaves: int, kind: str, sharing: str = NO_TIES) -> str:
    """The name of a case."""
    return f"dispatch, {num_leaves:,} leaves, {kind}{f', {sharing}' if sharing != NO_TIES else ''}"


def cases(effort: Effort) -> list[Case]:
    """All of them; the quick ones are small."""
    sizes = (24,) if effort.quick else (24, 204, 1004)
    kinds = (LAYERS, BLOCKS, DATACLASS, STRUCT, REGISTERED, NNX_KIND)
    chosen = [(size, kind, NO_TIES) for kind in kinds for size in sizes]
    chosen += [(size, BLOCKS, sharing) for size in sizes for sharing in (ONE_TIE, ONE_BLOCK)]
    if not effort.quick:
        chosen.append((MANY, BLOCKS, NO_TIES))
    return [_case(*each, effort) for each in [*chosen, (REUSED, BLOCKS, ONE_BLOCK)]]


def _case(num_leaves: int, kind: str, sharing: str, effort: Effort) -> Case:
    if num_leaves == MANY:
        loops = _BASIC
    else:
        loops = OF_TIES if sharing != NO_TIES else OF_NNX if kind == NNX_KIND else OF_CLASSES

    def set_up(loop: Callable[[Any], Loop]) -> Subject:
        return looping(loop(KINDS[kind](num_leaves) if sharing == NO_TIES else make_model(num_leaves, sharing)))

    return Case(
        name=name_of(num_leaves, kind, sharing),
        group="dispatch",
        parameters={"leaves": num_leaves, "kind": kind, "sharing": sharing},
        implementations={name: functools.partial(set_up, loop) for name, loop in loops.items()},
        reference=FLAT,
        effort=effort,
    )
