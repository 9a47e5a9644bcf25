"""A model with the values of a state: `sharedtree.load_state`.

Model and state are walked side by side, along the model. Each pair of an object and what the state has for it is met
once, so the work is bounded by what there is, not by the paths that lead to it. If nothing differs, the model is put
together anew, each object that carries identity once, with what the state has at its first path.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import tree_util as jtu

from ...core._by_identity import IdentityDict
from ...core._comparison import Pair, Paths, Ties, differences_from
from ...core._node_types import carries_identity, require_registered
from ...core._sharing import another
from ...core._static_values import Static
from ...ties._leaf_notes import hand_on
from ...ties._policy_and_context import rules_here
from ._state_forms import Form, form_of, is_state_leaf
from ._state_misfits import UNEXPECTED, Misfit, StateReport, differing, entries, error_for, report_of
from ._state_of_model import Objects


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
    misfits = list(differences_from(Pair(tree, state, 0, (False, False)), beside.meet))
    if strict and misfits:
        raise error_for(misfits, beside.paths)
    result = beside.loaded(tree, state)
    return result if strict else (result, report_of(misfits, beside.loaded_at, beside.paths))


class _Beside:
    """A model beside a state. What is handed down in a `Pair` is whether it is in a static field, where nothing carries
    identity, and whether it is below objects whose ties differ, so that its own do, too.

    Attributes:
        paths: those of the misfits.
        loaded_at: where there are leaves that came from the state.
    """

    def __init__(self, objects: Objects) -> None:
        self.objects = objects
        self.paths = Paths()
        self.loaded_at: list[int] = []
        self._ties = Ties()
        self._arrays = rules_here().arrays
        self._numbers: IdentityDict[int] = IdentityDict()  # of the objects of both, by which they are named below
        self._seen: set[tuple[int, int, bool]] = set()
        self._below: dict[tuple[int, int], Sequence[Any]] = {}  # what fits → what the state has for its parts
        self._chosen: IdentityDict[Pair] = IdentityDict()  # object → where it was first given something that fits

    def meet(self, pair: Pair) -> Iterator[Misfit | Pair]:
        """What does not fit of what the state has for an object, and the pairs below."""
        obj, given, at, (is_static, is_below) = pair
        form = self.objects.form(obj)
        name = self._number(obj), self._number(given), is_static
        if name in self._seen or is_nothing(given, form):
            return
        has_identity = self._has_identity(pair, form)
        if form is not None or has_identity:  # a number is another one at each path
            self._seen.add(name)
        parts, misfits = self._given_to_parts(pair, form)
        yield from misfits
        if parts is None:
            return
        if has_identity:
            is_value = not is_object(given) and is_state_leaf(given)
            is_its_own = (form is None or form.kind != "whole") and is_object(given)
            its = Static(given) if is_value else name[1]
            chosen = self._chosen.get(obj)
            is_first = chosen is None or chosen.right is given  # or another one was taken for it before
            apart = self._ties.apart(name[0], its, at, is_object=is_its_own and is_first)
            if apart is not None and not is_below:
                yield Misfit(at, "model" if apart[1] else "state", apart[0])
            is_below = is_below or apart is not None
            self._chosen.setdefault(obj, pair)
        if form is not None:
            places = [self.paths.below(at, key) for key in form.keys] or [at] * len(form.parts)
            yield from _pairs_below(form, parts, places, is_static, is_below)
        elif not has_identity or self._chosen[obj] is pair:
            self.loaded_at.append(at)

    def _given_to_parts(self, pair: Pair, form: Form | None) -> tuple[Sequence[Any] | None, Sequence[Misfit]]:
        """What the state has for each part of an object, None if it does not fit; and what does not, the first time."""
        obj, given, at, _ = pair
        name = self._number(obj), self._number(given)
        if name in self._below:
            return self._below[name], ()
        parts: Sequence[Any] | None = None
        misfits: list[Misfit] = []
        if form is None:
            parts = () if fits_leaf(obj, given) else None
        elif form.kind == "whole":
            parts = (given,)
        elif form.kind != "dict":
            parts, count = sequence(given), len(form.parts)
            if parts is not None and len(parts) != count:
                misfits.append(Misfit(at, f"the model has {count} {entries(count)}, the state {len(parts)}"))
                parts = [*parts[:count], *[_NOTHING] * (count - len(parts))]
        elif isinstance(given, Mapping):
            mapping: Mapping[Any, Any] = given
            is_field = bool(form.keys) and isinstance(form.keys[0], jtu.GetAttrKey)
            for each, key in zip(form.names, form.keys, strict=True):
                if each not in mapping:
                    misfits.append(Misfit(self.paths.below(at, key), "the state lacks it"))
            expected = set(form.names)
            for each in mapping:
                if each not in expected:
                    key = jtu.GetAttrKey(each) if is_field and type(each) is str else jtu.DictKey(each)
                    misfits.append(Misfit(self.paths.below(at, key), UNEXPECTED))
            parts = [mapping.get(each, _NOTHING) for each in form.names]
        if parts is None:
            return None, [Misfit(at, differing(obj, given))]
        self._below[name] = parts
        return parts, misfits

    def _number(self, obj: Any) -> int:
        return self._numbers.setdefault(obj, len(self._numbers))

    def _has_identity(self, pair: Pair, form: Form | None) -> bool:
        if pair.inherited[0]:
            return False
        return form.is_object if form is not None else self._arrays and carries_identity(pair.left)

    def loaded(self, tree: Any, state: Any) -> Any:
        """The new model."""
        made: dict[Any, Any] = {}
        old: list[Any] = []
        new: list[Any] = []
        users: IdentityDict[Any] = IdentityDict()  # array of the result → the name of the one leaf that it is

        def leaf(pair: Pair, name: tuple[int, int, bool], parts: Sequence[Any] | None) -> Any:
            value = pair.left if parts is None else as_in_model(pair.left, pair.right)
            if not self._has_identity(pair, None):
                return value
            # The result has the ties of the model and no others.
            if users.setdefault(value, name) != name:
                value = another(value)
            old.append(pair.left)
            new.append(value)
            return value

        root = Pair(tree, state, 0, (False, False))
        stack = [(root, False)]
        while stack:
            found, is_ready = stack.pop()
            pair, name, parts = self._taken(found)
            if name in made:
                continue
            form = self.objects.form(pair.left)
            if form is None:
                made[name] = leaf(pair, name, parts)
                continue
            below = _pairs_below(form, parts, [0] * len(form.parts), *pair.inherited)
            if not is_ready:
                stack.append((pair, True))
                stack.extend((each, False) for each in reversed(below))
                continue
            built = [made[self._taken(each)[1]] for each in below]
            # What is static is compared, perhaps by `is`, so it stays itself where nothing changed.
            is_same = all(a is b for a, b in zip(built, form.parts, strict=True)) and not form.is_mutable
            is_kept = is_same and not self._has_identity(pair, form)
            made[name] = pair.left if is_kept else form.put_together(built)
        hand_on(old, new)
        return made[self._taken(root)[1]]

    def _taken(self, pair: Pair) -> tuple[Pair, tuple[int, int, bool], Sequence[Any] | None]:
        """An object beside what it is made of: the pair, what is equal where the result has one object, and its parts.

        The parts are None if the object is the model's, also where the state has what does not fit.
        """
        obj, given, at, told = pair
        if self._has_identity(pair, self.objects.form(obj)):
            given = self._chosen[obj].right if obj in self._chosen else _NOTHING
        parts = self._below.get((self._number(obj), self._number(given)))
        given = _NOTHING if parts is None else given
        return Pair(obj, given, at, told), (self._number(obj), self._number(given), told[0]), parts


def _pairs_below(
    form: Form, given: Sequence[Any] | None, places: Sequence[int], is_static: bool, is_below: bool
) -> list[Pair]:
    """The pairs of the parts of an object and what the state has for them."""
    given = [_NOTHING] * len(form.parts) if given is None else given
    told = [(is_static, is_below)] * (len(form.parts) - form.num_static) + [(True, is_below)] * form.num_static
    return list(map(Pair, form.parts, given, places, told))
