"""Prints a digest of the file of each of some trees with sets."""

import hashlib

import jax
import numpy as np

import sharedtree as st
from tests.serialise.models import Token

shared = ("shared", frozenset({"x", "y"}))
trees = [
    {"a", "b", "c", 1, 2.5, None},
    {("a", 1), ("b", 2), frozenset({"p", "q"}), "text"},
    {jax.nn.relu, jax.nn.gelu, int, np.float32, np.dtype("int8"), np.int8(3)},
    {frozenset({("m", frozenset({"n", "o"})), ("m", frozenset({"n", "r"}))}): [shared]},
    [{("left", shared), ("right", shared)}, shared],
    {Token("a"), Token("b"), Token("c")},
    frozenset({(Token("a"), frozenset({Token("d"), Token("e")})), (Token("b"), "x")}),
    jax.sharding.PartitionSpec(None, ("x", "y")),
]
for tree in trees:
    print(hashlib.sha256(st.to_bytes(tree)).hexdigest())
