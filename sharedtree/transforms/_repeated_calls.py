"""Calls like earlier ones, which are done in C: walk, hands, the transformed function, leaves gathered, built.

How arguments are taken apart depends on how many there are and on the keywords, their *form*; which transformed
function is called, on the labels of the groups. Both are worked out in Python when such a call is made for the first
time, and kept with the wrapper. What C does not know, it leaves to Python before anything was called.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ..core._jax_internals import hide_frames
from ..core._native_walk import flags_of, native
from ..core._pack_and_unpack import Rules
from ..ties._policy_and_context import Policy, PolicyOption, current_policy
from ._caller_side import Call
from ._in_place import write

_MOST_FORMS = 256

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
        made: by the labels of the groups, what is transformed.
    """

    aux: Any
    bound: Any
    key: Any
    asks: Any
    donates: bool
    latest: Any
    made: dict[Any, Callable[..., Any]]


class Way(NamedTuple):
    """How a wrapper is called under a policy. Read by position.

    Attributes:
        policy: what counts as sharing.
        flags: how arguments are walked.
        forms: by the number of arguments and the keywords; None where Python has to do it. None for all if all calls
            are left to Python.
        in_place: whether changes are written.
        finishes: whether what comes back is what the function returned, and no gradient.
        write: what writes where C cannot.
    """

    policy: Policy
    flags: int
    forms: dict[Any, Form | None] | None
    in_place: bool
    finishes: bool
    write: Callable[[Sequence[Any]], None]

    @classmethod
    def under(cls, policy: Policy, rules: Rules | None, *, finishes: bool) -> "Way":
        """A way on which nobody has gone.

        Args:
            policy: what counts as sharing.
            rules: how arguments are walked; None if all calls are left to Python.
            finishes: as the attribute.
        """
        in_place = bool(policy.in_place)
        if native is None or rules is None:
            return cls(policy, 0, None, in_place, finishes, write)
        return cls(policy, flags_of(rules), {}, in_place, finishes, write)

    def learn(self, args: Sequence[Any], kwargs: dict[str, Any], form: Form | None, call: Call, made: Any) -> None:
        """Remembers how a call was done in Python.

        Args:
            args: of the call.
            kwargs: likewise.
            form: of such calls; None where Python has to do them.
            call: it.
            made: what was transformed.
        """
        forms = self.forms
        if forms is None:
            return
        if len(forms) >= _MOST_FORMS:
            forms.clear()
        which = (len(args), tuple(kwargs)) if kwargs else len(args)
        known = forms.get(which)
        if form is not None:
            # Calls of another form may have the same hands and other options, as with static arguments left out.
            form.made.update(known.made if known is not None else {})
            form.made[call.plan.labels] = made
        forms[which] = form


class _Caller:
    """What is called with the arguments of a function. The native one goes on where C has to leave the call to Python.

    Attributes:
        policy: what counts as sharing, as it was given.
        way: how it is called under the policy that it was called with last.
    """

    policy: PolicyOption
    way: Way | None

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        try:
            return self.go_on((), current_policy(self.policy), args, kwargs)
        except Exception as error:
            hide_frames(error)
            raise

    def go_on(self, left: Any, policy: Policy, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """What is left of a call.

        Args:
            left: nothing, if all of it is; the result of what was transformed, and the call; or the error.
            policy: under which it is.
            args: of the call.
            kwargs: likewise.
        """
        raise NotImplementedError


class Caller(_Caller if TYPE_CHECKING or native is None else native.Caller):
    """The base of wrappers."""
