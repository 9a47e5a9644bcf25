"""The one file that touches names which JAX does not promise to keep, and why each is needed.

- `trace_ctx`: a tracer that leaks into a static leaf can only be told from one that legitimately belongs to an
  enclosing transform by the trace it was made in. JAX's public API offers no way to ask.
- `PyTreeDef.from_node_data_and_children`: the only way to rebuild a node from its type and aux data without holding
  on to an instance of it.
- `ArrayImpl`, the type of every concrete array: asking an array for it at import would start a backend. It is also
  the only way to a weakly typed array of given data for which nothing is compiled.
- `_convert_element_type`: the only way to a weakly typed tracer of any dtype but Python's own. It is imported when such
  an array is loaded under a trace, so nothing else needs it.
- `_registry` and the closures of `register_dataclass`: which fields of such a class are children and which are static.
  Its unflatten function is C++ that reads past the end of too few. Also whether a class has the functions that its
  library gives to all its classes. Where the names are gone, the answer is that nobody knows, and a test fails.
- `dce_jaxpr`: `jax.jit` drops the inputs that a computation does not need, by this function.
- `_deprecations` of `jax.experimental.shard_map`: whoever asks for the function there by its name is warned, but those
  who have it should be served. Where it is gone, so is the function.
- `typed_scalar_types`: a rule is given objects of these classes for Python numbers. Where the name is gone, numbers are
  expected to stay what they are, and a test fails if they do not.
- `_line_info` of a tracer: where the operation that made it was called. Without it, warnings name no line.
- `parent` of a tracer and `in_tracers` of the operation that made it: whether a result was computed from a value.
  Without them nobody knows, and a test fails.
- `source_info`, `outvars` and `params` of an operation: in which calls of `jax.vmap` and the like it was made, and what
  program `jax.lax.scan` and the like run. Without them, warnings do not name the transform, and a test fails.
- `batch_dim` of a tracer, and `manual_axis_type` of its type: whether a value differs between the elements of a `vmap`
  or the devices of a `shard_map`. Without them, nothing does, and a test fails.
- `traceback_util`: JAX takes its own frames out of the traceback of an error that leaves it, and those of what was
  registered there. Where its names are gone, the frames show.
"""

import functools
import importlib
import inspect
import pathlib
import types
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
from jax import tree_util as jtu
from jax._src import core as _core, tree_util as _tree_util
from jax._src.array import ArrayImpl
from jax._src.core import trace_ctx
from jax.core import Tracer
from jax.interpreters.partial_eval import DynamicJaxprTracer, dce_jaxpr

try:
    from jax._src.literals import typed_scalar_types as _typed_scalar_types
except ImportError:
    _typed_scalar_types = set[type]()

try:
    from jax._src import traceback_util as _traceback_util
except ImportError:
    _traceback_util = None

C = TypeVar("C", bound=Callable[..., Any])

_LEAF = jtu.tree_structure(0)

ConcreteArray: type = ArrayImpl

REGISTRY: dict[type, Any] | None = getattr(_tree_util, "_registry", None)
"""The classes that are registered as nodes: it grows when one is. None where JAX does not say."""

TYPED_NUMBERS: frozenset[type] = frozenset(_typed_scalar_types)
"""The classes of Python numbers whose dtype JAX has settled."""


_holder = getattr(_core, "trace_state_strong_ref", None)
TRACE = (_holder, "value") if getattr(_holder, "value", None) is trace_ctx.trace else (trace_ctx, "trace")
"""An object, and as which attribute it has the trace that is active now."""


def current_trace() -> Any:
    """The trace that is active now."""
    return trace_ctx.trace


def current_traces() -> tuple[Any, ...]:
    """The trace that is active now and those that enclose it, innermost first. Held, so that `is` on them is sound."""
    return with_enclosing(trace_ctx.trace)


def with_enclosing(trace: Any) -> tuple[Any, ...]:
    """A trace and those that enclose it, innermost first."""
    traces: list[Any] = []
    while trace is not None:
        traces.append(trace)
        trace = getattr(trace, "parent_trace", None)
    return tuple(traces)


class Frame(NamedTuple):
    """A call on the way to an operation."""

    filename: str
    function: str
    lineno: int


