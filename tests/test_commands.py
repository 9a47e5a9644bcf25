"""The commands that look at files: what they print, as text and JSON, and how they exit."""

import enum
import io
import itertools
import json
import math
import os
import pathlib
import pty
import subprocess
import sys
import types

import equinox as eqx
import hypothesis
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

import sharedtree as st
from sharedtree.__main__ import main
from sharedtree.cli._compared_files import pieces
from sharedtree.cli._diff import compare
from sharedtree.serialise.load import opened

from .serialise.isomorphic import assert_isomorphic
from .serialise.process import HANGS, run
from .serialise.strategies import trees
from .serialise.test_golden import FILES as GOLDEN
from .strategies import Pair, Point

KEY = jax.random.key(0)
KEYS_OF_SHOW = ["file", "file_nbytes", "library", "metadata", "nbytes", "arrays", "tree", "num_lines"]


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


@pytest.fixture
def saved(tmp_path):
    """A function that saves a tree and returns the path, as a text."""
    count = 0

    def save(tree, **options):
        nonlocal count
        count += 1
        path = str(tmp_path / f"{count}.safetensors")
        st.save(path, tree, **options)
        return path

    return save


@pytest.fixture
def differences(saved, command):
    """A function that returns what `diff --json` says of two trees; the exit status is checked."""

    def diff(a, b, *options):
        status, out, err = command("diff", saved(a), saved(b), "--json", *options)
        whole = json.loads(out)
        assert err == ""
        assert status == (1 if whole["differences"] else 0)
        assert whole["equal"] is (not whole["differences"])
        return whole["differences"]

    return diff


@pytest.fixture
def tied(saved):
    linear = eqx.nn.Linear(2, 4, key=KEY)
    return saved({"embed": linear, "head": linear, "steps": 7}, metadata={"run": "first"})


def test_show_prints_the_tree_with_ties_and_sizes(command, tied):
    status, out, err = command("show", tied)
    assert (status, err) == (0, "")
    assert out.partition("\n\n")[2].splitlines()[1].split() == ["(root)", "dict", "12", "48"]
    status, out, err = command("show", "--values", tied)
    lines = out.splitlines()
    assert lines[0] == f"{tied}  {os.path.getsize(tied):,} bytes, written by sharedtree {st.__version__}"
    assert lines[1:5] == ["2 arrays, 48 bytes", "1 place tied to an earlier one", "run: first", ""]
    linear = [
        "    .weight  float32[4, 2]  32 bytes",
        "    .bias  float32[4]  16 bytes",
        "    .in_features  2",
        "    .out_features  4",
        "    .use_bias  True",
    ]
    rest = ["  ['head']  = ['embed']", "  ['steps']  7"]
    assert lines[5:] == ["dict  48 bytes", "  ['embed']  Linear  48 bytes", *linear, *rest]
    _, out, _ = command("show", "--values", "--depth", 1, tied)
    assert out.splitlines()[5:] == ["dict  48 bytes", "  ['embed']  Linear  48 bytes  ...", *rest]
    _, out, _ = command("show", "--values", "--depth", 0, tied)
    assert out.splitlines()[5:] == ["dict  48 bytes  ..."]
    _, out, _ = command("show", "--arrays", tied)
    assert [line.split() for line in out.splitlines()[5:]] == [
        ["name", "dtype", "shape", "bytes", "kind"],
        ["['embed'].weight", "float32", "[4,", "2]", "32", "jax"],
        ["['embed'].bias", "float32", "[4]", "16", "jax"],
    ]


def test_show_says_how_many_lines_it_leaves_out(command, saved):
    path = saved([[1, 2], [jnp.ones(2), 4]])
    _, out, _ = command("show", "--values", "--lines", 4, path)
    assert out.endswith("  [1]  2\n... and 3 more lines; see --lines and --depth\n")
    _, out, _ = command("show", "--values", "--lines", 2, "--depth", 1, path)
    assert out.endswith("  [0]  list  ...\n... and 1 more line; see --lines and --depth\n")
    _, out, _ = command("show", "--json", "--lines", 1, path)
    whole = json.loads(out)
    assert (len(whole["tree"]), whole["tree"][0]["nbytes"], whole["num_lines"]) == (1, 8, 7)


def test_show_json_has_the_documented_keys(command, tied):
    status, out, _ = command("show", "--json", tied)
    whole = json.loads(out)
    assert status == 0
    assert [list(whole), whole["num_lines"]] == [KEYS_OF_SHOW, len(whole["tree"])]
    assert (whole["file_nbytes"], whole["nbytes"], whole["metadata"]) == (os.path.getsize(tied), 48, {"run": "first"})
    weight = {"name": "['embed'].weight", "dtype": "float32", "shape": [4, 2], "nbytes": 32, "kind": "jax"}
    assert whole["arrays"][0] == weight
    by_path = {line["path"]: line for line in whole["tree"]}
    assert by_path["['head']"]["tied_to"] == "['embed']"
    embed = {"depth": 1, "step": "['embed']", "path": "['embed']", "text": "Linear", "nbytes": 48, "tied_to": None}
    assert by_path["['embed']"] == embed


