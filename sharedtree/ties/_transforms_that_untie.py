"""Which vanilla transform made two leaves of one that was tied, where that is certain.

A vanilla transform flattens its arguments and its results to trees, so a tied model leaves it as an untied one. The
traceback of the operation that made a leaf has the call:

    scan             jax        the operation is a `scan`, and this is what the user called,
    step             train.py   and this is where

But JAX and other libraries call transforms, too, and a user may call one for each leaf in turn. So a transform is named
only if the user's code called it directly, on a function of the user's, and if both leaves came out of *one* call of
it. Of `jax.lax.scan`, `jax.jit` and the like both are then outputs of one operation. `jax.vmap` and `jax.grad` leave no
operation behind, but JAX notes for each operation in which of their calls it was made.

A function that takes a model apart by hand unties it under any transform. So both leaves must also have been made at
one line below a function of trees, such as `jax.tree.map` or `sharedtree.apply_updates`; or be parts of one gradient.
"""

import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..core._by_identity import IdentityDict, IdentitySet
from ..core._jax_internals import (
    Frame,
    InnerProgram,
    frames_in,
    frames_of,
    operands_of,
    operation_of,
    output_number,
    program_tracer,
    programs_in,
    transform_calls,
)
from ._frames_of_libraries import TRACED, package_of


class VanillaTransform(NamedTuple):
    """A transform that unties models.

    Attributes:
        title: how its user calls it.
        keeping: the code that keeps ties.
        primitives: of the operation that it leaves in a program; empty if it leaves none.
        calls: what JAX calls the transform in the notes of an operation; empty if it makes none.
    """

    title: str
    keeping: str
    primitives: tuple[str, ...] = ()
    calls: str = ""


_JIT = ("jit", "pjit")
_CHECKPOINT = ("checkpoint", "remat", "remat2")

_TRANSFORMS: dict[tuple[str, str, str], VanillaTransform] = {
    ("jax", "loops.py", "scan"): VanillaTransform(
        "jax.lax.scan", "    carry, ys = sharedtree.scan(f, init, xs)", ("scan",)
    ),
    ("jax", "loops.py", "map"): VanillaTransform("jax.lax.map", "    ys = sharedtree.map(f, xs)", ("scan",)),
    ("jax", "loops.py", "while_loop"): VanillaTransform(
        "jax.lax.while_loop", "    model = sharedtree.while_loop(cond_fun, body_fun, model)", ("while",)
    ),
    ("jax", "loops.py", "fori_loop"): VanillaTransform(
        "jax.lax.fori_loop", "    model = sharedtree.fori_loop(lower, upper, body_fun, model)", ("scan", "while")
    ),
    ("jax", "conditionals.py", "cond"): VanillaTransform(
        "jax.lax.cond", "    model = sharedtree.cond(pred, true_fun, false_fun, model)", ("cond",)
    ),
    ("jax", "conditionals.py", "switch"): VanillaTransform(
        "jax.lax.switch", "    model = sharedtree.switch(index, branches, model)", ("cond",)
    ),
    ("jax", "pjit.py", "cache_miss"): VanillaTransform("jax.jit", "    f = sharedtree.jit(f)", _JIT),
    ("jax", "ad_checkpoint.py", "fun_remat"): VanillaTransform(
        "jax.checkpoint", "    f = sharedtree.checkpoint(f)", _CHECKPOINT
    ),
    ("jax", "api.py", "vmap_f"): VanillaTransform("jax.vmap", "    f = sharedtree.vmap(f)", calls="vmap"),
    ("jax", "api.py", "grad_f"): VanillaTransform(
        "jax.grad", "    gradient = sharedtree.grad(loss)(model)", calls="jvp"
    ),
    ("jax", "api.py", "value_and_grad_f"): VanillaTransform(
        "jax.value_and_grad", "    value, gradient = sharedtree.value_and_grad(loss)(model)", calls="jvp"
    ),
    ("jax", "api.py", "vjp"): VanillaTransform("jax.vjp", "    value, vjp = sharedtree.vjp(f, model)", calls="jvp"),
    ("jax", "api.py", "jvp"): VanillaTransform(
        "jax.jvp", "    value, tangent = sharedtree.jvp(f, (model,), (tangent,))", calls="jvp"
    ),
    ("equinox", "_jit.py", "_JitWrapper.__call__"): VanillaTransform(
        "equinox.filter_jit", "    f = sharedtree.filter_jit(f)", _JIT
    ),
    ("equinox", "_ad.py", "_CheckpointWrapper.__call__"): VanillaTransform(
        "equinox.filter_checkpoint", "    f = sharedtree.filter_checkpoint(f)", _CHECKPOINT
    ),
    ("equinox", "_vmap_pmap.py", "_VmapWrapper.__call__"): VanillaTransform(
        "equinox.filter_vmap", "    f = sharedtree.filter_vmap(f)", calls="vmap"
    ),
    ("equinox", "_ad.py", "_GradWrapper.__call__"): VanillaTransform(
        "equinox.filter_grad", "    gradient = sharedtree.filter_grad(loss)(model)", calls="jvp"
    ),
    ("equinox", "_ad.py", "_ValueAndGradWrapper.__call__"): VanillaTransform(
        "equinox.filter_value_and_grad",
        "    value, gradient = sharedtree.filter_value_and_grad(loss)(model)",
        calls="jvp",
    ),
}
"""The package, the file and the function that its user's code has called → the transform."""

