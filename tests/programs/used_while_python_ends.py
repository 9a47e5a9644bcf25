"""Uses rooms of the package for the first time in a trace, while Python ends."""

import atexit
import sys

import jax
import numpy as np

import sharedtree as st
from sharedtree.core._lazy_names import ROOM_OF


def at_the_end():
    assert not [room for room in {*ROOM_OF.values()} if f"sharedtree.{room}" in sys.modules]
    jax.jit(lambda x: [getattr(st, name) for name in ROOM_OF] and x)(1.0)
    shared = np.ones(2**23, np.uint8)
    st.save(sys.argv[1], [shared, shared])
    one, other = st.load(sys.argv[1])
    print(one is other, one.sum(), st.state([shared])[0].sum(), st.summary([shared, shared]), sep="\n")


atexit.register(at_the_end)
