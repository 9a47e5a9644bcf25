"""Calls like earlier ones, done in C: pack, group, call the transformed function, gather the leaves, build.

Packing depends on the number of arguments and on the keywords. The choice of the transformed function depends on the
labels of the leaf groups. Python finds out both in the first call of a kind, and keeps them with the wrapper:

    step(model, x)             in Python      way.forms[2] = Form(…, made={labels: transformed function})
    step(model, x)             in C           finds the form by the 2, and the transformed function by the labels

If C meets anything else, it leaves the call to Python before any function was called.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ..core._jax_internals import hide_frames
from ..core._pack_and_unpack import Rules, flags_of, native
from ..ties._policy_and_context import Policy, PolicyOption, current_policy
from ._caller_side import Call
from ._in_place import write

_MAX_FORMS = 256

new_latest: Callable[[], Any] = (lambda: None) if native is None else native.Latest
"""Makes the memory of C for calls of one form."""


class Form(NamedTuple):
    """Facts about calls with one number of arguments and one set of keywords. C reads the fields by position.

    Attributes:
        aux: names of the arguments, as `Arguments` has them.
        bound: arguments to put before the positional ones, names of the keywords that become positional, and names of
            all other keywords. None if arguments are packed as written.
        key: the constant part of the key of their plans.
        asks: (leaves) → the other part of the key. None if there is none.
        donates: True if buffers are donated, so that no buffer may be in two leaves.
        latest: the memory of C for these calls.
        made: by the labels of the groups, the transformed function.
    """

    aux: Any
    bound: Any
    key: Any
    asks: Any
    donates: bool
    latest: Any
    made: dict[Any, Callable[..., Any]]


class Way(NamedTuple):
    """Calls of one wrapper under one policy, as C does them. C reads the fields by position.

    Attributes:
        policy: the policy.
        flags: the rules of packing, as `flags_of` encodes them.
        forms: by the number of arguments, or by this number and the keywords if there are any. An entry is None if
            Python has to do these calls. All of it is None if Python has to do every call.
        in_place: True if changes are written back.
        finishes: True if C may build the result. False if the transform returns something else, such as a gradient.
        write: writes where C cannot.
    """

    policy: Policy
    flags: int
    forms: dict[Any, Form | None] | None
    in_place: bool
    finishes: bool
    write: Callable[[Sequence[Any]], None]

    @classmethod
    def under(cls, policy: Policy, rules: Rules | None, *, finishes: bool) -> "Way":
        """Makes an empty record, before the first call.

        Args:
            policy: the policy.
            rules: how arguments are packed. None to leave all calls to Python.
            finishes: the attribute.
        """
        in_place = bool(policy.in_place)
        # Without forms, Python does every call.
        if native is None or rules is None:
            return cls(policy, 0, None, in_place, finishes, write)
        return cls(policy, flags_of(rules), {}, in_place, finishes, write)

    def learn(
        self, args: Sequence[Any], kwargs: dict[str, Any], form: Form | None, call: Call, transformed: Any
    ) -> None:
        """Remembers how Python did a call, for calls like it.

        Args:
            args: positional arguments of the call.
            kwargs: its keyword arguments.
            form: facts about such calls. None to leave them to Python.
            call: the call.
            transformed: the transformed function.
        """
        forms = self.forms
        if forms is None:
            return
        # Wrappers whose calls all differ in their keywords would grow without bound.
        if len(forms) >= _MAX_FORMS:
            forms.clear()
        key = (len(args), tuple(kwargs)) if kwargs else len(args)
        earlier_form = forms.get(key)
        if form is not None:
            # The earlier form has transformed functions for other labels of groups. They stay in use.
            form.made.update(earlier_form.made if earlier_form is not None else {})
            form.made[call.plan.labels] = transformed
        forms[key] = form


class _Caller:
    """Calls a function with its arguments. The native one has C do a call, and `go_on` where C cannot.

    Attributes:
        policy: the policy as the user wrote it.
        way: the record of calls under the policy of the last call. None before the first call.
    """

    policy: PolicyOption
    way: Way | None

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        try:
            return self.go_on((), current_policy(self.policy), args, kwargs)
        except Exception as error:
            # As after a vanilla transform, the traceback shows the user's frames only.
            hide_frames(error)
            raise

    def go_on(self, deferred: Any, policy: Policy, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Does the remainder of a call, where C left it to Python.

        Args:
            deferred: empty if C did nothing. A pair of the transformed function's result and the call if C called it.
                An exception if C raised one.
            policy: the policy in force.
            args: positional arguments of the call.
            kwargs: its keyword arguments.
        """
        raise NotImplementedError


class Caller(_Caller if TYPE_CHECKING or native is None else native.Caller):
    """The base class of wrappers, with a `__call__` in C where it is in use."""
