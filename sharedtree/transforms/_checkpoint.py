"""`jax.checkpoint`: static arguments are not packed."""

from collections.abc import Collection, Sequence
from typing import Any

from ._crossing import Position
from ._function import FunctionTransform


class CheckpointTransform(FunctionTransform):
    """A function under `jax.checkpoint`, with identities preserved."""

    caches_traces = True

    def static_positions(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Collection[Position]:
        """Those that `static_argnums` chooses."""
        static = self.options.get("static_argnums", ())
        static = (static,) if isinstance(static, int) else static
        return {i + len(args) if i < 0 else i for i in static}
