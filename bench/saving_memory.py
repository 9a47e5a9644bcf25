"""What saving keeps in memory besides the model: each library in a process of its own, which reports on itself:

python -m bench.saving_memory sharedtree 32 2048
"""

import functools
import json
import pathlib
import sys
from typing import Any

from . import memory
from ._checkpoints import Checkpoint, checksums, make_large
from ._libraries import FLAX, LIBRARIES, RAW, SHAREDTREE
from ._measuring import Case, Effort, UnavailableError
from ._processes import RESULT, UNAVAILABLE, reporting

EXTRA = "peak above the model"
"""The most that the process had in memory while it saved, above what it had before, model and libraries included."""

LARGEST = "largest array"

_PAGE = 4096.0  # what memory is counted in
_RESET = pathlib.Path("/proc/self/clear_refs")


def name_of(mebibytes: int) -> str:
    """The name of the case."""
    return f"memory to save {mebibytes} MiB"


def _report(name: str, layers: int, columns: int) -> dict[str, Any]:
    try:
        tiny = Checkpoint(make_large(1, 8))
        LIBRARIES[name](tiny).save(tiny.path("tiny"))  # what a library imports or makes once is not the model's
        checkpoint = Checkpoint(make_large(layers, columns))
        library, path = LIBRARIES[name](checkpoint), checkpoint.path("large")
    except UnavailableError as error:
        return {UNAVAILABLE: str(error)}
    if _RESET.exists():
        _RESET.write_text("5")  # forgets the peak so far
    before = memory._resident("VmRSS")
    library.save(path)
    extra = memory._resident("VmHWM") - before
    largest = max(array.nbytes for array in checkpoint.unique)
    result = [each.tolist() for each in checksums(library.load(path))]
    return {RESULT: result, EXTRA: max(float(extra), _PAGE), LARGEST: float(largest)}


def cases(effort: Effort) -> list[Case]:
    """One case."""
    size, layers, columns = (16, 16, 128) if effort.quick else (512, 32, 2048)
    names = [RAW, SHAREDTREE, FLAX] if effort.quick else list(LIBRARIES)
    return [
        Case(
            name=name_of(size),
            group="serialising",
            parameters={},
            implementations={
                name: functools.partial(reporting, "saving_memory", name, str(layers), str(columns)) for name in names
            },
            reference=FLAX,
            effort=effort._replace(rounds=1),
            units={EXTRA: "B", LARGEST: "B"},
            warm_up=0,
        )
    ]


if __name__ == "__main__":
    print(json.dumps(_report(sys.argv[1], *map(int, sys.argv[2:]))))
