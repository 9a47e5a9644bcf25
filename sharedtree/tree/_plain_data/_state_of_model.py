"""A model as plain nested data: `sharedtree.state`; and the objects of a tree as a state sees them.

The idea is that of `Flux.state` (Flux.jl, pull request 2239): names always match, for what is no state is replaced by
the empty tuple and never left out. It departs from it in that the state shares where the model shares.
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
    __slots__ = ("done", "form", "obj")

    def __init__(self, obj: Any, form: Form) -> None:
        self.obj = obj
        self.form = form
        self.done = 0


class Objects(IdentityDict[Form | None]):
    """Every object of a tree, each once, children before parents, and their forms.

    Raises:
        CycleError: if an object contains itself.
        DepthError: if a class comes apart for ever.
    """

    __slots__ = ()

    def __init__(self, tree: Any) -> None:
        super().__init__()
        frames: list[_Frame] = []
        met = IdentitySet()

        def visit(obj: Any) -> None:
            if not met.add(obj):
                if obj in self:
                    return
                keys = [frame.form.keys[frame.done : frame.done + 1] for frame in frames]
                above = next(i for i, frame in enumerate(frames) if frame.obj is obj)
                raise cycle_error(obj, _text(keys[:above]), _text(keys))
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
            if frame.done == len(frame.form.parts):
                frames.pop()
                self[frame.obj] = frame.form
                if frames:
                    frames[-1].done += 1
                continue
            part, depth = frame.form.parts[frame.done], len(frames)
            visit(part)
            if len(frames) == depth:
                frame.done += 1

    def form(self, obj: Any) -> Form | None:
        """The form of an object of the tree."""
        return self[obj]


def _text(keys: Sequence[tuple[Any, ...]]) -> str:
    return jtu.keystr(tuple([key for each in keys for key in each]))


def state(tree: Any, keep: Any = None) -> Any:
    """A model as nested dicts, lists and tuples of arrays, numbers, strings and None.

    - A module is a dict of all its fields by name, the static ones too.
    - Containers stay: a dict a dict with its own keys, in its order, whatever kind of dict it is; a list a list, a
      tuple a tuple. A namedtuple is a dict by field name, and a `deque` a list.
    - Arrays, JAX's and NumPy's, PRNG keys, `jax.ShapeDtypeStruct`s, numbers, NumPy scalars, strings, bytes, bools and
      None are kept: the very same objects. Nothing is copied, however large.
    - What is no state is the empty tuple: functions, classes, dtypes, enumerations, every other object.
    - A registered class whose fields nobody knows is a dict by the keys that it was registered with, or else by
      `"0"`, `"1"` and so on. What its author made auxiliary data is not in it.
    - `jax.tree_util.Partial` is a dict of `func`, `args` and `keywords`. A variable of Flax NNX is its value, an
      `nnx.List` a list, and a `sharedtree.Dag` its model.
    - What `register_state` was told comes first.

    The state shares where the model shares: an object at two paths is one object in the state, at both.

    Args:
        tree: a module, or any container of modules and arrays.
        keep: which leaves are kept, a filter as in `sharedtree.tree.filter`; the others are the empty tuple. For the
            trainable part, `equinox.is_inexact_array`. A function of a leaf is asked once for each object.

    Returns:
        New containers, with the leaves of `tree`.

    Raises:
        CycleError: if an object contains itself.
        UnregisteredTypeError: if `tree` is an object that cannot be taken apart.
        InconsistentSharingError: if `keep` selects what is one object at one of its paths and not at another.
        SharingMismatchError: if `keep` is a tree that does not fit.
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

    Limitations: an empty tuple of the model cannot be told from what is no state. Two keys of a dict may become one
    where a format has only strings for keys, as JSON has.
    """
    if form_of(tree) is None:
        require_registered(tree)
    objects = Objects(tree)
    keeps = _keeper(tree, objects, keep)
    made: dict[int, Any] = {}  # id → what is made of an object with parts, which is alive in `objects`

    def state_of(part: Any, holder: Any, index: int) -> Any:
        if objects.form(part) is not None:
            return made[id(part)]
        return part if is_state_leaf(part) and keeps(part, holder, index) else ()

    for obj, form in objects.items():
        if form is not None:
            made[id(obj)] = form.holding([state_of(part, obj, index) for index, part in enumerate(form.parts)])
    return state_of(tree, None, 0)


def _keeper(tree: Any, objects: Objects, keep: Any) -> Callable[[Any, Any, int], bool]:
    """Returns a function that tells of a leaf, the object that holds it and its place there whether it is kept."""
    if keep is None:
        return lambda leaf, holder, index: True
    is_function = is_one_filter(keep) and callable(keep) and not isinstance(typing.get_origin(keep) or keep, type)
    if is_function and takes(keep, OF_STATE) == "leaf":
        answers: IdentityDict[bool] = IdentityDict()

        def keeps(leaf: Any, holder: Any, index: int) -> bool:  # noqa: ARG001
            if leaf not in answers:
                answers[leaf] = bool(keep(leaf))
            return answers[leaf]

        return keeps
    filter_of(keep, OF_STATE)  # raises if it is no filter
    kept = KeptLeaves(tree, objects, filter_or_prefix(keep, OF_STATE))
    return lambda leaf, holder, index: kept.keeps(holder, index)
