"""What is saved and loaded: models of several sizes, and a folder for their files that is gone when nobody needs it."""

import dataclasses
import pathlib
import shutil
import tempfile
import weakref
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.tree_util as jtu
import numpy as np

from ._models import make_model
from .training import Sizes, make_language_model

ROWS = 2048
"""Of each layer of the large models."""


@dataclasses.dataclass(eq=False)
class Checkpoint:
    """A model, and where its files go. The folder is removed with the last reference to this, or when Python ends.

    Attributes:
        model: of JAX arrays.
        folder: for files.
    """

    model: Any
    folder: pathlib.Path = dataclasses.field(default_factory=lambda: pathlib.Path(tempfile.mkdtemp(prefix="bench-")))

    def __post_init__(self) -> None:
        weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)

    def path(self, name: str) -> pathlib.Path:
        """The path of a file for something with a name."""
        return self.folder / name.replace(" ", "-")

    @property
    def by_path(self) -> dict[str, jax.Array]:
        """The array at each path, tied ones at each of theirs."""
        return arrays_by_path(self.model)

    @property
    def unique(self) -> list[jax.Array]:
        """The arrays, each once."""
        # `model` keeps them alive while their ids are in use.
        return list({id(array): array for array in self.by_path.values()}.values())


class Lazy:
    """Makes a checkpoint when it is first asked for; then gives the same one for as long as somebody has it.

    So the implementations of a case share one, and it is gone before the next case.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._made: weakref.ref[Checkpoint] | None = None

    def __call__(self) -> Checkpoint:
        found = self._made() if self._made is not None else None
        if found is None:
            found = Checkpoint(self._make())
            self._made = weakref.ref(found)
        return found


def arrays_by_path(model: Any) -> dict[str, Any]:
    """The array at each path of any pytree."""
    arrays = eqx.filter(model, lambda leaf: isinstance(leaf, jax.Array | jax.ShapeDtypeStruct | np.ndarray))
    return {jtu.keystr(path): leaf for path, leaf in jtu.tree_leaves_with_path(arrays)}


def checksums(arrays: Sequence[Any]) -> list[np.ndarray[Any, Any]]:
    """For each array its shape, its item size and a CRC-32 of its bytes: equal where the arrays are."""
    on_host = [np.ascontiguousarray(array) for array in arrays]
    return [np.array([*a.shape, a.itemsize, zlib.crc32(a.reshape(-1).view(np.uint8))]) for a in on_host]


def make_large(num_layers: int, columns: int) -> Any:
    """Linear layers whose weights and biases are of random numbers; a weight has 8 KiB for each column."""
    random = np.random.default_rng(0)
    blank = eqx.filter_eval_shape(eqx.nn.Linear, columns, ROWS, key=jax.random.key(0))

    def layer() -> Any:
        weight, bias = (random.random(shape, np.float32) for shape in ((ROWS, columns), (ROWS,)))
        return eqx.tree_at(lambda layer: (layer.weight, layer.bias), blank, jax.device_put((weight, bias)))

    return [layer() for _ in range(num_layers)]


def make_middle(number: int) -> Any:
    """Arrays of 1 MiB, of random numbers."""
    random = np.random.default_rng(0)
    return [jax.device_put(random.random((512, 512), np.float32)) for _ in range(number)]


def make_small() -> Any:
    """Blocks of 2000 arrays in all, of 32 bytes each."""
    model = make_model(2000)
    random = np.random.default_rng(0)
    return jax.tree.map(lambda _: jax.device_put(random.random(8, np.float32)), model)


def make_tied() -> Any:
    """The demo's model, whose embedding is its output layer."""
    return make_language_model(Sizes())
