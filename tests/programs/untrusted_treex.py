"""Inspects and loads a file of treex, which is imported only when the error says so."""

import json
import sys

import jax
import numpy as np

import sharedtree as st

assert not {"treex", "treeo", "flax", "optax"} & set(sys.modules)
assert "float32" in str(st.inspect(sys.argv[1]))
st.verify(sys.argv[1])
assert not {"treex", "treeo", "flax", "optax"} & set(sys.modules)
try:
    st.load(sys.argv[1])
except st.errors.UntrustedTypeError as error:
    told = [line.strip() for line in str(error).splitlines() if line.startswith("    import ")]
assert "import sharedtree.compat.treex" in told
assert not {"treex", "treeo", "flax", "optax"} & set(sys.modules)
for line in told:
    exec(line)
model = st.load(sys.argv[1])
print(json.dumps([np.asarray(leaf).tolist() for leaf in jax.tree.leaves(model)]))
import treex

assert type(model) is treex.Sequential and not hasattr(jax, "tree_map")
