"""Serves the native walk: describes classes to it, finds tokens for static values, and compiles structures.

    an instance of a new class  →  _describe_object  →  shape, fields, ...       once for each class
    a static value              →  _tokens_for       →  what represents it in a key
    a structure                 →  _compile          →  the steps that put its tree together

The *native walk* is the one in C (`_native_walk.c`). It describes a tree by a *key*, a string of bytes, and asks Python
for all that it does not know. The *shape* of a class is its number for a way to take instances apart and to build them:
`native.LIST`, `native.FIELDS`, ... An *exact* walk takes static values uncopied, so that the same tree is put together
again with the very objects of the user.

A description of a class holds for ever, as a `NodeType` does. Only that of a class of leaves is a guess: the native
walk asks for it again after a class was registered as a node, because that may be this one.
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

from ._by_identity import IdentityDict, Interned, WeakIdentityDict
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
    IdentityKey,
    Stability,
    Static,
    StaticMemo,
    cannot_change,
    has_fixed_key,
    key_of,
    new_static_memo,
    objects_with_identity,
)
from ._structure import LEAF, Given, Node, Op, Record, Structure, Update

Description = tuple[Any, ...]
"""The arguments of `new_kind` in `_native_walk.c`, in order.

They are: the class; its shape; whether it is plain, mutable and known to JAX; the number of its convention; whether all
this is a guess; its node type; the function that takes an instance apart; and the directions for reading attributes
(`NativeLayout.native_arguments`).
"""

_NO_FIELDS = NativeLayout("").native_arguments

_layouts_in_use: dict[type, NativeLayout] = {}
"""Class in JAX's registry whose instances the native walk reads itself → its layout, the directions for doing so.

