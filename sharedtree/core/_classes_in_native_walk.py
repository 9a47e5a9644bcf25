"""Serves the native walk: describes classes to it, finds tokens for static values, and compiles structures.

    an instance of a new class  →  _describe_object  →  shape, fields, ...       once for each class
    a static value              →  _tokens_for       →  what stands for it in a key
    a structure                 →  _compile          →  the steps that put its tree together

Words:

- the *native walk* is the one in C (`_native_walk.c`). It asks Python for all that it does not know;
- a *key* is a string of bytes by which the native walk describes a tree. Trees with equal keys have one structure;
- the *shape* of a class is the native walk's number for a way to take instances apart and to build them: `native.LIST`,
  `native.FIELDS`, ...;
- an *exact* walk takes static values uncopied, so that the same tree is put together again with the very objects of the
  user;
- an *irreplaceable* object is one for which an equal object is no substitute, such as a list or a config
  (`_static_values.irreplaceable_objects`);
- a *settled* value is a static value whose key never changes, such as a text (`_static_values.is_settled_value`);
- a *convention* says which leaves are traced at a place in a tree (`_node_types.LocalConvention`).

A description of a class holds for ever, as a `NodeType` does. There is one exception. A class of leaves may later be
registered as a class of nodes. So most descriptions of classes of leaves are *guesses*: after each registration, the
native walk asks for them again.
"""

import collections
import contextlib
import itertools
import types
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import tree_util as jtu
from jax.core import Tracer

from ._by_identity import IdentityDict, IdentitySet, Interned, WeakIdentityDict
from ._call_arguments import Arguments
from ._jax_internals import REGISTRY, ConcreteArray
from ._native_or_python import native_module as native
from ._node_types import (
    NUMPY_NUMBERS,
    TRACED_NUMBERS,
    LocalConvention,
    NativeLayout,
    NodeType,
    carries_identity,
    is_namedtuple,
    is_taken_apart_by_registry,
    is_traced,
    is_value_of_variable,
    markers,
    native_layout_of,
    node_type_of,
    node_type_of_class,
    registration_callbacks,
)
from ._static_values import (
    BY_VALUE,
    IdentityKey,
    SettledAnswer,
    Static,
    StaticMemo,
    has_kept_hash,
    has_settled_instances,
    irreplaceable_objects,
    is_settled_value,
    key_of,
    new_static_memo,
    parts_to_read,
    reading_of,
)
from ._structure import LEAF, Given, Node, Op, Record, Structure, Update

Description = tuple[Any, ...]
"""The arguments of `new_kind` in `_native_walk.c`, in order.

They are: the class; its shape; whether it is plain, mutable and known to JAX; the number of its convention; whether all
this is a guess; its node type; the function that takes an instance apart; and the directions for reading attributes
(`NativeLayout.native_arguments`).
"""

_NO_DIRECTIONS = NativeLayout("").native_arguments
"""The directions for a class whose attributes the native walk does not read itself."""

_layouts_in_use: dict[type, NativeLayout] = {}
"""Class in JAX's registry whose instances the native walk reads itself → its layout, the directions for doing so.

The flatten functions of these classes are not called."""

_introduced: set[str] = set()
"""Names of the libraries whose `Library.introduce` was called. It prepares the native walk for their classes."""

# The answers of `_describe_object` about a single leaf: it is static; it is traced and a value, which has no ties; or
# it is traced and an object, which may be tied. The native walk has the same numbers.
_IS_STATIC, _IS_VALUE, _IS_OBJECT = 0, 1, 2


# --- classes ----------------------------------------------------------------------------------------------------------