SHOWN = [
    ((8, 1), "(8, 1)"), ((8,), "(8,)"), ((), "()"), (frozenset({1}), "frozenset({1})"), (frozenset(), "frozenset()"),
    (slice(1, None), "slice(1, None, None)"), (range(3), "range(0, 3, 1)"), (np.float32(0.5), "np.float32(0.5)"),
    (b"ab", "b'ab'"), (1e-5, "1e-05"), (-(16**100), f"0x-1{'0' * 73}..."), ("x" * 100, f"'{'x' * 76}..."),
    (jax.nn.relu, "jax.nn:relu"), (pathlib.PurePosixPath("a/b"), "PurePosixPath('a/b')"), ([], "empty list"),
    (jax.random.key(1), "PRNG key, threefry2x32, uint32[2]  8 bytes"), (np.zeros(2), "float64[2] NumPy  16 bytes"),
    (jax.ShapeDtypeStruct((2,), jnp.float32), "ShapeDtypeStruct[2]"),
]  # fmt: skip


def test_values_are_shown_as_python_prints_them(command, saved):
    _, out, _ = command("show", "--values", saved([value for value, _ in SHOWN]))
    lines = [line for line in out.splitlines() if line.startswith("  [")]
    assert lines == [f"  [{i}]  {text}" for i, (_, text) in enumerate(SHOWN)]
    # The parts of a partial are named as their tensors are.
    path = saved(jax.tree_util.Partial(jnp.sum, jnp.ones(3), where=jnp.ones(3, bool)))
    whole = json.loads(command("show", "--json", path)[1])
    assert {array["name"] for array in whole["arrays"]} | {".func"} <= {line["path"] for line in whole["tree"]}


def test_a_file_cannot_send_control_characters_to_the_terminal(command, saved, monkeypatch):
    path = saved({"a\x1b[2J\u202eb": "\r\x07"}, metadata={"key\x1b]0;title\x07": "line\nline \x9b"})
    calls = (
        ["show", path],
        ["show", "--values", path],
        ["show", "--arrays", path],
        ["show", "--json", path],
        ["audit", path],
    )
    for arguments in (*calls, ["diff", path, saved({})]):
        _, out, err = command(*arguments)
        assert all(char.isprintable() or char == "\n" for char in out + err), arguments
    _, out, _ = command("show", path)
    assert "line\\nline \\x9b" in out
    # A name that cannot be encoded is escaped.
    path, out = saved({"größe": 1}), io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr(sys, "stdout", out)
    assert main(["show", "--values", path]) == 0
    out.flush()
    assert b"['gr\\xf6\\xdfe']  1" in out.buffer.getvalue()


def test_show_of_deep_and_much_shared_trees_neither_crashes_nor_floods(command, saved):
    tree, values = jnp.ones(1), (jnp.ones(1),)
    for _ in range(20_000):
        tree = [tree]
    status, out, _ = command("show", "--values", saved(tree), "--lines", 20_001)
    assert status == 0
    assert len(out) < 20_000 * 1_000
    assert "(20000) [0]  float32[1]  4 bytes" in out
    for _ in range(60):
        values = (values, values)
    point = Point(jnp.ones(1), 2)  # at two places, which is no tie
    status, out, _ = command("show", "--values", saved({(1, "a"): point, "b": point, "c": values}))
    assert status == 0
    assert len(out.splitlines()) < 200
    assert "tuple, as at" in out
    assert "Point, as at [(1, 'a')]" in out


