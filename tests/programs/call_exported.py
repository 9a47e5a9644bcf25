"""Reads two exported programs and calls them with a tied pair."""

import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np

import sharedtree as st
from tests.strategies import Pair

program, dag = (pathlib.Path(path).read_bytes() for path in sys.argv[1:])
w = jnp.arange(3.0)
pair = Pair(w, [w, jax.nn.relu])
exported = st.Exported.deserialize(program, trusted=[Pair])
new, other = exported.call(pair, {"net": pair}, 0.5)
assert new.first is new.second[0] and other["net"].first is other["net"].second[0] and new.second[1] is jax.nn.relu
np.testing.assert_allclose(new.first, 2 * w + 0.5)
gradient = st.grad(lambda pair: exported.call(pair, {"net": pair}, 0.5)[0].first.sum())(pair)
assert gradient.first is gradient.second[0]
np.testing.assert_allclose(gradient.first, [2, 2, 2])
st.trust(Pair)
dag = jax.export.deserialize(bytearray(dag)).call(st.Dag(pair))
assert dag.tree.first is dag.tree.second[0]
