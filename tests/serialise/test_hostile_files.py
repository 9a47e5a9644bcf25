"""Files that were damaged or forged do no harm: the fuzz target for a while, and the worst by hand.

Each dangerous file is opened in a child process of its own, which notes what it is made to do. `fuzz.py` says what a
file may not make it do.
"""

import collections
import contextlib
import json
import os
import pathlib
import re
import subprocess
import sys
import textwrap
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sharedtree as st

from . import fuzz, strategies
from .containers import entry, forged, header_text, split
from .drafts import Draft
from .forgeries import Case, make_case
from .good_files import Good, good_files
from .hostile_json import DTYPES, GADGETS, ITEM_SIZES
from .judging import EXTRA_BYTES, judge

ROOT = pathlib.Path(__file__).parents[2]
IS_THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"
NUM_EXAMPLES = int(os.environ.get("SHAREDTREE_NUM_FUZZED", "3000" if IS_THOROUGH else "1000"))

MODEL = {"w": np.arange(16, dtype=np.float32), "odd": np.arange(3, dtype=np.int8), "j": jnp.ones((2, 3)), "n": [1, "a"]}
DATA = st.to_bytes(MODEL)


def load(data, **options):
    return st.from_bytes(data, trusted=strategies.__name__, **options)


# --- the fuzz target -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_fuzz():
    # The first cases are truncations, which `test_every_truncation_is_an_error` tries as well.
    failures, counts = fuzz.run(NUM_EXAMPLES, seed=0, start=0 if IS_THOROUGH else len(good_files()[0].data))
    assert not failures, "\n\n".join(f"case {each['case']} of seed 0: {each}" for each in failures)
    assert sum(counts.values()) == NUM_EXAMPLES
    assert counts["refused"] > 0.5 * NUM_EXAMPLES
    assert counts["opened"] > 0.05 * NUM_EXAMPLES  # not all are refused at the door


@pytest.mark.slow
def test_fuzz_of_manifests():
    failures, counts = fuzz.run(NUM_EXAMPLES, seed=0, ways="swapped")
    assert not failures, "\n\n".join(f"case {each['case']} of seed 0: {each}" for each in failures)
    assert sum(counts.values()) == NUM_EXAMPLES
    assert counts["opened"] > 0.1 * NUM_EXAMPLES  # they make sense at first sight


def raise_value_error(_):
    raise ValueError("not ours")


SABOTAGED = {
    "ValueError": raise_value_error,
    "another model": lambda data: {"other": 1},
    "open": lambda data: open(os.devnull).close(),
    "exec": lambda data: eval("1 + 1"),
    "import": lambda data: __import__("this_module_is_nowhere_to_be_found"),
    "mkdir": lambda data: os.listdir("."),
    "subprocess": lambda data: subprocess.run(["true"]),
    "MemoryError": lambda data: np.empty(len(data) + 2 * EXTRA_BYTES, np.uint8).sum(),
}


SABOTAGE = textwrap.dedent(
    """
    import sys
    from tests.serialise.forgeries import Case
    from tests.serialise.good_files import Good
    from tests.serialise.judging import judge, watch
    from tests.serialise.test_hostile_files import DATA, MODEL, SABOTAGED, load

    load(DATA)
    sys.addaudithook(watch)  # never taken away again, hence a process of its own
    case = Case(DATA, Good(MODEL, DATA), ())
    print("nothing", *judge(case, load))
    for how, operation in SABOTAGED.items():
        print(how, *judge(case, operation))
    """
)


