"""Takes trees apart and puts them together in Python: the reference for everything that is faster.

    walk([w, Pair(w, 3)])    leaves  w      records  0: leaf   1: static 3   2: Pair(0, 1)   3: list(0, 2)      root 3

Both directions loop over explicit stacks and never recurse, so depth is no limit. `_native_*.c` does the same in C, and
leaves to this file every error and everything uncommon.

Three words of this file. The *node type* of a class says how its instances are taken apart and put together; it is None
for a leaf. A *convention* says which leaves are traced: it is that of the library of the nearest module. The *auxiliary
data* of a node is all that its class needs besides the children, such as the keys of a dict.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax import tree_util as jtu

from ._by_identity import IdentityDict
from ._errors import CycleError, DepthError, StaticComparisonError
from ._node_types import (
    LocalConvention,
    NodeType,
    carries_identity,
    has_unsortable_keys,
    is_traced,
    is_value_of_variable,
    node_type_of,
)
from ._static_values import Incomparable, Static, StaticMemo, new_static_memo, with_originals
from ._structure import LEAF, Given, Node, Op, Path, Record, Update

MAX_DEPTH = 100_000
"""The walk needs no limit. This one stops a class whose flatten function makes new children without end."""


class Tags:
    """Numbers of the objects seen by one or several walks.

    Each record of a walk has one entry in `objects`, at its number. An object is *tagged* if `numbers` has it, too: a
    walk that meets a tagged object again writes its number instead of walking it again. Values are not tagged.

    `objects` keeps all of the objects alive. So an id stands for one object as long as the tags exist.
    """

    __slots__ = ("numbers", "objects")

    def __init__(self) -> None:
        self.numbers: dict[int, int] = {}
        self.objects: list[Any] = []

    def number_of(self, obj: Any) -> int | None:
        """Looks up the number of a tagged object. None for objects without a tag."""
        return self.numbers.get(id(obj))  # tagged objects are alive in `objects`, so equal ids mean the same object

    def add(self, obj: Any, *, tag: bool) -> int:
        """Gives an object the next number and returns it. With `tag`, `number_of` finds it from then on."""
        number = len(self.objects)
        self.objects.append(obj)
        if tag:
            self.numbers[id(obj)] = number  # alive in `objects`
        return number

    def forget(self, start: int) -> None:
        """Removes every object from number `start` on."""
        for obj in self.objects[start:]:
            self.numbers.pop(id(obj), None)  # alive in `objects` until the next line
        del self.objects[start:]


class Rules(NamedTuple):
    """Settings of a walk: which objects carry identity, which leaves are traced, how static values are taken.

    Attributes:
        containers: mutable containers carry identity outside modules, too.
        arrays: arrays carry identity.
        values: tuples and all other nodes are tagged, too, so a shared one is walked only once. The structure then
            depends on the identity of tuples, and must not be compared with that of another tree.
        filtered: only arrays are traced, in and outside modules of all libraries, as under Equinox's filters.
        convention: the convention around the root: which leaves are traced. `"equinox"`, `"jax"` and `"variable"` are
            those of modules. `"outside"` is that outside of all modules, where arrays and containers are values.
            `"any"` is that below a container outside modules that carries identity by `containers`.
        given: objects of the tree that are the caller's own → their numbers. They are not packed: each becomes a
            `Given`.
        updated: objects of the tree whose content is written into an object of the caller → the number of that object.
            Each becomes an `Update`.
        received: the records of the arguments of the function whose result this tree is. The numbers in `given` and
            `updated` refer to them.
        is_exact: static values are taken uncopied from this very tree, for a structure that puts the same tree together
            again. Otherwise equal values of another tree may stand for them, so that one trace serves both.
        given_copies: copies of static objects, as a function received them → the caller's originals. A copy is
            replaced by its original if the two are still equal.
        on_static: called with each static value and a function that returns its path as a text. It raises an error to
            refuse the value.
        is_leaf: a node or static value counts as a traced leaf if this returns true for it.
        is_leaf_takes_path: whether `is_leaf` takes a key path before the object, as in JAX's functions with paths.
        are_structs_traced: whether Equinox's convention traces a `jax.ShapeDtypeStruct` in place of an array. It has no
            value, so in the result of a traced function it must be static.
    """

    containers: bool = False
    arrays: bool = True
    values: bool = False
    filtered: bool = False
    convention: LocalConvention = "jax"
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


class Reading:
    """Log of one walk, from which the native walk's key for the same tree is written.

    Attributes:
        visited: one entry for each visit, in order. None for a traced leaf; the number of an object that was seen
            before; (node type, number of children, auxiliary data) for a node; (None, 0, value) for a static leaf. No
            entry is changed later, even if another thread changes the tree.
        static_memo: what the walk found out about static values: the keys and copies made for them so far, and their
            classes.
    """

    __slots__ = ("static_memo", "visited")

    def __init__(self) -> None:
        self.visited: list[int | tuple[NodeType | None, int, Any] | None] = []
        self.static_memo = new_static_memo()


class _OpenNode:
    """A node whose children are not all walked yet: it is on the way from the root to where the walk is.

    Attributes:
        obj: the node itself. It is kept alive here, as `walk` looks for its id among those of the open nodes.
        type: its node type.
        children: its children, in order.
        aux: its auxiliary data.
        convention: the convention for the leaves below it.
        is_object: whether it carries identity where it stands.
        numbers: the numbers of the records of its children so far.
    """

    __slots__ = ("aux", "children", "convention", "is_object", "numbers", "obj", "type")

    def __init__(
        self,
        obj: Any,
        node_type: NodeType,
        convention: LocalConvention,
        children: Sequence[Any],
        aux: Static,
        is_object: bool,
    ) -> None:
        self.obj = obj
        self.type = node_type
        self.children = children
        self.aux = aux
        self.convention: LocalConvention = convention
        self.is_object = is_object
        self.numbers: list[int] = []


def walk(
    tree: Any, tags: Tags, rules: Rules = DEFAULT_RULES, prefix: str = "", reading: Reading | None = None
) -> tuple[list[Any], tuple[Record, ...], int]:
    """Packs a tree into its traced leaves and its records. Interns nothing.

    Args:
        tree: any object.
        tags: the objects seen by earlier walks. They are not packed again; records refer to them by number. This walk
            adds its own.
        rules: see `Rules`.
        prefix: a text to put before each path in errors.
        reading: an empty log, which the walk fills. None if nobody needs the log.

    Returns:
        The traced leaves not seen before, the records added, and the number of the root.

    Raises:
        CycleError: if an object contains itself.
        StaticComparisonError: if a static leaf has no usable `==`.
        DepthError: if a static leaf is nested too deeply, or the nodes are.
    """
    # The helpers are closures and not methods: the walk runs for each node of each cold call, and a local variable is
    # cheaper than an attribute.
    leaves: list[Any] = []
    records: list[Record] = []
    open_nodes: list[_OpenNode] = []
    open_ids: set[tuple[int, bool]] = set()  # ids of the objects in `open_nodes`, which keeps them alive
    reading = Reading() if reading is None else reading
    static_memo, visited = reading.static_memo, reading.visited
    # The objects of the caller, see `Rules`. Most walks have none: None spares them a look-up for each leaf and node.
    caller_numbers, updated_numbers = rules.given or None, rules.updated or None

    def current_path(levels_up: int = 0) -> Path:
        """The path to the child that the walk has reached; with `levels_up`, to the open node that far above it."""
        # In each open node, the walk is at the child that follows the complete ones.
        nodes = open_nodes[: len(open_nodes) - levels_up]
        return tuple([node.type.keys_of(node.obj)[len(node.numbers)] for node in nodes])

    def path_text(levels_up: int = 0) -> str:
        return prefix + jtu.keystr(current_path(levels_up))

    def is_leaf_by_rule(obj: Any) -> bool:
        if rules.is_leaf is None:
            return False
        return rules.is_leaf(current_path(), obj) if rules.is_leaf_takes_path else rules.is_leaf(obj)

    def is_traced_here(obj: Any, convention: LocalConvention) -> bool:
        """Tells whether a leaf is traced: by its convention and, with `filtered`, also by that of Equinox."""
        is_of_equinox = rules.filtered or convention == "equinox"
        if is_of_equinox and not rules.are_structs_traced and type(obj) is jax.ShapeDtypeStruct:
            return False
        return is_traced(obj, convention) and (not rules.filtered or is_traced(obj, "equinox"))

    def add_record(obj: Any, op: Op, children: tuple[int, ...], *, tag: bool) -> int:
        # The record and the object get the same number, because both lists grow by one together.
        records.append((op, children))
        return tags.add(obj, tag=tag)

    def add_leaf(obj: Any, *, tag: bool) -> int:
        leaves.append(obj)
        visited.append(None)
        return add_record(obj, LEAF, (), tag=tag)

    def visit(obj: Any, convention: LocalConvention) -> int | None:
        """Visits one object of the tree.

        Returns its number if that is known now: for a leaf, an object seen before and an object of the caller. Opens
        any other node and returns None.
        """
        node_type = node_type_of(obj)
        # Outside modules JAX decides what a node is, and to JAX a `deque` is a leaf.
        if node_type is not None and convention in ("outside", "any") and not node_type.is_known_to_jax:
            node_type = None
        # This precedes the look-up of tags: an object seen inside a module is still a value where it is outside one.
        if _is_value(obj, node_type, convention, rules):
            return add_leaf(obj, tag=False) if node_type is None else open_node(obj, node_type, convention)
        number = tags.number_of(obj)
        if number is not None:
            visited.append(number)
            return number
        if is_leaf_by_rule(obj):
            has_identity = carries_identity(obj) if node_type is None else node_type.carries_identity
            return add_leaf(obj, tag=has_identity)
        # A leaf: traced, an object of the caller, or static.
        if node_type is None:
            if is_traced_here(obj, convention):
                has_identity = rules.arrays and carries_identity(obj)
                if caller_numbers is not None and has_identity and obj in caller_numbers:
                    return add_record(obj, Given(caller_numbers[obj]), (), tag=True)
                return add_leaf(obj, tag=has_identity)
            static = _make_static(obj, rules, path_text, static_memo)
            visited.append((None, 0, static.peek()))
            return add_record(obj, static, (), tag=False)
        # A node: an object of the caller, or one to take apart.
        if caller_numbers is not None and node_type.carries_identity and obj in caller_numbers:
            return add_record(obj, Given(caller_numbers[obj]), (), tag=True)
        return open_node(obj, node_type, convention)

    def open_node(obj: Any, node_type: NodeType, convention: LocalConvention) -> None:
        """Takes a node apart and makes it the innermost open node. Raises the error for a cycle."""
        # `inner` is the convention for its children.
        inner = node_type.inherits(convention, containers=rules.containers)
        is_object = node_type.carries_identity and (convention != "outside" or inner != "outside")
        # A list outside a module, where it is a value, may also stand inside the module, where it is an object. These
        # count as two. In a cycle the walk still comes back to one of them as the same kind, one turn later.
        if (id(obj), is_object) in open_ids:  # alive in `open_nodes`
            _raise_cycle(obj, open_nodes, path_text, is_object=is_object)
        if len(open_nodes) >= MAX_DEPTH:
            raise_too_deep(prefix)
        children, aux = node_type.take_apart(obj)
        if convention in ("outside", "any") and has_unsortable_keys(node_type, aux):
            # This call raises JAX's own error. `is_leaf` has it look at this node alone, and not at what is below.
            jtu.tree_flatten(obj, is_leaf=lambda part: part is not obj)
        static = _make_static(aux, rules, path_text, static_memo)
        visited.append((node_type, len(children), static.peek()))
        open_nodes.append(_OpenNode(obj, node_type, inner, children, static, is_object))
        # A node without identity, such as a tuple, cannot be mutated, so it cannot contain itself.
        if node_type.carries_identity:
            open_ids.add((id(obj), is_object))  # alive in `open_nodes`

    def close_node(node: _OpenNode) -> int:
        """Writes the record of a node after its last child, and returns its number."""
        open_ids.discard((id(node.obj), node.is_object))  # alive in `node`
        keys = node.type.keys_of(node.obj)
        # A class may be registered with a number of keys that differs from that of its children. JAX accepts that.
        if len(keys) != len(node.numbers):
            keys = tuple(jtu.SequenceKey(i) for i in range(len(node.numbers)))
        op: Op = Node(node.type, node.aux, keys)
        if updated_numbers is not None and node.is_object and node.obj in updated_numbers:
            caller_number = updated_numbers[node.obj]
            op = Update.of(caller_number, op, rules.received[caller_number][0])
        return add_record(node.obj, op, tuple(node.numbers), tag=node.is_object or rules.values)

    # Each step completes one record, whose number is then `number`, or opens a node, and then `number` is None.
    number = visit(tree, rules.convention)
    while open_nodes:
        node = open_nodes[-1]
        if number is not None:
            node.numbers.append(number)
        if len(node.numbers) == len(node.children):
            open_nodes.pop()
            number = close_node(node)
        else:
            number = visit(node.children[len(node.numbers)], node.convention)
    assert number is not None
    return leaves, tuple(records), number


def _is_value(obj: Any, node_type: NodeType | None, convention: LocalConvention, rules: Rules) -> bool:
    """Tells whether an object carries no identity at this place, whatever it carries elsewhere.

    Outside modules (convention "outside"), bare leaves and plain containers are values, as in vanilla JAX. Directly in
    an NNX `Variable` (convention "variable"), its array is a value.

    Returns False for a leaf that is static, since `visit` makes a traced leaf of each leaf for which this is true.
    """
    if not rules.are_structs_traced and type(obj) is jax.ShapeDtypeStruct:
        return False
    # With `filtered`, the leaves that Equinox does not trace are static.
    if convention == "variable":
        return node_type is None and is_value_of_variable(obj) and (not rules.filtered or is_traced(obj, "equinox"))
    if convention != "outside":
        return False
    if node_type is None:
        return not isinstance(obj, jax.Ref) and (not rules.filtered or is_traced(obj, "equinox"))
    return node_type.is_plain and not (rules.containers and node_type.is_mutable)


def build(
    records: Sequence[Record],
    leaves: Sequence[Any],
    table: list[Any],
    caller_object: Callable[[int], Any] | None = None,
    updated_object: Callable[[int, Any], Any] | None = None,
) -> None:
    """Puts a tree together: makes one object for each record, in order, and appends it to `table`.

    Args:
        records: the records that follow those already in the table. Children come before parents.
        leaves: one object for each `LEAF`, in order.
        table: the objects of all earlier records. Extended.
        caller_object: number → the caller's object, for `Given`.
        updated_object: (number, new content) → the caller's object with this content, for `Update`.
    """
    remaining_leaves = iter(leaves)
    for op, children in records:
        if op is LEAF:
            obj = next(remaining_leaves)
        elif type(op) is Node:
            obj = op.type.put_together(op.aux.thaw(), [table[child] for child in children])
        elif type(op) is Static:
            obj = op.thaw()
        # The next two occur only in results of functions, whose builders pass both functions.
        elif type(op) is Given:
            assert caller_object is not None
            obj = caller_object(op.number)
        else:
            assert type(op) is Update
            assert updated_object is not None
            node = op.node
            content = node.type.put_together(node.aux.thaw(), [table[child] for child in children])
            obj = updated_object(op.number, content)
        table.append(obj)


def _make_static(value: Any, rules: Rules, path_text: Callable[[], str], static_memo: StaticMemo) -> Static:
    """Wraps a static leaf or the auxiliary data of a node in a `Static`, after the checks of the rules.

    Args:
        value: the static value.
        rules: see `Rules`.
        path_text: returns the path, for errors. Making it takes as many steps as the node is deep, so only an error
            calls this.
        static_memo: results for the static values of this walk. Extended.

    Raises:
        DepthError: if the value is nested too deeply.
        StaticComparisonError: if the value has no usable `==`.
    """
    if rules.on_static is not None:
        rules.on_static(value, path_text)
    # Reading a value recurses, and runs a user's `==` and copy functions. Both kinds of failure get the path.
    try:
        if rules.given_copies is not None:
            value = with_originals(value, rules.given_copies)
        return Static(value, static_memo, is_exact=rules.is_exact)
    except RecursionError:
        raise DepthError(
            f"The static value at `{path_text()}` is nested too deeply to be compared, or contains itself. Keep such "
            "data outside the module.",
            (path_text(),),
        ) from None
    except Incomparable as error:
        raise StaticComparisonError(
            f"The static value at `{path_text()}` cannot be compared. It is or holds a "
            f"`{type(error.value).__qualname__}`: {error.reason}.\n"
            "What is not traced is part of the structure, so equal calls must be recognised by `==`. Give the class\n"
            "    def __eq__(self, other): return type(other) is type(self) and self.key == other.key\n"
            "    def __hash__(self): return hash(self.key)",
            (path_text(),),
        ) from None


def raise_too_deep(prefix: str) -> None:
    """Raises the error for nodes that are nested deeper than the walk goes."""
    raise DepthError(
        f"Nodes under `{prefix}` are nested more than {MAX_DEPTH} deep. If that is a list of layers linked to one "
        "another, hold the layers in a tuple instead.",
        (prefix,),
    )


def _raise_cycle(obj: Any, open_nodes: list[_OpenNode], path_text: Callable[[int], str], *, is_object: bool) -> None:
    """Raises the error for a cycle.

    Args:
        obj: the node that the walk has met again, below itself.
        open_nodes: the open nodes of the walk. The node is one of them.
        path_text: number of levels above the place where the walk is → the path there.
        is_object: whether the node carries identity at both places.
    """
    depths = (depth for depth, node in enumerate(open_nodes) if node.obj is obj and node.is_object is is_object)
    levels_up = len(open_nodes) - next(depths)
    raise cycle_error(obj, path_text(levels_up), path_text(0))


def cycle_error(obj: Any, start: str, back: str) -> CycleError:
    """Makes the error for a cycle: an object below itself.

    Args:
        obj: the object.
        start: its path.
        back: its path below itself.
    """
    return CycleError(
        f"A `{type(obj).__name__}` contains itself: it sits at `{start}` and again, within itself, at `{back}`.\n"
        "A DAG has no cycles, and JAX crashes on them. Break the cycle, for example by holding the parent in a "
        "static field with a weak reference:\n"
        "    parent: Callable = eqx.field(static=True)   # weakref.ref(parent)",
        (start, back),
    )
