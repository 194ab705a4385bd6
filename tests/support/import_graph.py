"""The import graph of the sources: `python3 dev.py imports`, and what the test of the layers reads.

Every import counts: at the top of a module, inside a function, under `TYPE_CHECKING`, and by
`import_module`: in a module that calls it, every text constant that names a module of ours. A
module that a package above registers as an entry point is reached by who asks for the extension.
"""

from __future__ import annotations

import ast
import functools
import keyword
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, TypeGuard

import networkx as nx

from ddltrace.cli import COMMANDS
from ddltrace.tracer.extensions import GROUP
from support.slim_environment import project

ROOT = Path(__file__).resolve().parents[2]

# From the lowest layer up. The top layer, `package-root`, imports the others lazily.
LAYERS = ("tracer", "analyzer", "experiments", "dashboard", "face")


class Import(NamedTuple):
    """One imported module: its full name, the line, and how it is imported.

    Attributes:
        at_import: When the importing module is imported.
        by_entry_point: From a package above, which has registered it.
    """

    module: str
    line: int
    at_import: bool
    by_entry_point: bool = False


def main() -> None:
    """Prints the size of the graph, its longest chain, its circles, and what each command needs."""
    graph = import_graph()
    at_import = import_graph(at_import=True)
    with_entry_points = import_graph(entry_points=True)
    lines = sum(len(path.read_bytes().splitlines()) for path in module_files().values())
    print(f"{len(graph)} modules, {lines} lines, {graph.number_of_edges()} imports")
    for title, chosen in (("all imports", graph), ("imports at the top of modules", at_import)):
        chain = longest_chain(chosen)
        print(f"\nlongest chain, {title}: {len(chain)} modules")
        for name in chain:
            print(f"  {name}")
    for title, chosen in (("", graph), (" with entry points", with_entry_points)):
        circles = circles_in(chosen)
        print(f"\ncircles{title}: {len(circles)}")
        for circle in circles:
            print(f"  {len(circle)} modules: {' '.join(circle)}")
    print("\nmodules that each command reaches, and those that its --help imports")
    for command, (module, _) in COMMANDS.items():
        reached = closure(with_entry_points, first_imports(module, command)) | {module}
        print(f"  {command:12}{len(reached):4}{len(closure(at_import, {module})):6}")


def layer_files() -> list[tuple[str, Path]]:
    """Every source file with its layer."""
    layers = [(layer, ROOT / layer) for layer in LAYERS[:-1]] + [("face", ROOT / "package-root")]
    return [(layer, path) for layer, folder in layers for path in sorted(folder.rglob("*.py"))]


def package_of(layer: str, path: Path) -> list[str]:
    """The package that holds a file, as Python sees it: ddltrace, tracer, interpose."""
    if layer == "face":
        return ["ddltrace", *path.parent.relative_to(ROOT / "package-root").parts]
    return ["ddltrace", *path.parent.relative_to(ROOT).parts]


@functools.cache
def module_files() -> dict[str, Path]:
    """Every module by its full name; a package stands for its ``__init__``."""
    modules = {}
    for layer, path in layer_files():
        package = package_of(layer, path)
        name = package if path.stem == "__init__" else [*package, path.stem]
        modules[".".join(name)] = path
    return modules


