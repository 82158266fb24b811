"""The literal texts of all errors and warnings in the package's source."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

#: The fixed parts of a message, in order: what stands between its placeholders.
Parts = tuple[str, ...]

_HOLE = "\0"


def messages(folder: Path) -> dict[Parts, str]:
    """Every message below ``folder``, and where it is: ``file:line``."""
    found: dict[Parts, str] = {}
    for file in sorted(folder.rglob("*.py")):
        tree = ast.parse(file.read_text())
        functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        for scope, call in _calls(tree, tree):
            for argument in call.args:
                for text in _texts(argument, scope, functions):
                    parts = tuple(part for piece in text.split(_HOLE) if len(part := normalised(piece)) > 2)
                    if " " in " ".join(parts):  # a single word is a path or a separator
                        found.setdefault(parts, f"{file.relative_to(folder.parent)}:{call.lineno}")
    return found


def normalised(text: str) -> str:
    """Without differences of white space, quotes and Markdown."""
    return re.sub(r"\s+", " ", re.sub(r"[`'\"\\]", "", text)).strip(" ,;:.()[]")


def _calls(node: ast.AST, scope: ast.AST) -> Iterator[tuple[ast.AST, ast.Call]]:
    """Calls that make an error or a warning, with the function in which they are."""
    for child in ast.iter_child_nodes(node):
        inner = child if isinstance(child, ast.FunctionDef) else scope
        if isinstance(child, ast.Call) and re.search(r"(Error|^warn|^refuse)$", _name(child.func)):
            yield inner, child
        yield from _calls(child, inner)


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _texts(node: ast.AST, scope: ast.AST, functions: dict[str, ast.FunctionDef]) -> Iterator[str]:
    """The strings that an expression can be, with holes for what is not literal."""
    if isinstance(node, ast.Constant):
        if isinstance(node.value, str):
            yield node.value
    elif isinstance(node, ast.JoinedStr):
        yield "".join(str(v.value) if isinstance(v, ast.Constant) else _HOLE for v in node.values)
    elif isinstance(node, ast.Name):  # a string that was put together before
        for statement in ast.walk(scope):
            if isinstance(statement, ast.Assign) and any(getattr(t, "id", "") == node.id for t in statement.targets):
                yield from _texts(statement.value, scope, functions)
    elif isinstance(node, ast.Call) and (function := functions.get(_name(node.func))):  # one that a function returns
        for statement in ast.walk(function):
            if isinstance(statement, ast.Return) and statement.value:
                yield from _texts(statement.value, function, functions)
    else:  # joined from several, one of several
        for child in ast.iter_child_nodes(node):
            yield from _texts(child, scope, functions)
