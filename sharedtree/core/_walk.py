"""Takes trees apart and puts them together, in Python. `_native_*.c` does the same faster.

    walk([w, Pair(w, 3)])    leaves  w      records  0: leaf   1: static 3   2: Pair(0, 1)   3: list(0, 2)      root 3

This file defines what a walk does. The C code leaves to it every error and everything uncommon. Neither direction
recurses here: `walk` has an explicit stack, and `build` needs none. So depth is no limit.

Words of this file:

- The *node type* of a class says how its instances are taken apart and put together. It is None for a leaf.
- A *convention* says which leaves are traced. Each library has one. For a leaf, that of the nearest module around it
  counts.
- The *auxiliary data* of a node is all that its class needs besides the children, such as the keys of a dict.
- *Static* values are the leaves that are not traced, and the auxiliary data.
- An object *carries identity* at a place if an occurrence at another place is a tie with it, and not just an equal
  value. It depends on the class and on the place: outside modules, arrays and plain containers do not.
- *Objects of the caller*: in the result of a function, the objects that the function received in its arguments.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

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
"""Most nodes on one path. The walk itself needs no limit, but a flatten function may make new children without end."""


class Tags:
    """Numbers of the objects seen by one or several walks.

    An object is *tagged* if `number_of` finds its number. If a walk meets a tagged object again, it uses this number
    instead of walking the object again. Objects without identity have a number, but are not tagged.

    Attributes:
        objects: number → object, one for each record. It keeps the objects alive, so an id stands for one object as
            long as the tags exist.
        numbers: id → number, for the tagged objects.
    """

    __slots__ = ("numbers", "objects")

    def __init__(self) -> None:
        self.numbers: dict[int, int] = {}
        self.objects: list[Any] = []

    def number_of(self, obj: Any) -> int | None:
        """Returns the number of a tagged object. None for any other object."""
        return self.numbers.get(id(obj))  # tagged objects are alive in `objects`, so equal ids mean the same object

    def add(self, obj: Any, *, tag: bool) -> int:
        """Gives an object the next number and returns the number. With `tag`, `number_of` finds it from then on."""
        number = len(self.objects)
        self.objects.append(obj)
        if tag:
            self.numbers[id(obj)] = number  # alive in `objects`
        return number

    def forget(self, start: int) -> None:
        """Removes the objects with the number `start` and all higher numbers, such as those of a failed walk."""
        for obj in self.objects[start:]:
            self.numbers.pop(id(obj), None)  # alive in `objects` until the next line
        del self.objects[start:]


class Rules(NamedTuple):
    """Settings of a walk: which objects carry identity, which leaves are traced, how static values are taken.

    `given`, `updated`, `received` and `given_copies` are only for the results of functions.

    Attributes:
        containers: True if mutable containers carry identity outside modules, too.
        arrays: True if arrays carry identity. False if each occurrence of an array is a leaf of its own.
        values: True if tuples and all other nodes are tagged, too, so that a shared one is walked only once. The
            structure then depends on the identity of tuples, and must not be compared with that of another tree.
        filtered: True if only arrays are traced, in and outside modules of all libraries, as under Equinox's filters.
        convention: the convention at the place of the root. `"equinox"`, `"jax"` and `"variable"` are the conventions
            of modules. `"outside"` holds outside of all modules, where arrays and containers carry no identity.
            `"any"` holds below a container outside modules that carries identity because of `containers`.
        given: object of the caller in the tree → its number. It is not packed, but becomes a `Given`.
        updated: object of the tree with content to be written into an object of the caller → the number of that object.
            It becomes an `Update`.
        received: the records of the arguments of the function. The numbers in `given` and `updated` refer to them.
        is_exact: True if static values are taken uncopied from this very tree, for a structure that puts the same tree
            together again. False if equal values of another tree may stand for them, so that one trace serves both.
        given_copies: copy of a static object, as the function received it → the caller's original. A copy is replaced
            by its original if the two are still equal.
        on_static: called with each static value and a function that returns its path as a text. It raises an error to
            refuse the value.
        is_leaf: object → True to make a traced leaf of it. Called for nodes and leaves, but not at places where the
            object carries no identity.
        is_leaf_takes_path: True if `is_leaf` takes a key path before the object, as in JAX's functions with paths.
        are_structs_traced: False if Equinox's convention takes a `jax.ShapeDtypeStruct` for static. It stands for an
            array but has no value, so the result of a traced function cannot have it as a traced leaf.
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


