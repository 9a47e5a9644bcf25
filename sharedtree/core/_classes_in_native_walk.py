"""What the native walk is told of each class, once, when it first meets an instance; and how a structure is built.

What is told of a class holds for ever, as `NodeType`s do; but that of a class that is no node only until another class
is registered as one, for that may be it.
"""

import collections
import contextlib
import itertools
import types
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax import tree_util as jtu
from jax.core import Tracer

from ._by_identity import IdentityDict, WeakIdentityDict
from ._call_arguments import Arguments
from ._interned_objects import Interned
from ._jax_internals import REGISTRY, ConcreteArray
from ._library_rows import NativeLayout, markers, native_layout_of
from ._native_or_python import native
from ._node_types import is_registered, is_value_of_variable, node_type_of, node_type_of_class, registration_callbacks
from ._plain_containers import Inherited, NodeType, is_namedtuple
from ._static_kinds import IdentityKey, Stability, cannot_change, is_known_by_address, objects_with_identity
from ._static_values import Static, StaticMemo, key_of, new_static_memo
from ._structure import LEAF, Given, Node, Op, Record, Structure, Update
from ._traced_leaves_and_identity import NUMPY_NUMBERS, TRACED_NUMBERS, carries_identity, is_traced

Description = tuple[Any, ...]

_NO_FIELDS = NativeLayout("").native_arguments

_layouts_in_use: dict[type, NativeLayout] = {}
"""How each class is read past the functions that were registered, as long as nobody changes it."""

_introduced: set[str] = set()
"""The libraries that the native walk was told of."""


def _leaf(cls: type, shape: int, *, is_guess: bool = False) -> Description:
    return (cls, shape, False, False, False, native.INHERITED, is_guess, None, None, *_NO_FIELDS)


def _described(node_type: NodeType) -> Description:
    """The arguments of `new_kind` in `_native.c`."""
    convention = native.INHERITED if node_type.convention is None else NUMBERS[node_type.convention]
    shape, take_apart, fields = _shape_of(node_type), node_type.take_apart, _NO_FIELDS
    found = native_layout_of(node_type.cls) if is_registered(node_type) or node_type.fields else None
    if found is not None:
        library, layout = found
        if library.name not in _introduced:
            library.introduce(native)
            _introduced.add(library.name)
        shape, fields = getattr(native, layout.shape), layout.native_arguments
        if is_registered(node_type):
            _layouts_in_use[node_type.cls] = layout
    if is_registered(node_type):
        take_apart = jtu.default_registry.flatten_one_level
    facts = node_type.is_plain, node_type.is_mutable, node_type.is_known_to_jax, convention
    # What is told must not keep a namedtuple alive, as its node type would.
    told = None if shape == native.NAMEDTUPLE else node_type
    return (node_type.cls, shape, *facts, False, told, take_apart, *fields)


def look_again(records: Sequence[Record]) -> None:
    """Leaves to JAX those classes in a new structure that were changed since they were met."""
    for cls in {op.type.cls for op, _ in records if type(op) is Node}:
        known = _layouts_in_use.get(cls)
        if known is None:
            continue
        found = native_layout_of(cls)
        if found is None or found[1] != known:
            native.unlearn(cls)
            _layouts_in_use.pop(cls, None)


def _shape_of(node_type: NodeType) -> int:
    cls = node_type.cls
    if cls in _SHAPES:
        return _SHAPES[cls]
    if cls is Arguments:
        return native.ARGUMENTS
    if node_type.is_plain and is_namedtuple(cls):
        return native.NAMEDTUPLE
    return native.OTHER


_SHAPES: dict[type, int] = {}
"""Of the containers that are put together by their classes."""