_WRAPPERS = ("reraise_with_filtered_traceback",)
"""Functions of JAX around others, which are not what a user calls."""


class TransformCall(NamedTuple):
    """A call of a vanilla transform by the user's code.

    Attributes:
        transform: what was called.
        caller: where.
        function: where the frame is that the transform called; None if that cannot be told.
        is_innermost: whether only frames of libraries are further in, so that the operation is the transform's own.
    """

    transform: VanillaTransform
    caller: Frame
    function: Frame | None
    is_innermost: bool


def outermost_call(leaf: Any) -> TransformCall | None:
    """The outermost vanilla transform that the traced function has called to make a leaf; None if there is none."""
    found: TransformCall | None = None
    library: list[Frame] = []  # the frames of libraries since the last one of the user's
    inner: Frame | None = None
    for frame in frames_of(leaf):
        if frame.function == TRACED:
            break
        if package_of(frame.filename) is not None:
            library.append(frame)
            continue
        transform = _called(library)
        if transform is not None:
            found = TransformCall(transform, frame, inner, inner is None)
        library, inner = [], frame
    return found


def _called(library: Sequence[Frame]) -> VanillaTransform | None:
    """The transform that the outermost of some frames is; None if it is something else."""
    for frame in reversed(library):
        name = frame.function if "Wrapper." in frame.function else frame.function.rpartition(".")[2]
        if name not in _WRAPPERS:
            key = str(package_of(frame.filename)), pathlib.PurePath(frame.filename).name, name
            return _TRANSFORMS.get(key)
    return None


class Culprit(NamedTuple):
    """The transform that untied two leaves, for certain.

    Attributes:
        transform: what the user called.
        caller: where.
        inside: the calls on the way to what made the leaves within the transform, the innermost first.
    """

    transform: VanillaTransform
    caller: Frame
    inside: Sequence[Frame]


def culprit_of(one: Any, two: Any, analyses: "IdentityDict[list[_Analysis]]") -> Culprit | None:
    """Returns the outermost vanilla transform in which two leaves were made, if it is certain that it has untied them.

    Args:
        one: a leaf of what the traced function returned.
        two: another leaf, which was one with the first when the function was entered.
        analyses: operation → its programs, analysed. It is filled, so that many leaves of one operation cost one look.
    """
    call, other = outermost_call(one), outermost_call(two)
    tracers = program_tracer(one), program_tracer(two)
    if call is None or other is None or call[:2] != other[:2] or None in tracers:
        return None
    operations = [operation_of(tracer) for tracer in tracers]
    if call.transform.calls:
        return _culprit_without_operation(call, tracers, operations, analyses)
    if operations[0] is not operations[1] or not call.is_innermost:
        return None
    if operations[0].primitive.name not in call.transform.primitives:
        return None
    inside = _made_alike(operations[0], tracers, call.caller, analyses)
    return None if inside is None else Culprit(call.transform, call.caller, inside)


