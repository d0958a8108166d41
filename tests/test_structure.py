"""The shape of the package: imports point one way, nothing is unpickled, listeners stay on loopback."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "distributedtorch"
MAY_IMPORT = {
    "core": set(),
    "wire": {"core"},
    "serve": {"core"},
    "sync": {"core", "wire", "serve"},
    "data": {"core"},
    "score": {"core"},
    "elastic": {"core"},
    "launch": {"core", "elastic"},
    "checkpoint": {"core", "launch"},
    "verify": {"core", "data", "launch"},
}
UNSAFE = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
HOOK = re.compile(r"\.register_(forward|full_backward|(load_)?state_dict)\w*hook$")
UNSAFE_CALLS = {"eval", "exec", "all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list"}


def sources() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        yield str(path.relative_to(PACKAGE)), ast.parse(path.read_text())


def imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def wrong_imports(files: Iterator[tuple[str, ast.Module]]) -> list[str]:
    """Imports of one part by another that may not know it; the assembly at the top may know all."""
    wrong = []
    for name, tree in files:
        part = name.split("/")[0]
        for target in imported(tree):
            bits = target.split(".")
            if part not in MAY_IMPORT or bits[0] != "distributedtorch" or len(bits) < 2 or bits[1] == part:
                continue
            if bits[1] not in MAY_IMPORT[part]:
                wrong.append(f"{name} imports {target}")
    return wrong


def unsafe(files: Iterator[tuple[str, ast.Module]]) -> list[str]:
    """Everything that would run code out of a file or a socket."""
    found = []
    for name, tree in files:
        found += [f"{name} imports {target}" for target in imported(tree) if target.split(".")[0] in UNSAFE]
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                safe = any(k.arg == "weights_only" and ast.unparse(k.value) == "True" for k in node.keywords)
                if called.split(".")[-1] in UNSAFE_CALLS and called.split(".")[0] not in ("model", "self"):
                    found.append(f"{name} calls {called}")
                if called in ("torch.load", "yaml.load") and not safe:
                    found.append(f"{name} calls {called} without weights_only=True")
    return found


def kept_by_copies(files: Iterator[tuple[str, ast.Module]]) -> list[str]:
    """Hooks on modules that copies and pickles of these would have too."""
    found = []
    for name, tree in files:
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        left_out = {id(arg) for call in calls if ast.unparse(call.func) == "hooked" for arg in call.args}
        found += [
            f"{name} calls {ast.unparse(call.func)}"
            for call in calls
            if HOOK.search(ast.unparse(call.func)) and id(call) not in left_out
        ]
    return found


def test_imports_point_one_way() -> None:
    assert wrong_imports(sources()) == []


def test_nothing_is_unpickled() -> None:
    assert unsafe(sources()) == []


def test_no_hook_on_a_module_is_in_copies_of_it() -> None:
    assert kept_by_copies(sources()) == []
    assert kept_by_copies(iter([("x.py", ast.parse("module.register_forward_pre_hook(look)"))]))


@pytest.mark.parametrize("text", ["import pickle", "torch.load(f)", "dist.broadcast_object_list(x)", "eval(text)"])
def test_the_scan_finds_what_it_looks_for(text: str) -> None:
    assert unsafe(iter([("x.py", ast.parse(text))]))


def test_the_direction_test_can_fail() -> None:
    assert wrong_imports(iter([("core/x.py", ast.parse("from distributedtorch.sync import ddp"))]))
