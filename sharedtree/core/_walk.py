"""Trees taken apart and put together by walking, in Python: the reference for everything that is faster.

Nothing here recurses, so depth is no matter; and nothing is asked of an object but what its node type says. The same in
C is `_native.c`. What that does not know, and every error, comes from here.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax import tree_util as jtu

from ._by_identity import IdentityDict
from ._errors import CycleError, DepthError, StaticComparisonError
from ._node_types import is_value_of_variable, node_type_of
from ._plain_containers import Inherited, NodeType, has_unordered_keys
from ._static_kinds import Incomparable
from ._static_values import Static, StaticMemo, new_static_memo, with_originals
from ._structure import LEAF, Given, Node, Op, Path, Record, Update
from ._traced_leaves_and_identity import carries_identity, is_traced

MAX_DEPTH = 100_000
"""Nothing here recurses, so this only stops a class whose flatten function makes new children for ever."""


class Tags:
    """Which objects a crossing has seen, and their numbers.

    `objects` keeps every one of them alive, so that an id stands for one object as long as the tags exist.
    """

    __slots__ = ("numbers", "objects")

    def __init__(self) -> None:
        self.numbers: dict[int, int] = {}
        self.objects: list[Any] = []

    def number_of(self, obj: Any) -> int | None:
        """The number of an object that was tagged."""
        return self.numbers.get(id(obj))  # tagged objects are alive in `objects`, so equal ids mean the same object

    def add(self, obj: Any, *, tag: bool) -> int:
        """Gives an object the next number, and remembers it under its id if `tag`."""
        number = len(self.objects)
        self.objects.append(obj)
        if tag:
            self.numbers[id(obj)] = number  # alive in `objects`
        return number

    def forget(self, start: int) -> None:
        """Takes back every number from `start` on."""
        for obj in self.objects[start:]:
            self.numbers.pop(id(obj), None)  # alive in `objects` until the next line
        del self.objects[start:]


class Rules(NamedTuple):
    """What a walk treats as what.

    Attributes:
        containers: mutable containers carry identity outside modules, too.
        arrays: arrays carry identity too.
        values: so do tuples and whatever else is a node, so that what is shared is walked once. The structure is then
            no description of the tree that others could be compared with.
        filtered: as under Equinox's filters, only arrays are traced, in modules of all libraries and outside.
        convention: the one that holds around the root.
        given: objects that are not packed but named by their number on the other side.
        updated: objects whose content is to be written into the object of that number.
        received: the records of the other side, which these numbers are of.
        is_exact: static values are those of this very tree, uncopied, for a tree that is put together again from the
            structure. Otherwise equal ones of another tree may stand for them, so that one trace serves both.
        given_copies: copies that a function was given of static objects, each with the object, which takes its place
            again if the function did not change the copy.
        on_static: called with each static value and its path, to object to it.
        is_leaf: nodes and static values for which it is true count as traced leaves.
        is_leaf_takes_path: whether it takes the key path before the object, as JAX's functions with paths have it.
        are_structs_traced: whether a `jax.ShapeDtypeStruct` stands for an array where Equinox's convention holds. It
            has no value, so in what a traced function returned it is static there, as any other object.
    """

    containers: bool = False
    arrays: bool = True
    values: bool = False
    filtered: bool = False
    convention: Inherited = "jax"
    is_exact: bool = False
    given: IdentityDict[int] | None = None
    updated: IdentityDict[int] | None = None
    received: Sequence[Record] = ()
    given_copies: IdentityDict[Any] | None = None
    on_static: Callable[[Any, Callable[[], str]], None] | None = None
    is_leaf: Callable[..., bool] | None = None
    is_leaf_takes_path: bool = False
    are_structs_traced: bool = True


DEFAULT_RULES = Rules()


def _is_value(obj: Any, node_type: NodeType | None, convention: Inherited, rules: Rules) -> bool:
    """Whether an object has no identity where it is, whatever it has elsewhere."""
    if not rules.are_structs_traced and type(obj) is jax.ShapeDtypeStruct:
        return False
    if convention == "variable":
        return node_type is None and is_value_of_variable(obj) and (not rules.filtered or is_traced(obj, "equinox"))
    if convention != "outside":
        return False
    if node_type is None:
        return not isinstance(obj, jax.Ref) and (not rules.filtered or is_traced(obj, "equinox"))
    return node_type.is_plain and not (rules.containers and node_type.is_mutable)


class Reading:
    """What a walk read, in the order in which it met it, from which the native walk's key is written.

    Attributes:
        visited: None for a leaf; the number of an object that was seen before; for a node its type, the number of its
            children, and its auxiliary data; for a static leaf None, 0 and its value. Nobody changes any of it.
        known: what the walk found out about static values.
    """

    __slots__ = ("known", "visited")

    def __init__(self) -> None:
        self.visited: list[int | tuple[NodeType | None, int, Any] | None] = []
        self.known = new_static_memo()


class _Frame:
    __slots__ = ("aux", "children", "convention", "done", "is_object", "obj", "type")

    def __init__(
        self,
        obj: Any,
        node_type: NodeType,
        convention: Inherited,
        children: Sequence[Any],
        aux: Static,
        is_object: bool,
    ) -> None:
        self.obj = obj  # alive while its id is among the open ones
        self.type = node_type
        self.children = children
        self.aux = aux
        self.convention: Inherited = convention
        self.is_object = is_object
        self.done: list[int] = []


def walk(
    tree: Any, tags: Tags, rules: Rules = DEFAULT_RULES, prefix: str = "", reading: Reading | None = None
) -> tuple[list[Any], tuple[Record, ...], int]:
    """Packs a tree without interning its structure.

    Args:
        tree: any object.
        tags: the objects that were seen earlier in the same crossing; those seen now are added.
        rules: see `Rules`.
        prefix: what stands before each path in errors.
        reading: gets what is read.

    Returns:
        The traced leaves not seen before, the records added, and the number of the root.

    Raises:
        CycleError: if an object contains itself.
        StaticComparisonError: if a static leaf has no usable `==`.
        DepthError: if a static leaf is nested too deeply, or the nodes are.
    """
    leaves: list[Any] = []
    records: list[Record] = []
    frames: list[_Frame] = []
    open_ids: set[tuple[int, bool]] = set()  # of the objects and the values in `frames`, which keeps them alive
    reading = Reading() if reading is None else reading
    of_statics, visited = reading.known, reading.visited
    given, updated = rules.given or None, rules.updated or None  # mostly there are none

    def keys_to(extra: int = 0) -> Path:
        return tuple([f.type.keys_of(f.obj)[len(f.done)] for f in frames[: len(frames) - extra]])

    def path(extra: int = 0) -> str:
        return prefix + jtu.keystr(keys_to(extra))

    def is_chosen_leaf(obj: Any) -> bool:
        if rules.is_leaf is None:
            return False
        return rules.is_leaf(keys_to(), obj) if rules.is_leaf_takes_path else rules.is_leaf(obj)

    def is_traced_here(obj: Any, convention: Inherited) -> bool:
        is_of_equinox = rules.filtered or convention == "equinox"
        if is_of_equinox and not rules.are_structs_traced and type(obj) is jax.ShapeDtypeStruct:
            return False
        return is_traced(obj, convention) and (not rules.filtered or is_traced(obj, "equinox"))

    def record(obj: Any, op: Op, children: tuple[int, ...], *, tag: bool) -> int:
        records.append((op, children))
        return tags.add(obj, tag=tag)

    def leaf(obj: Any, *, tag: bool) -> int:
        leaves.append(obj)
        visited.append(None)
        return record(obj, LEAF, (), tag=tag)

    def visit(obj: Any, convention: Inherited) -> int | None:
        """The number of a leaf or of an object seen before; otherwise opens a frame and returns None."""
        node_type = node_type_of(obj)
        if node_type is not None and convention in ("outside", "any") and not node_type.is_known_to_jax:
            node_type = None
        # Asked first: outside modules what was seen inside one is a value, too.
        if _is_value(obj, node_type, convention, rules):
            return leaf(obj, tag=False) if node_type is None else open_node(obj, node_type, convention)
        known = tags.number_of(obj)
        if known is not None:
            visited.append(known)
            return known
        if is_chosen_leaf(obj):
            shared = carries_identity(obj) if node_type is None else node_type.carries_identity
            return leaf(obj, tag=shared)
        if node_type is None:
            if is_traced_here(obj, convention):
                shared = rules.arrays and carries_identity(obj)
                if given is not None and shared and obj in given:
                    return record(obj, Given(given[obj]), (), tag=True)
                return leaf(obj, tag=shared)
            static = _static(obj, rules, path, of_statics)
            visited.append((None, 0, static.peek()))
            return record(obj, static, (), tag=False)
        if given is not None and node_type.carries_identity and obj in given:
            return record(obj, Given(given[obj]), (), tag=True)
        return open_node(obj, node_type, convention)

    def open_node(obj: Any, node_type: NodeType, convention: Inherited) -> None:
        inner = node_type.inherits(convention, containers=rules.containers)
        is_object = node_type.carries_identity and (convention != "outside" or inner != "outside")
        if (id(obj), is_object) in open_ids:  # of one in `frames`, alive
            _raise_cycle(obj, frames, path, is_object=is_object)
        if len(frames) >= MAX_DEPTH:
            raise_too_deep(prefix)
        children, aux = node_type.take_apart(obj)
        if convention in ("outside", "any") and has_unordered_keys(node_type, aux):
            jtu.tree_flatten(obj, is_leaf=lambda part: part is not obj)  # raises JAX's own error
        static = _static(aux, rules, path, of_statics)
        visited.append((node_type, len(children), static.peek()))
        frames.append(_Frame(obj, node_type, inner, children, static, is_object))
        if node_type.carries_identity:  # only what can be mutated can contain itself
            open_ids.add((id(obj), is_object))  # alive in `frames`

    def close(frame: _Frame) -> int:
        open_ids.discard((id(frame.obj), frame.is_object))  # alive in `frame`
        keys = frame.type.keys_of(frame.obj)
        if len(keys) != len(frame.done):  # the class was registered with keys that do not match its children
            keys = tuple(jtu.SequenceKey(i) for i in range(len(frame.done)))
        op: Op = Node(frame.type, frame.aux, keys)
        if updated is not None and frame.is_object and frame.obj in updated:
            number = updated[frame.obj]
            op = Update.of(number, op, rules.received[number][0])
        return record(frame.obj, op, tuple(frame.done), tag=frame.is_object or rules.values)

    number = visit(tree, rules.convention)
    while frames:
        frame = frames[-1]
        if number is not None:
            frame.done.append(number)
        if len(frame.done) == len(frame.children):
            frames.pop()
            number = close(frame)
        else:
            number = visit(frame.children[len(frame.done)], frame.convention)
    assert number is not None
    return leaves, tuple(records), number


def build(
    records: Sequence[Record],
    leaves: Sequence[Any],
    table: list[Any],
    given: Callable[[int], Any] | None = None,
    update: Callable[[int, Any], Any] | None = None,
) -> None:
    """Runs down the records, appending one object a record to `table`.

    Args:
        records: the records that follow those already in the table.
        leaves: one object for each `LEAF`, in order.
        table: the objects of all earlier records of the crossing.
        given: number → object, for `Given`.
        update: (number, new content) → object, for `Update`.
    """
    rest = iter(leaves)
    for op, children in records:
        if op is LEAF:
            obj = next(rest)
        elif type(op) is Node:
            obj = op.type.put_together(op.aux.thaw(), [table[child] for child in children])
        elif type(op) is Static:
            obj = op.thaw()
        elif type(op) is Given:
            assert given is not None
            obj = given(op.number)
        else:
            assert type(op) is Update
            assert update is not None
            node = op.node
            obj = update(op.number, node.type.put_together(node.aux.thaw(), [table[child] for child in children]))
        table.append(obj)


def _static(value: Any, rules: Rules, path: Callable[[], str], known: StaticMemo) -> Static:
    if rules.on_static is not None:
        rules.on_static(value, path)
    try:
        if rules.given_copies is not None:
            value = with_originals(value, rules.given_copies)
        return Static(value, known, is_exact=rules.is_exact)
    except RecursionError:
        raise DepthError(
            f"The static value at `{path()}` is nested too deeply to be compared, or contains itself. Keep such data "
            "outside the module.",
            (path(),),
        ) from None
    except Incomparable as error:
        raise StaticComparisonError(
            f"The static value at `{path()}` cannot be compared. It is or holds a "
            f"`{type(error.value).__qualname__}`: {error.reason}.\n"
            "What is not traced is part of the structure, so equal calls must be recognised by `==`. Give the class\n"
            "    def __eq__(self, other): return type(other) is type(self) and self.key == other.key\n"
            "    def __hash__(self): return hash(self.key)",
            (path(),),
        ) from None


def raise_too_deep(prefix: str) -> None:
    """Raises the error for nodes that are nested deeper than the walk goes."""
    raise DepthError(
        f"Nodes under `{prefix}` are nested more than {MAX_DEPTH} deep. If that is a list of layers linked to one "
        "another, hold the layers in a tuple instead.",
        (prefix,),
    )


def _raise_cycle(obj: Any, frames: list[_Frame], path: Callable[[int], str], *, is_object: bool) -> None:
    places = (i for i, frame in enumerate(frames) if frame.obj is obj and frame.is_object is is_object)
    above = len(frames) - next(places)
    raise cycle_error(obj, path(above), path(0))


def cycle_error(obj: Any, start: str, back: str) -> CycleError:
    """The error for an object that sits at a path and again, within itself, at another one."""
    return CycleError(
        f"A `{type(obj).__name__}` contains itself: it sits at `{start}` and again, within itself, at `{back}`.\n"
        "A DAG has no cycles, and JAX crashes on them. Break the cycle, for example by holding the parent in a "
        "static field with a weak reference:\n"
        "    parent: Callable = eqx.field(static=True)   # weakref.ref(parent)",
        (start, back),
    )
