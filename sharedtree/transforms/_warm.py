"""Calls like earlier ones, which are done in C: walk, hands, the transformed function, leaves gathered, built.

How arguments are taken apart depends on how many there are and on the keywords, their *form*; which transformed
function is called, on the labels of the hands. Both are worked out in Python when such a call is made for the first
time, and kept with the wrapper. What C does not know, it leaves to Python before anything was called.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from .._context import Policy
from .._graph import Rules
from .._native_walk import native
from ._call import Call
from ._in_place import write

_MOST_FORMS = 256

Deferred: Any = tuple if native is None else native.Deferred
"""The class of what C returns if Python has to do a call: a tuple, of the result and the call if these are there."""

new_latest: Callable[[], Any] = (lambda: None) if native is None else native.Latest
"""Makes what C remembers of calls of one form."""


class Form(NamedTuple):
    """What C knows of calls with as many arguments and the same keywords. Read by position.

    Attributes:
        aux: what the arguments are called (see `Arguments`).
        bound: what comes before the positional arguments, the keywords that follow them, and those that stay keywords;
            None if arguments are as they are given.
        key: of the plans, beside what is asked of the leaves.
        asks: (the leaves) → that; or None.
        donates: whether buffers are given away, so that none may be given twice.
        latest: what C remembers of such calls.
        made: by the labels of the hands, what is transformed.
    """

    aux: Any
    bound: Any
    key: Any
    asks: Any
    donates: bool
    latest: Any
    made: dict[Any, Callable[..., Any]]


class Facts(NamedTuple):
    """What C knows of a wrapper under a policy. Read by position.

    Attributes:
        flags: how arguments are walked.
        forms: by the number of arguments and the keywords; None where Python has to do it.
        in_place: whether changes are written.
        finishes: whether what comes back is what the function returned, and no gradient.
        write: what writes where C cannot.
    """

    flags: int
    forms: dict[Any, Form | None]
    in_place: bool
    finishes: bool
    write: Callable[[Sequence[Any]], None]


def _deferred(facts: Any, args: Any, kwargs: Any) -> Any:
    return Deferred()


class Way:
    """How a wrapper is called under a policy.

    Args:
        policy: what counts as sharing.
        rules: how arguments are walked; None if all calls are left to Python.
        finishes: see `Facts`.

    Attributes:
        call: (`facts`, args, kwargs) → what the wrapper returns, or something `Deferred`.
    """

    __slots__ = ("call", "facts", "policy")

    def __init__(self, policy: Policy, rules: Rules | None, *, finishes: bool) -> None:
        self.policy = policy
        self.facts: Facts | None = None
        self.call: Callable[..., Any] = _deferred
        if native is not None and rules is not None:
            self.facts = Facts(native.flags_of(rules), {}, bool(policy.in_place), finishes, write)
            self.call = native.call

    def learn(self, args: Sequence[Any], kwargs: dict[str, Any], form: Form | None, call: Call, made: Any) -> None:
        """Remembers how a call was done in Python.

        Args:
            args: of the call.
            kwargs: likewise.
            form: of such calls; None where Python has to do them.
            call: it.
            made: what was transformed.
        """
        facts = self.facts
        if facts is None:
            return
        if len(facts.forms) >= _MOST_FORMS:
            facts.forms.clear()
        which = (len(args), tuple(kwargs)) if kwargs else len(args)
        known = facts.forms.get(which)
        if form is not None:
            # Calls of another form may have the same hands and other options, as with static arguments left out.
            form.made.update(known.made if known is not None else {})
            form.made[call.plan.labels] = made
        facts.forms[which] = form
