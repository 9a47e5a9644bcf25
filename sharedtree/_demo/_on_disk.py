"""The demo's checkpoint on disk: saved as it is, loaded without a template, and training goes on from it bit for bit.

One call saves the model, the state of the optimizer, the counter, the state of both random generators and the sizes,
and one call makes equal objects of the file, in which what was one object is one again. The classes of the demo need no
`trusted=`, being part of `sharedtree`; your own would.
"""

import io
import os
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import sharedtree as st

from ._training import Advanced, Checkpoint


class FileSizes(NamedTuple):
    """How large files with one state of training are, in bytes.

    Attributes:
        tied: the checkpoint's.
        untied: that of the same checkpoint with all ties undone.
        equinox: that of model and optimizer state, which `equinox.tree_serialise_leaves` writes with each copy.
    """

    tied: int
    untied: int
    equinox: int


def reload(checkpoint: Checkpoint, path: str | os.PathLike[str]) -> tuple[Checkpoint, FileSizes]:
    """Saves a checkpoint and loads it again.

    Args:
        checkpoint: is left as it is.
        path: of the file, which is kept.

    Returns:
        What the file holds, and its size beside others.
    """
    st.save(path, checkpoint, metadata={"step": str(checkpoint.step)})
    by_equinox = io.BytesIO()
    eqx.tree_serialise_leaves(by_equinox, (checkpoint.model, checkpoint.optimizer_state))
    untied = len(st.to_bytes(st.untie(checkpoint)))
    return st.load(path), FileSizes(os.path.getsize(path), untied, by_equinox.tell())


def differences(live: Advanced, again: Advanced) -> tuple[str, ...]:
    """What is not the same, bit for bit, after the same steps from a checkpoint in memory and from the one on disk.

    Returns:
        Names: `losses`, and paths in the checkpoint; empty if nothing differs.
    """
    found = ["losses"] if live.losses.tobytes() != again.losses.tobytes() else []
    one, other = live.checkpoint, again.checkpoint
    if not st.same_sharing(one, other):
        return (*found, "the ties")
    leaves = [st.tree.leaves_with_path(each) for each in (one, other)]
    found += [
        jax.tree_util.keystr(path)
        for (path, a), (other_path, b) in zip(*leaves, strict=True)
        if path != other_path or _bits(a) != _bits(b)
    ]
    if (one.step, one.windows, one.sizes, one.steps) != (other.step, other.windows, other.sizes, other.steps):
        found.append("the counters and sizes")
    return tuple(found)


def _bits(leaf: Any) -> tuple[Any, ...]:
    if not isinstance(leaf, jax.Array | np.ndarray):
        return (type(leaf), repr(leaf))  # the state of NumPy's generator is integers of 128 bits
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return (str(leaf.dtype), np.asarray(jax.random.key_data(leaf)).tobytes())
    array = np.asarray(leaf)
    return (type(leaf), array.dtype, array.shape, getattr(leaf, "weak_type", False), array.tobytes())
