"""Pack and unpack: a DAG into its unique traced leaves and its structure, and back, in C where possible.

    pack([w, Pair(w, 3)])    →  leaves [w], structure of a list that holds a leaf and a `Pair` of the same leaf and 3
    unpack(structure, [v])   →  [v, Pair(v, 3)]

Each function uses the native walk if it is in use and can do the job, and otherwise the one in Python (`_walk.py`),
with the same outcome.

    tree  →  native.walk  →  key b"..."  →  in the table: its structure               the usual case, no record is made
                                         →  not there: the walk in Python, an entry   the first time, and for errors

The native walk describes a tree by a *key*, a string of bytes (see `_native_walk.c`), and the table leads from keys to
structures. A tree without an entry is walked in Python, which makes the structure or raises the error. The key for that
structure is written from the log of the walk in Python and not from the tree, which another thread may have changed in
between. A key may hold addresses of static values. These values are its *pins*: they must live as long as the entry.

An entry lives as long as its structure, which the table holds weakly. The latest structures are kept alive until the
next full garbage collection, so that a loop that drops its structures need not start anew each time.

A `Context` packs several trees one after the other. Its *tags* are the objects of all trees so far, by number: for an
object that comes again, the structure refers to the earlier record.
"""

import functools
import gc
import operator
import sys
import types
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jax import tree_util as jtu

from . import _classes_in_native_walk, _native_or_python, _walk
from ._by_identity import IdentitySet
from ._locks import Lock
from ._node_types import LIBRARIES
from ._structure import FlatDag, Path, Record, Structure, edges, intern, statics_of
from ._walk import DEFAULT_RULES, Reading, Rules

_entries: dict[bytes, weakref.ref[Structure]] = {}
"""The table of structures: the native walk's key for a tree → its structure."""

_native_or_python.start(lambda: _classes_in_native_walk.start(_entries))

native: Any = _native_or_python.native_module
"""The native module if the native walk is in use; None if trees are walked in Python."""

if TYPE_CHECKING or native is None:
    from ._walk import Tags as Tags
else:
    Tags = native.Tags


def pack(
    tree: Any, tags: Tags, rules: Rules = DEFAULT_RULES, prefix: str = "", context_mark: Any = None
) -> tuple[list[Any], Structure]:
    """Takes a tree apart into its traced leaves and its interned structure. Raises the errors of `_walk.walk`.

    Args:
        tree: any object.
        tags: the objects of the earlier trees of the same `Context`. Those of this tree are added.
        rules: see `Rules`.
        prefix: a text to put before each path in errors.
        context_mark: stands for the `Context`, see `Structure`; None outside of one.

    Returns:
        The traced leaves not seen before, and the structure.
    """
    base = len(tags.objects)
    packed = pack_natively(tree, tags, rules, prefix)
    if packed is None:
        leaves, records, root = _walk.walk(tree, tags, rules, prefix)
        return leaves, intern(records, root, base, context_mark)
    leaves, structure = packed
    # The table leads to structures without a maker. So in a `Context`, one with the same records is interned for it.
    if context_mark is None:
        return leaves, structure
    return leaves, intern(structure.records, structure.root, base, context_mark)


def flat_dag_of(tree: Any, rules: Rules = DEFAULT_RULES, prefix: str = "") -> FlatDag:
    """Packs one tree outside of any `Context`. Returns its flat DAG: the records and, by number, the objects.

    Args:
        tree: any object.
        rules: see `Rules`.
        prefix: a text to put before each path in errors.
    """
    tags = Tags()
    packed = pack_natively(tree, tags, rules, prefix)
    if packed is not None:
        _, structure = packed
        return FlatDag.of(structure, tags.objects)
    _, records, root = _walk.walk(tree, tags, rules, prefix)
    return FlatDag(records, root, tags.objects)