def frames_of(leaf: Any) -> list[Frame]:
    """The calls on the way to the operation that made a tracer, the innermost first; none where JAX does not say."""
    while isinstance(leaf, Tracer):
        traceback = getattr(getattr(leaf, "_line_info", None), "traceback", None)
        if traceback is not None:
            return frames_in(traceback)
        leaf = getattr(leaf, "primal", None)  # what is differentiated stands around what was computed
    return []


def frames_in(traceback: Any) -> list[Frame]:
    """The calls in a traceback of JAX's, the innermost first."""
    return [Frame(frame.file_name, frame.function_name, frame.line_num) for frame in traceback.frames]


def program_tracer(leaf: Any) -> Any:
    """The tracer of a program below those of differentiation and batching; None where the values are concrete."""
    while isinstance(leaf, Tracer) and not isinstance(leaf, DynamicJaxprTracer):
        leaf = getattr(leaf, "primal", getattr(leaf, "val", None))
    return leaf if isinstance(leaf, DynamicJaxprTracer) and hasattr(leaf, "parent") else None


def is_batched(leaf: Any) -> bool:
    """Whether a leaf has a value for each element of the `jax.vmap` under which it is asked."""
    return getattr(leaf, "_trace", None) is trace_ctx.trace and getattr(leaf, "batch_dim", None) is not None


def varying_axes(leaf: Any) -> frozenset[str]:
    """The axes of a mesh along which devices may have different values of a leaf, under `jax.shard_map`."""
    aval = jax.typeof(leaf)
    own = getattr(aval, "manual_axis_type", None)
    return frozenset(getattr(aval, "vma", ()) if own is None else own.varying)


def operation_of(tracer: Any) -> Any:
    """The operation of a program that made a tracer; None for an input or a constant."""
    return tracer.parent


def operands_of(operation: Any) -> Sequence[Any]:
    """The tracers of the operands of an operation."""
    return operation.in_tracers


def transform_calls(operation: Any) -> tuple[Any, ...]:
    """An object for each call of `jax.vmap`, `jax.grad` and the like in which an operation was made, outermost first.

    JAX makes a new object for each call, so two operations with the same objects were made in the same calls. Compare
    them by identity, as the objects of two calls are equal.
    """
    stack = getattr(getattr(getattr(operation, "source_info", None), "name_stack", None), "stack", ())
    return tuple([entry for entry in stack if type(entry).__name__ == "Transform"])


class InnerProgram(NamedTuple):
    """A program that an operation runs, such as the body of a `jax.lax.scan`.

    Attributes:
        inputs: for each input variable the tracer that it first is.
        jaxpr: the program. Its outputs are those of the operation.
    """

    inputs: Sequence[Any]
    jaxpr: Any


def programs_in(operation: Any) -> list[InnerProgram]:
    """The programs whose outputs are the outputs of an operation; none where JAX does not say."""
    params = getattr(operation, "params", {})
    # A `while` has the program of its condition, too, whose output is another one.
    closed = [params[name] for name in ("jaxpr", "body_jaxpr") if name in params] or [*params.get("branches", ())]
    jaxprs = [getattr(program, "jaxpr", program) for program in closed]
    operands = operands_of(operation)
    outvars = getattr(operation, "outvars", ())
    # What the operation itself needs, such as the index of a branch, comes before the inputs of the program.
    return [
        InnerProgram(operands[len(operands) - len(jaxpr.invars) :], jaxpr)
        for jaxpr in jaxprs
        if len(jaxpr.invars) <= len(operands) and len(jaxpr.outvars) == len(outvars)
    ]


def output_number(tracer: Any) -> int | None:
    """Which output of its operation a tracer is; None where JAX does not say."""
    outvars = getattr(operation_of(tracer), "outvars", ())
    variables = [variable() if isinstance(variable, weakref.ref) else variable for variable in outvars]
    return next((number for number, variable in enumerate(variables) if variable is tracer.val), None)


def are_of_one_program(tracers: Iterable[Any]) -> bool:
    """Whether all tracers belong to one program."""
    traces = [tracer._trace for tracer in tracers]  # noqa: SLF001 -- see the module's docstring
    return all(trace is traces[0] for trace in traces)


