"""What a function changes in its arguments, where nothing writes it back and the function does not return it.

    @st.jit
    def step(model, optimizer, batch):
        gradient = st.grad(loss)(model, batch)      # `loss` updates running averages in the model
        optimizer.update(model, gradient)           # lost, as the averages are: both are copies

A transform calls a function with copies of its arguments. NNX's own transforms, treex and `Module` are used as if these
were the caller's objects. So we warn of a change that nothing writes back when the function is traced, unless the
transform has an explicit `in_place=True` or `in_place=False`. Objects of other classes, such as a batch that is scaled
in place, are ordinary scratch. Changes in these are worth a warning only where a transform further out writes changes
back, so that it looks as if this one did.

One loss is one warning. Transforms nest, and the first function that needs an `in_place` is the outermost one without
it. So it gets the warning, which lists the functions inside. A function that is only traced (`jax.eval_shape`, `lower`)
computes nothing that could be lost. But JAX keeps its trace for later calls, which do not trace again. So the loss is
stored with the trace, and the first of these calls warns.
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
        paths: paths of leaves that are other objects now.
        added: paths of new variables and modules.
        removed: paths of variables and modules that are gone.
        is_state: True if all changes are in *state*: objects whose library writes changes back.
        obstacle: why the transform cannot write the changes back, as a sentence. Empty if it can.
        obstacle_to_adding: why it cannot add anything to an object, or remove it. Empty if it can.
        scratch: paths of further changes. `in_place=True` would write these back as well.
        bound_to: how to call the function on the module to which it is bound, as code. Empty if there is none.
        applied_to: the function as code, if its name is not enough: a partial, a method of a class.
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

    def description(self, *, inside: bool = False) -> str:
        """Says what the function changed, as a part of a sentence, such as "changes `a`, adds `b` and removes `c`".

        There must be at least one path.

        Args:
            inside: True for a line about a function inside the outermost one. The sentence about the outermost function
                goes on after the paths, so it says "changes in `a`".
        """
        changes = "changes" if inside else "changes in"
        verbs = ((changes, self.paths), ("adds", self.added), ("removes", self.removed))
        parts = [f"{verb} {_first_few(paths)}" for verb, paths in verbs if paths]
        return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"

    @property
    def place(self) -> tuple[Any, ...]:
        """Name, file and line of the function's definition."""
        return self.definition[:3]


# ---- The functions that are being traced ----


class _Frame(NamedTuple):
    """A function being traced.

    Attributes:
        is_in_place: True if the innermost transform with an explicit `in_place` writes changes back.
        ignores_losses: True if this transform has `in_place=False`, so that changes are meant to be lost.
        runs: False if the program being traced will not run.
        losses: losses of the outermost function without an explicit `in_place`, and of the functions inside it. None
            if there is no such function.
    """

    is_in_place: bool = False
    ignores_losses: bool = False
    runs: bool = True
    losses: list[Loss] | None = None


class _Active(threading.local):
    def __init__(self) -> None:
        self.frames = [_Frame()]


_active = _Active()


class Unsaid:
    """Losses in traces that did not run. JAX keeps such a trace, so it may run without being traced again."""

    def __init__(self) -> None:
        self._losses: weakref.WeakKeyDictionary[Structure, list[Loss]] = weakref.WeakKeyDictionary()
        self._lock = Lock()

    def note(self, structure: Structure, losses: list[Loss]) -> None:
        """Keeps losses until a call has arguments of this structure."""
        with self._lock:
            self._losses[structure] = losses

    def forget(self, structure: Structure) -> None:
        """Drops the losses of a structure, because a trace has reported them."""
        if self._losses:
            with self._lock:
                self._losses.pop(structure, None)

    def __bool__(self) -> bool:
        """Returns True if some later call may have to warn."""
        return bool(self._losses)

    def say(self, structure: Structure) -> None:
        """Warns of the losses in an earlier trace, now that a call runs it."""
        if not self._losses:
            return
        frame = _active.frames[-1]
        if frame.ignores_losses or not frame.runs:
            return
        with self._lock:
            losses = self._losses.pop(structure, None)
        if losses is not None and frame.losses is not None:
            frame.losses.extend(losses)
        elif losses is not None:
            _warn(losses, is_in_place=frame.is_in_place)