def _describe_object(obj: Any, number: int) -> Description | int:
    """What the class of an object is, or for a leaf: 0 if it is static, 1 if it is a value, 2 if it has identity.

    Args:
        obj: the object.
        number: that of the convention, and beyond eight bits whether only arrays are traced.
    """
    convention, filtered = _CONVENTIONS[number & 0xFF], bool(number >> 8)
    # Met at every leaf of every trace. Their class has no kind, for it does not tell an array from a reference.
    if isinstance(obj, (Tracer, jax.Ref)):
        return _role(obj, convention, filtered=filtered)
    node_type = node_type_of(obj)
    if node_type is not None and (convention not in ("outside", "any") or node_type.is_known_to_jax):
        return _described(node_type)
    cls = type(obj)
    if node_type is not None:
        return _role(obj, convention, filtered=filtered)
    if issubclass(cls, jax.Array):
        return _leaf(cls, native.JAX_ARRAY)  # such as that of PRNG keys
    if isinstance(obj, jax.ShapeDtypeStruct):
        return _leaf(cls, native.JAX_ARRAY, is_guess=True)
    if issubclass(cls, (np.ndarray, np.generic)):  # of what is no number
        return _role(obj, convention, filtered=filtered)
    shape = native.NUMBER if is_traced(obj, "jax") else native.STATIC
    return _leaf(cls, shape, is_guess=True)


def _role(leaf: Any, convention: Inherited, *, filtered: bool) -> int:
    if not is_traced(leaf, convention) or (filtered and not is_traced(leaf, "equinox")):
        return 0
    is_value = not carries_identity(leaf) or (convention == "variable" and is_value_of_variable(leaf))
    return 1 if is_value or (convention == "outside" and not isinstance(leaf, jax.Ref)) else 2


class Token:
    """Stands for a static value in a key. Equal values have one token, as long as a structure has it.

    Attributes:
        is_interchangeable: Whether any equal value is as good, so that the token serves exact walks, too.
    """

    __slots__ = ("__weakref__", "is_interchangeable", "key")

    def __init__(self, key: Any, *, is_interchangeable: bool) -> None:
        self.key = key
        self.is_interchangeable = is_interchangeable

    def complete(self) -> None:
        """Nothing follows from it."""

    def is_like(self, other: "Token") -> bool:
        """Whether another one stands for the same value."""
        return self.key == other.key


_tokens: Interned[Token] = Interned()


_Latest = WeakIdentityDict["weakref.ref[Token]"]

_latest: _Latest = WeakIdentityDict()
_latest_exact: _Latest = WeakIdentityDict()
"""Of values that can be mutated, the token that each had when it was last met, by any walk or by an exact one."""


def _tokens_for(values: list[Any], is_exact: bool) -> list[Any]:
    """What stands for each static value of a walk in a key.

    Args:
        values: The static values that the walk did not write out.
        is_exact: Whether the walk is (see `Rules.is_exact`).

    Returns:
        For each value a tuple of its class, if all instances of that are known by address; otherwise its token, in a
        tuple with None if the value is the same for ever.
    """
    known = new_static_memo()
    looked: IdentityDict[Stability] = IdentityDict()
    found: IdentityDict[Any] = IdentityDict()
    for value in values:
        if value not in found:
            found[value] = _settled(value, known, looked, is_exact=is_exact)
    return [found[value] for value in values]


def _settled(value: Any, known: StaticMemo, looked: IdentityDict[Stability], *, is_exact: bool) -> Any:
    cls = type(value)
    key, is_mutable, may_have_objects = key_of(value, known)
    if not is_mutable and is_known_by_address(cls) and not issubclass(cls, (tuple, frozenset, slice)):
        return (cls,)
    objects = tuple(map(IdentityKey, objects_with_identity(value) if may_have_objects else ()))
    if cannot_change(value, looked):
        # An exact walk takes the token if any equal value does, and otherwise the address.
        return _tokens.intern(hash(key), Token(key, is_interchangeable=not objects)), None
    latest = _latest_exact if is_exact else _latest
    token = Token((key, objects) if is_exact else key, is_interchangeable=is_exact)
    # Of values without a hash there may be many that are to be compared with, and most are as they were.
    reference = latest.get(value)
    before = None if reference is None else reference()
    if before is not None and before.is_like(token):
        return before
    token = _tokens.intern(hash(token.key), token)
    with contextlib.suppress(TypeError):  # it cannot be referred to weakly
        latest[value] = weakref.ref(token)
    return token


