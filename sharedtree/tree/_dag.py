"""`Dag`: the explicit handle on a model, for code that knows only vanilla JAX."""

import importlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

from jax import tree_util as jtu

from ..core._hidden_arrays import require_all_seen
from ..core._locks import Lock
from ..core._node_types import require_registered
from ..core._pack_and_unpack import unpack
from ..core._sharing import distinct
from ..core._structure import Structure, leaf_paths, with_paths
from ..ties._leaf_notes import recall, remember
from ..ties._policy_and_context import pack_alone
from ._dag_text import dag_text

T = TypeVar("T")


class _Unbuilt:
    """Stands for a tree that was not built yet: a class, since copying and pickling keep classes the same objects."""


_UNBUILT: Any = _Unbuilt


in_treescope: list[Callable[[Any, str | None, Any], Any]] = []
"""How treescope shows a Dag: a function that `show` puts here when it is imported."""

_building = Lock()  # held for two assignments, of what two threads may both have made


class Dag(Generic[T]):
    """A pytree whose leaves are the unique traced leaves of a model, each tied one once.

    `jax.jit`, `jax.grad`, `jax.tree.map`, `jax.device_put`, optax, jaxopt and checkpointers take it as it is, without
    a decorator: they see one leaf where the model has one weight at two paths. `.tree` gives the model back.

    Args:
        tree: a module, or any container of modules and arrays; all of it counts as inside a module, so tied arrays in
            a plain dict are one leaf. It is read once, here: what is mutated later is not seen. That of a Dag which
            `sharedtree.load` made is read when the Dag is first used.

    Attributes:
        tree: the model. The very object that was given, or, in a Dag that a transform or `jax.tree.map` made, a new
            model with its leaves, built on first use and the same object from then on. Arrays are aliased, not
            copied; mutable static data is copied.
        structure: the hashable rest, one object for equal structures.

    It prints with its ties: what is tied stands once, with a number, and the number wherever it comes again. Arrays
    print as their dtypes and shapes.

    Cost: one walk over the nodes to make it; flattening it is free; one walk for the first `.tree`.

    Raises:
        CycleError: if an object contains itself.
        UnregisteredTypeError: if `tree` is an object that cannot be taken apart.

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

    A Dag can be pickled if its static data can, so it goes to spawned processes. Its leaves are pickled as JAX and
    NumPy do that, each once, and `.tree` is built anew where it arrives. A pickle runs code: load only what you made
    yourself, and use `sharedtree.save` for files.

    Limitations: a Dag is a value. To take over a mutation of `.tree`, make a new one: `st.Dag(dag.tree)`. Its Python
    numbers in Equinox modules are static, as everywhere in sharedtree. One that JAX made (a gradient, the result of a
    function) has the static values of the first tree with an equal structure.
    """

    __slots__ = ("_leaves", "_structure", "_tree")

    _leaves: Sequence[Any]
    _structure: Structure | None

    def __init__(self, tree: T) -> None:
        require_registered(tree)
        self._structure, self._tree = None, tree
        require_all_seen(self._flatten()[1])

    @classmethod
    def _of_file(cls, tree: Any) -> "Dag[Any]":
        """A Dag whose model is read when its leaves or its structure are first asked for.

        So nothing is asked of the objects of a file while it is loaded.
        """
        dag: Dag[Any] = object.__new__(cls)
        dag._structure, dag._tree = None, tree
        return dag

    @property
    def structure(self) -> Structure:
        """See the class."""
        return self._flatten()[1]

    @property
    def tree(self) -> T:
        """The model; see the class."""
        if self._tree is _UNBUILT:
            leaves = distinct(self._leaves)
            tree = unpack(self.structure, leaves)
            with _building:  # the first one's is the model, whoever asks
                if self._tree is _UNBUILT:
                    self._leaves = leaves
                    self._tree = tree
            recall(self.structure, self._leaves)
        return self._tree

    def __repr__(self) -> str:
        leaves, structure = self._flatten()
        return dag_text(structure, leaves)

    def __treescope_repr__(self, path: str | None, subtree_renderer: Any) -> Any:
        if not in_treescope:
            importlib.import_module(f"{__name__.partition('.')[0]}.show")
        return in_treescope[0](self, path, subtree_renderer)

    def __copy__(self) -> "Dag[T]":
        return self

    def __reduce__(self) -> Any:
        return type(self)._unflatten, (self.structure, self._leaves)

    def _flatten(self) -> tuple[Sequence[Any], Structure]:
        if self._structure is None:
            leaves, structure = pack_alone(self._tree)
            remember(structure, leaves)
            with _building:
                if self._structure is None:
                    self._leaves, self._structure = tuple(leaves), structure
        return self._leaves, self._structure

    @classmethod
    def _unflatten(cls, structure: Structure, leaves: Iterable[Any]) -> "Dag[Any]":
        dag: Dag[Any] = object.__new__(cls)
        dag._structure, dag._leaves, dag._tree = structure, tuple(leaves), _UNBUILT  # noqa: SLF001
        return dag


jtu.register_pytree_with_keys(
    Dag,
    lambda dag: (with_paths(dag._flatten()[0], leaf_paths(dag.structure)), dag.structure),  # noqa: SLF001 # pyright: ignore
    Dag._unflatten,  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]
    Dag._flatten,  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]
)
