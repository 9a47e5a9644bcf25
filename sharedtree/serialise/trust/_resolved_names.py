"""What the names in a file lead to: an object each, or one error with all that are at fault; and the list for `audit`.

Nothing here builds anything of the file's. Only modules on the allow-list are imported.
"""

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ...compat._import_hook import importable_name
from ...core._errors import StructureMismatchError, UntrustedTypeError
from ...core._printing import printable
from ._allow_list import CLASSES, FUNCTIONS, IF_TRUSTED, NAMES_ONLY, PACKAGES
from ._public_names import CHILD, MAIN, find, home_of, namespace, root_of
from ._trusted_names import UNLISTED, Trust, Use, Verdict

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


def judge_all(names: Iterable[Name], paths: Paths, trust: Trust, main: str | None = None) -> tuple[Request, ...]:
    """What becomes of each name, in the order of the file; `main` is the module that was the program that wrote it."""
    return tuple(
        Request(name, kind, paths.get((kind, name), ()), each.allowed, each.found, each.why, each.elsewhere)
        for (kind, name), each in _verdicts({key: key[1] for key in names}, trust, main).items()
    )


def resolve_all(
    names: Iterable[Name],
    paths: Callable[[], Paths],
    trust: Trust,
    renames: Mapping[str, Any],
    main: str | None = None,
) -> dict[tuple[str, ...], Any]:
    """The object of each class and function, in a file whose names may have changed since.

    `main` is the module that was the running program when the file was written.

    Raises:
        UntrustedTypeError: if the file names what it may not. All such names are listed.
        StructureMismatchError: if a name leads nowhere.
    """
    wanted: dict[Name, Any] = {(kind, name): _renamed(kind, name, renames) for kind, name in names}
    texts = {key: new for key, new in wanted.items() if isinstance(new, str) and key[0] != "method"}
    # Importing a module runs it. So nothing is imported for a file that names anything else that it may not.
    unlisted: dict[Name, Verdict] = {key: UNLISTED for key, new in texts.items() if not trust.allows(new, key[0], main)}
    verdicts = unlisted or _verdicts(wanted, trust, main)
    faults: dict[Name, Verdict] = {
        (kind, name): verdict
        for (kind, name), verdict in verdicts.items()
        # What is wrong with a class is not said again of its methods.
        if verdict.why and (kind != "method" or verdicts["class", name.rpartition(".")[0]].found)
    }
    refused = {key: verdict for key, verdict in faults.items() if verdict.elsewhere or not verdict.allowed}
    if refused:
        raise _untrusted(refused, paths(), wanted, main)
    if faults:
        moved = _moved([wanted[key] for key in faults], main)
        lines = ["The file names what is not there:"]
        lines += [f"    `{wanted[key]}`: {printable(verdict.why)}" for key, verdict in faults.items()]
        if len(moved) == len(faults):
            lines += ["What programs define has other names for others. If these are meant, say so:"]
            lines += [_call([], moved)]
        else:
            lines += ["Install what is missing. If something was renamed or moved, say how:"]
            lines += [f'    renames={{"{next(iter(faults))[1]}": "new_module:NewName"}}']
        raise StructureMismatchError("\n".join(lines))
    return {key: verdict.obj for key, verdict in verdicts.items() if key[0] != "method"}


def _verdicts(wanted: Mapping[Name, Any], trust: Trust, main: str | None) -> dict[Name, Verdict]:
    verdicts: dict[Name, Verdict] = {}
    for (kind, name), new in wanted.items():
        if kind == "method":
            verdict = trust.resolve_method(name, verdicts["class", name.rpartition(".")[0]])
        else:
            verdict = trust.resolve(new, kind, main) if isinstance(new, str) else Verdict(new)
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


def _is_here(name: str) -> bool:
    """Whether a name leads to something that is loaded."""
    with contextlib.suppress(LookupError):
        return find(name) is not None
    return False


_MOST_MOVED = 1_000  # each may be looked up in each module that is loaded


