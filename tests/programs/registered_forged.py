"""Loads files of each of the `SAMPLES` with other numbers of children, and prints what comes of it."""
# ruff: noqa: F821 -- it follows `registered_classes`

import json
import sys

from tests.serialise.drafts import Draft


def changed(node, how):
    """The node with other numbers of children, of steps that go with them, or of static values."""
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
    trusted = [Fields, Dataclass, Zips, WithKeys, Own, Pair, Module]
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