def _describe_object(obj: Any, settings: int) -> Description | int:
    """Describes the class of an object to the native walk, or the object alone if its class does not say enough.

    The native walk calls it for each object of a class without a description.

    Args:
        obj: the object.
        settings: the lower eight bits are the native walk's number for the convention at the place of the object. The
            bit above them is 1 if only arrays are traced (`Rules.filtered`).

    Returns:
        A description for the class; or, for this object alone, `_IS_STATIC`, `_IS_VALUE` or `_IS_OBJECT`.
    """
    convention, filtered = _CONVENTIONS[settings & 0xFF], bool(settings >> 8)
    # Tracers come first, because they are frequent: under a trace each leaf is one. Their class gets no description,
    # because tracers of arrays and of references have the same class.
    if isinstance(obj, (Tracer, jax.Ref)):
        return _kind_of_leaf(obj, convention, filtered=filtered)
    node_type = node_type_of(obj)
    if node_type is not None and (convention not in ("outside", "any") or node_type.is_known_to_jax):
        return _describe_nodes(node_type)
    cls = type(obj)
    # Of the classes of nodes only `deque` is left. Outside modules it is a leaf, because JAX does not know it.
    if node_type is not None:
        return _kind_of_leaf(obj, convention, filtered=filtered)
    # For example the class of arrays of PRNG keys.
    if issubclass(cls, jax.Array):
        return _describe_leaf(cls, native.JAX_ARRAY)
    # In a walk, a `ShapeDtypeStruct` stands for an array.
    if isinstance(obj, jax.ShapeDtypeStruct):
        return _describe_leaf(cls, native.JAX_ARRAY, is_guess=True)
    # Of arrays and scalars of NumPy, each is asked about: those of numbers are traced, those of texts need not be.
    if issubclass(cls, (np.ndarray, np.generic)):
        return _kind_of_leaf(obj, convention, filtered=filtered)
    # A leaf of any other class. If JAX can trace it, C treats it like a number: it is traced, unless the convention is
    # Equinox's.
    shape = native.NUMBER if is_traced(obj, "jax") else native.STATIC
    return _describe_leaf(cls, shape, is_guess=True)


def _kind_of_leaf(leaf: Any, convention: LocalConvention, *, filtered: bool) -> int:
    """Returns `_IS_STATIC`, `_IS_VALUE` or `_IS_OBJECT` for one leaf. The walk in Python (`_walk`) decides likewise.

    Args:
        leaf: the leaf.
        convention: the convention at its place.
        filtered: True if only arrays are traced, whatever the convention.
    """
    if not is_traced(leaf, convention) or (filtered and not is_traced(leaf, "equinox")):
        return _IS_STATIC
    # A leaf without identity, such as a number, is a value. So is an array directly in a variable, which itself is the
    # object.
    if not carries_identity(leaf) or (convention == "variable" and is_value_of_variable(leaf)):
        return _IS_VALUE
    # Outside modules only references are objects.
    return _IS_VALUE if convention == "outside" and not isinstance(leaf, jax.Ref) else _IS_OBJECT


def _describe_leaf(cls: type, shape: int, *, is_guess: bool = False) -> Description:
    """Makes the description of a class of leaves.

    Args:
        cls: the class.
        shape: `native.JAX_ARRAY`, `native.NUMBER`, `native.STATIC`, ...: the way to treat its instances.
        is_guess: whether somebody may still register the class as one of nodes.
    """
    is_plain = is_mutable = is_known_to_jax = False
    facts = is_plain, is_mutable, is_known_to_jax, native.INHERITED
    node_type = take_apart = None
    return (cls, shape, *facts, is_guess, node_type, take_apart, *_NO_DIRECTIONS)


def _describe_nodes(node_type: NodeType) -> Description:
    """Makes the description of a class of nodes.

    If C is to read its instances itself, by the directions of a library, and this is the first such class of the
    library, then the library is introduced to the native walk before.
    """
    cls, is_in_registry = node_type.cls, is_taken_apart_by_registry(node_type)
    convention = native.INHERITED if node_type.convention is None else NUMBERS[node_type.convention]
    shape, directions = _shape_of(node_type), _NO_DIRECTIONS
    # A library may let C read the attributes itself, without a call of the flatten function. `native_layout_of` returns
    # (library, layout), or None.
    layout_of_library = native_layout_of(cls) if is_in_registry or node_type.fields else None
    if layout_of_library is not None:
        library, layout = layout_of_library
        if library.name not in _introduced:
            library.introduce(native)
            _introduced.add(library.name)
        # For example `native.FIELDS`, for a layout with the shape "FIELDS".
        shape, directions = getattr(native, layout.shape), layout.native_arguments
        if is_in_registry:
            _layouts_in_use[cls] = layout
    take_apart = jtu.default_registry.flatten_one_level if is_in_registry else node_type.take_apart
    facts = node_type.is_plain, node_type.is_mutable, node_type.is_known_to_jax, convention
    is_guess = False
    # C keeps the description for ever. The node type would keep the class of a namedtuple alive, so it is left out.
    kept_type = None if shape == native.NAMEDTUPLE else node_type
    return (cls, shape, *facts, is_guess, kept_type, take_apart, *directions)


