"""The documentation is true: its code runs, prints what it says, names what exists, and links to what is there.

The Python blocks of one file share a namespace and run in order, as the program `__main__`, in an empty folder. A
`text` block that directly follows one of them is what it prints, with `...` for whatever may vary.
"""

import contextlib
import doctest
import importlib
import importlib.util
import inspect
import io
import json
import os
import pathlib
import pickle
import pydoc
import re
import runpy
import subprocess
import sys
import tomllib
import types
import typing

import pytest

import sharedtree as st
from sharedtree.serialise.arrays import _dtypes
from sharedtree.serialise.container import _header
from sharedtree.serialise.values import _all_kinds_of_nodes, _atoms, _manifest

ROOT = pathlib.Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
TEXTS = [*PAGES, ROOT / "CHANGELOG.md", ROOT / "SECURITY.md"]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
SLOW_PAGES = {"devices.md", "freeze.md", "from_linen_haiku.md", "from_nnx.md", "targets.md", "train.md"}  # they train
OWN_PROCESS = {"devices.md"}  # says how many devices there are, which JAX reads once
QUICK_EXAMPLES = {"counters.py", "dag_with_vanilla_jax.py", "train_step.py", "treex_shared.py"}

FENCE = re.compile(r"^```(?P<language>\S*)\n(?P<content>.*?)^```$", re.MULTILINE | re.DOTALL)
# `py` is Python of a library that is not installed, and is not run.
LANGUAGES = {"python", "py", "text", "bash", "toml"}

MENTION = re.compile(r"(?<![\w./-])(?:st|sharedtree)\.([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)")
KEYS_OF_FILES = {"header", "digests", "manifest", "crc32"}
NOT_ATTRIBUTES = {"git", "readthedocs"} | KEYS_OF_FILES

LINK = re.compile(r"\]\((?!\w+:)([^)#\s]*)(#[^)\s]*)?\)")


class Block(typing.NamedTuple):
    """A fenced block: its language, its content, the line it starts on, and whether only blank lines precede it."""

    language: str
    content: str
    line: int
    follows_directly: bool


def read(path):
    return path.read_text(encoding="utf-8")


def blocks_of(text):
    end = 0
    for match in FENCE.finditer(text):
        line = text.count("\n", 0, match.start("content"))
        yield Block(match["language"], match["content"], line, not text[end : match.start()].strip())
        end = match.end()


def run_blocks(text, filename):
    """Runs the Python blocks of a page and compares what they print with the `text` blocks that follow them."""
    with running_as_main() as namespace:
        _run_blocks(text, filename, namespace)


@contextlib.contextmanager
def running_as_main():
    """The namespace of a new `__main__`, in which the classes of a page can be found by their names."""
    module, before = types.ModuleType("__main__"), sys.modules["__main__"]
    sys.modules["__main__"] = module
    try:
        yield vars(module)
    finally:
        sys.modules["__main__"] = before


def _run_blocks(text, filename, namespace):
    checker = doctest.OutputChecker()
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    printed = None
    for block in blocks_of(text):
        if block.language == "python":
            source = "\n" * block.line + block.content  # so that a traceback names the line of the page
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(compile(source, filename, "exec", dont_inherit=True), namespace)
            printed = out.getvalue()
        elif block.language == "text" and block.follows_directly and printed is not None:
            if not checker.check_output(block.content, printed, flags):
                raise AssertionError(f"{filename}:{block.line}: expected\n{block.content}\nbut it printed\n{printed}")
            printed = None
        else:
            printed = None


def resolve(dotted):
    """The attribute of sharedtree with a dotted name; modules that are not imported yet are."""
    obj = st
    for i, name in enumerate(dotted):
        try:
            obj = getattr(obj, name)
        except AttributeError:
            obj = importlib.import_module(".".join(["sharedtree", *dotted[: i + 1]]))
    return obj


