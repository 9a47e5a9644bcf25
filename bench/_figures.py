"""The numbers that are followed from one version to the next, each with a name.

They are ratios within one run, so that they can be compared between machines, as far as anything can. The one that is
not, the time to map a file, is of what should take no time anywhere.
"""

import statistics
from collections.abc import Callable
from typing import NamedTuple

from . import _libraries, compiling, dispatch, growth, memory, saving_memory, serialising, training
from ._bars import BARS
from ._kinds import BLOCKS, LAYERS, NNX as NNX_KIND
from ._measuring import TIME, Measured
from ._models import ONE_BLOCK
from ._names import BY_HAND, EQUINOX, FLAT, JAX, NNX, NNX_CACHED, SHAREDTREE, UNTIED
from ._results import Results


class Figure(NamedTuple):
    """A number with a name.

    Attributes:
        name: what it is.
        of: run → the number; `KeyError` if the run has not got what it takes.
        form: how it is printed, as in an f-string.
        unit: what is printed after it.
    """

    name: str
    of: Callable[[Results], float]
    form: str = ".2f"
    unit: str = ""

    def text(self, results: Results) -> str:
        """The number as it is printed; a dash if the run did not measure it."""
        try:
            value = self.of(results)
        except KeyError:
            return "-"
        return f"{value:{self.form}}{self.unit}"


def _ratio(case: str, implementation: str, to: str, measurement: str = TIME) -> Callable[[Results], float]:
    return lambda results: results.cases[case].ratio(implementation, to, measurement)


def _device_bytes(results: Results) -> float:
    found = results.cases[memory.NAME]
    return found.median(SHAREDTREE, memory.COMPILED) / found.median(SHAREDTREE, memory.UNIQUE)


def _beyond_flat(case: Measured) -> float:
    pairs = zip(case.rounds[SHAREDTREE][TIME], case.rounds[FLAT][TIME], strict=True)
    return statistics.median(ours - flat for ours, flat in pairs) / case.parameters["leaves"]


def _growth(large: str, small: str) -> Callable[[Results], float]:
    return lambda results: _beyond_flat(results.cases[large]) / _beyond_flat(results.cases[small])


def _figures() -> list[Figure]:
    found = [Figure(f"{bar.name}, {bar.size:,}", lambda run, bar=bar: bar.of(run.cases[bar.case])) for bar in BARS]
    for kind, one in ((LAYERS, JAX), (LAYERS, EQUINOX), (NNX_KIND, NNX_CACHED), (NNX_KIND, NNX)):
        found += [
            Figure(f"call, {kind}: `{one}` / `{FLAT}`, {size:,}", _ratio(dispatch.name_of(size, kind), one, FLAT))
            for size in (24, 204, 1004)
        ]
    beyond = f"(`{SHAREDTREE}` - `{FLAT}`) per leaf"
    in_and_out = (dispatch.name_of(size, BLOCKS) for size in (10_004, 1004))
    reused = dispatch.name_of(dispatch.REUSED, BLOCKS, ONE_BLOCK)
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
        Figure(f"growth: {beyond}, 100,000 in / 1,000 in", _growth(growth.name_of(100_000), growth.name_of(1000))),
        Figure(f"growth: {beyond}, 10,004 in and out / 1,004 in and out", _growth(*in_and_out)),
    ]
    return found + _of_serialising()


def _of_serialising() -> list[Figure]:
    ours, raw, equinox = _libraries.SHAREDTREE, _libraries.RAW, _libraries.EQUINOX
    save, load, mapped = serialising.save_name(512), serialising.load_name(512), serialising.map_name(512)
    middle = serialising.load_middle_name(256)
    unchecked, part, whole = _libraries.UNCHECKED, serialising.PART, serialising.WHOLE
    tied, size = serialising.SAVE_TIED, serialising.SIZE
    return [
        Figure("file size / bytes of unique arrays, the demo's model", _ratio(tied, ours, raw, size), ".5f"),
        Figure("file size / bytes of unique arrays, 512 MiB", _ratio(save, ours, raw, size), ".5f"),
        Figure("save 512 MiB: with digests and fsync / raw bytes with fsync", _ratio(save, ours, raw)),
        Figure("load 512 MiB: without digests / raw bytes, one `readinto`", _ratio(load, unchecked, raw)),
        Figure("load 512 MiB: with digests / raw bytes, one `readinto`", _ratio(load, ours, raw)),
        Figure("load 256 arrays of 1 MiB: with digests / raw bytes, one `readinto`", _ratio(middle, ours, raw)),
        Figure(
            "load 512 MiB with `mmap=True`, without digests", _milliseconds(mapped, _libraries.MAPPED), ".1f", " ms"
        ),
        Figure(f"save 2,000 small arrays: `{ours}` / `{equinox}`", _ratio(serialising.SAVE_SMALL, ours, equinox)),
        Figure(f"load 2,000 small arrays: `{ours}` / `{equinox}`", _ratio(serialising.LOAD_SMALL, ours, equinox)),
        Figure("peak memory while saving 512 MiB, beyond the model / the largest array", _peak_while_saving),
        Figure("load 1% of 2 GiB with `select` / all of it", _ratio(serialising.PART_NAME, part, whole), ".3f"),
    ]


def _milliseconds(case: str, implementation: str) -> Callable[[Results], float]:
    return lambda results: 1000 * results.cases[case].median(implementation)


def _peak_while_saving(results: Results) -> float:
    found = results.cases[saving_memory.name_of(512)]
    ours = _libraries.SHAREDTREE
    return found.median(ours, saving_memory.EXTRA) / found.median(ours, saving_memory.LARGEST)


FIGURES = _figures()
