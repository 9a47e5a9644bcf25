"""Ahead-of-time compilation: JAX's stages with identities preserved.

    compiled = jit(f).lower(net, x).compile()     Stage(Compiled, Program(…, structure of (net, x)))
    compiled(net, x)                              packed again: the structure must be the same

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
        program: how it is called.
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
        # JAX's own trees would be those of the leaf groups.
        if name in ("in_tree", "out_tree"):
            return jtu.tree_structure(self.args_info if name == "in_tree" else self.out_info)
        value = getattr(self._stage, name)
        if name in _ABOUT_ARGUMENTS:
            return self._program.in_shape_of_arguments(value)
        return value.tree() if name in _ABOUT_RESULTS and type(value) is LeafGroup and value.is_tree else value

    def __repr__(self) -> str:
        return f"Stage({self._stage!r})"


@dataclasses.dataclass(frozen=True)
class Program:
    """Everything needed to call a compiled function. No argument of the first call is kept.

    Attributes:
        jitted: the wrapper of the function.
        policy: the policy at compilation.
        is_used: for each leaf of the groups, True if the program uses it. Empty if nothing can pass through.
        names: names of the positional arguments. None for static ones, left out in calls.
        static: names of the static keyword arguments.
        structure: structure of the arguments.
        selections: the leaf groups of the arguments.
    """

    jitted: Any
    policy: Policy
    is_used: Sequence[bool]
    names: tuple[str | None, ...]
    static: tuple[str, ...]
    structure: Structure
    selections: Sequence[LeafSelection]

    def in_shape_of_arguments(self, value: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Builds the arguments, a tuple and a dict, from entries for the leaves of the groups.

        Args:
            value: a tree with one entry for each leaf of the groups. An entry may be None.
        """
        entries = iter(jtu.tree_leaves(value, is_leaf=lambda leaf: leaf is None))

        def group_with_entries(selection: LeafSelection) -> LeafGroup:
            return LeafGroup([next(entries) for _ in range(selection.num_leaves)], selection)

        groups = [group_with_entries(selection) for selection in self.selections]
        return _without_statics(unpack(self.structure, gather_leaves(groups)))

    def __call__(self, compiled: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Calls the compiled function.

        Args:
            compiled: JAX's last stage.
            args: the positional arguments, without static ones.
            kwargs: the keyword arguments, without static ones.

        Raises:
            SharingMismatchError: if the arguments differ in ties, classes or static values from the first ones.
        """
        jitted = self.jitted
        # Static arguments are left out in a call. None stands in their places.
        remaining = iter(args)
        named_args = [(name, None if name is None else next(remaining, _MISSING)) for name in self.names]
        # The check below reports arguments that are missing, and those beyond the ones compiled for.
        named_args += [(f"args[{i}]", arg) for i, arg in enumerate(remaining, len(self.names))]
        named_args = [(name, arg) for name, arg in named_args if arg is not _MISSING]
        arguments = Arguments(
            tuple([name for name, _ in named_args]),
            [arg for _, arg in named_args],
            {**kwargs, **dict.fromkeys(self.static)},
            self.static,
        )
        with enter(arguments, jitted.rules(self.policy), jitted.grouping(self.policy, arguments)) as call:
            # Refuses arrays that are donated and kept, and copies those that are donated twice.
            jitted.executable(call)
            description = f"`{jitted.names.definition.name}` was compiled"
            require_made_for(self.structure, call, description, "f.lower(*args).compile()")
            result = compiled(*call.groups)
            return jitted.leave(result, call, self.policy, lambda: used_leaves(call, self.is_used))


_MISSING = object()


def used_leaves(call: Call, is_used: Sequence[bool]) -> list[Any]:
    """Collects the leaves of a call used by its computation.

    Args:
        call: the call.
        is_used: for each leaf of its groups, True if it is used.
    """
    leaves = [leaf for group in call.groups for leaf in group.leaves]
    return [leaf for leaf, is_leaf_used in zip(leaves, is_used, strict=True) if is_leaf_used]


def shapes_of(tree: FlatDag) -> Callable[[int], Any]:
    """Returns a function from a record to its object, with `jax.ShapeDtypeStruct`s in place of arrays.

    One record always gives the same object.

    Args:
        tree: the arguments of a call, with their objects.
    """
    abstract_objects: dict[int, Any] = {}

    def abstract_object(record: int) -> Any:
        """Builds the objects up to this record, as far as they are missing, and returns its own."""
        # Children come before their parents, so a prefix of the table is complete.
        for i in range(len(abstract_objects), record + 1):
            op, children = tree.records[i]
            if op is LEAF:
                # A reference is a place, which has no abstract form.
                leaf = tree.objects[i]
                abstract_objects[i] = leaf if isinstance(leaf, jax.Ref) else jax.eval_shape(lambda x: x, leaf)
            elif type(op) is Node:
                abstract_children = [abstract_objects[child] for child in children]
                abstract_objects[i] = op.type.put_together(op.aux.thaw(), abstract_children)
            else:
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
    if call.tree.structure is structure:
        return
    expected = FlatDag.of(structure, [None] * len(structure.records))
    if not holds_modules(expected) and not holds_modules(call.tree):
        _raise_vanilla_error(structure, call)
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
    """
    scalars = [jax.ShapeDtypeStruct((), jnp.float32)] * structure.num_leaves
    expected_args, expected_kwargs = _without_statics(unpack(structure, scalars))
    compiled = jax.jit(lambda *args, **kwargs: None).lower(*expected_args, **expected_kwargs).compile()
    args, kwargs = _without_statics(call.arguments)
    compiled(*args, **kwargs)


def _without_statics(arguments: Arguments) -> tuple[tuple[Any, ...], dict[str, Any]]:
    args = tuple([arg for name, arg in zip(arguments.names, arguments.args, strict=True) if name is not None])
    return args, {name: value for name, value in arguments.kwargs.items() if name not in arguments.static}
