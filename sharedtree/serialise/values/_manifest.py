"""The manifest, everything about a DAG but the bytes of its arrays: read from its JSON text, and all of it checked.

`docs/format_manifest.md` has the grammar. What a row of the table of kinds says may stand in a place is checked by the
row.
"""

import math
from collections.abc import Callable, Set
from typing import Any

from ...core._errors import FormatError
from ...core._printing import printable
from ..arrays._dtypes import FLOAT0, dtype_named
from ..arrays._placing import ArrayEntry
from ..container._header import malformed, parse_manifest_json
from ..trust._public_names import CHILD, MAIN, is_well_formed
from ._all_kinds_of_nodes import KINDS, children_of, nan_among_keys, first_beyond_bounds
from ._atoms import LEFT_OUT, decode_atom, is_name, read_base64
from ._kinds_of_instances import are_steps
from ._kinds_of_values import name_of_method
from ._left_out_values import first_incomplete
from ._nodes import MAX_NAME, Child, Manifest, Node, Operand, TypeEntry

FORMAT = 1
"""The version of the format. It counts up when a reader of the version before could not read a file."""

CLASS_KINDS = frozenset({"module", "dataclass", "namedtuple", "attributes", "placeholder", "registered", "enum"})


def parse_manifest(text: str) -> Manifest:
    """Reads a manifest, and checks all of it. No name is looked up.

    Raises:
        FormatError: if it does not follow the grammar in every particular, or a newer version wrote it.

    Cost: a few looks at each node. Takes up to 64 times the memory of the text, if the text is made for that.
    """
    whole = _Reader().read(parse_manifest_json(text))
    bad = first_beyond_bounds(whole.nodes)
    if bad is not None:
        raise malformed(f"node {bad}, a `{whole.nodes[bad][0]}`, is nested too deeply, or holds one thing too often")
    bad = nan_among_keys(whole.nodes)
    if bad is not None:
        raise malformed(f"node {bad}, a `{whole.nodes[bad][0]}`, has a NaN as a key, or in one")
    if _has_stray_leaf(whole):
        raise malformed("a `leaf` is not below a `treedef`")
    return whole


def _has_stray_leaf(manifest: Manifest) -> bool:
    if all(node[0] != "leaf" for node in manifest.nodes):
        return False
    holds_one: list[bool] = []
    has_parent = [False] * len(manifest.nodes)
    for node in manifest.nodes:
        below = [child for child in children_of(node) if type(child) is int]
        for child in below:
            has_parent[child] = True
        holds_one.append(node[0] == "leaf" or (node[0] != "treedef" and any(holds_one[child] for child in below)))
    tops = [i for i, known in enumerate(has_parent) if not known]
    return any(holds_one[i] for i in (*tops, manifest.root) if type(i) is int)


