"""Warns of changes that a function makes in its arguments, if nothing writes them back and it does not return them.

    @st.jit
    def step(model, optimizer, batch):
        gradient = st.grad(loss)(model, batch)      # `loss` changes running averages in the model: lost
        optimizer.update(model, gradient)           # changes the model and the optimizer: lost, too

A transform calls a function with copies of its arguments. So what the function changes in them does not reach the
caller. Users of some libraries (NNX, treex, `sharedtree.Module`) expect that it does, since the transforms of these
libraries write changes back. Objects of such classes are called *state*. When a function is traced and changes in state
are lost, we warn, unless the transform has an explicit `in_place=True` or `in_place=False`.

Objects of other classes, such as a batch that is scaled in place, are called *scratch*. Changes in scratch are worth a
warning only if a transform further out writes changes back, because a reader then expects that this one does, too.

Transforms nest, and each lost change causes one warning. It names the outermost function without an explicit
`in_place`, because that is the first one that needs it, and lists the functions inside. A function that is only traced
(`jax.eval_shape`, `lower`) does not run, so nothing is lost. But JAX keeps its trace, and a later call may run it
without a new trace. So the losses are stored, and the first call that runs the trace warns.

A *record* is the number of an object in a flat DAG, here of the flattened arguments. The DAG has the objects as they
are now, after the changes, and for each record the children that the object had when it was received.
"""

import functools
import inspect
import operator
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Self

from jax import tree_util as jtu

from ...core._call_arguments import Arguments
from ...core._errors import Definition, LostChangeWarning, SharedTreeError, definition_of, warn_about
from ...core._locks import Lock
from ...core._node_types import node_type_of
from ...core._pack_and_unpack import Rules, Tags, flat_dag_of, pack
from ...core._printing import listed
from ...core._structure import LEAF, FlatDag, Node, Path, Structure
from ...ties._leaf_notes import noting_gradients
from ...ties._policy_and_context import Policy
from .._function_and_options import in_code
from ._refused_arguments import bound_module
from ._returned_changes import Change, lost_changes


class Loss(NamedTuple):
    """Changes that one function made in its arguments and did not return.

    Attributes:
        definition: where the function is defined.
        title: name of the transform.
        options: options of the transform, by name.
        paths: paths of the leaves that the function replaced.
        added: paths of the variables and modules that the function added.
        removed: paths of the variables and modules that the function removed.
        is_state: True if all changes are in state, False if some are in scratch.
        obstacle: why the transform cannot write the changes back, as a sentence. Empty if it can.
        obstacle_to_adding: why the transform cannot add anything to an object, or remove anything. Empty if it can.
        scratch: paths of changes in scratch, which `in_place=True` would write back as well.
        bound_to: how to call the function on the module to which it is bound, as code. Empty if it is not bound to a
            module, or if that module was not changed.
        applied_to: the function as code, if its name is not enough: a partial, a method of a class. Otherwise empty.
        is_condition: True for the condition of a loop, which keeps nothing.
        keeps_tracers: True if the function changed the module to which it is bound, and this is no argument.
    """

    definition: Definition
    title: str
    options: Mapping[str, Any]
    paths: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    is_state: bool = True
    obstacle: str = ""
    obstacle_to_adding: str = ""
    scratch: tuple[str, ...] = ()
    bound_to: str = ""
    applied_to: str = ""
    is_condition: bool = False
    keeps_tracers: bool = False

    @property
    def all_paths(self) -> tuple[str, ...]:
        """Paths of all changes. Empty if only functions inside lost something."""
        return (*self.paths, *self.added, *self.removed)

    def description(self) -> str:
        """Returns a part of a sentence about the changes, such as "changes `a`, adds `b` and removes `c`".

        There must be at least one path.
        """
        verbs = (("changes", self.paths), ("adds", self.added), ("removes", self.removed))
        parts = [f"{verb} {_first_few(paths)}" for verb, paths in verbs if paths]
        return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"

    @property
    def place(self) -> tuple[Any, ...]:
        """Name, file and line of the function's definition. They stand for the function itself."""
        return self.definition[:3]


