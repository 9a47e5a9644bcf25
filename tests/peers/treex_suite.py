"""The tests of treex and treeo, which are in their repositories, run on today's JAX.

    git clone --branch 0.6.9 https://github.com/cgarciae/treex
    python -m tests.peers.treex_suite treex/tests
    python -m tests.peers.treex_suite treex/tests --wrapped

They use what JAX no longer has themselves. So each of their modules is imported as those of treex are, with views of
JAX, NumPy and Flax; nothing in these is changed. With `--wrapped` the views have `sharedtree.jit` where JAX has
`jax.jit`, and so on for each of `SWAPPED`, for the tests and for treex alike.

Their Flax modules are written for frozen dicts, so `flax.linen.Module` is one whose variables come in such.
"""

import argparse
import importlib.abc
import importlib.machinery
import os
import pathlib
import sys
import types
from collections.abc import Sequence
from typing import Any

import jax
import pytest

import sharedtree as st

SWAPPED = ("jit", "grad", "value_and_grad", "vmap")


class Finder(importlib.abc.MetaPathFinder):
    """Gives the modules below a folder the builtins of those of treex."""

    def __init__(self, folder: pathlib.Path) -> None:
        self._folder = folder
        self._is_asking = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if self._is_asking:
            return None
        self._is_asking = True
        try:
            found = (finder.find_spec(fullname, path, target) for finder in sys.meta_path if finder is not self)
            spec = next((spec for spec in found if spec is not None), None)
        finally:
            self._is_asking = False
        if spec is None or spec.origin is None or self._folder not in pathlib.Path(spec.origin).parents:
            return None
        from sharedtree.compat._import_hook import _Loader

        spec.loader = _Loader(spec.loader)
        return spec


class Plugin:
    """Puts a finder before that of pytest, which rewrites assertions and is there when plugins are configured."""

    def __init__(self, finder: Finder) -> None:
        self._finder = finder

    def pytest_configure(self) -> None:
        sys.meta_path.insert(0, self._finder)


def load_treex(*, wrapped: bool, policy: st.Policy | None) -> None:
    """Loads treex, with views of JAX that have what is asked for."""
    from flax import linen

    from sharedtree.compat import _library_views
    from sharedtree.compat._linen import with_frozen_variables

    _library_views.OTHERS["flax.linen", "Module"] = lambda: with_frozen_variables(linen.Module)
    for name in SWAPPED if wrapped else ():
        swapped = st.preserve_identities(getattr(jax, name), policy=policy)
        _library_views.OTHERS["jax", name] = lambda swapped=swapped: swapped

    import sharedtree.compat.treex  # noqa: F401


def main(arguments: list[str]) -> int:
    """Runs the tests in a folder; what is no option of ours is for pytest."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.peers.treex_suite", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("tests", type=pathlib.Path, help="the folder of tests")
    parser.add_argument("--wrapped", action="store_true", help=f"with {', '.join(SWAPPED)} of sharedtree")
    parser.add_argument("--no-arrays", action="store_true", help="wrapped, with `Policy(arrays=False)`")
    options, rest = parser.parse_known_args(arguments)
    folder = options.tests.resolve()
    policy: Any = st.Policy(arrays=False) if options.no_arrays else None
    load_treex(wrapped=options.wrapped or options.no_arrays, policy=policy)
    return pytest.main(
        [
            *("-c", os.devnull, "--rootdir", str(folder), "-p", "no:cacheprovider", "-q"),
            *("-o", "python_files=test_*.py *_test.py", "--continue-on-collection-errors"),
            *(str(folder), *rest),
        ],
        plugins=[Plugin(Finder(folder))],
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
