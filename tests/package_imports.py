"""The package's own files, and what each of them imports."""

import ast
import functools
import pathlib

import sharedtree

ROOT = pathlib.Path(sharedtree.__file__).parent


def files():
    """The package's own files."""
    return sorted(ROOT.rglob("*.py"))


def name_of(path):
    """The dotted name inside the package: `transforms._jit`, `tree`, `__init__`."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


@functools.cache
def imports_of(path):
    """Returns two sets of dotted names: what a file imports from the package itself, and what from elsewhere."""
    own, foreign = set(), set()
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            foreign.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            foreign.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = [*package[: len(package) - node.level + 1], *(node.module or "").split(".")]
            base = [part for part in base if part]
            for alias in node.names:
                target = ROOT.joinpath(*base, alias.name)
                is_module = target.with_suffix(".py").exists() or target.is_dir()
                own.add(".".join([*base, alias.name] if is_module else base) or "__init__")
    own.update(
        name.partition(".")[2].split(".")[0] or "__init__" for name in foreign if name.split(".")[0] == "sharedtree"
    )
    return own, foreign
