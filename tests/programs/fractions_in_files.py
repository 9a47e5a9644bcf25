"""Saves and loads fractions, as the page on new kinds of node has them, and forged ones."""

import fractions
import json

import sharedtree as st
from tests.serialise.drafts import Draft
from tests.serialise.table import NODE_KINDS

half = fractions.Fraction(1, 2)
data = st.to_bytes({"rate": half, half: [half]})
draft = Draft(data)
(number,) = [i for i, node in enumerate(draft.manifest["nodes"]) if node[0] == "fraction"]
refused = []
one, two = ["int", "1"], ["int", "2"]
for operands in ([one, ["int", "0"]], [one], [True, one], ["1", two], [0, two]):
    draft = Draft(data)
    draft.manifest["nodes"][number] = ["fraction", *operands]
    try:
        st.from_bytes(draft.file(with_digests=True))
    except st.errors.FormatError as error:
        refused.append(str(error))
told = repr(st.from_bytes(data)), str(st.inspect(data)), str(st.audit(data))
print(json.dumps([*told, refused, NODE_KINDS["fraction"]]))
