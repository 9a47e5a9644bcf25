"""Files that were damaged or forged do no harm: the fuzz target for a while, and the worst by hand.

Each dangerous file is opened in a child process of its own, which notes what it is made to do. `fuzz.py` says what a
file may not make it do.
"""

import collections
import dataclasses
import itertools
import json
import os
import subprocess
import sys
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sharedtree as st
from sharedtree.serialise.trust import _allow_list
from tests.processes import HANGS, ROOT, program, run

from . import fuzz, strategies
from .containers import START, entry, file_of, forged, header_text
from .drafts import Draft
from .forgeries import Case, make_case
from .good_files import Good, good_files
from .hostile_json import GADGETS, ITEM_SIZES
from .judging import EXTRA_BYTES, judge

IS_THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"
NUM_EXAMPLES = int(os.environ.get("SHAREDTREE_NUM_FUZZED", "3000" if IS_THOROUGH else "1000"))

MODEL = {"w": np.arange(16, dtype=np.float32), "odd": np.arange(3, dtype=np.int8), "j": jnp.ones((2, 3)), "n": [1, "a"]}
DATA = st.to_bytes(MODEL)


def load(data, **options):
    return st.from_bytes(data, trusted=strategies.__name__, **options)


@pytest.mark.slow
@pytest.mark.parametrize(("ways", "least_opened"), [("any", 0.05), ("swapped", 0.1), ("undeclared", 0.1)])
def test_fuzz(ways, least_opened):
    # The first cases are truncations, which `test_every_truncation_is_an_error` tries as well.
    start = 0 if IS_THOROUGH else len(good_files()[0].data)
    failures, counts = fuzz.run(NUM_EXAMPLES, seed=0, start=start, ways=ways)
    assert not failures, "\n\n".join(f"case {each['case']} of seed 0: {each}" for each in failures)
    assert sum(counts.values()) == NUM_EXAMPLES
    assert ways != "any" or counts["refused"] > 0.5 * NUM_EXAMPLES
    assert counts["opened"] > least_opened * NUM_EXAMPLES  # not all are refused at the door


