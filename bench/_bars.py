"""What things should cost at most, as ratios within one run. `python -m bench bars` says which of it is met.

Nothing else is measured there than what the bars are about, so it takes ten minutes.
"""

from collections.abc import Callable
from typing import NamedTuple

from . import _libraries, compiling, control_flow, dispatch, pieces, programs, serialising
from ._kinds import BLOCKS, DATACLASS, DICT, LAYERS, NNX, REGISTERED, STRUCT
from ._measuring import Case, Effort, Measured
from ._names import BY_HAND, EQUINOX, FLAT, IN_PLACE, JAX, SHAREDTREE, WITHOUT_NATIVE
from ._suite import all_cases

EFFORT = Effort(quick=False, rounds=60, seconds=5.0)


class Bar(NamedTuple):
    """A number that should not be larger than another.

    Attributes:
        name: what it is.
        size: leaves, or arrays.
        limit: the other number.
        case: the name of the case.
        needs: the implementations that it takes.
        of: the outcome of the case → the number.
    """

    name: str
    size: int
    limit: float
    case: str
    needs: tuple[str, ...]
    of: Callable[[Measured], float]


def _ratios(what: str, name_of: Callable[[int], str], one: str, other: str, limits: dict[int, float]) -> list[Bar]:
    name = f"{what}: `{one}` / `{other}`"
    return [
        Bar(name, size, limit, name_of(size), (one, other), lambda case: case.ratio(one, other))
        for size, limit in limits.items()
    ]


def _at(*limits: float) -> dict[int, float]:
    return dict(zip((24, 204, 1004), limits, strict=True))


def _call(kind: str, one: str, other: str, *limits: float) -> list[Bar]:
    return _ratios(f"call, {kind}", lambda size: dispatch.name_of(size, kind), one, other, _at(*limits))


def _piece(piece: str, kind: str, one: str, other: str, limit: float) -> list[Bar]:
    limits = _at(limit, limit, limit)
    return _ratios(f"{piece}, {kind}", lambda size: pieces.name_of(piece, size, kind), one, other, limits)


def _first_call(limit: float) -> list[Bar]:
    name = f"what `{SHAREDTREE}` adds to the first call of `{JAX}` / a warm call with `SHAREDTREE_NATIVE=0`"
    needs = (SHAREDTREE, JAX, WITHOUT_NATIVE)
    limits = _at(limit, limit, limit)
    return [Bar(name, size, limit, compiling.name_of(size), needs, compiling.added) for size in limits]


def _control_flow(measurement: str, limit: float) -> list[Bar]:
    return [
        Bar(
            f"{work}, {measurement}: `{SHAREDTREE}` / `{BY_HAND}`",
            size,
            limit,
            control_flow.name_of(work, size),
            (SHAREDTREE, BY_HAND),
            lambda case: case.ratio(SHAREDTREE, BY_HAND, measurement),
        )
        for work in control_flow.WORK
        for size in (21, 201)
    ]


SLACK = 1.5e-6
"""Seconds that a call may cost beyond what plain `jax.jit` does, if that is more than its limit allows."""


def _beyond_slack(case: Measured, limit: float) -> float:
    allowed = case.median(JAX) + SLACK
    return min(case.ratio(SHAREDTREE, JAX), limit * case.median(SHAREDTREE) / allowed)


def _program(program: str, limit: float) -> Bar:
    name = f"call, {program}: `{SHAREDTREE}` / `{JAX}`, or what it is with {1e6 * SLACK} µs more"
    case, needs = programs.name_of(program), (SHAREDTREE, JAX)
    return Bar(name, programs.NUM_LEAVES, limit, case, needs, lambda case: _beyond_slack(case, limit))


BARS = [
    *[_program(program, 1.15) for program in programs.PROGRAMS],
    *_call(LAYERS, SHAREDTREE, FLAT, 1.25, 1.2, 1.25),
    *_call(BLOCKS, SHAREDTREE, FLAT, 1.25, 1.2, 1.25),
    *_call(LAYERS, SHAREDTREE, EQUINOX, 0.5, 0.5, 0.5),
    *_call(BLOCKS, SHAREDTREE, EQUINOX, 0.5, 0.5, 0.5),
    *_call(DATACLASS, SHAREDTREE, FLAT, 1.2, 1.2, 1.2),
    *_call(STRUCT, SHAREDTREE, FLAT, 1.2, 1.2, 1.2),
    *_call(REGISTERED, SHAREDTREE, JAX, 1.15, 1.15, 1.15),
    *_call(NNX, SHAREDTREE, FLAT, 1.6, 1.6, 1.6),
    *_call(NNX, IN_PLACE, FLAT, 1.6, 1.6, 1.6),
    *_piece(pieces.FLATTEN, LAYERS, pieces.SHAREDTREE, pieces.JAX, 0.2),
    *_piece(pieces.FLATTEN, LAYERS, pieces.DAG, pieces.JAX, 0.3),
    *_piece(pieces.FLATTEN, DICT, pieces.SHAREDTREE, pieces.JAX, 0.9),
    *_piece(pieces.FLATTEN, DICT, pieces.DAG, pieces.JAX, 1.0),
    *_piece(pieces.MAP, LAYERS, pieces.SHAREDTREE, pieces.JAX, 1.0),
    *_piece(pieces.GRAD, LAYERS, pieces.SHAREDTREE, pieces.JAX, 1.15),
    *_first_call(3.0),
    *_control_flow(control_flow.TRACED, 1.3),
    *_control_flow(control_flow.COMPILED, 1.1),
    *_ratios("load 1 MiB each", serialising.load_middle_name, _libraries.UNCHECKED, _libraries.RAW, {256: 1.5}),
    *_ratios("load 1 MiB each", serialising.load_middle_name, _libraries.SHAREDTREE, _libraries.RAW, {256: 1.3}),
    *_ratios("save, MiB", serialising.save_name, _libraries.SHAREDTREE, _libraries.RAW, {512: 1.25}),
    *_ratios("load, MiB", serialising.load_name, _libraries.SHAREDTREE, _libraries.RAW, {512: 1.3}),
    *_ratios(
        "save arrays of 32 bytes",
        lambda _: serialising.SAVE_SMALL,
        _libraries.SHAREDTREE,
        _libraries.EQUINOX,
        {2000: 0.8},
    ),
    *_ratios(
        "load arrays of 32 bytes",
        lambda _: serialising.LOAD_SMALL,
        _libraries.SHAREDTREE,
        _libraries.EQUINOX,
        {2000: 0.4},
    ),
]


def cases_of_bars(only: str = "") -> list[Case]:
    """The cases of those bars whose name contains a text, each with no more implementations than these take."""
    needs: dict[str, list[str]] = {}
    for bar in BARS:
        if only in bar.name:
            needs.setdefault(bar.case, []).extend(bar.needs)
    every = {case.name: case for case in all_cases(EFFORT)}
    return [
        every[name]._replace(implementations={each: every[name].implementations[each] for each in taken})
        for name, taken in needs.items()
    ]
