"""`Dag`: a pytree around a model, with one leaf for each tied array, for code that knows only vanilla JAX."""

import importlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

from jax import tree_util as jtu

from ..core._hidden_arrays import refuse_hidden_arrays
from ..core._locks import Lock
from ..core._node_types import require_registered
from ..core._pack_and_unpack import unpack
from ..core._sharing import with_repeats_copied
from ..core._structure import Structure, leaf_paths, with_paths
from ..ties._leaf_notes import recall, remember
from ..ties._policy_and_context import pack_alone
from ._dag_text import dag_text

T = TypeVar("T")


class _Unbuilt:
    """Stands for a model that was not built yet. A class, because copies and pickles of a class are that very class."""


_UNBUILT: Any = _Unbuilt


in_treescope: list[Callable[[Any, str | None, Any], Any]] = []
"""The function that prints a Dag in treescope. Empty until `sharedtree.show` is imported, which puts one here.

The function takes the Dag, the path and the renderer of treescope, as `__treescope_repr__` does.
"""

# Two threads may both flatten or build one Dag. The lock is held only while one of the two results is stored, so
# that code of the model's classes never runs under it.
_building = Lock()


class Dag(Generic[T]):
    """A pytree whose leaves are the unique traced leaves of a model, each tied one once.

    `jax.jit`, `jax.grad`, `jax.tree.map`, `jax.device_put`, optax, jaxopt and checkpointers take a Dag without a
    decorator: they see one leaf where the model has one weight at two paths. `.tree` returns the model.

    Args:
        tree: a module, or any container of modules and arrays. All of it counts as inside a module, so tied arrays in
            a plain dict are one leaf. The Dag reads it once, when it is made, and does not see later mutations. A Dag
            from `sharedtree.load` reads it when it is first used.

    Attributes:
        tree: the model. For a Dag that you made, the very object that you passed. For a Dag that a transform or
            `jax.tree.map` made, a new model with the leaves of the Dag, built on first use and the same object from
            then on. Its arrays are aliased, not copied; mutable static data is copied.
        structure: everything but the leaves: node types, static values, ties. It is hashable, and two Dags with equal
            structures have one object.

    `repr` shows the ties: a tied object is printed once, with a number, and as this number at its other places. Arrays
    print as their dtypes and shapes.

    Cost: making a Dag walks the nodes once. Flattening it is free. The first `.tree` walks the nodes once.

    Raises:
        CycleError: if an object contains itself.
        UnregisteredTypeError: if `tree` cannot be taken apart.

    Example:
        >>> import jax, jax.numpy as jnp, sharedtree as st
        >>> w = jnp.ones(3)
        >>> dag = st.Dag({"embed": w, "head": w})
        >>> len(jax.tree.leaves(dag))
        1
        >>> gradient = jax.grad(lambda d: (d.tree["embed"] * d.tree["head"]).sum())(dag)
        >>> gradient.tree["embed"] is gradient.tree["head"], gradient.tree["head"]
        (True, Array([2., 2., 2.], dtype=float32))
        >>> dag
        Dag({'embed': #1 float32[3], 'head': #1})

    A Dag can be pickled if its static data can, so it can be sent to spawned processes. Its leaves are pickled by JAX
    and NumPy, each once, and `.tree` is built anew on arrival. A pickle runs code: load only pickles that you made
    yourself, and use `sharedtree.save` for files.

    Limitations: a Dag is a value. After a mutation of `.tree`, make a new Dag: `st.Dag(dag.tree)`. Python numbers in
    Equinox modules are static, as everywhere in sharedtree. A Dag that JAX made (a gradient, the result of a function)
    has the static values of the first tree with an equal structure.
    """

    __slots__ = ("_leaves", "_structure", "_tree")

    _leaves: Sequence[Any]
    _structure: Structure | None

    def __init__(self, tree: T) -> None:
        require_registered(tree)
        self._structure, self._tree = None, tree
        refuse_hidden_arrays(self._flatten()[1])

    @classmethod
    def _of_file(cls, tree: Any) -> "Dag[Any]":
        """Makes a Dag for `load`, whose model is packed when the leaves or the structure are first needed.

        So `load` itself calls no flatten function of the model's classes, which could be code of anybody.
        """
        dag: Dag[Any] = object.__new__(cls)
        dag._structure, dag._tree = None, tree
        return dag

    @property
    def structure(self) -> Structure:
        """The structure of the model: see the docstring of the class."""
        return self._flatten()[1]

    @property
    def tree(self) -> T:
        """The model: see the docstring of the class."""
        if self._tree is _UNBUILT:
            # JAX may have put one array in the places of two leaves. In the model they are two, so one is copied.
            leaves = with_repeats_copied(self._leaves)
            tree = unpack(self.structure, leaves)
            # Of two threads that built a model, the first to get here sets it, and both return that one.
            with _building:
                if self._tree is _UNBUILT:
                    self._leaves = leaves
                    self._tree = tree
            # Arrays that `tie` made one object outside modules are noted as such. The new arrays get this note, too.
            recall(self.structure, self._leaves)
        return self._tree

    def __repr__(self) -> str:
        leaves, structure = self._flatten()
        return dag_text(structure, leaves)

    def __treescope_repr__(self, path: str | None, subtree_renderer: Any) -> Any:
        if not in_treescope:
            # Puts the function into `in_treescope`.
            importlib.import_module(f"{__name__.partition('.')[0]}.show")
        return in_treescope[0](self, path, subtree_renderer)

    def __copy__(self) -> "Dag[T]":
        return self

    def __reduce__(self) -> Any:
        return type(self)._unflatten, (self.structure, self._leaves)

    def _flatten(self) -> tuple[Sequence[Any], Structure]:
        """Returns the unique traced leaves and the structure. Packs the model at the first call."""
        if self._structure is None:
            leaves, structure = pack_alone(self._tree)
            # Stores with the structure which leaves `tie` made one outside modules. `tree` reads it.
            remember(structure, leaves)
            # Of two threads that packed the model, the first to get here sets the result, as in `tree`.
            with _building:
                if self._structure is None:
                    self._leaves, self._structure = tuple(leaves), structure
        return self._leaves, self._structure

    @classmethod
    def _unflatten(cls, structure: Structure, leaves: Iterable[Any]) -> "Dag[Any]":
        """Makes a Dag of leaves and a structure. Its model is built on first use.

        JAX calls this for each Dag in the result of a function or of `jax.tree.map`.
        """
        dag: Dag[Any] = object.__new__(cls)
        dag._structure, dag._leaves, dag._tree = structure, tuple(leaves), _UNBUILT  # noqa: SLF001
        return dag


# The functions for JAX: leaves with paths and structure; the inverse; the same leaves without paths, which is faster.
jtu.register_pytree_with_keys(
    Dag,
    lambda dag: (with_paths(dag._flatten()[0], leaf_paths(dag.structure)), dag.structure),  # noqa: SLF001 # pyright: ignore
    Dag._unflatten,  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]
    Dag._flatten,  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]
)
