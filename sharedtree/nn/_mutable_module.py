"""`Module`, a mutable base class for pytrees, and the marks `parameter` and `state_field` for its attributes.

The idea is that of treex and PAX: a module is an ordinary object with an `__init__` and a `__call__`, and both may
assign attributes. Attributes that hold arrays or modules are the children of the module, whenever they were assigned.
All other attributes are *static*: part of the structure.

The *kind* of an attribute is parameter, state, sub-tree or static. It says whether the attribute is a child, and
whether it is trainable. `libraries/_sharedtree_module_kinds` has the rules. A *mark* sets the kind.

A transform passes new modules of the same content to the function. So an attribute that the function assigns is seen in
the module that it returns or, with `in_place=True`, in the caller's own module.

Every class is registered with JAX, so vanilla JAX accepts its instances, too. There, as with any pytree, a shared
object becomes two.
"""

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar, cast, overload

import equinox as eqx
import jax.numpy as jnp
from jax import tree_util as jtu

from ..core._by_identity import IdentityDict, IdentitySet
from ..core._errors import SharingMismatchError
from ..core._node_types import Trained, trained_below
from ..core._static_values import copy_of, with_names
from ..core._structure import LEAF, FlatDag, Node, Op, Path
from ..libraries import _sharedtree_module as assigning, _sharedtree_module_kinds as kinds
from ..libraries._sharedtree_module_kinds import PARAMETER, STATE, STATIC, AttributeKind, Marked, require_markable
from ..ties._leaf_notes import hand_on
from ..ties._list_ties import are_one_value, how_to_tie
from ..ties._policy_and_context import walk_exactly
from ..tree._partition import rebuilt

if TYPE_CHECKING:
    import wadler_lindig as wl

T = TypeVar("T")

# Stands for an absent value, since None is a value.
_NO_VALUE: Any = object()


@overload
def parameter(value: T, /) -> T: ...
@overload
def parameter(*, default: Any = ..., default_factory: Callable[[], Any] = ..., kw_only: bool = ...) -> Any: ...
def parameter(value: Any = _NO_VALUE, /, **options: Any) -> Any:
    """Marks a value as a parameter, for an attribute of a `Module`: traced, and trainable.

    The attribute keeps the mark, and holds the value itself: after `self.weight = st.parameter(w)`, `self.weight is w`.

    Args:
        value: an array, or a container of arrays. A module in the value decides by its own marks which of its leaves
            are trainable. A call without a value declares a field of a dataclass: `weight: jax.Array = st.parameter()`.
        options: `default`, `default_factory` and `kw_only` of `dataclasses.field`, for a call without a value.

    Returns:
        A marked value, to be assigned to an attribute at once. It has the static type of the value. No copy is made.

    Raises:
        UnregisteredTypeError: if JAX could not trace the value.

    Example:
        >>> import jax.numpy as jnp, sharedtree as st
        >>> class Scale(st.Module):
        ...     def __init__(self):
        ...         self.factor = st.parameter(jnp.ones(2))
        >>> Scale().factor
        Array([1., 1.], dtype=float32)

    Limitations: a mark belongs to an attribute, so a list must not hold marked values. Mark the list instead.
    """
    return _marked(PARAMETER, "`sharedtree.parameter`", value, options)


@overload
def state_field(value: T, /) -> T: ...
@overload
def state_field(*, default: Any = ..., default_factory: Callable[[], Any] = ..., kw_only: bool = ...) -> Any: ...
def state_field(value: Any = _NO_VALUE, /, **options: Any) -> Any:
    """Marks a value as state, for an attribute of a `Module`: traced, and nothing in it is trainable.

    An array assigned without a mark is state as well. The mark makes a Python number traced, too, and holds for
    whole modules: nothing in `self.target = st.state_field(network)` is trained.

    For arguments, errors and limitations, see `parameter`.

    Example:
        >>> import sharedtree as st, jax
        >>> class Counter(st.Module):
        ...     def __init__(self):
        ...         self.calls = st.state_field(0)
        >>> jax.tree.leaves(Counter())
        [0]
    """
    return _marked(STATE, "`sharedtree.state_field`", value, options)