def _shape_of(node_type: NodeType) -> int:
    """Returns the shape of a class of nodes for which no library has a layout."""
    cls = node_type.cls
    if cls in _SHAPES:
        return _SHAPES[cls]
    if cls is Arguments:
        return native.ARGUMENTS
    if node_type.is_plain and is_namedtuple(cls):
        return native.NAMEDTUPLE
    return native.OTHER


_SHAPES: dict[type, int] = {}
"""Class of plain containers → its shape. Filled by `start`."""


def drop_changed_layouts(records: Sequence[Record]) -> None:
    """Makes the native walk forget its layout of each class that has changed since it was described to C.

    For example, somebody may have given the class another `tree_flatten` method or another list of fields. From then on
    C never again reads instances of this class by a layout, not by a new one either: `native.unlearn` leaves them to
    the functions in JAX's registry for good.

    Args:
        records: the records of a new structure. The classes of their nodes are checked.
    """
    for cls in {op.type.cls for op, _ in records if type(op) is Node}:
        layout_in_use = _layouts_in_use.get(cls)
        if layout_in_use is None:
            continue
        layout_of_library = native_layout_of(cls)
        _, layout = (None, None) if layout_of_library is None else layout_of_library
        if layout != layout_in_use:
            native.unlearn(cls)
            _layouts_in_use.pop(cls, None)


# --- static values ----------------------------------------------------------------------------------------------------


class Token:
    """Stands for static values in keys: equal values have the same token.

    The key of a tree holds the address of the token. The structure to which this key leads keeps the token alive.

    Attributes:
        key: what tokens are compared by: the key of the value (`_static_values.key_of`). For a value that is not
            settled, in an exact walk, it is a pair of that key and the irreplaceable objects in the value.
        is_interchangeable: whether all values with this token can replace each other, even in an exact walk. If not, an
            exact walk writes the address of the value into its key and not that of the token.
        contents: content in bytes → what C needs in order to recognise a value of this content, see `_remember`.
    """

    __slots__ = ("__weakref__", "contents", "is_interchangeable", "key")

    def __init__(self, key: Any, *, is_interchangeable: bool) -> None:
        self.key = key
        self.is_interchangeable = is_interchangeable
        self.contents: dict[bytes, tuple[bool, tuple[Any, ...], tuple[Any, ...]]] = {}

    def complete(self) -> None:
        """Does nothing: a token is complete when it is made. `Interned` calls this method of a new token."""

    def is_like(self, candidate: "Token") -> bool:
        """Returns True if both tokens stand for equal values. `Interned` then makes one of them."""
        return self.key == candidate.key


KeyPart = tuple[type] | tuple[Token, None] | Token
"""What stands for a static value in the key of a tree.

(its class,): the address of the value. So it is for all instances of the class, and C need not ask about them again.
(token, None): the token. The value always has this token, so C may store the token for the value.
token: the token. But the value may change, and then have another token in the next walk.
"""

_tokens: Interned[Token] = Interned()


_LatestTokens = WeakIdentityDict["weakref.ref[Token]"]

_latest_tokens: _LatestTokens = WeakIdentityDict()
"""Static value that may change → the token that it had in the latest walk that was not exact."""

_latest_exact_tokens: _LatestTokens = WeakIdentityDict()
"""Static value that may change → the token that it had in the latest exact walk."""


def _tokens_for(values: list[Any], is_exact: bool) -> list[KeyPart]:
    """Finds the parts of a walk's key for static values: the address of the object, or a token. Called by C.

    Args:
        values: the static values of a tree, without those that C writes into the key itself, such as numbers and
            texts.
        is_exact: whether the structure keeps the user's own static objects and not copies. Then no other object may
            take the place of an irreplaceable one.

    Returns:
        For each value its part of the key. See `KeyPart`.
    """
    memo = new_static_memo()
    settled_answers: IdentityDict[SettledAnswer] = IdentityDict()
    # Many attributes may hold the same value. It is looked at once.
    key_parts: IdentityDict[KeyPart] = IdentityDict()
    for value in values:
        if value not in key_parts:
            key_parts[value] = _key_part_for(value, memo, settled_answers, is_exact=is_exact)
    return [key_parts[value] for value in values]


