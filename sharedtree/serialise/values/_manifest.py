"""Parses a manifest, which is everything about a DAG except the bytes of its arrays, and checks all of it.

`docs/format_manifest.md` has the grammar. The operands of nodes are checked by the rows of the table of kinds.

A node is a JSON list: its kind, then its operands. A child in an operand is the number of an earlier node, or an atom,
a value that is written in place: `None`, a boolean, a string, or a list of texts such as `["int", "7"]`. So
`type(child) is int` asks whether a child is a node.

The functions `_is_...` of the parser also collect what they accept: values of atoms, names, and which arrays are used.
`malformed` returns the `FormatError` for a reason. `where` is the place in the manifest in words, such as "type 3".
"""

from collections.abc import Callable, Set
from typing import Any

from ...core._errors import FormatError
from ...core._printing import printable
from ..arrays._dtypes import FLOAT0, dtype_named
from ..arrays._placing import ArrayEntry
from ..container._header import malformed, parse_manifest_json
from ..trust._public_names import CHILD, MAIN, is_well_formed
from ._all_kinds_of_nodes import KINDS, children_of, first_beyond_bounds, first_with_nan_key
from ._atoms import LEFT_OUT, decode_atom, is_name, read_base64
from ._kinds_of_values import are_steps, name_of_method
from ._left_out_values import first_wrongly_incomplete
from ._nodes import MAX_NAME, Child, Manifest, Node, Operand, TypeEntry, are_sizes

FORMAT = 1
"""Version of the format. It counts up when older readers cannot read some new file."""

# All kinds that an entry of `types` may have: see `kind_of`.
CLASS_KINDS = frozenset({"module", "dataclass", "namedtuple", "attributes", "placeholder", "registered", "enum"})


def parse_manifest(text: str) -> Manifest:
    """Parses a manifest and checks all of it. No name is looked up.

    Raises:
        FormatError: if it does not follow the grammar in every detail, or a newer version wrote it.

    Cost: a few steps for each node. Memory: at most 64 times the size of the text, if it is made to be costly.
    """
    manifest = _Parser().parse(parse_manifest_json(text))
    number = first_beyond_bounds(manifest.nodes)
    if number is not None:
        kind = manifest.nodes[number][0]
        raise malformed(f"node {number}, a `{kind}`, is nested too deeply, or holds one thing too often")
    number = first_with_nan_key(manifest.nodes)
    if number is not None:
        raise malformed(f"node {number}, a `{manifest.nodes[number][0]}`, has a NaN as a key, or in one")
    if _has_stray_leaf(manifest):
        raise malformed("a `leaf` is not below a `treedef`")
    return manifest


def _has_stray_leaf(manifest: Manifest) -> bool:
    """Returns True if some path leads to a `leaf` without going through a `treedef`.

    A `leaf` is a placeholder in the tree that describes a treedef. Nothing else may contain a `leaf`. Paths begin at
    the root, and at all other nodes without a parent.
    """
    if all(node[0] != "leaf" for node in manifest.nodes):
        return False
    # For each node, whether some path leads from it to a `leaf` without going through a treedef. This is worked out for
    # all nodes, because a node below a treedef may also have a parent elsewhere.
    holds_leaf: list[bool] = []
    has_parent = [False] * len(manifest.nodes)
    for node in manifest.nodes:
        child_nodes = [child for child in children_of(node) if type(child) is int]
        for child in child_nodes:
            has_parent[child] = True
        is_leaf, is_treedef = node[0] == "leaf", node[0] == "treedef"
        holds_leaf.append(is_leaf or (not is_treedef and any(holds_leaf[child] for child in child_nodes)))
    # Nodes without a parent. The root may be an atom, and may have parents.
    tops = [i for i, is_child in enumerate(has_parent) if not is_child]
    return any(holds_leaf[i] for i in (*tops, manifest.root) if type(i) is int)


