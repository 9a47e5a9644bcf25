"""`jax.lax.scan`, `while_loop`, `fori_loop`, `map` and `associative_scan`.

Each iteration must return the carry in the leaf group in which it received it. So what the function returns is joined
with what it received (`_joining_trees`). If the first trace shows that they do not fit, the operands are repacked and
the function is traced once more. Later calls remember the repacking.

In place, changes of the carry are written back at the end. Nobody knows how often a loop runs when it is traced. So
each object that holds traced leaves must come back in its place: then the objects at the end are the caller's, with
other content. If an iteration moved or replaced one, the next iteration would do so again, and nobody could tell which
object is where. An immutable model can be replaced as a whole, as in vanilla JAX.

    def body(counter, x):                 def body(pair, x):
        counter.n += x                        pair.a, pair.b = pair.b, pair.a
        return counter, x                     return pair, x
    n is written back                     an error
"""

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
from jax import tree_util as jtu

from ..core._call_arguments import LeafPath
from ..core._errors import SharingMismatchError
from ..core._structure import LEAF, FlatDag, Given, Node, Op, Path, Record, Structure, Update, intern
from ..ties._leaf_notes import is_noted
from ._argument_names import Names
from ._caller_side import Call
from ._calls_with_operands import CallWithOperands, TakingOperands, part_of
from ._function_given_to_jax import Inner
from ._function_side import FunctionTrace, receive
from ._joining_trees import Join, Repacking, Sides, holds_modules, join, leaves_like, repacking_for
from ._leaf_groups import LeafGroup, whole
from ._pass_through import ReceivedObjects

# The adapters. Each packs the operands, wraps the function, runs the loop and builds the result. ----------------------


def scan(call: CallWithOperands, f: Any, init: Any, xs: Any = None, **options: Any) -> Any:
    """Adapter of `jax.lax.scan`."""
    call.enter(f, {"init": init, "xs": xs}, {"init": "carried", "xs": "scanned"})
    iteration = call.function(f, _iteration)
    (carry, ys), objects = _run_until_carry_fits(
        call,
        iteration,
        lambda init, xs: call.apply(iteration, init, xs, **options),
        lambda: call.transform(f, init, xs, **options),
    )
    return call.leave(_with_callers_objects(call, carry, objects, 0), ys, with_state=(1,))


def while_loop(call: CallWithOperands, cond_fun: Any, body_fun: Any, init_val: Any, **options: Any) -> Any:
    """Adapter of `jax.lax.while_loop`."""
    call.enter(body_fun, {"init_val": init_val})
    condition = call.function(cond_fun, _condition, keeps=False)
    iteration = call.function(body_fun, _iteration_of_carry)
    carry, objects = _run_until_carry_fits(
        call,
        iteration,
        lambda init: call.apply(condition, iteration, init, **options),
        lambda: call.transform(cond_fun, body_fun, init_val, **options),
    )
    return call.leave(_with_callers_objects(call, carry, objects, 0))


def fori_loop(call: CallWithOperands, lower: Any, upper: Any, body_fun: Any, init_val: Any, **options: Any) -> Any:
    """Adapter of `jax.lax.fori_loop`."""
    call.enter(body_fun, {"init_val": init_val})
    iteration = call.function(body_fun, _iteration_with_index, num_before=1)
    carry, objects = _run_until_carry_fits(
        call,
        iteration,
        lambda init: call.apply(lower, upper, iteration, init, **options),
        lambda: call.transform(lower, upper, body_fun, init_val, **options),
    )
    return call.leave(_with_callers_objects(call, carry, objects, 0))


def map_over(call: CallWithOperands, f: Any, xs: Any, **options: Any) -> Any:
    """Adapter of `jax.lax.map`, which has no carry."""
    (group,) = call.enter(f, {"xs": xs})
    return call.leave(call.apply(call.function(f, _one_element), group, **options), with_state=(0,))


def associative_scan(call: CallWithOperands, fn: Any, elems: Any, **options: Any) -> Any:
    """Adapter of `jax.lax.associative_scan`. The result of `fn` must fit its first argument, as a carry."""
    call.enter(fn, {"elems": elems})
    combination = call.function(fn, _combination)
    result, objects = _run_until_carry_fits(
        call,
        combination,
        lambda elems: call.apply(combination, elems, **options),
        lambda: call.transform(fn, elems, **options),
    )
    return call.leave(_with_callers_objects(call, result, objects, 0))


