"""The commands that look at files: what they print, as text and JSON, and how they exit."""

import enum
import io
import itertools
import json
import os
import pathlib
import pty
import subprocess
import sys
import types

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import sharedtree as st
from sharedtree.__main__ import main

from .processes import HANGS
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
    for arguments in calls:
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
    calls = ["show", path], ["verify", path], ["audit", path]
    code = f"from sharedtree.__main__ import main; print([main(each) for each in {calls}])"
    assert python(tmp_path, "-c", code).splitlines()[-1] == "[0, 0, 1]"


@pytest.mark.slow
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


@pytest.mark.slow
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
    for name in ("show", "audit", "verify"):
        status, out, err = command(name, theirs)
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
    assert [line.split() for line in out.splitlines()][2] == ["equinox.nn:Linear", "class", "allowed", "['embed']"]
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
        "not_imported": "",
    }  # fmt: skip
    assert by_name[colour]["allowed"] is False

    status, out, _ = command("audit", path, "--trusted", pair, "--trusted", colour)
    assert status == 0
    assert st.load(path, trusted=[pair, colour])["colour"] is Colour.RED


@pytest.mark.parametrize("width", [40, 80, 160])
def test_audit_cuts_places_for_a_terminal_and_never_a_verdict(command, saved, monkeypatch, width):
    path = saved({f"{'layers' * 10}[{i}]": Pair(i, jax.nn.relu) for i in range(3)})
    monkeypatch.delenv("COLUMNS", raising=False)
    whole = command("audit", path)[1].splitlines()
    assert max(map(len, whole)) > 200
    monkeypatch.setenv("COLUMNS", str(width))
    status, out, err = command("audit", path)
    assert (status, err) == (1, "")
    lines = out.splitlines()
    assert lines[0] == whole[0]
    # The head and the two names.
    for line, full in zip(lines[1:4], whole[1:4], strict=True):
        verdict = full[: whole[1].index("  where")].rstrip()
        assert line.startswith(verdict)
        if width == 160:
            assert len(line) <= width
            assert line == full or line.endswith(" ...")
        else:
            assert line == verdict
    # What to do is whole.
    assert lines[4:] == whole[4:]


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
    for (bad, message), name in itertools.product(wrong.items(), ("show", "audit", "verify")):
        is_damage = bad.name in ("header", "short")
        status, out, err = command(name, bad)
        assert (status, out) == (1 if is_damage and name == "verify" else 2, ""), (name, bad)
        assert message in err
        assert "Traceback" not in err
        if is_damage:
            with pytest.raises(st.errors.CorruptFileError):
                st.load(bad)
    for arguments in ([], ["show"], ["show", "--depth", "-1", "x"], ["verify"], ["diff", "x", "y"]):
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
