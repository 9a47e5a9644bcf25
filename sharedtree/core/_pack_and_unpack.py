"""Pack and unpack: a DAG into its unique traced leaves and its structure, and back, in C where possible.

    pack([w, Pair(w, 3)])    →  leaves [w], structure of a list that holds a leaf and a `Pair` of the same leaf and 3
    unpack(structure, [v])   →  [v, Pair(v, 3)]

Each function uses the native walk, in C, if it is in use and can follow the rules. Otherwise it uses the walk in Python
(`_walk.py`), with the same outcome.

    tree  →  native.walk  →  key b"..."  →  is in the table: leads to the structure      the usual case
                                         →  is not: the walk in Python, then an entry    the first time, and for errors

The native walk describes a tree by a *key*, a string of bytes (see `_native_walk.c`), and the table leads from keys to
structures. So in the usual case no record is made. A tree without an entry is walked in Python, which makes the
structure or raises the error. The key for that structure is written from a log of the walk in Python. The tree itself
may have been changed by another thread in between.

A key may hold addresses of objects: of static values, and of the *tokens* that stand for static values that never
change. These objects are the *pins* of the key, and must live as long as the entry.

An entry lives as long as its structure, which the table holds weakly. The latest structures are kept alive until the
next full garbage collection, so that a loop that drops its structures need not start anew each time.

A `Context` packs several trees one after the other. Its *tags* (`Tags`) are the objects of all trees so far, by number.
For an object that comes again, the structure refers to the earlier record.
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
from ._walk import DEFAULT_RULES, Rules, WalkLog

_entries: dict[bytes, weakref.ref[Structure]] = {}
"""The table of structures: the native walk's key for a tree → its structure."""