@pytest.mark.slow
def test_show_imports_nothing_that_the_file_names(python, saved, tmp_path, command):
    module = types.ModuleType("module_of_the_file")
    exec(
        "import equinox as eqx\nclass Evil(eqx.Module):\n    x: int",
        module.__dict__ | {"__name__": module.__name__},
        module.__dict__,
    )
    sys.modules[module.__name__] = module
    try:
        path = saved(module.Evil(3))
    finally:
        del sys.modules[module.__name__]
    (tmp_path / "module_of_the_file.py").write_text("raise SystemExit('imported')")
    calls = ["show", path], ["diff", path, path], ["verify", path], ["audit", path]
    code = f"from sharedtree.__main__ import main; print([main(each) for each in {calls}])"
    assert python(tmp_path, "-c", code).splitlines()[-1] == "[0, 0, 0, 1]"


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no pseudo-terminals")
def test_colours_are_for_terminals_with_rich(tied):
    pytest.importorskip("rich")
    code = f"""
import sys
from sharedtree.__main__ import main
sys.modules["rich"] = sys.modules["rich.console"] = None
assert main(["show", {tied!r}]) == 0
print("and with it", flush=True)
del sys.modules["rich"], sys.modules["rich.console"]
sys.exit(main(["show", {tied!r}]))
"""
    ours, theirs = pty.openpty()
    environment = {key: value for key, value in os.environ.items() if key != "NO_COLOR"} | {"TERM": "xterm-256color"}
    subprocess.run([sys.executable, "-c", code], stdout=theirs, env=environment, check=True)
    os.close(theirs)
    out = b""
    try:
        while part := os.read(ours, 4096):
            out += part
    except OSError:  # how Linux says that the other end is closed
        pass
    os.close(ours)
    without, coloured = out.split(b"and with it")
    assert b"\x1b[" not in without
    assert b"= ['embed']" in without
    assert b"\x1b[" in coloured
    assert b"= ['embed']" in coloured.replace(b"\x1b[0m", b"").replace(b"\x1b[33m", b"")


def test_no_lines_at_all(command, saved):
    """The table has no head then: its columns are those that are not empty in all lines."""
    path = saved({"w": jnp.ones(3)})
    for options in ([], ["--values"], ["--depth", 1]):
        status, out, err = command("show", "--lines", 0, *options, path)
        assert (status, err) == (0, "")
        assert "\n... and 2 more lines; see --lines and --depth\n" in out
        assert "['w']" not in out
    assert "and 2 more lines" in str(st.summary({"w": jnp.ones(3)}, lines=0))


CLOSED = "Standard output is closed, so nothing can be printed.\n"


@pytest.mark.parametrize("arguments", [["show"], ["show", "--json"], ["verify"], ["audit"]])
def test_streams_that_are_closed(arguments, saved, monkeypatch, capsys):
    """What Python makes of `>&-` and `2>&-`."""
    path = saved([1])
    missing = f"{path} is not there"
    assert main([*arguments, path]) == 0
    expected = capsys.readouterr().out
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", None)
        assert main([*arguments, path]) == 2
        assert main(["--version"]) == 2
    assert capsys.readouterr() == ("", 2 * CLOSED)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", None)
        assert main([*arguments, path]) == 0
        assert capsys.readouterr().out == expected
        assert main([*arguments, missing]) == 2
        with pytest.raises(SystemExit, match="2"):
            main([*arguments])
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", None)
        patch.setattr(sys, "stderr", None)
        assert main([*arguments, path]) == 2


@pytest.mark.parametrize(("closed", "expected"), [(">&-", (2, CLOSED)), ("2>&-", (0, "")), (">&- 2>&-", (2, ""))])
def test_streams_that_a_shell_has_closed(closed, expected, saved):
    program = [sys.executable, "-m", "sharedtree", "verify", saved([1])]
    environment = {**os.environ, "PYTHONPATH": str(pathlib.Path(st.__file__).parents[1])}
    done = subprocess.run(
        ["sh", "-c", f'"$@" {closed}', "sh", *program], env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == expected


@pytest.fixture
def theirs(tmp_path):
    """A safetensors file of another program, one of whose dtypes nobody has arrays of."""
    entries = {
        "__metadata__": {"format": "pt\x1b"},
        "embed.weight": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]},
        "scale": {"dtype": "F8_E8M0", "shape": [4], "data_offsets": [12, 16]},
        "packed": {"dtype": "F4", "shape": [4], "data_offsets": [16, 18]},
        "new\u202e": {"dtype": "Q5", "shape": [3], "data_offsets": [18, 20]},
    }
    text = json.dumps(entries).encode()
    path = tmp_path / "theirs.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(20))
    return path


def test_show_lists_the_tensors_of_another_program(command, theirs):
    nbytes = f"{theirs.stat().st_size:,} bytes"
    for options in ([], ["--arrays"], ["--depth", 1]):
        status, out, err = command("show", theirs, *options)
        assert (status, err) == (0, "")
        assert out.splitlines() == [
            f"{theirs}  {nbytes}, which another program wrote: it has tensors, and no tree",
            "4 arrays, 20 bytes",
            "format: pt\\x1b",
            "",
            "name          dtype    shape   bytes",
            "embed.weight  BF16     [2, 3]  12",
            "scale         F8_E8M0  [4]     4",
            "packed        F4       [4]     2",
            "new\\u202e     Q5       [3]     2",
        ]
    _, out, _ = command("show", theirs, "--json")
    whole = json.loads(out)
    assert list(whole) == KEYS_OF_SHOW
    assert (whole["library"], whole["nbytes"], whole["tree"], whole["num_lines"]) == (None, 20, [], 0)
    assert whole["arrays"][2] == {"name": "packed", "dtype": "F4", "shape": [4], "nbytes": 2, "kind": None}


