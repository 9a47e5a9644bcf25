"""What the names in a file lead to: an object each, or one error with all that are at fault; and the list for `audit`.

Nothing here builds anything of the file's, and nothing is imported for it.
"""

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ...core._errors import StructureMismatchError, UntrustedTypeError
from ...core._printing import printable
from ._allow_list import CLASSES, FUNCTIONS, IF_TRUSTED, NAMES_ONLY, PACKAGES, ROW_OF
from ._public_names import CHILD, MAIN, find, home_of, library_of, module_to_import, namespace, root_of
from ._trusted_names import Trust, Use, Verdict

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
        not_imported: the module that has to be imported before the file is loaded, for loading imports nothing; empty
            if none has to be.
    """

    name: str
    kind: Use
    paths: tuple[str, ...]
    allowed: bool
    found: bool
    why: str
    not_imported: str = ""


def judge_all(names: Iterable[Name], paths: Paths, trust: Trust, main: str | None = None) -> tuple[Request, ...]:
    """What becomes of each name, in the order of the file; `main` is the module that was the program that wrote it."""
    return tuple(
        Request(name, kind, paths.get((kind, name), ()), each.allowed, each.found, each.why, each.not_imported)
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

    verdicts = _verdicts(wanted, trust, main)
    faults: dict[Name, Verdict] = {
        (kind, name): verdict
        for (kind, name), verdict in verdicts.items()
        # What is wrong with a class is not said again of its methods.
        if verdict.why and (kind != "method" or verdicts["class", name.rpartition(".")[0]].found)
    }
    refused = {key: verdict for key, verdict in faults.items() if verdict.not_imported or not verdict.allowed}
    if refused:
        raise _untrusted(refused, paths(), wanted, main, renames)
    if faults:
        raise _not_there(faults, wanted, main, renames)
    return {key: verdict.obj for key, verdict in verdicts.items() if key[0] != "method"}


def _not_there(
    faults: Mapping[Name, Verdict], wanted: Mapping[Name, Any], main: str | None, renames: Mapping[str, Any]
) -> StructureMismatchError:
    """The error for names that lead nowhere."""
    lines = ["The file names what is not there:"]
    lines += [f"    `{wanted[key]}`: {printable(verdict.why)}" for key, verdict in faults.items()]
    moved = _moved([wanted[key] for key in faults], main)
    libraries = [library_of(root_of(wanted[key])) for key in faults]
    if len(moved) == len(faults):
        lines += ["What programs define has other names for others. If these are meant, say so:"]
        lines += [_call([], {key[1]: moved[wanted[key]] for key in faults}, renames)]
    elif all(libraries):
        versions = dict.fromkeys([f"{library.name} {library.version}" for library in libraries if library])
        lines += [f"Another version wrote the file than is installed, {', '.join(versions)}. Update:"]
        lines += [updating(name) for name in dict.fromkeys([library.name for library in libraries if library])]
    else:
        first = next(key[1] for key, library in zip(faults, libraries, strict=True) if library is None)
        lines += ["Install what is missing. If something was renamed or moved, say how:"]
        lines += [f"    renames={{{renames_as_code(renames, {first: 'new_module:NewName'})}}}"]
    return StructureMismatchError("\n".join(lines))


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
    refused: Mapping[Name, Verdict],
    paths: Paths,
    wanted: Mapping[Name, Any],
    main: str | None,
    renames: Mapping[str, Any],
) -> UntrustedTypeError:
    lines = ["The file names classes or functions that nobody allowed it to name, and nothing was loaded:"]
    if all(verdict.not_imported for verdict in refused.values()):
        lines = ["The file names classes or functions of modules that are not imported, and nothing was loaded:"]
    first_paths = [paths.get(key, ("",))[0] for key in refused]
    for ((kind, name), verdict), path in zip(refused.items(), first_paths, strict=True):
        where = f"`{printable(path)}`" if path else "the root"
        new = _name_now((kind, name), wanted)
        known_as = f" that is called `{new}` now" if new != name else ""
        lines += [f"    `{name}`, a {kind}{known_as}, at {where}: {printable(verdict.why)}"]
    names = [name for _, name in refused]
    standard = [name for name in names if root_of(name) in sys.stdlib_module_names]
    if standard:
        lines += ["No model needs names like these; do not load the file unless you wrote it: " + ", ".join(standard)]
    lines += imports([verdict.not_imported for verdict in refused.values()])
    own = {_name_now(key, wanted): key[1] for key, verdict in refused.items() if not verdict.not_imported}
    own = {new: name for new, name in own.items() if root_of(new) not in sys.stdlib_module_names}
    if own:
        # The call replaces one that trusted others, which are in the file, too. An object in `renames` is trusted.
        others = [key for key, new in wanted.items() if key[0] != "method" and key not in refused and type(new) is str]
        own |= {wanted[key]: key[1] for key in others if not _is_listed(wanted[key])}
        lines += _how_to_trust(own, _moved(own, main), main, renames)
    return UntrustedTypeError("\n".join(lines), first_paths, names)


def imports(modules: Iterable[str]) -> list[str]:
    """The lines of a message that say what has to be imported before a file is loaded; empty texts are passed over."""
    lines = _import_lines(modules)
    return ["Loading imports nothing. Import this, then load again:", *lines] if lines else []


def _import_lines(modules: Iterable[str]) -> list[str]:
    lines: dict[str, None] = {}
    for module in sorted(filter(None, modules)):
        row = ROW_OF.get(root_of(module))
        home = row.imported_from if row is not None else ""
        # treex by itself fails on today's JAX, also where only a part of it is wanted.
        name = f"{home}.{root_of(module)}" if home else module
        lines[f"    import {name}"] = None
    return list(lines)


def _module_to_import(module: str) -> str:
    """The module to import for names of a module; empty if that is done, or there is none."""
    try:
        return module_to_import(module) or ""
    except LookupError:
        return ""


def _name_now(key: Name, wanted: Mapping[Name, Any]) -> str:
    """The name that is looked up for a name of the file: another one if `renames` has it, or the class of a method."""
    kind, name = key
    if kind != "method":
        new = wanted[key]
        return new if isinstance(new, str) else _name_said_by(new)
    owner, _, last = name.rpartition(".")
    new = wanted.get(("class", owner), owner)
    return f"{new if isinstance(new, str) else _name_said_by(new)}.{last}"


def _name_said_by(obj: Any) -> str:
    return f"{home_of(obj)}:{getattr(obj, '__qualname__', '?')}"


def _is_listed(name: str) -> bool:
    """Whether a name is of what every file may have a part of."""
    return root_of(name) in PACKAGES | NAMES_ONLY | sys.stdlib_module_names or name in CLASSES | FUNCTIONS


def call_without_template(names: Iterable[Name], main: str | None, renames: Mapping[str, Any]) -> str:
    """The call that loads a file with these names where no template says that they are trusted."""
    return f"sharedtree.load(path{options_beside(names, main, renames, Trust())})"


def options_beside(names: Iterable[Name], main: str | None, renames: Mapping[str, Any], trust: Trust) -> str:
    """What a call must say beside a path to load a file with these names, if `trust` is what it trusts otherwise."""
    own: dict[str, str] = {}  # names that must be trusted → what the file calls them
    for kind, name in names:
        new = renames.get(name, name)
        if kind != "method" and isinstance(new, str) and not trust.allows(new, kind, main):
            own[new] = name
    moved = _moved(own, main)
    texts = _as_code([new for new in own if new not in moved], main)
    return _options(texts, {own[new]: found for new, found in moved.items()}, renames)


def updating(library: str) -> str:
    """The line of a message that says how to get a newer version of a library."""
    floor = OLDEST.get(library)
    wanted = library if floor is None else f"'{library}>={floor}'"
    return f"    pip install --upgrade {wanted}"


OLDEST = {"flax": "0.12.1"}
"""Of libraries whose instances only newer versions keep as files have them: the first of those versions."""


def renames_as_code(renames: Mapping[str, Any], more: Mapping[str, str | None]) -> str:
    """What is in `renames={...}`, with more: an option that replaces the one of the call must not lose anything."""
    pairs = {**renames, **more}
    # What the running program defines is in `renames` under two names, of which one was given.
    given = {qualname: new for module, _, qualname, new in _parted(pairs) if module in (MAIN, CHILD)}
    texts: list[str] = []
    for module, _, qualname, new in _parted(pairs):
        if module in (MAIN, CHILD) or qualname not in given or given[qualname] is not new:
            text = f'"{printable(new)}"' if isinstance(new, str) else "None" if new is None else _as_attribute(new)
            texts.append(f'"{module}:{printable(qualname)}": {text}')
    return ", ".join(texts)


def _parted(renames: Mapping[str, Any]) -> list[tuple[str, str, str, Any]]:
    return [(*old.partition(":"), new) for old, new in renames.items()]


def _as_attribute(obj: Any) -> str:
    module, _, qualname = _name_said_by(obj).partition(":")
    return qualname if module == MAIN else f"{module}.{qualname}"


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


def _how_to_trust(
    own: Mapping[str, str], moved: Mapping[str, str], main: str | None, renames: Mapping[str, Any]
) -> Iterator[str]:
    """What to write to trust names, of which some have other names here. `own` has the name in the file of each."""
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
    others = [name.partition(":")[0] for name in names if not _is_of_program(name, main)]
    yield from _import_lines([_module_to_import(module) for module in others])
    yield _call(texts, {own[name]: new for name, new in moved.items()}, renames)
    roots = dict.fromkeys(map(root_of, own))
    if not moved and not absent and (PACKAGES | NAMES_ONLY).isdisjoint(roots):
        yield _call([f'"{root}"' for root in roots], {}, renames)


def _call(trusted: Iterable[str], moved: Mapping[str, str], renames: Mapping[str, Any]) -> str:
    """The call that loads a file, with what is trusted, and with names that are found under others."""
    return f"    sharedtree.load(path{_options(trusted, moved, renames)})"


def _options(trusted: Iterable[str], moved: Mapping[str, str], renames: Mapping[str, Any]) -> str:
    texts = [*dict.fromkeys(trusted), *(f'"{new}"' for new in moved.values())]
    more = {old: new for old, new in moved.items() if old != new}
    options = [f"trusted=[{', '.join(texts)}]"] * bool(texts)
    options += [f"renames={{{renames_as_code(renames, more)}}}"] * bool(renames or more)
    return "".join(f", {option}" for option in options)
