"""Loads, drops and saves arrays, and fails if memory is not given back or is copied."""

import gc
import os
import re
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np

warnings.simplefilter("ignore")  # JAX's, about forks
import sharedtree as st


def in_status(name):
    gc.collect()
    with open("/proc/self/status") as file:
        return int(re.search(name + r": *(.*) kB", file.read().expandtabs())[1]) / 2**10


both, few = sys.argv[1:]
st.load(both, select="['x'][0]")
for _ in range(2):
    before = in_status("VmRSS")
    loaded = jax.block_until_ready(st.load(both))
    everything = in_status("VmRSS") - before
    survivors = [loaded["x"][50], loaded["y"][50]]
    del loaded
    # Also the second time, when `malloc` would keep what lies below the array that is still there.
    rest = in_status("VmRSS") - before
    assert 120 < everything < 128 + 12 and rest < 2 * 16 + 12, (everything, rest)
    del survivors

loaded = st.load(few)
child = os.fork()
if not child:
    for array in loaded:
        array[:] = -1
    os._exit(int(all((array == -1).all() for array in loaded)))
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 1, "the child did not write"
assert all((array == i + 1).all() for i, array in enumerate(loaded)), "the child wrote here"

st.save(few, [jnp.ones(9), np.ones((3, 3)).T])
# More than all that was loaded before.
tree = [jnp.zeros(96 * 2**20, jnp.uint8), np.ones(96 * 2**20, np.uint8), np.ones((8192, 12288), np.uint8).T]
jax.block_until_ready(tree)
before = in_status("VmHWM")
st.save(few, tree)
assert in_status("VmHWM") <= before + 64, "one of the arrays was copied, each of 96 MiB"
