"""Finds the vanilla transform that split a tied leaf into two leaves, if it is certain which one did.

A vanilla transform flattens its arguments and its results to trees, so the ties of a model are lost in it. The
traceback of the operation that made a leaf has the call:

    scan             jax        the operation is a `scan`, and this is the function that the user called,
    step             train.py   and this is the line

But JAX and other libraries call transforms, too, and a user may call one for each leaf in turn. So a transform is named
only if the user's code called it directly, on a function of the user's, and if both leaves came out of *one* call of
it. After one call of `jax.lax.scan` or `jax.jit`, both leaves are outputs of one operation in the traced program, whose
parameters hold an inner *program*, a jaxpr. `jax.vmap` and `jax.grad` leave no such operation behind. Instead, each
operation that was made in their calls has a mark for each of these calls (see `transform_calls`).

A function that takes a model apart without a function of trees unties it under any transform. So both leaves must also
have been made at one line below a function of trees, such as `jax.tree.map` or `sharedtree.apply_updates`; or they must
be parts of one gradient.

A *frame* is an entry of a traceback. Frames come innermost first, and the caller is further out.
"""

import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..core._by_identity import IdentityDict, IdentitySet
from ..core._jax_internals import (
    Frame,
    InnerProgram,
    frames_of,
    frames_of_traceback,
    operands_of,
    operation_of,
    output_number,
    program_tracer,
    programs_in,
    transform_calls,
)
from ._frames_of_libraries import TRACED, package_of


