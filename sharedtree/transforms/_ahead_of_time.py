"""Ahead-of-time compilation: JAX's stages with identities preserved.

    compiled = jit(f).lower(net, x).compile()     Stage(Compiled, Program(…, structure of (net, x)))
    compiled(net, x)                              packed again: the structure must be the same

JAX's stages are about an *inner function*, which gets *leaf groups* in place of the user's arguments: the distinct
leaves of all arguments, those that `jit` treats alike in one group. The *structure* describes everything else: classes,
static values and ties. A group has a *selection*, which names the structure, and the leaves of it that the group has.

A compiled program cannot be traced again. So a call with other ties, classes or static values is an error that names
the difference.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import tree_util as jtu

from ..core._call_arguments import Arguments
from ..core._jax_internals import api_boundary
from ..core._pack_and_unpack import unpack
from ..core._structure import LEAF, FlatDag, Node, Structure
from ..ties._policy_and_context import Policy
from ._caller_side import Call, enter
from ._joining_trees import Sides, holds_modules, join
from ._leaf_groups import LeafGroup, LeafSelection, gather_leaves

_ABOUT_ARGUMENTS = ("args_info", "in_avals", "input_formats", "input_layouts", "input_shardings")
"""Attributes of JAX's stages with one value for each argument."""

_ABOUT_RESULTS = ("out_avals", "out_info", "output_formats", "output_layouts", "output_shardings")
"""Attributes of JAX's stages with one value for each result."""


