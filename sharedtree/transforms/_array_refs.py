"""A `jax.Ref` in what is differentiated: a place and not a value, whose gradient could only be another place.

Equinox's transforms hand it to the function beside what they differentiate, and its gradient is None. So it is here in
modules of Equinox's. JAX refuses it, or fails with an error of its own, when the function reads or writes it.

    Net(w, count=Ref)     grad of Equinox's: Net(g, count=None)       `jax.grad`: an error
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax.core import Tracer

from ..core._jax_internals import ConcreteArray
from ..core._short_texts import listed
from ..core._structure import reached_outside
from ..optim._wrt import Filter, Place, selection
from ._caller_side import Call

_REFUSING = ("jax.grad", "jax.value_and_grad", "jax.jacrev", "jax.hessian")


def is_reference(leaf: Any) -> bool:
    """Whether a leaf is a `jax.Ref`, or stands for one."""
    # Asking `jax.Ref` about something else takes as long as everything else that is done with a leaf.
    if type(leaf) is ConcreteArray:
        return False
    return type(leaf) is jax.Ref or (isinstance(leaf, Tracer) and isinstance(leaf, jax.Ref))


def forbid_references(call: Call, arguments: Sequence[Any], title: str) -> None:
    """Raises if a transform would be given a reference in a module. Of one outside modules it says what is wrong.

    Args:
        call: of which the last hand is differentiated.
        arguments: those that are.
        title: of the transform.

    Raises:
        TypeError: as JAX's, with the path and the fix.
    """
    hand = call.hands[-1]
    if title not in _REFUSING or not any(map(is_reference, hand.leaves)):
        return
    outside = reached_outside(call.tree.records, call.tree.root)
    numbers = [call.tree.leaf_numbers[place] for place in hand.deal.numbers or ()]
    each = zip(numbers, hand.leaves, strict=True)
    texts = [call.tree.text(number) for number, leaf in each if is_reference(leaf) and number not in outside]
    if not texts:
        return
    classes: dict[str, None] = {}

    def ask(place: Place) -> bool:
        if is_reference(place.leaf):
            classes.setdefault("jax.Ref" if place.variable is None else type(place.variable).__name__)
        return True

    for argument in arguments:
        selection(argument, Filter(ask), "")
    several = f"({', '.join(classes)})" if len(classes) > 1 else ", ".join(classes)
    what = "is a `jax.Ref`" if len(texts) == 1 else "are `jax.Ref`s"
    raise TypeError(
        f"`{title}` cannot differentiate with respect to {listed(texts)}, which {what}: a place, not a value. In "
        "modules of Equinox's it is handed to the function beside what is differentiated. In others this has to be "
        "said:\n"
        f"    sharedtree.{title.removeprefix('jax.')}(f, wrt=lambda path, value: not isinstance(value, {several}))"
    )