The flatten functions of these classes are not called."""

_introduced: set[str] = set()
"""Names of the libraries that have prepared the native walk for their classes, by `Library.introduce`."""

# What `_describe_object` says of a single leaf: it is static, traced without identity, or traced with identity. The
# native walk has the same numbers.
_IS_STATIC, _IS_VALUE, _IS_OBJECT = 0, 1, 2


# --- classes ----------------------------------------------------------------------------------------------------------


def _describe_object(obj: Any, number: int) -> Description | int:
    """Describes the class of an object to the native walk, or the object alone if its class does not say enough.

    Args:
        obj: the object.
        number: two settings in one number. The lower eight bits have the number of the convention, and the bit above
            them tells whether only arrays are traced (`Rules.filtered`).

    Returns:
        A description for the class; or, for this object alone, `_IS_STATIC`, `_IS_VALUE` or `_IS_OBJECT`.
    """
    convention, filtered = _CONVENTIONS[number & 0xFF], bool(number >> 8)
    # Tracers are first, because there is one for each leaf of each trace. Their class gets no description, because it
    # does not tell an array from a reference.
    if isinstance(obj, (Tracer, jax.Ref)):
        return _kind_of_leaf(obj, convention, filtered=filtered)
    node_type = node_type_of(obj)
    if node_type is not None and (convention not in ("outside", "any") or node_type.is_known_to_jax):
        return _describe(node_type)
    cls = type(obj)
    # A `deque` outside modules is a leaf, and a node elsewhere.
    if node_type is not None:
        return _kind_of_leaf(obj, convention, filtered=filtered)
    if issubclass(cls, jax.Array):
        return _describe_leaf(cls, native.JAX_ARRAY)  # such as that of PRNG keys
    # In a walk, such a struct stands for an array.
    if isinstance(obj, jax.ShapeDtypeStruct):
        return _describe_leaf(cls, native.JAX_ARRAY, is_guess=True)
    # Arrays and scalars of texts, for example: whether they are traced depends on the dtype.
    if issubclass(cls, (np.ndarray, np.generic)):
        return _kind_of_leaf(obj, convention, filtered=filtered)
    # A leaf of any other class. C treats one that JAX traces as a number: traced, unless the convention is Equinox's.
    shape = native.NUMBER if is_traced(obj, "jax") else native.STATIC
    return _describe_leaf(cls, shape, is_guess=True)


def _kind_of_leaf(leaf: Any, convention: LocalConvention, *, filtered: bool) -> int:
    """Tells the native walk whether one leaf is static, a value or an object. See `_walk` for the same in Python."""
    if not is_traced(leaf, convention) or (filtered and not is_traced(leaf, "equinox")):
        return _IS_STATIC
    if not carries_identity(leaf) or (convention == "variable" and is_value_of_variable(leaf)):
        return _IS_VALUE
    return _IS_VALUE if convention == "outside" and not isinstance(leaf, jax.Ref) else _IS_OBJECT


def _describe_leaf(cls: type, shape: int, *, is_guess: bool = False) -> Description:
    """Describes a class of leaves.

    Args:
        cls: the class.
        shape: `native.JAX_ARRAY`, `native.NUMBER`, `native.STATIC`, ...: the way to treat its instances.
        is_guess: whether somebody may still register the class as a node. The native walk asks again after each
            registration.
    """
    is_plain = is_mutable = is_known_to_jax = False
    facts = is_plain, is_mutable, is_known_to_jax, native.INHERITED
    node_type = take_apart = None
    return (cls, shape, *facts, is_guess, node_type, take_apart, *_NO_FIELDS)


def _describe(node_type: NodeType) -> Description:
    """Describes a class of nodes. Introduces its library first, if this is the first of its classes."""
    cls, is_in_registry = node_type.cls, is_taken_apart_by_registry(node_type)
    convention = native.INHERITED if node_type.convention is None else NUMBERS[node_type.convention]
    shape, fields = _shape_of(node_type), _NO_FIELDS
    # A library may let C read the attributes itself, without a call of the flatten function.
    answer = native_layout_of(cls) if is_in_registry or node_type.fields else None
    if answer is not None:
        library, layout = answer
        if library.name not in _introduced:
            library.introduce(native)
            _introduced.add(library.name)
        shape, fields = getattr(native, layout.shape), layout.native_arguments
        if is_in_registry:
            _layouts_in_use[cls] = layout
    take_apart = jtu.default_registry.flatten_one_level if is_in_registry else node_type.take_apart
    facts = node_type.is_plain, node_type.is_mutable, node_type.is_known_to_jax, convention
    is_guess = False
    # The description must not keep a namedtuple's class alive, as its node type would.
    kept_type = None if shape == native.NAMEDTUPLE else node_type
    return (cls, shape, *facts, is_guess, kept_type, take_apart, *fields)


def _shape_of(node_type: NodeType) -> int:
    """Finds the shape of a class of nodes, as it is if no library has a layout for the class."""
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
    """Finds the classes in a new structure that were changed since they were described to the native walk.

    From then on, the native walk leaves their instances to the registered functions.
    """
    for cls in {op.type.cls for op, _ in records if type(op) is Node}:
        layout_in_use = _layouts_in_use.get(cls)
        if layout_in_use is None:
            continue
        answer = native_layout_of(cls)
        _, layout = (None, None) if answer is None else answer
        if layout != layout_in_use:
            native.unlearn(cls)
            _layouts_in_use.pop(cls, None)


# --- static values ----------------------------------------------------------------------------------------------------


class Token:
    """Representative of a static value in keys: equal values have the same token.

    A key holds the address of the token. The structure to which the key leads keeps the token alive.

    Attributes:
        key: what tokens are compared by.
        is_interchangeable: whether any value with this token is as good as any other one, even in an exact walk. If
            not, an exact walk writes the address of the value into its key and not the token.
    """

    __slots__ = ("__weakref__", "is_interchangeable", "key")

    def __init__(self, key: Any, *, is_interchangeable: bool) -> None:
        self.key = key
        self.is_interchangeable = is_interchangeable

    def complete(self) -> None:
        """Does nothing: no attribute follows from the others."""

    def is_like(self, candidate: "Token") -> bool:
        """Compares two tokens. Those of equal values are interned as one."""
        return self.key == candidate.key


_tokens: Interned[Token] = Interned()


_LatestTokens = WeakIdentityDict["weakref.ref[Token]"]

_latest: _LatestTokens = WeakIdentityDict()
_latest_exact: _LatestTokens = WeakIdentityDict()
"""Value that may change → the token that it had in the latest walk; and the same for exact walks."""


def _tokens_for(values: list[Any], is_exact: bool) -> list[Any]:
    """Finds what represents static values in the key of a walk: the address of the object, or a token.

    Args:
        values: the static values of a tree, without those that C writes into the key itself, such as numbers and
            texts.
        is_exact: whether the structure keeps the user's own static objects and not copies. Then an equal object
            may not take the place of a list or a config, for example.

    Returns:
        One answer for each value. (its class,) if the address stands for the value, as for all instances of the class;
        (token, None) if the value stays the same for ever, so that C may store the token; otherwise the token alone.
    """
    memo = new_static_memo()
    stability: IdentityDict[Stability] = IdentityDict()
    # Many attributes may hold the same value, which is looked at once.
    answers: IdentityDict[Any] = IdentityDict()
    for value in values:
        if value not in answers:
            answers[value] = _token_for(value, memo, stability, is_exact=is_exact)
    return [answers[value] for value in values]


def _token_for(value: Any, memo: StaticMemo, stability: IdentityDict[Stability], *, is_exact: bool) -> Any:
    """Finds what represents one static value. See `_tokens_for`.

    Args:
        value: the value.
        memo: the keys of static values that this walk has made. Extended.
        stability: the values of which this walk knows whether they can change. Extended.
        is_exact: as for `_tokens_for`.
    """
    cls = type(value)
    # `is_mutable` tells whether a part of the value is mutable as a list is. `cannot_change`, below, asks for more: it
    # is False also for an object of an unknown class with an `==` and a hash, which nobody should mutate but may.
    key, is_mutable, may_have_objects = key_of(value, memo)
    # A function or a class, for example: its address stands for it. A subclass of `tuple`, `frozenset` or `slice` may
    # be compared by its parts (`PartitionSpec` is such a tuple in some releases of JAX), so it gets a token.
    if not is_mutable and has_fixed_key(cls) and not issubclass(cls, (tuple, frozenset, slice)):
        return (cls,)
    # The objects in the value for which an equal object is no substitute in an exact walk.
    objects = tuple(map(IdentityKey, objects_with_identity(value) if may_have_objects else ()))
    # The value never changes, so one token serves all walks, exact or not. If it has such objects, values with this
    # token are not interchangeable, and C uses the address in an exact walk.
    if cannot_change(value, stability):
        return _tokens.intern(hash(key), Token(key, is_interchangeable=not objects)), None
    # The value may change, so its token is for its present content. That of an exact walk is compared by those objects,
    # too. So all values with this token have the same ones, and are interchangeable.
    latest = _latest_exact if is_exact else _latest
    token = Token((key, objects) if is_exact else key, is_interchangeable=is_exact)
    # Interning compares with every token of the same hash, and values without a hash may have many. Most values are as
    # they were in the latest walk, so the token that the value had then is compared first.
    reference = latest.get(value)
    latest_token = None if reference is None else reference()
    if latest_token is not None and latest_token.is_like(token):
        return latest_token
    token = _tokens.intern(hash(token.key), token)
    with contextlib.suppress(TypeError):  # the value may not support weak references
        latest[value] = weakref.ref(token)
    return token


# --- programs ---------------------------------------------------------------------------------------------------------


class Step(NamedTuple):
    """Instruction to C to make the object of one record. C gets a plain tuple of the fields (see `read_step` there).

    Attributes:
        shape: the native walk's number for the way to build it.
        cls: the class of a node. None for any other object.
        record: the record of a node. None for any other object.
        numbers: the numbers of the children. For a class with attributes: one entry for each attribute in order, None
            for a static one.
        names: the names of the attributes or items.
        values: the static attributes in order, with None for each child; or the function to call with the children; or
            the value itself.
        target: the number of the caller's object into which the content is written. None if there is none.
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
        names: the names of the declared attributes, in order. Empty for a class that declares none.
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
    # If so, a call whose result has this structure is finished in Python: to note leaves, or to write static objects.
    is_for_python = structure.is_noted or _has_update_for_python(structure)
    program = native.Program(steps, structure.given or None, structure.root, is_for_python, structure.updates)
    structure.program = program
    return program


