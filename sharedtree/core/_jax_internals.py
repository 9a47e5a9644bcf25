"""Uses private names of JAX. No other file does. This list says why each is needed, and what happens without it.

Words: a *trace* is JAX's object for one level of tracing, such as one `jax.grad` in progress. A tracer belongs to the
trace that made it. An *operation* is one entry of a jaxpr that is being traced: a primitive with its operands. Under
`jax.jit`, it is an operation that makes a tracer. A *static field* of a dataclass is one of `meta_fields`.

- `trace_ctx`: the trace in which a tracer was made tells a leaked tracer from one of an enclosing transform. JAX's
  public API has nothing for this.
- `PyTreeDef.from_node_data_and_children`: rebuilds a node from its type and aux data. Public functions need an
  instance of the node.
- `ArrayImpl`, the class of concrete arrays: `type(jnp.zeros(()))` at import would start a backend. It is also the only
  way to make a weakly typed array of given data without compiling anything.
- `_convert_element_type`: the only way to a weakly typed tracer of a dtype other than Python's own. It is imported only
  when such an array is loaded under a trace.
- `_registry` and the closures of `register_dataclass`: the children and static fields of such a class, whose unflatten
  function in C++ reads past the end of too few children. Also the functions of a class, to compare them with those that
  its library gives to all classes. Without these names the answers are None, and a test fails.
- `dce_jaxpr`: the function by which `jax.jit` drops unused inputs.
- `_deprecations` of `jax.experimental.shard_map`: the table from which that module returns its function with a warning.
  Reading the table gives no warning. Once JAX drops the table, it has dropped the function, too.
- `typed_scalar_types`: the classes that JAX puts in the place of Python numbers in derivative rules. Without the name,
  numbers are expected to stay Python numbers, and a test fails if they do not.
- `_line_info` of a tracer: the line that made it. Without it, warnings name no line.
- `parent` of a tracer and `in_tracers` of an operation: they tell whether a result depends on a value. Without them
  this is not known, and a test fails.
- `source_info`, `outvars` and `params` of an operation: the calls of `jax.vmap` and the like in which it was made, and
  the program that `jax.lax.scan` and the like run. Without them, warnings do not name the transform, and a test fails.
- `batch_dim` of a tracer, and `manual_axis_type` of its type: tell whether a value differs between the elements of a
  `vmap` or the devices of a `shard_map`. Without them nothing seems to, and a test fails.
- `traceback_util`: removes JAX's frames, and those of registered packages, from the traceback of an error. Without it
  the frames show.
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

Function = TypeVar("Function", bound=Callable[..., Any])

_LEAF = jtu.tree_structure(0)
"""The structure of a single leaf."""

ConcreteArray: type = ArrayImpl
"""The class of all arrays that are no tracers."""

REGISTRY: dict[type, Any] | None = getattr(_tree_util, "_registry", None)
"""JAX's own table of registered classes, which grows with each registration. None if JAX has no such name."""

TYPED_NUMBERS: frozenset[type] = frozenset(_typed_scalar_types)
"""JAX's subclasses of `int`, `float` etc. Their instances are numbers with a fixed dtype."""

# In some releases of JAX, another object than `trace_ctx` has the active trace as a plain attribute.
_holder = getattr(_core, "trace_state_strong_ref", None)

TRACE = (_holder, "value") if getattr(_holder, "value", None) is trace_ctx.trace else (trace_ctx, "trace")
"""(object, name of its attribute) from which the native call reads the active trace."""


def current_trace() -> Any:
    """Returns the active trace."""
    return trace_ctx.trace


def current_traces() -> tuple[Any, ...]:
    """Returns the active trace and the traces around it, innermost first. Outside all transforms there is only one.

    A caller that keeps the tuple keeps the traces alive, so it may compare them by `is` later.
    """
    return with_enclosing_traces(trace_ctx.trace)


def with_enclosing_traces(trace: Any) -> tuple[Any, ...]:
    """Returns a trace and the traces around it, innermost first. Returns `()` for None."""
    traces: list[Any] = []
    while trace is not None:
        traces.append(trace)
        trace = getattr(trace, "parent_trace", None)
    return tuple(traces)


