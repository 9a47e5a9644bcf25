"""`jax.checkpoint`: static arguments follow the hands."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

from .._arguments import Position
from ._argnums import several
from ._function_transform import FunctionTransform


class CheckpointTransform(FunctionTransform):
    """A function under `jax.checkpoint`, with identities preserved."""

    caches_traces = True
    only_for_transform = frozenset({"policy", "prevent_cse", "concrete"})

    def static_positions(self, num_args: int, keywords: Collection[str]) -> Collection[Position]:
        """Those that `static_argnums` chooses."""
        return {i + num_args if i < 0 else i for i in several(self.options.get("static_argnums", ()))}

    def applied(
        self, inner: Callable[..., Any], labels: Sequence[Any], leaving: Sequence[Any] | None, num_statics: int
    ) -> Any:
        """With the static arguments after the hands."""
        options = {**self.options}
        if num_statics:
            options["static_argnums"] = tuple(range(len(labels), len(labels) + num_statics))
        return self.transform(inner, **options)
