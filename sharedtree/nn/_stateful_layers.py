"""`make_with_state` and `inference_mode` of Equinox, with ties kept.

`equinox.nn.make_with_state` and `equinox.nn.inference_mode` flatten a model as a tree. So a `BatchNorm` at two paths
becomes two, with two running statistics. Here it stays one.

A layer of Equinox with a state holds a `StateIndex`: a key, and an initial value. The state maps the key to the current
value.
"""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import equinox as eqx
from jax import tree_util as jtu

from ..core._structure import Node, Op
from ..ties._policy_and_context import walk_exactly
from ..tree._partition import rebuilt
from ..tree._replace_nodes import at

P = ParamSpec("P")
T = TypeVar("T")


def make_with_state(make_model: Callable[P, T]) -> Callable[P, tuple[T, eqx.nn.State]]:
    """Makes a stateful model and its state, as `equinox.nn.make_with_state` does, with ties kept.

    A shared stateful layer has one state, whichever path it is called by. If nothing is shared, model and state are
    those of Equinox, with the same keys.

    Args:
        make_model: a class, or a function returning a model.

    Returns:
        A function of the same arguments. It returns the model without its initial values, and the state.

    Cost: one walk over the nodes. Arrays are aliased.

    Example:
        >>> import equinox as eqx, jax, sharedtree as st
        >>> class Twice(eqx.Module):
        ...     first: eqx.nn.BatchNorm
        ...     second: eqx.nn.BatchNorm
        ...     def __init__(self):
        ...         self.first = self.second = eqx.nn.BatchNorm(3, axis_name="batch", mode="batch")
        >>> model, state = st.make_with_state(Twice)()
        >>> model.first is model.second
        True
        >>> len(jax.tree.leaves(state)) < len(jax.tree.leaves(eqx.nn.make_with_state(Twice)()[1]))
        True

    Limitations: objects are shared by identity, so two `StateIndex` objects have two states, even if one is a copy of
    the other.
    """

    @functools.wraps(make_model, updated=())
    def make(*args: P.args, **kwargs: P.kwargs) -> tuple[T, eqx.nn.State]:
        """Makes the model, names each `StateIndex` by its first path, and moves the initial values into the state."""
        model = make_model(*args, **kwargs)
        # Second argument: a `StateIndex` counts as a leaf.
        dag = walk_exactly(model, _is_index)
        # Record of an index → the index with its new name.
        indexes: dict[int, eqx.nn.StateIndex[Any]] = {}
        for number in dag.first_paths:
            if _is_index(dag.objects[number]):
                indexes[number] = _renamed(dag.objects[number], type(model).__name__ + dag.text(number))
        state = eqx.nn.State([*indexes.values()])
        for number, index in indexes.items():
            # Equinox puts one placeholder into all indexes, which would be a tie. `tree_map` copies it.
            indexes[number] = jtu.tree_map(lambda leaf: leaf, eqx.nn.delete_init_state(index))
        # The tree is built anew from its own objects, with the new indexes.
        leaves = {**dict(enumerate(dag.objects)), **indexes}
        return rebuilt(dag.root, dag.records.__getitem__, leaves.__getitem__), state

    return make


def makes_state(op: Op) -> bool:
    """Returns True if an operation makes an `equinox.nn.State`.

    `equinox.nn.State(model)` aliases the arrays that the model keeps as initial values and never reads, so callers can
    treat these ties differently.
    """
    return type(op) is Node and op.type.cls is eqx.nn.State


def _is_index(obj: Any) -> bool:
    """Returns True for a `StateIndex`."""
    return isinstance(obj, eqx.nn.StateIndex)


def _renamed(index: eqx.nn.StateIndex[Any], name: str) -> eqx.nn.StateIndex[Any]:
    """Returns a copy of an index with this name as its key.

    Equinox documents no way to set the key. Like its own function, we set the attribute `marker`. If a new version of
    Equinox stores the key elsewhere, the first `state.get` raises `KeyError`.
    """
    new = eqx.nn.StateIndex(index.init)
    object.__setattr__(new, "marker", name)
    return new


def inference_mode(tree: T, value: bool = True) -> T:
    """Sets every `inference` attribute of a model, as `equinox.nn.inference_mode` does, with ties kept.

    Args:
        tree: the model, or any container of models; it is not changed.
        value: the new value of the attributes.

    Returns:
        A tree of new nodes with the same arrays.

    Raises:
        SharingMismatchError: if an `inference` attribute is static or computed, so that it is not part of the tree.

    Cost: a few walks over the nodes.

    Example:
        >>> import equinox as eqx, sharedtree as st
        >>> dropout = eqx.nn.Dropout(0.5)
        >>> one, two = st.inference_mode([dropout, dropout])
        >>> one is two, one.inference
        (True, True)
    """

    def flags(model: T) -> list[Any]:
        """Returns the `inference` attributes, each shared module's once."""
        return [obj.inference for obj in walk_exactly(model).objects if hasattr(obj, "inference")]

    # `at` calls `flags` on the tree, replaces the nodes that it returns, and keeps the ties.
    return at(flags, tree, [value] * len(flags(tree)))
