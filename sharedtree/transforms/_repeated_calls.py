"""Calls like earlier ones, done in C: pack, group, call the transformed function, gather the leaves, build.

The *transformed function* is what the transform returns for the package's inner function. It takes leaf groups: the
leaves of the arguments, grouped by their labels, which say what the transform does with them.

Packing depends on the number of arguments and on the keywords. The choice of the transformed function depends on the
labels. Python finds out both in the first call of a kind, and keeps them with the wrapper of the user's function:

    step(model, x)      in Python    settings.patterns[2] = CallPattern(…, functions={labels: transformed function})
    step(model, x)      in C         finds the pattern by the 2, and the transformed function by the labels

If a call is not like an earlier one, C leaves it to Python before the user's function was called.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ..core._jax_internals import hide_frames
from ..core._pack_and_unpack import Rules, flags_of, native
from ..ties._policy_and_context import Policy, PolicyOption, current_policy
from ._caller_side import Call
from ._in_place import write

_MAX_PATTERNS = 256
"""Number of patterns that are kept for one wrapper. With one more, all are dropped, and Python finds them again."""

new_latest: Callable[[], Any] = (lambda: None) if native is None else native.Latest
"""Makes the memory in which C keeps what it found in the last call of a pattern. None without the C extension."""


class CallPattern(NamedTuple):
    """Facts about calls with one number of arguments and one set of keywords. C reads the fields by position.

    Attributes:
        aux: names of the arguments, as `Arguments` has them.
        bound: three tuples: arguments to put before the positional ones, names of the keywords that become positional,
            and names of all other keywords. None if arguments are packed as written.
        key: first part of the key under which plans (groupings of the leaves) are kept.
        facts_of_leaves: (leaves) → second part of that key. None if the key has one part.
        donates: True if buffers are donated, so that no buffer may be in two leaves.
        latest: the memory of C for these calls. See `new_latest`.
        functions: labels of the leaf groups → transformed function.
    """

    aux: Any
    bound: Any
    key: Any
    facts_of_leaves: Any
    donates: bool
    latest: Any
    functions: dict[Any, Callable[..., Any]]


class CallSettings(NamedTuple):
    """Facts about the calls of one wrapper under one policy. C reads the fields by position.

    Attributes:
        policy: the policy.
        flags: the rules of packing, as `flags_of` encodes them.
        patterns: number of arguments → pattern of such calls. With keywords, the key is a pair of the number and the
            keywords. A pattern is None if Python has to do these calls. `patterns` is None if Python has to do all.
        in_place: True if changes are written back.
        finishes: True if C may build the result. False if the transform does not return leaf groups of the function's
            result, but a gradient or the like.
        write: writes changes into objects to which C cannot write.
    """

    policy: Policy
    flags: int
    patterns: dict[Any, CallPattern | None] | None
    in_place: bool
    finishes: bool
    write: Callable[[Sequence[Any]], None]

    @classmethod
    def before_first_call(cls, policy: Policy, rules: Rules | None, *, finishes: bool) -> "CallSettings":
        """Makes the settings before the first call, without patterns.

        Args:
            policy: the policy.
            rules: how arguments are packed. None to leave all calls to Python.
            finishes: True if C may build the result.
        """
        in_place = bool(policy.in_place)
        # Without patterns, Python does every call.
        if native is None or rules is None:
            return cls(policy, 0, None, in_place, finishes, write)
        return cls(policy, flags_of(rules), {}, in_place, finishes, write)

    def learn(
        self, args: Sequence[Any], kwargs: dict[str, Any], pattern: CallPattern | None, call: Call, transformed: Any
    ) -> None:
        """Remembers how Python did a call, so that C can do calls like it.

        Args:
            args: positional arguments of the call.
            kwargs: its keyword arguments.
            pattern: facts about such calls, without functions. None to leave them to Python.
            call: the call.
            transformed: the function that C calls for leaf groups with these labels.
        """
        patterns = self.patterns
        if patterns is None:
            return
        # A wrapper may be called with other keywords each time. Its patterns must not grow without bound.
        if len(patterns) >= _MAX_PATTERNS:
            patterns.clear()
        key = (len(args), tuple(kwargs)) if kwargs else len(args)
        earlier_pattern = patterns.get(key)
        if pattern is not None:
            # Calls like this one may have had groups with other labels. Their transformed functions stay in use.
            pattern.functions.update(earlier_pattern.functions if earlier_pattern is not None else {})
            pattern.functions[call.plan.labels] = transformed
        patterns[key] = pattern


class _Caller:
    """The base class of wrappers without the C extension: every call goes to `go_on`.

    Attributes:
        policy: the policy as the user wrote it.
        settings: settings under the policy of the last call. None to leave the next call to Python.
    """

    policy: PolicyOption
    settings: CallSettings | None

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        try:
            return self.go_on((), current_policy(self.policy), args, kwargs)
        except Exception as error:
            # As after a vanilla transform, the traceback shows the user's frames only.
            hide_frames(error)
            raise

    def go_on(self, deferred: Any, policy: Policy, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Does what C left of a call, and returns the result of the call.

        Args:
            deferred: an empty tuple if C did nothing. If C called the transformed function, a pair of its result and
                the call (see `call_of`). If C raised an exception, that exception.
            policy: the policy in force.
            args: positional arguments of the call.
            kwargs: its keyword arguments.
        """
        raise NotImplementedError


class Caller(_Caller if TYPE_CHECKING or native is None else native.Caller):
    """The base class of wrappers. With the C extension, its `__call__` does a call in C, or leaves it to `go_on`."""