def _moved(names: Iterable[str], main: str | None) -> dict[str, str]:
    """Of names in the program that wrote a file, the one that each has in a module that is loaded, if it is only one.

    Those that the running program has are left out: they are where the file says.
    """
    own: dict[str, list[tuple[str, str]]] = {}  # the first part of a qualname → qualnames and names
    for name in itertools.islice(names, _MOST_MOVED):
        module, _, qualname = name.partition(":")
        if module in (MAIN, CHILD, main) and not _is_here(f"{MAIN}:{qualname}"):
            own.setdefault(qualname.partition(".")[0], []).append((qualname, name))
    found: dict[str, list[str]] = {}
    for module, each in list(sys.modules.items()) if own else ():
        if root_of(module) not in PACKAGES | NAMES_ONLY | {MAIN, CHILD} | sys.stdlib_module_names:
            for qualname, name in [pair for first in namespace(each).keys() & own.keys() for pair in own[first]]:
                new = f"{module}:{qualname}"
                if _is_here(new) and home_of(find(new)) == module and callable(find(new)):
                    found.setdefault(name, []).append(new)
    stem = (main or "").rpartition(".")[2]
    only: dict[str, str] = {}
    for name, news in found.items():
        likely = [new for new in news if new.partition(":")[0].rpartition(".")[2] == stem] or news
        if len(likely) == 1:
            only[name] = likely[0]
    return only


def _untrusted(
    refused: Mapping[Name, Verdict], paths: Paths, wanted: Mapping[Name, Any], main: str | None
) -> UntrustedTypeError:
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
        # The call replaces one that trusted others, which are in the file, too.
        others = [name for kind, name in wanted if kind != "method" and (kind, name) not in refused]
        own += [name for name in others if not _is_listed(name)]
        lines += _how_to_trust(own, _moved(own, main), main)
    return UntrustedTypeError("\n".join(lines), first_paths, names)


def _is_listed(name: str) -> bool:
    """Whether a name is of what every file may have a part of."""
    return root_of(name) in PACKAGES | NAMES_ONLY | sys.stdlib_module_names or name in CLASSES | FUNCTIONS


def call_without_template(names: Iterable[Name], main: str | None) -> str:
    """The call that loads a file with these names where no template says that they are trusted."""
    trust = Trust()
    own = [name for kind, name in names if kind != "method" and not trust.allows(name, kind, main)]
    if not own:
        return "sharedtree.load(path)"
    moved = _moved(own, main)
    return _call(_as_code([name for name in own if name not in moved], main), moved).strip()


def _as_code(names: Sequence[str], main: str | None) -> list[str]:
    """What to write in `trusted=` for each name of a file."""
    texts: list[str] = []
    for name in names:
        module, _, qualname = name.partition(":")
        text = f'"{name}"' if module == main else f"{module}.{qualname}"  # a text needs no import
        texts.append(f'"{root_of(name)}"' if name in IF_TRUSTED else qualname if _is_of_program(name, main) else text)
    return texts


def _is_of_program(name: str, main: str | None) -> bool:
    module, _, qualname = name.partition(":")
    return module in (MAIN, CHILD) or (module == main and _is_here(f"{MAIN}:{qualname}"))


def _how_to_trust(own: Sequence[str], moved: Mapping[str, str], main: str | None) -> Iterator[str]:
    """What to write to trust names of a file, of which some have other names here."""
    names = [name for name in own if name not in moved]
    texts = _as_code(names, main)
    own_program = [name.partition(":")[2] for name in names if _is_of_program(name, main)]
    absent = [qualname for qualname in own_program if not _is_here(f"{MAIN}:{qualname}")]
    if absent:
        listed = ", ".join([f"`{each}`" for each in dict.fromkeys(absent)])
        yield f"The program that wrote the file has what the one that runs now does not have: {listed}."
        yield "Import that from the file that defines it. If you trust it, say so:"
    else:
        yield "If you trust them, say so:"
    yield _call(texts, moved)
    roots = dict.fromkeys(map(root_of, own))
    if not moved and not absent and (PACKAGES | NAMES_ONLY).isdisjoint(roots):
        yield _call([f'"{root}"' for root in roots], {})


def _call(trusted: Iterable[str], moved: Mapping[str, str]) -> str:
    """The call that loads a file, with what is trusted, and with names that are found under others."""
    texts = [*dict.fromkeys(trusted), *(f'"{new}"' for new in moved.values())]
    renames = ", ".join([f'"{old}": "{new}"' for old, new in moved.items() if old != new])
    more = f", renames={{{renames}}}" if renames else ""
    return f"    sharedtree.load(path, trusted=[{', '.join(texts)}]{more})"