@pytest.mark.slow
def test_the_fuzz_target_notices():
    run = subprocess.run([sys.executable, "-c", SABOTAGE], capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("nothing opened None\n")
    for how in SABOTAGED:
        assert f"\n{how} failed " in run.stdout, how


HANGS = textwrap.dedent(
    """
    import os
    from tests.serialise import fuzz
    from tests.serialise.good_files import good_files

    fuzz.SECONDS = 0.5
    files, calls = len(good_files()), []

    def operation(data):
        calls.append(1)
        if len(calls) > files:  # the good files come first
            {body}

    fuzz.run_cases(0, 1, 0, None, [("load", operation)])
    """
)


@pytest.mark.slow
@pytest.mark.parametrize(("body", "words"), [("while True: pass", "Timeout"), ("os.abort()", "Aborted")])
def test_the_fuzz_target_ends_what_hangs_and_says_where_it_crashed(body, words):
    run = subprocess.run([sys.executable, "-c", HANGS.format(body=body)], capture_output=True, text=True, cwd=ROOT)
    assert run.returncode != 0
    assert words in run.stderr
    assert "in operation" in run.stderr


def test_cases_depend_on_their_number_only():
    files = good_files()
    for number in (0, 1000, 1001):
        assert make_case(number, 5, files) == make_case(number, 5, files)
    assert make_case(1000, 5, files) != make_case(1000, 6, files)
    size = len(files[0].data)
    assert [len(make_case(i, 0, files).data) for i in range(size)] == list(range(size))


def test_a_draft_that_is_not_changed_is_the_file():
    for good in good_files():
        for with_digests in (True, False):
            assert_same_but_for_the_order(Draft(good.data).file(with_digests=with_digests), good.data)


def assert_same_but_for_the_order(one, two):
    (head, data), (other_head, other_data) = split(one), split(two)
    assert data == other_data
    assert json.loads(head) == json.loads(other_head)


# --- by hand -------------------------------------------------------------------------------------------------------


def test_every_truncation_is_an_error(tmp_path):
    for length in range(len(DATA)):
        with pytest.raises((st.FormatError, st.CorruptFileError)):
            load(DATA[:length])
    path = tmp_path / "cut"
    for length in (0, 1, 7, 8, 9, 63, 64, 500, len(DATA) - 1):
        path.write_bytes(DATA[:length])
        for options in ({}, {"mmap": True}, {"verify": False}):
            with pytest.raises((st.FormatError, st.CorruptFileError)):
                st.load(path, **options)


def test_every_flipped_bit_is_an_error():
    small = st.to_bytes([np.arange(3, dtype=np.int8)])
    for bit in range(8 * len(small)):
        data = bytearray(small)
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises((st.FormatError, st.CorruptFileError)):
            load(bytes(data))


def test_appended_bytes_are_an_error():
    for more in (b"\0", b" " * 64, DATA):
        with pytest.raises(st.CorruptFileError, match="after the end"):
            load(DATA + more)


@pytest.mark.parametrize("where", ["class of a type", "class", "function", "default factory", "partial", "method"])
def test_gadgets(where):
    for name in GADGETS:
        require_refused(where, name)


def require_refused(where, name):
    draft = Draft(DATA)
    nodes = draft.manifest["nodes"]
    if where == "class of a type":
        draft.manifest["types"].append({"name": name, "kind": "registered"})
        nodes.append(["registered", len(draft.manifest["types"]) - 1, None, [], []])
    elif where == "default factory":
        nodes.append(["defaultdict", ["class", name], [], []])
    elif where == "partial":
        nodes.append(["partial", ["function", name], ["true"], [], [], None])
    elif where == "method":
        nodes.append(["method", ["class", name], "__init__"])
    else:
        nodes.append(["tuple", [[where, name]]])
    nodes.append(["tuple", [draft.manifest["root"], len(nodes) - 1]])
    draft.manifest["root"] = len(nodes) - 1
    data = draft.file(with_digests=True)
    before = set(sys.modules)
    with pytest.raises((st.UntrustedTypeError, st.StructureMismatchError), match=re.escape(name)) as raised:
        load(data)
    if type(raised.value) is st.StructureMismatchError:
        assert "holds nothing of that name" in str(
            raised.value
        )  # of modules on the list, only what is allowed is there
    requests = [request for request in st.audit(data, trusted=strategies.__name__).requests if request.name == name]
    assert requests
    assert not any(request.allowed and request.found for request in requests)
    assert set(sys.modules) == before
    st.inspect(data)


DANGEROUS = textwrap.dedent(
    """
    import sys
    import jax, numpy as np, optax
    import sharedtree as st

    st.load(sys.argv[1])
    from tests.serialise.forgeries import Case
    from tests.serialise.judging import judge, watch
    sys.addaudithook(watch)
    others = [st.verify, lambda d: str(st.inspect(d)), lambda d: str(st.audit(d))]
    for number, name in enumerate(sys.argv[3:]):
        with open(name, "rb") as file:
            data = file.read()
        for operation in (st.from_bytes, *(others if sys.argv[2] == "all" else [others[number % 3]])):
            outcome = judge(Case(data, None, ("nest_deeply",)), operation, gives_model=False)
            print(name.rpartition("/")[2], *outcome, flush=True)
    """
)


def bombs():
    """Files that would take the reader's memory, stack or time."""
    nested = "[" * 100_000 + "]" * 100_000
    objects = '{"a":' * 100_000 + "1" + "}" * 100_000
    manifest = Draft(DATA).manifest

    def in_manifest(text, **changes):
        draft = Draft(DATA)
        draft.manifest_text = text
        return draft.file(with_digests=True)

    def with_nodes(nodes, arrays=(), root=None):
        whole = {"format": 1, "library": "x", "types": [], "arrays": list(arrays), "nodes": nodes}
        whole["root"] = len(nodes) - 1 if root is None else root
        return forged(header_text({}, b"", **{"": json.dumps(whole)}))

    def with_tensor(tensor, array):
        """A file without data, with digests for none."""
        whole = {"format": 1, "library": "x", "types": [], "arrays": [array], "nodes": [["array", 0]], "root": 0}
        text = header_text({}, b"", **{"": json.dumps(whole)})
        return forged(f'{text[:-1]},"w":{json.dumps(tensor)}}}')

    def array(dtype, *shape):
        return {"dtype": dtype, "shape": shape, "kind": "numpy", "tensor": "w"}

    yield "header nested in lists", forged(header_text({}, b"")[:-1] + f',"deep":{nested}}}')
    yield "header nested in objects", forged(header_text({}, b"")[:-1] + f',"deep":{objects}}}')
    yield "manifest nested in lists", in_manifest(nested)
    yield "manifest nested in a node", in_manifest(json.dumps(manifest).replace('"nodes":', f'"nodes":{nested},"x":'))
    yield "shape of 2^62 without data", with_tensor(entry("F32", [2**62], 0, 2**64), array("float32", 2**62))
    yield "shape of 2^62 whose offsets fit a word", with_tensor(entry("U8", [2**62], 0, 2**62), array("uint8", 2**62))
    yield (
        "a shape whose product wraps around",
        with_tensor(entry("U8", [2**32, 2**32], 0, 0), array("uint8", 2**32, 2**32)),
    )
    yield "a shape that is no shape", with_tensor(entry("U8", [2**62, 2**62, 0], 0, 0), array("uint8", 2**62, 2**62, 0))
    yield "zero-size array of 2^61 rows", with_tensor(entry("F32", [0, 2**61], 0, 0), array("float32", 0, 2**61))
    yield "zero-size array of 2^58 rows", with_tensor(entry("F32", [0, 2**58], 0, 0), array("float32", 0, 2**58))
    yield "float0 of 2^62", with_tensor(entry("U8", [2**62, 0], 0, 0), array("float0", 2**62))
    yield (
        "zero-size array of JAX",
        with_tensor(entry("F32", [0, 2**58], 0, 0), {**array("float32", 0, 2**58), "kind": "jax"}),
    )
    yield "float0 of JAX", with_tensor(entry("U8", [2**62, 0], 0, 0), {**array("float0", 2**62), "kind": "jax"})
    yield "a struct of 2^62", with_nodes([["struct", [2**62, 2**62], ["dtype", "float32"], False, None]])
    yield "a mesh of 2^62 devices", with_nodes([["abstract_mesh", [2**62, 2**62], ["x", "y"], ["Auto", "Auto"]]])
    yield "a text of 999,999,999 characters", with_nodes([["tuple", [["scalar", "str_[999999999]", "00"]]]])
    yield "the dtype of such a text", with_nodes([["tuple", [["dtype", "str_[999999999]"]]]])
    yield "a range of 2^4000", with_nodes([["range", ["int", "0"], ["int", "f" * 1000], ["int", "1"]]])
    yield "an int of 10 MB", with_nodes([["tuple", [["int", "f" * 10_000_000]]]])
    yield "a deque that claims to be long", with_nodes([["deque", ["int", f"{2**40:x}"], []]])
    lists = [["list", []]] + [["list", [i] * 10] for i in range(60)]
    yield "a DAG of 10^60 paths", with_nodes(lists)
    tuples = [["tuple", []]] + [["tuple", [i] * 10] for i in range(60)]
    yield "a DAG of 10^60 paths in tuples", with_nodes(tuples)
    yield "the same as a key", with_nodes([*tuples, ["dict", [60], [None]]])
    yield "the same in a set", with_nodes([*tuples, ["frozenset", [60]]])
    yield "the same as a treedef", with_nodes([*tuples, ["treedef", 60]])
    yield (
        "the same in partials",
        with_nodes([["tuple", []]] + [["Partial", ["function", "jax.numpy:add"], [i] * 10, [], []] for i in range(60)]),
    )
    deep = [["tuple", []]] + [["tuple", [i]] for i in range(100_000)]
    yield "100,000 tuples", with_nodes(deep)
    yield "100,000 tuples as a key", with_nodes([*deep, ["dict", [len(deep) - 1], [None]]])
    yield "100,000 tuples as a treedef", with_nodes([*deep, ["treedef", len(deep) - 1]])
    yield "100,000 frozensets", with_nodes([["frozenset", []]] + [["frozenset", [i]] for i in range(100_000)])
    yield "100,000 deques", with_nodes([["deque", None, []]] + [["deque", None, [i]] for i in range(100_000)])
    yield (
        "100,000 slices",
        with_nodes([["slice", None, None, None]] + [["slice", i, None, None] for i in range(100_000)]),
    )
    yield (
        "100,000 partials",
        with_nodes(
            [["tuple", []]] + [["partial", ["function", "jax.nn:relu"], [i], [], [], None] for i in range(100_000)]
        ),
    )
    yield (
        "colliding hashes",
        with_nodes([["dict", [["int", f"{k * (2**61 - 1):x}"] for k in range(1, 3000)], [None] * 2999]]),
    )
    yield "a cycle", with_nodes([["list", [1]], ["list", [0]]])
    yield "a node that contains itself", with_nodes([["list", [0]]])
    yield "a reference far off", with_nodes([["list", [2**62]]])


@pytest.mark.slow
def test_bombs(tmp_path):
    """An error, or something harmless; in little time and memory, without a crash."""
    good = tmp_path / "good"
    good.write_bytes(DATA)
    names = []
    for i, (name, data) in enumerate(bombs()):
        names.append(name)
        (tmp_path / f"{i}").write_bytes(data)
    # Each is loaded, and opened in one of the other ways, or, if there is time, in all of them.
    times = 4 if IS_THOROUGH else 2
    which = "all" if IS_THOROUGH else "in turn"
    arguments = [str(good), which, *(str(tmp_path / f"{i}") for i in range(len(names)))]
    run = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", DANGEROUS, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "MALLOC_ARENA_MAX": "1"},
    )
    lines = [line.split(" ", 2) for line in run.stdout.splitlines() if line[:1].isdigit()]
    bad = [f"{names[int(i)]}: {what} {why}" for i, what, why in lines if what == "failed"]
    last = names[min(int(lines[-1][0]) + (len(lines) % times == 0), len(names) - 1)] if lines else names[0]
    assert run.returncode == 0, f"the process died at {last!r}: {run.stderr[-3000:]}"
    assert not bad, "\n".join(bad)
    assert len(lines) == times * len(names)