def _has_update_for_python(structure: Structure) -> bool:
    return any(_needs_python(structure, op, numbers) for op, numbers in structure.records)


def _needs_python(structure: Structure, op: Op, numbers: tuple[int, ...]) -> bool:
    """Tells whether only Python can write an object's new content, because of static objects in it, such as a config.

    The function received a copy of each static object. If that has not changed, the caller must keep the original. C
    can do this for an object in a named static attribute: it does not write the attribute. Python also recognises, by
    their content, objects that moved to another attribute or stand in a place without a name.

    Args:
        structure: the structure of a function's result. Its records are numbered from 0.
        op: the operation of one of its records. Anything but an `Update` writes nothing.
        numbers: the numbers of the children of this record.
    """
    # `exact_objects` is filled only if the function received the originals, and then C may write them.
    if type(op) is not Update or op.node.aux.exact_objects:
        return False
    # A static leaf is a child, so it is in no static attribute.
    for number in numbers:
        child = structure.records[number][0]
        if type(child) is Static and child.has_objects:
            return True
    # C can do the rest if the auxiliary data holds no such object, or if all of them stay in their attributes.
    return op.node.aux.has_objects and _step_keeping(op, numbers) is None


def _step(op: Op, numbers: tuple[int, ...]) -> Step:
    """Makes the step for one record, given as its operation and the numbers of its children."""
    if op is LEAF:
        return Step(native.LEAF)
    if type(op) is Given:
        return Step(native.GIVEN, values=op.number)
    if type(op) is Static:
        # A value that can be mutated is copied for each tree that is built.
        if op.is_copied:
            return _step_calling(lambda _: op.thaw(), ())
        return Step(native.STATIC, values=op.peek())
    if type(op) is Update:
        return _step_updating(op, numbers)
    assert type(op) is Node
    recipe = None if op.aux.is_copied else _recipe_for(op, numbers)
    # C has no way of its own to build the node, and no function in JAX's registry does it from the children alone. So
    # the step does the same as `_walk.build`. That works for all nodes, and copies the auxiliary data if it has to.
    if recipe is None or (recipe.shape == native.OTHER and not is_taken_apart_by_registry(op.type)):
        return _step_calling(lambda children: op.type.put_together(op.aux.thaw(), list(children)), numbers)
    return _step_by_recipe(recipe, op, numbers)


