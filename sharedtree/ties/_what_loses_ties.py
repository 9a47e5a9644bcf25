"""Which line of the user's code lost a tie, by which function of which library, and what keeps the tie instead.

The operation that made an array knows from where it was called:

    <lambda>             optax      new = p + u
    tree_map             jax
    apply_updates        optax      this is what the user called,
    step                 train.py   and this is where

Only what was traced is known in that way. Of the public functions that lose ties, those are listed here that training
loops use; `docs/unties.md` has them all.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from ..core._by_identity import IdentityDict
from ..core._jax_internals import Frame, frames_of
from ._frames_of_libraries import TRACED, package_of
from ._transforms_that_untie import culprit_of, outermost_call

MORE = "More about what loses ties, and what keeps them: docs/unties.md, “What unties, and what to use instead”."
"""The last line of what is said of lost ties."""

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
"""The package and the name of a function → how its user calls it, and the code that keeps ties."""

KEEPS_NODES = "    model = sharedtree.tree.map(f, model)"
"""The code for what no function is known of that made a node anew."""

REPLACES = "    model = sharedtree.tree.at(where, model, new)"
"""The code for one of two arrays that was replaced."""


class Origin(NamedTuple):
    """Where an array was made.

    Attributes:
        filename: of the user's code.
        lineno: the line in it.
        function: what the user called there, if it is known to lose ties; as text, without the outer backticks.
        keeping: the code that keeps ties instead.
    """

    filename: str
    lineno: int
    function: str | None = None
    keeping: str | None = None

    @property
    def text(self) -> str:
        """The place, and what was called there."""
        place = f"{self.filename}:{self.lineno}"
        return f"{place} made" if self.function is None else f"`{self.function}`, called at {place}, made"


def origin_of(leaf: Any) -> Origin | None:
    """Where a leaf was made by the function that is traced; None if that cannot be told."""
    return _origin_in(frames_of(leaf))


def _origin_in(frames: Sequence[Frame]) -> Origin | None:
    called: tuple[str, str] | None = None
    innermost: Origin | None = None
    is_known = True
    for frame in frames:
        package = package_of(frame.filename)
        if package == "sharedtree":
            if frame.function == TRACED:
                break  # what is further out has called the function, which is traced
            called = None  # ties are kept by what is further in
            is_known = False
        elif package is None:
            origin = Origin(frame.filename, frame.lineno)
            if called is not None:
                return origin._replace(function=_KEEPING[called][0], keeping=_KEEPING[called][1])
            innermost = innermost or origin
            if not is_known:
                break
        else:
            name = frame.function if "." in frame.function and package == "flax" else frame.function.rpartition(".")[2]
            if (package, name) in _KEEPING:
                called = package, name
            elif package != "jax" and called is not None and called[0] == "jax":
                called = None  # a function of that library maps over the tree
    return innermost


def untying_transform(one: Any, two: Any, analyses: IdentityDict[Any]) -> list[Origin]:
    """Finds the vanilla transform that has made two leaves of one. Returns none if that is not certain.

    If a function that is known to lose ties was called inside the transform, it comes second: both untie.

    Args:
        one: a leaf of what the traced function returned.
        two: another leaf, which was one with the first when the function was entered.
        analyses: keeps what was found out about operations, for further leaves.
    """
    culprit = culprit_of(one, two, analyses)
    if culprit is None:
        return []
    transform, caller = culprit.transform, culprit.caller
    inside = _origin_in(culprit.inside) if culprit.inside else origin_of(one)
    origin = Origin(caller.filename, caller.lineno, transform.title, transform.keeping)
    return [origin, inside] if inside is not None and inside.keeping is not None else [origin]


def is_by_transform(leaf: Any) -> bool:
    """Whether a leaf was made in a call of a vanilla transform, which may have untied it or not."""
    return outermost_call(leaf) is not None


class Advice(NamedTuple):
    """What to do about lost ties.

    Attributes:
        origin: where one of them was lost; None if that cannot be told.
        fixes: at most two, each a sentence and code.
    """

    origin: Origin | None
    fixes: list[tuple[str, str]]

    @property
    def text(self) -> str:
        """As lines of a message."""
        made = [] if self.origin is None else [f"{self.origin.text} an array for each path."]
        lines = [line for sentence, code in self.fixes for line in (sentence, code)]
        return "\n".join([" ".join([*made, lines[0]]), *lines[1:], MORE])


def to_keep(code: str) -> tuple[str, str]:
    """The fix that keeps ties."""
    return "This keeps the tie:", code


PUT_BACK = (
    "If a vanilla transform made them, take sharedtree's in its place. This puts the tie back with the value at its "
    "first path, which is right if all of them hold one value:",
    "    model = sharedtree.retie(model, like=before)",
)
MEANT = "To say that it is meant, of the model that should have no ties:", "    model = sharedtree.untie(model)"


def to_begin_as_copy(other: str, one: str) -> tuple[str, str]:
    """The fix for a target, an average or the like: a second model that has begun as the first.

    Args:
        other: where the second is.
        one: where the first is.
    """
    return (
        f"`{other}` began as `{one}` itself. Begin with a copy, which has arrays and ties of its own:",
        "    target = sharedtree.copy(params)",
    )
