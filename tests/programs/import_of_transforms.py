"""Prints what is imported once a transform is wrapped."""

import sys

import sharedtree as st

own = lambda: {name for name in sys.modules if name.startswith("sharedtree.")}
assert not [name for name in own() if name.startswith("sharedtree.transforms.checks")]
st.jit(lambda x: x)
print(*own())