def _culprit_without_operation(
    call: TransformCall, tracers: Sequence[Any], operations: Sequence[Any], analyses: "IdentityDict[list[_Analysis]]"
) -> Culprit | None:
    """Returns a transform that leaves no operation behind, if it is certain that it untied two leaves."""
    calls, other_calls = map(transform_calls, operations)
    is_one_call = len(calls) == len(other_calls) and all(map(_is_same, calls, other_calls))
    named = [entry for entry in calls if entry.name == call.transform.calls]
    if not is_one_call or not named or not _entered_as_one(tracers, named[-1]):
        return None
    culprit = Culprit(call.transform, call.caller, ())
    if operations[0] is operations[1] and call.function is None:
        # The function is jitted itself, so that only the program of that has its lines.
        return None if _made_alike(operations[0], tracers, call.caller, analyses) is None else culprit
    if not _is_by_user(call.function, call.caller):
        return None
    # The two parts of one gradient are made at different lines, since each path is differentiated by itself.
    if any(entry.name == "transpose" for entry in calls):
        return culprit
    tracebacks = [operation.source_info.traceback for operation in operations]
    is_one_line = tracebacks[0] is not None and tracebacks[0] == tracebacks[1]
    return culprit if is_one_line and _is_below_function_of_trees(frames_in(tracebacks[0]), call.caller) else None


def _made_alike(
    operation: Any, tracers: Sequence[Any], caller: Frame, analyses: "IdentityDict[list[_Analysis]]"
) -> Sequence[Frame] | None:
    """Returns the call stack of what made two outputs, if the operation's program makes both in one way of one value.

    None if that is not certain, or if the program is not of the user's function.
    """
    numbers = output_number(tracers[0]), output_number(tracers[1])
    if numbers[0] is None or numbers[1] is None:
        return None
    programs = analyses.get(operation)
    if programs is None:
        programs = analyses[operation] = [_analyse(program) for program in programs_in(operation)]
    for analysis in programs:
        inside = _computes_alike(analysis, numbers[0], numbers[1])
        if inside is None or (inside and not _is_below_function_of_trees(inside, caller)):
            continue
        if _is_function_by_user(analysis.program, inside, caller):
            return inside
    return None


def _is_below_function_of_trees(frames: Sequence[Frame], caller: Frame) -> bool:
    """Returns True if a function of trees of some library made an operation, or called what made it.

    Args:
        frames: call stack of the operation, innermost first.
        caller: where the transform was called. Frames further out do not count.
    """
    for frame in frames:
        if frame == caller or frame.function == TRACED:
            return False
        package = package_of(frame.filename)
        # JAX's other frames are those of its operations.
        if package is not None and (package != "jax" or pathlib.PurePath(frame.filename).name == "tree_util.py"):
            return True
    return False


def _entered_as_one(tracers: Sequence[Any], call: object) -> bool:
    """Returns True if two leaves were computed from one array that entered a call, which nothing had untied before.

    Args:
        tracers: the leaves.
        call: what JAX notes in each operation that was made in the call.

    Cost: one look at each operation of the call, in a trace that warns.
    """
    entered: list[IdentitySet] = []
    for tracer in tracers:
        seen, outside = IdentitySet(), IdentitySet()
        stack = [tracer]
        while stack:
            value = stack.pop()
            if not seen.add(value):
                continue
            operation = operation_of(value)
            if any(entry is call for entry in transform_calls(operation)):
                stack.extend(operands_of(operation))
            elif value.aval.shape == tracer.aval.shape and value.aval.dtype == tracer.aval.dtype:
                outside.add(value)
        entered.append(outside)
    is_tied = any(value in entered[1] for value in entered[0])
    # If one line outside made two of the arrays, a function of trees has untied the model before this call.
    operations = [operation_of(value) for value in entered[0] if operation_of(value) is not None]
    tracebacks = [operation.source_info.traceback for operation in operations]
    return is_tied and len(set(tracebacks)) == len(tracebacks)


def _is_same(one: object, two: object) -> bool:
    return one is two


def _is_by_user(function: Frame | None, caller: Frame) -> bool:
    """Returns True if a function is of the program that called the transform, not of a library that applied it."""
    if function is None:
        return False
    # A program that is itself installed may call a transform on functions of its own.
    return _is_installed(caller.filename) or not _is_installed(function.filename)


