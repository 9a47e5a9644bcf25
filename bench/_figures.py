"""The numbers that are followed from one version to the next, each with a name.

All are ratios within one run, so that they can be compared between machines, as far as anything can.
"""

import statistics
from collections.abc import Callable
from typing import NamedTuple

from . import compiling, dispatch, growth, memory, training
from ._measuring import TIME, Measured
from ._models import BLOCKS, LAYERS, NO_TIES, ONE_BLOCK
from ._names import BY_HAND, EQUINOX, FLAT, JAX, NNX, SHAREDTREE, UNTIED
from ._results import Results


class Figure(NamedTuple):
    """A number with a name.

    Attributes:
        name: what it is.
        of: run → the number; `KeyError` if the run has not got what it takes.
        is_share: whether it is shown in percent.
    """

    name: str
    of: Callable[[Results], float]
    is_share: bool = False

    def text(self, results: Results) -> str:
        """The number as it is printed; a dash if the run did not measure it."""
        try:
            value = self.of(results)
        except KeyError:
            return "-"
        return f"{value:.1%}" if self.is_share else f"{value:.2f}"


def _ratio(case: str, implementation: str, to: str, measurement: str = TIME) -> Callable[[Results], float]:
    return lambda results: results.cases[case].ratio(implementation, to, measurement)


def _plans(case: str) -> Callable[[Results], float]:
    def share(results: Results) -> float:
        found = results.cases[case]
        return found.median(SHAREDTREE, compiling.PLANS) / found.median(SHAREDTREE, compiling.FIRST_CALL)

    return share


def _device_bytes(results: Results) -> float:
    found = results.cases[memory.NAME]
    return found.median(SHAREDTREE, memory.COMPILED) / found.median(SHAREDTREE, memory.UNIQUE)


def _beyond_flat(case: Measured) -> float:
    pairs = zip(case.rounds[SHAREDTREE][TIME], case.rounds[FLAT][TIME], strict=True)
    return statistics.median(ours - flat for ours, flat in pairs) / case.parameters["leaves"]


def _growth(large: int, way: str) -> Callable[[Results], float]:
    return lambda results: (
        _beyond_flat(results.cases[growth.name_of(large, way)]) / _beyond_flat(results.cases[growth.name_of(1000, way)])
    )


def _figures() -> list[Figure]:
    found: list[Figure] = []
    sizes = (24, 204, 1004)
    for shape in (LAYERS, BLOCKS):
        for ours, other in ((True, FLAT), (True, JAX), (False, EQUINOX), (False, NNX)):
            for size in sizes:
                one, two = (SHAREDTREE, other) if ours else (other, SHAREDTREE)
                case = dispatch.name_of(size, NO_TIES, shape)
                found.append(Figure(f"call: `{one}` / `{two}`, {shape}, {size:,} leaves", _ratio(case, one, two)))
    reused = dispatch.name_of(dispatch.REUSED, ONE_BLOCK)
    found += [
        Figure(
            f"call: `{SHAREDTREE}` / `{JAX}`, one block of 8 arrays reused 50 times", _ratio(reused, SHAREDTREE, JAX)
        ),
        Figure(f"training step of the demo: `{SHAREDTREE}` / `{BY_HAND}`", _ratio(training.NAME, SHAREDTREE, BY_HAND)),
        Figure(
            f"trace and compile, the demo's step: tied `{SHAREDTREE}` / `{UNTIED}`",
            _ratio(compiling.DEMO, SHAREDTREE, UNTIED, compiling.FIRST_CALL),
        ),
        Figure("device bytes of a tied, donated step / bytes of its unique arrays", _device_bytes),
        Figure(f"growth: (`{SHAREDTREE}` - `{FLAT}`) per leaf, 100,000 in / 1000 in", _growth(100_000, growth.ONE_WAY)),
        Figure(
            f"growth: (`{SHAREDTREE}` - `{FLAT}`) per leaf, 10,000 in and out / 1000 in and out",
            _growth(10_000, growth.BOTH_WAYS),
        ),
        Figure("plans / trace and compile, the demo's step", _plans(compiling.DEMO), is_share=True),
        Figure("plans / trace and compile, 1,004 leaves", _plans(compiling.name_of(1004)), is_share=True),
    ]
    return found


FIGURES = _figures()
