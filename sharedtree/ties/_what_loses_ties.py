"""Finds the line of the user's code that lost a tie, the library function it called, and code that keeps the tie.

JAX records a traceback with the operation that made an array:

    <lambda>             optax      new = p + u
    tree_map             jax
    apply_updates        optax      this is the function that the user called,
    step                 train.py   and this is the line

A *frame* is an entry of a traceback. Frames come innermost first, as here, and callers are further out. Arrays that
were made outside a trace have no traceback. The table below has the functions that training loops use.
`docs/unties.md` lists all public functions that lose ties.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from ..core._by_identity import IdentityDict
from ..core._jax_internals import Frame, frames_of
from ._frames_of_libraries import TRACED, package_of
from ._transforms_that_untie import culprit_of, outermost_call

MORE = "Which operations lose ties, and which keep them: docs/unties.md, “Operations that lose ties”."
"""Last line of each message about lost ties."""

_KEEPING: dict[tuple[str, str], tuple[str, str]] = {
    ("jax", "tree_map"): ("jax.tree.map", "    model = sharedtree.tree.map(f, model)"),
    ("jax", "tree_map_with_path"): (
        "jax.tree.map_with_path",
        "    model = sharedtree.tree.map_with_path(f, model)",
    ),
    ("equinox", "tree_at"): ("equinox.tree_at", "    model = sharedtree.tree.at(where, model, new)"),
    ("equinox", "apply_updates"): (
        "equinox.apply_updates",
        "    model = sharedtree.apply_updates(model, updates)",
    ),
    ("optax", "apply_updates"): ("optax.apply_updates", "    model = sharedtree.apply_updates(model, updates)"),
    ("optax", "incremental_update"): (
        "optax.incremental_update",
        "    target = sharedtree.incremental_update(model, target, step_size)",
    ),
    ("optax", "schedule_free_eval_params"): (
        "optax.contrib.schedule_free_eval_params",
        "    evaluated = sharedtree.retie(optax.contrib.schedule_free_eval_params(state, model), like=model)",
    ),
    ("optax", "update_fn"): (
        "update` of a transformation of `optax",
        "    optimizer = sharedtree.optimizer(optimizer)\n    state = optimizer.init(model)",
    ),
    ("flax", "TrainState.apply_gradients"): (
        "TrainState.apply_gradients",
        "    from sharedtree.linen import TrainState\n"
        "    state = TrainState.create(apply_fn=apply_fn, params=params, tx=tx)  # where the state is made",
    ),
}
"""(package, function) → public name of the function without its outer backticks, and code that keeps ties."""

KEEPS_NODES = "    model = sharedtree.tree.map(f, model)"
"""The suggested code if nodes were made anew by an unknown function."""

REPLACES = "    model = sharedtree.tree.at(where, model, new)"
"""The suggested code if one of two tied arrays was replaced."""


class Origin(NamedTuple):
    """Line of the user's code in which an array was made.

    Attributes:
        filename: file of the user's code.
        lineno: the line in it.
        function: public name of the function called there, without the outer backticks, if it is known to lose ties.
        keeping: code that does the same and keeps ties, None if `function` is None.
    """

    filename: str
    lineno: int
    function: str | None = None
    keeping: str | None = None

    @property
    def text(self) -> str:
        """First words of a message: the line, and the function that was called there."""
        place = f"{self.filename}:{self.lineno}"
        return f"{place} made" if self.function is None else f"`{self.function}`, called at {place}, made"


def origin_of(leaf: Any) -> Origin | None:
    """Finds the line of the user's code in which the traced function made a leaf. None if it is unknown."""
    return _origin_in(frames_of(leaf))


