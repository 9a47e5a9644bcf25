"""What a training step keeps in memory, tied and untied: each implementation in a process of its own.

The model is the demo's with a table that is most of it, as in language models with the vocabulary of a language. A
process reports on itself:

    python -m bench.memory "sharedtree.jit" 65536
"""

import functools
import json
import pathlib
import resource
import sys
from typing import Any

import jax

from sharedtree.cli._demo import Sizes

from . import training
from ._measuring import Case, Effort, UnavailableError
from ._names import BY_HAND, EQUINOX, SHAREDTREE, UNTIED
from ._processes import RESULT, UNAVAILABLE, reporting

NAME = "memory of a training step"
SIZES = Sizes(blocks=1, context=16, batch=2)

COMPILED = "device bytes"
"""What the compiled step needs for its arguments and results, those that share memory counted once."""

LIVE = "bytes of live arrays"
"""What is on the device between two steps."""

PEAK = "peak RSS"
"""The most that the process had in memory at once, above what it had when the libraries were imported."""

UNIQUE = "unique bytes"
"""What the parameters and the optimizer's state hold, each array once."""

UNITS = {COMPILED: "B", LIVE: "B", PEAK: "B", UNIQUE: "B"}


STARTS: dict[str, training.Start] = {**training.ALL, EQUINOX: training.with_equinox}


def _report(start: training.Start, rows: int) -> dict[str, Any]:
    windows = training.make_windows(SIZES)
    before = _resident("VmRSS")
    try:
        made = start(SIZES, rows)
        step, state = made.step, made.state
        unique = sum(array.nbytes for array in made.unique)
        del made
        compiled = _device_bytes(step, state, windows)
        losses: list[float] = []
        for _ in range(3):
            *state, loss = step(*state, windows)
            losses.append(float(loss))
            del loss  # or it would count as live
    except UnavailableError as error:
        return {UNAVAILABLE: str(error)}
    except (ValueError, RuntimeError) as error:
        if "donate the same buffer twice" not in str(error):
            raise
        return {UNAVAILABLE: "refuses to donate a tied array, since it would be donated twice"}
    live = sum(array.nbytes for array in jax.live_arrays()) - windows.nbytes
    return {RESULT: losses[:1], COMPILED: compiled, LIVE: live, PEAK: _resident("VmHWM") - before, UNIQUE: unique}


def _device_bytes(step: Any, state: Any, windows: jax.Array) -> int:
    compiled = step.lower(*state, windows).compile()
    memory = getattr(compiled, "compiled", compiled).memory_analysis()  # Equinox and NNX have stages of their own
    return memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes - windows.nbytes


def _resident(name: str) -> int:
    """`VmRSS`, what this process has in memory, or `VmHWM`, the most that it had, in bytes.

    On Linux what `getrusage` calls the peak may be that of the parent, which a child begins with.
    """
    status = pathlib.Path("/proc/self/status")
    if status.exists():
        found = dict(line.split(":", 1) for line in status.read_text().splitlines())
        return int(found[name].split()[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # in bytes on macOS


def cases(effort: Effort) -> list[Case]:
    """One case."""
    rows = 4096 if effort.quick else 65536
    names = [BY_HAND, SHAREDTREE, UNTIED, EQUINOX] if effort.quick else [*training.TIED, UNTIED, EQUINOX]
    return [
        Case(
            name=NAME,
            group="memory",
            parameters={"rows of the table": rows},
            implementations={name: functools.partial(reporting, "memory", name, str(rows)) for name in names},
            reference=BY_HAND,
            effort=effort._replace(rounds=1 if effort.quick else 2),
            units=UNITS,
            warm_up=0,
            tolerance=1e-4,
        )
    ]


if __name__ == "__main__":
    print(json.dumps(_report(STARTS[sys.argv[1]], int(sys.argv[2]))))