class VanillaTransform(NamedTuple):
    """A transform of JAX or Equinox that unties models.

    Attributes:
        title: its public name.
        keeping: code that does the same and keeps ties.
        primitives: names of its operation in a program. Empty if it leaves marks instead.
        calls: name of the transform in JAX's marks on operations. Empty if it leaves an operation instead.
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
"""(package, file, function that the user's code calls, by its name in tracebacks) → the transform."""

_WRAPPERS = ("reraise_with_filtered_traceback",)
"""Functions of JAX that wrap its public functions, and have frames of their own."""


class TransformCall(NamedTuple):
    """A call of a vanilla transform by the user's code, found in the traceback of an operation.

    Attributes:
        transform: the transform.
        caller: frame of the call, in the user's code.
        function: frame of the user's code next further in: the function called by the transform. None if there is
            none.
        is_innermost: True if only frames of libraries are further in. Then the transform itself made the operation.
    """

    transform: VanillaTransform
    caller: Frame
    function: Frame | None
    is_innermost: bool


def outermost_call(leaf: Any) -> TransformCall | None:
    """Finds the outermost call of a vanilla transform in which a leaf was made.

    Calls outside the traced function do not count. None if there is no such call.
    """
    outermost: TransformCall | None = None
    # The frames of libraries since the last frame of the user's code, and that frame.
    library_frames: list[Frame] = []
    user_frame: Frame | None = None
    for frame in frames_of(leaf):
        # Our method that calls the traced function. Frames further out are not part of that function.
        if frame.function == TRACED:
            break
        if package_of(frame.filename) is not None:
            library_frames.append(frame)
            continue
        transform = _transform_called_by_user(library_frames)
        if transform is not None:
            outermost = TransformCall(transform, frame, user_frame, user_frame is None)
        library_frames, user_frame = [], frame
    return outermost


def _transform_called_by_user(library_frames: Sequence[Frame]) -> VanillaTransform | None:
    """Returns the transform called by the user's code. None if the user's code called another function of a library.

    Args:
        library_frames: the frames between two frames of the user's code, innermost first. Those of `_WRAPPERS` are
            skipped.
    """
    for frame in reversed(library_frames):
        # Methods of Equinox's wrappers are listed with their class, all other functions by their last name.
        name = frame.function if "Wrapper." in frame.function else frame.function.rpartition(".")[2]
        if name not in _WRAPPERS:
            key = str(package_of(frame.filename)), pathlib.PurePath(frame.filename).name, name
            return _TRANSFORMS.get(key)
    return None


class Culprit(NamedTuple):
    """The transform that certainly untied two leaves.

    Attributes:
        transform: the transform.
        caller: frame of the call, in the user's code.
        inside: call stack, within the transform, of the operation that made the leaves, innermost first.
    """

    transform: VanillaTransform
    caller: Frame
    inside: Sequence[Frame]


def culprit_of(leaf1: Any, leaf2: Any, analyses: "IdentityDict[list[_Analysis]]") -> Culprit | None:
    """Returns the outermost vanilla transform in which two leaves were made, if it is certain that it has untied them.

    Args:
        leaf1: a leaf of the traced function's result.
        leaf2: another leaf of the result. The two were one object when the function was called.
        analyses: operation → analyses of its programs. Extended, so that each operation is analysed once.
    """
    call, call2 = outermost_call(leaf1), outermost_call(leaf2)
    # Tracers of the program that is traced, without the tracers of `vmap` and `grad` around them. None for a concrete
    # leaf, which no operation of the program made.
    tracers = program_tracer(leaf1), program_tracer(leaf2)
    # Both leaves must come from one line that calls one transform: equal `transform` and `caller`.
    if call is None or call2 is None or call[:2] != call2[:2] or None in tracers:
        return None
    operations = [operation_of(tracer) for tracer in tracers]

    # Transforms such as `jax.vmap`, which leave marks.
    if call.transform.calls:
        return _culprit_without_operation(call, tracers, operations, analyses)

    # Transforms such as `jax.lax.scan`, which leave one operation with both leaves as outputs.
    if operations[0] is not operations[1] or not call.is_innermost:
        return None
    if operations[0].primitive.name not in call.transform.primitives:
        return None
    inside = _made_alike(operations[0], tracers, call.caller, analyses)
    return None if inside is None else Culprit(call.transform, call.caller, inside)


def _culprit_without_operation(
    call: TransformCall, tracers: Sequence[Any], operations: Sequence[Any], analyses: "IdentityDict[list[_Analysis]]"
) -> Culprit | None:
    """Returns the culprit if a transform that leaves marks, such as `jax.vmap`, certainly untied two leaves, else None.

    Args:
        call: the call of the transform.
        tracers: the two leaves.
        operations: the operation of each leaf.
        analyses: operation → analyses of its programs. Extended.
    """
    # Both operations must have been made in the same calls, and one array must have entered the transform for both.
    marks, marks2 = map(transform_calls, operations)
    is_one_call = len(marks) == len(marks2) and all(map(_is_same, marks, marks2))
    marks_of_transform = [mark for mark in marks if mark.name == call.transform.calls]
    if not is_one_call or not marks_of_transform or not _entered_as_one(tracers, marks_of_transform[-1]):
        return None

    # The leaves must be made alike, by a function of the user's.
    culprit = Culprit(call.transform, call.caller, inside=())
    if operations[0] is operations[1] and call.function is None:
        # The function is jitted itself, so only its program has the lines of the function.
        return None if _made_alike(operations[0], tracers, call.caller, analyses) is None else culprit
    if not _is_by_user(call.function, call.caller):
        return None
    # The two parts of one gradient are made at different lines, since each path is differentiated by itself.
    if any(mark.name == "transpose" for mark in marks):
        return culprit
    tracebacks = [operation.source_info.traceback for operation in operations]
    is_one_line = tracebacks[0] is not None and tracebacks[0] == tracebacks[1]
    return (
        culprit
        if is_one_line and _is_below_function_of_trees(frames_of_traceback(tracebacks[0]), call.caller)
        else None
    )


def _made_alike(
    operation: Any, tracers: Sequence[Any], caller: Frame, analyses: "IdentityDict[list[_Analysis]]"
) -> Sequence[Frame] | None:
    """Returns the call stack that made two outputs of an operation, if its program computes both alike from one value.

    Args:
        operation: the transform's operation in the traced program.
        tracers: two outputs of the operation.
        caller: frame of the user's code that called the transform.
        analyses: operation → analyses of its programs. Extended.

    Returns:
        The call stack within the program, innermost first. Empty if the program returns an input. None if it is not
        certain that both are computed alike, or if the program is not that of a function of the user's.
    """
    # Indices among the outputs of the operation.
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
    """Returns True if an operation was made in a call of a function of trees, such as `jax.tree.map` or an optimizer's.

    Args:
        frames: call stack of the operation, innermost first.
        caller: frame with the call of the transform. Frames further out do not count.
    """
    for frame in frames:
        if frame == caller or frame.function == TRACED:
            return False
        package = package_of(frame.filename)
        # Every function of another library counts. Of JAX's frames only those of `tree_util` do, since the others are
        # frames of operations such as `jnp.add`.
        if package is not None and (package != "jax" or pathlib.PurePath(frame.filename).name == "tree_util.py"):
            return True
    return False


def _entered_as_one(tracers: Sequence[Any], call: object) -> bool:
    """Returns True if two leaves were computed from one array that entered a call, so that the tie was lost inside.

    Args:
        tracers: the leaves.
        call: JAX's mark on each operation made in the call.

    Cost: one look at each operation of the call, in a trace that warns.
    """
    # For each leaf, the arrays from outside the call that it was computed from, and that have its shape and dtype.
    inputs: list[IdentitySet] = []
    for tracer in tracers:
        visited, outer_values = IdentitySet(), IdentitySet()
        # Go back from the leaf, from each operation in the call to its operands.
        stack = [tracer]
        while stack:
            value = stack.pop()
            if not visited.add(value):
                continue
            operation = operation_of(value)
            if any(entry is call for entry in transform_calls(operation)):
                stack.extend(operands_of(operation))
            elif value.aval.shape == tracer.aval.shape and value.aval.dtype == tracer.aval.dtype:
                outer_values.add(value)
        inputs.append(outer_values)
    is_tied = any(value in inputs[1] for value in inputs[0])
    # If two of the arrays were made at one line outside, a function of trees had untied the model before this call.
    operations = [operation_of(value) for value in inputs[0] if operation_of(value) is not None]
    tracebacks = [operation.source_info.traceback for operation in operations]
    return is_tied and len(set(tracebacks)) == len(tracebacks)


def _is_same(mark: object, mark2: object) -> bool:
    return mark is mark2


def _is_by_user(function: Frame | None, caller: Frame) -> bool:
    """Returns True if a function belongs to the program that called the transform, not to an installed library.

    Args:
        function: frame of the function. None if it is unknown; the result is False then.
        caller: frame of the transform's call, in the user's code.
    """
    if function is None:
        return False
    # A program that is itself installed may call a transform on functions of its own.
    return _is_installed(caller.filename) or not _is_installed(function.filename)


def _is_function_by_user(program: InnerProgram, inside: Sequence[Frame], caller: Frame) -> bool:
    """Returns True if a program was traced from a function of the program that called the transform.

    Args:
        program: the program in the operation of the transform.
        inside: call stack of one of its operations, innermost first.
        caller: frame of the user's code that called the transform.
    """
    # JAX's text is "name at file:line".
    filename = str(program.jaxpr.debug_info.func_src_info).rpartition(" at ")[2].rpartition(":")[0]
    if package_of(filename) is None:
        return _is_installed(caller.filename) or not _is_installed(filename)
    # A library wrapped the function before it passed it to JAX. The user's function is the outermost frame of the
    # user's code.
    functions = [frame for frame in inside if package_of(frame.filename) is None]
    return _is_by_user(functions[-1] if functions else None, caller)


def _is_installed(filename: str) -> bool:
    """Returns True for a file of an installed package."""
    return not {"site-packages", "dist-packages"}.isdisjoint(pathlib.PurePath(filename).parts)


class _Analysis(NamedTuple):
    """Analysis of a program: how each variable was computed, and from what inputs.

    Attributes:
        program: the program.
        numbers: variable → number of its value. Variables with one number hold equal values.
        sources: variable → bit mask of the inputs in its computation: bit `i` is set for input `i`.
        made_by: variable → the equation with the variable as a result. Inputs have none.
        places_of: tracer passed to the program → indices of its inputs. A tied array is passed as several inputs.
    """

    program: InnerProgram
    numbers: IdentityDict[Any]
    sources: IdentityDict[int]
    made_by: IdentityDict[Any]
    places_of: IdentityDict[list[int]]


def _analyse(program: InnerProgram) -> _Analysis:
    """Numbers the values of a program and collects their inputs, with one look at each equation.

    Two equations with one primitive, equal parameters and equal operands have one number, as in value numbering.
    """
    numbers: IdentityDict[Any] = IdentityDict()
    sources: IdentityDict[int] = IdentityDict()
    made_by: IdentityDict[Any] = IdentityDict()
    places_of: IdentityDict[list[int]] = IdentityDict()

    # Inputs that got one tracer have one number: the index of the first of them.
    for place, (variable, tracer) in enumerate(zip(program.jaxpr.invars, program.inputs, strict=True)):
        places = places_of.get(tracer)
        if places is None:
            places = places_of[tracer] = []
        places.append(place)
        numbers[variable] = places[0]
        sources[variable] = 1 << place

    # (primitive, parameters, numbers of the operands) → number of the equation. Its outputs have the number and their
    # position.
    number_of: dict[Any, int] = {}
    for equation in program.jaxpr.eqns:
        # A parameter that is not hashable is compared by its `id`. The program keeps it alive.
        parameters = [(name, _hashable(value)) for name, value in sorted(equation.params.items())]
        operands: list[Any] = []
        input_mask = 0
        for operand in equation.invars:
            operands.append(numbers[operand] if operand in numbers else _literal(operand))
            input_mask |= sources.get(operand, 0)
        key = equation.primitive, tuple(parameters), tuple(operands)
        number = number_of.setdefault(key, len(program.inputs) + len(number_of))
        for place, variable in enumerate(equation.outvars):
            numbers[variable], sources[variable], made_by[variable] = (number, place), input_mask, equation
    return _Analysis(program, numbers, sources, made_by, places_of)


def _computes_alike(analysis: _Analysis, output1: int, output2: int) -> Sequence[Frame] | None:
    """Returns the call stack that made two outputs of a program, if the program computes them alike from one value.

    That is so in two cases. Both outputs are inputs with one value; then the stack is empty. Or one line made both from
    inputs with one value. A function of trees does this for the paths of a tie.

    Args:
        analysis: the analysis of the program.
        output1: index of the first output.
        output2: index of the second output.

    Returns:
        The call stack, innermost first, or None if the outputs are not computed alike.
    """
    jaxpr = analysis.program.jaxpr
    first, second = jaxpr.outvars[output1], jaxpr.outvars[output2]
    if first not in analysis.numbers or second not in analysis.numbers:
        return None
    is_same_value = analysis.numbers[first] == analysis.numbers[second]
    equations = analysis.made_by.get(first), analysis.made_by.get(second)
    if equations[0] is None and equations[1] is None:
        return () if is_same_value else None
    tracebacks = [getattr(getattr(equation, "source_info", None), "traceback", None) for equation in equations]
    if tracebacks[0] is None or tracebacks[0] != tracebacks[1] or first.aval != second.aval:
        return None
    inside = frames_of_traceback(tracebacks[0])
    if is_same_value:
        return inside
    # One line made both, from different inputs. Look for a tied array that was passed as an input of each.
    for places in analysis.places_of.values():
        in_first = [place for place in places if analysis.sources[first] >> place & 1]
        in_second = [place for place in places if analysis.sources[second] >> place & 1]
        is_tied = len({*in_first, *in_second}) > 1 and in_first and in_second
        if is_tied and jaxpr.invars[places[0]].aval == first.aval:
            return inside
    return None


def _hashable(value: Any) -> Any:
    """Returns the value itself if it is hashable, else its `id`. The caller keeps the value alive."""
    try:
        hash(value)
    except TypeError:
        return id(value)
    return value


def _literal(operand: Any) -> Any:
    """Returns a key for an operand that is a constant of the program or a literal: its class and its value."""
    value = getattr(operand, "val", operand)
    return type(value), _hashable(value)
