"""Equinox's two functions for layers with a state or a mode, with ties.

`equinox.nn.make_with_state` and `equinox.nn.inference_mode` take a model apart as a tree, so a `BatchNorm` that is used
twice comes out as two, with two running statistics. Here it stays one.
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
    """Parts a stateful model into the model and its state. `equinox.nn.make_with_state`, with ties kept.

    A stateful layer that is shared has one state, whichever path it is called by. Where nothing is shared, the model
    and the state are those of Equinox, under the same keys.

    Args:
        make_model: a class or a function that returns a model.

    Returns:
        A function of the same arguments that returns the model, without its initial state, and the state.

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

    Limitations: sharing is told by identity, so two `StateIndex` objects have two states, even if one is a copy.
    """

    @functools.wraps(make_model, updated=())
    def make(*args: P.args, **kwargs: P.kwargs) -> tuple[T, eqx.nn.State]:
        model = make_model(*args, **kwargs)
        walked = walk_exactly(model, _is_index)
        indexes: dict[int, eqx.nn.StateIndex[Any]] = {}
        for number in walked.first_paths:
            if _is_index(walked.objects[number]):
                indexes[number] = _renamed(walked.objects[number], type(model).__name__ + walked.text(number))
        state = eqx.nn.State([*indexes.values()])
        for number, index in indexes.items():
            # A copy, since Equinox puts one and the same placeholder into all of them, which would be a tie.
            indexes[number] = jtu.tree_map(lambda leaf: leaf, eqx.nn.delete_init_state(index))
        leaves = {**dict(enumerate(walked.objects)), **indexes}
        return rebuilt(walked.root, walked.records.__getitem__, leaves.__getitem__), state

    return make


def makes_state(op: Op) -> bool:
    """Whether what a record makes is the state of a model.

    `equinox.nn.State(model)` begins with the very arrays that the model keeps as its initial state and never reads.
    """
    return type(op) is Node and op.type.cls is eqx.nn.State


def _is_index(obj: Any) -> bool:
    return isinstance(obj, eqx.nn.StateIndex)


def _renamed(index: eqx.nn.StateIndex[Any], name: str) -> eqx.nn.StateIndex[Any]:
    """A new index with this name for a key.

    Equinox documents no way to name one: its own function sets the attribute `marker` so. Without that attribute the
    model and its state would not find each other, and the first `state.get` would raise `KeyError`.
    """
    new = eqx.nn.StateIndex(index.init)
    object.__setattr__(new, "marker", name)
    return new


def inference_mode(tree: T, value: bool = True) -> T:
    """Sets every `inference` attribute of a model. `equinox.nn.inference_mode`, with ties kept.

    Args:
        tree: the model, or any container of models; it is not changed.
        value: what to set them to.

    Returns:
        A tree of new nodes; arrays are the same objects.

    Raises:
        SharingMismatchError: if an `inference` attribute is static or computed, and so not part of the tree.

    Cost: a few walks over the nodes.

    Example:
        >>> import equinox as eqx, sharedtree as st
        >>> dropout = eqx.nn.Dropout(0.5)
        >>> one, two = st.inference_mode([dropout, dropout])
        >>> one is two, one.inference
        (True, True)
    """

    def flags(model: T) -> list[Any]:
        return [obj.inference for obj in walk_exactly(model).objects if hasattr(obj, "inference")]

    return at(flags, tree, [value] * len(flags(tree)))