@pytest.mark.parametrize("ways", ["any", "swapped", "undeclared"])
def test_some_cases_of_the_fuzz_target(ways):
    """What this process can see: the errors are ours, what is loaded survives saving, nothing is imported."""
    files = good_files()
    st.to_bytes([jax.random.key(0, impl=impl) for impl in ("rbg", "unsafe_rbg")])
    before = set(sys.modules)
    failures = []
    for number in range(1_000, 1_000 + NUM_EXAMPLES // 8):
        case = make_case(number, 1, files, ways)
        outcome, problem = judge(case, load)
        if outcome == "failed":
            failures.append(f"case {number} of seed 1, {case.ways}: {problem}")
    assert not failures, "\n\n".join(failures)
    new = {name.partition(".")[0] for name in set(sys.modules) - before}
    assert not new & {name.partition(":")[0].partition(".")[0] for name in GADGETS} - _allow_list.PACKAGES


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


SABOTAGE = """
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


@pytest.mark.slow
def test_the_fuzz_target_notices():
    printed = run(SABOTAGE)
    assert printed.startswith("nothing opened None\n")
    for how in SABOTAGED:
        assert f"\n{how} failed " in printed, how


def test_cases_depend_on_their_number_only():
    files = good_files()
    for number in (0, 1000, 1001):
        assert make_case(number, 5, files) == make_case(number, 5, files)
    assert make_case(1000, 5, files) != make_case(1000, 6, files)
    size = len(files[0].data)
    assert [len(make_case(i, 0, files).data) for i in range(size)] == list(range(size))


def test_every_truncation_is_an_error(tmp_path):
    for length in range(len(DATA)):
        with pytest.raises((st.errors.FormatError, st.errors.CorruptFileError)) as raised:
            load(DATA[:length])
        assert length < 8 + len(START) or "cut short" in str(raised.value)
    path = tmp_path / "cut"
    for length in (0, 1, 7, 8, 9, 63, 64, 500, len(DATA) - 1):
        path.write_bytes(DATA[:length])
        for options in ({}, {"mmap": True}, {"verify": False}):
            with pytest.raises((st.errors.FormatError, st.errors.CorruptFileError)):
                st.load(path, **options)


def test_every_flipped_bit_is_an_error():
    small = st.to_bytes([np.arange(3, dtype=np.int8)])
    for bit in range(8 * len(small)):
        data = bytearray(small)
        data[bit // 8] ^= 1 << bit % 8
        in_header = (st.audit, st.inspect) if bit < 8 * (len(small) - 3) else ()
        for look in (load, st.verify, *in_header):
            with pytest.raises((st.errors.FormatError, st.errors.CorruptFileError)):
                look(bytes(data))


DANGEROUS = program("judge_files")


def with_tensor(tensor, array):
    """A file of one array without data, with digests for none."""
    draft = Draft(file_of([["array", 0]], arrays=[array]))
    draft.header["w"] = tensor
    return draft.file(with_digests=False)


def bombs():
    """Files that would take the reader's memory, stack or time."""
    lists = "[" * 100_000 + "]" * 100_000
    objects = '{"a":' * 100_000 + "1" + "}" * 100_000
    manifest = json.dumps(Draft(DATA).manifest)

    def in_header(text):
        return forged(header_text({}, b"")[:-1] + f',"deep":{text}}}')

    def in_manifest(text):
        draft = Draft(DATA)
        draft.manifest_text = text
        return draft.file(with_digests=True)

    def array(dtype, *shape, kind="numpy"):
        return {"dtype": dtype, "shape": shape, "kind": kind, "tensor": "w"}

    def chain(first, link):
        """Nodes, each of which holds the one before."""
        return [first] + [link(i) for i in range(100_000)]

    def tuples(*last):
        return file_of([*chain(["tuple", []], lambda i: ["tuple", [i]]), *last])

    empty, rows = entry("F32", [0, 2**58], 0, 0), (0, 2**58)
    relu = ["function", "jax.nn:relu"]
    colliding = [["int", f"{k * (2**61 - 1):x}"] for k in range(1, 3000)]
    return {
        "header nested in lists": in_header(lists),
        "header nested in objects": in_header(objects),
        "manifest nested in lists": in_manifest(lists),
        "manifest nested in a node": in_manifest(manifest.replace('"nodes":', f'"nodes":{lists},"x":')),
        "shape of 2^62 without data": with_tensor(entry("F32", [2**62], 0, 2**64), array("float32", 2**62)),
        "a shape that is none": with_tensor(entry("U8", [2**62, 2**62, 0], 0, 0), array("uint8", 2**62, 2**62, 0)),
        "zero-size array of 2^61 rows": with_tensor(entry("F32", [0, 2**61], 0, 0), array("float32", 0, 2**61)),
        "zero-size array of 2^58 rows": with_tensor(empty, array("float32", *rows)),
        "zero-size array of JAX": with_tensor(empty, array("float32", *rows, kind="jax")),
        "float0 of 2^62": with_tensor(entry("U8", [2**62, 0], 0, 0), array("float0", 2**62)),
        "float0 of JAX": with_tensor(entry("U8", [2**62, 0], 0, 0), array("float0", 2**62, kind="jax")),
        "a struct of 2^62": file_of([["struct", [2**62, 2**62], ["dtype", "float32"], False, None]]),
        "a mesh of 2^62 devices": file_of([["abstract_mesh", [2**62, 2**62], ["x", "y"], ["Auto", "Auto"]]]),
        "a text of 999,999,999 characters": file_of([["tuple", [["scalar", "str_[999999999]", "00"]]]]),
        "the dtype of such a text": file_of([["tuple", [["dtype", "str_[999999999]"]]]]),
        "a range of 2^4000": file_of([["range", ["int", "0"], ["int", "f" * 1000], ["int", "1"]]]),
        "an int of 10 MB": file_of([["tuple", [["int", "f" * 10_000_000]]]]),
        "a deque that claims to be long": file_of([["deque", ["int", f"{2**40:x}"], []]]),
        "100,000 tuples": tuples(),
        "100,000 tuples as a key": tuples(["dict", [100_000], [None]]),
        "100,000 tuples as a treedef": tuples(["treedef", 100_000]),
        "100,000 frozensets": file_of(chain(["frozenset", []], lambda i: ["frozenset", [i]])),
        "100,000 deques": file_of(chain(["deque", None, []], lambda i: ["deque", None, [i]])),
        "100,000 slices": file_of(chain(["slice", None, None, None], lambda i: ["slice", i, None, None])),
        "100,000 partials": file_of(chain(["tuple", []], lambda i: ["partial", relu, [i], [], [], None])),
        "colliding hashes": file_of([["dict", colliding, [None] * 2999]]),
        "a cycle": file_of([["list", [1]], ["list", [0]]]),
        "a node that contains itself": file_of([["list", [0]]]),
        "a reference far off": file_of([["list", [2**62]]]),
    }


@pytest.mark.slow
def test_bombs(tmp_path):
    """An error, or something harmless; in little time and memory, without a crash."""
    good = tmp_path / "good"
    good.write_bytes(DATA)
    files = bombs()
    names = list(files)
    for i, data in enumerate(files.values()):
        (tmp_path / f"{i}").write_bytes(data)
    # Each is loaded, and opened in one of the other ways, or, if there is time, in all of them.
    times = 4 if IS_THOROUGH else 2
    which = "all" if IS_THOROUGH else "in turn"
    arguments = [str(good), which, *(str(tmp_path / f"{i}") for i in range(len(names)))]
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", DANGEROUS, *arguments], cwd=ROOT, capture_output=True, text=True,
        timeout=HANGS, env={**os.environ, "MALLOC_ARENA_MAX": "1"},
    )  # fmt: skip
    lines = [line.split(" ", 2) for line in done.stdout.splitlines() if line[:1].isdigit()]
    bad = [f"{names[int(i)]}: {what} {why}" for i, what, why in lines if what == "failed"]
    last = names[min(int(lines[-1][0]) + (len(lines) % times == 0), len(names) - 1)] if lines else names[0]
    assert done.returncode == 0, f"the process died at {last!r}: {done.stderr[-3000:]}"
    assert not bad, "\n".join(bad)
    assert len(lines) == times * len(names)


