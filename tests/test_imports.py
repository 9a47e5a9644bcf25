"""The package's own imports point one way, and it imports nothing that it does not need."""

import ast
import pathlib
import re
import sys

import pytest

import sharedtree
from sharedtree.core import _lazy_names
from tests.package_imports import ROOT, files, imports_of, name_of
from tests.processes import program, run

# The rooms: each may import from those before it, and from none after it.
ORDER = [
    *("core", "libraries", "ties", "tree", "nn", "optim", "transforms", "compat", "linen", "serialise", "show"),
    *("errors", "__init__", "cli", "__main__"),
]


def test_every_file_has_its_place():
    assert {name_of(path).split(".")[0] for path in files()} == set(ORDER)
    assert len(ORDER) <= 15


def test_no_two_files_have_one_name():
    names = [path.name for path in files() if path.name != "__init__.py"]
    assert sorted(names) == sorted(set(names))


def test_imports_point_one_way():
    for path in files():
        here = name_of(path).split(".")[0]
        for name in imports_of(path)[0]:
            there = name.split(".")[0]
            assert there == here or ORDER.index(there) < ORDER.index(here), f"{name_of(path)} imports {name}"


def test_imports_within_a_folder_have_no_cycle():
    for folder in {path.parent for path in files()} - {ROOT}:
        inside = [path for path in files() if path.parent == folder]
        names = {name_of(path) for path in inside}
        graph = {name_of(path): imports_of(path)[0] & names for path in inside}
        while graph:
            free = [name for name, needs in graph.items() if not needs & graph.keys()]
            assert free, f"a cycle among {sorted(graph)}"
            for name in free:
                del graph[name]


def test_names_that_jax_does_not_promise_are_in_one_file():
    for path in files():
        _, foreign = imports_of(path)
        private = {name for name in foreign if name.startswith(("jax._src", "equinox._"))}
        assert not private or path.name == "_jax_internals.py", (path.name, private)
        lists = ("_names_jax_dropped.py", "_allow_list.py")  # of names, which may be missing
        assert path.name in ("_jax_internals.py", *lists) or "jax._src" not in path.read_text(), path.name


def test_importing_the_package_is_light():
    """A few modules of its own, no package that Equinox has not imported, none that is optional, and no backend."""
    code = program("light_import")
    count, added, loaded, has_backend, is_loaded, compat = run(code).split("\n")[:6]
    assert int(count) <= 85
    assert {*added.split()} - sys.stdlib_module_names == {"sharedtree"}
    optional = {"optax", "tqdm", "rich", "flax", "hypothesis", "orbax", "pytest", "matplotlib"}
    assert not (optional | {"igraph", "drawsvg", "treescope"}) & {*loaded.split()}
    assert has_backend == "False"
    assert (is_loaded, compat) == ("True", ""), "what is for treex and treeo is imported for everyone"


@pytest.mark.slow
def test_what_is_imported_later_can_be_used_first_in_a_trace_while_python_ends(tmp_path):
    code = program("used_while_python_ends")
    same, *sums, table = run(code, tmp_path / "model.safetensors").split("\n", 3)
    assert (same, sums) == ("True", [f"{2**23}"] * 2)
    assert "#1" in table


def test_what_trains_is_imported_with_the_first_transform_that_is_wrapped(python, tmp_path):
    """All of it, so that a package that is installed anew meanwhile cannot be mixed with the one that began."""
    code = program("import_of_transforms")
    imported = {*python(tmp_path, "-c", code).split()}
    rooms = ("core", "libraries", "ties", "tree", "nn", "optim", "transforms")
    # Another part of the package, with a report of its own or data of its own, or what only a build writes.
    later = {"transforms.checks._explain", "core._native_source"}
    for path in files():
        name = name_of(path)
        if name.split(".")[0] in rooms and not name.startswith("tree._plain_data") and name not in later:
            assert f"sharedtree.{name}" in imported, name


FIRST = {
    "jit": ("jax.jit(lambda x: 2 * x)(1.0)", 2.0),
    "scan": ("jax.lax.scan(lambda c, x: (c + x, x), 0.0, xs)[0]", 3.0),
}


@pytest.mark.parametrize(("first", "expected"), FIRST.values(), ids=FIRST)
def test_ours_can_stand_in_the_place_of_a_transform_before_one_is_wrapped(first, expected, python, tmp_path):
    """The adapters are imported while `jax.jit` is `sharedtree.jit`."""
    printed = python(tmp_path, "-c", program("transforms_replaced"), first)
    assert [float(text) for text in printed.split()] == [expected, 2.0, 3.0, 2.0]


def test_every_public_name_is_re_exported_as_itself():
    """Those that are imported later stand there for who checks types, and are those that the package imports later."""
    tree = ast.parse((ROOT / "__init__.py").read_text())
    (choice,) = [node for node in tree.body if isinstance(node, ast.If)]
    for node in [*tree.body, *choice.body]:
        if isinstance(node, ast.ImportFrom) and node.level:
            for alias in node.names:
                assert alias.asname == alias.name
                assert hasattr(sharedtree, alias.name)
    later = {alias.name: f"{node.module}." for node in choice.body for alias in node.names if node.module}
    assert later.keys() == _lazy_names.ROOM_OF.keys()
    assert all(module.startswith(f"{_lazy_names.ROOM_OF[name]}.") for name, module in later.items())
    assert {"save", "show", "serialise", "Dag"} <= {*dir(sharedtree)}
    assert not hasattr(sharedtree, "Sequence")
    with pytest.raises(AttributeError, match="module 'sharedtree' has no attribute 'nothing'"):
        _ = sharedtree.nothing


IMPORT = re.compile(r"^ *(?:from|import) (?:[^(\n]|\([^)]*\))*", re.MULTILINE)


def test_no_file_imports_from_a_file_of_tests():
    """What several files use is in a helper module, so that each file of tests can be moved or split alone."""
    tests = pathlib.Path(__file__).parent
    names = {path.stem for path in tests.rglob("test_*.py")}
    assert len(names) > 100
    importers = {}
    for path in tests.rglob("*.py"):
        # As text: to parse all files takes seconds.
        words = {word for statement in IMPORT.findall(path.read_text()) for word in re.findall(r"\w+", statement)}
        if imported := words & names - {path.stem}:
            importers[path.relative_to(tests)] = imported
    assert importers == {}
