"""`jax.eval_shape`, `jax.make_jaxpr` and their Equinox counterparts: a function is traced, and nothing is computed.

What would be arrays are `jax.ShapeDtypeStruct`s, in modules with the sharing of the function's results. A tied leaf is
one input of the jaxpr, and one output:

    make_jaxpr(lambda net: net)(Net(w, w))      { lambda ; a:f32[2]. let  in (a,) }

Nothing is written back in place, for there are no values.
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
from ._caller_side import Call, leave
from ._calls_with_operands import CallWithOperands, TakingOperands
from ._jit import CheckpointTransform, FilterJitTransform, JittedTransform, JitTransform
from ._joining_trees import holds_modules
from ._leaf_groups import LeafGroup, whole, without_statics
from .checks._lost_changes import only_traced

_VanillaJitted = type(VANILLA_JIT(lambda: None))

NO_KEYWORDS: Mapping[str, Any] = MappingProxyType({})


def eval_shape(crossing: CallWithOperands, fun: Any, args: Any = (), kwargs: Mapping[str, Any] = NO_KEYWORDS) -> Any:
    """`jax.eval_shape`, which asks `jax.jit`: of a function that is jitted already, with its own options."""
    if isinstance(fun, JittedTransform):
        return fun.eval_shape(*args, **kwargs)
    if not callable(fun):
        return crossing.transform(fun, *args, **kwargs)  # says best what is wrong
    jitted = _ShapesUnderJit(jax.jit, fun, crossing.policy, {})
    if type(fun) is not _VanillaJitted:
        return jitted.eval_shape(*args, **kwargs)
    with jitted.enter(args, dict(kwargs), crossing.policy) as call:
        if not holds_modules(call.tree):
            return crossing.transform(fun, *args, **kwargs)
    try:
        return jitted.eval_shape(*args, **kwargs)
    except ValueError as error:
        if "static arg" not in str(error):
            raise
        raise ValueError(
            f"`{name_of(fun, 'f')}` has static arguments, and only `jax.jit` knows which they are, so all were traced. "
            "Use `sharedtree.jit` in the place of `jax.jit`, with the same options."
        ) from error


def filter_eval_shape(
    crossing: CallWithOperands, fun: Any, args: Any = (), kwargs: Mapping[str, Any] = NO_KEYWORDS
) -> Any:
    """`equinox.filter_eval_shape`. A module that is the function is traced, too, as under `equinox.filter_jit`."""
    jitted = _ShapesUnderFilterJit(eqx.filter_jit, fun, _without_changes(crossing.policy), {})
    try:
        jitted.arguments(args, dict(kwargs))
    except TypeError:
        return crossing.transform(fun, *args, **kwargs)  # says best what is wrong
    return jitted.eval_shape(*args, **kwargs)


class _ShapesUnderJit(JitTransform):
    """A function under the `jax.jit` that `jax.eval_shape` asks, of which messages say what the user called."""

    @functools.cached_property
    def transform_name(self) -> str:
        return "jax.eval_shape"


class _ShapesUnderFilterJit(FilterJitTransform):
    """A function under the `equinox.filter_jit` that `equinox.filter_eval_shape` asks."""

    @functools.cached_property
    def transform_name(self) -> str:
        return "equinox.filter_eval_shape"


class MakeJaxprTransform(CheckpointTransform):
    """A function under `jax.make_jaxpr`, with identities preserved."""

    only_for_transform = frozenset({"axis_env", "return_shape"})

    def called(self, args: Sequence[Any], kwargs: dict[str, Any], policy: Policy) -> Any:
        """As the base, without changes in place."""
        with only_traced():
            return super().called(args, kwargs, _without_changes(policy))

    def leave(self, result: Any, call: Call, policy: Policy, used: Any = None) -> Any:
        """Coming out: the jaxpr, and the shapes if they were asked for."""
        if not self.options.get("return_shape"):
            return result
        jaxpr, shapes = result
        return jaxpr, leave((shapes,))


class FilterMakeJaxprTransform(MakeJaxprTransform):
    """A function under `equinox.filter_make_jaxpr`, with identities preserved."""

    caches_traces = False

    def transformed_for(self, policy: Policy, call: Call) -> Any:
        """As JAX's."""
        return jax.make_jaxpr(self.inner(policy), return_shape=True)

    def leave(self, result: Any, call: Call, policy: Policy, used: Any = None) -> Any:
        """The jaxpr, the shapes with `None` for what is static, and the other way round."""
        jaxpr, shapes = result
        structure = shapes.structure
        without = intern(tuple(without_statics(structure.records)), structure.root)
        return (
            jaxpr,
            leave((whole(shapes.leaves, without),)),
            leave((LeafGroup([None] * len(shapes.leaves), shapes.selection),)),
        )


def as_it_is(
    transform: Callable[..., Any], function: Callable[..., Any], policy: PolicyOption, options: dict[str, Any]
) -> Callable[..., Any]:
    """A function under a transform that hands on the very objects that it is given, as `jax.named_call` does."""
    return transform(function, **options)


def exporting(transform: Callable[..., Any], *how: Any) -> Any:
    """Programs are files, whose part of the package is imported when it is first used."""
    package = __name__.partition(".")[0]
    return importlib.import_module(f"{package}.serialise._export").exporting(transform, *how)


def _without_changes(policy: Policy) -> Policy:
    return dataclasses.replace(policy, in_place=False)


EVAL_SHAPE = TakingOperands(eval_shape)
FILTER_EVAL_SHAPE = TakingOperands(filter_eval_shape)
