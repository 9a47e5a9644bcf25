"""What a function changes in its arguments, where nothing writes it back and the function does not return it.

    @st.jit
    def step(model, optimizer, batch):
        gradient = st.grad(loss)(model, batch)      # `loss` updates running averages in the model
        optimizer.update(model, gradient)           # lost, as the averages are: both are copies

A transform hands a function copies of its arguments. NNX's own transforms, treex and `Module` are used as if these
were the caller's objects, so a change that nothing writes back is said when the function is traced, unless the
transform was told what is meant: `in_place=True` or `in_place=False`. Objects of other classes, such as a batch that is
scaled in place, are ordinary scratch. Of these it is said only where a transform further out writes changes back, so
that it looks as if this one did.

One loss is one warning. Transforms nest, and the outermost function that was not told is the one to be told first, so
it gets the warning, in which the functions inside are listed. A function that is only traced (`jax.eval_shape`,
`lower`) computes nothing that could be lost. But JAX keeps its trace for the calls that follow, which do not trace
again, so the loss is noted with the trace and said in the first of these.
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
from ...core._errors import LostChangeWarning, SharedTreeError
from ...core._flat_dags import FlatDag
from ...core._locks import Lock
from ...core._node_types import node_type_of
from ...core._pack_and_unpack import Rules, Tags, pack, walked
from ...core._printing import listed
from ...core._structure import LEAF, Node, Path, Structure
from ...core._warning_source import Definition, definition_of, warn_about
from ...ties._leaf_notes import noting_gradients
from ...ties._policy_and_context import Policy
from .._function_and_options import in_code
from ._refused_arguments import bound_module
from ._returned_changes import Change, not_returned


class Loss(NamedTuple):
    """What one function changed in its arguments and did not return.

    Attributes:
        definition: of the function.
        title: what the transform is called.
        options: its own options, by name.
        paths: of the leaves that are other ones now.
        added: of the variables and modules that are new.
        removed: of those that are gone.
        is_state: whether all of them are in objects whose library writes changes back.
        obstacle: a sentence that says why the transform cannot write them back; empty if it can.
        obstacle_to_adding: why it cannot add anything to an object, nor remove it.
        scratch: paths of what else `in_place=True` would write back.
        applied_to: the function as code, if that is not its name: a partial, a method of a class.
        is_condition: whether it is the condition of a loop, which keeps nothing.
        bound_to: how the function is called on the module that it is bound to, which is no argument, as code.
        keeps_tracers: whether it is that module which was changed.
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
        """Where anything was changed."""
        return (*self.paths, *self.added, *self.removed)

    def told(self, *, inside: bool = False) -> str:
        """What the function did, as a part of a sentence."""
        changes = "changes" if inside else "changes in"
        verbs = ((changes, self.paths), ("adds", self.added), ("removes", self.removed))
        parts = [f"{verb} {_some(paths)}" for verb, paths in verbs if paths]
        return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"

    @property
    def place(self) -> tuple[Any, ...]:
        """Where the function is defined."""
        return self.definition[:3]


class _Frame(NamedTuple):
    """A function that is being traced.

    Attributes:
        is_in_place: whether the innermost transform that was told something writes changes back.
        is_meant: whether it was told that changes are meant to be lost.
        runs: whether the program that is traced will run.
        losses: of the outermost function that was not told, and of those inside; None if there is no such function.
    """

    is_in_place: bool = False
    is_meant: bool = False
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
        """What was lost is said already."""
        if self._losses:
            with self._lock:
                self._losses.pop(structure, None)

    def __bool__(self) -> bool:
        """Whether there is anything that a call may have to say."""
        return bool(self._losses)

    def say(self, structure: Structure) -> None:
        """Warns of what was lost in an earlier trace, now that a call runs it."""
        if not self._losses:
            return
        frame = _active.frames[-1]
        if frame.is_meant or not frame.runs:
            return
        with self._lock:
            losses = self._losses.pop(structure, None)
        if losses is not None and frame.losses is not None:
            frame.losses.extend(losses)
        elif losses is not None:
            _warn(losses, is_in_place=frame.is_in_place)