def belongs_to(tracer: Tracer, traces: Iterable[Any]) -> bool:
    """Whether `tracer` was made by one of `traces`."""
    made_by = tracer._trace  # noqa: SLF001 -- see the module's docstring
    return any(made_by is trace for trace in traces)


def rebuild_registered(cls: type, aux: Any, children: Sequence[Any]) -> Any:
    """Calls the unflatten function that JAX's registry holds for `cls`."""
    return unflatten_of(cls, aux, len(children))(tuple(children))


def unflatten_of(cls: type, aux: Any, num_children: int) -> Callable[[tuple[Any, ...]], Any]:
    """The unflatten function that JAX's registry holds for `cls`, as a function of the children alone."""
    own = registered_functions(cls)[1]
    if isinstance(own, (types.FunctionType, types.MethodType)) and registered_fields(cls) is None:
        return functools.partial(own, aux)  # three times faster than by way of a `PyTreeDef`
    registry = jtu.default_registry
    return jtu.PyTreeDef.from_node_data_and_children(registry, (cls, aux), [_LEAF] * num_children).unflatten


def registered_functions(cls: type) -> tuple[Any, Any]:
    """The flatten and the unflatten function that a class was registered with; None where JAX does not say."""
    entry = getattr(_tree_util, "_registry", {}).get(cls)
    return getattr(entry, "to_iter", None), getattr(entry, "from_iter", None)


def registered_fields(cls: type) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """The fields of a class that came by `register_dataclass`: the children, and the static ones; else None."""
    unflatten = registered_functions(cls)[1]
    if getattr(unflatten, "__module__", None) != _tree_util.__name__:
        return None
    held = inspect.getclosurevars(unflatten).nonlocals
    if not {"data_fields", "meta_fields"} <= held.keys():
        return None
    return tuple(held["data_fields"]), tuple(held["meta_fields"])


@functools.lru_cache(256)
def registered_counts(cls: type) -> tuple[int, int] | None:
    """How many children and static values an instance of a class has that came by `register_dataclass`; else None."""
    fields = registered_fields(cls)
    return None if fields is None else (len(fields[0]), len(fields[1]))


def weakly_typed(array: Any) -> Any:
    """A JAX array over the same memory, but of weak type; of a tracer, such a tracer."""
    if isinstance(array, Tracer):  # as JAX makes of any array under a trace
        from jax._src.lax.lax import _convert_element_type  # noqa: PLC0415

        return _convert_element_type(array, weak_type=True)
    shards = [shard.data for shard in array.addressable_shards]
    aval = array.aval.update(weak_type=True)
    return ArrayImpl(aval, array.sharding, shards, committed=array.committed)


def deprecated_shard_map() -> Callable[..., Any]:
    """`jax.experimental.shard_map.shard_map`; where it is gone, that which took its place."""
    try:
        known = vars(importlib.import_module("jax.experimental.shard_map"))
    except ImportError:
        return jax.shard_map
    return known.get("_deprecations", {}).get("shard_map", (None, None))[1] or known.get("shard_map", jax.shard_map)


def used_inputs(jaxpr: Any) -> Sequence[bool]:
    """Which inputs of a closed jaxpr `jax.jit` keeps."""
    plain = jaxpr.jaxpr
    return dce_jaxpr(plain, used_outputs=[True] * len(plain.outvars))[1]


getattr(_traceback_util, "register_exclusion", lambda _: None)(str(pathlib.Path(__file__).parents[1]))


def api_boundary(function: C) -> C:
    """A function such that the tracebacks of errors which leave it have neither JAX's frames nor the library's."""
    return getattr(_traceback_util, "api_boundary", lambda inside: inside)(function)


def hide_frames(error: Exception) -> None:
    """Does to an error that is being handled what `api_boundary` does, where its frame would cost every call.

    An error that is raised again by `raise` does not get the frame which does so a second time.
    """
    util: Any = _traceback_util
    try:
        mode = util._filtering_mode()  # noqa: SLF001 -- see the module's docstring
        if mode == "off" or util._is_under_reraiser(error):  # noqa: SLF001 -- as above
            return
        if mode == "tracebackhide":
            util._add_tracebackhide_to_hidden_frames(error.__traceback__)  # noqa: SLF001 -- as above
        else:
            error.__traceback__ = util.filter_traceback(error.__traceback__)
    except AttributeError:
        return
