"""A model as plain nested data: `sharedtree.state`; and the objects of a tree with their forms.

The idea is that of `Flux.state` (Flux.jl, pull request 2239): the state has an entry for each field of the model. An
object that is no state, such as a function, becomes the empty tuple and is never left out. Unlike in Flux, the state
shares where the model shares.

The *form* of an object lists its parts and the container for their states; see `_state_forms`.
"""

import typing
from collections.abc import Callable, Sequence
from typing import Any

from jax import tree_util as jtu

from ...core._by_identity import IdentityDict, IdentitySet
from ...core._node_types import require_registered
from ...core._walk import MAX_DEPTH, cycle_error, raise_too_deep
from .._filters import filter_of, filter_or_prefix, is_one_filter, takes
from ._kept_leaves import OF_STATE, KeptLeaves
from ._state_forms import Form, form_of, is_state_leaf


class _Frame:
    """An object whose parts are being visited.

    Attributes:
        obj: the object.
        form: its form.
        num_visited: number of its parts that were visited. It is the index of the next part.
    """

    __slots__ = ("form", "num_visited", "obj")

    def __init__(self, obj: Any, form: Form) -> None:
        self.obj = obj
        self.form = form
        self.num_visited = 0


class Objects(IdentityDict[Form | None]):
    """A map from each object of a tree to its form, parts before the object. None for an object without parts.

    Raises:
        CycleError: if an object contains itself.
        DepthError: if objects are nested more than `MAX_DEPTH` deep, as are those of a flatten function that makes new
            objects without end.
    """

    __slots__ = ()

    def __init__(self, tree: Any) -> None:
        """Visits the objects depth first, without recursion. The frames lead from the root to the current object."""
        super().__init__()
        frames: list[_Frame] = []
        visited = IdentitySet()

        def visit(obj: Any) -> None:
            """Maps an object without parts at once. Opens a frame for any other, if it was not visited before."""
            # `add` returns False for an object that is in the set already.
            if not visited.add(obj):
                if obj in self:
                    return
                # Visited and not finished: the object has a frame, and contains itself. A frame's step is empty if the
                # path of the part is the path of the object.
                steps = [frame.form.keys[frame.num_visited : frame.num_visited + 1] for frame in frames]
                depth_of_first = next(i for i, frame in enumerate(frames) if frame.obj is obj)
                raise cycle_error(obj, _path_text(steps[:depth_of_first]), _path_text(steps))
            form = form_of(obj)
            if form is None or not form.parts:
                self[obj] = form
                return
            if len(frames) >= MAX_DEPTH:
                raise_too_deep("")
            frames.append(_Frame(obj, form))

        visit(tree)
        while frames:
            frame = frames[-1]
            if frame.num_visited == len(frame.form.parts):
                frames.pop()
                self[frame.obj] = frame.form
                if frames:
                    frames[-1].num_visited += 1
                continue
            part, depth = frame.form.parts[frame.num_visited], len(frames)
            visit(part)
            # If the part got a frame, its parent counts it when that frame is finished.
            if len(frames) == depth:
                frame.num_visited += 1

    def form(self, obj: Any) -> Form | None:
        """Returns the form of an object of the tree."""
        return self[obj]


def _path_text(steps: Sequence[tuple[Any, ...]]) -> str:
    """Prints a path. Each step is one key entry, or empty."""
    return jtu.keystr(tuple([key for step in steps for key in step]))