# ---- The functions that are being traced ----


class _Frame(NamedTuple):
    """A function being traced, in the stack of all functions being traced.

    Attributes:
        is_in_place: the explicit `in_place` of the function's transform or, without one, of the nearest transform
            around it. False if there is none.
        ignores_losses: True for an explicit `in_place=False`: changes are meant to be lost.
        runs: False if the program being traced will not run.
        losses: the list of losses. The outermost function without an explicit `in_place` makes it, and the functions
            inside append to it, too. None if there is no such function.
    """

    is_in_place: bool = False
    ignores_losses: bool = False
    runs: bool = True
    losses: list[Loss] | None = None


class _Active(threading.local):
    """The functions being traced in one thread, the innermost last. The first frame stands for code outside of them."""

    def __init__(self) -> None:
        self.frames = [_Frame()]


_active = _Active()


class DeferredLosses:
    """Losses without a warning so far, because their traces did not run.

    JAX keeps the traces, so a later call may run one of them without a new trace. Then this call warns.
    """

    def __init__(self) -> None:
        # Structure of the arguments → the losses in their trace. JAX's caches keep the structure alive.
        self._losses: weakref.WeakKeyDictionary[Structure, list[Loss]] = weakref.WeakKeyDictionary()
        self._lock = Lock()

    def add(self, structure: Structure, losses: list[Loss]) -> None:
        """Stores losses until a call with arguments of this structure runs."""
        with self._lock:
            self._losses[structure] = losses

    def drop(self, structure: Structure) -> None:
        """Drops the losses of a structure, because a trace that runs has reported them."""
        if self._losses:
            with self._lock:
                self._losses.pop(structure, None)

    def __bool__(self) -> bool:
        """Returns True if losses are stored, so that a later call may have to warn."""
        return bool(self._losses)

    def report(self, structure: Structure) -> None:
        """Reports the losses in an earlier trace, now that a call with arguments of this structure runs it."""
        if not self._losses:
            return
        # The function that makes the call, if one is being traced.
        frame = _active.frames[-1]
        if frame.ignores_losses or not frame.runs:
            return
        with self._lock:
            losses = self._losses.pop(structure, None)
        if losses is not None and frame.losses is not None:
            # The outermost function warns of them, with all others.
            frame.losses.extend(losses)
        elif losses is not None:
            _warn(losses, is_in_place=frame.is_in_place)


class only_traced:  # noqa: N801 -- a context manager
    """Surrounds the tracing of a program that does not run. Losses in it become `DeferredLosses`, without a warning."""

    def __enter__(self) -> None:
        _active.frames.append(_active.frames[-1]._replace(runs=False, losses=None))

    def __exit__(self, *_: object) -> None:
        _active.frames.pop()


