"""What `import sharedtree` adds to a program that has imported Equinox, in seconds of CPU: each in a new process.

python -m bench.importing sharedtree

Bytecode has been compiled before. Now and then one import has Python collect all garbage of the program, which then
takes as long as the import itself; the median of several says what is usual.
"""

import functools
import json
import subprocess
import sys
from typing import Any

from ._measuring import Case, Effort
from ._processes import RESULT, reporting

SECONDS = "CPU time"
NAME = "import, after Equinox"

SHAREDTREE, NNX = "sharedtree", "flax.nnx"

_PROGRAM = """
import resource
import equinox
def cpu():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
before = cpu()
import {}
print(cpu() - before)
"""


def _seconds(name: str) -> float:
    program = _PROGRAM.format(name)
    command = [sys.executable, "-c", program]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def _report(name: str) -> dict[str, Any]:
    _seconds(name)  # which compiles
    return {RESULT: [], SECONDS: _seconds(name)}


def cases(effort: Effort) -> list[Case]:
    """One case."""
    return [
        Case(
            name=NAME,
            group="importing",
            parameters={},
            implementations={name: functools.partial(reporting, "importing", name) for name in (SHAREDTREE, NNX)},
            reference=NNX,
            effort=effort._replace(rounds=3 if effort.quick else 9),
            units={SECONDS: "s"},
            warm_up=0,
        )
    ]


if __name__ == "__main__":
    print(json.dumps(_report(sys.argv[1])))