class Stage:
    """A stage of ahead-of-time compilation (`Traced`, `Lowered`, `Compiled`) of a function with identities preserved.

    It has every attribute of JAX's own stage. Attributes about arguments and results have the user's shapes, without
    leaf groups. `.lower()` and `.compile()` lead to the next stage. The last one is called with the arguments of the
    function except the static ones, as JAX's is.

    Args:
        stage: JAX's stage of the inner function.
        program: everything needed to call the compiled function.
    """

    def __init__(self, stage: Any, program: "Program") -> None:
        self._stage = stage
        self._program = program

    @api_boundary
    def lower(self, *args: Any, **kwargs: Any) -> "Stage":
        """Returns the next stage, lowered."""
        return Stage(self._stage.lower(*args, **kwargs), self._program)

    @api_boundary
    def compile(self, *args: Any, **kwargs: Any) -> "Stage":
        """Returns the next stage, compiled."""
        return Stage(self._stage.compile(*args, **kwargs), self._program)

    @api_boundary
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._program(self._stage, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        """Returns an attribute of JAX's stage. If it is about arguments or results, it gets the user's shapes."""
        # The trees of JAX's stage are those of the leaf groups. So they are read off an attribute in the user's shapes.
        if name in ("in_tree", "out_tree"):
            return jtu.tree_structure(self.args_info if name == "in_tree" else self.out_info)
        value = getattr(self._stage, name)
        if name in _ABOUT_ARGUMENTS:
            return self._program.in_shape_of_arguments(value)
        # The value for results is a leaf group with an entry in the place of each leaf. A group that lacks some leaves,
        # or refers to objects of the caller's, cannot be built as a tree, and stays a group.
        if name in _ABOUT_RESULTS and type(value) is LeafGroup and value.is_tree:
            return value.tree()
        return value

    def __repr__(self) -> str:
        return f"Stage({self._stage!r})"


@dataclasses.dataclass(frozen=True)
class Program:
    """Everything needed to call a compiled function. No argument of the first call is kept.

    Attributes:
        jitted: the wrapper of the function, a `JittedTransform`.
        policy: the policy at compilation: which objects carry identity, and whether changes are written back.
        is_used: for each leaf of the groups, True if the program uses it. Empty if no object of the caller's can be in
            the result.
        names: names of the positional arguments. None for static ones, left out in calls.
        static: names of the static keyword arguments.
        structure: structure of the arguments.
        selections: the selections of the arguments' leaf groups, one for each.
    """

    jitted: Any
    policy: Policy
    is_used: Sequence[bool]
    names: tuple[str | None, ...]
    static: tuple[str, ...]
    structure: Structure
    selections: Sequence[LeafSelection]

    def in_shape_of_arguments(self, value: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Builds the arguments, a tuple and a dict, with entries such as shapes in the places of leaves.

        Args:
            value: a tree with one entry for each leaf of the groups, in their order. An entry may be None.
        """
        # Without `is_leaf`, JAX would drop entries that are None.
        entries = iter(jtu.tree_leaves(value, is_leaf=lambda entry: entry is None))

        def group_with_entries(selection: LeafSelection) -> LeafGroup:
            return LeafGroup([next(entries) for _ in range(selection.num_leaves)], selection)

        groups = [group_with_entries(selection) for selection in self.selections]
        # `gather_leaves` merges the groups into one list in flatten order.
        return _without_statics(unpack(self.structure, gather_leaves(groups)))

    def __call__(self, compiled: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Calls the compiled function, and returns its result with objects shared as in the function's own result.

        Args:
            compiled: JAX's last stage.
            args: the positional arguments, without static ones.
            kwargs: the keyword arguments, without static ones.

        Raises:
            SharingMismatchError: if the arguments differ in ties, classes or static values from the first ones.
        """
        jitted = self.jitted
        arguments = self._name_arguments(args, kwargs)
        # `enter` packs the arguments and groups their leaves.
        with enter(arguments, jitted.rules(self.policy), jitted.grouping(self.policy, arguments)) as call:
            # Refuses arrays that are donated and kept, and copies those that are donated twice.
            jitted.copy_arrays_donated_twice(call)
            description = f"`{jitted.names.definition.name}` was compiled"
            require_made_for(self.structure, call, description, "f.lower(*args).compile()")
            result = compiled(*call.groups)
            # An object of the caller's that the function returned unchanged may be in the result, but only if JAX would
            # leave its arrays where they are. That depends on the leaves that the program uses.
            return jitted.build_result(result, call, self.policy, lambda: used_leaves(call, self.is_used))

    def _name_arguments(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Arguments:
        """Makes one node of the arguments of a call, with the names that they had at compilation.

        Accepts too few and too many arguments. `require_made_for` raises the error for them.
        """
        names: list[str | None] = []
        values: list[Any] = []
        remaining = iter(args)
        for name in self.names:
            # Static arguments are left out in a call. None stands in their places.
            value = None if name is None else next(remaining, _MISSING)
            if value is not _MISSING:
                names.append(name)
                values.append(value)
        # Arguments beyond the ones compiled for.
        for i, arg in enumerate(remaining, len(self.names)):
            names.append(f"args[{i}]")
            values.append(arg)
        return Arguments(tuple(names), values, {**kwargs, **dict.fromkeys(self.static)}, self.static)


_MISSING = object()
"""Marks an argument that a call does not have."""


def used_leaves(call: Call, is_used: Sequence[bool]) -> list[Any]:
    """Returns the leaves of a call that its computation uses.

    Args:
        call: the call.
        is_used: for each leaf of its groups, True if it is used.
    """
    leaves = [leaf for group in call.groups for leaf in group.leaves]
    return [leaf for leaf, is_leaf_used in zip(leaves, is_used, strict=True) if is_leaf_used]


def abstract_objects_of(tree: FlatDag) -> Callable[[int], Any]:
    """Returns a function: record of an object → the object, with `jax.ShapeDtypeStruct`s in place of arrays.

    One record always gives the same object. `eval_shape` puts these objects into its result, where the function returns
    objects of the caller's unchanged.

    Args:
        tree: the arguments of a call, with their objects. Its records are numbered, children before their parents.
    """
    # Record → its abstract object. It always has all records below some number.
    abstract_objects: dict[int, Any] = {}

    def abstract_object(record: int) -> Any:
        """Builds the objects up to this record, as far as they are missing, and returns the last of them."""
        # All children of a record come before it, so they are in the table when their parent is built.
        for i in range(len(abstract_objects), record + 1):
            op, children = tree.records[i]
            if op is LEAF:
                # A reference is a place in memory, and `jax.eval_shape` returns no place. So it stands for itself.
                leaf = tree.objects[i]
                abstract_objects[i] = leaf if isinstance(leaf, jax.Ref) else jax.eval_shape(lambda x: x, leaf)
            elif type(op) is Node:
                # A node is built anew from its auxiliary data and its children.
                abstract_children = [abstract_objects[child] for child in children]
                abstract_objects[i] = op.type.put_together(op.aux.thaw(), abstract_children)
            else:
                # A static leaf has no abstract form.
                abstract_objects[i] = tree.objects[i]
        return abstract_objects[record]

    return abstract_object


def require_made_for(structure: Any, call: Call, program: str, code: str) -> None:
    """Raises an error unless a program was made for arguments like those of a call.

    Args:
        structure: structure of the arguments for which the program was made.
        call: the call, with its arguments.
        program: first words of the error, such as "`f` was compiled".
        code: last words of the error: code to make another program, for `args`.

    Raises:
        SharingMismatchError: if the ties, classes or static values differ.
    """
    # Equal structures are one object, so `is` compares them.
    if call.tree.structure is structure:
        return
    expected = FlatDag.of(structure, [None] * len(structure.records))
    # Without modules, JAX has an error of its own for the difference, and it is better.
    if not holds_modules(expected) and not holds_modules(call.tree):
        _raise_vanilla_error(structure, call)
    # The names of the two trees in errors. The first field is a transform, and there is a program instead.
    sides = Sides("", "in the first", "in these", program=program, code=code)
    # `join` is called for its errors alone. An exact join raises for ties that only its first tree has, so the second
    # call, with the trees exchanged, raises for those that only the arguments of the call have.
    join(expected, call.tree, sides, exact=True)
    join(
        call.tree, expected, sides._replace(first_place=sides.second_place, second_place=sides.first_place), exact=True
    )


def _raise_vanilla_error(structure: Structure, call: Call) -> None:
    """Raises JAX's own error for mismatched arguments, by calling a dummy program compiled for the right ones.

    Returns if JAX accepts them.

    Args:
        structure: structure of the right arguments.
        call: the call, with its mismatched arguments.
    """
    # The dummy gets scalars for all leaves. JAX compares the trees of the arguments before their shapes.
    scalars = [jax.ShapeDtypeStruct((), jnp.float32)] * structure.num_leaves
    expected_args, expected_kwargs = _without_statics(unpack(structure, scalars))
    compiled = jax.jit(lambda *args, **kwargs: None).lower(*expected_args, **expected_kwargs).compile()
    args, kwargs = _without_statics(call.arguments)
    compiled(*args, **kwargs)


def _without_statics(arguments: Arguments) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the traced arguments: the positional ones as a tuple, and the keyword arguments as a dict."""
    # A static positional argument has None as its name.
    args = tuple([arg for name, arg in zip(arguments.names, arguments.args, strict=True) if name is not None])
    return args, {name: value for name, value in arguments.kwargs.items() if name not in arguments.static}
