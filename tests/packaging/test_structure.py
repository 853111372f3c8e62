"""The source has no import circles, and each class name has one meaning."""

import ast
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("actors", "bench", "frontends", "kernels", "trouper")

MAX_RUN_FUNCTIONS = 12  # never to be raised: actors, threads and devices run, functions have verbs


def module_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "trouper" else ("trouper", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@pytest.fixture(scope="module")
def trees():
    """Parse every module, by its name; the links in trouper/ are not followed."""
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    return {module_of(path): ast.parse(path.read_text()) for path in paths}


def imports(trees):
    """Return the project's modules that each module imports, at its top or inside a function."""
    found = {}
    for name, tree in trees.items():
        found[name] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                found[name] |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                for alias in node.names:
                    whole = f"{node.module}.{alias.name}"
                    found[name].add(whole if whole in trees else node.module)
        found[name] &= trees.keys() - {name}
    return found


def circles(graph):
    """Find groups of modules that all reach each other: strongly connected components, by Tarjan's algorithm."""
    index, low, stack, found = {}, {}, [], []

    def visit(name):
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in graph[name]:
            if other not in index:
                visit(other)
            if other in stack:
                low[name] = min(low[name], low[other])
        if low[name] == index[name]:
            start = stack.index(name)
            group, stack[start:] = stack[start:], []
            if len(group) > 1:
                found.append(sorted(group))

    for name in graph:
        if name not in index:
            visit(name)
    return found


def test_a_circle_is_seen():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}
    assert circles(graph) == [["b", "c"]]


def test_modules_import_each_other_in_no_circle(trees):
    assert circles(imports(trees)) == []


def test_folders_of_actors_form_no_circle(trees):
    rooms = defaultdict(set)
    for name, others in imports(trees).items():
        for one, other in ((name, other) for other in others):
            rooms_of_both = [tuple(module.split(".")[:3]) for module in (one, other)]
            if all(room[:2] == ("trouper", "actors") for room in rooms_of_both):
                for room, target in pairwise(rooms_of_both):
                    if room != target:
                        rooms[room].add(target)
    graph = {room: rooms[room] for room in [*rooms, *set().union(*rooms.values())]}
    assert circles(graph) == []


def test_a_class_name_means_one_thing(trees):
    places = defaultdict(list)
    for name, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(name)
    assert {name: modules for name, modules in places.items() if len(modules) > 1} == {}


def test_few_functions_are_just_called_run(trees):
    found = [
        name
        for name, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == "run"
    ]
    assert len(found) <= MAX_RUN_FUNCTIONS, found