def slug(heading):
    """The anchor of a heading, as GitHub and MyST make it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def name_of(path):
    return str(path.relative_to(ROOT))


NEEDS = {
    "treex.md": ("treex", "treeo"),
    "treex_shared.py": ("treex", "treeo"),
    "README.md": ("flax",),
    "works_with.md": ("orbax",),
    "from_nnx.md": ("flax",),
    "nnx_files.md": ("flax",),
    "nnx.ipynb": ("flax",),
    "from_linen_haiku.md": ("flax", "haiku"),
    "file_contents.md": ("flax",),
}


def skip_without_needs(path):
    for name in NEEDS.get(path.name, ()):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
        if name == "flax":
            pytest.importorskip("flax", minversion="0.12.1")


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize(
    "page",
    [pytest.param(path, marks=[pytest.mark.slow] if path.name in SLOW_PAGES else []) for path in PAGES],
    ids=name_of,
)
def test_code_of_page_runs(page, tmp_path, monkeypatch):
    skip_without_needs(page)
    if page.name in OWN_PROCESS:
        run_blocks_in_a_process(page, tmp_path)
    else:
        monkeypatch.chdir(tmp_path)
        run_blocks(read(page), str(page))


def run_blocks_in_a_process(page, folder):
    """Runs a page as a program of its own, in which warnings are errors."""
    program = (
        "import pathlib, sys\n"
        "from tests.test_docs import read, run_blocks\n"
        "run_blocks(read(pathlib.Path(sys.argv[1])), sys.argv[1])"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program, str(page)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "example",
    [pytest.param(path, marks=[] if path.name in QUICK_EXAMPLES else pytest.mark.slow) for path in EXAMPLES],
    ids=name_of,
)
def test_example_runs(example, capsys):
    skip_without_needs(example)
    runpy.run_path(str(example), run_name="__main__")
    assert capsys.readouterr().out


def cells_of(notebook):
    """(kind, source) of each cell. What a cell printed is not kept in the repository: the documentation executes it."""
    for cell in json.loads(read(notebook))["cells"]:
        assert not cell.get("outputs"), "Clear its outputs: jupyter nbconvert --clear-output --inplace"
        yield cell["cell_type"], "".join(cell["source"])


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=name_of)
def test_notebook_runs(notebook, tmp_path):
    """As a program of its own, since one of them says how many devices there are. Warnings are errors."""
    skip_without_needs(notebook)
    program = tmp_path / "program.py"
    program.write_text("\n\n".join(source for kind, source in cells_of(notebook) if kind == "code"), encoding="utf-8")
    done = subprocess.run([sys.executable, "-W", "error", program], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def assert_names_and_links_are_there(page, text):
    for mention in MENTION.findall(text):
        names = mention.split(".")
        if names[0] not in NOT_ATTRIBUTES:
            try:
                resolve(names)
            except ImportError:
                pytest.fail(f"{name_of(page)} mentions `st.{mention}`, which does not exist.")
    for target, anchor in LINK.findall(FENCE.sub("", text)):
        there = page.parent / target if target else page
        assert there.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", FENCE.sub("", read(there)), re.MULTILINE)
            assert anchor[1:] in map(slug, headings), anchor


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=name_of)
def test_names_and_links_of_notebook(notebook):
    assert_names_and_links_are_there(notebook, "\n\n".join(source for _, source in cells_of(notebook)))


@pytest.mark.parametrize("page", TEXTS, ids=name_of)
def test_names_links_and_languages_of_page(page):
    text = read(page)
    assert_names_and_links_are_there(page, text)
    for block in blocks_of(text):
        if block.language == "py":
            compile(block.content, name_of(page), "exec")
            assert "not run here" in block.content.splitlines()[0]
    fences = re.findall(r"^\s*```(\S*)", text, re.MULTILINE)
    assert len(fences) % 2 == 0
    assert not any(fences[1::2])
    for language in fences[::2]:
        assert language in LANGUAGES or language.startswith("{"), language


def test_pages_take_five_minutes_to_read():
    """At 230 words a minute, beside code and tables, which are looked up."""
    for page in sorted((ROOT / "docs").rglob("*.md")):
        lines = FENCE.sub("", read(page)).splitlines()
        words = " ".join(line for line in lines if not line.startswith(("|", "<!--"))).split()
        assert len(words) <= 5 * 230, f"{name_of(page)} has {len(words):,} words: say things once, or part it"


def test_examples_page_has_every_example():
    page = read(ROOT / "docs" / "examples.md")
    assert not [path.name for path in EXAMPLES if f"`{path.name}`" not in page]


def test_reference_has_every_public_name():
    reference = "".join(map(read, sorted((ROOT / "docs" / "reference").glob("*.md"))))
    listed = set(re.findall(r"^\.\. auto\w+:: sharedtree\.(\S+)", reference, re.MULTILINE))
    public = {name for name in dir(st) if not name.startswith("_") and _is_own(getattr(st, name))}
    assert public <= listed, sorted(public - listed)
    for name in listed:
        resolve(name.split("."))


PUBLIC_MODULES = (
    "",
    ".compat",
    ".errors",
    ".linen",
    ".nn",
    ".optim",
    ".orbax",
    ".serialise",
    ".show",
    ".ties",
    ".transforms",
    ".tree",
)


def test_public_modules_offer_what_the_reference_has():
    """Nothing else but modules; and classes are printed and pickled under a public name."""
    reference = "".join(map(read, sorted((ROOT / "docs" / "reference").glob("*.md"))))
    listed = set(re.findall(r"^\.\. auto\w+:: sharedtree\.(\S+)", reference, re.MULTILINE))
    entries = {id(resolve(name.split("."))): name for name in listed}  # all of them are attributes of modules
    for room in PUBLIC_MODULES:
        module = importlib.import_module(f"sharedtree{'.serialise' if room == '.orbax' else ''}{room}")
        for name in dir(module):
            if name.startswith("_"):
                continue
            offered = getattr(module, name)
            if inspect.ismodule(offered):
                path = ROOT.joinpath(*module.__name__.split("."), name)
                assert path.is_dir() or path.with_suffix(".py").is_file() or name == "orbax", (
                    f"{module.__name__}.{name}"
                )
                continue
            assert id(offered) in entries, f"{module.__name__}.{name} has no entry in the reference"
    for name in listed:
        for cls in _classes_of(resolve(name.split("."))):
            assert id(cls) in entries, f"`{name}` hands out a `{cls.__module__}.{cls.__qualname__}`, which has no entry"
            assert not any(part.startswith("_") for part in cls.__module__.split(".")), cls
            assert pickle.loads(pickle.dumps(cls)) is cls
            assert b"._" not in pickle.dumps(cls)


def _classes_of(obj):
    """The classes of the package that an entry is, holds in its fields, or returns by its annotations."""
    annotations = [obj] if isinstance(obj, type) else []
    if hasattr(obj, "_fields") or hasattr(obj, "__dataclass_fields__"):
        annotations += obj.__annotations__.values()
    if inspect.isfunction(obj):
        annotations.append(inspect.unwrap(obj).__annotations__.get("return"))
    for annotation in annotations:
        own = set(map(str, re.findall(r"sharedtree[\w.]+", str(annotation))))
        for name in own:
            yield resolve(name.split(".")[1:])


def test_all_lists_every_public_name():
    modules = {"errors", "tree", "orbax", "show"}  # the others are where things come from, not what is to be used
    public = {name for name in dir(st) if not name.startswith("_") and not inspect.ismodule(getattr(st, name))}
    assert sorted(st.__all__) == sorted(public | modules)
    text = pydoc.render_doc(st, renderer=pydoc.plaintext)
    _, _, functions = text.partition("\nFUNCTIONS\n")
    for name in ("jit", "preserve_identities", "tie", "load", "optimizer"):
        assert f"\n    {name}(" in functions, name


def test_format_pages_have_all_of_the_format():
    page = "".join(map(read, sorted((ROOT / "docs").glob("format*.md"))))
    tags = {*_all_kinds_of_nodes.KINDS, *_atoms.NAMES, *_atoms._READERS}
    assert not [tag for tag in tags if f'`["{tag}"' not in page]
    own = {*_dtypes.STORED_AS_ITSELF, "complex64", "complex128", *_dtypes._ML_NAMES, _dtypes.FLOAT0}
    dtypes = own | {*_header.ITEM_SIZES}
    assert not [name for name in dtypes | _manifest.CLASS_KINDS if f"`{name}`" not in page]
    assert f"version {_manifest.FORMAT} of the format" in page


def _is_own(obj):
    return getattr(obj, "__module__", "").startswith("sharedtree")


def test_commands_of_readme_name_what_is_there():
    project = tomllib.loads(read(ROOT / "pyproject.toml"))
    commands = [block.content for block in blocks_of(read(ROOT / "README.md")) if block.language == "bash"]
    assert len(commands) >= 2
    extras = re.findall(r"\.\[(\w+)\]", "".join(commands))
    groups = re.findall(r"--group (\w+)", "".join(commands))
    assert extras
    assert groups
    assert set(extras) <= set(project["project"]["optional-dependencies"])
    assert set(groups) <= set(project["dependency-groups"])


# The checks themselves ------------------------------------------------------------------------------------------------


def test_blocks_run_as_they_should():
    """They share a namespace, in which classes have names; text elsewhere is no output; and failures have a place."""
    before = sys.modules["__main__"]
    for text in (
        "```python\nx = 1\n```\ntext\n```python\nprint(x + 1)\n```\n\n```text\n2\n```\n",
        "```python\nimport sys\nclass A: pass\nassert vars(sys.modules['__main__'])['A'] is A\n```\n",
        "```python\nprint(1)\n```\n\nfor example\n\n```text\n2\n```\n",
    ):
        run_blocks(text, "page")
        assert sys.modules["__main__"] is before
    with pytest.raises(ZeroDivisionError) as caught:
        run_blocks("one\n\n```python\nx = 1\n1 / 0\n```\n", "page")
    assert caught.traceback[-1].lineno + 1 == 5
    with pytest.raises(AssertionError, match="it printed"):
        run_blocks("```python\nprint(1)\n```\n\n```text\n2\n```\n", "page")


def test_mentions_are_found():
    found = MENTION.findall("`st.tree.map(f)`, sharedtree.jit; not list.append, test.py, a/st.x or best.y")
    assert found == ["tree.map", "jit"]
    with pytest.raises(ImportError):
        resolve(["tree", "no_such_name"])
