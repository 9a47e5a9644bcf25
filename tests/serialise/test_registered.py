"""Instances of registered classes, of which a file has too few or too many parts: an error, and nothing else.

Each runs in a process of its own, for JAX's own unflatten function of `register_dataclass` reads past the end.
"""

import pytest

import sharedtree as st
from tests.processes import run

from . import strategies
from .drafts import Draft

CLASSES = """
import collections, dataclasses, functools
from typing import Any, NamedTuple
import equinox as eqx, jax, numpy as np
from jax import tree_util as jtu
import sharedtree as st

class Fields:
    def __init__(self, a, b, m):
        self.a, self.b, self.m = a, b, m

jtu.register_dataclass(Fields, data_fields=["a", "b"], meta_fields=["m"])

@functools.partial(jtu.register_dataclass, data_fields=["a", "b"], meta_fields=["m"])
@dataclasses.dataclass
class Dataclass:
    a: Any
    b: Any
    m: Any = 0

class Zips:
    def __init__(self, **values):
        self.values = values

jtu.register_pytree_node(
    Zips, lambda z: (tuple(z.values.values()), tuple(z.values)), lambda names, xs: Zips(**dict(zip(names, xs)))
)

class WithKeys(Zips):
    pass

jtu.register_pytree_with_keys(
    WithKeys,
    lambda z: (tuple((jtu.GetAttrKey(k), v) for k, v in z.values.items()), tuple(z.values)),
    lambda names, xs: WithKeys(**dict(zip(names, xs))),
)

class Own(Zips):
    pass

st.register_node(Own, lambda z: (tuple(z.values.values()), tuple(z.values)), lambda n, xs: Own(**dict(zip(n, xs))))

class Pair(NamedTuple):
    a: Any
    b: Any

class Module(eqx.Module):
    a: Any
    b: Any
    m: Any = eqx.field(static=True)

try:
    @jtu.register_static
    class Fixed:
        pass
except AttributeError:
    Fixed = None

SAMPLES = [
    Fields(np.ones(2), 2, "m"), Dataclass(np.ones(2), 2, "m"), Zips(a=np.ones(2), b=2), WithKeys(a=np.ones(2), b=2),
    Own(a=np.ones(2), b=2), Pair(np.ones(2), 2), Module(np.ones(2), 2, "m"), jtu.Partial(jax.numpy.add, 1, x=2),
    eqx.nn.make_with_state(eqx.nn.BatchNorm)(2, "batch", mode="batch")[1],
]
"""

TRIED = (
    CLASSES
    + """
import sys, json
from tests.serialise.drafts import Draft

def changed(node, how):
    \"\"\"The node with other numbers of children, of steps that go with them, or of static values.\"\"\"
    place = {"registered": 3, "object": 2, "Partial": 2}[node[0]]
    if how == "aux":
        return None if node[0] != "registered" else [*node[:2], "x", *node[3:]]
    node = [list(part) if isinstance(part, list) else part for part in node]
    count = len(node[place])
    many = {"none": 0, "one fewer": count - 1, "one more": count + 1, "many": count + 50}[how]
    node[place] = (node[place] + ["y"] * 60)[:many]
    if node[0] == "registered":
        node[4] = [f"[{i}]" for i in range(many)]
    return node

for sample in SAMPLES:
    data = st.to_bytes(sample)
    trusted = [c for c in (Fields, Dataclass, Zips, WithKeys, Own, Pair, Module)]
    st.from_bytes(data, trusted=trusted)
    for how in ("none", "one fewer", "one more", "many", "aux"):
        draft = Draft(data)
        nodes = draft.manifest["nodes"]
        new = changed(nodes[draft.manifest["root"]], how)
        if new is None:
            continue
        nodes[draft.manifest["root"]] = new
        for options in ({}, {"like": sample, "strict": False}):
            print(type(sample).__name__, how, end=": ", flush=True)
            try:
                st.from_bytes(draft.file(with_digests=True), trusted=trusted, **options)
                print("loaded", flush=True)
            except st.SharedTreeError as error:
                print(type(error).__name__, flush=True)

# What no save writes: aux data that an unflatten function would hand out in the place of an instance.
draft = Draft(st.to_bytes(Zips(a=1)))
if Fixed is not None:
    draft.manifest["types"][0]["name"] = "__main__:Fixed"
    draft.manifest["nodes"][-1] = ["registered", 0, "x", [], []]
    try:
        st.from_bytes(draft.file(with_digests=True), trusted=[Fixed])
        print("Fixed: loaded")
    except st.SharedTreeError as error:
        print("Fixed:", type(error).__name__)
"""
)


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