class FunctionBeingTraced:
    """A context manager around the call of a user's function. At its exit it warns of the lost changes.

    Between entry and exit, `check_result` and `check_bound_module` look for the changes.

    Args:
        policy: the transform's policy. Its `in_place` is None if the user did not set it.
        loss: describes the transform and the function, without paths. Each loss is a copy of it with paths.
        unwritable: (record of a leaf, present value) → why the transform cannot write it back, as a sentence. Empty if
            it can. The record is None for a new leaf, the value is None if it is not known.
        deferred_losses: where the losses are stored if the program does not run. None if JAX does not keep its trace.
        as_code: returns `Loss.applied_to`. It is called only if something is lost.
    """

    def __init__(
        self,
        policy: Policy,
        loss: Loss,
        unwritable: Callable[[int | None, Any], str],
        deferred_losses: DeferredLosses | None,
        as_code: Callable[[], str] = lambda: "",
    ) -> None:
        """Stores the terms of the call. The trace begins with `__enter__`."""
        self._in_place = policy.in_place
        self._loss = loss
        self._unwritable = unwritable
        self._deferred_losses = deferred_losses
        self._as_code = as_code
        # Structure of the arguments, once the result has been checked.
        self._structure: Structure | None = None
        # All records in state, if a function inside this one has lost something. If that function gets `in_place=True`,
        # it may write into these objects.
        self._state_records: set[int] = set()
        # True if this function has lost something itself.
        self._has_lost = False
        # Gradients made during the trace are noted. A gradient looks like a new model, and is not taken for one.
        self._noting = noting_gradients()

    def __enter__(self) -> Self:
        """Begins the trace: puts the function on the stack, with its own list of losses or with the outer one."""
        outer_frame = _active.frames[-1]
        if self._in_place is None:
            # The outermost function without an explicit `in_place` starts a list. Functions inside add to it.
            self._is_outermost = outer_frame.losses is None
            self._num_before = len(outer_frame.losses or ())
            frame = outer_frame._replace(losses=[] if outer_frame.losses is None else outer_frame.losses)
        else:
            # Under `in_place=True` functions inside still add to the outer list, so that there is one warning.
            self._is_outermost = False
            losses = outer_frame.losses if self._in_place else None
            frame = outer_frame._replace(is_in_place=self._in_place, ignores_losses=not self._in_place, losses=losses)
        self._frame = frame
        _active.frames.append(frame)
        self._noting.__enter__()
        return self

    def __exit__(self, error: object, *_: object) -> None:
        """Ends the trace. If something was lost, warns, or leaves the losses to the outer function or to a later call.

        Warns if this is the outermost function and the program runs. After an error in the function, does nothing.
        """
        self._noting.__exit__(None, None, None)
        _active.frames.pop()
        losses = self._frame.losses
        # Nothing to do if neither this function nor one inside it has lost anything.
        if error is not None or self._in_place is not None or losses is None or len(losses) == self._num_before:
            return
        if not self._has_lost:
            # Only functions inside lost something. The fix gives them `in_place=True`. They then write into the copies
            # that this function has received, so this one needs `in_place=True`, too.
            reasons = [self._unwritable(record, None) for record in sorted(self._state_records)]
            obstacle = self._loss.obstacle or next(filter(None, reasons), "")
            losses.append(self._loss._replace(applied_to=self._as_code(), obstacle=obstacle))
        # A trace that runs has reported the losses. Of one that does not run, a later call has to warn.
        runs = self._frame.runs and not self._frame.ignores_losses
        if self._deferred_losses is not None and self._structure is not None:
            if runs:
                self._deferred_losses.drop(self._structure)
            else:
                self._deferred_losses.add(self._structure, losses[self._num_before :])
        if runs and self._is_outermost:
            _warn(losses, is_in_place=self._frame.is_in_place)

    def check_result(self, received: FlatDag, result: Any, rules: Rules) -> None:
        """Looks for changes in the arguments that the function did not return, and adds a `Loss` if there are any.

        Does nothing if the transform has an explicit `in_place`.

        Args:
            received: the arguments, with the objects as they are now.
            result: the function's result.
            rules: how the transform packs results.

        Cost: little if the arguments have no state and no outer transform writes back. One walk in C if nothing has
        changed. Otherwise one look at each child of each object in question.
        """
        if self._in_place is not None:
            return
        self._structure = received.structure
        state_objects = _find_state(received.structure)
        has_loss_inside = len(self._frame.losses or ()) > self._num_before
        if has_loss_inside:
            # `reached` is the set of the record and of all records below it.
            self._state_records.update(*[received.below(record).reached for record in state_objects])
        if not (state_objects or self._frame.is_in_place) or _is_as_received(received, rules):
            return
        # The changes in state and, if an outer transform writes changes back, in scratch.
        scratch_objects = sorted(set(range(len(received.records))).difference(state_objects))
        state_changes = list(_changes(received, state_objects))
        scratch_changes = list(_changes(received, scratch_objects)) if self._frame.is_in_place else []
        if not state_changes and not scratch_changes:
            return
        # The changes that are lost. `lost_changes` drops a change that the result holds, or an object made from it.
        lost_state, lost_scratch = (
            lost_changes(changes, received, result, rules) for changes in (state_changes, scratch_changes)
        )
        if not lost_state and not lost_scratch:
            return
        # The fix offers `in_place=True`. The warning says what else that would write back, and what it cannot.
        if not self._frame.is_in_place:
            scratch_changes = list(_changes(received, scratch_objects))
        scratch = [] if self._frame.is_in_place else lost_changes(scratch_changes, received, result, rules)
        reasons = [self._unwritable(change.leaf, change.value) for change in lost_state if change.kind != "removes"]
        if any(change.kind != "changes" for change in lost_state):
            reasons.append(self._loss.obstacle_to_adding)
        self._add_loss(
            self._loss._replace(
                paths=_paths([*lost_state, *lost_scratch], "changes"),
                added=_paths([*lost_state, *lost_scratch], "adds"),
                removed=_paths([*lost_state, *lost_scratch], "removes"),
                is_state=not lost_scratch,
                obstacle=self._loss.obstacle or next(filter(None, reasons), ""),
                scratch=_paths(scratch, "changes"),
            )
        )

    def _add_loss(self, loss: Loss) -> None:
        """Adds a loss of this function to the list, with the function as code."""
        assert self._frame.losses is not None
        self._frame.losses.append(loss._replace(applied_to=self._as_code()))
        self._has_lost = True

    def check_bound_module(self, module: FlatDag | None, called: str) -> None:
        """Looks for changes in the module to which the function is bound, and adds a `Loss` if there are any.

        Args:
            module: the module as flattened before the call. None if the function is not bound to one.
            called: how to call the function on it, as code. See `walked_bound_module`.
        """
        if self._in_place is None and module is not None:
            changes = list(_changes(module, _find_state(module.structure)))
            if changes:
                self._add_loss(
                    self._loss._replace(
                        paths=_paths_at_self(changes, "changes"),
                        added=_paths_at_self(changes, "adds"),
                        removed=_paths_at_self(changes, "removes"),
                        bound_to=called,
                        keeps_tracers=True,
                    )
                )


