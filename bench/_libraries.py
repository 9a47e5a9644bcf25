"""How each library saves the arrays of a model and loads them as JAX arrays.

Each gets them in the form that it takes: a module, or a dict with the array at each path. What it returns is waited
for. Where a library has options, those it comes with are used.
"""

import os
import pathlib
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np

import sharedtree as st

from ._checkpoints import Checkpoint, arrays_by_path
from ._kinds import imported
from ._measuring import UnavailableError

RAW = "raw bytes"
SHAREDTREE = "sharedtree"
UNCHECKED = "sharedtree, verify=False"
MAPPED = "sharedtree, mmap=True, verify=False"
FILE_OBJECT = "sharedtree, to a file object"
EQUINOX = "equinox"
FLAX = "flax.serialization"
ORBAX = "orbax"
SHAREDTREE_ORBAX = "sharedtree.orbax"
SAFETENSORS = "safetensors.numpy"
SAFETENSORS_FLAX = "safetensors.flax"
PICKLE = "pickle"
JAXON = "jaxon"

TRUSTED = ("bench", "sharedtree")
"""Packages with the classes of the models."""

ALIGNMENT = 64
"""At a multiple of so many bytes in memory, JAX uses what is there without a copy."""


class Library(NamedTuple):
    """A way to save and to load.

    Attributes:
        save: writes to a path where nothing is.
        load: returns the array at each path, tied ones at each of theirs.
    """

    save: Callable[[pathlib.Path], None]
    load: Callable[[pathlib.Path], list[jax.Array]]


def raw_bytes(checkpoint: Checkpoint) -> Library:
    """The limit: the bytes of each array once, without a word on what they are."""
    arrays = checkpoint.unique
    number = {id(array): i for i, array in enumerate(arrays)}  # alive in `arrays`
    order = [number[id(array)] for array in checkpoint.by_path.values()]
    types = [(array.dtype, array.shape, array.nbytes) for array in arrays]
    starts = [0, *np.cumsum([nbytes + -nbytes % ALIGNMENT for _, _, nbytes in types]).tolist()]

    def save(path: pathlib.Path) -> None:
        if all(nbytes % ALIGNMENT == 0 for _, _, nbytes in types):
            parts = [memoryview(np.asarray(array).reshape(-1).view(np.uint8)) for array in arrays]
        else:
            parts = [b"".join(np.asarray(array).tobytes().ljust(ALIGNMENT, b"\0") for array in arrays)]
        with open(path, "wb", buffering=0) as file:
            for part in parts:
                file.write(part)

    def load(path: pathlib.Path) -> list[jax.Array]:
        block = np.empty(starts[-1] + ALIGNMENT, np.uint8)
        begin = -block.ctypes.data % ALIGNMENT
        block = block[begin : begin + starts[-1]]
        with open(path, "rb", buffering=0) as file:
            done = file.readinto(memoryview(block))
        assert done == len(block), "one `readinto` should read it all"
        views = [
            block[start : start + nbytes].view(dtype).reshape(shape)
            for start, (dtype, shape, nbytes) in zip(starts, types, strict=False)
        ]
        loaded = jax.device_put(views)
        return [loaded[i] for i in order]

    return Library(save, load)


def sharedtree(checkpoint: Checkpoint, **options: Any) -> Library:
    """`save` and `load`; the options are `load`'s."""

    def load(path: pathlib.Path) -> list[jax.Array]:
        return list(arrays_by_path(st.load(path, trusted=TRUSTED, **options)).values())

    return Library(lambda path: st.save(path, checkpoint.model), load)


def sharedtree_file_object(checkpoint: Checkpoint) -> Library:
    """`save` to a file that is open already, which it does not force to the disk."""

    def save(path: pathlib.Path) -> None:
        with open(path, "wb", buffering=0) as file:
            st.save(file, checkpoint.model)

    return sharedtree(checkpoint)._replace(save=save)


def equinox(checkpoint: Checkpoint) -> Library:
    """`tree_serialise_leaves`, and `tree_deserialise_leaves` into the model's shapes."""
    like = eqx.filter_eval_shape(lambda model: model, checkpoint.model)

    # Opened here, since Equinox changes the suffix of a path.
    def save(path: pathlib.Path) -> None:
        with open(path, "wb") as file:
            eqx.tree_serialise_leaves(file, checkpoint.model)

    def load(path: pathlib.Path) -> list[jax.Array]:
        with open(path, "rb") as file:
            return list(arrays_by_path(eqx.tree_deserialise_leaves(file, like)).values())

    return Library(save, load)