def _recipe_for(node: Node, numbers: tuple[int, ...]) -> Recipe | None:
    """Asks the native walk how it builds a node. None if it cannot, so that a Python function has to."""
    recipe = native.recipe(node.type, node.aux.peek(), len(numbers))
    return None if recipe is None else Recipe(*recipe)


def _step_by_recipe(recipe: Recipe, node: Node, numbers: tuple[int, ...]) -> Step:
    """Makes a step for a node that C builds itself, or by one call of `Node.unflatten`."""
    return Step(recipe.shape, node.type.cls, (node, numbers), *_content(recipe, node, numbers))


def _step_calling(make: Callable[[tuple[Any, ...]], Any], numbers: tuple[int, ...]) -> Step:
    """Makes a step that calls a function with the children."""
    return Step(native.OTHER, numbers=numbers, values=make)


def _step_updating(op: Update, numbers: tuple[int, ...]) -> Step:
    """Makes a step that builds a node and writes its content into an object of the caller."""
    # `exact_objects` is filled only if the function received the caller's own. Writing these changes nothing.
    keeping = None if op.node.aux.exact_objects else _step_keeping(op, numbers)
    return _step(op.node, numbers)._replace(target=op.number) if keeping is None else keeping


def _step_keeping(op: Update, numbers: tuple[int, ...]) -> Step | None:
    """Makes the step of an update so that static objects of the caller stay where they are, such as configs.

    A static object whose copy comes back unchanged in the same attribute has `native.KEPT` as its value in the step:
    C does not write that attribute.

    Returns:
        The step; None if a static object has changed or moved, or if the class is not built attribute by attribute.
    """
    step = _attributes_step(op.node, numbers)
    # The step that would build the object as the function received it.
    received = None if op.received_aux is None else Node(op.node.type, op.received_aux, op.node.keys)
    received_step = None if received is None else _attributes_step(received, numbers)
    if step is None or received_step is None:
        return None
    # There may be more values than names, hence `strict=False`. The last values are the library's bookkeeping.
    received_value = dict(zip(received_step.names, received_step.values, strict=False))
    written: list[Any] = []
    for name, value in zip(step.names, step.values, strict=False):
        # A value that any equal one can replace is written. Any other one must be as the function received it.
        if not objects_with_identity(value):
            written.append(value)
        elif name in received_value and Static(value) == Static(received_value[name]):
            written.append(native.KEPT)
        else:
            return None
    return step._replace(values=(*written, *step.values[len(step.names) :]), target=op.number)


def _attributes_step(node: Node, numbers: tuple[int, ...]) -> Step | None:
    """Makes the step that builds a node attribute by attribute. None if its class is built in another way."""
    recipe = _recipe_for(node, numbers)
    if recipe is None or recipe.shape not in _SHAPES_WITH_NAMES:
        return None
    return _step_by_recipe(recipe, node, numbers)


_SHAPES_WITH_NAMES: set[int] = set()
"""Shapes of classes whose instances are built attribute by attribute, by name. Filled by `start`."""