def _is_function_by_user(program: InnerProgram, inside: Sequence[Frame], caller: Frame) -> bool:
    filename = str(program.jaxpr.debug_info.func_src_info).rpartition(" at ")[2].rpartition(":")[0]
    if package_of(filename) is None:
        return _is_installed(caller.filename) or not _is_installed(filename)
    # A library has wrapped the function before it gave it to JAX.
    functions = [frame for frame in inside if package_of(frame.filename) is None]
    return _is_by_user(functions[-1] if functions else None, caller)


def _is_installed(filename: str) -> bool:
    return not {"site-packages", "dist-packages"}.isdisjoint(pathlib.PurePath(filename).parts)


class _Analysis(NamedTuple):
    """What each variable of a program was computed from.

    Attributes:
        program: the program.
        numbers: variable → its number. The numbers of two variables are equal if their values are.
        sources: variable → a bit for each input that it was computed from.
        made_by: variable → the equation that made it.
        places_of: tracer → the inputs that it is.
    """

    program: InnerProgram
    numbers: IdentityDict[Any]
    sources: IdentityDict[int]
    made_by: IdentityDict[Any]
    places_of: IdentityDict[list[int]]


def _analyse(program: InnerProgram) -> _Analysis:
    """Looks at each equation of a program once."""
    numbers: IdentityDict[Any] = IdentityDict()
    sources: IdentityDict[int] = IdentityDict()
    made_by: IdentityDict[Any] = IdentityDict()
    places_of: IdentityDict[list[int]] = IdentityDict()
    for place, (variable, tracer) in enumerate(zip(program.jaxpr.invars, program.inputs, strict=True)):
        places = places_of.get(tracer)
        if places is None:
            places = places_of[tracer] = []
        places.append(place)
        numbers[variable] = places[0]
        sources[variable] = 1 << place
    number_of: dict[Any, int] = {}
    for equation in program.jaxpr.eqns:
        # The program keeps the parameters alive, so that what is not hashable is known by its `id`.
        parameters = [(name, _hashable(value)) for name, value in sorted(equation.params.items())]
        operands: list[Any] = []
        reached = 0
        for operand in equation.invars:
            operands.append(numbers[operand] if operand in numbers else _literal(operand))
            reached |= sources.get(operand, 0)
        key = equation.primitive, tuple(parameters), tuple(operands)
        number = number_of.setdefault(key, len(program.inputs) + len(number_of))
        for place, variable in enumerate(equation.outvars):
            numbers[variable], sources[variable], made_by[variable] = (number, place), reached, equation
    return _Analysis(program, numbers, sources, made_by, places_of)


def _computes_alike(analysis: _Analysis, one: int, two: int) -> Sequence[Frame] | None:
    """Returns the call stack of what made two outputs of a program, if they are computed alike; else None.

    They are computed alike if they are inputs that are one value: then the stack is empty. They also are if one line
    made both, as a function of trees does, the first of one input and the second of another, which are one value.
    """
    jaxpr = analysis.program.jaxpr
    first, second = jaxpr.outvars[one], jaxpr.outvars[two]
    if first not in analysis.numbers or second not in analysis.numbers:
        return None
    is_same_value = analysis.numbers[first] == analysis.numbers[second]
    equations = analysis.made_by.get(first), analysis.made_by.get(second)
    if equations[0] is None and equations[1] is None:
        return () if is_same_value else None
    tracebacks = [getattr(getattr(equation, "source_info", None), "traceback", None) for equation in equations]
    if tracebacks[0] is None or tracebacks[0] != tracebacks[1] or first.aval != second.aval:
        return None
    inside = frames_in(tracebacks[0])
    if is_same_value:
        return inside
    for places in analysis.places_of.values():
        in_first = [place for place in places if analysis.sources[first] >> place & 1]
        in_second = [place for place in places if analysis.sources[second] >> place & 1]
        is_tied = len({*in_first, *in_second}) > 1 and in_first and in_second
        if is_tied and jaxpr.invars[places[0]].aval == first.aval:
            return inside
    return None


def _hashable(value: Any) -> Any:
    try:
        hash(value)
    except TypeError:
        return id(value)
    return value


def _literal(operand: Any) -> Any:
    """A key for an operand that is a constant of the program, or a literal."""
    value = getattr(operand, "val", operand)
    return type(value), _hashable(value)