class Frame(NamedTuple):
    """One level of the call stack at an operation."""

    filename: str
    function: str
    lineno: int


def frames_of(leaf: Any) -> list[Frame]:
    """Returns the call stack at the operation that made a tracer, innermost call first.

    Args:
        leaf: a tracer. For any other leaf, and if JAX does not say, the list is empty.
    """
    while isinstance(leaf, Tracer):
        traceback = getattr(getattr(leaf, "_line_info", None), "traceback", None)
        if traceback is not None:
            return frames_of_traceback(traceback)
        # A tracer of differentiation does not know its line. The tracer inside of it may.
        leaf = getattr(leaf, "primal", None)
    return []


def frames_of_traceback(traceback: Any) -> list[Frame]:
    """Returns the calls in a traceback, as JAX stores it with an operation, innermost call first."""
    return [Frame(frame.file_name, frame.function_name, frame.line_num) for frame in traceback.frames]


def program_tracer(leaf: Any) -> Any:
    """Returns the tracer of a jaxpr that a leaf is, or that is inside of it; None if there is none.

    Tracers of differentiation and of batching contain another value, which may be such a tracer.
    """
    while isinstance(leaf, Tracer) and not isinstance(leaf, DynamicJaxprTracer):
        leaf = getattr(leaf, "primal", getattr(leaf, "val", None))
    return leaf if isinstance(leaf, DynamicJaxprTracer) and hasattr(leaf, "parent") else None


def is_batched(leaf: Any) -> bool:
    """Returns True if a leaf has one value per element of a `jax.vmap`, provided that this is the active trace."""
    return getattr(leaf, "_trace", None) is trace_ctx.trace and getattr(leaf, "batch_dim", None) is not None


def varying_axes(leaf: Any) -> frozenset[str]:
    """Returns the mesh axes along which a leaf may differ between devices, under `jax.shard_map`."""
    aval = jax.typeof(leaf)
    # Releases of JAX without `manual_axis_type` have the names in `vma`.
    axis_type = getattr(aval, "manual_axis_type", None)
    return frozenset(getattr(aval, "vma", ()) if axis_type is None else axis_type.varying)


def operation_of(tracer: Any) -> Any:
    """Returns the operation that made a tracer of a jaxpr; None for an input or a constant of the jaxpr."""
    return tracer.parent


def operands_of(operation: Any) -> Sequence[Any]:
    """Returns the operands of an operation, as tracers."""
    return operation.in_tracers


def transform_calls(operation: Any) -> tuple[Any, ...]:
    """Returns an object for each call of `jax.vmap`, `jax.grad` etc. in which an operation was made, outermost first.

    JAX makes a new object for each call. So if two operations have the very same objects, they were made in
    the same calls. The objects must be compared by `is`, because the objects of two calls are equal.
    """
    stack = getattr(getattr(getattr(operation, "source_info", None), "name_stack", None), "stack", ())
    return tuple([entry for entry in stack if type(entry).__name__ == "Transform"])


class InnerProgram(NamedTuple):
    """A program run by an operation, such as the body of a `jax.lax.scan`.

    Attributes:
        inputs: for each input variable of the program, the operand of the operation that becomes its value. In a loop,
            it is the value in the first round.
        jaxpr: the program. Its outputs are the outputs of the operation.
    """

    inputs: Sequence[Any]
    jaxpr: Any


def programs_in(operation: Any) -> list[InnerProgram]:
    """Returns the inner programs of an operation with the same outputs as the operation: the branches of a `cond`, ...

    The list is empty for an operation without inner programs, and for one with its programs under other names than
    those below.
    """
    # `scan` and `jit` have their program in `jaxpr`, `while` has its body in `body_jaxpr`, and `cond` has a tuple of
    # programs in `branches`. The condition of a `while` is left out, because its output is not one of the operation's.
    params = getattr(operation, "params", {})
    candidates = [params[name] for name in ("jaxpr", "body_jaxpr") if name in params] or [*params.get("branches", ())]
    operands = operands_of(operation)
    outvars = getattr(operation, "outvars", ())
    programs: list[InnerProgram] = []
    for program in candidates:
        # A closed jaxpr has the open one as an attribute.
        jaxpr = getattr(program, "jaxpr", program)
        if len(jaxpr.invars) <= len(operands) and len(jaxpr.outvars) == len(outvars):
            # Operands of the operation itself, such as the index of a branch, precede the inputs of the program.
            inputs = operands[len(operands) - len(jaxpr.invars) :]
            programs.append(InnerProgram(inputs, jaxpr))
    return programs