def test_keys_whose_hashes_collide():
    """Each new key of a dict is compared with all that have its hash, which for numbers the file can choose."""
    keys = [["int", f"{k * (2**61 - 1):x}"] for k in range(1, 30_000)]
    whole = {
        "format": 1,
        "library": "x",
        "types": [],
        "arrays": [],
        "nodes": [["dict", keys, [None] * len(keys)]],
        "root": 0,
    }
    data = forged(header_text({}, b"", **{"": json.dumps(whole)}))
    start = time.process_time()
    with contextlib.suppress(st.SharedTreeError):
        load(data)
    assert time.process_time() - start < 3  # 8 s if nothing is done about it, and a third of one with other keys


def file_of_nodes(nodes):
    whole = {"format": 1, "library": "x", "types": [], "arrays": [], "nodes": nodes, "root": len(nodes) - 1}
    return forged(header_text({}, b"", **{"": json.dumps(whole)}))


DAG = [["tuple", ["a", "b"]]] + [["tuple", [i, i]] for i in range(17)]
"""The last node is a treedef or a hashable of half a million nodes, which is allowed once."""


@pytest.mark.parametrize(
    "user",
    [
        lambda i: [["treedef", 17]],
        lambda i: [["frozenset", [17]]],
        lambda i: [["dict", [17], [None]]],
        lambda i: [["abstract_mesh", [1], [17], ["Auto"]]],
    ],
)
def test_what_is_hashed_or_described_is_bounded_in_all(user):
    def file(count):
        nodes = [*DAG, *[node for i in range(count) for node in user(i)]]
        return file_of_nodes([*nodes, ["list", list(range(len(DAG), len(nodes)))]])

    assert len(load(file(1))) == 1
    with pytest.raises(st.FormatError, match="too often"):
        load(file(3))


