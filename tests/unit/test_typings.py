"""The stubs of typings/ say what the installed libraries have."""

import ast
from importlib import import_module
from pathlib import Path

import transformers

STUB = Path(__file__).parents[2] / "typings" / "transformers" / "__init__.pyi"


def test_classes_of_transformers_are_where_the_stub_says() -> None:
    tree = ast.parse(STUB.read_text(encoding="utf-8"))
    listed = [(node.module, name.name) for node in tree.body if isinstance(node, ast.ImportFrom) for name in node.names]
    assert listed
    for module, name in listed:
        assert getattr(import_module(str(module)), name) is getattr(transformers, name), name