def walk(
    tree: Any, tags: Tags, rules: Rules = DEFAULT_RULES, prefix: str = ""
) -> tuple[list[Any], tuple[Record, ...], int]:
    """Packs a tree into its traced leaves and its records, for callers that need no `Structure`.

    The native walk interns a structure all the same, as its table leads to nothing else. The walk in Python interns
    nothing.

    Args:
        tree: any object.
        tags: the objects seen by earlier walks. Records refer to them by number. Those of this tree are added.
        rules: see `Rules`.
        prefix: a text to put before each path in errors.

    Returns:
        The traced leaves not seen before, the records added, and the number of the root.
    """
    packed = pack_natively(tree, tags, rules, prefix)
    if packed is None:
        return _walk.walk(tree, tags, rules, prefix)
    leaves, structure = packed
    return leaves, structure.records, structure.root


def unpack(structure: Structure, leaves: Sequence[Any], table: list[Any] | None = None) -> Any:
    """Puts a DAG together and returns it. All of its nodes are new; the leaves are taken as they are.

    Args:
        structure: the structure to build.
        leaves: one object for each traced leaf. They need not be arrays.
        table: the objects of the earlier trees of the same `Context`, by number. Those of this tree are added. None
            outside of one.

    Raises:
        ValueError: if the number of leaves is not `structure.num_leaves`.
    """
    if len(leaves) != structure.num_leaves:
        raise ValueError(
            f"The structure has {structure.num_leaves} traced leaves, but {len(leaves)} were given. Tied leaves count "
            "once: take the leaves from `sharedtree.tree.leaves`."
        )
    table = [] if table is None else table
    build(structure, leaves, table)
    return table[structure.root]


def build(
    records: Sequence[Record] | Structure,
    leaves: Sequence[Any],
    table: list[Any],
    caller_object: Callable[[int], Any] | None = None,
    updated_object: Callable[[int, Any], Any] | None = None,
) -> None:
    """Puts a tree together: makes one object for each record, in order, and appends it to `table`.

    A structure is built by C, if that is in use: it is compiled once and built many times. Bare records are built in
    Python.

    Args:
        records: a structure, or the records that follow those already in the table.
        leaves: one object for each traced leaf, in order.
        table: the objects of all earlier records. Those of these records are added.
        caller_object: number → the caller's object, for `Given`.
        updated_object: (number, new content) → the caller's object with this content, for `Update`.
    """
    if not isinstance(records, Structure):
        _walk.build(records, leaves, table, caller_object, updated_object)
    elif native is None:
        _walk.build(records.records, leaves, table, caller_object, updated_object)
    else:
        native.build(records, leaves, table, caller_object, updated_object)


# --- packing by the native walk ---------------------------------------------------------------------------------------


def pack_natively(tree: Any, tags: Any, rules: Rules, prefix: str) -> tuple[list[Any], Structure] | None:
    """Packs a tree by the native walk. If its structure is not in the table yet, walks in Python and enters it.

    The arguments are those of `walk`.

    Returns:
        The traced leaves not seen before, and the interned structure. None if the native walk is not in use or cannot
        follow these rules, and the caller has to walk in Python; then `tags` is unchanged.
    """
    # C cannot follow these rules: it would have to treat `jax.ShapeDtypeStruct` in another way, or to call a function
    # or look into a table for each leaf or node.
    if native is None or rules.is_leaf is not None or not rules.are_structs_traced:
        return None
    if rules.given or rules.updated or rules.given_copies:
        return None
    if rules.on_static is not None:
        return _walk_and_check_statics(tree, tags, rules, prefix)
    # `native.walk` returns the leaves and the structure; None for an unknown structure and for anything that it cannot
    # do, with `tags` unchanged.
    packed = native.walk(tree, tags, flags_of(rules), _entries)
    return _walk_in_python(tree, tags, rules, prefix) if packed is None else packed


def flags_of(rules: Rules) -> int:
    """Encodes the rules that the native walk can follow in one number.

    The lower eight bits have one rule each, in the order of the flags in `_native_walk.c`. Above them stands the number
    of the convention.
    """
    truths = rules.containers | rules.arrays << 1 | rules.values << 2 | rules.filtered << 3 | rules.is_exact << 4
    return truths | _classes_in_native_walk.NUMBERS[rules.convention] << 8


