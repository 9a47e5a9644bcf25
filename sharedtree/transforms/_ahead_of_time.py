"""Ahead-of-time compilation: JAX's stages with identities preserved, and the arguments that a program was made for."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import tree_util as jtu

from ..core._call_arguments import Arguments
from ..core._flat_dags import FlatDag
from ..core._jax_internals import api_boundary
from ..core._pack_and_unpack import unpack
from ..core._structure import LEAF, Node, Structure
from ..ties._policy_and_context import Policy
from ._caller_side import Call, enter
from ._joining_trees import Sides, holds_modules, join
from ._leaf_groups import LeafGroup, LeafSelection, gather_leaves


def shapes_of(tree: FlatDag) -> Callable[[int], Any]:
    """Number → what is passed through, with shapes in place of arrays."""
    made: dict[int, Any] = {}

    def shaped(number: int) -> Any:
        for i in range(len(made), number + 1):  # children come before their parents
            op, children = tree.records[i]
            if op is LEAF:
                leaf = tree.objects[i]
                made[i] = leaf if isinstance(leaf, jax.Ref) else jax.eval_shape(lambda x: x, leaf)
            elif type(op) is Node:
                made[i] = op.type.put_together(op.aux.thaw(), [made[child] for child in children])
            else:
                made[i] = tree.objects[i]
        return made[number]

    return shaped


@dataclasses.dataclass(frozen=True)
class Program:
    """How what was compiled is called.

    Attributes:
        jitted: what it was compiled from.
        policy: under which.
        used: of the leaves, which the program uses.
        names: of the positional arguments that it was compiled for; None for static ones, which are left out in calls.
        static: the keyword arguments that were static.
        structure: of the arguments that it was compiled for.
        selections: how these were grouped by label.
    """

    jitted: Any
    policy: Policy
    used: Sequence[bool]
    names: tuple[str | None, ...]
    static: tuple[str, ...]
    structure: Structure
    selections: Sequence[LeafSelection]

    def in_arguments(self, value: Any) -> Any:
        """What JAX says of each leaf of the groups, as it says it of arguments: a tuple and a dict."""
        leaves = iter(jtu.tree_leaves(value, is_leaf=lambda leaf: leaf is None))
        groups = [
            LeafGroup([next(leaves) for _ in range(selection.num_leaves)], selection) for selection in self.selections
        ]
        return _without_statics(unpack(self.structure, gather_leaves(groups)))

    def __call__(self, compiled: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Calls it with the arguments that are not static."""
        jitted = self.jitted
        each = iter(args)
        own = [None if name is None else next(each, _MISSING) for name in self.names]
        more = list(each)
        names = (*self.names[: len(own)], *[f"args[{len(own) + i}]" for i in range(len(more))])
        given = [(name, arg) for name, arg in zip(names, (*own, *more), strict=True) if arg is not _MISSING]
        arguments = Arguments(
            tuple([name for name, _ in given]),
            [arg for _, arg in given],
            {**kwargs, **dict.fromkeys(self.static)},
            self.static,
        )
        with enter(arguments, jitted.rules(self.policy), jitted.grouping(self.policy, arguments)) as call:
            jitted.executable(call)
            made = f"`{jitted.names.definition.name}` was compiled"
            require_made_for(self.structure, call, made, "f.lower(*args).compile()")
            result = compiled(*call.groups)

            def used() -> Sequence[Any]:
                leaves = [leaf for group in call.groups for leaf in group.leaves]
                return [leaf for leaf, yes in zip(leaves, self.used, strict=True) if yes]

            return jitted.leave(result, call, self.policy, used)


_MISSING = object()


def require_made_for(known: Any, call: Call, made: str, again: str) -> None:
    """Raises unless the arguments of a call are those that a program was made for.

    Args:
        known: the structure of the arguments that it was made for.
        call: the arguments.
        made: what the program is: `f` was compiled.
        again: how to make one for `args`, as code.

    Raises:
        SharingMismatchError: if their ties, classes or static values are others.
    """
    if call.tree.structure is known:
        return
    before = FlatDag.of(known, [None] * len(known.records))
    if not holds_modules(before) and not holds_modules(call.tree):
        _refuse_as_jax(known, call)
    words = Sides("", "in the first", "in these", program=made, again=again)
    join(before, call.tree, words, exact=True)
    join(call.tree, before, words._replace(before=words.after, after=words.before), exact=True)


def _refuse_as_jax(known: Structure, call: Call) -> None:
    """Raises what JAX says of other arguments, where there is nothing that it does not know."""
    then, keywords = _without_statics(unpack(known, [jax.ShapeDtypeStruct((), jnp.float32)] * known.num_leaves))
    compiled = jax.jit(lambda *args, **kwargs: None).lower(*then, **keywords).compile()
    given, keywords = _without_statics(call.arguments)
    compiled(*given, **keywords)


def _without_statics(own: Arguments) -> tuple[tuple[Any, ...], dict[str, Any]]:
    given = tuple([arg for name, arg in zip(own.names, own.args, strict=True) if name is not None])
    return given, {name: value for name, value in own.kwargs.items() if name not in own.static}


_OF_ARGUMENTS = ("args_info", "in_avals", "input_formats", "input_layouts", "input_shardings")
_OF_RESULTS = ("out_avals", "out_info", "output_formats", "output_layouts", "output_shardings")


class Stage:
    """A stage of ahead-of-time compilation (`Traced`, `Lowered`, `Compiled`) of a function with identities preserved.

    Has every attribute of JAX's own stage, and says of arguments and results what that says of groups. `.lower()` and
    `.compile()` lead to the next one. The last one is called with the arguments of the function but the static ones,
    as JAX's.
    """

    def __init__(self, stage: Any, call: Program) -> None:
        self._stage = stage
        self._call = call

    @api_boundary
    def lower(self, *args: Any, **kwargs: Any) -> "Stage":
        """The next stage, lowered."""
        return Stage(self._stage.lower(*args, **kwargs), self._call)

    @api_boundary
    def compile(self, *args: Any, **kwargs: Any) -> "Stage":
        """The next stage, compiled."""
        return Stage(self._stage.compile(*args, **kwargs), self._call)

    @api_boundary
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(self._stage, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name in ("in_tree", "out_tree"):
            return jtu.tree_structure(self.args_info if name == "in_tree" else self.out_info)
        value = getattr(self._stage, name)
        if name in _OF_ARGUMENTS:
            return self._call.in_arguments(value)
        return value.tree() if name in _OF_RESULTS and type(value) is LeafGroup and value.is_tree else value

    def __repr__(self) -> str:
        return f"Stage({self._stage!r})"