def _content(recipe: Recipe, node: Node, numbers: tuple[int, ...]) -> Any:
    """Returns the numbers, names and values of a step. `Step` explains them.

    Args:
        recipe: the answer of `native.recipe` for the node.
        node: the node.
        numbers: the numbers of its children.
    """
    shape, aux = recipe.shape, node.aux.peek()
    # Built by a call of one function, kept as the value.
    if shape in (native.OTHER, native.NAMEDTUPLE):
        return numbers, (), node.unflatten
    # Dictionaries, whose auxiliary data has the keys.
    if shape in (native.DICT, native.ORDERED_DICT):
        return numbers, aux, None
    if shape == native.DEFAULT_DICT:
        factory, names = aux
        return numbers, names, factory
    if shape == native.NNX_VARIABLE:
        return numbers, (), dict(aux)
    # Children first, then static attributes. The names are in the auxiliary data, since instances may differ in them.
    if shape in (native.FIELDS, native.NNX_OBJECT):
        if shape == native.NNX_OBJECT:
            traced, names, values = aux
        else:
            traced, pairs = aux
            names, values = dict(pairs), dict(pairs).values()
        texts = tuple([name if type(name) is str else str(name) for name in (*traced, *names)])
        return (*numbers, *[None] * len(names)), texts, (*[None] * len(traced), *values)
    # Children and static attributes mixed, as the auxiliary data of `sharedtree.Module` says.
    if shape == native.MODULE:
        kinds, statics = aux
        places = _places_by_sort(kinds.are_static)
        numbers_in_order, values = _in_order(kinds.are_static, places, numbers, statics)
        return numbers_in_order, kinds.names, (*values, kinds)
    # Children and static attributes mixed, as the class declares.
    if shape in (native.DATACLASS, native.SLOTS, native.NNX_STATE):
        numbers_in_order, values = _in_order(recipe.are_static, recipe.places, numbers, aux)
        return numbers_in_order, recipe.names, values
    # Containers without names, such as lists.
    return numbers, (), aux


def _places_by_sort(are_static: Sequence[int]) -> list[int]:
    """Returns the place of each attribute among those of its sort: among the traced or among the static ones.

    For example, `(0, 1, 0)` gives `[0, 0, 1]`: the third attribute is the second traced one, so its place is 1.

    Args:
        are_static: for each attribute, 1 if it is static and 0 if it is traced.
    """
    counters = itertools.count(), itertools.count()  # of the traced ones, of the static ones
    return [next(counters[is_static]) for is_static in are_static]


def _in_order(
    are_static: bytes, places: Iterable[int], numbers: tuple[int, ...], statics: Sequence[Any]
) -> tuple[tuple[int | None, ...], tuple[Any, ...]]:
    """Merges children and static values into the order of the attributes.

    Args:
        are_static: for each attribute, whether it is static.
        places: for each attribute, its place in `numbers` or in `statics`.
        numbers: the numbers of the children.
        statics: the static values.

    Returns:
        The numbers, with None for each static attribute, and the values, with None for each child.
    """
    attributes = list(zip(are_static, places, strict=True))
    numbers_in_order = tuple([None if is_static else numbers[place] for is_static, place in attributes])
    values_in_order = tuple([statics[place] if is_static else None for is_static, place in attributes])
    return numbers_in_order, values_in_order


# --- the start --------------------------------------------------------------------------------------------------------

_CONVENTIONS: dict[int, LocalConvention] = {}
"""The native walk's number for a convention → the convention. Filled by `start`."""

NUMBERS: dict[LocalConvention, int] = {}
"""Convention → the native walk's number for it. Filled by `start`."""


def start(entries: dict[bytes, Any]) -> bool:
    """Gives the native walk the functions and classes that it needs. Returns False if an earlier import has done so.

    Args:
        entries: the table of structures: key → weak reference to its structure.
    """
    # These tables are filled here, because the module's numbers exist only if the native walk is in use.
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
    # `take_over` stores the functions of this file for C to call, and the tables for C to read.
    dtypes = tuple(map(np.dtype, NUMPY_NUMBERS))
    # The class of the mark for an attribute without a value. At most one library has such a mark.
    (marker,) = markers() or [None]
    registry = REGISTRY if isinstance(REGISTRY, dict) else {}
    if not native.take_over(
        "walk", entries, _describe_object, _describe, _tokens_for, _compile, marker, dtypes, registry
    ):
        return False
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
    # The native walk must know a `deque` in a static attribute of a module for a container before it comes to one as a
    # node.
    native.learn(_describe(node_type_of_class(collections.deque)))
    return True