def _walk_and_check_statics(tree: Any, tags: Any, rules: Rules, prefix: str) -> tuple[list[Any], Structure] | None:
    """Packs a tree by the native walk, and passes each of its static values to `rules.on_static`.

    Returns:
        The leaves and the structure. None if the structure is not in the table, or if its static values may be other
        objects than those of this tree. `tags` is then unchanged, and the caller has to walk in Python: that walk
        checks each value before any structure gets it.
    """
    start = len(tags.objects)
    packed = native.walk(tree, tags, flags_of(rules), _entries)
    if packed is None:
        return None
    _, structure = packed
    statics = list(statics_of(structure))
    # The structure may come from another tree. Its static values equal those of this tree, but may be other objects. If
    # they are settled, which means that they never change, checking them is as good as checking those of this tree.
    if not all(static.is_settled for _, static in statics):
        tags.forget(start)
        return None
    assert rules.on_static is not None
    first_paths: dict[int, Path] = {}

    def path_text(number: int) -> str:
        # Finding paths takes a walk over all records, so it is done only when an error asks for one.
        if not first_paths:
            for record, path in edges(structure.records, [((), structure.root)], structure.base):
                first_paths.setdefault(record, path)
        return prefix + jtu.keystr(first_paths[number])

    for number, static in statics:
        rules.on_static(static.peek(), functools.partial(path_text, number))
    return packed


def _walk_in_python(tree: Any, tags: Any, rules: Rules, prefix: str) -> tuple[list[Any], Structure]:
    """Packs a tree by the walk in Python, and enters its structure into the table if C can write a key for it.

    Returns:
        The traced leaves not seen before, and the interned structure.
    """
    base = len(tags.objects)
    reading = Reading()
    leaves, records, root = _walk.walk(tree, tags, rules, prefix, reading)
    # If the class of a node was changed since it was described to C, the key would be wrong. From then on, C leaves
    # its instances to the registered functions.
    _classes_in_native_walk.drop_changed_layouts(records)
    structure = intern(records, root, base)
    # `pins` alternates between a value that the key has by address and the class that the value had in the key.
    # `settled` alternates between a value that never changes and the token that stands for it in keys.
    try:
        key, pins, settled = native.key_of(reading.visited, flags_of(rules), base)
    except Exception:  # noqa: BLE001 -- what has no key is walked in Python each time
        return leaves, structure
    # A user may have assigned to `__class__` of a value during the walk. Then the key has one class and the structure
    # another one, and the key must not lead to this structure. Tokens are pins, too, but no values of the user.
    for value, class_in_key in zip(pins[::2], pins[1::2], strict=True):
        class_in_structure = reading.static_memo.classes.get(id(value))  # alive in `pins`
        if class_in_key is not _classes_in_native_walk.Token and class_in_structure is not class_in_key:
            return leaves, structure
    # As long as the object in `held` lives, C recognises the settled values by address and knows their tokens.
    held = [native.hold(tuple(settled))] if settled else []
    _enter(key, structure, (*IdentitySet(pins[::2]), *held))
    return leaves, structure


# --- the table of structures ------------------------------------------------------------------------------------------

MAX_KEYS = 4_096
"""Size of the table at which it is emptied. It would grow without end for a module whose static values are new objects
each time, because each walk then has a new key."""

MAX_KEPT = 256
MAX_KEPT_RECORDS = 100_000
"""How many structures are kept alive, and how many records they have together."""

MAX_KEPT_EXACT = 8
"""How many structures are kept alive that hold static objects of a user."""

_lock = Lock()
# Tuples that are replaced as a whole, so that no thread sees half a change. The latest structure is the last.
_kept: tuple[Structure, ...] = ()
_kept_exact: tuple[Structure, ...] = ()


