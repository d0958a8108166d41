"""What can be said of a script before N copies of it are started: whether anything in it could make them one run."""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.metadata
import sys
from pathlib import Path

from distributedtorch.core.errors import LaunchError, explain
from distributedtorch.core.where import is_users

_LOADERS = {"importlib", "runpy"}
_OWN_LAUNCHERS = {"lightning": "Lightning", "pytorch_lightning": "Lightning", "transformers": "transformers' Trainer"}
_MOST_FILES = 50
_LINE = "add `import distributedtorch as dt` and `model, optimizer, loader = dt.distribute(model, optimizer, loader)`"


def unjoined(workers: int, extra: str = "") -> str:
    """The message for a script that never takes part."""
    return explain(
        f"the script never calls dt.distribute, so {workers} copies of it would run, or ran, each on its own",
        "one call of dt.distribute in every process",
        extra or f"{_LINE}, or run the script with plain python",
    )


def check(script: str, workers: int) -> None:
    """Refuse a script that cannot come to call dt.distribute; `LaunchError` says what to do."""
    path = Path(script)
    if not path.exists():
        raise LaunchError(explain(f"no script at {script}", "a Python file", "check the path"))
    if path.suffix != ".py" or not path.is_file():
        return
    source = path.read_text(encoding="utf-8", errors="replace")
    if "distributedtorch" in source:
        return
    try:
        names = _imports(ast.parse(source))
    except (SyntaxError, ValueError):
        return  # Python itself says it better
    if not any(_may_distribute(name.partition(".")[0], path.parent) for name in names):
        raise LaunchError(unjoined(workers, _other_launcher(names)))


def downloads(script: str) -> str:
    """The line of a script at which every rank would download the same, as "train.py:9"; empty where there is none.

    That is a call with `download=True`, unless it stands in a block that lets one rank go first.
    """
    try:
        tree = ast.parse(Path(script).read_text(encoding="utf-8", errors="replace"))
    except (OSError, SyntaxError, ValueError):
        return ""
    turns = [node for node in ast.walk(tree) if isinstance(node, ast.With) and any(map(_in_turn, node.items))]
    guarded = {id(inner) for node in turns for inner in ast.walk(node)}
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and id(node) not in guarded]
    found = [call.lineno for call in calls if any(map(_downloads, call.keywords))]
    return f"{Path(script).name}:{min(found)}" if found else ""


def _in_turn(item: ast.withitem) -> bool:
    called = item.context_expr.func if isinstance(item.context_expr, ast.Call) else item.context_expr
    return ast.unparse(called).rpartition(".")[2] in ("main_first", "lock")


def _downloads(given: ast.keyword) -> bool:
    return given.arg == "download" and isinstance(given.value, ast.Constant) and given.value.value is True


def _imports(tree: ast.Module) -> set[str]:
    """Every imported name, dotted: `transformers.Trainer`; relative imports as ``."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = "" if node.level else node.module or ""
            names |= {f"{base}.{alias.name}" for alias in node.names}
    return names


def _may_distribute(top: str, folder: Path) -> bool:
    """Whether an imported module is the user's own code, or an installed package that needs this library."""
    if not top or top in _LOADERS:
        return True
    if top in sys.stdlib_module_names:
        return False
    spec = importlib.machinery.PathFinder.find_spec(top, [str(folder.resolve()), *sys.path])
    if spec is None:
        return True  # not here to be judged: an editable install, or an import error that Python will report
    places = [spec.origin] if spec.origin else list(spec.submodule_search_locations or [])
    if any(is_users(place) for place in places):
        return any(_speaks_of_us(Path(place)) for place in places)
    needs = (importlib.metadata.requires(name) for name in importlib.metadata.packages_distributions().get(top, []))
    return any("distributedtorch" in need for found in needs for need in found or [])


def _speaks_of_us(place: Path) -> bool:
    """Whether a module's or package's own files name this library, or import more that might."""
    package = place.parent if place.name == "__init__.py" else place
    files = [place] if package.is_file() else [*package.rglob("*.py")]
    for file in files[:_MOST_FILES]:
        source = file.read_text(encoding="utf-8", errors="replace")
        if "distributedtorch" in source:
            return True
        try:
            names = {name.partition(".")[0] for name in _imports(ast.parse(source))}
        except (SyntaxError, ValueError):
            return True
        if any((file.parent / f"{name}.py").exists() or (file.parent / name).is_dir() for name in names if name):
            return True
    return len(files) > _MOST_FILES


def _other_launcher(names: set[str]) -> str:
    """What to do when the script uses a trainer that starts processes by itself."""
    for name in sorted(names):
        top = name.partition(".")[0]
        if top in _OWN_LAUNCHERS and (top != "transformers" or name.endswith("Trainer")):
            trainer = _OWN_LAUNCHERS[top]
            return f"{trainer} starts its own DDP: start it by its own launcher, or write the plain loop and {_LINE}"
    return ""