def test_show_of_another_programs_file_reads_its_header_only(command, theirs):
    data = theirs.read_bytes()
    size = 2**40
    text = (
        data[8:-20]
        .replace(b"[16, 18]", b"[16, %d]" % size)
        .replace(b'"F4", "shape": [4]', b'"U8", "shape": [%d]' % (size - 16))
    )
    text = text[: text.index(b', "new')] + b"}"
    with theirs.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + size)
    status, out, _ = command("show", theirs)
    assert status == 0
    assert "packed        U8       [1099511627760]  1,099,511,627,760" in out
    with theirs.open("r+b") as file:
        file.truncate(1_000)
    for name in ("show", "audit", "verify", "diff"):
        status, out, err = command(name, theirs, *([theirs] if name == "diff" else []))
        assert (status, out) == (2, "")
        assert ("was cut short" if name == "show" else "sharedtree.load(path, foreign=True)") in err


def damaged(path, old, new):
    data = pathlib.Path(path).read_bytes()
    assert data.count(old) == 1
    pathlib.Path(path).write_bytes(data.replace(old, new))


def test_verify_names_each_damaged_tensor_and_chunk(command, saved, tied):
    large = np.zeros(3 * 2**20, np.float32)  # three chunks of 4 MiB
    large[0], large[-1] = 1.25, 2.25
    path = saved({"large": large, "small": np.full(3, 7.5), "whole": np.ones(2)})
    damaged(path, np.float32(1.25).tobytes(), np.float32(1.5).tobytes())
    damaged(path, np.float32(2.25).tobytes(), np.float32(2.5).tobytes())
    damaged(path, np.full(3, 7.5).tobytes(), np.full(3, 8.5).tobytes())
    status, out, err = command("verify", path, tied)
    assert status == 1
    assert out.splitlines() == [f"{tied}: whole, 2 arrays, 48 bytes"]
    assert f"`{path}` is damaged" in err
    assert "    `['large']`, chunk 0, 2\n    `['small']`, chunk 0\n" in err
    assert "whole'" not in err
    status, out, err = command("verify", "--json", path)
    assert (status, err) == (1, "")
    (found,) = json.loads(out)["files"]
    assert found["whole"] is False
    assert found["damage"] == [
        {"tensor": "['large']", "chunk": 0},
        {"tensor": "['large']", "chunk": 2},
        {"tensor": "['small']", "chunk": 0},
    ]


def test_what_cannot_be_checked_is_trouble_and_the_others_are_checked(command, tied, saved, tmp_path):
    text = tmp_path / "text"
    text.write_text("no checkpoint at all")
    missing, other = tmp_path / "missing", saved([np.zeros(3)])
    status, out, err = command("verify", missing, text, tied, other)
    assert status == 2
    assert f"{missing}: No such file or directory" in err
    assert f"`{text}` is not a sharedtree file" in err
    assert out.splitlines() == [f"{tied}: whole, 2 arrays, 48 bytes", f"{other}: whole, 1 array, 24 bytes"]
    assert command("verify", tied, other) == (0, out, "")
    status, out, _ = command("verify", "--json", missing, tied)
    assert status == 2
    files = json.loads(out)["files"]
    assert [each["whole"] for each in files] == [None, True]
    assert list(files[1]) == ["file", "whole", "nbytes", "num_arrays", "damage", "error"]
    assert (files[1]["nbytes"], files[1]["num_arrays"], files[1]["damage"], files[1]["error"]) == (48, 2, [], None)


def test_audit_of_a_file_that_gets_all_it_names(command, tied):
    status, out, err = command("audit", tied)
    assert (status, err) == (0, "")
    assert [line.split() for line in out.splitlines()][1] == ["equinox.nn:Linear", "class", "allowed", "['embed']"]
    status, out, err = command("audit", tied, "--trusted", "no name")
    assert (status, out) == (2, "")
    assert "no name" in err


def test_audit_of_a_file_that_names_what_it_may_not(command, saved):
    path = saved({"pair": Pair(1, jax.nn.relu), "colour": Colour.RED})
    pair, colour = f"{Pair.__module__}:Pair", f"{__name__}:Colour"
    status, out, err = command("audit", path)
    assert (status, err) == (1, "")
    assert "REFUSED: not on the allow-list" in out
    assert f'    sharedtree.load(path, trusted=["{colour}", "{pair}"])' in out.splitlines()

    status, out, _ = command("audit", "--json", path, "--trusted", pair)
    whole = json.loads(out)
    assert status == 1
    assert list(whole) == ["file", "requests", "allow_list"]
    assert whole["allow_list"] == [colour]
    by_name = {request["name"]: request for request in whole["requests"]}
    assert by_name[pair] == {
        "name": pair, "kind": "class", "paths": ["['pair']"], "allowed": True, "found": True, "why": "",
        "elsewhere": "",
    }  # fmt: skip
    assert by_name[colour]["allowed"] is False

    status, out, _ = command("audit", path, "--trusted", pair, "--trusted", colour)
    assert status == 0
    assert st.load(path, trusted=[pair, colour])["colour"] is Colour.RED