class _Parser:
    """Checks a manifest from first to last entry, and collects its atoms and names. Parses one manifest only.

    Attributes:
        atoms: texts of an atom → its value.
        names: an ordered set of pairs of use and name, such as ("class", "net:Net"). A dict whose values are None.
        used_arrays: indices of the arrays in the nodes so far.
        checked_dtypes: names of dtypes already found valid.
        types, arrays: the entries of the manifest, parsed.
        owners: name of the class of each of `types`. The name of a method is made of it.
        nodes: all nodes. The first `number` of them are checked.
        has_left_out: True if a value was left out of the file.
        number: number of the node now being checked.
    """

    def __init__(self) -> None:
        self.atoms: dict[tuple[str, ...], Any] = {}
        self.names: dict[tuple[str, str], None] = {}
        self.used_arrays: set[int] = set()
        self.checked_dtypes: set[str] = set()
        self.types: tuple[TypeEntry, ...] = ()
        self.owners: list[str] = []
        self.arrays: tuple[ArrayEntry, ...] = ()
        self.nodes: list[Node] = []
        self.has_left_out = False
        self.number = 0
        # Type of an operand → function that returns True if a value is allowed. It also collects atoms, names and
        # arrays.
        self._check: dict[str, Callable[[Any], bool]] = {
            "child": self._is_reference_or_atom,
            "children": lambda x: type(x) is list and all(map(self._is_reference_or_atom, x)),
            "steps": are_steps,
            "type": lambda x: type(x) is int and 0 <= x < len(self.types),
            "array": self._is_array,
            "text": lambda x: type(x) is str,
            "base64": _is_base64,
            "sizes": are_sizes,
            "flag": lambda x: type(x) is bool,
        }

    def parse(self, document: Any) -> Manifest:
        """Checks a manifest as JSON has it, and returns it as a `Manifest`.

        Raises:
            FormatError: if it does not follow the grammar, or a newer version wrote it.
        """
        if type(document) is not dict or type(document.get("format")) is not int:
            raise malformed("it has no format version")
        if document["format"] > FORMAT:
            raise FormatError(
                f"The file has version {document['format']} of the format, and this sharedtree reads up to {FORMAT}. "
                f"Its writer was {printable(str(document.get('library', 'a newer version'))[:80])}. Update:\n"
                "    pip install --upgrade sharedtree"
            )
        _require_keys(document, "the manifest", {"format", "library", "types", "arrays", "nodes", "root"}, {"main"})
        if document["format"] < 1 or type(document["library"]) is not str:
            raise malformed("its version or its writer is missing")
        for key in ("types", "arrays", "nodes"):
            if type(document[key]) is not list:
                raise malformed(f"`{key}` is not a list")
        self.types = tuple([self._parse_type(entry, f"type {i}") for i, entry in enumerate(document["types"])])
        self.owners = [entry.name for entry in self.types]
        self.arrays = tuple([self._parse_array(entry, f"array {i}") for i, entry in enumerate(document["arrays"])])
        if len({entry.tensor for entry in self.arrays}) != len(self.arrays):
            raise malformed("two arrays have one tensor")
        self.nodes, root = document["nodes"], document["root"]
        # A child must stand before its parent, so only numbers below `self.number` are allowed as children.
        for node in self.nodes:
            self._check_node(node)
            self.number += 1
        # Now all nodes are checked, and any of them may be the root.
        if type(root) is int and not 0 <= root < self.number:
            raise malformed("`root` refers to a node that is not there")
        if not self._is_reference_or_atom(root) or (type(root) is list and root[0] == LEFT_OUT):
            raise malformed("`root` is neither a node nor a value")
        if self.has_left_out and first_wrongly_incomplete(self.nodes) is not None:
            raise malformed("it lacks values where none can be left out")
        if len(self.used_arrays) != len(self.arrays):
            raise malformed("an array belongs to no node")
        main, names = document.get("main"), tuple(self.names)
        if "main" in document and not _is_program(main, names):
            raise malformed("`main` is no module that the file names, or the file has another name for it")
        return Manifest(document["library"], self.types, self.arrays, self.nodes, root, self.atoms, names, main)

    # --- nodes --------------------------------------------------------------------------------------------------------

    def _check_node(self, node: Any) -> None:
        """Raises `FormatError` if a node does not follow the row of its kind. Its children were checked before."""
        # A short way for arrays, which are frequent. Their one operand is all that has to be checked.
        if type(node) is list and len(node) == 2 and node[0] == "array" and self._is_array(node[1]):
            return
        if type(node) is not list or not node or type(node[0]) is not str:
            raise malformed(f"node {self.number} is not a list with a kind")
        kind = KINDS.get(node[0])
        if kind is None:
            raise malformed(f"node {self.number} has the unknown kind `{printable(node[0][:40])}`")
        operands, where = kind.operands, f"node {self.number}, a `{kind.name}`,"
        if len(node) != len(operands) + 1:
            raise malformed(f"{where} has {len(node) - 1} operands instead of {len(operands)}")
        for i, operand in enumerate(operands, 1):
            if not self._check[operand.type](node[i]):
                self._require_references(node[i], operand, f"operand {i} of {where}")
                raise malformed(f"operand {i} of {where} is not what its place asks for ({operand.type})")
            # `forms` restricts what the children may be, for example to texts.
            if operand.forms is not None:
                self._require_forms(node[i], operand, f"operand {i} of {where}")
        # In some kinds, two operands side by side must have the same length, such as keys and values. `first_of_pair`
        # is the position of the first one. "One" and "the other" in the error are these operands.
        first = kind.first_of_pair
        if first is not None and len(node[first]) != len(node[first + 1]):
            raise malformed(f"{where} has {len(node[first])} of one and {len(node[first + 1])} of the other")
        if kind.name in ("method", "bound"):
            self._collect_method(node)
        elif operands and operands[0].type == "type":
            self._check_instance(node)

    def _require_references(self, value: Any, operand: Operand, where: str) -> None:
        """Raises `FormatError` if a child in an operand is a number, but not that of an earlier node.

        Args:
            value: the value of the operand in the node.
            operand: the operand as the row declares it.
            where: place of the operand, in words.
        """
        children = {"child": [value], "children": value if type(value) is list else []}.get(operand.type, [])
        dangling = next((c for c in children if type(c) is int and not 0 <= c < self.number), None)
        if dangling is not None:
            # A file may have a number of any length.
            number = dangling if abs(dangling) < 2**63 else "a number that is too large"
            raise malformed(f"{where} refers to node {number}, which is no earlier node")

    def _require_forms(self, value: Any, operand: Operand, where: str) -> None:
        """Raises `FormatError` if an operand has a child of a form that its row does not allow: see `_form`.

        Args:
            value: the value of the operand in the node.
            operand: the operand as the row declares it.
            where: place of the operand, in words.
        """
        forms = operand.forms or ()
        children = value if operand.type == "children" else [value]
        wrong = next((form for form in map(self._form, children) if form not in forms), None)
        if wrong is not None:
            allowed = " or ".join(f"`{form}`" for form in sorted(forms))
            raise malformed(f"{where} is or holds a `{wrong}` in the place of {allowed}")

    def _form(self, child: Child) -> str:
        """Returns the form of a child: the kind of a node, the tag of an atom, or `null`, `text` or `flag`.

        For example "dict", "int", "null" for None, "text" for a string, and "flag" for a boolean. The atom of a string
        with surrogates has the tag `str`, and is a text as well.
        """
        if type(child) is int:
            return self.nodes[child][0]
        if type(child) is list:
            return "text" if child[0] == "str" else child[0]
        return "null" if child is None else "text" if type(child) is str else "flag"

    def _check_instance(self, node: Node) -> None:
        """Checks the node of an instance against its type.

        Raises:
            FormatError: if type and node are of different kinds, if the node has not one value for each attribute of
                the type, or if the type lacks the field that a `wrapper` names.
        """
        kind, entry, where = node[0], self.types[node[1]], f"node {self.number}"
        # The kind that the node should have. Instances with fields are nodes `object`, or `wrapper` for some modules.
        expected = entry.kind if entry.kind in ("registered", "enum") else "object"
        if kind != expected and not (kind == "wrapper" and entry.kind == "module"):
            raise malformed(f"{where} is a `{kind}`, but its class `{entry.name}` is a {entry.kind}")
        count = len(entry.fields) + len(entry.extra)
        if expected == "object" and len(node[2]) != count:
            raise malformed(f"{where} has {len(node[2])} values for the {count} fields of `{entry.name}`")
        if kind == "wrapper" and node[3] not in entry.fields:
            raise malformed(f"{where}, a `wrapper`, wraps what is no field")

    def _collect_method(self, node: Node) -> None:
        """Adds the name of the function that a bound method binds to `names`, so that it must be trusted to be loaded.

        A node `method` is a bound method of Python, and a node `bound` is Equinox's bound method of a module.

        Raises:
            FormatError: if the object of the method has no class of a known name. Only for the `__call__` of a `bound`,
                no name is needed.
        """
        name, owner = name_of_method(self.owners, self.nodes, node), node[1]
        if name is not None and len(node[2]) <= MAX_NAME and node[2].isidentifier():
            self.names["method", name] = None
            return
        # The object may be a node `bound`, which can be called. Its `__call__` calls the function that it binds, and
        # the name of this function was added when that node was checked.
        is_call = node[0] == "method" and node[2] == "__call__"
        if not (is_call and type(owner) is int and self.nodes[owner][0] == "bound"):
            raise malformed(f"node {self.number} is a method of what has no class of a known name")

    def _is_reference_or_atom(self, child: Any) -> bool:
        """Returns True if a value is a child: the number of an earlier node, or an atom. Collects the atom."""
        cls = type(child)
        if cls is int:
            return 0 <= child < self.number
        if cls is list:
            return self._is_atom(child)
        return child is None or cls is bool or cls is str

    def _is_atom(self, atom: list[Any]) -> bool:
        """Returns True if a list is an atom of the format. Collects its value or its name.

        Raises:
            FormatError: if the tag is unknown, or no save would write these texts.
        """
        if not atom or not all(type(text) is str for text in atom):
            return False
        key = tuple(atom)
        # Every value that was left out has a number of its own, so the atom of a left-out value must not occur twice.
        if atom[0] == LEFT_OUT:
            if key in self.atoms:
                return False
            self.has_left_out = True
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
        """Returns True for the index of an array without an earlier node. Notes that it has one now."""
        # Each array belongs to one node. Ties of the array are several references to that node.
        if type(index) is not int or not 0 <= index < len(self.arrays) or index in self.used_arrays:
            return False
        self.used_arrays.add(index)
        return True

    # --- entries ------------------------------------------------------------------------------------------------------

    def _parse_type(self, entry: Any, where: str) -> TypeEntry:
        """Checks one entry of `types`, and returns it as a `TypeEntry`. Collects the name of its class.

        Args:
            entry: the entry as JSON has it.
            where: its place, such as "type 3".

        Raises:
            FormatError: if the entry does not follow the grammar.
        """
        kind = entry.get("kind") if type(entry) is dict else None
        if type(kind) is not str or kind not in CLASS_KINDS:
            raise malformed(f"{where} has no known kind")
        if kind in ("registered", "enum"):
            _require_keys(entry, where, {"name", "kind"})
        else:
            _require_keys(entry, where, {"name", "kind", "fields"}, {"missing", "extra", "version"})
        # All names of attributes, which must be different across the three lists.
        lists = [entry.get(key, []) for key in ("fields", "missing", "extra")]
        names = [name for listed in lists if type(listed) is list for name in listed]
        if not all(type(listed) is list for listed in lists) or not all(type(name) is str for name in names):
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

    def _parse_array(self, entry: Any, where: str) -> ArrayEntry:
        """Checks one entry of `arrays`, and returns it as an `ArrayEntry`.

        Args:
            entry: the entry as JSON has it.
            where: its place, such as "array 3".

        Raises:
            FormatError: if the entry does not follow the grammar.
        """
        _require_keys(entry, where, _ARRAY_KEYS, {"weak", "key"})
        tensor, dtype, shape, kind = entry["tensor"], entry["dtype"], entry["shape"], entry["kind"]
        if type(tensor) is not str or type(dtype) is not str or kind not in ("jax", "numpy"):
            raise malformed(f"{where} lacks its tensor, its dtype or its kind")
        if not are_sizes(shape):
            raise malformed(f"{where} has an impossible shape")
        # `dtype_named` raises if there is no such dtype.
        if dtype not in self.checked_dtypes:
            dtype_named(dtype)
            self.checked_dtypes.add(dtype)
        result = ArrayEntry(tensor, dtype, tuple(shape), kind, entry.get("weak", False), entry.get("key"))
        # Most entries have none of the optional keys, `weak` and `key`, and need no more checks.
        if len(entry) == len(_ARRAY_KEYS) and dtype != FLOAT0:
            return result
        # `weak` is left out, or true. A key is a text, and is never weakly typed.
        if entry.get("weak", True) is not True or ("key" in entry and (type(result.key) is not str or result.weak)):
            raise malformed(f"{where} has an impossible weak type or key")
        if result.kind == "numpy" and (result.weak or result.key is not None):
            raise malformed(f"{where} is NumPy's, but has what only JAX's have")
        # A file has no bytes for an array of float0, however large its shape. JAX would allocate a byte for each
        # element.
        if result.dtype == FLOAT0 and result.kind != "numpy":
            raise malformed(f"{where} is JAX's and has the dtype float0, which only NumPy's have")
        if result.key is not None and (result.dtype != "uint32" or not result.shape):
            raise malformed(f"{where} is a PRNG key without raw data of uint32")
        return result


def _is_program(main: Any, names: tuple[tuple[str, str], ...]) -> bool:
    """Returns True if `main` can be the module name of the program that wrote the file.

    Some name of the file must be in this module. No name may be in `__main__` (or `__mp_main__`), because that is a
    second name of the same module.

    Args:
        main: the value in the file.
        names: all names in the file, each with its use.
    """
    modules = {name.partition(":")[0] for _, name in names}
    return type(main) is str and main in modules and modules.isdisjoint({MAIN, CHILD})


_ARRAY_KEYS = frozenset({"tensor", "dtype", "shape", "kind"})


def _require_keys(entry: Any, where: str, needed: Set[str], optional: Set[str] = frozenset()) -> None:
    """Raises `FormatError` unless an entry is a dict with all needed keys and, beside these, only optional ones."""
    if type(entry) is not dict or (entry.keys() != needed and not needed <= entry.keys() <= needed | optional):
        raise malformed(f"{where} does not have the keys that it should have")


def _is_base64(text: Any) -> bool:
    """Returns True if a value is a text in base64, as a save could have written it."""
    try:
        return type(text) is str and read_base64(text) is not None
    except ValueError:
        return False