def _key_part_for(
    value: Any, memo: StaticMemo, settled_answers: IdentityDict[SettledAnswer], *, is_exact: bool
) -> KeyPart:
    """Finds the part of a walk's key for one static value.

    Args:
        value: the value.
        memo: the keys of static values made in this walk. This call uses and extends them.
        settled_answers: the answers of `is_settled_value` in this walk. This call uses and extends them.
        is_exact: as for `_tokens_for`.

    Raises:
        Incomparable: if the value has no usable `==` or hash (see `key_of`).
    """
    cls = type(value)
    if not is_exact:
        _describe_static_classes(value)
    # `is_mutable` is True if the value or a part of it is mutable as a list is. If it is False, the value may still not
    # be settled. For example, an object with an `==` and a hash of its own counts as immutable, because nobody should
    # change it. But somebody may, so its key may change.
    key, is_mutable, may_have_irreplaceable_objects = key_of(value, memo)
    # The address stands for a function or a class, for example. An instance of a subclass of `tuple`, `frozenset` or
    # `slice` may be compared by its parts, so it gets a token. (In some releases of JAX, `PartitionSpec` is a tuple.)
    if not is_mutable and has_settled_instances(cls) and not issubclass(cls, (tuple, frozenset, slice)):
        return (cls,)
    objects = tuple(map(IdentityKey, irreplaceable_objects(value) if may_have_irreplaceable_objects else ()))
    # A settled value has the same token in all walks, exact or not. If there are irreplaceable objects in it, values
    # with this token are not interchangeable. Then C writes the address of the value into the key of an exact walk.
    if is_settled_value(value, settled_answers):
        return _tokens.intern(hash(key), Token(key, is_interchangeable=not objects)), None
    # Any other value may change, so its token is that of its present content. A token of an exact walk is compared by
    # the irreplaceable objects, too. So all values with this token have the same ones, and are interchangeable.
    latest_tokens = _latest_exact_tokens if is_exact else _latest_tokens
    # (Outside exact walks, C writes the address of the token in any case, and does not read `is_interchangeable`.)
    token = Token((key, objects) if is_exact else key, is_interchangeable=is_exact)
    # Interning compares a token with every other one of the same hash. For values without a hash these may be many,
    # because their keys all have the hash of the class. Most values are as they were in the latest walk, so the token
    # of that walk is tried first.
    reference = latest_tokens.get(value)
    latest_token = None if reference is None else reference()
    if latest_token is not None and latest_token.is_like(token):
        return latest_token
    token = _tokens.intern(hash(token.key), token)
    with contextlib.suppress(TypeError):  # the value may not support weak references
        latest_tokens[value] = weakref.ref(token)
    return token


# --- contents of static values ----------------------------------------------------------------------------------------

# Some static values are made anew for each call, or may change. C recognises them by their content, which it writes as
# bytes. `_tokens_of_contents` leads from these to the token for which Python was asked once.

_tokens_of_contents: dict[bytes, "weakref.ref[Token]"] = {}

MAX_CONTENTS = 4_096
"""Size of this table at which it is emptied."""

MAX_CONTENTS_OF_TOKEN = 16
"""Limit for the number of contents of one token. Values of one key may have several, by the order of a dictionary."""

_described_classes: WeakIdentityDict[bool] = WeakIdentityDict()
"""Class of static values → True, if C knows by now how to read it, or that it cannot."""


def _describe_static_classes(value: Any) -> None:
    """Tells C how to read the class of a static value, and the classes of its parts. Once for each class."""
    if _described_classes.get(type(value)):
        return
    seen = IdentitySet()
    stack = [value]
    while stack:
        part = stack.pop()
        cls = type(part)
        if cls in BY_VALUE or not seen.add(part):
            continue
        if not _described_classes.get(cls):
            reading = reading_of(cls)
            if reading is not None:
                shape, has_weak_references = getattr(native, f"READ_{reading.shape}"), bool(cls.__weakrefoffset__)
                native.learn_reading(cls, shape, reading.names, has_weak_references)
            _described_classes[cls] = True
        stack.extend(parts_to_read(part))


