"""The program that runs, which others know by another name than `__main__`.

What `train.py` defines is `__main__:Net` while `python train.py` runs, and `train:Net` to everyone who imports it.
Under the first name no other program would find it, so files have the second, if there is one: a top-level module that
Python would take from the very file of the program. Nothing is imported to find out.
"""

import importlib.util
import os
import sys
from typing import Any

from ._allowed import LIBRARIES, NAMES_ONLY
from ._names import MAIN, namespace


def import_name() -> str | None:
    """The name by which others would import the file of the running program; None if there is none.

    Notebooks and `python -c` have no file. With `python -m`, Python knows the name. Looks through Python's path.
    """
    space = namespace(sys.modules.get(MAIN))
    file, spec = space.get("__file__"), space.get("__spec__")
    if type(file) is not str:
        return None
    said = getattr(spec, "name", None)
    if type(said) is str and said != MAIN:
        return said if _is_file(getattr(spec, "origin", None), file) else None
    name = os.path.basename(file).removesuffix(".py")
    # A file must not be taken for one of a library, and what is named like the standard library cannot be trusted.
    if not name.isidentifier() or name in LIBRARIES | NAMES_ONLY | sys.stdlib_module_names | {MAIN}:
        return None
    try:
        found: Any = importlib.util.find_spec(name)
    except Exception:  # noqa: BLE001 -- a finder may be anyone's; a module without a spec is a `ValueError`
        return None
    return name if _is_file(getattr(found, "origin", None), file) else None


def _is_file(origin: Any, file: str) -> bool:
    return type(origin) is str and os.path.realpath(origin) == os.path.realpath(file)
