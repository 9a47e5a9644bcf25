"""`jax.lax.scan`, `while_loop`, `fori_loop`, `map` and `associative_scan`.

JAX wants the next carry packed as the carry that went in: a leaf group with the same structure. So the carry that the
function returned is joined with the carry that it received (`_joining_trees`). The join finds, for each traced leaf
that went in, the leaf that came out at the same path. If the first trace shows that the two carries do not fit, the
operands are *repacked*: with fewer ties, or with static numbers as traced leaves. Then the function is traced once
more. Later calls repack at once.

In place, changes of the carry are written back at the end. When a loop is traced, nobody knows how often it runs. So
each object that holds traced leaves must come back *in its place*, at the path where it went in. Then the objects at
the end are the caller's, with other content. If an iteration moved or replaced one, the next iteration would do so
again, and nobody could tell which object is where. There is one exception: an object may be replaced if it was not
changed and the object that holds it is replaced, too. So an immutable model can be replaced as a whole, as in vanilla
JAX.

    def body(counter, x):                 def body(pair, x):
        counter.n += x                        pair.a, pair.b = pair.b, pair.a
        return counter, x                     return pair, x
    n is written back                     an error

A *record* is the entry of a node or a leaf in the flat DAG of a tree. Its number is its index there.
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
from ._calls_with_operands import CallWithOperands, TakingOperands, structure_of_argument
from ._function_given_to_jax import Inner
from ._function_side import FunctionTrace, receive
from ._joining_trees import Join, Repacking, Sides, holds_modules, join, leaves_like, repacking_for
from ._leaf_groups import LeafGroup, single_group
from ._pass_through import ReceivedObjects

# The adapters. Each packs the operands, wraps the function, runs the loop and builds the result. ----------------------
#
# In all of them the carry is the operand at position 0. In place, `ys` and the results of `map` bring the changes of an
# operand along: the functions below pack them with `pack_with_changes(result, position of the operand)`. The option
# `with_changes` of `call.leave` has the positions of these results among its arguments.


def scan(call: CallWithOperands, f: Any, init: Any, xs: Any = None, **options: Any) -> Any:
    """Adapter of `jax.lax.scan`. Returns the last carry and the stacked `y`s."""
    # The carry and `xs` are treated in two ways, so they are two leaf groups. The words describe them in errors.
    call.enter(f, {"init": init, "xs": xs}, {"init": "carried", "xs": "scanned"})
    iteration = call.function(f, _run_iteration)
    (carry, ys), objects = _run_until_carry_fits(
        call,
        iteration,
        lambda init, xs: call.apply(iteration, init, xs, **options),
        lambda: call.transform(f, init, xs, **options),
    )
    return call.leave(_refer_to_callers_objects(call, carry, objects, 0), ys, with_changes=(1,))


def while_loop(call: CallWithOperands, cond_fun: Any, body_fun: Any, init_val: Any, **options: Any) -> Any:
    """Adapter of `jax.lax.while_loop`. Returns the last carry."""
    call.enter(body_fun, {"init_val": init_val})
    # `keeps=False`: what the condition changes in place is lost, and a warning says so.
    condition = call.function(cond_fun, _run_condition, keeps=False)
    iteration = call.function(body_fun, _run_iteration_of_while)
    carry, objects = _run_until_carry_fits(
        call,
        iteration,
        lambda init: call.apply(condition, iteration, init, **options),
        lambda: call.transform(cond_fun, body_fun, init_val, **options),
    )
    return call.leave(_refer_to_callers_objects(call, carry, objects, 0))


def fori_loop(call: CallWithOperands, lower: Any, upper: Any, body_fun: Any, init_val: Any, **options: Any) -> Any:
    """Adapter of `jax.lax.fori_loop`. Returns the last carry."""
    call.enter(body_fun, {"init_val": init_val})
    # One argument comes before the operands: the index.
    iteration = call.function(body_fun, _run_iteration_of_fori, num_before=1)
    carry, objects = _run_until_carry_fits(
        call,
        iteration,
        lambda init: call.apply(lower, upper, iteration, init, **options),
        lambda: call.transform(lower, upper, body_fun, init_val, **options),
    )
    return call.leave(_refer_to_callers_objects(call, carry, objects, 0))


def map_over(call: CallWithOperands, f: Any, xs: Any, **options: Any) -> Any:
    """Adapter of `jax.lax.map`, which has no carry. Returns the stacked results."""
    (group,) = call.enter(f, {"xs": xs})
    return call.leave(call.apply(call.function(f, _run_on_slice), group, **options), with_changes=(0,))


def associative_scan(call: CallWithOperands, fn: Any, elems: Any, **options: Any) -> Any:
    """Adapter of `jax.lax.associative_scan`. The result of `fn` must fit its first argument, as a carry does.

    Returns:
        The cumulative results, in the shape of `elems`.
    """
    call.enter(fn, {"elems": elems})
    combination = call.function(fn, _run_combination)
    result, objects = _run_until_carry_fits(
        call,
        combination,
        lambda elems: call.apply(combination, elems, **options),
        lambda: call.transform(fn, elems, **options),
    )
    return call.leave(_refer_to_callers_objects(call, result, objects, 0))


# What JAX traces in place of the user's functions ---------------------------------------------------------------------
#
# Each gets a `FunctionTrace`, which knows the user's function and calls it with trees built from leaf groups. The carry
# is the operand at position 0.


def _run_iteration(trace: FunctionTrace, carry: LeafGroup, xs: LeafGroup) -> Any:
    """Runs one iteration of `scan`: (carry, slice of `xs`) → (next carry, `y`), all of them leaf groups.

    If the user's function returned no pair, and no module, returns its result unchanged, for JAX to refuse.

    Raises:
        TypeError: if the function returned no pair, and its result holds a module.
        CarryError, VanillaError, SharingMismatchError: see `_pack_like_carry`.
    """
    result = trace.call(carry, xs)
    if not isinstance(result, (tuple, list)) or len(result) != 2:
        tree = trace.flatten(result)
        if holds_modules(tree):
            raise TypeError(
                f"The function of `{trace.terms.title}` must return a pair, the carry and the output of the step, but "
                f"it returned a `{type(result).__name__}`."
            )
        # JAX refuses it. Without modules, JAX's own error says more.
        return result
    next_carry, y = result
    # Changes of `xs`, the operand at position 1, come back beside `y`.
    return _pack_like_carry(trace, next_carry, 0, carry), trace.pack_with_changes(y, 1)


def _run_iteration_of_while(trace: FunctionTrace, carry: LeafGroup) -> Any:
    """Runs one iteration of `while_loop`: carry → next carry, both leaf groups."""
    return _pack_like_carry(trace, trace.call(carry), 0, carry)


def _run_iteration_of_fori(trace: FunctionTrace, i: Any, carry: LeafGroup) -> Any:
    """Runs one iteration of `fori_loop`: (index, carry) → next carry. Both carries are leaf groups."""
    return _pack_like_carry(trace, trace.call(carry, before=(i,)), 0, carry)


def _run_condition(trace: FunctionTrace, carry: LeafGroup) -> Any:
    """Runs the condition of `while_loop`, and returns its result unchanged. It should be a boolean.

    JAX refuses anything else, except a tree with a module, which is refused here.

    Raises:
        TypeError: if the result holds a module.
    """
    # The arguments are built for the condition alone. If it changes them in place, the changes are lost.
    received = receive((carry,))
    result = trace.call_with(received, received.arguments.args, {})
    tree = trace.flatten(result)
    # Warns of ties that the condition lost.
    trace.check_flattened(tree)
    if holds_modules(tree):
        raise TypeError(
            f"The condition of `{trace.terms.title}` must return a scalar boolean, but it returned a "
            f"`{type(result).__name__}`."
        )
    return result


def _run_on_slice(trace: FunctionTrace, x: LeafGroup) -> Any:
    """Calls the function of `map` with one slice of `xs`. Returns the leaf group of the result."""
    return trace.pack_with_changes(trace.call(x), 0)


def _run_combination(trace: FunctionTrace, a: LeafGroup, b: LeafGroup) -> Any:
    """Combines two slices for `associative_scan`. The leaf group that it returns is packed like that of `a`."""
    # `call_with_several_trees` builds `a` and `b` by themselves: they share no object.
    return _pack_like_carry(trace, trace.call_with_several_trees(a, b), 0, a)


# Fitting the carry that an iteration returns to the one that it received ----------------------------------------------


class ReturnedObjects(NamedTuple):
    """Outcome of an iteration of a loop, or of a branch, for the caller's objects.

    Each set has numbers of records in `call.packed.tree`, the flat DAG of all operands.

    Attributes:
        kept: objects that came back in their places.
        changed: objects that came back in their places with other content than before. After `merged_with`, an object
            may be in this set and not in `kept`: changed in one iteration, and replaced in another.
        untied: leaves whose ties the user undid on purpose.
    """

    kept: frozenset[int]
    changed: frozenset[int]
    untied: frozenset[int]

    def merged_with(self, earlier: "ReturnedObjects | None") -> "ReturnedObjects":
        """Returns what happened in this iteration and earlier ones together.

        An object is kept if every iteration kept it, changed if one of them changed it, and untied if one of them
        untied it. There are several iterations only if JAX calls the function for each, as under `jax.disable_jit`.

        Args:
            earlier: what happened in earlier iterations. None if there were none.
        """
        if earlier is None:
            return self
        return ReturnedObjects(self.kept & earlier.kept, self.changed | earlier.changed, self.untied | earlier.untied)


NO_OBJECTS = ReturnedObjects(kept=frozenset(), changed=frozenset(), untied=frozenset())


class CarryError(Exception):
    """Tells the adapter that the carry has to be packed in another way.

    A trace raises this, and `_run_until_carry_fits` catches it.

    Attributes:
        terms: terms of the traced function. If loops are nested, they tell whose operands have to be repacked.
        repacking: how to pack the operands.
    """

    def __init__(self, terms: Any, repacking: Repacking) -> None:
        super().__init__("the carry has to be packed in another way")
        self.terms = terms
        self.repacking = repacking


class VanillaError(Exception):
    """Tells the adapter that the carry does not fit and holds no module, so that JAX's own error is the best.

    A trace raises this, and `_run_until_carry_fits` catches it.

    Attributes:
        error: our error. It is raised if JAX finds nothing wrong.
    """

    def __init__(self, error: SharingMismatchError) -> None:
        super().__init__(str(error))
        self.error = error


def _pack_like_carry(trace: FunctionTrace, result: Any, position: int, carry: LeafGroup) -> LeafGroup:
    """Packs the next carry like the carry that the function received. Returns the leaf group.

    Puts a `ReturnedObjects` into `findings` of the call, for `_run_until_carry_fits`.

    Args:
        trace: the trace, after the call of the user's function.
        result: the next carry, as the function returned it.
        position: position of the carry among the operands.
        carry: the leaf group of the carry that the function received.

    Raises:
        CarryError: if the operands have to be packed in another way.
        VanillaError: if the two carries cannot be joined and hold no module.
        SharingMismatchError: if they cannot be joined and one of them holds a module, or if an object is not where
            `in_place=True` needs it.
    """
    terms, received = trace.terms, trace.received.tree
    carry_in, carry_out = received.child(position), trace.flatten(result)
    # Words for the two carries, and the name of the operand, in errors.
    sides = Sides(terms.title, "when an iteration begins", "when it ends")
    path_to_carry = (LeafPath(terms.names.text(position)),)
    # 1. Compare both carries. `join` pairs the records at the same paths.
    try:
        joined = join(carry_in, carry_out, sides, path_to_carry)
    except SharingMismatchError as error:
        if holds_modules(carry_in) or holds_modules(carry_out):
            raise
        raise VanillaError(error) from None
    if not joined.fits:
        raise CarryError(terms, repacking_for(received, carry_in, carry_out, joined))
    # 2. Collect the leaves that come out, in the order of those that came in.
    leaves = leaves_like(carry_in, carry_out, joined)
    # `structure_of_argument` returns the structure of the carry by itself, and the numbers of its records among all
    # operands.
    _, records_of_carry = structure_of_argument(carry.selection.structure, position)
    leaf_numbers = [number for number in records_of_carry if received.records[number][0] is LEAF]
    # A leaf is noted if the user untied it on purpose, or if the loss of its tie has been reported.
    untied = frozenset([number for number, leaf in zip(leaf_numbers, leaves, strict=True) if is_noted(leaf)])
    # 3. Tell the adapter which objects came back. Only in place does it need more than the untied leaves.
    kept, changed = frozenset[int](), frozenset[int]()
    if terms.policy.in_place:
        kept, changed = find_kept_objects(
            received, carry_in, carry_out, joined, path_to_carry, containers=terms.policy.containers
        )
    call = trace.received.call
    # There is no call if JAX traces the function again after the call has ended.
    if call is not None:
        call.findings = ReturnedObjects(kept, changed, untied).merged_with(call.findings)
    return LeafGroup(leaves, carry.selection)


def find_kept_objects(
    received: FlatDag, part_in: FlatDag, part_out: FlatDag, joined: Join, path_to_part: Path, *, containers: bool
) -> tuple[frozenset[int], frozenset[int]]:
    """Finds the objects that came back in their places, and those of them that were changed.

        part_in    Pair(a, b)

        part_out   Pair(a, b)            the same three objects: all are kept. Those with other content are changed
                   Pair(b, a)            error: `b` was moved
                   Pair(a, Layer(w))     if it is the same `Pair`: error, since `b` was replaced in it
                   Pair(a, Layer(w))     if it is a new `Pair`: `a` is kept, and `b` is not. Error if `b` was changed

    Args:
        received: all arguments of the function. The records are from before the call. The function may have changed the
            objects since.
        part_in: the part of `received` to compare, such as the carry.
        part_out: the tree returned for this part.
        joined: the join of `part_in` and `part_out`.
        path_to_part: path to both, for errors.
        containers: True if mutable containers outside modules carry identity.

    Returns:
        The kept objects; and the changed ones among them. Both are sets of records of `received`.

    Raises:
        SharingMismatchError: if an object that holds traced leaves was moved, was replaced within one that came back,
            or was changed and not returned.
    """
    received_objects = ReceivedObjects(received, containers=containers)
    node_records = {record for record in received_objects.records if type(received.records[record][0]) is Node}
    paths = part_in.first_paths
    kept: set[int] = set()
    replaced: set[int] = set()
    # 1. Tell kept objects from replaced ones. The two records of a pair are at one path.
    for record_in, record_out in joined.pairs:
        if record_in not in node_records:
            continue
        if part_out.objects[record_out] is received.objects[record_in]:
            kept.add(record_in)
        # An object without traced leaves may be moved or replaced: what stands there has the same static content, as
        # `join` has found.
        elif part_in.holds_leaf[record_in]:
            if received_objects.record_of(part_out.objects[record_out]) is not None:
                _raise_not_in_place(
                    (*path_to_part, *paths[record_in]), "another object that the function received was put there"
                )
            replaced.add(record_in)
    # 2. No new object may stand in one that came back: the next iteration would replace it again.
    for record_in in kept:
        for child in received.records[record_in][1]:
            if child in replaced:
                _raise_not_in_place((*path_to_part, *paths[child]), "a new object was put there")
    # 3. A change of an object that is not returned would be lost.
    for record_in in replaced - kept:
        if not received_objects.is_unchanged(record_in):
            _raise_not_in_place(
                (*path_to_part, *paths[record_in]), "it was changed, and another object was returned in its place"
            )
    return frozenset(kept), frozenset([record_in for record_in in kept if not received_objects.is_unchanged(record_in)])


def _raise_not_in_place(path: Path, reason: str) -> NoReturn:
    """Raises the error for an object that `in_place=True` could not write back, in a loop or in a branch.

    Args:
        path: path of the object.
        reason: what happened to the object, as the end of a sentence: "a new object was put there".

    Raises:
        SharingMismatchError: always.
    """
    text = jtu.keystr(path)
    raise SharingMismatchError(
        f"`{text}` must stay in its place under `in_place=True`, but {reason}.\n"
        "A loop repeats its changes in each iteration, and a branch may not be taken at all. So no object with traced "
        "leaves may be replaced. Change its contents:\n"
        "    layer.weight = new                 # not: model.layer = Layer(new)\n"
        "or return a new model, without `in_place=True`.",
        (text,),
    )


# The caller's side ----------------------------------------------------------------------------------------------------


def _run_until_carry_fits(
    call: CallWithOperands, iteration: Inner, run: Callable[..., Any], run_vanilla: Callable[[], Any]
) -> tuple[Any, ReturnedObjects]:
    """Runs a loop. If a trace raises `CarryError`, repacks the operands and runs the loop again, until the carry fits.

    `iteration.terms.learned` remembers for later calls what the traces found out, by the structure of the operands and
    by the types of their leaves. The entry is one of two:

    - A `Repacking`: the carry does not fit as it is packed. A later call repacks at once.
    - A `ReturnedObjects`: the carry fits. A later call may find the trace in JAX's cache. Then the function is not
      called, and what happened to the caller's objects is taken from the entry.

    Args:
        call: the call of the transform.
        iteration: the function for JAX to trace.
        run: (leaf groups of the operands) → what the transform returns.
        run_vanilla: calls the transform with the user's own function and operands, for its errors.

    Returns:
        What the transform returned, and what happened to the caller's objects in an iteration.

    Raises:
        SharingMismatchError: if the carry cannot fit, and JAX finds nothing wrong or there are modules.
        TypeError: JAX's own, with the name of the user's parameter.
        CarryError: if the carry of an outer loop does not fit, whose function calls this loop.
    """
    terms = iteration.terms
    while True:
        # 1. Look up what earlier calls have found out. `call.packed` is another object after each repacking.
        packed_call = call.packed
        key = (packed_call.tree.structure,)
        # For operands of this structure: types of the leaves → `Repacking` or `ReturnedObjects`. The types count, since
        # a function can do something else with arrays of other shapes and dtypes.
        known_by_types = terms.learned.get(key)
        types = None if known_by_types is None else leaf_types(packed_call)
        # None if nothing is known yet.
        learned = None if known_by_types is None else known_by_types.get(types)
        # 2. Run the loop, unless it is known that the carry will not fit.
        if not isinstance(learned, Repacking):
            try:
                result = run(*packed_call.groups)
            except TypeError as error:
                _name_users_parameter(error, iteration)
                raise
            except VanillaError as error:
                # Called for JAX's own error. If JAX finds nothing wrong, ours follows.
                run_vanilla()
                raise error.error from None
            except CarryError as error:
                if error.terms is not terms:
                    # The carry of an outer loop does not fit. The call of that loop catches the error.
                    raise
                learned = error.repacking
                terms.learned.add(key, {**(known_by_types or {}), leaf_types(packed_call): learned})
            else:
                # The carry fits. If JAX had the trace in its cache, there are no findings, and `learned` stays.
                # `NO_OBJECTS` is what `learned or NO_OBJECTS` gives without an entry, so it needs none.
                if packed_call.findings is not None and packed_call.findings != NO_OBJECTS:
                    learned = packed_call.findings
                    terms.learned.add(key, {**(known_by_types or {}), leaf_types(packed_call): learned})
                elif packed_call.findings is None and jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]
                    # JAX traces nothing here, and calls the function in each iteration. It was not called, so there was
                    # no iteration, and every object is what it was.
                    learned = NO_OBJECTS._replace(kept=frozenset(range(len(packed_call.tree.records))))
                return result, learned or NO_OBJECTS
        # 3. Repack. `call.packed` gets another structure, for which there may be an entry in the next round.
        call.repack(learned)


def leaf_types(call: Call) -> Any:
    """Returns a tuple of the shapes and dtypes of all leaves of a call. None if JAX will refuse one of the leaves."""
    try:
        return tuple(map(jax.typeof, call.leaves))
    except TypeError:
        return None


def _name_users_parameter(error: TypeError, iteration: Inner) -> None:
    """Puts the name of the user's parameter into JAX's error about a carry, as in vanilla JAX.

    Changes the text of the error: `input carry component init.w` becomes `input carry component net.w` if the function
    is `def step(net, x)`. Does nothing for other errors, or if the function has no parameter for the carry.
    """
    # The carry is the first operand. In the user's function it comes after the arguments that are no operands, such as
    # the index of `fori_loop`.
    carry_name, position = iteration.terms.names.text(0), iteration.num_before
    parameters = Names(iteration.function).positional
    # Our own `SharingMismatchError` is a `TypeError`, too.
    if position < len(parameters) and not isinstance(error, SharingMismatchError):
        # JAX may put `loop_carry[0]` before the name of the operand.
        pattern = rf"(input carry component )(?:loop_carry\[\d+\])?{carry_name}(?=[ .\[])"
        error.args = (re.sub(pattern, lambda match: match[1] + parameters[position], str(error)),)


def _refer_to_callers_objects(
    call: CallWithOperands, carry: LeafGroup, objects: ReturnedObjects, position: int
) -> LeafGroup:
    """Returns the leaves of the last carry with the structure from which the caller's result is built.

    In place, this structure refers to the caller's objects where they came back. See `structure_for_caller`.

    Args:
        call: the call of the transform.
        carry: the leaf group returned by the transform.
        objects: what happened to the caller's objects in an iteration.
        position: position of the carry among the operands.
    """
    # `part` is the structure of the carry by itself. For each of its records, `numbers` has the number of the same
    # record among all operands.
    part, numbers = structure_of_argument(carry.selection.structure, position)
    untied = frozenset([record for record, number in enumerate(numbers) if number in objects.untied])
    records = call.packed.tree.records
    return single_group(
        carry.leaves,
        structure_for_caller(part, numbers, objects, records, in_place=bool(call.policy.in_place), untied=untied),
    )


def structure_for_caller(
    part: Structure,
    numbers: Sequence[int],
    objects: ReturnedObjects,
    received: Sequence[Record],
    *,
    in_place: bool,
    untied: frozenset[int],
) -> Structure:
    """Returns the structure from which a returned tree is built on the caller's side.

    In place, it refers to the caller's objects: `Given(i)` takes the caller's object with the number i as it is, and
    `Update(i, node)` writes the content of `node` into it. For a new `Pair(counter, config)`, whose `counter` was
    received and changed, and whose `config` was received:

        part       Pair(Counter(·), Config(1))
        result     Pair(Update(1, Counter(·)), Given(3))       in place
        result     Pair(Counter(·), Config(1))                 otherwise: all objects are new

    The structure also records which of its leaves the user untied on purpose, so that no warning follows for them.

    Args:
        part: structure of the returned tree.
        numbers: for each record of `part`, its number among the caller's records; -1 if it has none.
        objects: the objects that came back, and the changed ones among them.
        received: the caller's records.
        in_place: True if changes are written back. If False, all objects are new.
        untied: leaves that the user untied on purpose, as records of `part`.
    """
    records: list[Any] = []
    for (op, children), number in zip(part.records, numbers, strict=True):
        new_op: Op = op
        if in_place and number in objects.changed and type(op) is Node:
            # The operation that was received may hold static objects, such as a config, that the caller keeps.
            op_received, _ = received[number]
            new_op = Update.of(number, op, op_received)
        elif in_place and number in objects.kept:
            # `Given` takes the caller's object with all that is below it, so the record needs no children.
            new_op, children = Given(number), ()
        records.append((new_op, children))
    untied_places = tuple([place for place, number in enumerate(part.leaf_numbers) if number in untied])
    return intern(tuple(records), part.root, base=0, context_mark=None, noted=untied_places)


SCAN = TakingOperands(scan)
WHILE_LOOP = TakingOperands(while_loop)
# The loops that Equinox uses itself. They refuse `in_place=True`.
UNWRITTEN_SCAN = TakingOperands(scan, writes=False)
UNWRITTEN_WHILE_LOOP = TakingOperands(while_loop, writes=False)
FORI_LOOP = TakingOperands(fori_loop)
MAP = TakingOperands(map_over)
ASSOCIATIVE_SCAN = TakingOperands(associative_scan, writes=False)