def test_keys_that_share_a_dag_are_bounded_together():
    keys = [["tuple", [17, ["int", f"{i:x}"]]] for i in range(150)]
    nodes = [*DAG, *keys, ["dict", list(range(len(DAG), len(DAG) + 150)), [None] * 150]]
    with pytest.raises(st.FormatError, match="too often"):
        load(file_of_nodes(nodes))


def test_a_long_number_counts_for_what_hashing_it_takes():
    nodes = [["tuple", [["int", "f" * 100_000]]]] + [["tuple", [0, i]] for i in range(200)]
    nodes += [["dict", list(range(1, 201)), [None] * 200]]
    with pytest.raises(st.FormatError, match="too often"):
        load(file_of_nodes(nodes))


@pytest.mark.slow
def test_many_keys_that_are_trees_are_not_too_many():
    tree = {(f"layer{i}", (i, i + 1), ("a", "b", "c", "d", "e")): i for i in range(50_000)}
    assert st.from_bytes(st.to_bytes(tree)) == tree


@pytest.mark.parametrize("kind", ["set", "frozenset", "dict", "OrderedDict"])
@pytest.mark.parametrize("nested", [False, True])
def test_no_more_than_100_keys_have_one_hash(kind, nested):
    def tree(count):
        keys = [k * (2**61 - 1) for k in range(1, count + 1)]
        keys = [("a", key) for key in keys] if nested else keys
        return {"set": set, "frozenset": frozenset, "dict": dict.fromkeys}.get(kind, collections.OrderedDict.fromkeys)(
            keys
        )

    assert st.from_bytes(st.to_bytes([tree(100)])) == [tree(100)]
    with pytest.raises(st.UnserialisableError, match="one hash"):
        st.to_bytes([tree(101)])
    atoms = [["int", f"{k * (2**61 - 1):x}"] for k in range(1, 102)]
    nodes = [["tuple", ["a", atom]] for atom in atoms] if nested else []
    children = list(range(101)) if nested else atoms
    values = [[None] * 101] if "ict" in kind else []
    with pytest.raises(st.FormatError, match="one hash"):
        load(file_of_nodes([*nodes, [kind, children, *values]]))