def test_equal_files_are_equal_and_metadata_is_compared(command, saved):
    for path in GOLDEN:  # which have all that can be saved
        assert command("diff", path, path) == (0, "no differences\n", "")
    a, b = saved(1, metadata={"run": "one", "same": "x"}), saved(1, metadata={"run": "two", "same": "x", "new": ""})
    status, out, _ = command("diff", a, b)
    assert status == 1
    assert out.splitlines() == ["~ metadata run  'one' -> 'two'", "~ metadata new  none -> ''", "2 differences"]


CHANGES = [
    (1, 2, "1", "2"), (1, True, "1", "True"), (1, 1.0, "1", "1.0"), (0.0, -0.0, "0.0", "-0.0"), (None, 1, "None", "1"),
    ("a", b"a", "'a'", "b'a'"), (Colour.RED, Colour.BLUE, "Colour.RED", "Colour.BLUE"),
    (slice(1, 2), slice(1, 3), "slice(1, 2, None)", "slice(1, 3, None)"),
    (jax.nn.relu, jax.nn.gelu, "jax.nn:relu", "jax.nn:gelu"), (np.int8(1), np.int16(1), "np.int8(1)", "np.int16(1)"),
    ([1], (1,), "list", "(1,)"), ([], {}, "empty list", "empty dict"), (jnp.ones(2), None, "float32[2]", "None"),
    (jnp.ones(2), jnp.ones(3), "float32[2]", "float32[3]"),
    (jnp.ones(2), jnp.ones((2, 1)), "float32[2]", "float32[2, 1]"),
    (jnp.ones(2), np.ones(2, np.float32), "float32[2]", "float32[2] NumPy"),
    (jnp.ones(2), jnp.ones(2, jnp.int32), "float32[2]", "int32[2]"),
    (jnp.ones(()), jnp.asarray(1.0), "float32[]", "float32[] weak"),
    ("x" * 100, "x" * 99 + "y", "x" * 100, "x" * 99 + "y"),
    (*(jax.ShapeDtypeStruct((n,), np.float32) for n in (2, 3)), "ShapeDtypeStruct[2]", "ShapeDtypeStruct[3]"),
]  # fmt: skip


def test_what_was_changed_is_told(differences):
    old, new = ({str(i): change[side] for i, change in enumerate(CHANGES)} for side in (0, 1))
    found = {each["paths"][0]: each for each in differences({**old, "other": 1}, {**new, "other": 1})}
    assert len(found) == len(CHANGES)
    for i, (_, _, old_text, new_text) in enumerate(CHANGES):
        each = found[f"['{i}']"]
        assert each["what"] == "changed"
        assert old_text in each["old"]
        assert new_text in each["new"]


