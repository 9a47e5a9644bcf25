"""`jax.eval_shape`, `jax.make_jaxpr` and their Equinox counterparts: a function is traced, and nothing is computed.

What would be arrays are `jax.ShapeDtypeStruct`s, in modules with the sharing of the function's results. A tied leaf is
one input of the jaxpr, and one output:

    make_jaxpr(lambda net: net)(Net(w, w))      { lambda ; a:f32[2]. let  in (a,) }

Nothing is written back in place, for there are no values.
"""

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import equinox as eqx
import jax

from ..._context import Policy, PolicyOption, current_policy
from ..._equinox_internals import name_of
from ..._jax_internals import api_boundary
from ..._packed import Packed
from ..._structure import intern
from .._calling import calling
from .._crossed import with_packed
from .._crossing import Crossing
from .._likes import without_statics
from .._packing import Call
from ._checkpoint import CheckpointTransform
from ._jit import FilterJitTransform, JitTransform

_VanillaJitted = type(jax.jit(lambda: None))

NO_KEYWORDS: Mapping[str, Any] = MappingProxyType({})


def eval_shape(crossing: Crossing, fun: Any, args: Any = (), kwargs: Mapping[str, Any] = NO_KEYWORDS) -> Any:
    """`jax.eval_shape`, which asks `jax.jit`: of a function that is jitted already, with its own options."""
    if isinstance(fun, JitTransform):
        return fun.eval_shape(*args, **kwargs)
    jitted = JitTransform(jax.jit, fun, crossing.policy, {})
    if type(fun) is not _VanillaJitted:
        return jitted.eval_shape(*args, **kwargs)
    call = jitted.pack(args, dict(kwargs), crossing.policy)
    if not call.modules:
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


def filter_eval_shape(crossing: Crossing, fun: Any, args: Any = (), kwargs: Mapping[str, Any] = NO_KEYWORDS) -> Any:
    """`equinox.filter_eval_shape`. A module that is the function is traced, too, as under `equinox.filter_jit`."""
    policy = _without_changes(crossing.policy)
    jitted = FilterJitTransform(eqx.filter_jit, fun, policy, {})
    call = jitted.pack(args, dict(kwargs), policy)
    with calling(jitted.names, call):
        result = crossing.transform(jitted.inner(policy), *call.args, **call.kwargs)
    return jitted.finish(result, call, policy)


class MakeJaxprTransform(CheckpointTransform):
    """A function under `jax.make_jaxpr`, with identities preserved."""

    only_for_transform = frozenset({"axis_env", "return_shape"})

    @api_boundary
    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        policy = _without_changes(current_policy(self.policy))
        call = self.pack(args, kwargs, policy)
        with calling(self.names, call):
            result = self.transformed(policy)(*call.args, **call.kwargs)
        return self.finish(result, call, policy)


class FilterMakeJaxprTransform(MakeJaxprTransform):
    """A function under `equinox.filter_make_jaxpr`, with identities preserved."""

    caches_traces = False

    def finish(self, result: Any, call: Call, policy: Policy, used: Any = None) -> Any:
        """As the base, for the jaxpr, the shapes with `None` for what is static, and the other way round."""
        jaxpr, shapes, others = result
        shapes = with_packed(shapes, _without_statics)
        return jaxpr, *(super(FilterMakeJaxprTransform, self).finish(each, call, policy) for each in (shapes, others))


def as_it_is(
    transform: Callable[..., Any], function: Callable[..., Any], policy: PolicyOption, options: dict[str, Any]
) -> Callable[..., Any]:
    """A function under a transform that hands on the very objects that it is given, as `jax.named_call` does."""
    return transform(function, **options)


def _without_changes(policy: Policy) -> Policy:
    return dataclasses.replace(policy, in_place=False)


def _without_statics(packed: Packed) -> Packed:
    known = packed.structure
    return Packed(packed.leaves, intern(tuple(without_statics(known.records)), known.root, known.base))