# Prepares the native module with this table. If that fails, `native_module` is None from here on.
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
        tags: the objects of the earlier trees of the same `Context`. The objects of this tree are added.
        rules: see `Rules`.
        prefix: a text to put before each path in errors.
        context_mark: an object that stands for the `Context`, so that structures of two contexts differ. It is not the
            `Context` itself, which a structure must not keep alive. None outside of a `Context`.

    Returns:
        The traced leaves not yet in `tags`, and the structure.
    """
    base = len(tags.objects)
    packed = pack_natively(tree, tags, rules, prefix)
    if packed is None:
        leaves, records, root = _walk.walk(tree, tags, rules, prefix)
        return leaves, intern(records, root, base, context_mark)
    leaves, structure = packed
    # The table leads to a structure without a `context_mark`. In a `Context`, a second structure is needed, with the
    # same records and the mark.
    if context_mark is None:
        return leaves, structure
    return leaves, intern(structure.records, structure.root, base, context_mark)


def flat_dag_of(tree: Any, rules: Rules = DEFAULT_RULES, prefix: str = "") -> FlatDag:
    """Packs one tree outside of any `Context` into its flat DAG: the records and, by number, the objects.

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

    The native walk interns a structure nevertheless, because its table leads to structures. The walk in Python, if used
    instead, interns nothing.

    Args:
        tree: any object.
        tags: the objects seen by earlier walks. Records refer to them by number. The objects of this tree are added.
        rules: see `Rules`.
        prefix: a text to put before each path in errors.

    Returns:
        The traced leaves not yet in `tags`, the records of the objects added, and the number of the root.
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
        leaves: one object for each traced leaf, of any class.
        table: the objects of the earlier trees of the same `Context`, by number. The objects of this tree are added.
            None outside of a `Context`.

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

    If C is in use, it builds structures: each is compiled at its first use and then built many times. A sequence of
    records is always built in Python.

    Args:
        records: a structure or its records. The number of the first one is the length of `table`.
        leaves: one object for each traced leaf, in order.
        table: the objects of all earlier records. The objects of these records are added.
        caller_object: number → the caller's object, for `Given`. None if no record has a `Given`.
        updated_object: (number, new content) → the caller's object with this content, for `Update`. None if no record
            has an `Update`.
    """
    if not isinstance(records, Structure):
        _walk.build(records, leaves, table, caller_object, updated_object)
    elif native is None:
        _walk.build(records.records, leaves, table, caller_object, updated_object)
    else:
        native.build(records, leaves, table, caller_object, updated_object)


# --- packing by the native walk ---------------------------------------------------------------------------------------


def pack_natively(tree: Any, tags: Any, rules: Rules, prefix: str) -> tuple[list[Any], Structure] | None:
    """Packs a tree by the native walk, if that can follow the rules.

        rules                          structure in the table       structure not in the table
        that C does not have           None                         None
        with `on_static`               packed by C                  None
        any others                     packed by C                  packed in Python here, and entered

    None means that the caller has to walk in Python.

    The arguments are the same as for the function `walk` in this file.

    Returns:
        The traced leaves not yet in `tags`, and the interned structure. None if the caller has to walk in
        Python: the native walk is not in use, or cannot follow these rules, or, with `rules.on_static`, cannot pack
        this tree. Then `tags` is unchanged.
    """
    if native is None:
        return None
    # C has none of the following rules. For `is_leaf` it would call a function for each leaf and node.
    if rules.is_leaf is not None or not rules.are_structs_traced:
        return None
    # `given`, `updated` and `given_copies` are tables in which it would look up each leaf or node.
    if rules.given or rules.updated or rules.given_copies:
        return None
    if rules.on_static is not None:
        return _walk_natively_and_check_statics(tree, tags, rules, prefix)
    # `native.walk` returns the leaves and the structure. For a structure that is not in the table, and for anything
    # that it cannot do, it returns None, with `tags` unchanged.
    packed = native.walk(tree, tags, flags_of(rules), _entries)
    return _walk_in_python_and_enter(tree, tags, rules, prefix) if packed is None else packed


def flags_of(rules: Rules) -> int:
    """Encodes in one number the rules known to the native walk.

    The lower eight bits are for Boolean rules. Each has one bit, as in `_native_walk.c`. The higher bits
    have the number of the convention.
    """
    flags = rules.containers | rules.arrays << 1 | rules.values << 2 | rules.filtered << 3 | rules.is_exact << 4
    return flags | _classes_in_native_walk.NUMBERS[rules.convention] << 8


def _walk_natively_and_check_statics(
    tree: Any, tags: Any, rules: Rules, prefix: str
) -> tuple[list[Any], Structure] | None:
    """Packs a tree by the native walk, and passes each static value of the structure to `rules.on_static`.

    If `rules.on_static` raises, the error goes to the caller, and `tags` keeps the objects of this tree.

    Returns:
        The leaves and the structure. None, with `tags` unchanged, if the caller has to walk in Python, which checks
        each value of the tree itself: the structure is not in the table, or some of its static values may change.
    """
    start = len(tags.objects)
    packed = native.walk(tree, tags, flags_of(rules), _entries)
    if packed is None:
        return None
    _, structure = packed
    statics = list(statics_of(structure))
    # The structure may come from another tree. Its static values equal those of this tree, but may be other objects. If
    # all of them are settled, which means that they never change, checking them is as good as checking those of this
    # tree.
    if not all(static.is_settled for _, static in statics):
        tags.forget(start)
        return None
    assert rules.on_static is not None
    first_paths: dict[int, Path] = {}

    def path_text(number: int) -> str:
        """Returns the representative path of a record, for an error."""
        # To find the paths, all records are visited. So this waits until an error asks for one.
        if not first_paths:
            for record, path in edges(structure.records, [((), structure.root)], structure.base):
                first_paths.setdefault(record, path)
        return prefix + jtu.keystr(first_paths[number])

    for number, static in statics:
        rules.on_static(static.peek(), functools.partial(path_text, number))
    return packed


def _walk_in_python_and_enter(tree: Any, tags: Any, rules: Rules, prefix: str) -> tuple[list[Any], Structure]:
    """Packs a tree by the walk in Python, and enters its structure into the table if C can write a key for it.

    If not, each later walk of this tree comes here again.

    Returns:
        The traced leaves not yet in `tags`, and the interned structure.
    """
    base = len(tags.objects)
    log = WalkLog()
    leaves, records, root = _walk.walk(tree, tags, rules, prefix, log)
    # C reads some classes by a layout that it got from Python. If one of these classes was changed since, the key would
    # be wrong. This drops its layout: from now on, C leaves the instances of the class to the registered functions.
    _classes_in_native_walk.drop_changed_layouts(records)
    structure = intern(records, root, base)
    # Both lists are flat lists of pairs.
    # `pins`: (object that the key has by its address, the class that this object had in the key).
    # `settled`: (static value that never changes, the token that stands for it in keys).
    try:
        key, pins, settled = native.key_of(log.visited, flags_of(rules), base)
    except Exception:  # noqa: BLE001 -- without a key, the tree is walked in Python each time
        return leaves, structure
    # A user may have assigned to `__class__` of a value during the walk. Then the key has one class and the structure
    # another one, and the key must not lead to this structure. Tokens are pins, too, but the walk has no class for
    # them, so they are left out here.
    for pin, class_in_key in zip(pins[::2], pins[1::2], strict=True):
        class_in_structure = log.static_memo.classes.get(id(pin))  # alive in `pins`
        if class_in_key is not _classes_in_native_walk.Token and class_in_structure is not class_in_key:
            return leaves, structure
    # `native.hold` returns an object. As long as it lives, C recognises the settled values by address and knows their
    # tokens. So it becomes a pin, too.
    held = [native.hold(tuple(settled))] if settled else []
    _enter(key, structure, (*IdentitySet(pins[::2]), *held))
    return leaves, structure


# --- the table of structures ------------------------------------------------------------------------------------------

MAX_KEYS = 4_096
"""Size of the table at which it is emptied. Otherwise it could grow without end: if the static values of a module are
new objects each time, each walk has a new key."""

MAX_KEPT = 256
MAX_KEPT_RECORDS = 100_000
"""Limits for the structures that are kept alive: their number, and the number of their records together."""

MAX_KEPT_EXACT = 8
"""Limit for the number of structures with static objects of a user (`Structure.objects`) that are kept alive."""

_lock = Lock()
# The structures that are kept alive, without and with static objects of a user. The latest structure is the last. Each
# tuple is replaced as a whole, so that no thread sees half a change.
_kept: tuple[Structure, ...] = ()
_kept_exact: tuple[Structure, ...] = ()


def _enter(key: bytes, structure: Structure, pins: tuple[Any, ...]) -> None:
    """Enters a structure into the table, and keeps it alive if that does no harm.

    Args:
        key: the new key of the structure.
        structure: the structure.
        pins: the objects that must live as long as the entry, because the key has their addresses. Each occurs once.
    """
    # The weak reference removes the entry when the structure dies. That may be at the end of the process, when the
    # global names of this file are gone already. So the callback uses a local name.
    entries = _entries
    entry = weakref.ref(structure, lambda _: entries.pop(key, None))
    # This list keeps alive the pins that are dropped below. So they die at the end of this function and not under the
    # lock, because a finaliser may run any code.
    dropped_pins: list[Any] = []
    with _lock:
        # If the table is full, empty it. The pins of its keys are no longer needed.
        if len(_entries) >= MAX_KEYS:
            structures = [reference() for reference in list(_entries.values())]
            for dropped_structure in structures:
                if dropped_structure is not None:
                    dropped_pins.append(dropped_structure.pins)
                    dropped_structure.pins = {}
            _entries.clear()
            # C has keys stored, too, and forgets them. Until then the objects at the addresses in these keys must be
            # alive, and `dropped_pins` keeps them so.
            native.forget_keys()
        # The structure holds the pins. If the table held them, a pin that refers to the structure would keep it alive
        # for ever.
        structure.pins[key] = pins
        _entries[key] = entry
    # Keep the structure alive for the next call, if it is not too large. A structure with static objects of a user
    # keeps these alive, too, so only the latest few of this kind are kept. Any other structure is kept only if no pin
    # is an object that might otherwise die, such as a token or a value of a user.
    if len(structure.records) <= MAX_KEPT_RECORDS:
        if structure.objects:
            _keep_exact(structure)
        elif all(_may_be_kept_alive(pin) for pin in pins):
            _keep(structure)


def _keep(structure: Structure) -> None:
    """Keeps a structure alive, as the latest one. Of the earlier ones, keeps the latest up to the limits.

    At the first structure beyond a limit, this one and all older ones are dropped, small ones included.
    """
    global _kept  # noqa: PLW0603 -- replaced by one assignment, which threads cannot tear
    # Collect from the latest backwards, up to the limits. If the structure was kept before, its records count twice
    # here. Then a few structures less may be kept, which does no harm.
    latest_first, num_records = [structure], len(structure.records)
    for earlier in reversed(_kept):
        num_records += len(earlier.records)
        if num_records > MAX_KEPT_RECORDS or len(latest_first) == MAX_KEPT:
            break
        if earlier is not structure:
            latest_first.append(earlier)
    _kept = tuple(reversed(latest_first))


def _keep_exact(structure: Structure) -> None:
    """Keeps a structure with static objects of a user alive, such as the config of a model.

    JAX's caches hold no structure of this kind. If nothing held it, each function outside of traces would walk the
    model in Python on each call. The price: the static objects of the latest `MAX_KEPT_EXACT` models may outlive the
    models, until the next full garbage collection.
    """
    global _kept_exact  # noqa: PLW0603 -- as in `_keep`
    earlier_structures = [kept for kept in _kept_exact if kept is not structure]
    _kept_exact = (*earlier_structures, structure)[-MAX_KEPT_EXACT:]


def _drop_kept_at_full_collection(phase: str, info: dict[str, int]) -> None:
    """Stops keeping structures alive, when a full garbage collection begins. Does nothing at any other call.

    The garbage collector calls it before and after each collection, of any generation (`gc.callbacks`).

    Args:
        phase: "start" or "stop".
        info: has the generation to be collected. Generation 2, the oldest, is collected by a full collection alone.
    """
    global _kept, _kept_exact  # noqa: PLW0603 -- as in `_keep`
    if phase == "start" and info["generation"] == 2:
        _kept = _kept_exact = ()


if native is not None:
    gc.callbacks.append(_drop_kept_at_full_collection)


_CLASSES_HELD_ANYWAY = (np.dtype, *[cls for library in LIBRARIES for cls in library.held_anyway])


def _may_be_kept_alive(value: Any) -> bool:
    """Returns True if a value may be kept alive without harm: it lives for ever anyway, or it keeps nothing else alive.

    True for

    - a function or class that its module has under its `__qualname__`;
    - any function of a loaded module, such as a `lambda`, without closure, defaults and attributes;
    - a dtype, and an instance of a class in `Library.held_anyway`.
    """
    if isinstance(value, _CLASSES_HELD_ANYWAY):
        return True
    try:
        module = sys.modules.get(value.__module__)
        if module is None:
            return False
        # Besides its module, a function keeps alive the values in its closure, its defaults and its attributes.
        if type(value) is types.FunctionType and value.__globals__ is module.__dict__:
            return not (value.__closure__ or value.__defaults__ or value.__kwdefaults__ or value.__dict__)
        return operator.attrgetter(value.__qualname__)(module) is value
    except Exception:  # noqa: BLE001 -- a user's attributes may raise anything
        return False


# --- writing back -----------------------------------------------------------------------------------------------------


def write_natively(pending: list[Any]) -> bool:
    """Writes new contents into objects, in C: into all of them, or into none.

    Args:
        pending: one flat list, target, source, target, source, ...: a target is an object to write to, and the source
            after it is a new object of the same class that has the content.

    Returns:
        True if all contents were written. False if nothing was written, because the native walk is not in use, or
        because C cannot write into one of the objects. C finds that out before it writes.
    """
    return native is not None and native.write_back(pending)
