"""`jax.grad`, `jax.value_and_grad`, Jacobians, and their Equinox counterparts.

Of a module in a differentiated argument only the inexact traced leaves are handed to the transform; the others go
around it. The gradient is a module of the same shape and sharing, with `None` for whatever has no gradient; a Jacobian
is what the function returned, with such a module in place of each leaf.
"""

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import tree_util as jtu

from ..._context import Policy, PolicyOption, current_policy
from ..._jax_internals import api_boundary
from ..._node_types import is_module, is_traced
from ..._packed import Packed
from ..._structure import intern
from ..._text import shown
from ..._ties import is_inexact
from ..._with_respect_to import (
    filter_of,
    require_no_prefix_filter,
    require_nothing_left,
    select_everywhere,
    selection,
)
from .._argnums import several
from .._calling import calling
from .._crossed import Position, is_packed
from .._cuts import Leaving
from .._differentiated import differentiated, split
from .._function import FunctionTransform
from .._inside import Inside
from .._likes import as_entered, unpack_likes
from .._packing import Call, with_objects
from .._prefixes import spread
from .._references import forbid_references, handed_beside
from .._treatments import Treatment
from .._used_twice import used_twice
from ..checks._partial_gradients import report_partial_gradients


class GradTransform(FunctionTransform):
    """A function under `jax.grad`, with identities preserved."""

    own_options = frozenset({"wrt"})

    def __init__(
        self,
        transform: Callable[..., Any],
        function: Callable[..., Any],
        policy: PolicyOption,
        options: dict[str, Any],
    ) -> None:
        argnums = options.get("argnums", 0)
        require_no_prefix_filter(argnums)
        wrt = options.get("wrt")
        self._selects = None if wrt is None else filter_of(wrt)
        self._argnums = tuple(several(argnums))
        if "argnums" in options:  # not all versions of JAX take integers of NumPy
            options = {**options, "argnums": self._argnums if np.ndim(argnums) else self._argnums[0]}
        self._has_aux = options.get("has_aux", False)
        self._allow_int = options.get("allow_int", False)
        super().__init__(transform, function, policy, options)

    def treatments(self, num_args: int, keywords: Collection[str]) -> Sequence[Treatment]:
        """Which leaves are differentiated; those of a differentiated module that cannot be are not."""
        chosen = self._differentiated(num_args)
        return (differentiated(lambda position: position in chosen, self._can_be_differentiated),)

    def treatments_of(self, call: Call) -> Sequence[Treatment]:
        """As the base; with `wrt` the answer may differ from leaf to leaf."""
        can_be_differentiated = self._can_be_differentiated_in(call)
        if self._selects is None:
            chosen = self._differentiated(len(call.args))
            treatment = differentiated(lambda position: position in chosen, can_be_differentiated)
            return (treatment._replace(partible=used_twice),)
        prefixes = self._prefixes(call)

        def part_of(position: Position) -> Any:
            return prefixes.get(position, False) if isinstance(position, int) else False

        treatment = differentiated(part_of, can_be_differentiated)
        return (treatment._replace(advice=lambda leaves: self._select_everywhere(call, leaves), partible=used_twice),)

    def _select_everywhere(self, call: Call, leaves: Sequence[Any]) -> str:
        """The fix where `wrt` selects leaves at some of their paths only."""
        if self._selects is None:
            return ""
        return select_everywhere(self._given(call), self._selects, leaves)

    def _prefixes(self, call: Call) -> dict[int, Any]:
        """For each differentiated argument, which of its leaves `wrt` selects."""
        assert self._selects is not None
        objects = call.tags.objects
        return {
            i: selection(with_objects(call.args[i], objects), self._selects, self.names.text(i))
            for i in self._chosen(call)
        }

    def _differentiated(self, num_args: int) -> list[int]:
        return [i + num_args if i < 0 else i for i in self._argnums]

    def _chosen(self, call: Call) -> list[int]:
        """The arguments that are differentiated and there, in order."""
        return sorted({i for i in self._differentiated(len(call.args)) if 0 <= i < len(call.args)})

    @api_boundary
    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        policy = current_policy(self.policy)
        call = self.pack(args, kwargs, policy)
        if call.cuts:
            chosen = self._differentiated(len(args))
            select = functools.partial(self._select_everywhere, call)
            report_partial_gradients(call, chosen, self.names, self.function, self._written(), select, policy)
        chosen = self._chosen(call)
        of_chosen = [call.args[i] for i in chosen]
        seen, rest = split(of_chosen, self._can_be_differentiated_in(call), call.graph, self._is_selected(call))
        forbid_references(seen, chosen, lambda: self._given(call), self.names, self.transform_name)
        if self._selects is not None and not jtu.tree_leaves(seen):
            self._require_nothing_left(call)
        differentiated_args = _with(call.args, chosen, seen)
        # A new function for each call: the transform does not cache, and where it did the leaves that go around it
        # would be those of an earlier call.
        options = {**self.options, "has_aux": True} if policy.in_place else self.options
        try:
            with calling(self.names, call):
                result = self.transform(self._inner(policy, chosen, rest), **options)(
                    *differentiated_args, **call.kwargs
                )
        except TypeError as error:
            # Equinox's transforms differentiate the first argument.
            if chosen == [0]:
                self.explain(error, args, kwargs)
            raise
        return self._finished(result, call, policy)

    def _is_selected(self, call: Call) -> Any:
        """With `wrt`: the differentiated arguments, packed, with True or False for each leaf."""
        if self._selects is None:
            return None
        records = call.graph.records
        return [
            spread(prefix, call.args[i], records, lambda part: isinstance(part, bool), "wrt", always=True)
            for i, prefix in self._prefixes(call).items()
        ]

    def _require_nothing_left(self, call: Call) -> None:
        """Raises if `wrt` selects nothing although there is something that could be differentiated."""
        require_nothing_left(self._given(call), self._can_be_differentiated, self.all_options["wrt"])

    def _given(self, call: Call) -> list[Any]:
        """The differentiated arguments with their modules in them."""
        return [with_objects(call.args[i], call.tags.objects) for i in self._chosen(call)]

    def _written(self) -> str:
        """How to write this transform of another function, with more options."""
        own = "".join(f", {name}={value!r}" for name, value in self.options.items() if name != "argnums")
        own += ", wrt=wrt" if self._selects is not None else ""
        known = {"jax.grad": "grad", "equinox.filter_grad": "grad"}
        known |= {"jax.value_and_grad": "value_and_grad", "equinox.filter_value_and_grad": "value_and_grad"}
        name = known.get(self.transform_name, f"preserve_identities({self.transform_name})")
        return f"sharedtree.{name}({{}}{own}{{}})"

    def _can_be_differentiated_in(self, call: Call) -> Callable[[Any], bool]:
        beside = handed_beside(call.graph)
        if not beside:
            return self._can_be_differentiated
        # They are alive in the call.
        return lambda leaf: id(leaf) not in beside and self._can_be_differentiated(leaf)

    def _can_be_differentiated(self, leaf: Any) -> bool:
        if not is_traced(leaf, "jax"):  # in a container; the transform refuses it
            return False
        if is_inexact(leaf):
            return True
        dtype = leaf.dtype if hasattr(leaf, "dtype") else jax.dtypes.result_type(leaf)
        return self._allow_int and not jnp.issubdtype(dtype, jax.dtypes.extended)

    def _inner(self, policy: Policy, chosen: Sequence[int], rest: Sequence[Sequence[Any]]) -> Callable[..., Any]:
        run = self.inner(policy)

        def inner(*args: Any, **kwargs: Any) -> Any:
            result = run(*_with(args, chosen, as_entered([args[i] for i in chosen], rest)), **kwargs)
            if not policy.in_place:
                return result
            state, result = result
            value, aux = result if self._has_aux else (result, None)
            return value, (state, aux)

        functools.update_wrapper(inner, run, updated=())
        return inner

    def _finished(self, result: Any, call: Call, policy: Policy) -> Any:
        gradients, aux = result if self._has_aux or policy.in_place else (result, None)
        _, aux = self._finished_results(None if aux is None else _values(gradients), aux, call, policy)
        gradients = self.unpack_gradients(gradients, call)
        return (gradients, aux) if self._has_aux else gradients

    def _finished_results(self, value: Any, aux: Any, call: Call, policy: Policy) -> tuple[Any, Any]:
        """What the function returned, unpacked; in place, what it changed has come with the auxiliary data."""
        if not policy.in_place:
            return self.finish((value, aux), call, policy)
        state, aux = aux
        return self.finish((state, (value, aux)), call, policy)

    def unpack_gradients(self, gradients: Any, call: Call) -> Any:
        """Gradients as modules: with the sharing of the arguments, and None where nothing is differentiable."""
        return unpack_likes(gradients, call.modules, statics=False)

    def pack_results(self, result: Any, inside: Inside, leaving: Leaving | None) -> Any:
        """As the base.

        Raises:
            TypeError: as of JAX, which would see something else, if the result is no pair and should be one.
        """
        is_pair = isinstance(result, (tuple, list)) and len(result) == 2
        if self._has_aux and not is_pair and (inside.terms.policy.in_place or is_module(result)):
            raise TypeError(
                "expected function with aux output to return a two-element tuple, but got type "
                f"{type(result)} with value {shown(result)}"
            )
        return super().pack_results(result, inside, leaving)


