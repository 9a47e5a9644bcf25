"""The real `treex` 0.6.9 on today's JAX; the very module that `import treex` finds from now on.

Example:
    >>> from sharedtree.compat import treex as tx  # doctest: +SKIP
    >>> tx.Linear(3).init(0, jnp.ones((1, 2)))  # doctest: +SKIP
"""

import sys
from typing import Any

from ._loading import load


def __getattr__(name: str) -> Any: ...  # for type checkers: this module is replaced by the real one


sys.modules[__name__] = load("treex")
