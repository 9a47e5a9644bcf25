"""Python source while it is being written, with the objects that it names."""

from collections.abc import Sequence
from typing import Any

MAX_DEPTH = 150
"""Generated functions call one another, a level of nesting each, so deeper structures are left to the walk."""

MAX_LOOPS = 8
"""Python refuses more than twenty loops within one another."""


class Source:
    """Lines of Python, and the objects that they name."""

    def __init__(self) -> None:
        self.functions: list[str] = []
        self.names: dict[str, Any] = {}
        self._constants: dict[int, str] = {}
        self._variables = 0

    def variable(self) -> str:
        """A new local variable."""
        self._variables += 1
        return f"v{self._variables}"

    def constant(self, obj: Any, prefix: str) -> str:
        """A name for an object, which `names` keeps alive."""
        name = self._constants.get(id(obj))  # alive in `names`
        if name is None:
            name = f"{prefix}{len(self.names)}"
            self.names[name] = obj
            self._constants[id(obj)] = name  # as above
        return name

    def function(self, name: str, parameters: str, lines: Sequence[str]) -> None:
        """Adds a function."""
        self.functions.append(f"def {name}({parameters}):\n    " + "\n    ".join(lines or ["pass"]))

    def run(self) -> dict[str, Any]:
        """Compiles everything; returns the namespace with the functions."""
        exec(compile("\n".join(self.functions), "<sharedtree: generated>", "exec"), self.names)  # noqa: S102
        return self.names


def indented(lines: Sequence[str]) -> list[str]:
    """The body of a loop."""
    return [f"    {line}" for line in lines or ["pass"]]
