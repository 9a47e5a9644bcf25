"""The rooms of `serialise/`: which may import which, and how large they are."""

import pathlib

import sharedtree.serialise
from tests.package_imports import files, imports_of, name_of

ROOT = pathlib.Path(sharedtree.serialise.__file__).parent

# Each may import from those before it, and from none after it.
ORDER = [
    *("container", "trust", "arrays", "values", "plain_safetensors", "save", "load", "inspect_and_audit"),
    *("orbax", "_export", "serialise"),
]

OURS = [path for path in files() if path.is_relative_to(ROOT)]


def room_of(name):
    """The room that a dotted name is in, or the verb: `serialise.values._nodes` is in `values`."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in ORDER else "serialise"


def test_imports_point_downwards():
    for path in OURS:
        here = room_of(name_of(path))
        for name in imports_of(path)[0]:
            if name.startswith("serialise"):
                assert ORDER.index(room_of(name)) <= ORDER.index(here), f"{name_of(path)} imports {name}"