DIFFERENCES = {
    "parts": (
        {"a": [1, 2], "old": jnp.ones(2)},
        {"a": [1, 2, 3], "new": {"x": 1}},
        [
            {"what": "removed", "paths": ["['old']"], "old": "float32[2]"},
            {"what": "added", "paths": ["['new']"], "new": "dict"},
            {"what": "added", "paths": ["['a'][2]"], "new": "3"},
        ],
    ),
    "members of sets, and keys": (
        {"set": {(1, 2), Colour.RED, 5}, (1, (2,)): "x", 1: "int", Colour.RED: 0},
        {"set": {5, Colour.BLUE, (1, 2)}, (1, (2,)): "y", 1: "int", Colour.RED: 0},
        [
            {"what": "removed", "paths": ["['set']{Colour.RED}"], "old": "Colour.RED"},
            {"what": "added", "paths": ["['set']{Colour.BLUE}"], "new": "Colour.BLUE"},
            {"what": "changed", "paths": ["[tuple]"], "old": "'x'", "new": "'y'"},
        ],
    ),
    "the order of keys": (
        {"x": 1, "y": 2, "gone": 3},
        {"y": 2, "x": 1, "gone": 3},
        [{"what": "order", "paths": [""], "old": "['x'], ['y'], ['gone']", "new": "['y'], ['x'], ['gone']"}],
    ),
    "elements": (
        [np.array([1.0, math.nan, math.inf, 2.0, 3.0], np.float32)],
        [np.array([1.0, math.nan, math.inf, 2.5, 1.0], np.float32)],
        [
            {
                "what": "values", "paths": ["[0]"], "old": "float32[5] NumPy", "new": "float32[5] NumPy",
                "differing": 2, "size": 5, "max_abs_difference": 2.0,
            }
        ],
    ),
    "empty arrays": (
        [np.zeros((0, 2)), np.zeros(3, jax.dtypes.float0)],
        [np.zeros((0, 2)), np.zeros(3, jax.dtypes.float0)],
        [],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DIFFERENCES)
def test_differences_are_told(differences, name):
    a, b, expected = DIFFERENCES[name]
    assert differences(a, b) == expected


def module_class(fields, name="Layer", version=0):
    """A class of that name with those fields, in a module that can be imported while it is saved."""
    module = sys.modules.setdefault("module_with_layer", types.ModuleType("module_with_layer"))
    cls = type(name, (eqx.Module,), {"__annotations__": dict.fromkeys(fields, object), "__module__": module.__name__})
    if version:
        cls.__sharedtree_version__ = version
    setattr(module, name, cls)
    return cls


@pytest.fixture
def layers(saved, command):
    """A function that saves instances of two classes, each while it is the one of that name, and compares them."""

    def compare(first, second):
        paths = [saved([make()]) for make in (first, second)]
        status, out, _ = command("diff", *paths, "--json")
        assert status == 1
        return json.loads(out)["differences"]

    yield compare
    sys.modules.pop("module_with_layer", None)


def test_classes_that_have_changed(layers):
    found = layers(
        lambda: module_class(["weight", "size"])(jnp.ones(2), 3),
        lambda: module_class(["kernel", "size"])(jnp.zeros(2), 3),
    )
    assert [(each["what"], each["paths"]) for each in found] == [
        ("removed", ["[0].weight"]), ("added", ["[0].kernel"])
    ]  # fmt: skip
    found = layers(lambda: module_class(["weight"])(jnp.ones(2)), lambda: module_class(["count"])(3))
    assert [(each["what"], each["paths"]) for each in found] == [("removed", ["[0].weight"]), ("added", ["[0].count"])]
    found = layers(lambda: module_class(["a"], "Old")(1), lambda: module_class(["a"], "New")(2))
    assert found == [
        {"what": "changed", "paths": ["[0]"], "old": "Old", "new": "New"},
        {"what": "changed", "paths": ["[0].a"], "old": "1", "new": "2"},
    ]
    (found,) = layers(lambda: module_class(["a"])(1), lambda: module_class(["a"], version=2)(1))
    assert found["what"] == "changed"
    assert "module_with_layer:Layer, version 2" in found["new"]
    assert "version" not in found["old"]


def linear(value=1.0):
    made = eqx.nn.Linear(2, 2, use_bias=False, key=KEY)
    return eqx.tree_at(lambda m: m.weight, made, jnp.full((2, 2), value, jnp.float32))


X, Y, VALUE = jnp.ones(2), jnp.ones(2), [1]
ONE, OTHER = (Pair([linear()], {"x": jnp.ones(2)}) for _ in range(2))
PART, OTHER_PART = ([w, w] for w in (X, Y))  # a tie that both files have, though one of them by another path

TIES = {
    "broken": ([ONE, ONE], [ONE, OTHER], [("untied", ["[0]", "[1]"])]),
    "made": ([ONE, OTHER], [ONE, ONE], [("tied", ["[0]", "[1]"])]),
    "further down": (
        [m := Pair(X, 1), m],
        [Pair(X, 1), Pair(X, 1)],
        [("untied", ["[0]", "[1]"]), ("tied", ["[0].first", "[1].first"])],
    ),
    "between other places": ([X, X, Y], [X, Y, Y], [("untied", ["[0]", "[1]"]), ("tied", ["[1]", "[2]"])]),
    "larger": ([X, X, Y], [X, X, X], [("untied", ["[0]", "[1]"]), ("tied", ["[0]", "[1]", "[2]"])]),
    "within what is no longer tied": ((PART, PART), (PART, OTHER_PART), [("untied", ["[0]", "[1]"])]),
    "within what is now tied": ((PART, OTHER_PART), (PART, PART), [("tied", ["[0]", "[1]"])]),
    "with a value in the place of an object": ([VALUE, VALUE], [(1,), (1,)], [("untied", ["[0]", "[1]"])]),
    "of equal values": ([(1, (2, 3))] * 2, [(1, (2, 3)), (1, (2, 3))], []),
    "in a new part": ([X], [X, [X]], [("tied", ["[0]", "[1][0]"])]),
    "only in a new part": ([X], [X, [Y, X + 1]], []),
}


def test_ties_that_differ_are_told_from_the_top(differences):
    for name, (a, b, expected) in TIES.items():
        found = [(each["what"], each["paths"]) for each in differences(a, b)]
        assert [each for each in found if each[0] in ("tied", "untied")] == expected, name


def test_ties_beside_other_differences(differences):
    """What differs in a tied part is told once, and parts that are not tied are both compared."""
    x, y = linear(1.0), linear(2.0)
    assert differences({"embed": x, "head": x}, {"embed": x}) == [
        {"what": "removed", "paths": ["['head']"], "old": "Linear"},
        {"what": "untied", "paths": ["['embed']", "['head']"]},
    ]
    found = differences([Pair(x, x), Pair(x, x)], [Pair(y, y), Pair(y, linear(3.0))])
    assert [(each["paths"], each["max_abs_difference"]) for each in found if each["what"] == "values"] == [
        (["[0].first.weight"], 1.0),
        (["[1].second.weight"], 2.0),
    ]


@pytest.mark.slow
def test_deep_and_much_shared_files_are_compared_in_a_moment(command, saved):
    def tree(last):
        value = [jnp.full(1, last)]
        for _ in range(60):
            value = (value, value)
        for _ in range(20_000):
            value = [value]
        return value

    a, b, c = saved(tree(1.0)), saved(tree(2.0)), saved(tree(1.0))
    assert command("diff", a, c)[0] == 0
    status, out, _ = command("diff", a, b)
    assert status == 1
    assert "1 of 1 element differ, by up to 1" in out
    assert len(out) < 2_000


DTYPES = [
    np.bool_, np.int8, np.uint8, np.int64, np.uint64, np.float16, np.float32, np.float64, np.complex64, np.complex128,
    np.longdouble, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.int4, ml_dtypes.uint4,
    "datetime64[s]", "timedelta64[ms]", ">f8", ">i4",
]  # fmt: skip


LOW, HIGH = np.iinfo(np.int64).min, np.iinfo(np.int64).max
NUMBERS = [
    # Two arrays that differ in one element, and by how much.
    ([1.0], [math.nan], "nan"),
    ([math.inf], [1.0], "inf"),
    ([0.0], [-0.0], 0.0),
    ([math.inf, 1.0], [-math.inf, 1.0], "inf"),
    ([LOW, 1], [HIGH, 1], 2**64 - 1),
    ([2**53], [2**53 + 1], 1),
    (np.array([2**64 - 1], np.uint64), np.array([2**64 - 2], np.uint64), 1),
    *[(np.array([0, 1, 1, 0]).astype(dtype), np.array([0, 1, 0, 0]).astype(dtype), 1) for dtype in DTYPES],
]


def test_every_dtype_and_every_number_can_be_compared(differences):
    a, b = [np.asarray(old) for old, _, _ in NUMBERS], [np.asarray(new) for _, new, _ in NUMBERS]
    assert differences(a, [x.copy() for x in a]) == []
    found = {each["paths"][0]: each for each in differences(a, b)}
    assert len(found) == len(NUMBERS)
    for i, (old, _, largest) in enumerate(NUMBERS):
        each = found[f"[{i}]"]
        assert (each["differing"], each["size"], each["max_abs_difference"]) == (1, len(old), largest), old


def test_arrays_of_other_dtypes_are_compared_by_value(differences):
    changed, values = differences([np.array([1.0, 2.5])], [np.array([1.0, 2.0], np.float32)])
    assert changed["what"] == "changed"
    assert (values["differing"], values["max_abs_difference"]) == (1, 0.5)
    cases = [
        (np.array([1, 2], "datetime64[s]"), np.array([1, 2]), "changed"),
        (jax.random.key(1), jax.random.key(2), "values"),
        (jax.random.key(1), jax.random.key(1, impl="rbg"), "changed"),
    ]
    found = differences([old for old, _, _ in cases], [new for _, new, _ in cases])
    assert [next(each["what"] for each in found if each["paths"] == [f"[{i}]"]) for i in range(3)] == [
        what for _, _, what in cases
    ]


def test_pieces_cover_an_array_once():
    for shape in ((), (3,), (2**20,), (2**20 + 1,), (3, 2**20), (2, 3, 700, 700), (5, 2**21), (2, 1, 2**21)):
        seen = np.zeros(shape, np.uint8)
        for selection, part in pieces(shape):
            assert seen[selection].shape == part
            assert math.prod(part) <= 2**20
            seen[selection] += 1
        assert (seen == 1).all(), shape


@pytest.mark.slow
def test_large_arrays_are_compared_in_little_memory(command, saved):
    a = np.zeros((3, 5, 2**20), np.float32)  # 60 MiB
    b = a.copy()
    b[2, 4, -1], b[0, 0, 0] = 0.25, -3
    paths = saved([a]), saved([b])
    del a, b
    code = "import resource, sys; from sharedtree.__main__ import main; "
    code += "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss; status = main(sys.argv[1:]); "
    code += "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, status)"
    printed = run(code, "diff", *paths)
    assert "2 of 15,728,640 elements differ, by up to 3" in printed
    more, status = map(int, printed.splitlines()[-1].split())
    assert (more < 40 * 2**10, status) == (True, 1)  # KiB; one of the arrays has 60 MiB


def test_structure_reads_no_array(command, saved):
    a, b = saved([np.full(3, 7.5)]), saved([np.full(3, 7.5)])
    damaged(b, np.full(3, 7.5).tobytes(), np.full(3, 8.5).tobytes())
    assert command("diff", "--structure", a, b)[0] == 0
    status, out, err = command("diff", a, b)
    assert status == 2
    assert "damaged" in err


def test_diff_says_what_it_finds(command, saved):
    x = linear()
    a = saved({"pair": Pair(x, x), "n": 3, "old": 1})
    b = saved({"pair": Pair(x, linear(1.5)), "n": 4, "new": [1]})
    status, out, err = command("diff", a, b)
    assert (status, err) == (1, "")
    assert out.splitlines() == [
        "- ['old']  1",
        "+ ['new']  list",
        "~ ['pair'].second.weight  float32[2, 2]: 4 of 4 elements differ, by up to 0.5",
        "~ ['n']  3 -> 4",
        "- tie  ['pair'].first is ['pair'].second",
        "5 differences",
    ]


@hypothesis.given(hypothesis.strategies.data())
def test_files_are_equal_exactly_if_their_trees_are(data):
    """Of two lists that have some of their parts in common, against an oracle that knows nothing of files."""
    pool = data.draw(hypothesis.strategies.lists(trees(size=4), min_size=2, max_size=3))
    chosen = hypothesis.strategies.lists(hypothesis.strategies.sampled_from(range(len(pool))), max_size=4)
    one, other = ([pool[i] for i in data.draw(chosen)] for _ in range(2))
    files = [st.to_bytes(tree) for tree in (one, other, one)]

    def found_in(a, b):
        with opened(a) as first, opened(b) as second:
            return list(compare(first, second))

    assert found_in(files[0], files[2]) == []
    try:
        assert_isomorphic(one, other)
    except AssertionError:
        # The commands take all NaN for the same, the oracle does not.
        assert found_in(*files[:2]) or b"nan" in files[0] or "nan" in str(one)
    else:
        assert found_in(*files[:2]) == []


def test_trouble_is_one_message_and_status_2(command, tmp_path, tied):
    data = pathlib.Path(tied).read_bytes()
    for name, content in {
        "text": b"not a file of ours", "header": data.replace(b"Linear", b"Linfar", 1), "short": data[:-1]
    }.items():  # fmt: skip
        (tmp_path / name).write_bytes(content)
    wrong = {
        tmp_path / "missing": "No such file",
        tmp_path: "Is a directory",
        tmp_path / "text": "not a sharedtree",
        **{tmp_path / name: str(tmp_path / name) for name in ("header", "short")},
    }
    for (bad, message), name in itertools.product(wrong.items(), ("show", "audit", "diff", "verify")):
        is_damage = bad.name in ("header", "short")
        status, out, err = command(name, bad, *([tied] if name == "diff" else []))
        assert (status, out) == (1 if is_damage and name == "verify" else 2, ""), (name, bad)
        assert message in err
        assert "Traceback" not in err
        if is_damage:
            with pytest.raises(st.errors.CorruptFileError):
                st.load(bad)
    for arguments in ([], ["show"], ["show", "--depth", "-1", "x"], ["verify"], ["diff", "x"]):
        with pytest.raises(SystemExit) as stopped:
            main(arguments)
        assert stopped.value.code == 2


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such pipes")
def test_a_reader_that_leaves_is_no_error(saved):
    path = saved([[f"line {i}"] for i in range(50_000)])
    process = subprocess.Popen(
        [sys.executable, "-m", "sharedtree", "show", path], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(timeout=HANGS) == 141


def test_metadata_is_shown_as_far_as_it_is_short(tmp_path, command):
    """Anyone may have written it. JSON has all of it."""
    metadata = {"k" * 500: "v", "long": "x" * 10**6, **{f"key{i}": "value" for i in range(500)}, "last": "z"}
    st.save(tmp_path / "ours", [1], metadata=metadata)
    safetensors.numpy.save_file({"a": np.ones(2)}, tmp_path / "theirs", metadata)
    for name in ("ours", "theirs"):
        _, out, _ = command("show", tmp_path / name)
        assert len(out) < 10_000
        assert "\nand 403 more\n" in out
        if name == "ours":  # the other program writes them in any order
            assert "x" * 1_000 + "... (1,000,000 characters)" in out
        _, out, _ = command("show", tmp_path / name, "--json")
        assert json.loads(out)["metadata"] == metadata
    assert len(str(st.inspect(tmp_path / "ours"))) < 10_000
    assert st.inspect(tmp_path / "ours").metadata == metadata
