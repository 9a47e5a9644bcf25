"""The rooms of `serialise/`: which may import which, how large a file may be, how many files a verb goes through."""

import pathlib
import sys

import pytest

import sharedtree.serialise
from tests.test_imports import files, imports_of, name_of

ROOT = pathlib.Path(sharedtree.serialise.__file__).parent

# Each may import from those before it, and from none after it.
ORDER = ["container", "trust", "arrays", "values", "flat", "save", "load", "look", "orbax", "serialise"]

# Grown by the names of programs, what users of a library can do, what a class does not declare, and writing that does
# not wait for digests, what is left out.
MAX_LINES = 410
MAX_LINES_IN_ALL = 8_950

OURS = [path for path in files() if path.is_relative_to(ROOT)]


def room_of(name):
    """The room that a dotted name is in, or the verb: `serialise.values._kinds` is in `values`."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in ORDER else "serialise"


def test_imports_point_downwards():
    for path in OURS:
        here = room_of(name_of(path))
        for name in imports_of(path)[0]:
            if name.startswith("serialise"):
                assert ORDER.index(room_of(name)) <= ORDER.index(here), f"{name_of(path)} imports {name}"


def test_the_house_does_not_grow():
    """A ratchet: what makes it smaller lowers these numbers, and what makes it larger has a reason."""
    lines = {name_of(path): len(path.read_text().splitlines()) for path in OURS}
    assert len(lines) <= 40
    assert sum(lines.values()) <= MAX_LINES_IN_ALL
    assert not [name for name, count in lines.items() if count > MAX_LINES]


@pytest.mark.parametrize("room", ORDER[:4])
def test_a_room_says_what_comes_in_and_out(room):
    said = sys.modules[f"sharedtree.serialise.{room}"].__doc__
    assert len([line for line in said.splitlines() if line.strip()]) <= 5
    assert " in come " in f" {said.lower()} ".replace("\n", " ")
    assert "never" in said.lower()