DAG = [["tuple", ["a", "b"]]] + [["tuple", [i, i]] for i in range(17)]
"""The last node is a treedef or a hashable of half a million nodes, which is allowed once."""


def test_what_is_hashed_or_described_is_bounded_in_all():
    def file(user, count):
        nodes = [*DAG, *[user] * count]
        return file_of([*nodes, ["list", list(range(len(DAG), len(nodes)))]])

    users = [["treedef", 17], ["frozenset", [17]], ["dict", [17], [None]], ["abstract_mesh", [1], [17], ["Auto"]]]
    for user in users:
        assert len(load(file(user, 1))) == 1
    sharing = [["tuple", [17, ["int", f"{i:x}"]]] for i in range(150)]
    number = [["tuple", [["int", "f" * 100_000]]]]  # counts for what hashing it takes
    for nodes in (
        *[[*DAG, *[user] * 3, ["list", [18, 19, 20]]] for user in users],
        [*DAG, *sharing, ["dict", list(range(18, 168)), [None] * 150]],
        [*number, *[["tuple", [0, i]] for i in range(200)], ["dict", list(range(1, 201)), [None] * 200]],
    ):
        with pytest.raises(st.errors.FormatError, match="too often"):
            load(file_of(nodes))


@pytest.mark.slow
def test_many_keys_that_are_trees_are_not_too_many():
    tree = {(f"layer{i}", (i, i + 1), ("a", "b", "c", "d", "e")): i for i in range(50_000)}
    assert st.from_bytes(st.to_bytes(tree)) == tree


def test_no_more_than_100_keys_have_one_hash():
    """Each new key of a dict is compared with all that have its hash, which for numbers the file can choose."""
    makers = {
        "set": set,
        "frozenset": frozenset,
        "dict": dict.fromkeys,
        "OrderedDict": collections.OrderedDict.fromkeys,
    }
    for (kind, make), is_nested in itertools.product(makers.items(), [False, True]):
        keys = [k * (2**61 - 1) for k in range(1, 102)]
        atoms = [["int", f"{key:x}"] for key in keys]
        nodes = [["tuple", ["a", atom]] for atom in atoms] if is_nested else []
        keys = [("a", key) for key in keys] if is_nested else keys
        assert st.from_bytes(st.to_bytes([make(keys[:100])])) == [make(keys[:100])]
        with pytest.raises(st.errors.UnserialisableError, match="one hash"):
            st.to_bytes([make(keys)])
        values = [[None] * 101] if "ict" in kind else []
        with pytest.raises(st.errors.FormatError, match="one hash"):
            load(file_of([*nodes, [kind, list(range(101)) if is_nested else atoms, *values]]))


def test_float0_is_numpys():
    array = jax.device_put(np.zeros(3, jax.dtypes.float0))
    if isinstance(array, jax.Array):
        with pytest.raises(st.errors.UnserialisableError, match="float0"):
            st.to_bytes([array])
    for size in (0, 3, 2**62):
        array = {"dtype": "float0", "shape": [size], "kind": "jax", "tensor": "w"}
        with pytest.raises(st.errors.FormatError, match="float0"):
            load(with_tensor(entry("U8", [size, 0], 0, 0), array))


WIDE = program("show_wide")