class WalkLog:
    """Log of one walk. C writes from it the key with which the native walk would describe the same tree.

    Attributes:
        visited: one entry for each visit, in order: None for a traced leaf; the number of an object that was seen
            before; (node type, number of children, auxiliary data) for a node; (None, 0, value) for a static leaf. No
            entry is changed later, even if another thread changes the tree. Objects of the caller have no entry: C
            writes no keys for trees with these.
        static_memo: the keys and copies made for static values so far, and the classes of the values.
    """

    __slots__ = ("static_memo", "visited")

    def __init__(self) -> None:
        self.visited: list[int | tuple[NodeType | None, int, Any] | None] = []
        self.static_memo = new_static_memo()


class _OpenNode:
    """Node with children still to be walked. The open nodes are the path from the root to the place of the walk.

    Attributes:
        obj: the node itself. It is kept alive here, because `walk` compares ids with those of the open nodes.
        type: its node type.
        children: its children, in order.
        aux: its auxiliary data.
        convention: the convention for the leaves below it.
        is_object: whether it carries identity at its place.
        child_numbers: the numbers of the records of the walked children, in order.
    """

    __slots__ = ("aux", "child_numbers", "children", "convention", "is_object", "obj", "type")

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
        self.child_numbers: list[int] = []


def walk(
    tree: Any, tags: Tags, rules: Rules = DEFAULT_RULES, prefix: str = "", log: WalkLog | None = None
) -> tuple[list[Any], tuple[Record, ...], int]:
    """Packs a tree into its traced leaves and its records. Interns nothing.

    Args:
        tree: any object.
        tags: the objects seen by earlier walks. They are not packed again: records refer to them by number. This walk
            adds the objects of its tree.
        rules: see `Rules`.
        prefix: a text to put before each path in errors.
        log: an empty log, to be filled by the walk. None if nobody needs the log.

    Returns:
        The traced leaves not yet in `tags`, the records of the objects added, and the number of the root.

    Raises:
        CycleError: if an object contains itself.
        StaticComparisonError: if a static value has no usable `==`.
        DepthError: if a static value is nested too deeply, or the nodes are.
        Exception: whatever `rules.on_static`, `rules.is_leaf` or the flatten function of a class raises. For a dict
            outside modules with keys that cannot be sorted, JAX's own error.
    """
    # The helpers are closures and not methods: the walk runs for each node of each cold call, and a local variable is
    # cheaper than an attribute.
    leaves: list[Any] = []
    records: list[Record] = []
    open_nodes: list[_OpenNode] = []
    # (id of the object, `is_object`) of each node in `open_nodes` that may be in a cycle. `open_nodes` keeps it alive.
    open_ids: set[tuple[int, bool]] = set()
    log = WalkLog() if log is None else log
    static_memo, visited = log.static_memo, log.visited
    # The objects of the caller, see `Rules`. Most walks have none. Then these are None, and no look-up is made for each
    # leaf and node.
    caller_numbers, updated_numbers = rules.given or None, rules.updated or None

    def current_path(levels_up: int = 0) -> Path:
        """Returns the path to the place of the walk. With `levels_up`, to the open node so many levels above it."""
        # In each open node, the walk is at the child after those that have a number.
        nodes = open_nodes[: len(open_nodes) - levels_up]
        return tuple([node.type.keys_of(node.obj)[len(node.child_numbers)] for node in nodes])

    def path_text(levels_up: int = 0) -> str:
        """Returns the same path as a text for errors."""
        return prefix + jtu.keystr(current_path(levels_up))

    def is_leaf_by_rule(obj: Any) -> bool:
        """Returns True if `rules.is_leaf` makes a traced leaf of the object."""
        if rules.is_leaf is None:
            return False
        return rules.is_leaf(current_path(), obj) if rules.is_leaf_takes_path else rules.is_leaf(obj)

    def is_traced_here(obj: Any, convention: LocalConvention) -> bool:
        """Returns True if a leaf is traced: by the convention at its place and, with `filtered`, also by Equinox's."""
        is_of_equinox = rules.filtered or convention == "equinox"
        if is_of_equinox and not rules.are_structs_traced and type(obj) is jax.ShapeDtypeStruct:
            return False
        return is_traced(obj, convention) and (not rules.filtered or is_traced(obj, "equinox"))

    def add_record(obj: Any, op: Op, children: tuple[int, ...], *, tag: bool) -> int:
        """Adds a record and its object. Returns their number."""
        # `tags.add` gives the number to the object. It is also that of the record: both lists grow by one together.
        records.append((op, children))
        return tags.add(obj, tag=tag)

    def add_leaf(obj: Any, *, tag: bool) -> int:
        """Adds a traced leaf. Returns its number."""
        leaves.append(obj)
        visited.append(None)
        return add_record(obj, LEAF, (), tag=tag)

    def visit(obj: Any, convention: LocalConvention) -> int | None:
        """Visits one object of the tree.

        Returns the number of a leaf, of an object seen before, and of an object of the caller. Any other node becomes
        the innermost open node and gets its number later: then returns None.

        Args:
            obj: the object.
            convention: the convention at its place.
        """
        node_type = node_type_of(obj)
        # Outside modules JAX decides what a node is, and to JAX a `deque` is a leaf.
        if node_type is not None and convention in ("outside", "any") and not node_type.is_known_to_jax:
            node_type = None
        # This comes before the look-up of the tag. An object may have a tag from a place inside a module, and still
        # carries no identity here, outside.
        if _is_value(obj, node_type, convention, rules):
            return add_leaf(obj, tag=False) if node_type is None else open_node(obj, node_type, convention)
        number = tags.number_of(obj)
        if number is not None:
            visited.append(number)
            return number
        if is_leaf_by_rule(obj):
            has_identity = carries_identity(obj) if node_type is None else node_type.carries_identity
            return add_leaf(obj, tag=has_identity)
        # A leaf: an object of the caller, traced, or static.
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
        """Takes a node apart and makes it the innermost open node.

        Raises:
            CycleError: if the node is open already.
            DepthError: if too many nodes are open.
        """
        inner_convention = node_type.convention_below(convention, containers=rules.containers)
        # The convention below a node outside modules is "outside" again for a plain container that is a value here. For
        # a module it is that of the module; for a container that carries identity by `rules.containers`, it is "any".
        is_object = node_type.carries_identity and (convention != "outside" or inner_convention != "outside")
        # A list may stand outside a module, where it is a value, and inside the same module, where it is an object. The
        # two occurrences count as two nodes, so this is no cycle yet. In a real cycle, the walk goes round once more
        # and comes back to the inner one, as an object again.
        if (id(obj), is_object) in open_ids:  # alive in `open_nodes`
            _raise_cycle(obj, open_nodes, path_text, is_object=is_object)
        if len(open_nodes) >= MAX_DEPTH:
            raise_too_deep(prefix)
        children, aux = node_type.take_apart(obj)
        if convention in ("outside", "any") and has_unsortable_keys(node_type, aux):
            # This call raises JAX's own error for the keys. With this `is_leaf`, JAX looks at this node alone, and at
            # nothing below it.
            jtu.tree_flatten(obj, is_leaf=lambda part: part is not obj)
        static = _make_static(aux, rules, path_text, static_memo)
        visited.append((node_type, len(children), static.peek()))
        open_nodes.append(_OpenNode(obj, node_type, inner_convention, children, static, is_object))
        # A node without identity, such as a tuple, cannot be mutated, so it cannot contain itself.
        if node_type.carries_identity:
            open_ids.add((id(obj), is_object))  # alive in `open_nodes`

    def close_node(node: _OpenNode) -> int:
        """Adds the record of an open node after its last child, and returns its number."""
        open_ids.discard((id(node.obj), node.is_object))  # alive in `node`
        keys = node.type.keys_of(node.obj)
        # A class may be registered with a number of keys that differs from that of its children. JAX accepts that.
        if len(keys) != len(node.child_numbers):
            keys = tuple(jtu.SequenceKey(i) for i in range(len(node.child_numbers)))
        op: Op = Node(node.type, node.aux, keys)
        if updated_numbers is not None and node.is_object and node.obj in updated_numbers:
            caller_number = updated_numbers[node.obj]
            op = Update.of(caller_number, op, rules.received[caller_number][0])
        return add_record(node.obj, op, tuple(node.child_numbers), tag=node.is_object or rules.values)

    # Each step completes one record, whose number is then `number`, or opens a node, and then `number` is None.
    number = visit(tree, rules.convention)
    while open_nodes:
        node = open_nodes[-1]
        if number is not None:
            node.child_numbers.append(number)
        if len(node.child_numbers) == len(node.children):
            open_nodes.pop()
            number = close_node(node)
        else:
            number = visit(node.children[len(node.child_numbers)], node.convention)
    assert number is not None
    return leaves, tuple(records), number


