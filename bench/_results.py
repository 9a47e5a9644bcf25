"""What a run found, and where, as a file of JSON."""

import importlib.metadata
import json
import os
import pathlib
import platform
from typing import NamedTuple

import jax

from ._measuring import Measured

FORMAT = 1

LIBRARIES = (
    *("jax", "jaxlib", "equinox", "numpy", "optax", "flax", "brainstate", "optree"),
    *("orbax-checkpoint", "safetensors", "zlib-ng", "jaxon"),
)


class Results(NamedTuple):
    """One run.

    Attributes:
        machine: what it ran on, and the versions of everything that matters; nothing that names a computer or a person.
        quick: whether it was too short for its numbers to mean much.
        cases: name → outcome.
    """

    machine: dict[str, str]
    quick: bool
    cases: dict[str, Measured]

    @property
    def label(self) -> str:
        """What tells this run from others, in few words."""
        return f"Python {self.machine['Python']}, JAX {self.machine['jax']}"


def describe_machine() -> dict[str, str]:
    """The machine in words, and versions."""
    import sharedtree
    from sharedtree.core._native_or_python import engine

    versions: dict[str, str] = {}
    for name in LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return {
        "system": f"{platform.system()} on {platform.machine()}",
        "cores": str(os.cpu_count()),
        "device": jax.devices()[0].device_kind,
        "Python": platform.python_version(),
        "sharedtree": f"{sharedtree.__version__} ({engine()})",
        **versions,
    }


def write_results(results: Results, path: pathlib.Path) -> None:
    """Writes a run; numbers are cut to five digits, which is more than they are good for."""

    def short(case: Measured) -> dict[str, object]:
        rounds = {
            name: {each: [float(f"{number:.5g}") for number in numbers] for each, numbers in found.items()}
            for name, found in case.rounds.items()
        }
        return case._replace(rounds=rounds)._asdict()

    content = {
        "format": FORMAT,
        "machine": results.machine,
        "quick": results.quick,
        "cases": [short(case) for case in results.cases.values()],
    }
    path.write_text(json.dumps(content, separators=(",", ":")) + "\n", encoding="utf-8")


def read_results(path: pathlib.Path) -> Results:
    """Reads what `write_results` wrote."""
    content = json.loads(path.read_text(encoding="utf-8"))
    if content["format"] != FORMAT:
        raise ValueError(f"{path} has format {content['format']}, and this reads format {FORMAT}. Run it again.")
    cases = [Measured(**case) for case in content["cases"]]
    return Results(content["machine"], content["quick"], {case.name: case for case in cases})