class ValueAndGradTransform(GradTransform):
    """A function under `jax.value_and_grad`, with identities preserved."""

    def _finished(self, result: Any, call: Call, policy: Policy) -> Any:
        value, gradients = result
        value, aux = value if self._has_aux or policy.in_place else (value, None)
        value, aux = self._finished_results(value, aux, call, policy)
        return ((value, aux) if self._has_aux else value), self.unpack_gradients(gradients, call)


class JacobianTransform(GradTransform):
    """A function under `jax.jacfwd`, `jax.jacrev` or `jax.hessian`, with identities preserved.

    The value comes back differentiated, and what is beside it as it is. So what is in both is parted.
    """

    def pack_results(self, result: Any, inside: Inside, leaving: Leaving | None) -> Any:
        """As the base."""
        prefix: Any = True
        if self._has_aux and isinstance(result, (tuple, list)) and len(result) == 2:  # JAX refuses what is no pair
            prefix = jtu.tree_structure(result, is_leaf=lambda part: part is not result).unflatten([True, False])
        in_place = inside.terms.policy.in_place
        if self._has_aux or in_place:
            treatment = Treatment(lambda _: prefix, lambda label: isinstance(label, bool))
            leaving = Leaving(treatment, [False] * len(inside.entered.graph.modules) if in_place else [], prefix)
        return super().pack_results(result, inside, leaving)


def _with(args: Sequence[Any], positions: Sequence[int], values: Sequence[Any]) -> list[Any]:
    """Arguments with others at some positions."""
    own = dict(zip(positions, values, strict=True))
    return [own.get(i, value) for i, value in enumerate(args)]


def _values(jacobian: Any) -> list[Packed]:
    """What has the numbers of the modules that a function returned, of its Jacobian: what is beside them counts on."""
    found = [item for item in jtu.tree_leaves(jacobian, is_leaf=is_packed) if is_packed(item)]
    structures = [intern(s.records, s.root, s.base, s.maker) for s in (item.structure for item in found)]
    return [Packed(item.leaves, structure) for item, structure in zip(found, structures, strict=True)]