def _is_value(obj: Any, node_type: NodeType | None, convention: LocalConvention, rules: Rules) -> bool:
    """Returns True if an object is a node or traced leaf without identity at this place.

    It may carry identity at other places. Outside modules (convention "outside"), leaves and plain containers are
    values, as in vanilla JAX. Directly in an NNX `Variable` (convention "variable"), its array is a value.

    Returns False for a static leaf: `visit` makes a traced leaf of each leaf for which this is true.
    """
    # A struct is static under these rules.
    if not rules.are_structs_traced and type(obj) is jax.ShapeDtypeStruct:
        return False
    # With `filtered`, a leaf that Equinox does not trace is static.
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
        records: the records after the ones already in the table. Children come before parents.
        leaves: one object for each `LEAF`, in order.
        table: the objects of all earlier records. The objects of these records are added.
        caller_object: number → the caller's object, for `Given`. None if no record has a `Given`.
        updated_object: (number, new content) → the caller's object with this content, for `Update`. None if no record
            has an `Update`.
    """
    remaining_leaves = iter(leaves)
    for op, children in records:
        if op is LEAF:
            obj = next(remaining_leaves)
        # `thaw` returns the static value for a new tree: a new copy if it is mutable.
        elif type(op) is Node:
            obj = op.type.put_together(op.aux.thaw(), [table[child] for child in children])
        elif type(op) is Static:
            obj = op.thaw()
        # `Given` and `Update` occur only in results of functions. Callers that build these pass both functions.
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
    """Wraps a static leaf or the auxiliary data of a node in a `Static`, after the check `rules.on_static`.

    Args:
        value: the static value.
        rules: see `Rules`.
        path_text: returns the path of the value. To make it costs time, so it is called only for an error.
        static_memo: results for the static values of this walk so far. The results for this value are added.

    Raises:
        DepthError: if the value is nested too deeply.
        StaticComparisonError: if the value has no usable `==`.
        Exception: whatever `rules.on_static` raises.
    """
    if rules.on_static is not None:
        rules.on_static(value, path_text)
    # To read a value takes recursion, which may become too deep. It also runs a user's `==` and copy functions, which
    # may fail. The error for either has the path.
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
            f"The static value at `{path_text()}` cannot be compared, since it is or holds a "
            f"`{type(error.value).__qualname__}`: {error.reason}.\n"
            "Static values are compared with `==`, to find out whether a call needs a new trace. Give the class\n"
            "    def __eq__(self, other): return type(other) is type(self) and self.key == other.key\n"
            "    def __hash__(self): return hash(self.key)",
            (path_text(),),
        ) from None


def raise_too_deep(prefix: str) -> NoReturn:
    """Raises the error for nodes nested deeper than `MAX_DEPTH`."""
    raise DepthError(
        f"Nodes under `{prefix}` are nested more than {MAX_DEPTH} deep. If that is a list of layers linked to one "
        "another, hold the layers in a tuple instead.",
        (prefix,),
    )


def _raise_cycle(
    obj: Any, open_nodes: list[_OpenNode], path_text: Callable[[int], str], *, is_object: bool
) -> NoReturn:
    """Raises the error for a cycle.

    Args:
        obj: the node that the walk has met again, below itself.
        open_nodes: the open nodes of the walk. The node is one of them.
        path_text: levels up from the place of the walk → the path to there. 0 is the place itself.
        is_object: whether the node carries identity at both places.
    """
    # The node is open once at the same kind of place, so this is its depth there.
    depths = (depth for depth, node in enumerate(open_nodes) if node.obj is obj and node.is_object is is_object)
    levels_up = len(open_nodes) - next(depths)
    raise cycle_error(obj, path_text(levels_up), path_text(0))


def cycle_error(obj: Any, outer_path: str, inner_path: str) -> CycleError:
    """Makes the error for a cycle, an object below itself, and returns it.

    Args:
        obj: the object.
        outer_path: its path. An empty text if it is the root.
        inner_path: its path below itself, beginning with `outer_path`.
    """
    outer_text = f"at `{outer_path}`" if outer_path else "at the root"
    return CycleError(
        f"A `{type(obj).__name__}` contains itself: it sits {outer_text} and again, within itself, at `{inner_path}`.\n"
        "A DAG has no cycles, and JAX crashes on them. Break the cycle, for example by holding the parent in a "
        "static field with a weak reference:\n"
        "    parent: Callable = eqx.field(static=True)   # weakref.ref(parent)",
        (outer_path, inner_path),
    )