# What JAX traces in place of the user's functions ---------------------------------------------------------------------


def _iteration(trace: FunctionTrace, carry: LeafGroup, xs: LeafGroup) -> Any:
    """Runs one iteration of `scan`: (carry, slice of xs) → (carry, y), all of them leaf groups."""
    result = trace.call(carry, xs)
    if not isinstance(result, (tuple, list)) or len(result) != 2:
        tree = trace.walked(result)
        if holds_modules(tree):
            raise TypeError(
                f"The function of `{trace.terms.title}` returns a pair, the carry and what is emitted, but it "
                f"returned a `{type(result).__name__}`."
            )
        # Without modules, JAX's own error for it says more.
        return result
    next_carry, y = result
    return _pack_like_carry(trace, next_carry, 0, carry), trace.pack_with_state(y, 1)


def _iteration_of_carry(trace: FunctionTrace, carry: LeafGroup) -> Any:
    return _pack_like_carry(trace, trace.call(carry), 0, carry)


def _iteration_with_index(trace: FunctionTrace, i: Any, carry: LeafGroup) -> Any:
    return _pack_like_carry(trace, trace.call(carry, before=(i,)), 0, carry)


def _condition(trace: FunctionTrace, carry: LeafGroup) -> Any:
    """Runs the condition of `while_loop`, which returns a boolean."""
    # What a condition changes in place is not kept, so it gets objects of its own.
    received = receive((carry,))
    result = trace.call_with(received, received.arguments.args, {})
    tree = trace.walked(result)
    trace.check_walked(tree)
    if holds_modules(tree):
        raise TypeError(
            f"The first function of `{trace.terms.title}` says whether to go on, with a boolean of no dimensions, but "
            f"it returned a `{type(result).__name__}`."
        )
    return result


def _one_element(trace: FunctionTrace, x: LeafGroup) -> Any:
    return trace.pack_with_state(trace.call(x), 0)


def _combination(trace: FunctionTrace, a: LeafGroup, b: LeafGroup) -> Any:
    return _pack_like_carry(trace, trace.call_apart(a, b), 0, a)


# Fitting the carry that an iteration returns to the one that it received ----------------------------------------------


class CarryObjects(NamedTuple):
    """Objects of the carry at the end of an iteration, as numbers of records of the call.

    Attributes:
        kept: objects returned in their places.
        changed: kept objects with other content than before.
        untied: leaves untied by the user on purpose.
    """

    kept: frozenset[int]
    changed: frozenset[int]
    untied: frozenset[int]

    def merged_with(self, earlier: "CarryObjects | None") -> "CarryObjects":
        """Adds up two iterations. Without `jit`, JAX calls the function for each, and each may change other objects."""
        if earlier is None:
            return self
        return CarryObjects(self.kept & earlier.kept, self.changed | earlier.changed, self.untied | earlier.untied)


NO_OBJECTS = CarryObjects(frozenset(), frozenset(), frozenset())


class CarryError(Exception):
    """The carry has to be packed in another way. Raised by a trace for the adapter, which catches it.

    Attributes:
        terms: terms of the traced function. Of several nested loops, they name the one to repack.
        repacking: how to pack the operands.
    """

    def __init__(self, terms: Any, repacking: Repacking) -> None:
        super().__init__("the carry has to be packed in another way")
        self.terms = terms
        self.repacking = repacking


class VanillaError(Exception):
    """The carry does not fit and holds no module. JAX's own error says best what is wrong."""

    def __init__(self, error: SharingMismatchError) -> None:
        super().__init__(str(error))
        self.error = error