def walked_bound_module(function: Any, policy: Policy) -> tuple[FlatDag | None, str]:
    """Flattens the module to which a function is bound, before the function is called.

    A function is bound to a module if it is a method of the module, or the callable module itself.

    Returns:
        The module, and how to call the function on it, as code. (None, "") if there is no module, if its library does
        not write changes back, or if the policy has an explicit `in_place`.
    """
    # `bound_module` returns the object and the code, such as `model.step`.
    module, called = (None, "") if policy.in_place is not None else bound_module(function)
    node_type = node_type_of(module)
    if node_type is None or not node_type.writes_back:
        return None, ""
    return flat_dag_of(module, policy.rules), called


# ---- What changed ----


def _is_as_received(received: FlatDag, rules: Rules) -> bool:
    """Returns True if the arguments have the same leaves in the same places as when they were received.

    Returns False if that is unknown, since the arguments cannot be packed any more.
    """
    try:
        leaves, structure = pack(received.objects[received.root], Tags(), rules)
    except SharedTreeError:
        # The function put something there that cannot be packed, such as a cycle.
        return False
    received_leaves = received.leaves.values()
    return structure is received.structure and all(map(operator.is_, leaves, received_leaves))


def _paths(changes: Sequence[Change], kind: str) -> tuple[str, ...]:
    """Returns the paths of the changes of one kind as text, each once."""
    return tuple(dict.fromkeys(jtu.keystr(change.path) for change in changes if change.kind == kind))