# --- programs ---------------------------------------------------------------------------------------------------------

Step = tuple[int, type | None, Record | None, tuple[int | None, ...], tuple[Any, ...], Any, int | None]


def _compile(structure: Structure) -> Any:
    """The program of a structure, which has it from now on: its records with all looked up that each build would ask.

    A step is (shape, class, record, numbers, names, values, target); `_native.c` says what each is. For
        Pair(w, 3)        with an Equinox module `Pair`: records   leaf   static 3   Pair(0, 1)
    the steps are   LEAF    STATIC with the value 3    FIELDS with the numbers 0, 1 and the names "first", "second".
    """
    steps = tuple([_step(op, numbers) for op, numbers in structure.records])
    is_for_python = structure.is_noted or any(
        _needs_python(structure, op, numbers) for op, numbers in structure.records
    )
    made = native.Program(steps, structure.given or None, structure.root, is_for_python, structure.updates)
    structure.program = made
    return made


def _needs_python(structure: Structure, op: Op, numbers: tuple[int, ...]) -> bool:
    """Whether only Python can write an object's new content, since it has static objects for which it must look.

    C leaves alone what stayed in its attribute. What moved, or is in a place without a name, is found by its content.
    """
    if type(op) is not Update or op.node.aux.objects:
        return False
    leaves = [leaf for child in numbers if type(leaf := structure.records[child][0]) is Static]
    if any(leaf.has_objects for leaf in leaves):
        return True
    return op.node.aux.has_objects and _step_keeping(op, numbers) is None


_SHAPES_WITH_NAMES: set[int] = set()
"""Of classes whose static attributes are written by name."""


def _step(op: Op, numbers: tuple[int, ...]) -> Step:
    if op is LEAF:
        return native.LEAF, None, None, (), (), None, None
    if type(op) is Given:
        return native.GIVEN, None, None, (), (), op.number, None
    if type(op) is Static:
        # Each tree has its own of what can be mutated.
        if op.is_copied:
            return _step_calling(lambda _: op.thaw(), ())
        return native.STATIC, None, None, (), (), op.peek(), None
    if type(op) is Update:
        return _step_updating(op, numbers)
    assert type(op) is Node
    recipe = None if op.aux.is_copied else native.recipe(op.type, op.aux.peek(), len(numbers))
    if recipe is None or (recipe[0] == native.OTHER and not is_registered(op.type)):
        # As the walk in Python does it: with auxiliary data that may be a copy, by any function.
        return _step_calling(lambda children: op.type.put_together(op.aux.thaw(), list(children)), numbers)
    shape, *declared = recipe
    return shape, op.type.cls, (op, numbers), *_content(shape, declared, op, numbers), None


def _step_updating(op: Update, numbers: tuple[int, ...]) -> Step:
    """The step for a node whose content is written into an object."""
    keeping = None if op.node.aux.objects else _step_keeping(op, numbers)
    return (*_step(op.node, numbers)[:-1], op.number) if keeping is None else keeping


def _step_keeping(op: Update, numbers: tuple[int, ...]) -> Step | None:
    """The same with `KEPT` for each static object that stays in its attribute; None if any other is to be written."""
    now = _attributes_step(op.node, numbers)
    before = None if op.before is None else _attributes_step(Node(op.node.type, op.before, op.node.keys), numbers)
    if now is None or before is None:
        return None
    shape, cls, record, places, names, values, _ = now
    values_before = dict(zip(before[4], before[5], strict=False))
    written: list[Any] = []
    for name, value in zip(names, values, strict=False):
        if not objects_with_identity(value):
            written.append(value)
        elif name in values_before and Static(value) == Static(values_before[name]):
            written.append(native.KEPT)
        else:
            return None
    return shape, cls, record, places, names, (*written, *values[len(names) :]), op.number


