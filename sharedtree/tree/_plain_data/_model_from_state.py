"""A model with the values of a state: `sharedtree.load_state`.

The *entry* of an object is what the state has for it: a dict for a module, an array for an array. `load_state` walks
the model, with the state beside it. Each pair of an object and an entry is compared once, so the cost depends on the
number of objects, not on the number of paths that lead to them. Then the model is built anew. An object that carries
identity is built once, from its entry at the first path where the entry fits.

    model                            state                            result
    {"embed": w, "head": w}          {"embed": u, "head": u}          u at both paths
    {"embed": w, "head": w}          {"embed": u, "head": v}          a tie of the model only: an error, or u at both
    {"embed": w, "head": v}          {"embed": u, "head": u}          a tie of the state only: an error, or u and a copy

The *form* of an object lists its parts, children and static attributes; see `_state_forms`.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import tree_util as jtu

from ...core._by_identity import IdentityDict
from ...core._comparison import Pair, Paths, Ties, differences_from
from ...core._node_types import carries_identity, require_registered
from ...core._sharing import copy_of_leaf
from ...core._static_values import Static
from ...ties._leaf_notes import hand_on
from ...ties._policy_and_context import rules_here
from ._state_forms import Form, form_of, is_state_leaf
from ._state_misfits import UNEXPECTED, Misfit, StateReport, difference_text, error_for, report_of, word_for_entries
from ._state_of_model import Objects


def is_empty_entry(entry: Any, form: Form | None) -> bool:
    """Returns True if the model keeps its object, because the state has the empty tuple for it.

    An empty list counts, too, unless the object is a sequence: formats without tuples, such as JSON, make lists of
    tuples.
    """
    if type(entry) is tuple:
        return not entry
    return type(entry) is list and not entry and (form is None or form.kind == "dict")


def sequence_of(entry: Any) -> Sequence[Any] | None:
    """Returns the items of a list, of a tuple, or of a dict with the keys 0, 1, … or "0", "1", …; None for others."""
    # A namedtuple is no sequence: its state is a dict by field name.
    if isinstance(entry, (list, tuple)) and not hasattr(entry, "_fields"):
        return entry
    if isinstance(entry, Mapping):
        mapping: Mapping[Any, Any] = entry
        for key_class in (str, int):
            if all(key_class(i) in mapping for i in range(len(mapping))):
                return [mapping[key_class(i)] for i in range(len(mapping))]
    return None


def can_be_tied(entry: Any) -> bool:
    """Returns True if two occurrences of an entry are a tie of the state: for arrays, lists and dicts."""
    return carries_identity(entry) or isinstance(entry, (list, Mapping))


def fits_leaf(obj: Any, entry: Any) -> bool:
    """Returns True if an entry can replace a leaf of the model.

    Arrays and NumPy scalars need the same shape and dtype. Any number, string, bytes or None replaces any other.
    """
    if not is_state_leaf(obj) or not is_state_leaf(entry):
        return False
    if carries_identity(obj) or carries_identity(entry):
        # An array and a Python number do not replace each other, nor do a reference and an array.
        if not hasattr(obj, "dtype") or not hasattr(entry, "dtype"):
            return False
        if isinstance(obj, jax.Ref) is not isinstance(entry, jax.Ref):
            return False
        # A shape without values can only replace another one.
        if isinstance(entry, jax.ShapeDtypeStruct) and not isinstance(obj, jax.ShapeDtypeStruct):
            return False
    elif not (isinstance(obj, np.generic) and isinstance(entry, np.generic)):
        return True
    return tuple(obj.shape) == tuple(entry.shape) and obj.dtype == entry.dtype


def as_in_model(obj: Any, entry: Any) -> Any:
    """Converts an entry to the library of the leaf that it replaces. Returns it unchanged if no conversion is needed.

    A NumPy array for a JAX array is copied: `jnp.asarray` and `jax.device_put` may alias NumPy's memory, depending on
    its alignment, and the model would change with the state.
    """
    if isinstance(obj, jax.Array) and isinstance(entry, (np.ndarray, np.generic)):
        return jnp.array(entry)
    if isinstance(obj, np.ndarray) and isinstance(entry, np.generic):
        return np.asarray(entry)
    return entry


T = TypeVar("T")

_NOTHING = ()
"""The entry that leaves an object to the model. A private object could not be stored in a file, as a state may be."""


@overload
def load_state(tree: T, state: Any, strict: Literal[True] = True) -> T: ...
@overload
def load_state(tree: T, state: Any, strict: Literal[False]) -> tuple[T, StateReport]: ...
@overload
def load_state(tree: T, state: Any, strict: bool) -> T | tuple[T, StateReport]: ...
def load_state(tree: T, state: Any, strict: bool = True) -> T | tuple[T, StateReport]:
    """Makes a model of new nodes with the values of a state and the ties of the model.

    The model keeps its value wherever the state has the empty tuple. Everything else must fit: names of fields and
    keys, lengths, shapes, dtypes, and ties. One object in the model must be one object in the state, and the other way
    round. Numbers, strings and None replace one another, in static fields too. Functions and other objects that are no
    state stay the model's.

    Args:
        tree: the model; it is not changed. Its arrays may be `jax.ShapeDtypeStruct`s.
        state: result of `state` for this model or for another one with the same names. It may have gone through a
            storage format: a list may stand for a tuple, any mapping for a dict, and a dict of `"0"`, `"1"` and so on
            for a list, as in `flax.serialization`. Where the model has no sequence, an empty list counts as the empty
            tuple.
        strict: True to raise if anything does not fit. False to load what fits.

    Returns:
        The new model. If `strict` is false, a pair of the new model and a `StateReport`. Arrays of the state are not
        copied, except NumPy arrays that become JAX arrays, because the model has JAX arrays there.

    Raises:
        StructureMismatchError: if names, lengths, shapes or dtypes differ. The message lists all differences.
        SharingMismatchError: if only ties differ.
        CycleError: if an object of the model contains itself.
        UnregisteredTypeError: if `tree` cannot be taken apart.

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

    Limitations: static values that are not in the state stay the model's, such as auxiliary data of a class that was
    registered by hand. Arrays of the state are not moved to the model's devices: use `sharedtree.device_put`.
    """
    if form_of(tree) is None:
        require_registered(tree)
    objects = Objects(tree)
    loading = _Loading(objects)
    misfits = list(differences_from(_root_pair(tree, state), loading.compare))
    if strict and misfits:
        raise error_for(misfits, loading.paths)
    result = loading.build(tree, state)
    return result if strict else (result, report_of(misfits, loading.loaded_at, loading.paths))


class _Inherited(NamedTuple):
    """Facts that a `Pair` of an object and an entry passes down to the pairs of their parts.

    Attributes:
        is_static: True in a static attribute, where nothing carries identity.
        is_below_misfit: True below a tie that was reported. Ties below it differ for the same reason, and are not
            reported.
    """

    is_static: bool
    is_below_misfit: bool


class _PairName(NamedTuple):
    """The name of a pair of an object and an entry. Two pairs with one name are one object in the result.

    Attributes:
        obj: number of the object.
        entry: number of the entry.
        is_static: True in a static attribute.
    """

    obj: int
    entry: int
    is_static: bool


class _Source(NamedTuple):
    """The source of an object of the result.

    Attributes:
        pair: the object of the model and the entry to build it from. The entry is `_NOTHING` if the model keeps it.
        name: the name of this pair.
        part_entries: the entry for each part; None if the model keeps the object.
    """

    pair: Pair
    name: _PairName
    part_entries: Sequence[Any] | None


class _Loading:
    """A comparison of a model with a state, and the model built from both. `compare` all pairs first, then `build`.

    Args:
        objects: the objects of the model, with their forms.

    Attributes:
        paths: the paths of the misfits, and of the loaded leaves.
        loaded_at: the paths of the leaves that come from the state.
    """

    def __init__(self, objects: Objects) -> None:
        """Begins without any comparison."""
        self.objects = objects
        self.paths = Paths()
        self.loaded_at: list[int] = []
        self._ties = Ties()
        # True if the policy here says that arrays carry identity.
        self._arrays = rules_here().arrays
        # Object of the model, or entry → its number.
        self._numbers: IdentityDict[int] = IdentityDict()
        self._compared: set[_PairName] = set()
        # Numbers of an object and an entry that fits → the entries for the parts of the object.
        self._part_entries: dict[tuple[int, int], Sequence[Any]] = {}
        # Object with identity → the first pair whose entry fits. The object is built from this entry at all paths.
        self._chosen: IdentityDict[Pair] = IdentityDict()

    def compare(self, pair: Pair) -> Iterator[Misfit | Pair]:
        """Compares an object with its entry. Yields misfits, and the pairs of the parts.

        An empty entry fits everything. If the entry does not fit at all, nothing below is compared.
        """
        obj, entry, at, (is_static, is_below_misfit) = pair
        form = self.objects.form(obj)
        name = _PairName(self._number(obj), self._number(entry), is_static)
        if name in self._compared or is_empty_entry(entry, form):
            return
        has_identity = self._has_identity(pair, form)
        # Values such as numbers are compared at each path, so that each path is in the report.
        if form is not None or has_identity:
            self._compared.add(name)
        part_entries, misfits = self._entries_for_parts(pair, form)
        yield from misfits
        if part_entries is None:
            return
        if has_identity:
            # Python may make one object of two equal numbers, or two of one. So values count as one if they are equal.
            is_value = not can_be_tied(entry) and is_state_leaf(entry)
            entry_key = Static(entry) if is_value else name.entry
            # The entry of a "whole" object is the entry of its part, and a tie of the part only.
            is_tied_entry = (form is None or form.kind != "whole") and can_be_tied(entry)
            # If another entry was chosen for the object before, this one is not used, and its ties do not matter.
            chosen = self._chosen.get(obj)
            is_used = chosen is None or chosen.right is entry
            split_tie = self._ties.add_pair(name.obj, entry_key, at, is_object=is_tied_entry and is_used)
            if split_tie is not None and not is_below_misfit:
                first_path, is_on_left = split_tie
                # The model is on the left.
                yield Misfit(at, "model" if is_on_left else "state", first_path)
            is_below_misfit = is_below_misfit or split_tie is not None
            self._chosen.setdefault(obj, pair)
        if form is not None:
            # Without keys, the path of the part is the path of the object.
            places = [self.paths.below(at, key) for key in form.keys] or [at] * len(form.parts)
            yield from _pairs_of_parts(form, part_entries, places, _Inherited(is_static, is_below_misfit))
        # A leaf that is one object is reported once, at the path whose entry it gets.
        elif not has_identity or self._chosen[obj] is pair:
            self.loaded_at.append(at)

    def _entries_for_parts(self, pair: Pair, form: Form | None) -> tuple[Sequence[Any] | None, Sequence[Misfit]]:
        """Divides an entry into one for each part of an object.

        Returns:
            The entries, and the misfits. The entries are None if the whole entry does not fit. Names that only one side
            has are misfits, and the others are still loaded. Misfits of one pair are returned once only.
        """
        obj, entry, at, _ = pair
        numbers = self._number(obj), self._number(entry)
        if numbers in self._part_entries:
            return self._part_entries[numbers], ()
        part_entries: Sequence[Any] | None = None
        misfits: list[Misfit] = []
        if form is None:
            part_entries = () if fits_leaf(obj, entry) else None
        elif form.kind == "whole":
            part_entries = (entry,)
        # A list or a tuple.
        elif form.kind != "dict":
            part_entries, count = sequence_of(entry), len(form.parts)
            if part_entries is not None and len(part_entries) != count:
                why = f"the model has {count} {word_for_entries(count)}, the state {len(part_entries)}"
                misfits.append(Misfit(at, why))
                # Cut, or filled up, to the length of the model.
                part_entries = [*part_entries[:count], *[_NOTHING] * (count - len(part_entries))]
        elif isinstance(entry, Mapping):
            mapping: Mapping[Any, Any] = entry
            is_field = bool(form.keys) and isinstance(form.keys[0], jtu.GetAttrKey)
            for name, key in zip(form.names, form.keys, strict=True):
                if name not in mapping:
                    misfits.append(Misfit(self.paths.below(at, key), "the state lacks it"))
            expected_names = set(form.names)
            for name in mapping:
                if name not in expected_names:
                    key = jtu.GetAttrKey(name) if is_field and type(name) is str else jtu.DictKey(name)
                    misfits.append(Misfit(self.paths.below(at, key), UNEXPECTED))
            part_entries = [mapping.get(name, _NOTHING) for name in form.names]
        if part_entries is None:
            return None, [Misfit(at, difference_text(obj, entry))]
        self._part_entries[numbers] = part_entries
        return part_entries, misfits

    def _number(self, obj: Any) -> int:
        """Returns the number of an object of the model or of an entry. The map keeps it alive."""
        return self._numbers.setdefault(obj, len(self._numbers))

    def _has_identity(self, pair: Pair, form: Form | None) -> bool:
        """Returns True if two occurrences of the object of a pair are a tie of the model."""
        if pair.inherited.is_static:
            return False
        return form.is_object if form is not None else self._arrays and carries_identity(pair.left)

    def build(self, tree: Any, state: Any) -> Any:
        """Builds the new model, parts before the object, without recursion. Call it after all pairs were compared."""
        results: dict[_PairName, Any] = {}
        old_leaves: list[Any] = []
        new_leaves: list[Any] = []
        # Array of the result → the name of the pair that it was made for.
        names_of_arrays: IdentityDict[_PairName] = IdentityDict()

        def make_leaf(source: _Source) -> Any:
            """Returns the leaf of the result. A leaf with identity is an object that no other pair got."""
            pair = source.pair
            value = pair.left if source.part_entries is None else as_in_model(pair.left, pair.right)
            if not self._has_identity(pair, None):
                return value
            # The result has the ties of the model and no others.
            if names_of_arrays.setdefault(value, source.name) != source.name:
                value = copy_of_leaf(value)
            old_leaves.append(pair.left)
            new_leaves.append(value)
            return value

        # Each pair is pushed again below its parts, as ready, so that it comes off the stack after them.
        root = _root_pair(tree, state)
        stack = [(root, False)]
        while stack:
            pushed, is_ready = stack.pop()
            source = self._source_of(pushed)
            pair, name, part_entries = source
            if name in results:
                continue
            form = self.objects.form(pair.left)
            if form is None:
                results[name] = make_leaf(source)
                continue
            # Nobody asks for the paths of these pairs.
            pairs_of_parts = _pairs_of_parts(form, part_entries, [0] * len(form.parts), pair.inherited)
            if not is_ready:
                stack.append((pair, True))
                stack.extend((pair_of_part, False) for pair_of_part in reversed(pairs_of_parts))
                continue
            new_parts = [results[self._source_of(pair_of_part).name] for pair_of_part in pairs_of_parts]
            # Static values may be compared by `is`, so one whose parts did not change stays the same object.
            is_same = all(new is old for new, old in zip(new_parts, form.parts, strict=True)) and not form.is_mutable
            is_kept = is_same and not self._has_identity(pair, form)
            results[name] = pair.left if is_kept else form.put_together(new_parts)
        # The new leaves get the notes of the old ones, for example that a tie was undone on purpose.
        hand_on(old_leaves, new_leaves)
        return results[self._source_of(root).name]

    def _source_of(self, pair: Pair) -> _Source:
        """Returns the source of the object that the result has for a pair.

        For an object with identity that is the chosen pair, whatever entry this pair has. If no entry fits, the source
        is the model.
        """
        obj, entry, at, inherited = pair
        if self._has_identity(pair, self.objects.form(obj)):
            entry = self._chosen[obj].right if obj in self._chosen else _NOTHING
        # Only pairs that fit are in the map.
        part_entries = self._part_entries.get((self._number(obj), self._number(entry)))
        entry = _NOTHING if part_entries is None else entry
        name = _PairName(self._number(obj), self._number(entry), inherited.is_static)
        return _Source(Pair(obj, entry, at, inherited), name, part_entries)


def _root_pair(tree: Any, state: Any) -> Pair:
    """Returns the pair of the whole model and the whole state."""
    return Pair(tree, state, 0, _Inherited(is_static=False, is_below_misfit=False))


def _pairs_of_parts(
    form: Form, part_entries: Sequence[Any] | None, places: Sequence[int], inherited: _Inherited
) -> list[Pair]:
    """Pairs the parts of an object with their entries.

    Args:
        form: the form of the object.
        part_entries: the entry for each part; None for no entries, so that the model keeps its parts.
        places: the path of each part, as a number of a `Paths`.
        inherited: the facts of the object, which its parts inherit. Static parts are marked as static.
    """
    entries = [_NOTHING] * len(form.parts) if part_entries is None else part_entries
    num_children = len(form.parts) - form.num_static
    facts = [inherited] * num_children + [inherited._replace(is_static=True)] * form.num_static
    return list(map(Pair, form.parts, entries, places, facts))