def _pack_like_carry(trace: FunctionTrace, result: Any, position: int, carry: LeafGroup) -> LeafGroup:
    """Packs the next carry into the leaf group in which the carry was received.

    Notes on the call which objects came back in their places.

    Args:
        trace: the trace.
        result: the next carry, as the function returned it.
        position: position of the carry among the operands.
        carry: the leaf group as it was received.

    Raises:
        CarryError: if the operands have to be packed in another way.
        VanillaError: if the two cannot be joined and hold no module.
        SharingMismatchError: if they cannot be joined.
    """
    terms, received = trace.terms, trace.received.tree
    carry_in, carry_out = received.child(position), trace.walked(result)
    sides, path_to_carry = (
        Sides(terms.title, "when an iteration begins", "when it ends"),
        (LeafPath(terms.names.text(position)),),
    )
    # 1. Compare both carries.
    try:
        joined = join(carry_in, carry_out, sides, path_to_carry)
    except SharingMismatchError as error:
        if holds_modules(carry_in) or holds_modules(carry_out):
            raise
        raise VanillaError(error) from None
    if not joined.fits:
        raise CarryError(terms, repacking_for(received, carry_in, carry_out, joined))
    # 2. Collect the leaves in the order in which they came in.
    leaves = leaves_like(carry_in.below(carry_in.root), carry_out, joined)
    records_of_carry = part_of(carry.selection.structure, position)[1]
    leaf_numbers = [number for number in records_of_carry if received.records[number][0] is LEAF]
    untied = frozenset([number for number, leaf in zip(leaf_numbers, leaves, strict=True) if is_noted(leaf)])
    # 3. In place, note for the caller's side which objects it gets back.
    kept, changed = frozenset[int](), frozenset[int]()
    if terms.policy.in_place:
        kept, changed = find_kept_objects(
            received, carry_in, carry_out, joined, path_to_carry, containers=terms.policy.containers
        )
    call = trace.received.call
    if call is not None:
        call.findings = CarryObjects(kept, changed, untied).merged_with(call.findings)
    return LeafGroup(leaves, carry.selection)


def find_kept_objects(
    received: FlatDag, part_in: FlatDag, part_out: FlatDag, joined: Join, path_to_part: Path, *, containers: bool
) -> tuple[frozenset[int], frozenset[int]]:
    """Finds the objects that came back in their places, and those of them that were changed.

    Args:
        received: all arguments of the function, with their present content.
        part_in: the part of `received` to compare, such as the carry.
        part_out: the tree returned for this part.
        joined: the join of the two.
        path_to_part: path to both, for errors.
        containers: True if mutable containers outside modules carry identity.

    Returns:
        Numbers of their records in `received`.

    Raises:
        SharingMismatchError: if an object that holds traced leaves was moved, was replaced within one that came back,
            or was changed and not returned.
    """
    received_objects = ReceivedObjects(received, containers=containers)
    objects = {record for record in received_objects.records if type(received.records[record][0]) is Node}
    paths = part_in.first_paths
    kept: set[int] = set()
    replaced: set[int] = set()
    for i, j in joined.pairs:
        if i not in objects:
            continue
        if part_out.objects[j] is received.objects[i]:
            kept.add(i)
        elif part_in.holds_leaf[i]:
            if received_objects.record_of(part_out.objects[j]) is not None:
                _raise_not_in_place(
                    (*path_to_part, *paths[i]), "another object that the function received was put there"
                )
            replaced.add(i)
    # A new object may not stand in an old one: the next iteration would replace it again.
    for i in kept:
        for child in received.records[i][1]:
            if child in replaced:
                _raise_not_in_place((*path_to_part, *paths[child]), "a new object was put there")
    # A change of an object that is not returned would be lost.
    for i in replaced - kept:
        if not received_objects.is_unchanged(i):
            _raise_not_in_place(
                (*path_to_part, *paths[i]), "it was changed, and another object was returned in its place"
            )
    return frozenset(kept), frozenset([i for i in kept if not received_objects.is_unchanged(i)])


def _raise_not_in_place(path: Path, reason: str) -> NoReturn:
    """Raises the error for an object that `in_place=True` could not write back."""
    text = jtu.keystr(path)
    raise SharingMismatchError(
        f"`{text}` did not come back in its place: {reason}.\n"
        "A loop changes in the next iteration again what it changes in place, and which branch is taken is not known "
        "when it is traced. So each object that holds traced leaves stays where it is. Change what is in it:\n"
        "    layer.weight = new                 # not: model.layer = Layer(new)\n"
        "or return a new model, without `in_place=True`.",
        (text,),
    )


# The caller's side ----------------------------------------------------------------------------------------------------


