r"""The manifest: everything about a DAG but the bytes of its arrays, as one JSON text.

The grammar. `*` is "any number of", `|` is "or"; what is in quotes is a JSON string.

    manifest = {"format": 1, "library": string, "types": [type*], "arrays": [array*], "nodes": [node*], "root": child}

**Children.** A child is the index of a node that stands earlier in `nodes`, or an atom. So there are no cycles, nodes
can be built from first to last, and a node that occurs twice is one object. Every array, and each instance of a class,
`list`, `dict`, `OrderedDict`, `defaultdict`, `deque`, `set`, `bytearray` and `object()`, is a node of its own.

    atom = null | true | false | string              None, booleans, text without surrogates
         | ["int", hex]                              a whole number: `-`?, then lower-case digits, no leading zeros
         | ["float", float]                          `float.hex`, also "inf" and "-inf"; a nan is "nan:", then the 16
                                                     hexadecimal digits of its bits, big-endian
         | ["complex", float, float]
         | ["str", base64]                           text with surrogates, in UTF-8 that allows them
         | ["bytes", base64]
         | ["..."] | ["NotImplemented"]
         | ["dtype", dtype]                          a NumPy dtype: as in `arrays`, or "str_[n]" or "bytes_[n]", of n
                                                     characters
         | ["scalar", dtype, hex]                    a NumPy scalar, its bytes in little-endian order
         | ["class", name] | ["function", name]      what a module holds under that name; "function" is also used for
                                                     single objects that are not functions

**Types.** The classes of instances. `fields` are the names of the values that the nodes of this type hold.

    type = {"name": name, "kind": "module" | "dataclass" | "namedtuple" | "attributes" | "placeholder",
            "fields": [string*],
            "missing"?: [string*],                   declared fields that were not set
            "extra"?: [string*],                     attributes that are no declared fields; their values come last
            "version"?: whole number}                `__sharedtree_version__` of the class, if not 0
         | {"name": name, "kind": "registered" | "enum"}

A name is "module:qualname", each a dotted path of identifiers. It has at most 1,000 characters, as have the names of
fields and methods.

**Arrays.** Each entry has exactly one `array` node, and each tensor one entry.

    array = {"tensor": string, "dtype": dtype, "shape": [whole number*], "kind": "jax" | "numpy",
             "weak"?: true,                          JAX's weak type
             "key"?: string}                         a typed PRNG key of that implementation; dtype and shape are those
                                                     of its raw data

A dtype is a name of NumPy or of ml_dtypes ("float32", "bfloat16", "datetime64[ns]", "float0"), behind ">" if the
array is big-endian. Only NumPy's arrays have the dtype "float0".

**Nodes.**

    node = ["tuple", [child*]] | ["list", [child*]] | ["set", [child*]] | ["frozenset", [child*]]
         | ["dict", [key*], [value*]] | ["OrderedDict", [key*], [value*]]          children, in order of insertion
         | ["defaultdict", factory, [key*], [value*]]                              null, or a class
         | ["deque", maxlen, [child*]]                                             null, or an "int" atom
         | ["object", type, [child*]]           an instance; one child for each of `fields`, then of `extra`
         | ["wrapper", type, [child*], field]   the same, of a `module`; what `equinox.module_update_wrapper` copied
                                                from the value of the field is to be copied again
         | ["registered", type, aux, [child*], [step*]]    aux data and children of a class registered as a pytree
                                                node, and what leads to each child in a path, as JAX prints it
                                                (".weight", "[0]"): different texts of 2 to 400 characters that begin
                                                with "." or "["
         | ["enum", type, member]               the member's name; of flags without a name, the value, an int
         | ["array", index]                     into `arrays`
         | ["struct", [size*], dtype, weak, sharding]   jax.ShapeDtypeStruct; dtype is an atom or a `key_dtype` node,
                                                weak a boolean, sharding null or a node
         | ["key_dtype", impl]                  the dtype of typed PRNG keys
         | ["treedef", child]                   the jax.tree structure of an object with `leaf` nodes for leaves
         | ["leaf"]                             only below `treedef`
         | ["partial", function, [arg*], [key*], [value*], attributes]     functools.partial; null, or a dict
         | ["Partial", function, [arg*], [key*], [value*]]                 jax.tree_util.Partial
         | ["method", self, name]               a bound method: the function in the class of self, or, if self is a
                                                class, in that class; self is a "class" atom, or a node `object`,
                                                `wrapper`, `registered` or `enum`, or, if name is "__call__", a `bound`
         | ["bound", self, name]                the same, as the bound method of an Equinox module; self is an `object`
                                                or a `wrapper`
         | ["bytearray", base64]
         | ["slice", start, stop, step] | ["range", start, stop, step]             children; of range, ints
         | ["path", class, text]                PurePosixPath, PureWindowsPath, PosixPath or WindowsPath
         | ["marker"]                           a bare `object()`
         | ["device", platform, id]             a jax.Device; the id is an int
         | ["mesh", [size*], [axis*], [device id*], [axis type*]]          jax.sharding.Mesh; types: strings; ids: ints
         | ["abstract_mesh", [size*], [axis*], [axis type*]]
         | ["spec", [child*], unreduced, reduced]                          PartitionSpec; null, or a frozenset
         | ["unconstrained"]                    PartitionSpec.UNCONSTRAINED
         | ["named_sharding", mesh, spec, memory kind]                     nodes of these kinds
         | ["single_device_sharding", device, memory kind]                 memory kind: null, or text

`_kinds.FORMS` has these types as a table.

**Rules.** Each key of an object occurs once, and no others are allowed. What a reader cannot understand it refuses;
a greater `format` it refuses with the advice to update. What is hashed (keys, members of sets, names of axes, what is
in a spec, the mesh and the spec of a sharding), aux data, and what a treedef describes is nested no more than 1,000
deep. Nodes and values counted as often as they occur there, it has at most 1,000,000 more of them than the manifest; 16
characters of a value count as one more. No more than 100 keys of a mapping, or members of a set, have one hash, and in
all of a file no more than 50,000 pairs of them, and one for each key and member. And no path leads through more than
1,000 nodes other than `tuple`, `list`, `dict`, `object`, `wrapper` and `array`.
"""

