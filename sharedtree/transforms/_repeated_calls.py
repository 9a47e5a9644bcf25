"""Calls like earlier ones, done in C: pack, group, call the transformed function, gather the leaves, build.

A transform is applied to the package's *inner function* in place of the user's, and returns the *transformed function*.
This takes leaf groups: the leaves of the arguments, grouped by *labels*. A label is what the transform does with a
leaf, such as the axis along which it is mapped. The *wrapper* is the function that the user gets, such as `st.jit(f)`.

How to pack a call depends on the number of its arguments and on its keywords. Which transformed function it needs
depends on the labels. Python finds out both in a first call, and keeps them with the wrapper for C:

    step(model, x)      in Python    settings.patterns[2] = CallPattern(…, functions={labels: transformed function})
    step(model, x)      in C         finds the pattern by the 2, and the transformed function by the labels

If a call is not like an earlier one, C leaves it to Python. The user's function has not been called by then.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ..core._jax_internals import hide_frames
from ..core._pack_and_unpack import Rules, flags_of, native
from ..ties._policy_and_context import Policy, PolicyOption, current_policy
from ._caller_side import Call
from ._in_place import write

_MAX_PATTERNS = 256
"""Number of patterns that are kept for one wrapper. Before one more is added, all are dropped.

Python makes a dropped pattern again in the next call that needs it.
"""

new_latest: Callable[[], Any] = (lambda: None) if native is None else native.Latest
"""Makes the object in which C keeps what it found in the last call of a pattern. None without the C extension."""


class CallPattern(NamedTuple):
    """Facts about calls with one number of arguments and one set of keywords. C reads the fields by position.

    Attributes:
        aux: names of the arguments, as `Arguments` has them.
        bound: how C reorders the arguments before it packs them. Three tuples: values to put before the positional
            arguments, names of the keywords that become positional, and names of all other keywords. None to pack the
            arguments as they are written in the call.
        key: first part of the key under which a structure keeps its plan. A plan says how the leaves are grouped.
        facts_of_leaves: (leaves) → second part of that key. None if the key has one part. See `Grouping`.
        donates: True if buffers are donated. Then C leaves a call to Python if two leaves have one buffer.
        latest: the object of `new_latest` for these calls.
        functions: labels of all leaf groups, as in `Plan.labels` → transformed function.
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
        patterns: number of positional arguments → pattern of such calls. For calls with keywords, the key is a pair:
            `(2, ("rate",))`. A value is None if Python has to do these calls. `patterns` itself is None if Python has
            to do all calls.
        in_place: True if changes are written back.
        finishes: True if C may build the result. False if the transform returns something else than leaf groups of the
            function's result, such as a gradient.
        write: writes changes into the caller's objects if C cannot. See `_in_place.write`.
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
        # No rules for C (0), and no patterns (None): Python does every call.
        if native is None or rules is None:
            return cls(policy, 0, None, in_place, finishes, write)
        # `learn` adds the patterns.
        return cls(policy, flags_of(rules), {}, in_place, finishes, write)

    def learn(
        self, args: Sequence[Any], kwargs: dict[str, Any], pattern: CallPattern | None, call: Call, transformed: Any
    ) -> None:
        """Remembers how Python did a call, so that C can do calls like it. Adds a pattern, or extends the earlier one.

        Args:
            args: positional arguments of the call.
            kwargs: keyword arguments of the call.
            pattern: facts about such calls, with empty `functions`. None if Python has to do them.
            call: the call. Its plan has the labels of the leaf groups.
            transformed: the function for C to call with leaf groups that have these labels.
        """
        patterns = self.patterns
        if patterns is None:
            return
        # A user may call a wrapper with other keywords each time. The patterns must not grow without bound.
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
    """The base class of `Caller` without the C extension: every call goes to `go_on`.

    Attributes:
        policy: the policy as the user wrote it.
        settings: settings for C, under the policy of the last call. None to leave the next call to Python.
    """

    policy: PolicyOption
    settings: CallSettings | None

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        try:
            return self.go_on((), current_policy(self.policy), args, kwargs)
        except Exception as error:
            # Removes the frames of JAX and of the package from the traceback, as a vanilla transform does.
            hide_frames(error)
            raise

    def go_on(self, deferred: Any, policy: Policy, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Does what the C extension left of a call, and returns the result of the call. Subclasses override this.

        Args:
            deferred: tells what is left. An empty tuple: all of the call, for C did nothing. A pair: only the building
                of the result. C has called the transformed function, and the pair has its result and the call, a tuple
                from which `call_of` makes a `Call`. An exception: C or the transformed function raised it, and the
                method has to handle it.
            policy: the policy in force.
            args: positional arguments of the call.
            kwargs: keyword arguments of the call.
        """
        raise NotImplementedError


class Caller(_Caller if TYPE_CHECKING or native is None else native.Caller):
    """The base class of wrappers. With the C extension, `__call__` does the call in C, or calls `go_on`."""