def _enter(key: bytes, structure: Structure, pins: tuple[Any, ...]) -> None:
    """Enters a structure into the table.

    Args:
        key: its key.
        structure: the structure.
        pins: the objects that the key has by address, which must live as long as the entry. Each occurs once.
    """
    # The callback below may run at the end of the process, when the global names of this file are gone already. So it
    # uses a local one.
    entries = _entries
    entry = weakref.ref(structure, lambda _: entries.pop(key, None))
    # Pins that are let go of below. They die at the end of this function and not under the lock, because a finaliser
    # may run any code.
    dropped_pins: list[Any] = []
    with _lock:
        # A full table is emptied, and the structures in it let go of the pins of their keys.
        if len(_entries) >= MAX_KEYS:
            structures = [reference() for reference in list(_entries.values())]
            for dropped_structure in structures:
                if dropped_structure is not None:
                    dropped_pins.append(dropped_structure.pins)
                    dropped_structure.pins = {}
            _entries.clear()
            # C forgets the keys that it has stored, too. The objects to which their addresses refer must be alive until
            # then, which they are in `dropped_pins`.
            native.forget_keys()
        # The structure holds the pins, not the table: a pin may lead to the structure, which would then live for ever.
        structure.pins[key] = pins
        _entries[key] = entry
    # Keep the structure alive for the next call, if it is not too large. One with static objects of a user keeps these
    # alive, too. Of such ones only the latest few are kept. Any other one is kept only if it keeps nothing alive that
    # might otherwise die: no pin of it is a token or a user's value.
    if len(structure.records) <= MAX_KEPT_RECORDS:
        if structure.objects:
            _keep_exact(structure)
        elif all(_is_held_anyway(pin) for pin in pins):
            _keep(structure)


def _keep(structure: Structure) -> None:
    """Makes a structure the latest of those that are kept alive, and drops the oldest beyond the limits."""
    global _kept  # noqa: PLW0603 -- replaced by one assignment, which threads cannot tear
    # Collect from the latest backwards, up to the limits.
    kept, num_records = [structure], len(structure.records)
    for earlier in reversed(_kept):
        num_records += len(earlier.records)
        if num_records > MAX_KEPT_RECORDS or len(kept) == MAX_KEPT:
            break
        if earlier is not structure:
            kept.append(earlier)
    _kept = tuple(reversed(kept))


def _keep_exact(structure: Structure) -> None:
    """Keeps a structure alive that holds static objects of a user, such as the config of a model.

    JAX's caches hold no such structure. So without this, each eager function would walk such a model in Python. The
    price: the static objects of the latest `MAX_KEPT_EXACT` models may outlive them, until the next full garbage
    collection.
    """
    global _kept_exact  # noqa: PLW0603 -- as in `_keep`
    earlier = [kept for kept in _kept_exact if kept is not structure]
    _kept_exact = (*earlier, structure)[-MAX_KEPT_EXACT:]


def _drop_kept(phase: str, info: dict[str, int]) -> None:
    """Lets go of all structures that are kept alive here. The garbage collector calls it before each collection.

    Args:
        phase: "start" or "stop".
        info: has the generation that is collected. Only a collection of the oldest one, 2, is a full one.
    """
    global _kept, _kept_exact  # noqa: PLW0603 -- as in `_keep`
    if phase == "start" and info["generation"] == 2:
        _kept = _kept_exact = ()


if native is not None:
    gc.callbacks.append(_drop_kept)


_HELD_ANYWAY = (np.dtype, *[cls for library in LIBRARIES for cls in library.held_anyway])


def _is_held_anyway(value: Any) -> bool:
    """Tells whether keeping a value alive does no harm: it lives for ever anyway, or it keeps nothing else alive.

    This holds for what its module has under its own name, such as functions and classes; for any function of a loaded
    module that has no closure, defaults or attributes; and for dtypes.
    """
    if isinstance(value, _HELD_ANYWAY):
        return True
    try:
        module = sys.modules.get(value.__module__)
        if module is None:
            return False
        # A function refers to its module, to the values in its closure, to its defaults and to its attributes.
        if type(value) is types.FunctionType and value.__globals__ is module.__dict__:
            return not (value.__closure__ or value.__defaults__ or value.__kwdefaults__ or value.__dict__)
        return operator.attrgetter(value.__qualname__)(module) is value
    except Exception:  # noqa: BLE001 -- a user's attributes may raise anything
        return False


# --- writing back -----------------------------------------------------------------------------------------------------


def write_natively(pending: list[Any]) -> bool:
    """Writes new contents into objects in C: all of them, or none.

    Args:
        pending: objects to write to, each followed by a new object of its class that has the content to write.

    Returns:
        False if the native walk is not in use or cannot write one of them. Nothing was written then.
    """
    return native is not None and native.write_back(pending)