class only_traced:  # noqa: N801 -- a context manager
    """While a program is traced that does not run: what it would lose is noted and not said."""

    def __enter__(self) -> None:
        _active.frames.append(_active.frames[-1]._replace(runs=False, losses=None))

    def __exit__(self, *_: object) -> None:
        _active.frames.pop()


class FunctionBeingTraced:
    """A context manager around the call of a user's function.

    Args:
        policy: of the transform. Its `in_place` is None if it was not told.
        loss: what the transform and the function are; without paths.
        unwritable: (the number of a leaf, what is there now) → a sentence that says why the transform could not write
            it back; empty if it can. The number is None if it is new; the value, if nobody knows it.
        unsaid: of the function, if its traces are kept; else None.
        as_code: gives `Loss.applied_to`, which is asked for if something is lost.
    """

    def __init__(
        self,
        policy: Policy,
        loss: Loss,
        unwritable: Callable[[int | None, Any], str],
        unsaid: Unsaid | None,
        as_code: Callable[[], str] = lambda: "",
    ) -> None:
        self._told = policy.in_place
        self._loss = loss
        self._unwritable = unwritable
        self._unsaid = unsaid
        self._as_code = as_code
        self._structure: Structure | None = None
        self._in_state: set[int] = set()
        self._has_lost = False
        self._noting = noting_gradients()

    def __enter__(self) -> Self:
        around = _active.frames[-1]
        if self._told is None:
            self._is_outermost = around.losses is None
            self._num_before = len(around.losses or ())
            frame = around._replace(losses=[] if around.losses is None else around.losses)
        else:
            self._is_outermost = False
            losses = around.losses if self._told else None
            frame = around._replace(is_in_place=self._told, is_meant=not self._told, losses=losses)
        self._frame = frame
        _active.frames.append(frame)
        self._noting.__enter__()
        return self

    def __exit__(self, error: object, *_: object) -> None:
        self._noting.__exit__(None, None, None)
        _active.frames.pop()
        losses = self._frame.losses
        if error is not None or self._told is not None or losses is None or len(losses) == self._num_before:
            return
        if not self._has_lost:  # it has to be told all the same, or what is written back inside is lost here
            reasons = [self._unwritable(number, None) for number in sorted(self._in_state)]
            obstacle = self._loss.obstacle or next(filter(None, reasons), "")
            losses.append(self._loss._replace(applied_to=self._as_code(), obstacle=obstacle))
        runs = self._frame.runs and not self._frame.is_meant
        if self._unsaid is not None and self._structure is not None:
            if runs:
                self._unsaid.forget(self._structure)
            else:
                self._unsaid.note(self._structure, losses[self._num_before :])
        if runs and self._is_outermost:
            _warn(losses, is_in_place=self._frame.is_in_place)

    def returned(self, received: FlatDag, result: Any, rules: Rules) -> None:
        """Looks for what was changed and is not returned.

        Args:
            received: what the function received, as it is now.
            result: what it returned.
            rules: of the transform.

        Cost: nothing, if no object is watched; a walk, in C, if nothing has changed; else a look at each child of each
        object that is watched.
        """
        if self._told is not None:
            return
        self._structure = received.structure
        of_state = _watched(received.structure)
        if len(self._frame.losses or ()) > self._num_before:  # what is inside has lost something
            self._in_state.update(*[received.below(number).reached for number in of_state])
        if not (of_state or self._frame.is_in_place) or _is_as_received(received, rules):
            return
        others = sorted(set(range(len(received.records))).difference(of_state))
        in_state = list(_changes(received, of_state))
        in_others = list(_changes(received, others)) if self._frame.is_in_place else []
        if not in_state and not in_others:
            return
        state, rest = (not_returned(some, received, result, rules) for some in (in_state, in_others))
        if not state and not rest:
            return
        if not self._frame.is_in_place:
            in_others = list(_changes(received, others))
        scratch = [] if self._frame.is_in_place else not_returned(in_others, received, result, rules)
        reasons = [self._unwritable(change.leaf, change.value) for change in state if change.kind != "removes"]
        if any(change.kind != "changes" for change in state):
            reasons.append(self._loss.obstacle_to_adding)
        self._note(
            self._loss._replace(
                paths=_paths([*state, *rest], "changes"),
                added=_paths([*state, *rest], "adds"),
                removed=_paths([*state, *rest], "removes"),
                is_state=not rest,
                obstacle=self._loss.obstacle or next(filter(None, reasons), ""),
                scratch=_paths(scratch, "changes"),
            )
        )

    def _note(self, loss: Loss) -> None:
        assert self._frame.losses is not None
        self._frame.losses.append(loss._replace(applied_to=self._as_code()))
        self._has_lost = True

    def changed_what_it_is_bound_to(self, before: FlatDag | None, called: str) -> None:
        """Looks for what was changed in the module whose method, or which itself, is the function.

        Args:
            before: the module, as it was; None if there is none.
            called: how the function is called on it, as code.
        """
        if self._told is None and before is not None:
            changes = list(_changes(before, _watched(before.structure)))
            if changes:
                at_self = [
                    tuple([f"self{path}" for path in _paths(changes, kind)]) for kind in ("changes", "adds", "removes")
                ]
                self._note(
                    self._loss._replace(
                        paths=at_self[0], added=at_self[1], removed=at_self[2], bound_to=called, keeps_tracers=True
                    )
                )