def _paths_at_self(changes: Sequence[Change], kind: str) -> tuple[str, ...]:
    """Returns the paths of the changes of one kind as text, in the module `self` to which a function is bound."""
    return tuple([f"self{path}" for path in _paths(changes, kind)])


def _find_state(structure: Structure) -> list[int]:
    """Returns the records of state: objects whose library writes changes back, and the lists and dicts in them.

    Computed once for a structure, and kept with it.
    """
    state_records = structure.plans.get(_STATE)
    if state_records is None:
        records: set[int] = set()
        # The second part is True for a path through state. One dict may be in such an object and in another one, too.
        visited: set[tuple[int, bool]] = set()
        stack = [(structure.root, False)]
        while stack:
            record, is_inside = stack.pop()
            op, children = structure.records[record]
            if type(op) is not Node or (record, is_inside) in visited:
                continue
            visited.add((record, is_inside))
            # A plain container is state if it is in state. For a module, its own library decides.
            is_state = is_inside if op.type.is_plain else op.type.writes_back is True
            if is_state and op.type.carries_identity:
                records.add(record)
            stack += [(child, is_state) for child in children]
        state_records = structure.plans.setdefault(_STATE, sorted(records))
    return state_records


_STATE = "what is watched for changes"
"""The key under which a structure keeps its records of state."""


def _changes(tree: FlatDag, records: Sequence[int]) -> Iterator[Change]:
    """Yields the changes in some objects: replaced leaves, and modules and variables that were added or removed.

    Added and removed objects count only if their library writes changes back. An array in a new attribute is scratch.

    Args:
        tree: the arguments as received, with the objects as they are now.
        records: records of the objects. The objects inside an object are not compared, unless they took new places.
    """
    for record in records:
        op, children = tree.records[record]
        obj = tree.objects[record]
        # `outside` has the records with a path through plain containers alone. A list there is a value: the function
        # has a copy, which the caller never sees.
        is_value = type(op) is Node and op.type.is_plain and record in tree.outside
        if type(op) is not Node or not op.type.carries_identity or op.type.cls is Arguments or is_value:
            continue
        # `writes_back` is True if the library of the class writes changes back, None if the library is unknown, and
        # False if changes are meant to be lost. The second test: the function may have changed the object's class.
        if op.type.writes_back is False or node_type_of(obj) is None:
            continue
        # The usual case: the children are the very objects that were received.
        parts, _ = op.type.take_apart(obj)
        if len(parts) == len(children) and all(
            part is tree.objects[child] for part, child in zip(parts, children, strict=True)
        ):
            continue
        for kind, place, value in _added_and_removed(tree, op, children, obj, parts):
            holder_path = tree.first_paths[record]
            yield Change(kind, (*holder_path, *place), None, value, record, place, obj)
        for child, part, key in _remaining_children(op, children, obj, parts):
            # The user sees a variable as one thing, so the value in it has the path of the variable.
            path = (*tree.first_paths[record], *(() if op.type.convention == "variable" else (key,)))
            holder_path = tree.first_paths[record]
            for leaf, value, path_below in _replaced_leaves(tree, child, part):
                leaf_path = (*path, *path_below)
                yield Change("changes", leaf_path, leaf, value, record, leaf_path[len(holder_path) :], obj)


def _replaced_leaves(tree: FlatDag, record: int, part: Any) -> Iterator[tuple[int, Any, Path]]:
    """Compares a received object with the object in its place now, and yields the leaves that were replaced.

    Args:
        tree: the arguments as received, with the objects as they are now.
        record: record of the received object.
        part: the object in its place now.

    Yields:
        For each replaced leaf: its record, the object in its place now, and the path from `part` to this object.
    """
    stack: list[tuple[int, Any, Path]] = [(record, part, ())]
    while stack:
        record, part, path = stack.pop()
        op, children = tree.records[record]
        # An object that is still in its place has an entry of its own in `_changes`.
        if part is tree.objects[record] or not tree.holds_leaf[record]:
            continue
        if type(op) is not Node:
            yield record, part, path
            continue
        node_type = node_type_of(part)
        if op.type.writes_back is False:
            continue
        if node_type is None or node_type.cls is not op.type.cls:
            # An object of another class took the place. Its leaves do not correspond, so the first one stands for all.
            yield next(n for n in sorted(tree.below(record).reached) if tree.records[n][0] is LEAF), part, path
            continue
        parts, _ = node_type.take_apart(part)
        for child, new_part, key in _remaining_children(op, children, part, parts):
            stack.append((child, new_part, path if op.type.convention == "variable" else (*path, key)))