def output_number(tracer: Any) -> int | None:
    """Returns the index of a tracer among the outputs of its operation; None if JAX does not say."""
    outvars = getattr(operation_of(tracer), "outvars", ())
    # An operation may refer to its output variables weakly.
    variables = [variable() if isinstance(variable, weakref.ref) else variable for variable in outvars]
    return next((number for number, variable in enumerate(variables) if variable is tracer.val), None)


def are_of_one_program(tracers: Iterable[Any]) -> bool:
    """Returns True if all tracers are of one trace, and so of one jaxpr."""
    traces = [tracer._trace for tracer in tracers]  # noqa: SLF001 -- see the module's docstring
    return all(trace is traces[0] for trace in traces)


def belongs_to(tracer: Tracer, traces: Iterable[Any]) -> bool:
    """Returns True if a tracer was made by one of some traces."""
    origin = tracer._trace  # noqa: SLF001 -- see the module's docstring
    return any(origin is trace for trace in traces)


def rebuild_registered(cls: type, aux: Any, children: Sequence[Any]) -> Any:
    """Makes an instance of a registered class as JAX does, from its auxiliary data and its children."""
    return unflatten_of(cls, aux, len(children))(tuple(children))


def unflatten_of(cls: type, aux: Any, num_children: int) -> Callable[[tuple[Any, ...]], Any]:
    """Returns a function that makes instances of a registered class as JAX does: children → instance.

    Args:
        cls: the class.
        aux: the auxiliary data of each instance.
        num_children: how many children each instance has.
    """
    _, unflatten = registered_functions(cls)
    # If the author has registered a function in Python, a partial of it is three times faster than a `PyTreeDef`. For a
    # class of `register_dataclass`, `unflatten` is a function of JAX, which JAX itself does not call: it makes the
    # instances in C++.
    if isinstance(unflatten, (types.FunctionType, types.MethodType)) and registered_fields(cls) is None:
        return functools.partial(unflatten, aux)
    # For a class of `register_dataclass`, and for an `unflatten` written in C, make the structure of a node whose
    # children are leaves. Its `unflatten` calls what JAX calls. The C++ code for `register_dataclass` does not check
    # the number of children, and would read past the end of too few. This is not checked here: the callers have
    # `registered_counts` for it.
    registry = jtu.default_registry
    return jtu.PyTreeDef.from_node_data_and_children(registry, (cls, aux), [_LEAF] * num_children).unflatten


def is_in_registry(cls: type) -> bool:
    """Returns True if JAX's registry has a class. Makes no instance, whose `__del__` would run. Not for `dict`.

    JAX has no public function that tells this of a class, only one for an object.
    """
    try:
        # No function of the class is called.
        jtu.PyTreeDef.from_node_data_and_children(jtu.default_registry, (cls, None), [])
    # "Could not find type", in JAX 0.10 to 0.12.
    except RuntimeError:
        return False
    return True


def registered_functions(cls: type) -> tuple[Any, Any]:
    """Returns (flatten function, unflatten function) of a registered class, with None for a function not known."""
    entry = getattr(_tree_util, "_registry", {}).get(cls)
    return getattr(entry, "to_iter", None), getattr(entry, "from_iter", None)