def walked_bound_module(function: Any, policy: Policy) -> tuple[FlatDag | None, str]:
    """The module that a function is bound to, taken apart before it is called; and the code of that call.

    None if there is none whose library writes changes back, or the transform was told what is meant.
    """
    module, called = (None, "") if policy.in_place is not None else bound_module(function)
    node_type = node_type_of(module)
    if node_type is None or not node_type.writes_back:
        return None, ""
    return walked(module, policy.rules), called


# --- what changed -----------------------------------------------------------------------------------------------------


def _is_as_received(received: FlatDag, rules: Rules) -> bool:
    """Whether the arguments have the same leaves in the same places, as one walk tells. False if it cannot tell."""
    try:
        leaves, structure = pack(received.objects[received.root], Tags(), rules)
    except SharedTreeError:  # of what the function put there, such as a cycle
        return False
    before = received.leaves.values()
    return structure is received.structure and all(map(operator.is_, leaves, before))


def _paths(changes: Sequence[Change], kind: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(jtu.keystr(change.path) for change in changes if change.kind == kind))


def _watched(structure: Structure) -> list[int]:
    """The objects whose library writes changes back, and the lists and dicts in these. Worked out once a structure."""
    found = structure.plans.get(_WATCHED)
    if found is None:
        numbers: set[int] = set()
        seen: set[tuple[int, bool]] = set()
        stack = [(structure.root, False)]
        while stack:
            number, is_inside = stack.pop()
            op, children = structure.records[number]
            if type(op) is not Node or (number, is_inside) in seen:
                continue
            seen.add((number, is_inside))
            is_state = is_inside if op.type.is_plain else op.type.writes_back is True
            if is_state and op.type.carries_identity:
                numbers.add(number)
            stack += [(child, is_state) for child in children]
        found = structure.plans.setdefault(_WATCHED, sorted(numbers))
    return found


_WATCHED = "what is watched for changes"


def _changes(tree: FlatDag, numbers: Sequence[int]) -> Iterator[Change]:
    """The leaves directly in these objects that are other ones than when they were received; what is new, or gone.

    Of what is new or gone, only modules and variables whose library writes them back. Arrays that a function leaves
    behind in an attribute are scratch.
    """
    for number in numbers:
        op, children = tree.records[number]
        obj = tree.objects[number]
        # Outside modules a list is a value, which the caller does not see again.
        is_value = type(op) is Node and op.type.is_plain and number in tree.outside
        if type(op) is not Node or not op.type.carries_identity or op.type.cls is Arguments or is_value:
            continue
        if op.type.writes_back is False or node_type_of(obj) is None:
            continue
        parts, _ = op.type.take_apart(obj)
        if len(parts) == len(children) and all(
            part is tree.objects[child] for part, child in zip(parts, children, strict=True)
        ):
            continue
        for kind, place, value in _new_and_gone(tree, op, children, obj, parts):
            at = tree.first_paths[number]
            yield Change(kind, (*at, *place), None, value, number, place, obj)
        for child, part, key in _side_by_side(op, children, obj, parts):
            # A variable is named, and not what is in it.
            path = (*tree.first_paths[number], *(() if op.type.convention == "variable" else (key,)))
            before = tree.first_paths[number]
            for leaf, value, below in _other_leaves(tree, child, part):
                whole = (*path, *below)
                yield Change("changes", whole, leaf, value, number, whole[len(before) :], obj)