def flax(checkpoint: Checkpoint) -> Library:
    """`flax.serialization`, of a dict."""
    serialization = imported("flax.serialization")
    arrays = checkpoint.by_path

    def save(path: pathlib.Path) -> None:
        path.write_bytes(serialization.to_bytes(arrays))

    def load(path: pathlib.Path) -> list[jax.Array]:
        return _in_order(jax.device_put(serialization.msgpack_restore(path.read_bytes())), arrays)

    return Library(save, load)


def orbax(checkpoint: Checkpoint) -> Library:
    """Orbax's `StandardCheckpointer`, of a dict."""
    checkpoints = imported("orbax.checkpoint")
    arrays = checkpoint.by_path
    target = {path: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding) for path, a in arrays.items()}

    def save(path: pathlib.Path) -> None:
        with checkpoints.StandardCheckpointer() as checkpointer:
            checkpointer.save(path, arrays)
            checkpointer.wait_until_finished()

    def load(path: pathlib.Path) -> list[jax.Array]:
        with checkpoints.StandardCheckpointer() as checkpointer:
            return _in_order(checkpointer.restore(path, target), arrays)

    return Library(save, load)


def sharedtree_orbax(checkpoint: Checkpoint) -> Library:
    """`sharedtree.orbax`, the model in an Orbax `CheckpointManager`."""
    checkpoints = imported("orbax.checkpoint")

    def save(path: pathlib.Path) -> None:
        with checkpoints.CheckpointManager(path) as manager:
            st.orbax.save(manager, 0, checkpoint.model)
            manager.wait_until_finished()

    def load(path: pathlib.Path) -> list[jax.Array]:
        with checkpoints.CheckpointManager(path) as manager:
            return list(arrays_by_path(st.orbax.restore(manager, trusted=TRUSTED)).values())

    return Library(save, load)


def safetensors(checkpoint: Checkpoint) -> Library:
    """`safetensors.numpy`, of a dict."""
    numpy = imported("safetensors.numpy")
    arrays = checkpoint.by_path

    def save(path: pathlib.Path) -> None:
        numpy.save_file({name: np.asarray(array) for name, array in arrays.items()}, path)

    def load(path: pathlib.Path) -> list[jax.Array]:
        return _in_order(jax.device_put(numpy.load_file(path)), arrays)

    return Library(save, load)


def safetensors_flax(checkpoint: Checkpoint) -> Library:
    """`safetensors.flax`, of a dict."""
    jax_arrays = imported("safetensors.flax")
    arrays = checkpoint.by_path

    def save(path: pathlib.Path) -> None:
        jax_arrays.save_file(dict(arrays), path)  # which changes the dict

    def load(path: pathlib.Path) -> list[jax.Array]:
        return _in_order(jax_arrays.load_file(path), arrays)

    return Library(save, load)


def pickled(checkpoint: Checkpoint) -> Library:
    """`pickle`, protocol 5, of a dict of NumPy arrays."""
    arrays = checkpoint.by_path

    def save(path: pathlib.Path) -> None:
        with open(path, "wb") as file:
            pickle.dump({name: np.asarray(array) for name, array in arrays.items()}, file, protocol=5)

    def load(path: pathlib.Path) -> list[jax.Array]:
        with open(path, "rb") as file:
            return _in_order(jax.device_put(pickle.load(file)), arrays)

    return Library(save, load)


def jaxon(checkpoint: Checkpoint) -> Library:
    """`jaxon`, of the model."""
    library = imported("jaxon")

    def save(path: pathlib.Path) -> None:
        try:
            library.save(path, checkpoint.model)
        except library.JaxonError as error:
            raise UnavailableError(f"does not save this model: {error}") from None

    def load(path: pathlib.Path) -> list[jax.Array]:
        return list(arrays_by_path(library.load(path)).values())

    return Library(save, load)


LIBRARIES: dict[str, Callable[[Checkpoint], Library]] = {
    RAW: raw_bytes,
    SHAREDTREE: sharedtree,
    EQUINOX: equinox,
    SAFETENSORS: safetensors,
    SAFETENSORS_FLAX: safetensors_flax,
    PICKLE: pickled,
    FLAX: flax,
    ORBAX: orbax,
    SHAREDTREE_ORBAX: sharedtree_orbax,
    JAXON: jaxon,
}


def _in_order(loaded: dict[str, Any], like: dict[str, jax.Array]) -> list[jax.Array]:
    return [loaded[name] for name in like]


def files_of(path: pathlib.Path) -> list[pathlib.Path]:
    """The files that a library wrote, one or a folder full of them."""
    return [each for each in path.rglob("*") if each.is_file()] if path.is_dir() else [path]


def force_to_disk(path: pathlib.Path) -> None:
    """Returns when what a library wrote is on the disk."""
    for file in files_of(path):
        descriptor = os.open(file, os.O_RDWR)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