def state(tree: Any, keep: Any = None) -> Any:
    """Converts a model to nested dicts, lists and tuples of arrays, numbers, strings and None.

    - A module becomes a dict of all its fields by name, including the static ones.
    - Containers keep their kind. A dict of any class becomes a dict with the same keys in the same order, a list a
      list, a tuple a tuple. A namedtuple becomes a dict by field name, and a `deque` a list.
    - Arrays of JAX and NumPy, PRNG keys, `jax.ShapeDtypeStruct`s, numbers, NumPy scalars, strings, bytes, bools and
      None stay the very same objects. Nothing is copied, however large.
    - Everything else is no state, and becomes the empty tuple: functions, classes, dtypes, enumerations, other objects.
    - A registered class whose fields are unknown becomes a dict by the keys that it was registered with, or else by
      `"0"`, `"1"` and so on. Its auxiliary data is not in the state.
    - `jax.tree_util.Partial` becomes a dict of `func`, `args` and `keywords`. A variable of Flax NNX becomes its value,
      an `nnx.List` a list, and a `sharedtree.Dag` its model.
    - Functions of `register_state` win over all these rules.

    The state shares where the model shares: an object at two paths is one object in the state, at both.

    Args:
        tree: a module, or any container of modules and arrays.
        keep: filter for the leaves to keep, as in `sharedtree.tree.filter`. All others become the empty tuple. Use
            `equinox.is_inexact_array` for the trainable part. A function of a leaf is asked once for each object.

    Returns:
        New containers with the leaves of `tree`.

    Raises:
        CycleError: if an object contains itself.
        UnregisteredTypeError: if `tree` cannot be taken apart.
        InconsistentSharingError: if `keep` selects one object at one of its paths and not at another.
        SharingMismatchError: if `keep` is a tree prefix that does not fit the model.
        TypeError: if `keep` is no filter.
        ValueError: if `keep` looks at paths, and there are too many.

    Cost: one visit for each object, however many paths lead to it, and one for each path if `keep` looks at paths.

    Example:
        >>> import equinox as eqx, jax, jax.numpy as jnp, sharedtree as st
        >>> class Linear(eqx.Module):
        ...     weight: jax.Array
        ...     activation: object
        ...     name: str = eqx.field(static=True)
        >>> linear = Linear(jnp.ones(2), jax.nn.relu, "linear")
        >>> st.state([linear, 3])
        [{'weight': Array([1., 1.], dtype=float32), 'activation': (), 'name': 'linear'}, 3]
        >>> st.state(linear, keep=eqx.is_inexact_array)
        {'weight': Array([1., 1.], dtype=float32), 'activation': (), 'name': ()}
        >>> st.state(linear, keep=lambda path, value: path == ("name",))
        {'weight': (), 'activation': (), 'name': 'linear'}

    Limitations: an empty tuple of the model looks like an object that is no state. In a format whose keys are strings,
    such as JSON, two keys of a dict (`1` and `"1"`) may become one.
    """
    # Raises for an object of an unregistered class.
    if form_of(tree) is None:
        require_registered(tree)
    objects = Objects(tree)
    keeps = _keeper(tree, objects, keep)
    # Id of an object with parts → its state. `objects` keeps the object alive.
    states: dict[int, Any] = {}

    def state_of(part: Any, holder: Any, index: int) -> Any:
        """Returns the state of the part of `holder` at this index. The whole tree is part 0 of None."""
        if objects.form(part) is not None:
            return states[id(part)]
        return part if is_state_leaf(part) and keeps(part, holder, index) else ()

    # `objects` has the parts of an object before the object, so their states are there.
    for obj, form in objects.items():
        if form is not None:
            states[id(obj)] = form.holding([state_of(part, obj, index) for index, part in enumerate(form.parts)])
    return state_of(tree, None, 0)


def _keeper(tree: Any, objects: Objects, keep: Any) -> Callable[[Any, Any, int], bool]:
    """Returns a function of a leaf, the object that holds it, and its index there. It returns True to keep the leaf."""
    if keep is None:
        return lambda leaf, holder, index: True
    # A function of a leaf answers alike at all paths, so the leaf is enough. Any other filter is asked along the paths.
    # A class can be called, too, but a filter that is a class is not called. A generic stands for its class.
    is_function = is_one_filter(keep) and callable(keep) and not isinstance(typing.get_origin(keep) or keep, type)
    if is_function and takes(keep, OF_STATE) == "leaf":
        answers: IdentityDict[bool] = IdentityDict()

        def keeps(leaf: Any, holder: Any, index: int) -> bool:  # noqa: ARG001
            if leaf not in answers:
                answers[leaf] = bool(keep(leaf))
            return answers[leaf]

        return keeps
    # `filter_or_prefix` accepts more, so this call is for its error.
    filter_of(keep, OF_STATE)
    kept = KeptLeaves(tree, objects, filter_or_prefix(keep, OF_STATE))
    return lambda leaf, holder, index: kept.keeps(holder, index)