def _origin_in(frames: Sequence[Frame]) -> Origin | None:
    """Finds the line of the user's code, in a call stack, with a call of a function from `_KEEPING`. These lose ties.

    Args:
        frames: the call stack, innermost first.

    Returns:
        The line, with the function. If none of them was called, the innermost line of the user's code. None if the
        stack has no line of the user's code.
    """
    # Key in `_KEEPING` of the outermost library function further in than the current frame, and called by it.
    called: tuple[str, str] | None = None
    innermost: Origin | None = None
    is_below_sharedtree = False
    for frame in frames:
        package = package_of(frame.filename)
        if package == "sharedtree":
            # Our method that calls the traced function. Frames further out are not part of that function.
            if frame.function == TRACED:
                break
            # Another function of this package keeps ties, whatever functions it calls.
            called = None
            is_below_sharedtree = True
        elif package is None:
            origin = Origin(frame.filename, frame.lineno)
            if called is not None:
                return origin._replace(function=_KEEPING[called][0], keeping=_KEEPING[called][1])
            innermost = innermost or origin
            # The user's code called a function of this package here, so no frame further out lost the tie.
            if is_below_sharedtree:
                break
        else:
            # Methods of Flax are listed with their class, functions of the others by their last name.
            name = frame.function if "." in frame.function and package == "flax" else frame.function.rpartition(".")[2]
            if (package, name) in _KEEPING:
                called = package, name
            elif package != "jax" and called is not None and called[0] == "jax":
                # A library called `jax.tree.map` in a function that the table lacks. The user did not call it.
                called = None
    return innermost


def untying_transform(leaf1: Any, leaf2: Any, analyses: IdentityDict[Any]) -> list[Origin]:
    """Returns the origin of the vanilla transform (JAX's or Equinox's) that split a tied leaf into two leaves.

    Args:
        leaf1: a leaf of the traced function's result.
        leaf2: another leaf of it. Both were one object when the function was called.
        analyses: operation of a trace → how its outputs were computed. Entries are added, so that each operation is
            analysed once.

    Returns:
        The origin of the transform's call. If a function inside the transform loses ties, too, its origin comes
        second. Empty if no transform is certain to have split the leaf.
    """
    culprit = culprit_of(leaf1, leaf2, analyses)
    if culprit is None:
        return []
    transform, caller = culprit.transform, culprit.caller
    inner_origin = _origin_in(culprit.inside) if culprit.inside else origin_of(leaf1)
    origin = Origin(caller.filename, caller.lineno, transform.title, transform.keeping)
    return [origin, inner_origin] if inner_origin is not None and inner_origin.keeping is not None else [origin]


def is_by_transform(leaf: Any) -> bool:
    """Returns True if a leaf was made in a call of a vanilla transform, whether or not the transform has untied it."""
    return outermost_call(leaf) is not None


class Advice(NamedTuple):
    """Advice for a message about lost ties.

    Attributes:
        origin: the line that lost one of them. None if it is unknown.
        fixes: at most two fixes, each a sentence and code.
    """

    origin: Origin | None
    fixes: list[tuple[str, str]]

    @property
    def text(self) -> str:
        """The lines of the message. The sentence about the origin stands on the line of the first fix."""
        origin_sentence = [] if self.origin is None else [f"{self.origin.text} an array for each path."]
        lines = [line for sentence, code in self.fixes for line in (sentence, code)]
        return "\n".join([" ".join([*origin_sentence, lines[0]]), *lines[1:], MORE])


def to_keep(code: str) -> tuple[str, str]:
    """Makes the fix that replaces the user's code by code that keeps ties: a sentence, and the code."""
    return "This keeps the tie:", code


PUT_BACK = (
    "If a transform of JAX made them, use sharedtree's instead. If the values at these paths are equal, this puts the "
    "tie back, with the value at the first path:",
    "    model = sharedtree.retie(model, like=before)",
)
MEANT = "If the model is meant to have no ties, untie it before:", "    model = sharedtree.untie(model)"


def to_begin_as_copy(target: str, model: str) -> tuple[str, str]:
    """Makes the fix for a second model, such as a target network, that begins as the same object as the first model.

    Args:
        target: path of the second model.
        model: path of the first model.
    """
    return (
        f"`{target}` began as the same object as `{model}`. Begin with a copy, which has arrays and ties of its own:",
        "    target = sharedtree.copy(params)",
    )
