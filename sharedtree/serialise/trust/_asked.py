"""What the names in a file lead to: an object each, or one error with all that are at fault; and the list for `audit`.

Nothing here builds anything of the file's. Only modules on the allow-list are imported.
"""

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from ..._printable import printable
from ...compat._importing import importable_name
from ...errors import StructureMismatchError, UntrustedTypeError
from ._allowed import LIBRARIES, NAMES_ONLY, NNX
from ._names import root_of
from ._trust import UNLISTED, Trust, Use, Verdict

Name = tuple[Use, str]  # what a file uses a name as, and the name; that of a class stands before those of its methods
Paths = Mapping[Name, tuple[str, ...]]  # where each name stands first in the tree


class Request(NamedTuple):
    """One name that a file asks for.

    Attributes:
        name: `module:qualname`.
        kind: `"class"`, `"function"` or `"method"`.
        paths: the first few places in the tree; a part that many share is named through its first place.
        allowed: whether the allow-list has it.
        found: whether it leads to an object.
        why: what keeps it from being allowed or found; empty if nothing does.
        elsewhere: of a name that every file may have, but whose package would come from where nothing is installed (the
            current directory, say): that place. Nothing of it was run. Import the package first if it is yours.
    """

    name: str
    kind: Use
    paths: tuple[str, ...]
    allowed: bool
    found: bool
    why: str
    elsewhere: str = ""


def judge_all(names: Iterable[Name], paths: Paths, trust: Trust) -> tuple[Request, ...]:
    """What becomes of each name, in the order of the file."""
    return tuple(
        Request(name, kind, paths.get((kind, name), ()), each.allowed, each.found, each.why, each.elsewhere)
        for (kind, name), each in _verdicts({key: key[1] for key in names}, trust).items()
    )


def resolve_all(
    names: Iterable[Name], paths: Callable[[], Paths], trust: Trust, renames: Mapping[str, Any]
) -> dict[tuple[str, ...], Any]:
    """The object of each class and function, in a file whose names may have changed since.

    Raises:
        UntrustedTypeError: if the file names what it may not. All such names are listed.
        StructureMismatchError: if a name leads nowhere.
    """
    wanted: dict[Name, Any] = {(kind, name): _renamed(kind, name, renames) for kind, name in names}
    texts = {key: new for key, new in wanted.items() if isinstance(new, str) and key[0] != "method"}
    # Importing a module runs it. So nothing is imported for a file that names anything else that it may not.
    unlisted: dict[Name, Verdict] = {key: UNLISTED for key, new in texts.items() if not trust.allows(new, key[0])}
    verdicts = unlisted or _verdicts(wanted, trust)
    faults: dict[Name, Verdict] = {
        (kind, name): verdict
        for (kind, name), verdict in verdicts.items()
        # What is wrong with a class is not said again of its methods.
        if verdict.why and (kind != "method" or verdicts["class", name.rpartition(".")[0]].found)
    }
    refused = {key: verdict for key, verdict in faults.items() if verdict.elsewhere or not verdict.allowed}
    if refused:
        raise _untrusted(refused, paths(), wanted)
    if faults:
        lines = ["The file names what is not there:"]
        lines += [f"    `{wanted[key]}`: {printable(verdict.why)}" for key, verdict in faults.items()]
        lines += ["Install what is missing. If something was renamed or moved, say how:"]
        lines += [f'    renames={{"{next(iter(faults))[1]}": "new_module:NewName"}}']
        raise StructureMismatchError("\n".join(lines))
    return {key: verdict.obj for key, verdict in verdicts.items() if key[0] != "method"}


def _verdicts(wanted: Mapping[Name, Any], trust: Trust) -> dict[Name, Verdict]:
    verdicts: dict[Name, Verdict] = {}
    for (kind, name), new in wanted.items():
        if kind == "method":
            verdict = trust.resolve_method(name, verdicts["class", name.rpartition(".")[0]])
        else:
            verdict = trust.resolve(new, kind) if isinstance(new, str) else Verdict(new)
        verdicts[kind, name] = verdict
    return verdicts


def _renamed(kind: Use, name: str, renames: Mapping[str, Any]) -> Any:
    """What a class or a function is called now, or what it is."""
    new = renames.get(name, name) if kind != "method" else name
    if new is None:
        raise StructureMismatchError(f"`renames` drops `{name}`, but only fields can be dropped. Give its new name.")
    if kind == "class" and not isinstance(new, str | type):
        raise TypeError(f"`renames` gives the class `{name}` the new name {new!r}, which is no class.")
    return new


def _untrusted(refused: Mapping[Name, Verdict], paths: Paths, wanted: Mapping[Name, Any]) -> UntrustedTypeError:
    lines = ["The file names classes or functions that nobody allowed it to name, and nothing was loaded:"]
    if all(verdict.elsewhere for verdict in refused.values()):
        lines = ["The file names classes or functions of packages that are not installed, and nothing was loaded:"]
    first_paths = [paths.get(key, ("",))[0] for key in refused]
    for ((kind, name), verdict), path in zip(refused.items(), first_paths, strict=True):
        where = f"`{printable(path)}`" if path else "the root"
        lines += [f"    `{name}`, a {kind}, at {where}: {printable(verdict.why)}"]
    names = [name for _, name in refused]
    standard = [name for name in names if root_of(name) in sys.stdlib_module_names]
    if standard:
        lines += ["No model needs names like these; do not load the file unless you wrote it: " + ", ".join(standard)]
    packages = [importable_name(root_of(wanted[key])) for key, verdict in refused.items() if verdict.elsewhere]
    if packages:
        lines += ["What is not installed may be anyone's. If it is yours, import it before you load:"]
        lines += [f"    import {package}" for package in dict.fromkeys(packages)]
    own = [name for (_, name), verdict in refused.items() if not verdict.elsewhere]
    own = [name for name in own if root_of(name) not in sys.stdlib_module_names]
    if own:
        texts = ['"flax"' if name in NNX else name.replace("__main__:", "").replace(":", ".") for name in own]
        listed = ", ".join(dict.fromkeys(texts))
        lines += ["If you trust them, say so:", f"    sharedtree.load(path, trusted=[{listed}])"]
        roots = dict.fromkeys(map(root_of, own))
        if (LIBRARIES | NAMES_ONLY).isdisjoint(roots):
            listed = ", ".join(f'"{root}"' for root in roots)
            lines += [f"    sharedtree.load(path, trusted=[{listed}])"]
    return UntrustedTypeError("\n".join(lines), first_paths, names)