def _remember(token: Token, content: bytes, is_settled: bool, equal_values: list[Any], pins: tuple[Any, ...]) -> None:
    """Enters the content of a static value, so that C recognises equal values by it. Called by C.

    Args:
        token: the token of the value.
        content: the content, with addresses of some parts.
        is_settled: whether values with this content never change.
        equal_values: the parts of which the content has only the hash. A value with this content has the token if its
            parts are equal to these.
        pins: the objects at the addresses in the content. The token keeps them alive, and the table does not, since
            they may refer to the token.
    """
    is_full = len(token.contents) >= MAX_CONTENTS_OF_TOKEN and content not in token.contents
    if is_full or not all(map(has_kept_hash, pins)):
        return
    if len(_tokens_of_contents) >= MAX_CONTENTS:
        _tokens_of_contents.clear()
    token.contents[content] = is_settled, tuple(equal_values), pins
    # The global name may be gone when the last tokens die.
    table = _tokens_of_contents
    table[content] = weakref.ref(token, lambda _: table.pop(content, None))


# --- programs ---------------------------------------------------------------------------------------------------------


class Step(NamedTuple):
    """Instruction to C to make the object of one record. C gets a plain tuple of the fields (see `Step` in C).

    Attributes:
        shape: the native walk's number for the way to build the object.
        cls: the class of a node. None for any other object.
        record: the record of a node, as (operation, numbers of the children). None for any other object.
        numbers: the numbers of the children. For a class with attributes: one entry for each attribute in order, None
            for a static one.
        names: the names of the attributes or items.
        values: the values of the static attributes in order, with None for each child; or the function to call with the
            tuple of the children; or the value itself.
        target: the number of the caller's object into which the new content is written. None for a new object.
    """

    shape: int
    cls: type | None = None
    record: Record | None = None
    numbers: tuple[int | None, ...] = ()
    names: tuple[Any, ...] = ()
    values: Any = None
    target: int | None = None


class Recipe(NamedTuple):
    """Answer of `native.recipe`: how the native walk builds instances of one class.

    Attributes:
        shape: its number for the way to build them.
        names: the names of the declared attributes, in order. Empty for a class without any.
        are_static: a byte for each attribute, 1 if it is static.
        places: a byte for each attribute, its place among the children or among the static attributes.
    """

    shape: int
    names: tuple[Any, ...]
    are_static: bytes
    places: bytes


def _compile(structure: Structure) -> Any:
    """Compiles a structure into a program, one step a record, and stores it in the structure. Returns the program.

    Building a tree then runs the steps and looks nothing up. The steps for `Pair(w, 3)`, where `Pair` is an Equinox
    module with the fields `first` and `second`:

        record           step
        0  leaf          LEAF
        1  static 3      STATIC    values 3
        2  Pair(0, 1)    FIELDS    numbers (0, 1)    names ("first", "second")
    """
    steps = tuple([tuple(_step(op, numbers)) for op, numbers in structure.records])
    # A call whose result has this structure must be finished in Python in two cases: there are leaves to be entered
    # into the notes on leaves (`ties/_leaf_notes`), or static objects that only Python can write.
    is_for_python = structure.is_noted or _has_update_for_python(structure)
    # The numbers of the caller's own objects in the tree. For C, None says that there are none.
    caller_numbers = structure.given or None
    program = native.Program(steps, caller_numbers, structure.root, is_for_python, structure.updates)
    structure.program = program
    return program


def _has_update_for_python(structure: Structure) -> bool:
    """Returns True if a structure has an `Update` whose content only Python can write. See `_needs_python`."""
    return any(_needs_python(structure, op, numbers) for op, numbers in structure.records)


def _needs_python(structure: Structure, op: Op, numbers: tuple[int, ...]) -> bool:
    """Returns True if only Python can write an object's new content, because of irreplaceable objects in it.

    The function received a copy of each irreplaceable object, for example of a config. If the copy has not changed, the
    caller must keep the original. C can do this for a config in a named static attribute: it does not write the
    attribute. Python also recognises, by their content, objects that moved to another attribute, and objects in places
    without a name.

    Args:
        structure: the structure of a function's result. Its records are numbered from 0.
        op: the operation of one of its records. False for anything but an `Update`, because nothing is written.
        numbers: the numbers of the children of this record.
    """
    # `exact_objects` is not empty only if the function received the originals, and then C may write them.
    if type(op) is not Update or op.node.aux.exact_objects:
        return False
    # A static leaf is a child of the node, and so in no static attribute.
    for number in numbers:
        child_op, _ = structure.records[number]
        if type(child_op) is Static and child_op.has_irreplaceable_objects:
            return True
    # C can write the rest if the auxiliary data holds no irreplaceable object, or if all of them are to be kept.
    return op.node.aux.has_irreplaceable_objects and _step_keeping_statics(op, numbers) is None