import math
from collections.abc import Callable, Sequence, Set
from typing import Any, NamedTuple

from ..._errors import FormatError
from ..._printable import printable
from ..arrays._arrays import ArrayEntry as ArrayEntry
from ..arrays._dtypes import FLOAT0, dtype_named
from ..container._header import malformed, parse_manifest_json
from ..trust._names import is_well_formed
from ._atoms import decode_atom, is_name, read_base64
from ._kinds import FORMS, MAX_NAME, MAX_STEP, NODE_KINDS, SAME_LENGTH, Operand
from ._nesting import Child as Child, children_of as children_of, nested_too_deeply, operands as operands

FORMAT = 1
"""The version of the format that is written, and the newest that can be read."""

CLASS_KINDS = frozenset({"module", "dataclass", "namedtuple", "attributes", "placeholder", "registered", "enum"})


class TypeEntry(NamedTuple):
    """One entry of `types`."""

    name: str
    kind: str
    fields: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    version: int = 0


class Manifest(NamedTuple):
    """A manifest that was found to follow the grammar.

    Attributes:
        library: who wrote it.
        types: see the grammar.
        arrays: see the grammar.
        nodes: see the grammar; each is the list that JSON gave.
        root: see the grammar.
        atoms: the value of each atom that names nothing, by its texts.
        names: the names of classes, functions and methods that the file asks for, each with what it is used as.
    """

    library: str
    types: tuple[TypeEntry, ...]
    arrays: tuple[ArrayEntry, ...]
    nodes: list[list[Any]]
    root: Child
    atoms: dict[tuple[str, ...], Any]
    names: tuple[tuple[str, str], ...]


def parse_manifest(text: str) -> Manifest:
    """Reads a manifest, and checks all of it. No name is looked up.

    Args:
        text: the JSON text.

    Raises:
        FormatError: if it does not follow the grammar in every particular, or a newer version wrote it.

    Cost: a few looks at each node. Takes up to 64 times the memory of the text, if the text is made for that.
    """
    whole = _Reader().read(parse_manifest_json(text))
    bad = nested_too_deeply(whole.nodes)
    if bad is not None:
        raise malformed(f"node {bad}, a `{whole.nodes[bad][0]}`, is nested too deeply, or holds one thing too often")
    if _has_stray_leaf(whole):
        raise malformed("a `leaf` is not below a `treedef`")
    return whole


def owner_of_method(types: Sequence[str], nodes: Sequence[list[Any]], node: list[Any]) -> str | None:
    """The name of the class that a `method` or `bound` node looks into; None if the grammar allows no method there."""
    owner: Child = node[1]
    if type(owner) is list:
        return str(owner[1]) if node[0] == "method" and owner[0] == "class" else None
    kinds = ("object", "wrapper", "registered", "enum") if node[0] == "method" else ("object", "wrapper")
    if type(owner) is not int or nodes[owner][0] not in kinds:
        return None
    return str(types[nodes[owner][1]])


