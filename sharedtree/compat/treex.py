"""The real `treex` 0.6.9 on today's JAX; the very module that `import treex` finds from now on. See `docs/treex.md`."""

import sys
from typing import Any

from ._loading import load


def __getattr__(name: str) -> Any: ...  # for type checkers: this module is replaced by the real one


sys.modules[__name__] = load("treex")