def test_float0_is_numpys():
    array = jax.device_put(np.zeros(3, jax.dtypes.float0))
    if isinstance(array, jax.Array):
        with pytest.raises(st.UnserialisableError, match="float0"):
            st.to_bytes([array])
    whole = {"format": 1, "library": "x", "types": [], "nodes": [["array", 0]], "root": 0}
    for size in (0, 3, 2**62):
        whole["arrays"] = [{"dtype": "float0", "shape": [size], "kind": "jax", "tensor": "w"}]
        text = header_text({}, b"", **{"": json.dumps(whole)})
        with pytest.raises(st.FormatError, match="float0"):
            load(forged(f'{text[:-1]},"w":{json.dumps(entry("U8", [size, 0], 0, 0))}}}'))


WIDE = textwrap.dedent(
    """
    import resource, sys, sharedtree as st
    from sharedtree.__main__ import main
    data = open(sys.argv[1], "rb").read()
    str(st.inspect(st.to_bytes([1])))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = st.inspect(data)
    assert str(found).count("\\n") == 10_001, str(found).count("\\n")
    assert sum(1 for _ in found.lines) == 240_001
    assert main(["show", sys.argv[1]]) == 0
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
    """
)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tuple", "list"])
def test_a_file_of_many_references_is_shown_in_little_memory(kind, tmp_path):
    nodes = [[kind, []]] + [[kind, [i] * 200] for i in range(1_200)]
    (tmp_path / "wide").write_bytes(file_of_nodes(nodes))
    run = subprocess.run(
        [sys.executable, "-c", WIDE, str(tmp_path / "wide")], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 0, run.stderr
    assert "more lines; see --lines" in run.stdout
    lines = run.stdout.splitlines()
    assert len(lines) < 10_010
    assert int(lines[-1]) < 64  # 160 if all lines are held


def test_duplicated_keys():
    draft = Draft(DATA)
    for name in ("__metadata__", "['w']"):
        draft.edit_text = lambda text, name=name: (
            text[:-1] + "," + json.dumps(name) + ":" + json.dumps(draft.header[name]) + "}"
        )
        with pytest.raises(st.FormatError, match="twice"):
            load(draft.file(with_digests=True))
    draft = Draft(DATA)
    draft.manifest_text = json.dumps(draft.manifest)[:-1] + ',"root":0}'
    with pytest.raises(st.FormatError, match="twice"):
        load(draft.file(with_digests=True))


def test_swapped_offsets_and_digests():
    tree = {"a": np.zeros(16, np.float32), "b": np.ones(16, np.float32)}
    data = st.to_bytes(tree)
    draft = Draft(data)
    a, b = draft.header["['a']"], draft.header["['b']"]
    a["data_offsets"], b["data_offsets"] = b["data_offsets"], a["data_offsets"]
    with pytest.raises(st.FormatError, match="overlaps|order|hole"):
        load(draft.file(with_digests=False))
    draft = Draft(data)
    digests = draft.header["__metadata__"]["sharedtree.digests"]
    draft.header["__metadata__"]["sharedtree.digests"] = digests[8:] + digests[:8]
    with pytest.raises(st.CorruptFileError, match="does not have the digest"):
        load(draft.file(with_digests=False))


def test_the_header_of_another_file():
    one = st.to_bytes({"a": np.zeros(16, np.float32)})
    two = st.to_bytes({"a": np.ones(16, np.float32)})
    with pytest.raises(st.CorruptFileError):
        load(one[:-64] + two[-64:])


def test_a_newer_version():
    draft = Draft(DATA)
    draft.manifest["format"] = 2
    draft.manifest["something new"] = []
    with pytest.raises(st.FormatError, match=r"version 2(.|\n)*pip install --upgrade sharedtree"):
        load(draft.file(with_digests=True))


@pytest.mark.parametrize("is_weak", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_array_of_jax_with_an_odd_dtype(dtype, is_weak):
    """Also of one that this version of JAX does not have, and another one does."""
    size, stored_as = ITEM_SIZES[dtype]
    draft = Draft(st.to_bytes([np.zeros(4 * size, np.uint8)]))
    draft.manifest["arrays"][0] |= {"kind": "jax", "dtype": dtype, "shape": [4]} | ({"weak": True} if is_weak else {})
    draft.header["[0]"] |= {"dtype": stored_as or "U8", "shape": [4] if stored_as else [4, size]}
    try:
        (array,) = load(draft.file(with_digests=True))
    except st.SharedTreeError:
        return
    assert isinstance(array, jax.Array)
    assert array.dtype.name == dtype
    assert np.asarray(array).tobytes() == bytes(4 * size)


def test_texts_beyond_unicode():
    draft = Draft(st.to_bytes([1]))
    draft.manifest["nodes"][-1] = ["list", [["scalar", "str_[1]", "ffffffff"]]]
    with pytest.raises(st.FormatError):
        load(draft.file(with_digests=True))


def test_a_missing_field_in_a_template():
    tree = [strategies.make(strategies.Slotted, a=1, b=2)]
    draft = Draft(st.to_bytes(tree))
    (kind,) = draft.manifest["types"]
    kind["fields"].remove("b")
    kind["missing"] = ["b"]
    draft.manifest["nodes"][0][2].pop()
    assert (
        judge(
            Case(draft.file(with_digests=True), Good(tree, b""), ()),
            lambda data: load(data, like=tree),
            gives_model=False,
        )[1]
        is None
    )
