"""`jax.vmap` and `equinox.filter_vmap`: axes, also those given leaf by leaf for the inside of a module."""

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import equinox as eqx
from jax import tree_util as jtu

from .._context import Policy, current_policy
from .._node_types import is_module
from ._calling import calling
from ._crossing import packed_in, positions
from ._cuts import Leaving, modules_with_parts
from ._function import FunctionTransform
from ._prefixes import spread
from ._treatments import Treatment


class VmapTransform(FunctionTransform):
    """A function under `jax.vmap`, with identities preserved."""

    default_axes: Any = 0
    is_axis: Callable[[Any], bool] = staticmethod(lambda obj: obj is None or isinstance(obj, int))

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        policy = self.policy or current_policy()
        axes = self._axes_of_arguments(len(args), kwargs)
        if axes is None:  # an error, which the transform itself reports best
            return self.transform(self.function, **self.options)(*args, **kwargs)
        call = self.pack(args, kwargs, policy)
        records = call.records
        in_axes = tuple(
            spread(axis, arg, records, self.is_axis, "in_axes") for axis, arg in zip(axes, call.args, strict=True)
        )
        # A new function for each call: the transform does not cache, and the axes of the results of this call are
        # known only when its function has returned.
        out_axes = self.new_out_axes()
        inner = self._inner(policy, self._axes_of_state(policy, call.args, call.kwargs), out_axes)
        options = {**self.options, "in_axes": in_axes, "out_axes": out_axes}
        with calling(self.names, call):
            result = self.transform(inner, **options)(*call.args, **call.kwargs)
        return self.finish(out_axes.unboxed(result), call, policy)

    def treatments(self, num_args: int, keywords: Collection[str]) -> Sequence[Treatment]:
        """The axis of each leaf; arguments by keyword have the axis 0."""
        axes = self._axes_of_arguments(num_args, keywords)
        if axes is None:
            return ()
        return (
            Treatment(
                lambda position: axes[position] if isinstance(position, int) else 0,
                self.is_axis,
                self._comparable,
                lambda axis: f"in_axes {axis}",
                "in_axes",
            ),
        )

    def _axes_of_arguments(self, num_args: int, keywords: Collection[str]) -> Sequence[Any] | None:
        """One prefix for each positional argument; None if there are not as many."""
        axes = self.options.get("in_axes", self.default_axes)
        if self.is_axis(axes):
            return (axes,) * num_args
        return axes if isinstance(axes, (tuple, list)) and len(axes) == num_args else None

    def leaving(self, policy: Policy, args: Sequence[Any], kwargs: dict[str, Any]) -> Leaving:
        """Results go out along `out_axes`."""
        prefix = self.options.get("out_axes", self.default_axes)
        treatment = Treatment(
            lambda _: prefix, self.is_axis, self._comparable_out, lambda axis: f"out_axes {axis}", "out_axes"
        )
        return Leaving(treatment, self._axes_of_state(policy, args, kwargs), prefix)

    def _axes_of_state(self, policy: Policy, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
        """What was changed goes out along the axes along which it came in."""
        if not policy.in_place:
            return []
        (treatment,) = self.treatments(len(args), kwargs)
        return [axis for _, axis in modules_with_parts(treatment, list(positions(args, kwargs)))]

    def _inner(self, policy: Policy, axes_of_state: list[Any], out_axes: Any) -> Callable[..., Any]:
        prefix = self.options.get("out_axes", self.default_axes)
        run = self.inner(policy)
        if policy.in_place:
            prefix = (axes_of_state, prefix)

        def inner(*args: Any, **kwargs: Any) -> Any:
            result = run(*args, **kwargs)
            records = [record for packed in packed_in(result, "result") for record in packed.structure.records]
            return out_axes.boxed(result, spread(prefix, result, records, self.is_axis, "out_axes"))

        functools.update_wrapper(inner, run, updated=())
        return inner

    def resolve(self, axis: Any, leaf: Any) -> Any:
        """The axis for one leaf."""
        return axis

    def _comparable(self, axis: Any, leaf: Any) -> Any:
        """The axis for one leaf, the last one being the same as -1."""
        axis = self.resolve(axis, leaf)
        num_axes = _ndim(leaf)
        return axis + num_axes if isinstance(axis, int) and -num_axes <= axis < 0 else axis

    def _comparable_out(self, axis: Any, leaf: Any) -> Any:
        axis = self.resolve(axis, leaf)  # the leaf has one axis more outside
        return axis + _ndim(leaf) + 1 if isinstance(axis, int) and axis < 0 else axis

    def new_out_axes(self) -> Any:
        """What the transform gets as `out_axes`; it is filled in while the function is traced."""
        return _Learned()


def _ndim(leaf: Any) -> int:
    """The number of axes; of what is no array JAX itself says what is wrong."""
    return getattr(leaf, "ndim", 0)


class _Learned:
    """A pytree with one child, which is filled in while the function is traced. `jax.vmap` reads it afterwards."""

    __slots__ = ("tree",)

    def __init__(self, tree: Any = None) -> None:
        self.tree = tree

    def boxed(self, result: Any, axes: Any) -> "_Learned":
        self.tree = axes
        return _Learned(result)

    def unboxed(self, result: "_Learned") -> Any:
        return result.tree


jtu.register_pytree_node(_Learned, lambda box: ((box.tree,), None), lambda _, children: _Learned(*children))


class FilterVmapTransform(VmapTransform):
    """A function under `equinox.filter_vmap`, with identities preserved."""

    default_axes = eqx.if_array(0)
    is_axis = staticmethod(lambda obj: obj is None or isinstance(obj, int) or (callable(obj) and not is_module(obj)))

    def _axes_of_arguments(self, num_args: int, keywords: Collection[str]) -> Sequence[Any] | None:
        axes = self.options.get("in_axes", self.default_axes)
        if keywords:
            return None
        if not isinstance(axes, dict):
            return super()._axes_of_arguments(num_args, keywords)
        parameters = self.names.positional[:num_args]
        return None if set(axes) - set(parameters) else [axes.get(name, self.default_axes) for name in parameters]

    def resolve(self, axis: Any, leaf: Any) -> Any:
        """The axis for one leaf."""
        return axis(leaf) if callable(axis) else axis

    def new_out_axes(self) -> Any:
        """Equinox copies what it is given, so nothing could be filled in; but it asks a callable for each leaf."""
        return _AxisOfEachLeaf(self.resolve)


class _AxisOfEachLeaf:
    """A callable for `out_axes` that answers for the leaves of one result, one after the other."""

    def __init__(self, resolve: Callable[[Any, Any], Any]) -> None:
        self._resolve = resolve
        self._rest: Any = iter(())

    def boxed(self, result: Any, axes: Any) -> Any:
        found: list[Any] = []

        def note(axis: Any, part: Any) -> None:
            found.extend(self._resolve(axis, leaf) for leaf in jtu.tree_leaves(part))

        jtu.tree_map(note, axes, result, is_leaf=lambda axis: axis is None)
        self._rest = iter(found)
        return result

    def unboxed(self, result: Any) -> Any:
        return result

    def __call__(self, leaf: Any) -> Any:
        del leaf
        return next(self._rest)