@functools.cache
def imports_in(layer: str, path: Path) -> list[Import]:
    """All imports in a source file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return list(imports_of(tree, package_of(layer, path)))


def imports_of(tree: ast.Module, package: list[str]) -> Iterator[Import]:
    """All imports in a module, relative ones resolved."""
    nodes = list(_nodes(tree))
    by_name = any(_is_call_of(node, "import_module", "__import__") for node, _ in nodes)
    for node, at_import in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, at_import)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            # `from ddltrace import tracer` imports a layer, `from ddltrace.tracer import x`
            # a name in one: both read as MODULE.NAME.
            for alias in node.names:
                yield Import(f"{module}.{alias.name}", node.lineno, at_import)
        elif _is_call_of(node, "import_module", "__import__"):
            if node.args and isinstance(node.args[0], ast.Constant):
                yield Import(str(node.args[0].value), node.lineno, at_import)
        elif _is_call_of(node, "extension", "require_extension"):
            name = node.args[0]
            if isinstance(name, ast.Constant):
                module = project()["entry-points"][GROUP][name.value]
                yield Import(module, node.lineno, at_import=False, by_entry_point=True)
        elif isinstance(node, ast.Constant) and by_name and node.value in module_files():
            yield Import(str(node.value), node.lineno, False)


def _nodes(tree: ast.Module) -> Iterator[tuple[ast.AST, bool]]:
    """All nodes of a module, each with whether it runs when the module is imported."""
    waiting: list[tuple[ast.AST, bool]] = [(tree, True)]
    while waiting:
        node, at_import = waiting.pop()
        yield node, at_import
        lazy: list[ast.AST] = []
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            at_import = False
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            lazy = [*node.body]
        waiting += [
            (child, at_import and child not in lazy) for child in ast.iter_child_nodes(node)
        ]


def _is_call_of(node: ast.AST, *names: str) -> TypeGuard[ast.Call]:
    """Whether this calls a function of one of these names."""
    if not isinstance(node, ast.Call):
        return False
    called = node.func
    name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
    return name in names


def layer_of(module: str) -> str | None:
    """The layer that an import enters, None for a module that is not ours."""
    parts = module.split(".")
    if parts[0] != "ddltrace":
        return None
    return parts[1] if len(parts) > 1 and parts[1] in LAYERS else "face"


def import_graph(*, at_import: bool = False, entry_points: bool = False) -> nx.DiGraph:
    """Our modules, each with an edge to every one of ours that it imports.

    Args:
        at_import: Only what is imported when the module is imported.
        entry_points: Also what is imported by entry point.
    """
    graph: nx.DiGraph = nx.DiGraph()
    for name, path in module_files().items():
        layer = layer_of(name)
        assert layer is not None
        graph.add_node(name)
        for imported in imports_in(layer, path):
            target = _our_module(imported.module)
            left_out = (at_import and not imported.at_import) or (
                imported.by_entry_point and not entry_points
            )
            if target and target != name and not left_out:
                graph.add_edge(name, target)
    return graph


def _our_module(imported: str) -> str:
    """The module of ours that holds an imported name; empty if none does."""
    while imported and imported not in module_files():
        imported = imported.rpartition(".")[0]
    return imported


def circles_in(graph: nx.DiGraph) -> list[list[str]]:
    """Groups of modules that reach each other, the largest first."""
    groups = (sorted(group) for group in nx.strongly_connected_components(graph))
    return sorted((group for group in groups if len(group) > 1), key=len, reverse=True)


def longest_chain(graph: nx.DiGraph) -> list[str]:
    """The longest chain of modules of which each imports the next; of a circle, one module."""
    condensed = nx.condensation(graph)
    members = condensed.nodes.data("members")
    return [min(members[group]) for group in nx.dag_longest_path(condensed)]


def closure(graph: nx.DiGraph, modules: set[str]) -> set[str]:
    """Some modules and everything that they import, directly or not."""
    return modules.union(*(nx.descendants(graph, module) for module in modules))


def first_imports(module: str, command: str) -> set[str]:
    """The modules of ours that the module of a command imports for this command."""
    layer = layer_of(module)
    assert layer is not None
    path = module_files()[module]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    function = f"{command}_" if keyword.iskeyword(command) else command
    others = [
        range(node.lineno, (node.end_lineno or node.lineno) + 1)
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name not in _needed(tree, function)
    ]
    return {
        target
        for imported in imports_in(layer, path)
        if (target := _our_module(imported.module))
        and not any(imported.line in lines for lines in others)
    }


def _needed(tree: ast.Module, function: str) -> set[str]:
    """A function of a module, the functions that it calls, and the commands of its group."""
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    calls = nx.DiGraph([(function, function)])
    for name, node in functions.items():
        decorators = {id(inner) for top in node.decorator_list for inner in ast.walk(top)}
        names = [inner for inner in ast.walk(node) if isinstance(inner, ast.Name)]
        own = {inner.id for inner in names if isinstance(inner.ctx, ast.Store)}
        for inner in names:
            if inner.id in functions.keys() - own:
                # A group's decorator adds the function to the group.
                edge = (inner.id, name) if id(inner) in decorators else (name, inner.id)
                calls.add_edge(*edge)
    return {function} | nx.descendants(calls, function)


if __name__ == "__main__":
    main()