def _added_and_removed(
    tree: FlatDag, op: Node, children: Sequence[int], obj: Any, parts: Sequence[Any]
) -> Iterator[tuple[Literal["adds", "removes"], Path, Any]]:
    """Yields the modules and variables that were added to an object, or removed from it.

    Args:
        tree: the arguments as received.
        op: the object's node when it was received.
        children: records of the children that the object had when it was received.
        obj: the object.
        parts: its children now.

    Yields:
        "adds" or "removes", the key in the object as a path, and the module or variable.
    """
    old_children = dict(zip(op.keys, children, strict=True))
    new_parts = dict(zip(op.type.keys_of(obj), parts, strict=True))
    # A key is new, too, if there was nothing below it with a leaf, such as a `None`.
    for key, part in new_parts.items():
        is_new = key not in old_children or not tree.holds_leaf[old_children[key]]
        if is_new and _is_written_back(part) and flat_dag_of(part).leaves:
            yield "adds", (key,), part
    for key, child in old_children.items():
        if key not in new_parts and tree.holds_leaf[child] and _is_written_back(tree.objects[child]):
            yield "removes", (key,), tree.objects[child]


def _is_written_back(part: Any) -> bool:
    """Returns True for an object whose library writes changes back, and for a plain container with such an object."""
    node_type = node_type_of(part)
    if node_type is None:
        return False
    return (
        any(map(_is_written_back, node_type.take_apart(part)[0])) if node_type.is_plain else bool(node_type.writes_back)
    )


def _remaining_children(
    op: Node, children: Sequence[int], obj: Any, parts: Sequence[Any]
) -> list[tuple[int, Any, Any]]:
    """Pairs the received children of an object with its children now, at all keys of both.

    Args:
        op: the object's node when it was received.
        children: records of the children that the object had when it was received.
        obj: the object.
        parts: its children now.

    Returns:
        For each key: the record of the received child, the child now, and the key.
    """
    part_at = dict(zip(op.type.keys_of(obj), parts, strict=True))
    return [(child, part_at[key], key) for key, child in zip(op.keys, children, strict=True) if key in part_at]


# ---- The warning ----

_MAX_NAMED_PATHS = 6
"""The number of paths that one part of a sentence lists."""


def _warn(losses: Sequence[Loss], *, is_in_place: bool) -> None:
    """Gives one `LostChangeWarning` for several losses, at the definition of the outermost function.

    Args:
        losses: losses of the functions, the outermost last.
        is_in_place: True if a transform around that function writes changes back.
    """
    losses = _merge(losses)
    outermost = losses[-1]
    definition, title = outermost.definition, outermost.title
    inside = [loss for loss in losses[:-1] if loss.all_paths]
    # The first line is about the outermost function. If it lost nothing itself, it is about the functions inside.
    if not outermost.all_paths:
        lines = [f"Changes inside {definition} are lost, because `{title}` writes nothing back:"]
    else:
        start = f"{definition} {outermost.description()}, but the change is lost: "
        if outermost.keeps_tracers:
            lines = [
                f"{start}`self` is not an argument of the function under `{title}`, so tracers are left in it. Let the "
                "function take it as an argument."
            ]
        elif is_in_place:
            lines = [f"{start}the transform around `{title}` has `in_place=True`, but `{title}` itself has not."]
        else:
            lines = [f"{start}under `{title}` it works on copies of its arguments."]
        lines += ["Changes inside it are lost, too:"] if inside else []
    for loss in inside:
        lines.append(f"    `{loss.definition.name}` under `{loss.title}` {loss.description()}")
    lines += _fixes(losses, is_in_place=is_in_place)
    warn_about(definition, "\n".join(lines), LostChangeWarning)


