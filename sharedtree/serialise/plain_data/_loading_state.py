"""A model with the values of a state: `sharedtree.load_state`.

Model and state are walked side by side, along the model. Each pair of an object and what the state has for it is met
once, so the work is bounded by what there is, not by the paths that lead to it. If nothing differs, the model is put
together anew, each object that carries identity once, with what the state has at its first path.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import tree_util as jtu

from ...core._accidental_aliases import another
from ...core._node_types import carries_identity, require_registered
from ...core._static_values import Static
from ...ties._context import rules_here
from ...ties._leaf_notes import hand_on
from ._state_forms import Form, form_of, is_state_leaf
from ._state_misfits import LinkedPath, Misfits, StateReport, differing, entries
from ._taking_state import Objects


def is_nothing(given: Any, form: Form | None) -> bool:
    """Whether a state leaves to the model what it has. Where there are no tuples, an empty list is left of them."""
    if type(given) is tuple:
        return not given
    return type(given) is list and not given and (form is None or form.kind == "dict")


def sequence(given: Any) -> Sequence[Any] | None:
    """The entries of a list or a tuple, or of a dict by index; None of anything else."""
    if isinstance(given, (list, tuple)) and not hasattr(given, "_fields"):
        return given
    if isinstance(given, Mapping):
        mapping: Mapping[Any, Any] = given
        for kind in (str, int):
            if all(kind(i) in mapping for i in range(len(mapping))):
                return [mapping[kind(i)] for i in range(len(mapping))]
    return None


def is_object(given: Any) -> bool:
    """Whether two occurrences of what a state has are a tie."""
    return carries_identity(given) or isinstance(given, (list, Mapping))


def are_one_value(a: Any, b: Any) -> bool:
    """Whether two objects of a state are values, and equal."""
    if is_object(a) or is_object(b):
        return False
    return is_state_leaf(a) and is_state_leaf(b) and Static(a) == Static(b)


def fits_leaf(obj: Any, given: Any) -> bool:
    """Whether what a state has for a leaf can take its place."""
    if not is_state_leaf(obj) or not is_state_leaf(given):
        return False
    if carries_identity(obj) or carries_identity(given):
        if not hasattr(obj, "dtype") or not hasattr(given, "dtype"):
            return False
        if isinstance(obj, jax.Ref) is not isinstance(given, jax.Ref):
            return False
        if isinstance(given, jax.ShapeDtypeStruct) and not isinstance(obj, jax.ShapeDtypeStruct):
            return False
    elif not (isinstance(obj, np.generic) and isinstance(given, np.generic)):
        return True
    return tuple(obj.shape) == tuple(given.shape) and obj.dtype == given.dtype


def as_in_model(obj: Any, given: Any) -> Any:
    """An array of the state; where the model has one of JAX's, a NumPy one is copied into one.

    `jnp.asarray` and `jax.device_put` may keep NumPy's memory, as its alignment has it, so that the model would change
    with what was loaded.
    """
    if isinstance(obj, jax.Array) and isinstance(given, (np.ndarray, np.generic)):
        return jnp.array(given)
    if isinstance(obj, np.ndarray) and isinstance(given, np.generic):
        return np.asarray(given)
    return given


T = TypeVar("T")

_NOTHING = ()
"""What a state has where it has nothing; an object of its own would not be found in states that were stored."""


@overload
def load_state(tree: T, state: Any, strict: Literal[True] = True) -> T: ...
@overload
def load_state(tree: T, state: Any, strict: Literal[False]) -> tuple[T, StateReport]: ...
@overload
def load_state(tree: T, state: Any, strict: bool) -> T | tuple[T, StateReport]: ...
def load_state(tree: T, state: Any, strict: bool = True) -> T | tuple[T, StateReport]:
    """A model with the values of a state, in new nodes, with the ties of the model.

    Where the state has the empty tuple, the model keeps what it has. Everything else must fit: names of fields and
    keys, lengths, shapes, dtypes, and ties: what is one object in one of the two must be one in the other. Numbers,
    strings and None are loaded whatever they were, static ones too; functions and whatever else is no state stay the
    model's.

    Args:
        tree: the model; it is not changed. Its arrays may be `jax.ShapeDtypeStruct`s.
        state: from `state`, of this model or of another one with the same names; or what storage made of it: lists in
            place of tuples, any mapping for a dict, a list as a dict of `"0"`, `"1"` and so on, as
            `flax.serialization` has it. Where the model has no sequence, an empty list is taken for an empty tuple.
        strict: whether everything must fit. If not, what fits is loaded.

    Returns:
        The model; if `strict` is false, a pair of the model and a `StateReport`. Arrays of the state are taken as they
        are, without a copy, but for NumPy's where the model has one of JAX's, which become JAX's.

    Raises:
        StructureMismatchError: if names, lengths, shapes or dtypes differ; lists everything that differs.
        SharingMismatchError: if only ties differ.
        CycleError: if an object of the model contains itself.
        UnregisteredTypeError: if `tree` is an object that cannot be taken apart.

    Cost: one visit for each object of the model, and for each pair with different objects of the state.

    Example:
        >>> import jax.numpy as jnp, sharedtree as st
        >>> w = jnp.zeros(2)
        >>> model = {"embed": w, "head": w, "scale": 1.0}
        >>> new = jnp.ones(2)
        >>> loaded = st.load_state(model, {"embed": new, "head": new, "scale": ()})
        >>> loaded["head"] is loaded["embed"] is new, loaded["scale"]
        (True, 1.0)
        >>> _, report = st.load_state(model, {"embed": new, "head": new, "bias": new}, strict=False)
        >>> print(report)
        1 leaves loaded, 1 places left as they were
            `['scale']`: the state lacks it
            `['bias']`: the state has it, the model does not

    Limitations: static values that are not in the state, such as auxiliary data of a class that was registered by hand,
    are the model's. An array of the state is not moved to the model's devices: use `sharedtree.device_put`.
    """
    if form_of(tree) is None:
        require_registered(tree)
    objects = Objects(tree)
    beside = _Beside(objects)
    beside.compare(tree, state)
    error = beside.misfits.error() if strict else None
    if error is not None:
        raise error
    result = beside.loaded(tree, state)
    return result if strict else (result, beside.misfits.report(beside.loaded_paths))


class _Place(NamedTuple):
    """An object of the model, and what the state has for it.

    Attributes:
        obj: the object.
        given: that of the state.
        path: of the object.
        is_static: whether it is in a static field, where nothing carries identity.
        is_below: whether it is below objects whose ties differ, so that its own do, too.
    """

    obj: Any
    given: Any
    path: LinkedPath = None
    is_static: bool = False
    is_below: bool = False


class _Source(NamedTuple):
    """Where the result has what is at a place from.

    Attributes:
        name: equal at places where the result has one object.
        given: what the state has.
        parts: what it has for the parts; None if the object is the model's.
        is_object: whether it carries identity.
    """

    name: tuple[int, int, bool]
    given: Any
    parts: Sequence[Any] | None
    is_object: bool


class _Beside:
    """A model beside a state.

    Attributes:
        misfits: in what they differ.
        loaded_paths: of leaves that came from the state.
    """

    def __init__(self, objects: Objects) -> None:
        self.objects = objects
        self.misfits = Misfits()
        self.loaded_paths: list[LinkedPath] = []
        self._arrays = rules_here().arrays
        # All ids are those of objects of the model, which `objects` keeps alive, and of the state, which this does.
        self._alive: list[Any] = []
        self._below: dict[tuple[int, int], Sequence[Any]] = {}  # what fits → what the state has for its parts
        self._chosen: dict[int, _Place] = {}  # object with identity → where it was first given something that fits
        self._taken_by: dict[int, _Place] = {}  # object of the state → where it was first taken

    def compare(self, tree: Any, state: Any) -> None:
        """Walks both, and notes what fits and what does not."""
        seen: set[tuple[int, int, bool]] = set()
        stack = [_Place(tree, state)]
        while stack:
            place = stack.pop()
            form = self.objects.form(place.obj)
            name = id(place.obj), id(place.given), place.is_static  # alive: see above
            if name in seen or is_nothing(place.given, form):
                continue
            if form is not None or self._has_identity(place, form):  # a number is another one at each path
                seen.add(name)
            self._alive.append(place.given)
            given = self._given_to_parts(place, form)
            if given is None:
                continue
            place, is_new = self._with_ties_compared(place, form)
            if form is None:
                self.loaded_paths += [place.path] if is_new else []
                continue
            stack.extend(reversed(self._below_of(place, form, given)))

    def _given_to_parts(self, place: _Place, form: Form | None) -> Sequence[Any] | None:
        """What the state has for each part of an object; None if it does not fit."""
        name = id(place.obj), id(place.given)  # alive: see above
        if name in self._below:
            return self._below[name]
        given: Sequence[Any] | None = None
        if form is None:
            given = () if fits_leaf(place.obj, place.given) else None
        elif form.kind == "whole":
            given = (place.given,)
        elif form.kind == "dict":
            given = self._given_by_name(place, form) if isinstance(place.given, Mapping) else None
        else:
            given = self._given_in_order(place, form)
        if given is None:
            self.misfits.leave(place.path, differing(place.obj, place.given))
        else:
            self._below[name] = given
        return given

    def _given_in_order(self, place: _Place, form: Form) -> Sequence[Any] | None:
        given, count = sequence(place.given), len(form.parts)
        if given is None or len(given) == count:
            return given
        self.misfits.leave(place.path, f"the model has {count} {entries(count)}, the state {len(given)}")
        return [*given[:count], *[_NOTHING] * (count - len(given))]

    def _given_by_name(self, place: _Place, form: Form) -> list[Any]:
        mapping: Mapping[Any, Any] = place.given
        given: list[Any] = []
        for name, key in zip(form.names, form.keys, strict=True):
            if name in mapping:
                given.append(mapping[name])
            else:
                given.append(_NOTHING)
                self.misfits.leave((place.path, key), "the state lacks it")
        expected = set(form.names)
        for name in mapping:
            if name not in expected:
                is_field = bool(form.keys) and isinstance(form.keys[0], jtu.GetAttrKey) and type(name) is str
                key: Any = jtu.GetAttrKey(name) if is_field else jtu.DictKey(name)
                self.misfits.not_expect((place.path, key))
        return given

    def _with_ties_compared(self, place: _Place, form: Form | None) -> tuple[_Place, bool]:
        """The place, below others with ties that differ if its own do; and whether nothing was loaded there before."""
        if not self._has_identity(place, form):
            return place, True
        first = self._chosen.setdefault(id(place.obj), place)  # alive: see above
        whose = None
        if first.given is not place.given and not are_one_value(first.given, place.given):
            whose = "model"
        elif (form is None or form.kind != "whole") and is_object(place.given):
            earlier = self._taken_by.setdefault(id(place.given), place)  # alive: see above
            if earlier.obj is not place.obj:
                whose, first = "state", earlier
        if whose is not None and not place.is_below:
            self.misfits.differ_in_tie(first.path, place.path, whose)
        return place._replace(is_below=place.is_below or whose is not None), self._chosen[id(place.obj)] is place

    def _has_identity(self, place: _Place, form: Form | None) -> bool:
        if place.is_static:
            return False
        return form.is_object if form is not None else self._arrays and carries_identity(place.obj)

    def loaded(self, tree: Any, state: Any) -> Any:
        """The new model."""
        made: dict[Any, Any] = {}
        old: list[Any] = []
        new: list[Any] = []
        users: dict[int, Any] = {}  # array of the result, alive in `new` → the name of the one leaf that it is

        def leaf(place: _Place, source: _Source) -> Any:
            value = place.obj if source.parts is None else as_in_model(place.obj, source.given)
            if not source.is_object:
                return value
            # The result has the ties of the model and no others.
            if users.setdefault(id(value), source.name) != source.name:  # alive in `new`
                value = another(value)
            old.append(place.obj)
            new.append(value)
            return value

        stack: list[tuple[_Place, bool]] = [(_Place(tree, state), False)]
        while stack:
            place, is_ready = stack.pop()
            source = self._source(place)
            if source.name in made:
                continue
            form = self.objects.form(place.obj)
            if form is None:
                made[source.name] = leaf(place, source)
                continue
            below = self._below_of(place, form, source.parts)
            if not is_ready:
                stack.append((place, True))
                stack.extend((each, False) for each in reversed(below))
                continue
            parts = [made[self._source(each).name] for each in below]
            # What is static is compared, perhaps by `is`, so it stays itself where nothing changed.
            is_same = all(a is b for a, b in zip(parts, form.parts, strict=True)) and not form.is_mutable
            made[source.name] = place.obj if is_same and not source.is_object else form.put_together(parts)
        hand_on(old, new)
        return made[self._source(_Place(tree, state)).name]

    def _below_of(self, place: _Place, form: Form, given: Sequence[Any] | None) -> list[_Place]:
        """The places of the parts of an object."""
        given = [_NOTHING] * len(form.parts) if given is None else given
        paths = [(place.path, key) for key in form.keys] if form.keys else [place.path] * len(form.parts)
        first_static = len(form.parts) - form.num_static
        return [
            _Place(part, given[i], paths[i], place.is_static or i >= first_static, place.is_below)
            for i, part in enumerate(form.parts)
        ]

    def _source(self, place: _Place) -> _Source:
        """Where the result has what is at a place from."""
        if self._has_identity(place, self.objects.form(place.obj)):
            chosen = self._chosen.get(id(place.obj))  # alive: see above
            given = _NOTHING if chosen is None else chosen.given
            parts = None if chosen is None else self._below[id(place.obj), id(given)]  # alive: see above
            return _Source((id(place.obj), 0, False), given, parts, True)  # alive: see above
        parts = None if place.given is _NOTHING else self._below.get((id(place.obj), id(place.given)))  # alive
        given = _NOTHING if parts is None else place.given
        return _Source((id(place.obj), id(given), place.is_static), given, parts, False)  # alive: see above
