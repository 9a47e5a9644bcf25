"""Resolves all names of a file at once. Returns an object for each, or raises one error that lists every name at fault.

`audit` gets the same verdicts as a list. Most of this file makes the texts of errors: what to import, trust or rename,
as calls that run. Nothing in the file is built at this stage, and nothing is imported.

Words:

- The *file's name* of a class or function is that in the file. Its *current name* is the one that is looked up. They
  differ if the user's `renames` has a new name for it. In place of a name, `renames` may have the class or function.
- `main` is the module of the program that wrote the file, by the name under which others import it: `train`. In the
  file, that program's classes are `train:Net` or `__main__:Net`.
- A name has *moved* if the program that wrote the file defined it, the running program does not, and just one loaded
  module has such a class or function: `__main__:Net` is `models:Net` here. Errors suggest it as a new name.
- `MAIN` is `"__main__"`, and `CHILD` the name of the main module in a spawned process.
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

Name = tuple[Use, str]
"""The use of a name in a file, and the name. In lists of them, a class comes before its methods."""

Paths = Mapping[Name, tuple[str, ...]]
"""Name → the first few paths in the tree at which it is used."""


class Request(NamedTuple):
    """One name in a file, and whether loading would accept it.

    Attributes:
        name: the name, `module:qualname`.
        kind: `"class"`, `"function"` or `"method"`.
        paths: the first few paths in the tree at which it is used. Below a shared module, only paths through the
            module's first path count.
        allowed: True if the file may use the name.
        found: True if the name also leads to an object.
        why: the reason if it is not allowed or not found; otherwise empty.
        not_imported: the module that the user has to import before the file can be loaded, since loading imports
            nothing; empty if there is none.
    """

    name: str
    kind: Use
    paths: tuple[str, ...]
    allowed: bool
    found: bool
    why: str
    not_imported: str = ""


# ---- Verdicts on all names of a file ----


def judge_all(names: Iterable[Name], paths: Paths, trust: Trust, main: str | None = None) -> tuple[Request, ...]:
    """Returns the verdict on each name, in the order of the file, for `audit`.

    Args:
        names: the names in the file.
        paths: where each is used.
        trust: the allow-list.
        main: module of the program that wrote the file.
    """
    requests: list[Request] = []
    # Without `renames`, the current names are the file's.
    for (kind, name), verdict in _verdicts({(kind, name): name for kind, name in names}, trust, main).items():
        first_paths = paths.get((kind, name), ())
        requests.append(
            Request(name, kind, first_paths, verdict.allowed, verdict.found, verdict.why, verdict.not_imported)
        )
    return tuple(requests)


def resolve_all(
    names: Iterable[Name],
    paths: Callable[[], Paths],
    trust: Trust,
    renames: Mapping[str, Any],
    main: str | None = None,
) -> dict[tuple[str, ...], Any]:
    """Returns (use, file's name) → object, for each class and function that a file names.

    Methods are judged as well, but are not in the result: they are taken from the objects of their classes.

    Args:
        names: the names in the file.
        paths: function that returns where each is used. It is called only for an error.
        trust: the allow-list.
        renames: the user's `renames`, name in the file → new name, class or function. Its entries for fields do not
            matter here.
        main: module of the program that wrote the file.

    Raises:
        UntrustedTypeError: if names are not allowed or not imported. All of them are listed.
        StructureMismatchError: if names lead nowhere, or `renames` drops a class or function.
        TypeError: if `renames` has something else in place of a class.
    """
    current_names: dict[Name, Any] = {(kind, name): _current_name(kind, name, renames) for kind, name in names}
    verdicts = _verdicts(current_names, trust, main)
    faults: dict[Name, Verdict] = {}
    for (kind, name), verdict in verdicts.items():
        # If a class is at fault, its methods are not listed as well.
        is_of_faulty_class = kind == "method" and not verdicts["class", name.rpartition(".")[0]].found
        if verdict.why and not is_of_faulty_class:
            faults[kind, name] = verdict
    refused = {key: verdict for key, verdict in faults.items() if verdict.not_imported or not verdict.allowed}
    if refused:
        raise _error_for_refused(refused, paths(), current_names, main, renames)
    if faults:
        raise _error_for_missing(faults, current_names, main, renames)
    return {(kind, name): verdict.obj for (kind, name), verdict in verdicts.items() if kind != "method"}


def _error_for_missing(
    faults: Mapping[Name, Verdict], current_names: Mapping[Name, Any], main: str | None, renames: Mapping[str, Any]
) -> StructureMismatchError:
    """Returns the error for names that lead nowhere.

    It lists them, and then has one piece of advice, for the likeliest cause:

    - if every name has moved, a call with `trusted` and `renames`;
    - if every name is of an installed library, a command that updates the libraries;
    - otherwise, an example of `renames` for the first name of no library.

    Args:
        faults: the names, each with its verdict.
        current_names: name in the file → current name, or the object that `renames` has for it.
        main: module of the program that wrote the file.
        renames: the user's `renames`. The calls in the error repeat its entries.
    """
    lines = ["The file refers to classes or functions that do not exist here:"]
    lines += [f"    `{current_names[key]}`: {printable(verdict.why)}" for key, verdict in faults.items()]
    # Current name → name in a loaded module.
    moved = _find_moved_names([current_names[key] for key in faults], main)
    libraries = [library_of(root_of(current_names[key])) for key in faults]
    if all(current_names[key] in moved for key in faults):
        # `train.py` calls its class `__main__:Net`, and a program that imports `train` calls it `train:Net`.
        lines += [
            "A class of the program that saved the file has another name in other programs. If these are the same, "
            "load with:"
        ]
        new_names = {name: moved[current_names[kind, name]] for kind, name in faults}
        lines += [_load_call(trusted=[], moved=new_names, renames=renames)]
    elif all(libraries):
        versions = dict.fromkeys([f"{library.name} {library.version}" for library in libraries if library])
        lines += [f"Another version wrote the file than is installed, {', '.join(versions)}. Update:"]
        lines += [update_command(name) for name in dict.fromkeys([library.name for library in libraries if library])]
    else:
        # The first name that is not of a library.
        first = next(name for (_, name), library in zip(faults, libraries, strict=True) if library is None)
        lines += ["Install what is missing. If something was renamed or moved, give `sharedtree.load` the new name:"]
        lines += [f"    renames={{{renames_as_code(renames, {first: 'new_module:NewName'})}}}"]
    return StructureMismatchError("\n".join(lines))


def _verdicts(current_names: Mapping[Name, Any], trust: Trust, main: str | None) -> dict[Name, Verdict]:
    """Returns the verdict on each name of the file. A method is judged by the verdict on its class.

    Args:
        current_names: name in the file → current name, or the object that `renames` has for it. Each class comes before
            its methods.
        trust: the allow-list.
        main: module of the program that wrote the file.
    """
    verdicts: dict[Name, Verdict] = {}
    for (kind, name), current_name in current_names.items():
        if kind == "method":
            verdict = trust.resolve_method(name, verdicts["class", name.rpartition(".")[0]])
        else:
            # If it is no name, it is an object that the user passed in `renames`, and so trusts.
            is_name = isinstance(current_name, str)
            verdict = trust.resolve(current_name, kind, main) if is_name else Verdict(current_name)
        verdicts[kind, name] = verdict
    return verdicts


def _current_name(kind: Use, name: str, renames: Mapping[str, Any]) -> Any:
    """Returns the current name of a class or a function, or the object that `renames` has for it.

    Names of methods stay as they are, since `renames` has the names of their classes.

    Raises:
        StructureMismatchError: if `renames` has None for it.
        TypeError: if it is a class, and `renames` has neither a name nor a class for it.
    """
    current_name = renames.get(name, name) if kind != "method" else name
    if current_name is None:
        raise StructureMismatchError(f"`renames` drops `{name}`, but only fields can be dropped. Give its new name.")
    if kind == "class" and not isinstance(current_name, str | type):
        raise TypeError(f"`renames` gives the class `{name}` the new name {current_name!r}, which is no class.")
    return current_name


def _is_loaded(name: str) -> bool:
    """Returns True if a name leads to something other than None in a loaded module."""
    with contextlib.suppress(LookupError):
        return find(name) is not None
    return False


# So many names are looked for. Each may be looked up in each loaded module, and a file may have any number of names.
_MOST_MOVED = 1_000


def _find_moved_names(names: Iterable[str], main: str | None) -> dict[str, str]:
    """Returns name → name in a loaded module, for those names that have moved.

    The head of this file says which these are. A name that several modules have is left out.

    Args:
        names: names of classes and functions.
        main: module of the program that wrote the file.
    """
    # 1. The names that the other program defined and the running one does not define. The key is the first part of the
    # qualname, `Outer` for `Outer.Inner`, since a module's dictionary has only that.
    names_by_first_part: dict[str, list[tuple[str, str]]] = {}
    for name in itertools.islice(names, _MOST_MOVED):
        module, _, qualname = name.partition(":")
        if module in (MAIN, CHILD, main) and not _is_loaded(f"{MAIN}:{qualname}"):
            names_by_first_part.setdefault(qualname.partition(".")[0], []).append((qualname, name))
    # 2. For each, the same qualname in loaded modules that define it and are of no library.
    candidates: dict[str, list[str]] = {}
    for module, module_object in list(sys.modules.items()) if names_by_first_part else ():
        if root_of(module) not in PACKAGES | NAMES_ONLY | {MAIN, CHILD} | sys.stdlib_module_names:
            first_parts = namespace(module_object).keys() & names_by_first_part.keys()
            for qualname, name in [pair for first in first_parts for pair in names_by_first_part[first]]:
                candidate = f"{module}:{qualname}"
                if _is_loaded(candidate) and home_of(find(candidate)) == module and callable(find(candidate)):
                    candidates.setdefault(name, []).append(candidate)
    # 3. Of several candidates, the likely one is in a module called like the program: for `jobs.train`, in `train` or
    # `other.train`.
    stem = (main or "").rpartition(".")[2]
    moved: dict[str, str] = {}
    for name, candidates_of_name in candidates.items():
        in_like_module = [candidate for candidate in candidates_of_name if _last_part_of_module(candidate) == stem]
        likely = in_like_module or candidates_of_name
        if len(likely) == 1:
            moved[name] = likely[0]
    return moved


def _last_part_of_module(name: str) -> str:
    """Returns `b` for the name `a.b:C`."""
    return name.partition(":")[0].rpartition(".")[2]


def _error_for_refused(
    refused: Mapping[Name, Verdict],
    paths: Paths,
    current_names: Mapping[Name, Any],
    main: str | None,
    renames: Mapping[str, Any],
) -> UntrustedTypeError:
    """Returns the error for names that are not allowed, or whose modules are not imported.

    It lists each name with its first path. Then it says what to import, and how to trust what the user may trust.

    Args:
        refused: the names, each with its verdict.
        paths: where each is used.
        current_names: all names of the file → current name, or the object that `renames` has for it.
        main: module of the program that wrote the file.
        renames: the user's `renames`. The calls in the error repeat its entries.
    """
    lines = ["The file refers to classes or functions that are not trusted, so nothing was loaded:"]
    if all(verdict.not_imported for verdict in refused.values()):
        lines = ["The file refers to classes or functions of modules that are not imported, so nothing was loaded:"]
    first_paths = [paths.get(key, ("",))[0] for key in refused]
    for ((kind, name), verdict), path in zip(refused.items(), first_paths, strict=True):
        place = f"`{printable(path)}`" if path else "the root"
        current_name = _current_name_of((kind, name), current_names)
        known_as = f" that is called `{current_name}` now" if current_name != name else ""
        lines += [f"    `{name}`, a {kind}{known_as}, at {place}: {printable(verdict.why)}"]
    names = [name for _, name in refused]
    standard = [name for name in names if root_of(name) in sys.stdlib_module_names]
    if standard:
        lines += ["No model needs names like these; do not load the file unless you wrote it: " + ", ".join(standard)]
    lines += import_advice([verdict.not_imported for verdict in refused.values()])
    # What the calls in the error trust: current name → name in the file. Nothing of the standard library is among it.
    file_names: dict[str, str] = {}
    for key, verdict in refused.items():
        if verdict.not_imported:
            continue
        current_name = _current_name_of(key, current_names)
        if root_of(current_name) not in sys.stdlib_module_names:
            file_names[current_name] = key[1]
    if file_names:
        # The printed call takes the place of the user's. So it also has to trust what the user's call trusted. An
        # object in `renames` is trusted anyway.
        for key, current_name in current_names.items():
            is_trusted_name = key[0] != "method" and key not in refused and type(current_name) is str
            if is_trusted_name and not _is_listed(current_name):
                file_names[current_name] = key[1]
        lines += _advice_on_trust(file_names, _find_moved_names(file_names, main), main, renames)
    return UntrustedTypeError("\n".join(lines), first_paths, names)


# ---- Advice on what to import ----


def import_advice(modules: Iterable[str]) -> list[str]:
    """Returns the lines of an error that say what to import. The list is empty if there is nothing to import.

    Args:
        modules: names of the modules. Empty texts are passed over.
    """
    lines = _import_lines(modules)
    return ["Loading imports nothing. Import this, then load again:", *lines] if lines else []


def _import_lines(modules: Iterable[str]) -> list[str]:
    """Returns an `import` statement for each module, sorted, indented, and each once. Empty texts are passed over."""
    lines: dict[str, None] = {}
    for module in sorted(filter(None, modules)):
        row = ROW_OF.get(root_of(module))
        home = row.imported_from if row is not None else ""
        # Some libraries are imported through a package of ours: `sharedtree.treex` for `treex`, and for parts of it. By
        # itself, treex fails with today's JAX.
        name = f"{home}.{root_of(module)}" if home else module
        lines[f"    import {name}"] = None
    return list(lines)


def _module_to_import(module: str) -> str:
    """Returns the module that the user has to import for names of a module. The names may be refused.

    Empty if it is imported already, or if the loaded package above it does not have it.
    """
    try:
        return module_to_import(module, is_allowed=False) or ""
    except LookupError:
        return ""


# ---- The calls that errors print: `trusted=` and `renames=` ----


def _current_name_of(key: Name, current_names: Mapping[Name, Any]) -> str:
    """Returns the current name for a name of the file. If `renames` has an object, the object states its name.

    The current name of a method is that of its class, and the method: if `a:Old` is `a:New` now, `a:Old.call` is
    `a:New.call`.
    """
    kind, name = key
    if kind != "method":
        current_name = current_names[key]
        return current_name if isinstance(current_name, str) else _stated_name(current_name)
    owner, _, last = name.rpartition(".")
    current_name = current_names.get(("class", owner), owner)
    return f"{current_name if isinstance(current_name, str) else _stated_name(current_name)}.{last}"


def _stated_name(obj: Any) -> str:
    """Returns the name stated by an object itself. It need not lead to the object."""
    return f"{home_of(obj)}:{getattr(obj, '__qualname__', '?')}"


def _is_listed(name: str) -> bool:
    """Returns True if the calls in errors need not trust a name: it is on the allow-list, or of a known library."""
    return root_of(name) in PACKAGES | NAMES_ONLY | sys.stdlib_module_names or name in CLASSES | FUNCTIONS


def call_without_template(names: Iterable[Name], main: str | None, renames: Mapping[str, Any]) -> str:
    """Returns the text of a call that loads a file without a template, and trusts the names that the template trusted.

    Args:
        names: the names in the file.
        main: module of the program that wrote the file.
        renames: the user's `renames`, whose entries the call repeats.
    """
    return f"sharedtree.load(path{options_beside(names, main, renames, Trust())})"


def options_beside(names: Iterable[Name], main: str | None, renames: Mapping[str, Any], trust: Trust) -> str:
    """Returns the text of the options, beside the path, of a call that loads a file with these names.

    For example `, trusted=[Net], renames={...}`; empty if no option is needed.

    Args:
        names: the names in the file.
        main: module of the program that wrote the file.
        renames: the user's `renames`, whose entries the options repeat.
        trust: the allow-list of the call. What it allows needs no option.
    """
    # Current name that must be trusted → name in the file.
    file_names: dict[str, str] = {}
    for kind, name in names:
        current_name = renames.get(name, name)
        if kind != "method" and isinstance(current_name, str) and not trust.allows(current_name, kind, main):
            file_names[current_name] = name
    moved = _find_moved_names(file_names, main)
    texts = _trust_expressions([current_name for current_name in file_names if current_name not in moved], main)
    new_names = {file_names[current_name]: moved_name for current_name, moved_name in moved.items()}
    return _options(texts, new_names, renames)


def update_command(library: str) -> str:
    """Returns the line of an error with the command that updates a library."""
    oldest = OLDEST.get(library)
    requirement = library if oldest is None else f"'{library}>={oldest}'"
    return f"    pip install --upgrade {requirement}"


OLDEST = {"flax": "0.12.1"}
"""Library → its oldest version that has the attributes that instances in files have."""


def renames_as_code(renames: Mapping[str, Any], more: Mapping[str, str | None]) -> str:
    """Returns the code inside the braces of `renames={...}`.

    Args:
        renames: the user's `renames`. A call in an error repeats them, since it takes the place of the user's call.
        more: further entries: name in the file → new name, or None to drop a field.
    """
    pairs = {**renames, **more}
    # For a class that the running program defines, `renames` has entries under two names, `__main__:Net` and
    # `train:Net`. The user wrote one of these, so only the one in `__main__` is printed.
    new_in_program = {qualname: new for module, _, qualname, new in _parts_of_renames(pairs) if module in (MAIN, CHILD)}
    texts: list[str] = []
    for module, _, qualname, new in _parts_of_renames(pairs):
        if module in (MAIN, CHILD) or qualname not in new_in_program or new_in_program[qualname] is not new:
            text = f'"{printable(new)}"' if isinstance(new, str) else "None" if new is None else _expression_for(new)
            texts.append(f'"{module}:{printable(qualname)}": {text}')
    return ", ".join(texts)


def _parts_of_renames(renames: Mapping[str, Any]) -> list[tuple[str, str, str, Any]]:
    """Returns each entry of `renames` as (module, colon, qualname, new name or object)."""
    return [(*old.partition(":"), new) for old, new in renames.items()]


def _expression_for(obj: Any) -> str:
    """Returns the expression for a class or function in the code of the running program: `Net` or `models.Net`."""
    module, _, qualname = _stated_name(obj).partition(":")
    return qualname if module == MAIN else f"{module}.{qualname}"


def _trust_expressions(names: Sequence[str], main: str | None) -> list[str]:
    """Returns the expression to write in `trusted=[...]` for each name.

    Args:
        names: current names.
        main: module of the program that wrote the file.
    """
    texts: list[str] = []
    for name in names:
        module, _, qualname = name.partition(":")
        # A name allowed only if the user trusts its library. The expression is the library: `"flax"`.
        if name in IF_TRUSTED:
            texts.append(f'"{root_of(name)}"')
        # A class or function of the running program: `Net`.
        elif _is_of_program(name, main):
            texts.append(qualname)
        # The program that wrote the file may not be importable here. A text needs no import: `"train:Net"`.
        elif module == main:
            texts.append(f'"{name}"')
        else:
            texts.append(f"{module}.{qualname}")
    return texts


def _is_of_program(name: str, main: str | None) -> bool:
    """Returns True if a name stands for something of the running program: it is in `__main__`, or known there as well.

    A name in `__main__` counts even if the running program does not have it.
    """
    module, _, qualname = name.partition(":")
    return module in (MAIN, CHILD) or (module == main and _is_loaded(f"{MAIN}:{qualname}"))


def _advice_on_trust(
    file_names: Mapping[str, str], moved: Mapping[str, str], main: str | None, renames: Mapping[str, Any]
) -> Iterator[str]:
    """Yields the lines of an error that say how to trust names: imports, and the call that trusts each name.

    In simple cases a second call follows, which trusts the packages of the names instead.

    Args:
        file_names: current name → name in the file, for the names to be trusted.
        moved: current name → name in a loaded module, for those of them that have moved.
        main: module of the program that wrote the file.
        renames: the user's `renames`, whose entries the calls repeat.
    """
    names = [name for name in file_names if name not in moved]
    texts = _trust_expressions(names, main)
    qualnames_in_program = [name.partition(":")[2] for name in names if _is_of_program(name, main)]
    # What the running program should define, and does not.
    absent = [qualname for qualname in qualnames_in_program if not _is_loaded(f"{MAIN}:{qualname}")]
    if absent:
        listed = ", ".join([f"`{qualname}`" for qualname in dict.fromkeys(absent)])
        yield f"The program that wrote the file defines {listed}, and this program does not."
        yield "Import that from the file that defines it. If you trust it, load with:"
    else:
        yield "If you trust them, load with:"
    other_modules = [name.partition(":")[0] for name in names if not _is_of_program(name, main)]
    yield from _import_lines([_module_to_import(module) for module in other_modules])
    new_names = {file_names[name]: moved_name for name, moved_name in moved.items()}
    yield _load_call(texts, new_names, renames)
    # Another way: trust whole packages. It is offered only if no name is of a known library, and none needs an import
    # or a rename.
    roots = dict.fromkeys(map(root_of, file_names))
    if not moved and not absent and (PACKAGES | NAMES_ONLY).isdisjoint(roots):
        packages = ", ".join([f"`{root}`" for root in roots])
        yield f"Or, to trust every class and function in {packages}:"
        yield _load_call(trusted=[f'"{root}"' for root in roots], moved={}, renames=renames)


def _load_call(trusted: Iterable[str], moved: Mapping[str, str], renames: Mapping[str, Any]) -> str:
    """Returns the line with a call of `sharedtree.load`. `_options` explains the arguments."""
    return f"    sharedtree.load(path{_options(trusted, moved, renames)})"


def _options(trusted: Iterable[str], moved: Mapping[str, str], renames: Mapping[str, Any]) -> str:
    """Returns the options `trusted` and `renames` of a call as text, each after a comma; empty if there are none.

    Args:
        trusted: expressions for what the call trusts.
        moved: name in the file → name in a loaded module. The call trusts and renames these, too.
        renames: the user's `renames`, whose entries the call repeats.
    """
    texts = [*dict.fromkeys(trusted), *(f'"{new}"' for new in moved.values())]
    more = {old: new for old, new in moved.items() if old != new}
    options = [f"trusted=[{', '.join(texts)}]"] * bool(texts)
    options += [f"renames={{{renames_as_code(renames, more)}}}"] * bool(renames or more)
    return "".join(f", {option}" for option in options)
