"""The import rules of the two packages, read from their source and seen in fresh interpreters."""

from __future__ import annotations

import ast
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("quant_spec", "quant_kernels")
MAX_LINES = 400

# quant_spec's layers, lowest first. What a module imports, directly or through others, lies in its own row or above it
# here; modules that are not listed may stand anywhere, as long as that holds.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("unset", "errors", "dtypes"),
    ("granularity",),
    ("quant_key",),
    ("formats",),
    ("layer_config",),
    ("patterns",),
    ("parsers",),
    ("resolver", "mapping"),
    ("config",),
    ("report",),
)


def modules(package: str) -> dict[str, Path]:
    """Dotted names and files of a package's Python modules."""
    found = {}
    for path in sorted((ROOT / package).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def is_type_checking(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def imported(path: Path, known: set[str], *, deferred: bool = False) -> set[str]:
    """Absolute names that a module imports when it runs.

    Args:
        path: the module's file.
        known: names of modules, to tell `from package import module` from an attribute.
        deferred: count imports inside functions too, not the module's own alone.

    Returns:
        Dotted module names, of any package.
    """
    names: set[str] = set()
    todo: list[ast.AST] = [ast.parse(path.read_text("utf-8"))]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            full = {f"{node.module}.{alias.name}" for alias in node.names}
            names.update(full & known or {node.module or ""})
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            if deferred:
                todo.extend(ast.iter_child_nodes(node))
        elif isinstance(node, ast.stmt) and is_type_checking(node):
            todo.extend(node.orelse)
        else:
            todo.extend(ast.iter_child_nodes(node))
    return names


ALL_MODULES = {name: path for package in PACKAGES for name, path in modules(package).items()}
SOURCES = pytest.mark.parametrize("name", sorted(ALL_MODULES))


def layer(name: str) -> int | None:
    """Index into LAYERS of a module, None for one that is not listed."""
    first = name.split(".")[1] if "." in name else ""
    return next((index for index, row in enumerate(LAYERS) if first in row), None)


def reached(name: str, graph: dict[str, set[str]]) -> set[str]:
    """Modules that `name` imports, directly or through others."""
    found: set[str] = set()
    todo = [name]
    while todo:
        new = graph.get(todo.pop(), set()) - found
        found |= new
        todo.extend(new)
    return found


def import_graph() -> dict[str, set[str]]:
    """Imports between our modules. A package's `__init__` re-exports: what counts is how its modules use each other."""
    known = set(ALL_MODULES)
    return {
        name: imported(path, known) & known - {name} for name, path in ALL_MODULES.items() if path.name != "__init__.py"
    }


@pytest.mark.parametrize("name", [n for n in sorted(ALL_MODULES) if n.startswith("quant_spec.")])
def test_quant_spec_imports_downwards(name: str) -> None:
    own = layer(name)
    if own is None:
        return
    above = {other: layer(other) for other in reached(name, import_graph()) if other.startswith("quant_spec.")}
    wrong = sorted(other for other, index in above.items() if index is not None and index > own)
    assert not wrong, f"{name} reaches modules of later layers: {wrong}"


def test_every_layer_exists() -> None:
    known = {name.split(".")[1] for name in ALL_MODULES if name.startswith("quant_spec.")}
    assert {name for row in LAYERS for name in row} <= known


def test_imports_have_no_cycle() -> None:
    try:
        TopologicalSorter(import_graph()).prepare()
    except CycleError as error:
        pytest.fail(f"import cycle: {' -> '.join(error.args[1])}")


@pytest.mark.parametrize("name", [n for n in sorted(ALL_MODULES) if n.startswith("quant_spec")])
def test_quant_spec_never_imports_quant_kernels(name: str) -> None:
    names = imported(ALL_MODULES[name], set(ALL_MODULES), deferred=True)
    assert not [other for other in names if other.split(".")[0] == "quant_kernels"]


@SOURCES
def test_module_is_short(name: str) -> None:
    lines = len(ALL_MODULES[name].read_text("utf-8").splitlines())
    assert lines <= MAX_LINES, f"{ALL_MODULES[name]} has {lines} lines; {MAX_LINES} are allowed"


@pytest.mark.parametrize("path", [p for p in ALL_MODULES.values() if p.name == "__init__.py"], ids=str)
def test_init_holds_imports_alone(path: Path) -> None:
    tree = ast.parse(path.read_text("utf-8"))
    for node in tree.body:
        if isinstance(node, (ast.Import, ast.ImportFrom)) or is_type_checking(node):
            continue
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        # PEP 562: the table of names and the function that looks one up.
        if isinstance(node, ast.FunctionDef) and node.name in {"__getattr__", "__dir__"}:
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        assigned = {t.id for t in targets if isinstance(t, ast.Name)}
        assert assigned, f"{path}:{node.lineno}: only imports and export tables belong here"
        assert assigned <= {"__all__", "__version__", "_EXPORTS"}, f"{path}:{node.lineno}"


def loaded_after(statement: str, name: str) -> bool:
    """Whether module `name` is loaded in a fresh interpreter after `statement`."""
    code = f"{statement}\nimport sys\nprint({name!r} in sys.modules)"
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    return result.stdout.strip().endswith("True")


@pytest.mark.parametrize("statement", ["import quant_spec", "import quant_kernels", "import quant_kernels.cli"])
def test_import_is_lean(statement: str) -> None:
    assert not loaded_after(statement, "torch")


def test_lean_check_can_fail() -> None:
    assert loaded_after("import torch", "torch")


def test_kernels_leave_devices_alone() -> None:
    code = "import torch, quant_kernels, quant_kernels.ops; print(torch.cuda.is_initialized())"
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout.split()[-1] == "False"