def _step(op: Op, numbers: tuple[int, ...]) -> Step:
    """Makes the step for one record, given as its operation and the numbers of its children."""
    if op is LEAF:
        return Step(shape=native.LEAF)
    if type(op) is Given:
        return Step(shape=native.GIVEN, values=op.number)
    if type(op) is Static:
        # A value that can be mutated is copied for each tree that is built.
        if op.is_copied:
            return _step_calling(lambda _: op.thaw(), numbers=())
        return Step(shape=native.STATIC, values=op.peek())
    if type(op) is Update:
        return _step_updating(op, numbers)
    assert type(op) is Node
    recipe = None if op.aux.is_copied else _recipe_for(op, numbers)
    # C cannot build the node, or it would call a function in JAX's registry and there is none. So the step does the
    # same as `_walk.build`. That works for all nodes, and copies the auxiliary data if it has to.
    if recipe is None or (recipe.shape == native.OTHER and not is_taken_apart_by_registry(op.type)):
        return _step_calling(lambda children: op.type.put_together(op.aux.thaw(), list(children)), numbers)
    return _step_by_recipe(recipe, op, numbers)


def _recipe_for(node: Node, numbers: tuple[int, ...]) -> Recipe | None:
    """Asks the native walk how it builds a node. None if it cannot, so that a function in Python has to."""
    recipe = native.recipe(node.type, node.aux.peek(), len(numbers))
    return None if recipe is None else Recipe(*recipe)


def _step_by_recipe(recipe: Recipe, node: Node, numbers: tuple[int, ...]) -> Step:
    """Makes the step for a node built by C itself, or by one call of `Node.unflatten`."""
    numbers_in_step, names, values = _numbers_names_values(recipe, node, numbers)
    record = node, numbers
    return Step(recipe.shape, node.type.cls, record, numbers_in_step, names, values)


def _step_calling(make: Callable[[tuple[Any, ...]], Any], numbers: tuple[int, ...]) -> Step:
    """Makes a step to call a function with the tuple of the children. The step gets their numbers."""
    return Step(shape=native.OTHER, numbers=numbers, values=make)


def _step_updating(op: Update, numbers: tuple[int, ...]) -> Step:
    """Makes the step to build a node and write its content into an object of the caller."""
    # `exact_objects` is not empty only if the function received the originals. Writing these changes nothing.
    keeping_step = None if op.node.aux.exact_objects else _step_keeping_statics(op, numbers)
    return _step(op.node, numbers)._replace(target=op.number) if keeping_step is None else keeping_step


def _step_keeping_statics(op: Update, numbers: tuple[int, ...]) -> Step | None:
    """Makes the step of an update that leaves the caller's irreplaceable objects, such as configs, in their attributes.

    The function received copies of them. Where a copy comes back unchanged, in the same static attribute, the step has
    `native.KEPT` as the value: C does not write this attribute, so the caller's object keeps its config.

    Returns:
        The step. None if it cannot be made: an irreplaceable object has changed or moved; or it is not known what the
        function received (`Update.received_aux`); or the class is not built attribute by attribute.
    """
    step = _attributes_step(op.node, numbers)
    # The step that would build the object as the function received it. Of it only the names and static values are used
    # below, so it does not matter that `numbers` are those of the new children. If the numbers of children differ,
    # there is no recipe, and so no step.
    received = None if op.received_aux is None else Node(op.node.type, op.received_aux, op.node.keys)
    received_step = None if received is None else _attributes_step(received, numbers)
    if step is None or received_step is None:
        return None
    # There may be more values than names, hence `strict=False`: the step of a `sharedtree.Module` has one more value at
    # the end, the `Kinds` object.
    received_values = dict(zip(received_step.names, received_step.values, strict=False))
    new_values: list[Any] = []
    for name, value in zip(step.names, step.values, strict=False):
        # A value without irreplaceable objects is written. Any other one must be equal to what the function received.
        if not irreplaceable_objects(value):
            new_values.append(value)
        elif name in received_values and Static(value) == Static(received_values[name]):
            new_values.append(native.KEPT)
        else:
            return None
    values_without_names = step.values[len(step.names) :]
    return step._replace(values=(*new_values, *values_without_names), target=op.number)


