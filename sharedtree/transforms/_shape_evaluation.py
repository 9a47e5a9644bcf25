"""`jax.eval_shape`, `jax.make_jaxpr` and their Equinox counterparts: a function is traced, and nothing is computed.

Results hold `jax.ShapeDtypeStruct`s in place of arrays, in modules with the sharing of the function's results. These
structs are called *shapes* here. A tied leaf is one input of the jaxpr, and one output:

    make_jaxpr(lambda net: net)(Net(w, w))      { lambda ; a:f32[2]. let  in (a,) }

There are no values, so with `in_place=True` nothing is written back.
"""

import dataclasses
import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import equinox as eqx
import jax

from ..core._structure import intern
from ..libraries._equinox import name_of
from ..ties._policy_and_context import Policy, PolicyOption
from ._adapter_names import VANILLA_JIT
from ._caller_side import Call, build_from_groups
from ._calls_with_operands import CallWithOperands, TakingOperands
from ._jit import CheckpointTransform, FilterJitTransform, JittedTransform, JitTransform
from ._joining_trees import holds_modules
from ._leaf_groups import LeafGroup, single_group, without_statics
from .checks._lost_changes import only_traced

# The class of the functions that `jax.jit` returns.
_VanillaJitted = type(VANILLA_JIT(lambda: None))

# An empty dictionary that cannot be changed, since it is a default.
NO_KEYWORDS: Mapping[str, Any] = MappingProxyType({})


def eval_shape(call: CallWithOperands, fun: Any, args: Any = (), kwargs: Mapping[str, Any] = NO_KEYWORDS) -> Any:
    """Adapter of `jax.eval_shape`. It uses the adapter of `jax.jit`, as JAX does.

    Args:
        call: the call of the transform.
        fun: the user's function. If it is under `sharedtree.jit`, it is traced with the options that it has there.
        args: positional arguments of the function.
        kwargs: its keyword arguments.

    Returns:
        The result of the function, with a `jax.ShapeDtypeStruct` for each traced leaf.

    Raises:
        ValueError: if the function is under `jax.jit` with static arguments, and an argument holds a module.
    """
    if isinstance(fun, JittedTransform):
        return fun.eval_shape(*args, **kwargs)
    if not callable(fun):
        # JAX itself says best what is wrong.
        return call.transform(fun, *args, **kwargs)
    # The last argument has the options of `jax.jit`: none.
    jitted = _ShapesUnderJit(jax.jit, fun, call.policy, {})
    if type(fun) is not _VanillaJitted:
        return jitted.eval_shape(*args, **kwargs)
    # The user has put the function under `jax.jit`, which does not show the options that it got. Without modules, the
    # vanilla `eval_shape` is called, which knows them.
    with jitted.enter(args, dict(kwargs), call.policy) as packed_call:
        if not holds_modules(packed_call.tree):
            return call.transform(fun, *args, **kwargs)
    try:
        return jitted.eval_shape(*args, **kwargs)
    except ValueError as error:
        # JAX names static arguments in its error, which has no type of its own.
        if "static arg" not in str(error):
            raise
        raise ValueError(
            f"`{name_of(fun, 'f')}` has static arguments, and only `jax.jit` knows which they are, so all were traced. "
            "Use `sharedtree.jit` in the place of `jax.jit`, with the same options."
        ) from error


def filter_eval_shape(call: CallWithOperands, fun: Any, args: Any = (), kwargs: Mapping[str, Any] = NO_KEYWORDS) -> Any:
    """Adapter of `equinox.filter_eval_shape`. If the function is a module, its leaves are traced too.

    Args:
        call: the call of the transform.
        fun: the user's function.
        args: positional arguments of the function.
        kwargs: its keyword arguments.

    Returns:
        The result of the function, with a `jax.ShapeDtypeStruct` for each array.
    """
    # The last argument has the options of `equinox.filter_jit`: none.
    jitted = _ShapesUnderFilterJit(eqx.filter_jit, fun, _not_in_place(call.policy), {})
    # Find out if the arguments fit the signature: `arguments` raises `TypeError` if not. Its result is not used.
    try:
        jitted.arguments(args, dict(kwargs))
    except TypeError:
        # Equinox raises its own error for these arguments.
        return call.transform(fun, *args, **kwargs)
    return jitted.eval_shape(*args, **kwargs)