def _other_leaves(tree: FlatDag, number: int, part: Any) -> Iterator[tuple[int, Any, Path]]:
    """The leaves below a record that are other objects in what stands in its place, with that and the path."""
    stack: list[tuple[int, Any, Path]] = [(number, part, ())]
    while stack:
        number, part, path = stack.pop()
        op, children = tree.records[number]
        # An object that is still in its place is looked at by itself.
        if part is tree.objects[number] or not tree.holds_leaf[number]:
            continue
        if type(op) is not Node:
            yield number, part, path
            continue
        node_type = node_type_of(part)
        if op.type.writes_back is False:
            continue
        if node_type is None or node_type.cls is not op.type.cls:
            yield next(n for n in sorted(tree.below(number).reached) if tree.records[n][0] is LEAF), part, path
            continue
        parts, _ = node_type.take_apart(part)
        stack += [
            (child, new, path if op.type.convention == "variable" else (*path, key))
            for child, new, key in _side_by_side(op, children, part, parts)
        ]


def _new_and_gone(
    tree: FlatDag, op: Node, children: Sequence[int], obj: Any, parts: Sequence[Any]
) -> Iterator[tuple[Literal["adds", "removes"], Path, Any]]:
    """The modules and variables that an object has and had not, and those that it had, with their keys."""
    before = dict(zip(op.keys, children, strict=True))
    now = dict(zip(op.type.keys_of(obj), parts, strict=True))
    for key, part in now.items():
        is_new = key not in before or not tree.holds_leaf[before[key]]
        if is_new and _is_written_back(part) and walked(part).leaves:
            yield "adds", (key,), part
    for key, child in before.items():
        if key not in now and tree.holds_leaf[child] and _is_written_back(tree.objects[child]):
            yield "removes", (key,), tree.objects[child]


def _is_written_back(part: Any) -> bool:
    """Whether a part is, or a container that holds, an object whose library writes changes back."""
    node_type = node_type_of(part)
    if node_type is None:
        return False
    return (
        any(map(_is_written_back, node_type.take_apart(part)[0])) if node_type.is_plain else bool(node_type.writes_back)
    )


def _side_by_side(op: Node, children: Sequence[int], obj: Any, parts: Sequence[Any]) -> list[tuple[int, Any, Any]]:
    """The children that an object had and still has, with what is there now and the key of the place."""
    now = dict(zip(op.type.keys_of(obj), parts, strict=True))
    return [(child, now[key], key) for key, child in zip(op.keys, children, strict=True) if key in now]


# --- what is said -----------------------------------------------------------------------------------------------------

_MOST_NAMED = 6


def _warn(losses: Sequence[Loss], *, is_in_place: bool) -> None:
    """Warns of losses, of which the last is that of the outermost function."""
    losses = _merged(losses)
    outermost = losses[-1]
    where, title = outermost.definition, outermost.title
    inside = [loss for loss in losses[:-1] if loss.all_paths]
    if not outermost.all_paths:
        lines = [f"Changes are lost in {where}: under `{title}` nothing is written back. Inside it these are changed:"]
    else:
        what = f"What {where} {outermost.told()} is lost: "
        if outermost.keeps_tracers:
            lines = [f"{what}under `{title}` it is bound to `self`, which is no argument and keeps tracers."]
        elif is_in_place:
            lines = [f"{what}`{title}` is not in place, as what is around it is."]
        else:
            lines = [f"{what}under `{title}` it works on copies of its arguments."]
        lines += ["So is what is changed inside it:"] if inside else []
    lines += [f"    `{loss.definition.name}` under `{loss.title}` {loss.told(inside=True)}" for loss in inside]
    lines += _fixes(losses, is_in_place=is_in_place)
    warn_about(where, "\n".join(lines), LostChangeWarning)