class only_traced:  # noqa: N801 -- a context manager
    """Surrounds the tracing of a program that does not run. Its losses are stored, and nothing warns of them."""

    def __enter__(self) -> None:
        _active.frames.append(_active.frames[-1]._replace(runs=False, losses=None))

    def __exit__(self, *_: object) -> None:
        _active.frames.pop()


class FunctionBeingTraced:
    """A context manager around the call of a user's function.

    Args:
        policy: the transform's policy. Its `in_place` is None if the user did not say.
        loss: describes the transform and the function, without paths.
        unwritable: (record of a leaf, present value) → why the transform cannot write it back, as a sentence. Empty if
            it can. The record is None for a new leaf, the value is None if it is not known.
        unsaid: where the function's losses are stored for later calls. None if its traces are not kept.
        as_code: returns `Loss.applied_to`. It is called only if something is lost.
    """

    def __init__(
        self,
        policy: Policy,
        loss: Loss,
        unwritable: Callable[[int | None, Any], str],
        unsaid: Unsaid | None,
        as_code: Callable[[], str] = lambda: "",
    ) -> None:
        self._in_place = policy.in_place
        self._loss = loss
        self._unwritable = unwritable
        self._unsaid = unsaid
        self._as_code = as_code
        self._structure: Structure | None = None
        # Records of state here, if a function inside has lost something. With `in_place=True` it would write into them.
        self._state_records: set[int] = set()
        self._has_lost = False
        self._noting = noting_gradients()

    def __enter__(self) -> Self:
        """Begins the trace: notes which functions around it keep a list of losses."""
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
        """Warns of the losses if this is the outermost function and the program runs. Otherwise keeps them."""
        self._noting.__exit__(None, None, None)
        _active.frames.pop()
        losses = self._frame.losses
        if error is not None or self._in_place is not None or losses is None or len(losses) == self._num_before:
            return
        if not self._has_lost:
            # Only functions inside lost something. This one needs an `in_place` too, or what they write back is lost
            # here.
            reasons = [self._unwritable(record, None) for record in sorted(self._state_records)]
            obstacle = self._loss.obstacle or next(filter(None, reasons), "")
            losses.append(self._loss._replace(applied_to=self._as_code(), obstacle=obstacle))
        runs = self._frame.runs and not self._frame.ignores_losses
        if self._unsaid is not None and self._structure is not None:
            if runs:
                self._unsaid.forget(self._structure)
            else:
                self._unsaid.note(self._structure, losses[self._num_before :])
        if runs and self._is_outermost:
            _warn(losses, is_in_place=self._frame.is_in_place)

    def check_result(self, received: FlatDag, result: Any, rules: Rules) -> None:
        """Looks for changes that the function made and did not return.

        Args:
            received: the arguments, with the objects as they are now.
            result: the function's result.
            rules: how the transform packs results.

        Cost: nothing if no object is watched. One walk in C if nothing has changed. Otherwise one look at each child of
        each watched object.
        """
        if self._in_place is not None:
            return
        self._structure = received.structure
        state_objects = _watched_records(received.structure)
        has_loss_inside = len(self._frame.losses or ()) > self._num_before
        if has_loss_inside:
            self._state_records.update(*[received.below(record).reached for record in state_objects])
        if not (state_objects or self._frame.is_in_place) or _is_as_received(received, rules):
            return
        # Changes in state, and in scratch where an outer transform writes back.
        other_objects = sorted(set(range(len(received.records))).difference(state_objects))
        state_changes = list(_changes(received, state_objects))
        other_changes = list(_changes(received, other_objects)) if self._frame.is_in_place else []
        if not state_changes and not other_changes:
            return
        # Those among them that are lost.
        lost_state, lost_others = (
            lost_changes(changes, received, result, rules) for changes in (state_changes, other_changes)
        )
        if not lost_state and not lost_others:
            return
        # What `in_place=True` would write back besides, and what it cannot write back.
        if not self._frame.is_in_place:
            other_changes = list(_changes(received, other_objects))
        scratch = [] if self._frame.is_in_place else lost_changes(other_changes, received, result, rules)
        reasons = [self._unwritable(change.leaf, change.value) for change in lost_state if change.kind != "removes"]
        if any(change.kind != "changes" for change in lost_state):
            reasons.append(self._loss.obstacle_to_adding)
        self._add_loss(
            self._loss._replace(
                paths=_paths([*lost_state, *lost_others], "changes"),
                added=_paths([*lost_state, *lost_others], "adds"),
                removed=_paths([*lost_state, *lost_others], "removes"),
                is_state=not lost_others,
                obstacle=self._loss.obstacle or next(filter(None, reasons), ""),
                scratch=_paths(scratch, "changes"),
            )
        )

    def _add_loss(self, loss: Loss) -> None:
        assert self._frame.losses is not None
        self._frame.losses.append(loss._replace(applied_to=self._as_code()))
        self._has_lost = True

    def check_bound_module(self, before: FlatDag | None, called: str) -> None:
        """Looks for changes in the module to which the function is bound. A callable module counts as its own.

        Args:
            before: the module as it was before the call. None if there is none.
            called: how to call the function on it, as code.
        """
        if self._in_place is None and before is not None:
            changes = list(_changes(before, _watched_records(before.structure)))
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

    Returns:
        The module, and how to call the function on it, as code. (None, "") if there is no module, if its library does
        not write changes back, or if the policy has an explicit `in_place`.
    """
    module, called = (None, "") if policy.in_place is not None else bound_module(function)
    node_type = node_type_of(module)
    if node_type is None or not node_type.writes_back:
        return None, ""
    return flat_dag_of(module, policy.rules), called


# ---- What changed ----


def _is_as_received(received: FlatDag, rules: Rules) -> bool:
    """Returns True if one walk shows the same leaves in the same places as were received. False if it cannot tell."""
    try:
        leaves, structure = pack(received.objects[received.root], Tags(), rules)
    except SharedTreeError:
        # The function put something there that cannot be packed, such as a cycle.
        return False
    received_leaves = received.leaves.values()
    return structure is received.structure and all(map(operator.is_, leaves, received_leaves))


def _paths(changes: Sequence[Change], kind: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(jtu.keystr(change.path) for change in changes if change.kind == kind))


def _paths_at_self(changes: Sequence[Change], kind: str) -> tuple[str, ...]:
    return tuple([f"self{path}" for path in _paths(changes, kind)])


def _watched_records(structure: Structure) -> list[int]:
    """Records of the objects whose library writes changes back, and of the lists and dicts in them.

    Computed once for a structure.
    """
    watched = structure.plans.get(_WATCHED)
    if watched is None:
        records: set[int] = set()
        # A container may be reached both inside and outside such an object.
        visited: set[tuple[int, bool]] = set()
        stack = [(structure.root, False)]
        while stack:
            record, is_inside = stack.pop()
            op, children = structure.records[record]
            if type(op) is not Node or (record, is_inside) in visited:
                continue
            visited.add((record, is_inside))
            is_state = is_inside if op.type.is_plain else op.type.writes_back is True
            if is_state and op.type.carries_identity:
                records.add(record)
            stack += [(child, is_state) for child in children]
        watched = structure.plans.setdefault(_WATCHED, sorted(records))
    return watched


_WATCHED = "what is watched for changes"


def _changes(tree: FlatDag, records: Sequence[int]) -> Iterator[Change]:
    """Finds the replaced leaves of some objects, and everything new or gone, since the objects were received.

    Only modules and variables count as new or gone, and only if their library writes them back. Arrays in new
    attributes are scratch.

    Args:
        tree: what was received, with the objects as they are now.
        records: records of the objects. Each is compared by itself, without the objects in it.
    """
    for record in records:
        op, children = tree.records[record]
        obj = tree.objects[record]
        # Outside modules a list is a value, and the caller never sees it again.
        is_value = type(op) is Node and op.type.is_plain and record in tree.outside
        if type(op) is not Node or not op.type.carries_identity or op.type.cls is Arguments or is_value:
            continue
        # True: the library of the class writes changes back. None: no library says. False: nobody would miss a change.
        if op.type.writes_back is False or node_type_of(obj) is None:
            continue
        parts, _ = op.type.take_apart(obj)
        if len(parts) == len(children) and all(
            part is tree.objects[child] for part, child in zip(parts, children, strict=True)
        ):
            continue
        for kind, place, value in _added_and_removed(tree, op, children, obj, parts):
            holder_path = tree.first_paths[record]
            yield Change(kind, (*holder_path, *place), None, value, record, place, obj)
        for child, part, key in _remaining_children(op, children, obj, parts):
            # The path of a variable stands for the value in it.
            path = (*tree.first_paths[record], *(() if op.type.convention == "variable" else (key,)))
            holder_path = tree.first_paths[record]
            for leaf, value, path_below in _replaced_leaves(tree, child, part):
                leaf_path = (*path, *path_below)
                yield Change("changes", leaf_path, leaf, value, record, leaf_path[len(holder_path) :], obj)


def _replaced_leaves(tree: FlatDag, record: int, part: Any) -> Iterator[tuple[int, Any, Path]]:
    """Compares a received record with the object in its place now, and finds the leaves that differ.

    Args:
        tree: what was received, with the objects as they are now.
        record: the record.
        part: the object in its place.

    Returns:
        For each leaf its record, the object in its place, and the path from `part`.
    """
    stack: list[tuple[int, Any, Path]] = [(record, part, ())]
    while stack:
        record, part, path = stack.pop()
        op, children = tree.records[record]
        # An object that is still in its place is compared by itself.
        if part is tree.objects[record] or not tree.holds_leaf[record]:
            continue
        if type(op) is not Node:
            yield record, part, path
            continue
        node_type = node_type_of(part)
        if op.type.writes_back is False:
            continue
        if node_type is None or node_type.cls is not op.type.cls:
            # Something else stands there. One leaf is enough to report it.
            yield next(n for n in sorted(tree.below(record).reached) if tree.records[n][0] is LEAF), part, path
            continue
        parts, _ = node_type.take_apart(part)
        for child, new_part, key in _remaining_children(op, children, part, parts):
            stack.append((child, new_part, path if op.type.convention == "variable" else (*path, key)))


def _added_and_removed(
    tree: FlatDag, op: Node, children: Sequence[int], obj: Any, parts: Sequence[Any]
) -> Iterator[tuple[Literal["adds", "removes"], Path, Any]]:
    """Finds the modules and variables added to an object, or removed from it, with their keys.

    Args:
        tree: what was received.
        op: the object's node when it was received.
        children: records of its children then.
        obj: the object.
        parts: its children now.
    """
    old_children = dict(zip(op.keys, children, strict=True))
    new_parts = dict(zip(op.type.keys_of(obj), parts, strict=True))
    for key, part in new_parts.items():
        is_new = key not in old_children or not tree.holds_leaf[old_children[key]]
        if is_new and _is_written_back(part) and flat_dag_of(part).leaves:
            yield "adds", (key,), part
    for key, child in old_children.items():
        if key not in new_parts and tree.holds_leaf[child] and _is_written_back(tree.objects[child]):
            yield "removes", (key,), tree.objects[child]


def _is_written_back(part: Any) -> bool:
    """Returns True for an object whose library writes changes back, and for a container of such objects."""
    node_type = node_type_of(part)
    if node_type is None:
        return False
    return (
        any(map(_is_written_back, node_type.take_apart(part)[0])) if node_type.is_plain else bool(node_type.writes_back)
    )


def _remaining_children(
    op: Node, children: Sequence[int], obj: Any, parts: Sequence[Any]
) -> list[tuple[int, Any, Any]]:
    """Children of an object whose keys remain: the record, the present object, and the key."""
    part_at = dict(zip(op.type.keys_of(obj), parts, strict=True))
    return [(child, part_at[key], key) for key, child in zip(op.keys, children, strict=True) if key in part_at]


# ---- The warning ----

_MAX_NAMED_PATHS = 6


def _warn(losses: Sequence[Loss], *, is_in_place: bool) -> None:
    """Warns of losses.

    Args:
        losses: the losses. The last one is that of the outermost function.
        is_in_place: True if a transform around that function writes changes back.
    """
    losses = _merge(losses)
    outermost = losses[-1]
    definition, title = outermost.definition, outermost.title
    inside = [loss for loss in losses[:-1] if loss.all_paths]
    if not outermost.all_paths:
        lines = [
            f"Changes are lost in {definition}: under `{title}` nothing is written back. Inside it these are changed:"
        ]
    else:
        start = f"What {definition} {outermost.description()} is lost: "
        if outermost.keeps_tracers:
            lines = [f"{start}under `{title}` it is bound to `self`, which is no argument and keeps tracers."]
        elif is_in_place:
            lines = [f"{start}`{title}` is not in place, as what is around it is."]
        else:
            lines = [f"{start}under `{title}` it works on copies of its arguments."]
        lines += ["So is what is changed inside it:"] if inside else []
    for loss in inside:
        lines.append(f"    `{loss.definition.name}` under `{loss.title}` {loss.description(inside=True)}")
    lines += _fixes(losses, is_in_place=is_in_place)
    warn_about(definition, "\n".join(lines), LostChangeWarning)


def _merge(losses: Sequence[Loss]) -> list[Loss]:
    """Merges the losses of one function under one transform. A function that is a branch or a rule may be traced often.

    A merged loss stands where the last of its parts stood, so the outermost one stays last.
    """
    merged: dict[tuple[Any, ...], Loss] = {}
    for loss in losses:
        earlier = merged.pop((loss.place, loss.title), None)
        if earlier is not None:
            loss = loss._replace(
                paths=tuple(dict.fromkeys((*earlier.paths, *loss.paths))),
                added=tuple(dict.fromkeys((*earlier.added, *loss.added))),
                removed=tuple(dict.fromkeys((*earlier.removed, *loss.removed))),
                is_state=earlier.is_state and loss.is_state,
                obstacle=earlier.obstacle or loss.obstacle,
                scratch=tuple(dict.fromkeys((*earlier.scratch, *loss.scratch))),
            )
        merged[loss.place, loss.title] = loss
    return list(merged.values())


def _first_few(paths: Sequence[str]) -> str:
    num_more = len(paths) - _MAX_NAMED_PATHS
    if num_more <= 0:
        return listed(paths)
    return f"{', '.join(f'`{path}`' for path in paths[:_MAX_NAMED_PATHS])} and {num_more} more"


def _fixes(losses: Sequence[Loss], *, is_in_place: bool) -> list[str]:
    """Returns the lines of a warning that say what to do: lines of text and of code.

    Args:
        losses: losses of the functions without an explicit `in_place`, the outermost last.
        is_in_place: True if a transform around them writes changes back.
    """
    outermost = losses[-1]
    if outermost.is_condition:
        name = outermost.definition.name.rpartition(".")[2]
        name = name if name.isidentifier() else "condition"
        return [
            "A condition says whether to go on, and what it changes is never kept. Change it in the body of the loop,",
            "or let the condition work on a copy:",
            f"    f = lambda value: {name}(sharedtree.copy(value))",
        ]
    if not all(loss.is_state for loss in losses):
        argument = outermost.all_paths[0].partition(".")[0].partition("[")[0] if outermost.all_paths else "model"
        return [
            "Return what was changed, if the caller is to have it:",
            f"    return result, {argument}",
            "or say that it is meant to be lost (`in_place=True` would write it into the caller's object):",
            *_code([outermost], is_in_place, lambda _: False),
        ]
    lines = list(dict.fromkeys(loss.obstacle for loss in losses if loss.obstacle))
    can_be_written = not outermost.obstacle and any(loss.all_paths and not loss.obstacle for loss in losses)
    if can_be_written:
        lines.append(f"Have {'the rest' if lines else 'it'} written back into the caller's objects:")
        lines += _code(losses, is_in_place, lambda loss: not loss.obstacle)
        scratch = [path for loss in losses for path in loss.scratch]
        if scratch:
            lines.append(f"That writes {_first_few(scratch)} back, too, unless the function changes a copy of it.")
    if not outermost.keeps_tracers:
        # The functions inside need no `in_place` then. But they are part of the code if the outermost transform is
        # applied to one of them, as in `jit(grad(loss))`.
        chain = [loss for loss in losses if loss.place == outermost.place]
        lines.append("or say that it is meant to be lost:" if can_be_written else "Say that it is meant to be lost:")
        # Only the outermost transform gets an `in_place`.
        lines += _code(chain, is_in_place, lambda loss: False if loss is outermost else None)
    return lines


def _code(losses: Sequence[Loss], is_in_place: bool, in_place_of: Callable[[Loss], bool | None]) -> list[str]:
    """Lines of code, one for each function, with its transform and an explicit `in_place`.

    Args:
        losses: losses of the functions, the outermost last.
        is_in_place: True if a transform around them writes changes back.
        in_place_of: returns the `in_place` for a function's transform. None for none.
    """
    lines: list[str] = []
    written_places: set[tuple[Any, ...]] = set()
    for loss in losses:
        # How to name the function in code.
        function = loss.definition.name.rpartition(".")[2]
        if is_in_place or loss.bound_to or not function.isidentifier():
            function = "f"
        if loss.applied_to and not loss.bound_to:
            function = loss.applied_to
        if loss.place in written_places:
            # One function under two transforms, as in `jit(grad(loss))`.
            function = "inner"
        written_places.add(loss.place)
        # The line.
        if loss.bound_to and in_place_of(loss):
            lines.append(f"    {function} = lambda model, *args, **kwargs: {loss.bound_to}(*args, **kwargs)")
        options = [_keyword_code(key, value) for key, value in loss.options.items()]
        options += [] if in_place_of(loss) is None else [f"in_place={in_place_of(loss)}"]
        code = in_code(loss.title, ", ".join(options), function)
        lines.append(f"    inner = {code}" if is_in_place or loss is not losses[-1] else f"    f = {code}")
    return lines


def applied_to(function: Any, args: Sequence[Any]) -> str:
    """Writes a partial, or a method of a class, as code. Empty for other functions.

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
    cls, _, name = function.__qualname__.rpartition("<locals>.")[2].rpartition(".")
    attribute = inspect.getattr_static(type(args[0]), name, None)
    if not cls or attribute is None:
        return ""
    if attribute is function:
        return f"{cls}.{name}"
    # A transform has wrapped the method.
    return f"{cls}.{name}.__wrapped__"


def _keyword_code(name: str, value: Any) -> str:
    """Writes a keyword argument as code. A value without code is called as its parameter is."""
    return f"{name}={value!r}" if _is_code(value) else f"{name}={name}"


def _is_code(value: Any) -> bool:
    """Returns True if the `repr` of an option is code."""
    if type(value) in (tuple, list):
        return all(map(_is_code, value))
    return value is None or type(value) in (bool, int, str)