class _ShapesUnderJit(JitTransform):
    """A function under `jax.jit` for `jax.eval_shape`, which the user called. Messages name this transform."""

    @functools.cached_property
    def transform_name(self) -> str:
        return "jax.eval_shape"


class _ShapesUnderFilterJit(FilterJitTransform):
    """A function under `equinox.filter_jit` for `equinox.filter_eval_shape`. Messages name this transform."""

    @functools.cached_property
    def transform_name(self) -> str:
        return "equinox.filter_eval_shape"


class MakeJaxprTransform(CheckpointTransform):
    """A function under `jax.make_jaxpr`, with identities preserved."""

    # Options without influence on a trace of the function.
    only_for_transform = frozenset({"axis_env", "return_shape"})

    def call_in_python(self, args: Sequence[Any], kwargs: dict[str, Any], policy: Policy) -> Any:
        """Traces the function. Changes of its arguments are not written back, and no warning says so."""
        with only_traced():
            return super().call_in_python(args, kwargs, _not_in_place(policy))

    def leave(self, result: Any, call: Call, policy: Policy) -> Any:
        """Returns the jaxpr. With the option `return_shape`, returns a pair of the jaxpr and the tree of shapes."""
        if not self.options.get("return_shape"):
            return result
        jaxpr, shapes = result
        return jaxpr, build_from_groups((shapes,))


class FilterMakeJaxprTransform(MakeJaxprTransform):
    """A function under `equinox.filter_make_jaxpr`, with identities preserved."""

    # Each call traces, so a retrace is not worth a warning.
    caches_traces = False

    def transformed_for(self, policy: Policy, call: Call) -> Any:
        """Returns the function under `jax.make_jaxpr`. It gets leaf groups, so Equinox need not filter."""
        return jax.make_jaxpr(self.inner(policy), return_shape=True)

    def leave(self, result: Any, call: Call, policy: Policy) -> Any:
        """Returns a triple, as Equinox does: the jaxpr, the tree of shapes, and the static part of the result.

        The shapes have `None` for static leaves, the static part has `None` for shapes.
        """
        jaxpr, shapes = result
        structure = shapes.structure
        # Static leaves become None in the shapes. The static part has the structure of the result, and None as leaves.
        structure_without_statics = intern(tuple(without_statics(structure.records)), structure.root)
        return (
            jaxpr,
            build_from_groups((single_group(shapes.leaves, structure_without_statics),)),
            build_from_groups((LeafGroup([None] * len(shapes.leaves), shapes.selection),)),
        )


def apply_vanilla(
    transform: Callable[..., Any], function: Callable[..., Any], policy: PolicyOption, options: dict[str, Any]
) -> Callable[..., Any]:
    """Applies the vanilla transform to a function, without any translation.

    It is the adapter of transforms that pass on the very objects that they get, as `jax.named_call` does.

    Args:
        transform: the vanilla transform.
        function: the user's function.
        policy: not used: there is nothing to preserve.
        options: options of the transform.
    """
    return transform(function, **options)


def exporting(transform: Callable[..., Any], *args: Any) -> Any:
    """Adapter of `jax.export.export`. The subpackage `serialise` implements it."""
    # Imported by name and only here: `serialise` imports this package, and costs time to import.
    package = __name__.partition(".")[0]
    return importlib.import_module(f"{package}.serialise._export").exporting(transform, *args)


def _not_in_place(policy: Policy) -> Policy:
    """Returns a policy with `in_place=False`. A trace without values has nothing to write back."""
    return dataclasses.replace(policy, in_place=False)


EVAL_SHAPE = TakingOperands(eval_shape)
FILTER_EVAL_SHAPE = TakingOperands(filter_eval_shape)
