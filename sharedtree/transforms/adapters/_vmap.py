"""`jax.vmap` and `equinox.filter_vmap`: axes, also those given leaf by leaf for the inside of a module.

This is also how other transforms are wrapped that map a function, with a prefix of the arguments and one of the result.
"""

import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

import equinox as eqx

from ..._context import Policy
from ..._jax_internals import api_boundary
from ..._node_types import is_module
from .._cuts import Leaving, modules_with_prefixes
from .._function import FunctionTransform
from .._packing import Call, positions
from .._prefixes import has_containers, has_modules, spread
from .._sorted_results import labels_of, records_of, sort
from .._treatments import Treatment

_UNMAPPED = re.compile(r"at vmap out_axes(?:\[0\])? of `(.*)` in place, got axis spec None but output was batched .*")
"""What JAX says of a place that was changed, and has no axis to come out along."""


class VmapTransform(FunctionTransform):
    """A function under `jax.vmap`, with identities preserved."""

    in_name = "in_axes"
    out_name = "out_axes"
    default_in: Any = 0
    default_out: Any = 0
    is_label: Callable[[Any], bool] = staticmethod(lambda obj: obj is None or isinstance(obj, int))

    @api_boundary
    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        if self.prefixes_of_arguments(len(args), kwargs) is None:  # an error, which the transform itself reports best
            return self.transform(self.function, **self.options)(*args, **kwargs)
        return super().__call__(*args, **kwargs)

    def explain(self, error: Exception, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """As the base, and what was changed in place although it is not mapped."""
        super().explain(error, args, kwargs)
        found = _UNMAPPED.fullmatch(str(error))
        if found is None or not isinstance(error, ValueError):
            return
        error.args = (
            f"`{found[1]}` has the {self.in_name} None, so it is one for all elements, but it was given another value "
            "for each of them. In place, what was changed goes out along the axes along which it came in.\n"
            'Let the function assign what all have in common, such as `jax.lax.pmean(value, "batch")`, and name the '
            "axis:\n"
            f"    f = sharedtree.preserve_identities({self.transform_name})"
            f'(f, {self.in_name}={self.in_name}, axis_name="batch", in_place=True)\n'
            "or return the values instead of assigning them, or give each element an object of its own, stacked, with "
            f"an axis in `{self.in_name}`:\n"
            "    model = sharedtree.tree.map(lambda leaf: jnp.stack([leaf] * size), model)",
        )

    def transformed_for(self, policy: Policy, call: Call) -> Any:
        """As the base. Prefixes that reach inside modules are translated anew for each call."""
        translated: dict[str, Any] = {}
        prefix = self.options.get(self.in_name, self.default_in)
        if not self.is_label(prefix):
            prefixes = self.prefixes_of_arguments(len(call.args), call.kwargs)
            each = zip(prefixes or (), call.args, strict=True)
            records = call.graph.records
            spreads = tuple([spread(part, arg, records, self.is_label, self.in_name) for part, arg in each])
            if self._reaches_inside(prefix, policy):  # else this was but to see whether it fits
                translated[self.in_name] = spreads
        leaving = self.leaving(policy, call.args, call.kwargs)
        if policy.in_place or self._reaches_inside(leaving.result, policy):
            translated[self.out_name] = labels_of((leaving.state, leaving.result), self.default_out, self.is_label)
        if not translated:
            return self.transformed(policy)
        return self.transform(self.inner(policy), **(self.options | translated))

    def arranged(self, packed: Any, policy: Policy, leaving: Leaving, changed: Sequence[str]) -> Any:
        """As the base."""
        prefix = (leaving.state, leaving.result) if policy.in_place else leaving.result
        if self.is_label(prefix):
            return packed
        if policy.in_place or self._reaches_inside(prefix, policy):
            names = changed if policy.in_place else None
            return sort(packed, prefix, self.default_out, self.is_label, self.out_name, names)
        spread(prefix, packed, records_of(packed), self.is_label, self.out_name)  # raises if it does not fit
        return packed

    def treatments(self, num_args: int, keywords: Collection[str]) -> Sequence[Treatment]:
        """The axis of each leaf; arguments by keyword have the axis 0."""
        mapped = self._mapped(num_args, keywords)
        return () if mapped is None else (mapped,)

    def _mapped(self, num_args: int, keywords: Collection[str]) -> Treatment | None:
        prefixes = self.prefixes_of_arguments(num_args, keywords)
        if prefixes is None:
            return None
        return Treatment(
            lambda position: prefixes[position] if isinstance(position, int) else 0,
            self.is_label,
            self.resolve_in,
            lambda label: f"{self.in_name} {label}",
            self.in_name,
        )

    def prefixes_of_arguments(self, num_args: int, keywords: Collection[str]) -> Sequence[Any] | None:
        """One prefix for each positional argument; None if there are not as many."""
        prefix = self.options.get(self.in_name, self.default_in)
        if self.is_label(prefix):
            return (prefix,) * num_args
        return prefix if isinstance(prefix, (tuple, list)) and len(prefix) == num_args else None

    def leaving(self, policy: Policy, args: Sequence[Any], kwargs: dict[str, Any]) -> Leaving:
        """Results go out along `out_axes`."""
        prefix = self.options.get(self.out_name, self.default_out)
        treatment = Treatment(
            lambda _: prefix, self.is_label, self.resolve_out, lambda label: f"{self.out_name} {label}", self.out_name
        )
        return Leaving(treatment, self._prefixes_of_state(policy, args, kwargs), prefix)

    def _prefixes_of_state(self, policy: Policy, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
        """What was changed goes out along the axes along which it came in."""
        mapped = self._mapped(len(args), kwargs) if policy.in_place else None
        if mapped is None:
            return []
        static = self.static_positions(args, kwargs)
        items = [(position, value) for position, value in positions(args, kwargs) if position not in static]
        return [self.leaves_along(prefix) for prefix in modules_with_prefixes(mapped, items)[1]]

    def _reaches_inside(self, prefix: Any, policy: Policy) -> bool:
        """Whether a prefix reaches inside what is packed."""
        if self.is_label(prefix):
            return False
        return has_modules(prefix) or (policy.containers and has_containers(prefix))

    # What the transforms differ in ----------------------------------------------------------------------------------

    def resolve_in(self, label: Any, leaf: Any) -> Any:
        """The axis for one leaf of the arguments, the last one being the same as -1."""
        axis = self.axis_of(label, leaf)
        num_axes = _ndim(leaf)
        return axis + num_axes if isinstance(axis, int) and -num_axes <= axis < 0 else axis

    def resolve_out(self, label: Any, leaf: Any) -> Any:
        """The axis for one leaf of the result, which has one axis more outside."""
        axis = self.axis_of(label, leaf)
        return axis + _ndim(leaf) + 1 if isinstance(axis, int) and axis < 0 else axis

    def axis_of(self, label: Any, leaf: Any) -> Any:
        """The axis that a label means for one leaf."""
        return label

    def leaves_along(self, prefix: Any) -> Any:
        """The prefix under which an argument that was changed goes out."""
        return prefix


def _ndim(leaf: Any) -> int:
    """The number of axes; of what is no array JAX itself says what is wrong."""
    return getattr(leaf, "ndim", 0)


class FilterVmapTransform(VmapTransform):
    """A function under `equinox.filter_vmap`, with identities preserved."""

    default_in = eqx.if_array(0)
    default_out = eqx.if_array(0)
    is_label = staticmethod(lambda obj: obj is None or isinstance(obj, int) or (callable(obj) and not is_module(obj)))

    def prefixes_of_arguments(self, num_args: int, keywords: Collection[str]) -> Sequence[Any] | None:
        """As the base; Equinox takes them by name, too, and no arguments by keyword."""
        axes = self.options.get(self.in_name, self.default_in)
        if keywords:
            return None
        if not isinstance(axes, dict):
            return super().prefixes_of_arguments(num_args, keywords)
        parameters = self.names.positional[:num_args]
        return None if set(axes) - set(parameters) else [axes.get(name, self.default_in) for name in parameters]

    def axis_of(self, label: Any, leaf: Any) -> Any:
        """The axis that a label means for one leaf."""
        return label(leaf) if callable(label) else label
