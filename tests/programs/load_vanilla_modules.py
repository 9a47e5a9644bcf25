"""Loads modules that Equinox or JAX wrapped, and compares them with what was saved."""

import functools
import json
import pathlib

import equinox as eqx
import jax
import numpy as np

import sharedtree as st
from tests.serialise import vanilla

groups = json.loads(pathlib.Path("groups.json").read_text())
expected = np.load("expected.npz")
for path, types in groups.items():
    vanilla.bind_others(list(types))
    group = st.load(path, trusted="tests")
    # To JAX what a partial holds is static, and static arrays cannot be compared.
    likes = [] if any(isinstance(each, functools.partial) for each in group.values()) else [group]
    for back in (group, *[st.load(path, like=like) for like in likes]):
        for name, cls in types.items():
            assert type(back[name]).__qualname__ == cls, name
            assert back[name] is not getattr(vanilla, name), name
            leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(back[name]) if eqx.is_array(leaf)]
            assert len(leaves) == sum(key.partition(":")[0] == name for key in expected), name
            for i, leaf in enumerate(leaves):
                np.testing.assert_array_equal(leaf, expected[f"{name}:{i}"], err_msg=name, strict=True)