@pytest.mark.slow
@pytest.mark.parametrize(("options", "most"), [([], 64), (["--values"], 64)])
@pytest.mark.parametrize("kind", ["tuple", "list"])
def test_a_file_of_many_references_is_shown_in_little_memory(kind, options, most, tmp_path):
    path = tmp_path / "wide"
    path.write_bytes(file_of([[kind, []]] + [[kind, [i] * 200] for i in range(1_200)]))
    printed = run(WIDE, path, *options)
    # In the table equal neighbours are one line.
    assert ("more lines; see --lines" in printed) == bool(options)
    lines = printed.splitlines()
    assert len(lines) < 12_000
    assert int(lines[-1]) < most, lines[-1]  # 160 if all lines are held


def test_an_array_of_jax_with_an_odd_dtype():
    """Also of one that this version of JAX does not have, and another one does."""
    for (dtype, (size, stored_as)), weak in itertools.product(ITEM_SIZES.items(), [{}, {"weak": True}]):
        draft = Draft(st.to_bytes([np.zeros(4 * size, np.uint8)]))
        draft.manifest["arrays"][0] |= {"kind": "jax", "dtype": dtype, "shape": [4], **weak}
        draft.header["[0]"] |= {"dtype": stored_as or "U8", "shape": [4] if stored_as else [4, size]}
        try:
            (array,) = load(draft.file(with_digests=True))
        except st.SharedTreeError:
            continue
        assert isinstance(array, jax.Array)
        assert array.dtype.name == dtype
        assert np.asarray(array).tobytes() == bytes(4 * size)


@pytest.mark.parametrize("atom", [["int", "f" * 5_000], ["scalar", "datetime64[999999999Y]", "ffffffffffffff7f"]])
def test_what_cannot_be_printed(atom):
    """Python prints no number of so many digits, and NumPy no such date."""
    layer = strategies.make(strategies.Layer, weight=1, child=2, activation=3)
    for tree, data in (
        ([1], file_of([["list", [atom]]])),
        ({"a": 1}, file_of([["dict", [atom], [None]]])),
        (layer, Draft(st.to_bytes(layer))),
    ):
        if isinstance(data, Draft):
            data.manifest["nodes"][-1][2] = [atom] * 3
            data = data.file(with_digests=True)
        for operation in (
            lambda data: str(st.inspect(data)),
            lambda data: str(st.audit(data)),
            load,
            lambda data, tree=tree: load(data, like=tree),
            lambda data, tree=tree: str(load(data, like=tree, strict=False)[1]),
        ):
            assert judge(Case(data, None, ()), operation, gives_model=False)[1] is None


def test_no_error_of_others_quotes_a_file():
    """A traceback shows what an error was raised from, as it is; JAX names the axes that a mesh lacks."""
    mesh = ["mesh", [1], ["x"], [["int", "0"]], ["Auto"]]
    data = file_of([mesh, ["spec", ["\x1b[2J"], None, None], ["named_sharding", 0, 1, None]])
    with pytest.raises(st.errors.FormatError, match="not found in mesh") as raised:
        st.from_bytes(data)
    assert "\x1b" not in "".join(traceback.format_exception(raised.value))


def test_a_missing_field_in_a_template():
    tree = [strategies.make(strategies.Slotted, a=1, b=2)]
    draft = Draft(st.to_bytes(tree))
    draft.manifest["types"][0] |= {"fields": ["a"], "missing": ["b"]}
    draft.manifest["nodes"][0][2].pop()
    case = Case(draft.file(with_digests=True), Good(tree, b""), ())
    assert judge(case, lambda data: load(data, like=tree), gives_model=False)[1] is None


class Quoting:
    """A registered class whose unflatten function quotes what it gets."""


def quote(aux, _):
    raise ValueError(f"no {aux}")


jax.tree_util.register_pytree_node(Quoting, lambda _: ((), None), quote)


@dataclasses.dataclass
class Migrating:
    name: str = ""

    __sharedtree_version__ = 2

    @staticmethod
    def __sharedtree_migrate__(fields, version):
        raise ValueError(f"no {fields['name']}")


@pytest.mark.parametrize(
    ("kind", "nodes"),
    [
        ({"name": f"{__name__}:Quoting", "kind": "registered"}, [["registered", 0, "\x1b[2J", [], []]]),
        (
            {"name": f"{__name__}:Migrating", "kind": "dataclass", "fields": ["name"], "version": 1},
            [["object", 0, ["\x1b[2J"]]],
        ),
    ],
)
def test_a_text_that_a_class_quotes_is_printable_in_the_traceback(kind, nodes):
    data = file_of(nodes, types=[kind])
    with pytest.raises(st.errors.StructureMismatchError, match=r"raised ValueError .*no \\x1b\[2J") as raised:
        st.from_bytes(data, trusted=[Quoting, Migrating])
    assert "\x1b" not in "".join(traceback.format_exception(raised.value))