def _is_call_of_bound(nodes: Sequence[list[Any]], node: list[Any]) -> bool:
    """Whether it is the `__call__` of a bound method, which does what that method does."""
    return node[0] == "method" and node[2] == "__call__" and type(node[1]) is int and nodes[node[1]][0] == "bound"


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
        self.used: set[int] = set()
        self.dtypes: set[str] = set()  # those that were looked up
        self.types: tuple[TypeEntry, ...] = ()
        self.owners: list[str] = []  # the name of each of `types`
        self.arrays: tuple[ArrayEntry, ...] = ()
        self.nodes: list[list[Any]] = []  # those before `number` are known to be well-formed
        self.number = 0  # of the node that is being read
        self._check: dict[Operand, Callable[[Any], bool]] = {
            "child": self._is_child,
            "children": self._are_children,
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
        _keys(whole, "the manifest", {"format", "library", "types", "arrays", "nodes", "root"})
        if whole["format"] < 1 or type(whole["library"]) is not str:
            raise malformed("its version or its writer is missing")
        for key in ("types", "arrays", "nodes"):
            if type(whole[key]) is not list:
                raise malformed(f"`{key}` is not a list")
        self.types = tuple([self._type(entry, i) for i, entry in enumerate(whole["types"])])
        self.owners = [entry.name for entry in self.types]
        self.arrays = tuple([self._array(entry, i) for i, entry in enumerate(whole["arrays"])])
        tensors = {entry.tensor for entry in self.arrays}
        if len(tensors) != len(self.arrays):
            raise malformed("two arrays have one tensor")
        self.nodes = whole["nodes"]
        for i, node in enumerate(self.nodes):
            self.number = i
            self._node(node)
        self.number = len(whole["nodes"])
        if not self._is_child(whole["root"]):
            raise malformed("`root` is neither a node nor a value")
        if len(self.used) != len(self.arrays):
            raise malformed("an array belongs to no node")
        return Manifest(
            whole["library"], self.types, self.arrays, whole["nodes"], whole["root"], self.atoms, tuple(self.names)
        )

    def _node(self, node: Any) -> None:
        if type(node) is list and len(node) == 2 and node[0] == "array" and self._is_array(node[1]):
            return
        if type(node) is not list or not node or type(node[0]) is not str:
            raise malformed(f"node {self.number} is not a list with a kind")
        kind = node[0]
        places = NODE_KINDS.get(kind)
        if places is None:
            raise malformed(f"node {self.number} has the unknown kind `{printable(kind[:40])}`")
        if len(node) != len(places) + 1:
            raise malformed(f"node {self.number}, a `{kind}`, has {len(node) - 1} operands instead of {len(places)}")
        for i, place in enumerate(places, 1):
            if not self._check[place](node[i]):
                raise malformed(
                    f"operand {i} of node {self.number}, a `{kind}`, is not what its place asks for ({place})"
                )
        for i, forms in FORMS.get(kind, {}).items():
            self._check_forms(node, i, forms)
        if kind in ("method", "bound"):
            self._method(node)
        elif kind == "wrapper" and node[3] not in self.types[node[1]].fields:
            raise malformed(f"node {self.number}, a `wrapper`, wraps what is no field")
        if kind in SAME_LENGTH:
            a, b = SAME_LENGTH[kind]
            if len(node[a]) != len(node[b]):
                raise malformed(
                    f"node {self.number}, a `{kind}`, has {len(node[a])} of one and {len(node[b])} of the other"
                )
        if places[:1] == ("type",):
            self._check_instance(kind, node)

    def _check_forms(self, node: list[Any], i: int, forms: Set[str]) -> None:
        children = node[i] if NODE_KINDS[node[0]][i - 1] == "children" else [node[i]]
        wrong = next((form for form in map(self._form, children) if form not in forms), None)
        if wrong is not None:
            raise malformed(
                f"operand {i} of node {self.number}, a `{node[0]}`, is or holds a `{wrong}` in the place of "
                f"{' or '.join(f'`{form}`' for form in sorted(forms))}"
            )

    def _form(self, child: Child) -> str:
        """What a child is: the kind of a node, the tag of an atom, or `null`, `text` or `flag`."""
        if type(child) is int:
            return self.nodes[child][0]
        if type(child) is list:
            return "text" if child[0] == "str" else child[0]
        return "null" if child is None else "text" if type(child) is str else "flag"

    def _check_instance(self, kind: str, node: list[Any]) -> None:
        entry = self.types[node[1]]
        expected = entry.kind if entry.kind in ("registered", "enum") else "object"
        if kind != expected and not (kind == "wrapper" and entry.kind == "module"):
            raise malformed(f"node {self.number} is a `{kind}`, but its class `{entry.name}` is a {entry.kind}")
        if expected == "object" and len(node[2]) != len(entry.fields) + len(entry.extra):
            raise malformed(
                f"node {self.number} has {len(node[2])} values for the {len(entry.fields) + len(entry.extra)} fields "
                f"of `{entry.name}`"
            )

    def _is_child(self, child: Any) -> bool:
        cls = type(child)
        if cls is int:
            return 0 <= child < self.number
        if cls is list:
            return self._is_atom(child)
        return child is None or cls is bool or cls is str

    def _are_children(self, children: Any) -> bool:
        return type(children) is list and all(map(self._is_child, children))

    def _is_atom(self, atom: list[Any]) -> bool:
        if not atom or not all(type(text) is str for text in atom):
            return False
        key = tuple(atom)
        if key in self.atoms or key in self.names:
            return True
        if is_name(atom):
            if len(atom[1]) > MAX_NAME or not is_well_formed(atom[1]):
                return False
            self.names[key] = None
        else:
            self.atoms[key] = decode_atom(atom)
        return True

    def _method(self, node: list[Any]) -> None:
        owner = owner_of_method(self.owners, self.nodes, node)
        if owner is not None and len(node[2]) <= MAX_NAME and node[2].isidentifier():
            self.names["method", f"{owner}.{node[2]}"] = None
        elif not _is_call_of_bound(self.nodes, node):
            raise malformed(f"node {self.number} is a method of what has no class of a known name")

    def _is_array(self, index: Any) -> bool:
        if type(index) is not int or not 0 <= index < len(self.arrays) or index in self.used:
            return False
        self.used.add(index)
        return True

    def _type(self, entry: Any, i: int) -> TypeEntry:
        where = f"type {i}"
        kind = entry.get("kind") if type(entry) is dict else None
        if type(kind) is not str or kind not in CLASS_KINDS:
            raise malformed(f"{where} has no known kind")
        if kind in ("registered", "enum"):
            _keys(entry, where, {"name", "kind"})
            result = TypeEntry(entry["name"], kind)
        else:
            _keys(entry, where, {"name", "kind", "fields"}, {"missing", "extra", "version"})
            lists = [entry.get(key, []) for key in ("fields", "missing", "extra")]
            names = [name for each in lists if type(each) is list for name in each]
            if not all(type(each) is list for each in lists) or not all(type(name) is str for name in names):
                raise malformed(f"{where} does not list its fields")
            if len(set(names)) != len(names) or max(map(len, names), default=0) > MAX_NAME:
                raise malformed(f"{where} has two fields of one name, or one of more than {MAX_NAME:,} characters")
            version = entry.get("version", 0)
            if type(version) is not int or version < 0:
                raise malformed(f"{where} has no version that is a whole number")
            result = TypeEntry(entry["name"], kind, tuple(lists[0]), tuple(lists[1]), tuple(lists[2]), version)
        if type(result.name) is not str or len(result.name) > MAX_NAME or not is_well_formed(result.name):
            raise malformed(f"{where} has no name")
        self.names["class", result.name] = None
        return result

    def _array(self, entry: Any, i: int) -> ArrayEntry:
        where = f"array {i}"
        _keys(entry, where, _ARRAY_KEYS, _OPTIONAL_ARRAY_KEYS)
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


def _keys(entry: Any, where: str, needed: Set[str], optional: Set[str] = frozenset()) -> None:
    if type(entry) is not dict or (entry.keys() != needed and not needed <= entry.keys() <= needed | optional):
        raise malformed(f"{where} does not have the keys that it should have")


_ARRAY_KEYS = frozenset({"tensor", "dtype", "shape", "kind"})
_OPTIONAL_ARRAY_KEYS = frozenset({"weak", "key"})


def _are_sizes(sizes: Any) -> bool:
    if type(sizes) is not list or len(sizes) > 64:
        return False
    return all(type(size) is int and 0 <= size < 2**63 for size in sizes)


def are_steps(steps: Any) -> bool:
    """Whether these are texts that paths can be made of, each of which leads to one child."""
    if type(steps) is not list or not all(type(step) is str for step in steps):
        return False
    return len(set(steps)) == len(steps) and all(1 < len(step) <= MAX_STEP and step[0] in ".[" for step in steps)


def _is_base64(text: Any) -> bool:
    if type(text) is not str:
        return False
    try:
        read_base64(text)
    except ValueError:
        return False
    return True