def _attributes_step(node: Node, numbers: tuple[int, ...]) -> Step | None:
    """The step that builds a node attribute by attribute; None if its class is built otherwise."""
    recipe = native.recipe(node.type, node.aux.peek(), len(numbers))
    if recipe is None or recipe[0] not in _SHAPES_WITH_NAMES:
        return None
    shape, *declared = recipe
    return shape, node.type.cls, (node, numbers), *_content(shape, declared, node, numbers), None


def _step_calling(make: Callable[[tuple[Any, ...]], Any], numbers: tuple[int, ...]) -> Step:
    return native.OTHER, None, None, numbers, (), make, None


def _content(shape: int, declared: Sequence[Any], node: Node, numbers: tuple[int, ...]) -> Any:
    """What is built in C, by its shape: the numbers, names and values of its step."""
    aux = node.aux.peek()
    if shape in (native.OTHER, native.NAMEDTUPLE):
        return numbers, (), node.unflatten
    if shape in (native.DICT, native.ORDERED_DICT):
        return numbers, aux, None
    if shape == native.DEFAULT_DICT:
        return numbers, aux[1], aux[0]
    if shape == native.NNX_VARIABLE:
        return numbers, (), dict(aux)
    if shape in (native.FIELDS, native.NNX_OBJECT):
        traced, names, values = aux if shape == native.NNX_OBJECT else (aux[0], dict(aux[1]), dict(aux[1]).values())
        texts = tuple([name if type(name) is str else str(name) for name in (*traced, *names)])
        return (*numbers, *[None] * len(names)), texts, (*[None] * len(traced), *values)
    if shape == native.MODULE:
        kinds, statics = aux
        next_of_sort = itertools.count(), itertools.count()
        places = [next(next_of_sort[is_static]) for is_static in kinds.are_static]
        numbers_in_order, values = _in_order(kinds.are_static, places, numbers, statics)
        return numbers_in_order, kinds.names, (*values, kinds)
    if shape in (native.DATACLASS, native.SLOTS, native.NNX_STATE):
        order, are_static, places = declared
        numbers_in_order, values = _in_order(are_static, places, numbers, aux)
        return numbers_in_order, order, values
    return numbers, (), aux


def _in_order(
    are_static: bytes, places: Iterable[int], numbers: tuple[int, ...], statics: Sequence[Any]
) -> tuple[tuple[int | None, ...], tuple[Any, ...]]:
    """Of attributes in their order, the numbers of the children, and the values of what is static."""
    each = list(zip(are_static, places, strict=True))
    return (
        tuple([None if is_static else numbers[place] for is_static, place in each]),
        tuple([statics[place] if is_static else None for is_static, place in each]),
    )


# --- the start --------------------------------------------------------------------------------------------------------

_CONVENTIONS: dict[int, Inherited] = {}
NUMBERS: dict[Inherited, int] = {}
"""The inverse."""


def start(entries: dict[bytes, Any]) -> bool:
    """Tells the native walk what it has to know. False if it serves an earlier import of the package.

    Args:
        entries: key → weak reference to its structure.
    """
    numbers: dict[Inherited, int] = {"jax": native.JAX, "equinox": native.EQUINOX, "any": native.ANY}
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
    (marker,) = markers() or [None]
    registry = REGISTRY if isinstance(REGISTRY, dict) else {}
    if not native.take_over(
        "walk", entries, _describe_object, _described, _tokens_for, _compile, marker, dtypes, registry
    ):
        return False
    registration_callbacks.append(native.look_again)
    for cls in TRACED_NUMBERS:
        native.learn(_leaf(cls, native.NUMBER))
    for cls in NUMPY_NUMBERS:
        native.learn(_leaf(cls, native.NUMPY_NUMBER))
    for cls in {str, bytes, types.FunctionType, types.BuiltinFunctionType, type(jax.nn.relu), type(jax.nn.gelu)}:
        native.learn(_leaf(cls, native.STATIC))
    native.learn(_leaf(np.ndarray, native.NUMPY_ARRAY))
    native.learn(_leaf(ConcreteArray, native.JAX_ARRAY))
    # Its class does not say that it is a container, which has to be known of the static attributes of modules.
    native.learn(_described(node_type_of_class(collections.deque)))
    return True
