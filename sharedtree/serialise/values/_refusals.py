"""What cannot be written, and what the error says of it."""

import types
from typing import Any, NamedTuple

from jax.extend import core as jex_core

from ..._errors import UnserialisableError
from ..._printable import printable
from ..trust._allowed import LIBRARIES
from ..trust._names import RefusalError, root_of


class Problem(NamedTuple):
    """One object that cannot be written."""

    path: str
    reason: str
    fix: str


def refusal_of(obj: Any, cls: Any) -> RefusalError:
    """Why an object of an unknown class cannot be written."""
    name = f"{cls.__module__}.{cls.__qualname__}"
    if isinstance(obj, dict | list | tuple | set | frozenset | str | bytes | int | float | complex):
        base = next(b.__name__ for b in cls.__mro__ if b.__module__ == "builtins")
        return RefusalError(f"a `{name}`, a subclass of `{base}`", f"Make it a plain one: `{base}(...)`.")
    if isinstance(obj, jex_core.Jaxpr | jex_core.ClosedJaxpr):  # pyright: ignore[reportPrivateImportUsage]
        return RefusalError(
            "a function that JAX has traced (a jaxpr), which has no form that lasts",
            "Keep the function itself, and trace it again after loading.",
        )
    if isinstance(obj, types.ModuleType):
        return RefusalError("a module of Python", "Leave it out, and import it where it is used.")
    if name.startswith("flax.") and cls.__name__ == "HashableMapping":  # those of a flax that is known are no problem
        return RefusalError(
            "part of a module of Flax NNX, and this version of flax keeps those in a way that is not known here",
            "Install flax 0.12.1 or newer: `pip install -U flax`. Or save what the model holds: "
            "`sharedtree.save(path, sharedtree.state(model))`.",
        )
    fix = (
        "If it is data, make its class a dataclass or register it (`jax.tree_util.register_pytree_node`, "
        "`sharedtree.register_node`). A file, a lock, a generator and the like: leave it out."
    )
    if root_of(cls.__module__) in LIBRARIES:
        fix = "Leave it out, and make it anew after loading."
    return RefusalError(f"a `{name}`, which cannot be rebuilt without calling it", fix)


def unserialisable(problems: list[Problem]) -> UnserialisableError:
    """One error for everything that cannot be written."""
    count = "One object" if len(problems) == 1 else f"{len(problems)} objects"
    lines = [f"{count} in the tree cannot be saved, and nothing was written:"]
    for path, reason, fix in problems:
        lines += [f"    `{printable(path)}` is {printable(reason)}.", f"        {printable(fix)}"]
    return UnserialisableError("\n".join(lines), [p.path for p in problems], [p.reason for p in problems])