def _merged(losses: Sequence[Loss]) -> list[Loss]:
    """One loss for each function under a transform, which is traced several times as a branch or by a rule."""
    found: dict[tuple[Any, ...], Loss] = {}
    for loss in losses:
        before = found.pop((loss.place, loss.title), None)
        if before is not None:
            loss = loss._replace(
                paths=tuple(dict.fromkeys((*before.paths, *loss.paths))),
                added=tuple(dict.fromkeys((*before.added, *loss.added))),
                removed=tuple(dict.fromkeys((*before.removed, *loss.removed))),
                is_state=before.is_state and loss.is_state,
                obstacle=before.obstacle or loss.obstacle,
                scratch=tuple(dict.fromkeys((*before.scratch, *loss.scratch))),
            )
        found[loss.place, loss.title] = loss
    return list(found.values())


def _some(paths: Sequence[str]) -> str:
    left = len(paths) - _MOST_NAMED
    return listed(paths) if left <= 0 else f"{', '.join(f'`{path}`' for path in paths[:_MOST_NAMED])} and {left} more"


def _fixes(losses: Sequence[Loss], *, is_in_place: bool) -> list[str]:
    """How to tell the transforms what is meant, as code.

    Args:
        losses: of the functions that are to be told, the outermost last.
        is_in_place: whether what is around them is in place.
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
        root = outermost.all_paths[0].partition(".")[0].partition("[")[0] if outermost.all_paths else "model"
        return [
            "Return what was changed, if the caller is to have it:",
            f"    return result, {root}",
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
            lines.append(f"That writes {_some(scratch)} back, too, unless the function changes a copy of it.")
    if not outermost.keeps_tracers:
        # What is inside needs no word then, but is a part of the code if it is what the outermost transform is given.
        chain = [loss for loss in losses if loss.place == outermost.place]
        lines.append("or say that it is meant to be lost:" if can_be_written else "Say that it is meant to be lost:")
        lines += _code(chain, is_in_place, lambda loss: False if loss is outermost else None)
    return lines


def _code(losses: Sequence[Loss], is_in_place: bool, told: Callable[[Loss], bool | None]) -> list[str]:
    """A line for each function, which gives a name to it under its transform that is told something or nothing."""
    lines: list[str] = []
    done: set[tuple[Any, ...]] = set()
    for loss in losses:
        function = loss.definition.name.rpartition(".")[2]
        if is_in_place or loss.bound_to or not function.isidentifier():
            function = "f"
        if loss.applied_to and not loss.bound_to:
            function = loss.applied_to
        if loss.place in done:  # as in `jit(grad(loss))`
            function = "inner"
        done.add(loss.place)
        if loss.bound_to and told(loss):
            lines.append(f"    {function} = lambda model, *args, **kwargs: {loss.bound_to}(*args, **kwargs)")
        options = [f"{key}={value!r}" if _is_code(value) else f"{key}={key}" for key, value in loss.options.items()]
        options += [] if told(loss) is None else [f"in_place={told(loss)}"]
        code = in_code(loss.title, ", ".join(options), function)
        lines.append(f"    inner = {code}" if is_in_place or loss is not losses[-1] else f"    f = {code}")
    return lines


def applied_to(function: Any, args: Sequence[Any]) -> str:
    """How a partial, or a method of a class, is written as code; empty for other functions."""
    if isinstance(function, functools.partial):
        name = definition_of(function).name.rpartition(".")[2]
        positional = [repr(value) if _is_code(value) else f"args[{i}]" for i, value in enumerate(function.args)]
        named = [f"{key}={value!r}" if _is_code(value) else f"{key}={key}" for key, value in function.keywords.items()]
        return f"functools.partial({', '.join([name if name.isidentifier() else 'f', *positional, *named])})"
    if not isinstance(function, types.FunctionType) or not args:
        return ""
    cls, _, name = function.__qualname__.rpartition("<locals>.")[2].rpartition(".")
    own = inspect.getattr_static(type(args[0]), name, None)
    if not cls or own is None:
        return ""
    if own is function:
        return f"{cls}.{name}"
    return f"{cls}.{name}.__wrapped__"


def _is_code(value: Any) -> bool:
    """Whether the `repr` of an option is code."""
    if type(value) in (tuple, list):
        return all(map(_is_code, value))
    return value is None or type(value) in (bool, int, str)