def _merge(losses: Sequence[Loss]) -> list[Loss]:
    """Returns the losses with those of one function under one transform merged into one.

    A branch of a `cond` or a rule of a `custom_vjp`, for example, may be traced several times, with a loss each time.
    """
    merged: dict[tuple[Any, ...], Loss] = {}
    for loss in losses:
        earlier_loss = merged.pop((loss.place, loss.title), None)
        if earlier_loss is not None:
            loss = loss._replace(
                paths=tuple(dict.fromkeys((*earlier_loss.paths, *loss.paths))),
                added=tuple(dict.fromkeys((*earlier_loss.added, *loss.added))),
                removed=tuple(dict.fromkeys((*earlier_loss.removed, *loss.removed))),
                is_state=earlier_loss.is_state and loss.is_state,
                obstacle=earlier_loss.obstacle or loss.obstacle,
                scratch=tuple(dict.fromkeys((*earlier_loss.scratch, *loss.scratch))),
            )
        # A merged loss takes the later place in the dict, so that of the outermost function stays last.
        merged[loss.place, loss.title] = loss
    return list(merged.values())


def _first_few(paths: Sequence[str]) -> str:
    """Lists the first paths in words, and says how many more there are."""
    num_more = len(paths) - _MAX_NAMED_PATHS
    if num_more <= 0:
        return listed(paths)
    return f"{', '.join(f'`{path}`' for path in paths[:_MAX_NAMED_PATHS])} and {num_more} more"


def _fixes(losses: Sequence[Loss], *, is_in_place: bool) -> list[str]:
    """Returns the last lines of a warning, with the fixes as text and code.

    Args:
        losses: losses of the functions without an explicit `in_place`, the outermost last.
        is_in_place: True if a transform around them writes changes back.
    """
    outermost = losses[-1]
    # The condition of a loop: no option helps.
    if outermost.is_condition:
        name = outermost.definition.name.rpartition(".")[2]
        name = name if name.isidentifier() else "condition"
        return [
            "Changes in a condition are never kept. Make them in the body of the loop,",
            "or let the condition work on a copy:",
            f"    f = lambda value: {name}(sharedtree.copy(value))",
        ]
    # Changes in scratch: `in_place=True` is not the first choice, since classes of values are rarely used that way.
    if not all(loss.is_state for loss in losses):
        # The name of the first argument with a change: the path up to the first `.` or `[`.
        argument = outermost.all_paths[0].partition(".")[0].partition("[")[0] if outermost.all_paths else "model"
        return [
            "If the caller needs the changed object, return it:",
            f"    return result, {argument}",
            "If the caller does not need the change, say so (`in_place=True` would write it into the caller's object):",
            # The code has `in_place=False`.
            *_code([outermost], is_in_place, lambda _: False),
        ]
    # Changes in state: write them back if that is possible, or say that they are meant to be lost.
    lines = list(dict.fromkeys(loss.obstacle for loss in losses if loss.obstacle))
    can_be_written = not outermost.obstacle and any(loss.all_paths and not loss.obstacle for loss in losses)
    if can_be_written:
        lines.append(f"To write {'the rest' if lines else 'it'} back into the caller's objects:")
        # The code has `in_place=True` for each transform that can write back, and `in_place=False` for the others.
        lines += _code(losses, is_in_place, lambda loss: not loss.obstacle)
        if outermost.applied_to.endswith(".__wrapped__"):
            lines.append("Or keep the decorator, and give it the option `in_place=True`.")
        scratch = [path for loss in losses for path in loss.scratch]
        if scratch:
            lines.append(f"That writes {_first_few(scratch)} back, too, unless the function changes a copy of it.")
    if not outermost.keeps_tracers:
        # With `in_place=False` at the outermost transform, the functions inside need no `in_place`. But the code also
        # has the inner transforms of the same function, as in `jit(grad(loss))`.
        chain = [loss for loss in losses if loss.place == outermost.place]
        lines.append("If you do not need the change, say so:")
        # Only the outermost transform gets an `in_place`.
        lines += _code(chain, is_in_place, lambda loss: False if loss is outermost else None)
    return lines