def _run_until_carry_fits(
    call: CallWithOperands, iteration: Inner, run: Callable[..., Any], run_vanilla: Callable[[], Any]
) -> tuple[Any, CarryObjects]:
    """Runs a loop. Repacks the operands and runs it again as often as a trace asks for it.

    Args:
        call: the call of the transform.
        iteration: the function for JAX to trace.
        run: (leaf groups of the operands) → what the transform returns.
        run_vanilla: calls the transform with the user's own function and operands, for its errors.

    Returns:
        The result of the transform, and the objects of the carry.
    """
    terms = iteration.terms
    while True:
        packed_call = call.packed
        structures = (packed_call.tree.structure,)
        # What earlier calls with this structure have shown: types of the leaves → `Repacking` or `CarryObjects`. The
        # types count, since a function can do something else with arrays of other shapes and types.
        known_by_types = terms.learned.get(structures)
        types = None if known_by_types is None else leaf_types(packed_call)
        learned = None if known_by_types is None else known_by_types.get(types)
        if not isinstance(learned, Repacking):
            try:
                result = run(*packed_call.groups)
            except TypeError as error:
                _name_parameter(error, iteration)
                raise
            except VanillaError as error:
                run_vanilla()
                raise error.error from None
            except CarryError as error:
                if error.terms is not terms:
                    # It is an outer loop's.
                    raise
                learned = error.repacking
                terms.learned.add(structures, {**(known_by_types or {}), leaf_types(packed_call): learned})
            else:
                if packed_call.findings is not None and packed_call.findings != NO_OBJECTS:
                    learned = packed_call.findings
                    terms.learned.add(structures, {**(known_by_types or {}), leaf_types(packed_call): learned})
                elif packed_call.findings is None and jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]
                    # There was no iteration at all, so every object is what it was.
                    learned = NO_OBJECTS._replace(kept=frozenset(range(len(packed_call.tree.records))))
                return result, learned or NO_OBJECTS
        call.repack(learned)


def leaf_types(call: Call) -> Any:
    """Returns the shapes and dtypes of all leaves of a call. None if JAX will refuse one of the leaves."""
    try:
        return tuple(map(jax.typeof, call.leaves))
    except TypeError:
        return None


def _name_parameter(error: TypeError, iteration: Inner) -> None:
    """Lets JAX's error about a carry name the parameter of the user's function, as in vanilla JAX."""
    operand, place = iteration.terms.names.text(0), iteration.num_before
    parameters = Names(iteration.function).positional
    if place < len(parameters) and not isinstance(error, SharingMismatchError):
        pattern = rf"(input carry component )(?:loop_carry\[\d+\])?{operand}(?=[ .\[])"
        error.args = (re.sub(pattern, lambda match: match[1] + parameters[place], str(error)),)


def _with_callers_objects(call: CallWithOperands, carry: LeafGroup, objects: CarryObjects, position: int) -> LeafGroup:
    """Returns the last carry as a tree in which the caller's objects stand where they came back.

    Args:
        call: the call of the transform.
        carry: the leaf group returned by the transform.
        objects: the caller's objects at the end of an iteration, as the traces have shown them.
        position: position of the carry among the operands.
    """
    part, numbers = part_of(carry.selection.structure, position)
    untied = frozenset([record for record, number in enumerate(numbers) if number in objects.untied])
    records = call.packed.tree.records
    return whole(
        carry.leaves,
        refer_to_kept(part, numbers, objects, records, in_place=bool(call.policy.in_place), untied=untied),
    )


def refer_to_kept(
    part: Structure,
    numbers: Sequence[int],
    objects: CarryObjects,
    received: Sequence[Record],
    *,
    in_place: bool,
    untied: frozenset[int],
) -> Structure:
    """Returns a structure in which the objects that came back refer to the caller's objects.

    Args:
        part: structure of the returned tree.
        numbers: for each record of `part`, its number among the caller's records; -1 if it has none.
        objects: the objects that came back, and the changed ones among them.
        received: the caller's records.
        in_place: True if changes are written back. If False, all objects are new.
        untied: records of `part` whose leaves the user untied on purpose.
    """
    records: list[Any] = []
    for (op, children), number in zip(part.records, numbers, strict=True):
        new_op: Op = op
        if in_place and number in objects.changed and type(op) is Node:
            new_op = Update.of(number, op, received[number][0])
        elif in_place and number in objects.kept:
            new_op, children = Given(number), ()
        records.append((new_op, children))
    untied_places = tuple([place for place, number in enumerate(part.leaf_numbers) if number in untied])
    return intern(tuple(records), part.root, 0, None, untied_places)


SCAN = TakingOperands(scan)
WHILE_LOOP = TakingOperands(while_loop)
# The loops that Equinox uses itself. They refuse `in_place=True`.
UNWRITTEN_SCAN = TakingOperands(scan, writes=False)
UNWRITTEN_WHILE_LOOP = TakingOperands(while_loop, writes=False)
FORI_LOOP = TakingOperands(fori_loop)
MAP = TakingOperands(map_over)
ASSOCIATIVE_SCAN = TakingOperands(associative_scan, writes=False)
