"""Imports with other releases installed: pairs of what is imported, and what is installed."""
# ruff: noqa: F821 -- it follows `compat_state` and `compat_attempt`

found, outcomes = importlib.metadata.version, []
for name, installed in json.loads(sys.argv[1]):

    def version(name):
        if name in installed:
            return installed[name]
        if name in ("treex", "treeo"):
            raise importlib.metadata.PackageNotFoundError(name)
        return found(name)

    importlib.metadata.version = version
    outcomes.append(attempt(name))
print(json.dumps(outcomes))