def _code(losses: Sequence[Loss], is_in_place: bool, in_place_of: Callable[[Loss], bool | None]) -> list[str]:
    """Returns lines of code that apply the transforms again: one line for each loss, with its function and `in_place`.

    Args:
        losses: losses of the functions, the outermost last.
        is_in_place: True if a transform around them writes changes back.
        in_place_of: loss → the `in_place` that the code has for its transform. None to leave the option out.
    """
    lines: list[str] = []
    written_places: set[tuple[Any, ...]] = set()
    for loss in losses:
        # The function's name, if that is a name in the user's scope. A lambda or a function of an inner scope is `f`.
        function = loss.definition.name.rpartition(".")[2]
        if is_in_place or loss.bound_to or not function.isidentifier():
            function = "f"
        if loss.applied_to and not loss.bound_to:
            function = loss.applied_to
        if loss.place in written_places:
            # One function under two transforms, as in `jit(grad(loss))`. `inner` is the result of the line before.
            function = "inner"
        written_places.add(loss.place)
        # A bound module has to become an argument before a transform can write to it.
        if loss.bound_to and in_place_of(loss):
            lines.append(f"    {function} = lambda model, *args, **kwargs: {loss.bound_to}(*args, **kwargs)")
        options = [_keyword_code(key, value) for key, value in loss.options.items()]
        options += [] if in_place_of(loss) is None else [f"in_place={in_place_of(loss)}"]
        code = in_code(loss.title, ", ".join(options), function)
        lines.append(f"    inner = {code}" if is_in_place or loss is not losses[-1] else f"    f = {code}")
    return lines


def applied_to(function: Any, args: Sequence[Any]) -> str:
    """Returns code for a partial, or for a method of a class. Returns "" for functions whose name is enough.

    Args:
        function: the function.
        args: the positional arguments of the call. For a method, the first is `self`.
    """
    if isinstance(function, functools.partial):
        name = definition_of(function).name.rpartition(".")[2]
        positional = [repr(value) if _is_code(value) else f"args[{i}]" for i, value in enumerate(function.args)]
        named = [_keyword_code(key, value) for key, value in function.keywords.items()]
        return f"functools.partial({', '.join([name if name.isidentifier() else 'f', *positional, *named])})"
    if not isinstance(function, types.FunctionType) or not args:
        return ""
    # `Net.step`, if the class of the first argument has an attribute `step`.
    cls, _, name = function.__qualname__.rpartition("<locals>.")[2].rpartition(".")
    attribute = inspect.getattr_static(type(args[0]), name, None)
    if not cls or attribute is None:
        return ""
    if attribute is function:
        return f"{cls}.{name}"
    # The class has a wrapper in place of the method: a transform was applied to it as a decorator.
    return f"{cls}.{name}.__wrapped__"


def _keyword_code(name: str, value: Any) -> str:
    """Writes a keyword argument as code: `axis=0`. For a value that is no literal, writes `f=f`."""
    return f"{name}={value!r}" if _is_code(value) else f"{name}={name}"


def _is_code(value: Any) -> bool:
    """Returns True if the `repr` of a value is code for it: a simple value, or a tuple or list of these."""
    if type(value) in (tuple, list):
        return all(map(_is_code, value))
    return value is None or type(value) in (bool, int, str)