def _marked(kind: AttributeKind, function_name: str, value: Any, options: dict[str, Any]) -> Any:
    """Returns a marked value, or without a value a field of a dataclass that declares the kind.

    Args:
        kind: the kind of the attribute.
        function_name: the name of the public function, for errors.
        value: the value; `_NO_VALUE` if there is none.
        options: options for the field.
    """
    if value is _NO_VALUE:
        return assigning.field_declaring(kind, **options)
    if options:
        raise TypeError(f"{function_name} takes a value, or the options of a field without a value; not both.")
    require_markable(value, kind, f"The value passed to {function_name}")
    return Marked(kind, value)


class Module(kinds.HasKinds):
    """Mutable pytree. Subclasses assign attributes in `__init__`, and in other methods if they like.

    The kind of an attribute follows from the assigned value:

    - `st.parameter(x)`: traced, and trainable;
    - `st.state_field(x)`, and an array without a mark: traced, not trainable;
    - a module of any library, or a container that holds arrays or modules: a sub-tree;
    - anything else (a function, a string, a number, a tuple of numbers): static, part of the structure.

    An attribute keeps its mark when another value is assigned, and loses it when it is deleted. A class may be a
    dataclass (`@dataclasses.dataclass(eq=False)`). Its fields declare `weight: jax.Array = st.parameter()`, or
    `= equinox.field(static=True)` for a value that is static even if it is an array.

    Modules compare and hash by identity. `copy.copy` makes a module with the same children, and `copy.deepcopy` a
    module with copies of the children. `pickle` works if the class can be imported. All of these keep shared objects
    shared.

    Example:
        >>> import jax, jax.numpy as jnp, sharedtree as st
        >>> class Linear(st.Module):
        ...     def __init__(self, inputs, outputs, *, key):
        ...         self.weight = st.parameter(jax.random.normal(key, (inputs, outputs)))
        ...         self.calls = st.state_field(jnp.array(0))
        ...         self.activation = jax.nn.relu
        ...     def __call__(self, x):
        ...         self.calls = self.calls + 1
        ...         return self.activation(x @ self.weight)
        >>> linear = Linear(2, 3, key=jax.random.key(0))
        >>> linear
        Linear(
          weight=parameter(f32[2,3]),
          calls=state_field(weak_i32[]),
          activation=<function relu>
        )
        >>> y = st.jit(lambda linear, x: linear(x), in_place=True)(linear, jnp.ones(2))
        >>> int(linear.calls)
        1

    Limitations: attributes live in `__dict__`, so classes have no slots. Do not subclass a `Module` and another pytree
    class at once; hold one in an attribute of the other instead.
    """

    __slots__ = ()

    def __init_subclass__(cls, **options: Any) -> None:
        """Checks a new class, and registers it with JAX."""
        super().__init_subclass__(**options)
        assigning.require_soundness(cls)
        _register(cls)

    # Hidden from type checkers: they would accept any attribute of a class with a `__setattr__`.
    if not TYPE_CHECKING:

        def __setattr__(self, name: str, value: Any) -> None:
            # A property or another descriptor of the class gets the value as it is.
            if not assigning.is_assigned_by_class(type(self), name):
                value = assigning.assign(self, name, value)
            super().__setattr__(name, value)

        def __delattr__(self, name: str) -> None:
            super().__delattr__(name)
            assigning.forget(self, name)

    def parameters(self) -> Self:
        """Returns the trainable part: a module of the same shape and ties, with `None` for every other leaf.

        Trainable are the attributes marked by `st.parameter`, every inexact array in modules of other libraries, and
        the values of `nnx.Param`s in modules of Flax NNX. Nothing below `st.state_field` is trainable. A tied leaf is
        trainable if it is trainable at one of its paths.

        Returns:
            A module of new nodes. Arrays are aliased, and static attributes are those of the module.

        Raises:
            CycleError: if the module contains itself.

        Cost: one walk over the nodes.

        Example:
            >>> import jax, jax.numpy as jnp, sharedtree as st
            >>> class Net(st.Module):
            ...     def __init__(self):
            ...         self.weight, self.mean = st.parameter(jnp.ones(2)), jnp.zeros(2)
            >>> Net().parameters()
            Net(weight=parameter(f32[2]), mean=None)
        """
        return _trainable_part(self)

    def merge(self, parameters: Self) -> Self:
        """Returns a module with new values for its trainable part: the inverse of `parameters`.

        Args:
            parameters: a result of `parameters`, with updated values. Where it has `None`, the value of this module
                stays. State and static attributes, and attributes that only one of the two has, are those of this
                module.

        Returns:
            A module of new nodes with the ties of this one. Arrays are aliased. Neither of the two is changed.

        Raises:
            SharingMismatchError: if `parameters` has another shape, or lacks a tie of the module. Names the paths.

        Cost: a walk over the nodes of each.

        Example:
            >>> import jax, jax.numpy as jnp, sharedtree as st
            >>> class Net(st.Module):
            ...     def __init__(self):
            ...         self.weight, self.mean = st.parameter(jnp.ones(2)), jnp.zeros(2)
            >>> net = Net()
            >>> halved = net.merge(st.tree.map(lambda x: x / 2, net.parameters()))
            >>> halved.weight, halved.mean is net.mean
            (Array([0.5, 0.5], dtype=float32), True)
        """
        return _merged(self, parameters)

    def __copy__(self) -> Self:
        # `copied` calls the function with the kind and the value of each attribute. Here it returns the value itself.
        return kinds.copied(self, lambda _, value: value)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Copies the module for `copy.deepcopy`. Of static values only mutable ones are copied.

        A copy of `jax.nn.relu`, for example, would be another function, and the copied module would be traced anew.
        """
        # The memo maps ids to copies. Under one more key it has the copies of static values so far.
        copies = cast("dict[Any, Any]", memo).setdefault(_COPIES, IdentityDict[Any]())

        def copied(kind: Any, value: Any) -> Any:
            """Copies the value of an attribute."""
            return copy_of(value, copies) if kind == STATIC else copy.deepcopy(value, memo)

        return kinds.copied(self, copied, memo)

    def __reduce__(self) -> Any:
        """Tells pickle how to make the module: an empty one with its kinds. Then pickle sets the attributes."""
        # A class with a `__getstate__` decides itself what is pickled.
        if type(self).__getstate__ is not object.__getstate__:
            state = self.__getstate__()
        else:
            # Pickle finds plain functions by name, but `jax.nn.relu` is an object. `with_names` puts its name in its
            # place, and loading looks the name up.
            state = {name: with_names(value) for name, value in kinds.attributes_of(self).items()}
        return kinds.with_kinds, (type(self), kinds.stored_kinds(self)), state

    def __repr__(self) -> str:
        return eqx.tree_pformat(self)

    def __pdoc__(self, **options: Any) -> "wl.AbstractDoc":
        """Prints the module for `equinox.tree_pformat`: each module once, and each mark as a call of its function."""
        # Only wadler_lindig calls this method, so it is installed.
        import wadler_lindig as wl

        # wadler_lindig passes the options on to all nodes below. So they carry the set of modules printed so far.
        seen: IdentitySet = options.setdefault("sharedtree_seen", IdentitySet())
        name = type(self).__name__
        # `add` returns False for an object that is in the set already.
        if not seen.add(self):
            return wl.TextDoc(f"<{name}, as above>")
        marks = kinds.stored_kinds(self).by_name
        attributes: list[wl.AbstractDoc] = []
        for attribute, value in kinds.attributes_of(self).items():
            doc, mark = _doc_of(value, options), _MARKS.get(marks.get(attribute, STATIC))
            if mark is not None and value is not None:
                doc = wl.TextDoc(f"{mark}(") + doc + wl.TextDoc(")")
            attributes.append(wl.TextDoc(f"{attribute}=") + doc)
        indent = options.get("indent", 2)
        return wl.bracketed(wl.TextDoc(f"{name}("), attributes, wl.comma, wl.TextDoc(")"), indent)


def _doc_of(value: Any, options: dict[str, Any]) -> "wl.AbstractDoc":
    """Prints the value of an attribute. A function is printed by its name, without the address in its `repr`."""
    import wadler_lindig as wl

    name = getattr(value, "__name__", None)
    if callable(value) and not isinstance(value, (type, Module)) and isinstance(name, str):
        return wl.TextDoc(f"<function {name}>")
    return wl.pdoc(value, **options)


_COPIES = "copies of static values, by sharedtree"
"""The key in the memo of `copy.deepcopy` for the copies of static values."""

# Kind of an attribute → the name of the function that marks it.
_MARKS = {PARAMETER: "parameter", STATE: "state_field"}


def _register(cls: type) -> None:
    """Registers a class with JAX. All classes have the same flatten functions. These read the kinds of an instance."""
    jtu.register_pytree_with_keys(
        cls, kinds.take_apart_with_keys, functools.partial(kinds.put_together, cls), kinds.take_apart
    )


_register(Module)


# --- the trainable part -----------------------------------------------------------------------------------------------
#
# Whether a leaf is trainable depends on the attributes on its path. If one of them has the mark of `st.state_field`, no
# leaf below it is trainable. Otherwise the innermost module decides. So a walk from the root carries along the *rule*
# for leaves: "always", "never", "if inexact" or "if marked".
#
#     Net(head=Linear(weight=parameter(w), bias=b), target=state_field(<the same Linear>))
#
# Here `.head.weight` is trainable. `.head.bias` is not, and no leaf below `.target` is. The two linears are one object:
# its weight is trainable, because it is trainable at one of its paths.


def _trainable_part(module: T) -> T:
    """Returns the trainable part of a module, for `Module.parameters`."""
    dag = walk_exactly(module)
    trainable_leaves = _trainable_leaves(dag)
    return rebuilt(
        dag.root, _expansion(dag), lambda record: dag.objects[record] if record in trainable_leaves else None
    )


def _merged(module: T, parameters: Any) -> T:
    """Returns a module with new values for its trainable leaves, for `Module.merge`.

    Args:
        module: the module. It is not changed.
        parameters: a module of the same shape with the new values. Where it has None, the old value stays.

    Raises:
        SharingMismatchError: if the shapes differ, or `parameters` has two objects for one leaf of the module.
    """
    # Static values count as leaves here, so `objects` has the value of each record that is no node.
    dag, parameter_dag = walk_exactly(module), walk_exactly(parameters)
    trainable_leaves = _trainable_leaves(dag)
    # Leaf of the module → record of its new value, and the first path at which it was found.
    sources: dict[int, _NewValue] = {}
    for record, source, path in _side_by_side(dag, parameter_dag):
        if record not in trainable_leaves or parameter_dag.objects[source] is None:
            continue
        first_source, first_path = sources.setdefault(record, _NewValue(source, path))
        # A tied leaf has several places, and its new values must be one object there.
        if first_source != source and not are_one_value(parameter_dag, first_source, source):
            first_text, text = jtu.keystr(first_path), jtu.keystr(path)
            raise SharingMismatchError(
                f"`{first_text}` and `{text}` are one leaf in the module, but two objects in the parameters.\n"
                "One leaf can take only one object.\n"
                f"{how_to_tie('parameters', 'module.parameters()', in_containers=False)}",
                (first_text, text),
            )
    new_leaves = {record: parameter_dag.objects[source.record] for record, source in sources.items()}
    # Notes about ties that belong to the old leaves hold for the new ones, too.
    hand_on([dag.objects[record] for record in new_leaves], list(new_leaves.values()))
    return rebuilt(dag.root, _expansion(dag), lambda record: new_leaves.get(record, dag.objects[record]))


class _NewValue(NamedTuple):
    """New value of a leaf.

    Attributes:
        record: its record in the parameters.
        path: its path there.
    """

    record: int
    path: Path


def _expansion(tree: FlatDag) -> Callable[[int], tuple[Op, Sequence[int]]]:
    """Returns a function: record → its operation and children. For `rebuilt`, static values are leaves here, too."""

    def expand(record: int) -> tuple[Op, Sequence[int]]:
        op, children = tree.records[record]
        return (op, children) if type(op) is Node else (LEAF, ())

    return expand


def _trainable_leaves(tree: FlatDag) -> set[int]:
    """Returns the records of the leaves trainable at one of their paths at least."""
    leaves: set[int] = set()
    # A record is visited once for each rule that holds at one of its paths.
    visited: set[tuple[int, Trained]] = set()
    stack: list[tuple[int, Trained]] = [(tree.root, "if marked")]
    while stack:
        record, rule = stack.pop()
        if (record, rule) in visited:
            continue
        visited.add((record, rule))
        op, children = tree.records[record]
        if type(op) is Node:
            stack.extend(zip(children, _rules_below(op, len(children), rule), strict=True))
        elif op is LEAF and _is_trainable(tree.objects[record], rule):
            leaves.add(record)
    return leaves


def _rules_below(node: Node, num_children: int, rule: Trained) -> Sequence[Trained]:
    """Returns the rule for each child of a node, from the rule for the node."""
    # A plain container has no attributes, so it passes the rule on.
    if rule == "never" or node.type.is_plain:
        return [rule for _ in range(num_children)]
    return trained_below(node.type.cls, node.aux.peek(), num_children)


def _is_trainable(leaf: Any, rule: Trained) -> bool:
    """Returns True if a leaf is trainable under a rule. "if marked" is the rule of leaves without a mark."""
    return rule == "always" or (rule == "if inexact" and jnp.issubdtype(jnp.result_type(leaf), jnp.inexact))


def _side_by_side(module: FlatDag, parameters: FlatDag) -> Iterator[tuple[int, int, Path]]:
    """Walks a module and its parameters together.

    Attributes of modules are found by name. Attributes in only one of the two modules are skipped.

    Yields:
        record of a leaf or static value of the module, record at the same place of the parameters, and a path. Each
        pair of records comes once.

    Raises:
        SharingMismatchError: if the two differ in a class or in a number of children.
    """
    visited: set[tuple[int, int]] = set()
    stack: list[tuple[int, int, Path]] = [(module.root, parameters.root, ())]
    while stack:
        record, source, path = stack.pop()
        if (record, source) in visited:
            continue
        visited.add((record, source))
        (op, children), (source_op, source_children) = module.records[record], parameters.records[source]
        # A module without trainable leaves may be None in the parameters.
        if type(op) is not Node or (type(source_op) is Node and source_op.type.cls is type(None)):
            yield record, source, path
            continue
        if type(source_op) is not Node or source_op.type.cls is not op.type.cls:
            raise _of_another_shape(path, op, source_op)
        if kinds.kinds_in(op.aux.peek()) is not None:
            # A `Module`. A function may have assigned new attributes, so the two may have different ones.
            source_child_of = dict(zip(source_op.keys, source_children, strict=True))
            common = [(key, child) for key, child in zip(op.keys, children, strict=True) if key in source_child_of]
            steps = [(child, source_child_of[key], key) for key, child in common]
        elif op.keys != source_op.keys:
            raise _of_another_shape(path, op, source_op)
        else:
            steps = list(zip(children, source_children, op.keys, strict=True))
        stack.extend((child, source_child, (*path, key)) for child, source_child, key in reversed(steps))


def _of_another_shape(path: Path, op: Node, source_op: Op) -> SharingMismatchError:
    """Returns the error for parameters that have another class or other children at a path than the module."""
    text, name = jtu.keystr(path), op.type.cls.__name__
    source_name = source_op.type.cls.__name__ if type(source_op) is Node else "leaf"
    if type(source_op) is Node and source_op.type.cls is op.type.cls:
        fact = f"The `{name}`{f' at `{text}`' if text else ''} has other children in the parameters than in the module."
    elif not text:
        fact = f"The parameters are a `{source_name}`, where the module is a `{name}`."
    else:
        fact = f"The parameters have a `{source_name}` at `{text}`, where the module has a `{name}`."
    return SharingMismatchError(
        f"{fact}\n"
        "Merge parameters that come from `module.parameters()` of the same module. A function `update` may change each "
        "of them:\n"
        "    params = sharedtree.tree.map(update, module.parameters())\n"
        "    module = module.merge(params)",
        (text,),
    )
