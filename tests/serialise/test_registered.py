"""Instances of registered classes, of which a file has too few or too many parts: an error, and nothing else.

Each runs in a process of its own, for JAX's own unflatten function of `register_dataclass` reads past the end.
"""

import pytest

import sharedtree as st
from tests.processes import program, run

from . import strategies
from .drafts import Draft

CLASSES = program("registered_classes")

TRIED = CLASSES + program("registered_forged")


@pytest.mark.slow
def test_other_numbers_of_children_and_static_values_are_an_error():
    lines = run(TRIED, options=("-X", "faulthandler")).splitlines()
    names = {line.split()[0] for line in lines}
    assert {"Fields", "Dataclass", "Zips", "WithKeys", "Own", "Pair", "Module", "State"} <= names
    # A partial takes any number of arguments.
    loaded = [line for line in lines if line.endswith("loaded") and not line.startswith("Partial")]
    assert not loaded


def test_the_error_says_how_many():
    namespace: dict = {"__name__": __name__}
    exec(CLASSES, namespace)
    draft = Draft(st.to_bytes(strategies.Registered((1, 2), ["aux"])))
    (node,) = (node for node in draft.manifest["nodes"] if node[0] == "registered")
    node[2:] = [0, ["x", "y"], ["[0]", "[1]"]]
    draft.manifest["nodes"].insert(0, ["tuple", ["a"]])
    draft.manifest["root"] += 1
    renames = {f"{strategies.__name__}:Registered": namespace["Zips"]}
    with pytest.raises(
        st.errors.StructureMismatchError, match="2 children and 1 static values for a `Zips`, and that has 1"
    ):
        st.from_bytes(draft.file(with_digests=True), renames=renames)