def _attributes_step(node: Node, numbers: tuple[int, ...]) -> Step | None:
    """Makes the step to build a node attribute by attribute. Returns None if its class is built in another way."""
    recipe = _recipe_for(node, numbers)
    if recipe is None or recipe.shape not in _SHAPES_WITH_NAMES:
        return None
    return _step_by_recipe(recipe, node, numbers)


_SHAPES_WITH_NAMES: set[int] = set()
"""Shapes of classes whose instances are built attribute by attribute, by name. Filled by `start`."""


_StepContent = tuple[tuple[int | None, ...], tuple[Any, ...], Any]
"""The fields `numbers`, `names` and `values` of a `Step`."""


def _numbers_names_values(recipe: Recipe, node: Node, numbers: tuple[int, ...]) -> _StepContent:
    """Returns the fields `numbers`, `names` and `values` of a node's step, as C expects them for the node's shape.

    Args:
        recipe: the answer of `native.recipe` for the node.
        node: the node.
        numbers: the numbers of its children.
    """
    # What the auxiliary data is made of depends on the shape of the class.
    shape, aux = recipe.shape, node.aux.peek()
    # Instances are built by a call of one function, which is the value.
    if shape in (native.OTHER, native.NAMEDTUPLE):
        return numbers, (), node.unflatten
    # The auxiliary data of a dictionary has its keys.
    if shape in (native.DICT, native.ORDERED_DICT):
        return numbers, aux, None
    if shape == native.DEFAULT_DICT:
        factory, names = aux
        return numbers, names, factory
    # The auxiliary data of a variable of NNX has its metadata, as pairs.
    if shape == native.NNX_VARIABLE:
        return numbers, (), dict(aux)
    # Children come first, then static attributes. The names are in the auxiliary data, because two instances of one
    # class may have different attributes.
    if shape in (native.FIELDS, native.NNX_OBJECT):
        if shape == native.NNX_OBJECT:
            traced_names, static_names, values = aux
        else:
            traced_names, pairs = aux
            static_names, values = dict(pairs), dict(pairs).values()
        # For the attribute "0" of a `List`, the auxiliary data of NNX has the number 0 as the name.
        all_names = (*traced_names, *static_names)
        texts = tuple([name if type(name) is str else str(name) for name in all_names])
        return (*numbers, *[None] * len(static_names)), texts, (*[None] * len(traced_names), *values)
    # Children and static attributes are mixed, as the auxiliary data of `sharedtree.Module` says (`Kinds`). C writes
    # the kinds into the new instance, so they follow the values.
    if shape == native.MODULE:
        kinds, statics = aux
        places = _places_among_alike(kinds.are_static)
        numbers_in_order, values = _in_order_of_attributes(kinds.are_static, places, numbers, statics)
        return numbers_in_order, kinds.names, (*values, kinds)
    # Children and static attributes are mixed, as the class declares. The auxiliary data has the static values.
    if shape in (native.DATACLASS, native.SLOTS, native.NNX_STATE):
        numbers_in_order, values = _in_order_of_attributes(recipe.are_static, recipe.places, numbers, aux)
        return numbers_in_order, recipe.names, values
    # Any other shape: containers without names. The auxiliary data of a `deque` is its `maxlen`; that of a list or a
    # tuple is None.
    return numbers, (), aux


def _places_among_alike(are_static: Sequence[int]) -> list[int]:
    """Returns the place of each traced attribute among the traced ones, and of each static one among the static ones.

    For example, `(0, 1, 0)` gives `[0, 0, 1]`: the third attribute is the second traced one, so its place is 1.

    Args:
        are_static: for each attribute, 1 if it is static and 0 if it is traced.
    """
    traced_counter, static_counter = itertools.count(), itertools.count()
    counters = traced_counter, static_counter
    return [next(counters[is_static]) for is_static in are_static]