def registered_fields(cls: type) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """Returns (`data_fields`, `meta_fields`): the names given to `register_dataclass` for a class.

    Returns None for a class registered by another function or not at all. Also returns None if this release of JAX has
    other names for the two variables read here.
    """
    _, unflatten = registered_functions(cls)
    # `register_dataclass` defines an unflatten function in the module `tree_util` of JAX. Most other registered
    # functions are from elsewhere.
    if getattr(unflatten, "__module__", None) != _tree_util.__name__:
        return None
    # Python code can find the names only in the closure of the unflatten function.
    variables = inspect.getclosurevars(unflatten).nonlocals
    if not {"data_fields", "meta_fields"} <= variables.keys():
        return None
    return tuple(variables["data_fields"]), tuple(variables["meta_fields"])


@functools.lru_cache(256)
def registered_counts(cls: type) -> tuple[int, int] | None:
    """Returns (number of children, number of static fields) of a class of `register_dataclass`; None for others."""
    fields = registered_fields(cls)
    if fields is None:
        return None
    child_names, static_names = fields
    return len(child_names), len(static_names)


def as_weakly_typed(array: Any) -> Any:
    """Returns an array like another one, but weakly typed. It shares the memory of the other one.

    For a tracer it returns a weakly typed tracer, and adds a conversion to the jaxpr.
    """
    if isinstance(array, Tracer):
        from jax._src.lax.lax import _convert_element_type  # noqa: PLC0415

        return _convert_element_type(array, weak_type=True)
    # `ArrayImpl` takes the buffers of the shards, so no data is copied.
    shards = [shard.data for shard in array.addressable_shards]
    aval = array.aval.update(weak_type=True)
    return ArrayImpl(aval, array.sharding, shards, committed=array.committed)


def deprecated_shard_map() -> Callable[..., Any]:
    """Returns `jax.experimental.shard_map.shard_map` without a warning; `jax.shard_map` if JAX has dropped it."""
    try:
        names = vars(importlib.import_module("jax.experimental.shard_map"))
    except ImportError:
        return jax.shard_map
    # Name → (text of the warning, object). A deprecated name is no attribute of the module, but in this table.
    _, function = names.get("_deprecations", {}).get("shard_map", (None, None))
    return function or names.get("shard_map", jax.shard_map)


def used_inputs(jaxpr: Any) -> Sequence[bool]:
    """Returns for each input of a closed jaxpr whether it is used. `jax.jit` drops the other inputs."""
    open_jaxpr = jaxpr.jaxpr
    _, is_used = dce_jaxpr(open_jaxpr, used_outputs=[True] * len(open_jaxpr.outvars))
    return is_used


# From now on, JAX hides the frames of this package in tracebacks, as it hides its own. If this release of JAX has no
# such function, nothing happens.
getattr(_traceback_util, "register_exclusion", lambda _: None)(str(pathlib.Path(__file__).parents[1]))


def api_boundary(function: Function) -> Function:
    """Wraps a function so that errors leave it without the frames of JAX and of this package in their traceback.

    Returns the function itself if this release of JAX has no `api_boundary`.
    """
    return getattr(_traceback_util, "api_boundary", lambda unchanged: unchanged)(function)


def hide_frames(error: Exception) -> None:
    """Removes or hides the frames of JAX and of this package in the traceback of an error. Called in `except` blocks.

    The effect is that of `api_boundary`, but without a cost for calls that do not fail. After this, the caller should
    use a bare `raise`, which does not add the caller's frame to the traceback again.
    """
    util: Any = _traceback_util
    try:
        # As in `api_boundary`, the setting `jax_traceback_filtering` decides. With "off" all frames stay,
        # "tracebackhide" marks the frames for IPython to hide, and all other modes remove them. If the call is inside
        # of an `api_boundary`, this one will do the work.
        mode = util._filtering_mode()  # noqa: SLF001 -- see the module's docstring
        if mode == "off" or util._is_under_reraiser(error):  # noqa: SLF001 -- see the module's docstring
            return
        if mode == "tracebackhide":
            util._add_tracebackhide_to_hidden_frames(error.__traceback__)  # noqa: SLF001 -- see the module's docstring
        else:
            error.__traceback__ = util.filter_traceback(error.__traceback__)
    except AttributeError:
        # This release of JAX has other names, so the frames stay.
        return