class _Reader:
    def __init__(self) -> None:
        self.atoms: dict[tuple[str, ...], Any] = {}
        self.names: dict[tuple[str, str], None] = {}
        self.used: set[int] = set()  # of the arrays
        self.dtypes: set[str] = set()  # those that were looked up
        self.types: tuple[TypeEntry, ...] = ()
        self.owners: list[str] = []  # the name of each of `types`
        self.arrays: tuple[ArrayEntry, ...] = ()
        self.nodes: list[Node] = []  # those before `number` are known to be well-formed
        self.left_out = False  # whether any value is
        self.number = 0  # of the node that is being read
        self._check: dict[str, Callable[[Any], bool]] = {
            "child": self._is_child,
            "children": lambda x: type(x) is list and all(map(self._is_child, x)),
            "steps": are_steps,
            "type": lambda x: type(x) is int and 0 <= x < len(self.types),
            "array": self._is_array,
            "text": lambda x: type(x) is str,
            "base64": _is_base64,
            "sizes": _are_sizes,
            "flag": lambda x: type(x) is bool,
        }

    def read(self, whole: Any) -> Manifest:
        if type(whole) is not dict or type(whole.get("format")) is not int:
            raise malformed("it has no format version")
        if whole["format"] > FORMAT:
            raise FormatError(
                f"The file has version {whole['format']} of the format, and this sharedtree reads up to {FORMAT}. "
                f"It was written by {printable(str(whole.get('library', 'a newer version'))[:80])}. Update:\n"
                "    pip install --upgrade sharedtree"
            )
        _keys(whole, "the manifest", {"format", "library", "types", "arrays", "nodes", "root"}, {"main"})
        if whole["format"] < 1 or type(whole["library"]) is not str:
            raise malformed("its version or its writer is missing")
        for key in ("types", "arrays", "nodes"):
            if type(whole[key]) is not list:
                raise malformed(f"`{key}` is not a list")
        self.types = tuple([self._type(entry, f"type {i}") for i, entry in enumerate(whole["types"])])
        self.owners = [entry.name for entry in self.types]
        self.arrays = tuple([self._array(entry, f"array {i}") for i, entry in enumerate(whole["arrays"])])
        if len({entry.tensor for entry in self.arrays}) != len(self.arrays):
            raise malformed("two arrays have one tensor")
        self.nodes, root = whole["nodes"], whole["root"]
        for node in self.nodes:
            self._node(node)
            self.number += 1
        if not self._is_child(root) or (type(root) is list and root[0] == LEFT_OUT):
            raise malformed("`root` is neither a node nor a value")
        if self.left_out and first_incomplete(self.nodes) is not None:
            raise malformed("it lacks values where none can be left out")
        if len(self.used) != len(self.arrays):
            raise malformed("an array belongs to no node")
        main, names = whole.get("main"), tuple(self.names)
        if "main" in whole and not _is_program(main, names):
            raise malformed("`main` is no module that the file names, or the file has another name for it")
        return Manifest(whole["library"], self.types, self.arrays, self.nodes, root, self.atoms, names, main)

    # --- nodes --------------------------------------------------------------------------------------------------------

    def _node(self, node: Any) -> None:
        if type(node) is list and len(node) == 2 and node[0] == "array" and self._is_array(node[1]):
            return
        if type(node) is not list or not node or type(node[0]) is not str:
            raise malformed(f"node {self.number} is not a list with a kind")
        kind = KINDS.get(node[0])
        if kind is None:
            raise malformed(f"node {self.number} has the unknown kind `{printable(node[0][:40])}`")
        places, where = kind.operands, f"node {self.number}, a `{kind.name}`,"
        if len(node) != len(places) + 1:
            raise malformed(f"{where} has {len(node) - 1} operands instead of {len(places)}")
        for i, place in enumerate(places, 1):
            if not self._check[place.type](node[i]):
                raise malformed(f"operand {i} of {where} is not what its place asks for ({place.type})")
            if place.forms is not None:
                self._require_forms(node[i], place, f"operand {i} of {where}")
        a = kind.first_of_pair
        if a is not None and len(node[a]) != len(node[a + 1]):
            raise malformed(f"{where} has {len(node[a])} of one and {len(node[a + 1])} of the other")
        if kind.name in ("method", "bound"):
            self._method(node)
        elif places and places[0].type == "type":
            self._instance(node)

    def _require_forms(self, operand: Any, place: Operand, where: str) -> None:
        forms = place.forms or ()
        children = operand if place.type == "children" else [operand]
        wrong = next((form for form in map(self._form, children) if form not in forms), None)
        if wrong is not None:
            asked = " or ".join(f"`{form}`" for form in sorted(forms))
            raise malformed(f"{where} is or holds a `{wrong}` in the place of {asked}")

    def _form(self, child: Child) -> str:
        """What a child is: the kind of a node, the tag of an atom, or `null`, `text` or `flag`."""
        if type(child) is int:
            return self.nodes[child][0]
        if type(child) is list:
            return "text" if child[0] == "str" else child[0]
        return "null" if child is None else "text" if type(child) is str else "flag"

    def _instance(self, node: Node) -> None:
        kind, entry, where = node[0], self.types[node[1]], f"node {self.number}"
        expected = entry.kind if entry.kind in ("registered", "enum") else "object"
        if kind != expected and not (kind == "wrapper" and entry.kind == "module"):
            raise malformed(f"{where} is a `{kind}`, but its class `{entry.name}` is a {entry.kind}")
        count = len(entry.fields) + len(entry.extra)
        if expected == "object" and len(node[2]) != count:
            raise malformed(f"{where} has {len(node[2])} values for the {count} fields of `{entry.name}`")
        if kind == "wrapper" and node[3] not in entry.fields:
            raise malformed(f"{where}, a `wrapper`, wraps what is no field")

    def _method(self, node: Node) -> None:
        name, owner = name_of_method(self.owners, self.nodes, node), node[1]
        if name is not None and len(node[2]) <= MAX_NAME and node[2].isidentifier():
            self.names["method", name] = None
            return
        # The `__call__` of a bound method does what that method does.
        is_call = node[0] == "method" and node[2] == "__call__"
        if not (is_call and type(owner) is int and self.nodes[owner][0] == "bound"):
            raise malformed(f"node {self.number} is a method of what has no class of a known name")

    def _is_child(self, child: Any) -> bool:
        cls = type(child)
        if cls is int:
            return 0 <= child < self.number
        if cls is list:
            return self._is_atom(child)
        return child is None or cls is bool or cls is str

    def _is_atom(self, atom: list[Any]) -> bool:
        if not atom or not all(type(text) is str for text in atom):
            return False
        key = tuple(atom)
        if atom[0] == LEFT_OUT:  # each is a value of its own
            if key in self.atoms:
                return False
            self.left_out = True
        if key in self.atoms or key in self.names:
            return True
        if not is_name(atom):
            self.atoms[key] = decode_atom(atom)
        elif len(atom[1]) > MAX_NAME or not is_well_formed(atom[1]):
            return False
        else:
            self.names[key] = None
        return True

    def _is_array(self, index: Any) -> bool:
        if type(index) is not int or not 0 <= index < len(self.arrays) or index in self.used:
            return False
        self.used.add(index)
        return True

    # --- entries ------------------------------------------------------------------------------------------------------

    def _type(self, entry: Any, where: str) -> TypeEntry:
        kind = entry.get("kind") if type(entry) is dict else None
        if type(kind) is not str or kind not in CLASS_KINDS:
            raise malformed(f"{where} has no known kind")
        if kind in ("registered", "enum"):
            _keys(entry, where, {"name", "kind"})
        else:
            _keys(entry, where, {"name", "kind", "fields"}, {"missing", "extra", "version"})
        lists = [entry.get(key, []) for key in ("fields", "missing", "extra")]
        names = [name for each in lists if type(each) is list for name in each]
        if not all(type(each) is list for each in lists) or not all(type(name) is str for name in names):
            raise malformed(f"{where} does not list its fields")
        if len(set(names)) != len(names) or max(map(len, names), default=0) > MAX_NAME:
            raise malformed(f"{where} has two fields of one name, or one of more than {MAX_NAME:,} characters")
        version, name = entry.get("version", 0), entry["name"]
        if type(version) is not int or version < 0:
            raise malformed(f"{where} has no version that is a whole number")
        if type(name) is not str or len(name) > MAX_NAME or not is_well_formed(name):
            raise malformed(f"{where} has no name")
        self.names["class", name] = None
        return TypeEntry(name, kind, *map(tuple, lists), version=version)

    def _array(self, entry: Any, where: str) -> ArrayEntry:
        _keys(entry, where, _ARRAY_KEYS, {"weak", "key"})
        tensor, dtype, shape, kind = entry["tensor"], entry["dtype"], entry["shape"], entry["kind"]
        if type(tensor) is not str or type(dtype) is not str or kind not in ("jax", "numpy"):
            raise malformed(f"{where} lacks its tensor, its dtype or its kind")
        if not _are_sizes(shape) or math.prod(shape) >= 2**63:
            raise malformed(f"{where} has an impossible shape")
        if dtype not in self.dtypes:
            dtype_named(dtype)
            self.dtypes.add(dtype)
        result = ArrayEntry(tensor, dtype, tuple(shape), kind, entry.get("weak", False), entry.get("key"))
        if len(entry) == len(_ARRAY_KEYS) and dtype != FLOAT0:
            return result
        if entry.get("weak", True) is not True or ("key" in entry and (type(result.key) is not str or result.weak)):
            raise malformed(f"{where} has an impossible weak type or key")
        if result.kind == "numpy" and (result.weak or result.key is not None):
            raise malformed(f"{where} is NumPy's, but has what only JAX's have")
        if result.dtype == FLOAT0 and result.kind != "numpy":  # JAX would take a byte for each element
            raise malformed(f"{where} is JAX's and has the dtype float0, which only NumPy's have")
        if result.key is not None and (result.dtype != "uint32" or not result.shape):
            raise malformed(f"{where} is a PRNG key without raw data of uint32")
        return result


def _is_program(main: Any, names: tuple[tuple[str, str], ...]) -> bool:
    """Whether a module may be the one that was the running program."""
    modules = {name.partition(":")[0] for _, name in names}
    return type(main) is str and main in modules and modules.isdisjoint({MAIN, CHILD})


_ARRAY_KEYS = frozenset({"tensor", "dtype", "shape", "kind"})


def _keys(entry: Any, where: str, needed: Set[str], optional: Set[str] = frozenset()) -> None:
    if type(entry) is not dict or (entry.keys() != needed and not needed <= entry.keys() <= needed | optional):
        raise malformed(f"{where} does not have the keys that it should have")


def _are_sizes(sizes: Any) -> bool:
    if type(sizes) is not list or len(sizes) > 64:
        return False
    return all(type(size) is int and 0 <= size < 2**63 for size in sizes)


def _is_base64(text: Any) -> bool:
    try:
        return type(text) is str and read_base64(text) is not None
    except ValueError:
        return False