def _in_order_of_attributes(
    are_static: bytes, places: Iterable[int], numbers: tuple[int, ...], statics: Sequence[Any]
) -> tuple[tuple[int | None, ...], tuple[Any, ...]]:
    """Puts the numbers of the children, and the static values, at the places of their attributes.

    Args:
        are_static: a byte for each attribute, 1 if it is static.
        places: for each attribute, its place in `numbers` or in `statics`.
        numbers: the numbers of the children.
        statics: the static values.

    Returns:
        (numbers, values), both with one entry for each attribute. The numbers have None for a static attribute, the
        values have None for a child.
    """
    attributes = list(zip(are_static, places, strict=True))
    numbers_in_order = tuple([None if is_static else numbers[place] for is_static, place in attributes])
    values_in_order = tuple([statics[place] if is_static else None for is_static, place in attributes])
    return numbers_in_order, values_in_order


# --- the start --------------------------------------------------------------------------------------------------------

_CONVENTIONS: dict[int, LocalConvention] = {}
"""The native walk's number for a convention → the convention. Filled by `start`. The reverse of `NUMBERS`."""

NUMBERS: dict[LocalConvention, int] = {}
"""Convention → the native walk's number for it. Filled by `start`."""


def start(entries: dict[bytes, Any]) -> bool:
    """Prepares the native walk: gives it the functions and classes of this file, and describes common classes to it.

    Also fills the tables of this file that have numbers of the native walk.

    Args:
        entries: the table of structures: key → weak reference to its structure. C reads it.

    Returns:
        True. False if an earlier import of this package has started the native walk. Then the native walk goes on
            serving the earlier import.
    """
    # These tables are filled here, because `native` has its numbers only if the native walk is in use.
    numbers: dict[LocalConvention, int] = {"jax": native.JAX, "equinox": native.EQUINOX, "any": native.ANY}
    numbers |= {"outside": native.OUTSIDE, "variable": native.IN_VARIABLE}
    NUMBERS.update(numbers)
    _CONVENTIONS.update({number: convention for convention, number in NUMBERS.items()})
    _SHAPES.update(
        {type(None): native.NOTHING, tuple: native.TUPLE, list: native.LIST, dict: native.DICT}
        | {collections.OrderedDict: native.ORDERED_DICT, collections.defaultdict: native.DEFAULT_DICT}
        | {collections.deque: native.DEQUE}
    )
    _SHAPES_WITH_NAMES.update(
        {native.FIELDS, native.NNX_OBJECT, native.MODULE, native.DATACLASS, native.SLOTS, native.NNX_STATE}
    )
    dtypes = tuple(map(np.dtype, NUMPY_NUMBERS))
    # The sentinel that a library puts into an attribute without a value. At most one library has one. Without it, None.
    (marker,) = markers() or [None]
    # With an empty registry, C asks Python about every class.
    registry = REGISTRY if isinstance(REGISTRY, dict) else {}
    # `take_over` stores the functions of this file for C to call, and the tables for C to read. "walk" is the name of
    # the set of C variables in which it stores them.
    functions_for_statics = _tokens_for, _tokens_of_contents, _remember
    if not native.take_over(
        "walk", entries, _describe_object, _describe_nodes, *functions_for_statics, _compile, marker, dtypes, registry
    ):
        return False
    # After each registration, C forgets the descriptions that are guesses.
    registration_callbacks.append(native.look_again)
    # The classes of common leaves are described in advance, so that no walk has to ask for them.
    for cls in TRACED_NUMBERS:
        native.learn(_describe_leaf(cls, native.NUMBER))
    for cls in NUMPY_NUMBERS:
        native.learn(_describe_leaf(cls, native.NUMPY_NUMBER))
    for cls in {str, bytes, types.FunctionType, types.BuiltinFunctionType, type(jax.nn.relu), type(jax.nn.gelu)}:
        native.learn(_describe_leaf(cls, native.STATIC))
    native.learn(_describe_leaf(np.ndarray, native.NUMPY_ARRAY))
    native.learn(_describe_leaf(ConcreteArray, native.JAX_ARRAY))
    # The first `deque` of a program may be in a static attribute of a module, where it is no node. The native walk must
    # know then, too, that it is a container.
    native.learn(_describe_nodes(node_type_of_class(collections.deque)))
    return True
