"""docs/api.md: the public names with their signatures and docstrings, read from the source without importing it.

python docs/make_api.py     writes the page; a test holds it current
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "api.md"
HEAD = """# Public names

Made by `python docs/make_api.py` from the docstrings. What is not listed here may change without notice; how to add
to onnxq is in [extending.md](extending.md).
"""
# Package -> what it is for; every name of its `__all__` is public, or of these names where some are given.
PACKAGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "onnxq": ("The engine.", ()),
    "onnxq.compat": (
        "For scripts made for onnxruntime.quantization ([from-onnxruntime](from-onnxruntime.md)).",
        (),
    ),
    "onnxq.observers": ("To add an observer.", ("Observer", "register_observer")),
    "onnxq.backends": (
        "To add a target.",
        ("Target", "Capability", "PlacementRule", "Output", "Candidate"),
    ),
    "torch_frontend.quant_model": ("The PyTorch front end.", ()),
    "torch_frontend.export": ("From PyTorch to ONNX.", ()),
    "torch_frontend.qat": ("Training; also as `from onnxq import qat`.", ()),
    "torch_frontend.reconstruct": ("Rounding and ranges learned block by block.", ()),
    "torch_frontend.quantizers": ("To add a quantizer.", ("Quantizer", "register_quantizer")),
    "torch_frontend.qmodules": (
        "To add a quantized module.",
        ("Call", "Op", "WeightQuantized", "register_qmodule"),
    ),
}
Definition = ast.FunctionDef | ast.ClassDef


def read_module(module: str) -> ast.Module:
    """The syntax tree of a module of this repository."""
    path = ROOT.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text(encoding="utf-8"))


def list_public(module: str) -> list[str]:
    """The names in `__all__`; where that is computed, those imported under their own names, `import a as a`."""
    tree = read_module(module)
    imports = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))
    public = sorted(
        alias.name for node in imports for alias in node.names if alias.asname == alias.name
    )
    if public:
        return public
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names: list[str] = ast.literal_eval(node.value)
            return names
    raise LookupError(f"{module} has no __all__")


def find_definition(module: str, name: str) -> Definition | None:
    """The function or class behind a public name, through any number of imports; None for other values."""
    tree = read_module(module)
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == name:
            return node
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.ImportFrom)
            and node.module is not None
            and node.module.startswith(("onnxq", "torch_f"))
        ):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return find_definition(node.module, alias.name)
    return None


def write_signature(node: ast.FunctionDef) -> str:
    """`def name(...) -> type`, a parameter a line where it is long."""
    arguments = ast.unparse(node.args)
    result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    line = f"def {node.name}({arguments}){result}"
    if len(line) <= 100:
        return line
    parts = re.split(r", (?=[\w*]+(?::|,|$|=))", arguments)
    return f"def {node.name}(\n    " + ",\n    ".join(parts) + f",\n){result}"


def describe_class(node: ast.ClassDef) -> Iterator[str]:
    """Fields, then public methods with their docstrings."""
    bases = ", ".join(ast.unparse(base) for base in node.bases)
    head = f"class {node.name}({bases})" if bases else f"class {node.name}"
    public = [
        one
        for one in node.body
        if isinstance(one, ast.AnnAssign) and not ast.unparse(one.target).startswith("_")
    ]
    fields = [f"    {ast.unparse(_PlainTypes().visit(one))}" for one in public]
    made = [one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"]
    yield write_code(
        "\n".join(
            [
                head + (":" if fields or made else ""),
                *fields,
                *(_indent(write_signature(m)) for m in made),
            ]
        )
    )
    yield write_prose(node)
    for method in node.body:
        if isinstance(method, ast.FunctionDef) and not method.name.startswith("_"):
            is_value = any(ast.unparse(one).endswith("property") for one in method.decorator_list)
            title = (
                f"`{node.name}.{method.name}`"
                if is_value
                else f"`{node.name}.{write_signature(method)[4:]}`"
            )
            yield f"- {' '.join(title.split())}: {_first_paragraph(method)}\n"


class _PlainTypes(ast.NodeTransformer):
    """Leaves out what types of fields say of their JSON: Written[X] and Annotated[X, ...] are X."""

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        self.generic_visit(node)
        name, inner = ast.unparse(node.value), node.slice
        if name == "Annotated" and isinstance(inner, ast.Tuple):
            return inner.elts[0]
        return inner if name == "Written" else node


def _indent(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())


def _first_paragraph(node: Definition) -> str:
    return " ".join((ast.get_docstring(node) or "").partition("\n\n")[0].split())


def write_code(text: str) -> str:
    """A block of Python."""
    return f"```python\n{text}\n```\n"


def write_prose(node: Definition) -> str:
    """The docstring; lines that are not plain paragraphs stay as they were set."""
    return (ast.get_docstring(node) or "") + "\n"


def make_page() -> str:
    """The text of docs/api.md."""
    parts = [HEAD]
    for package, (purpose, chosen) in PACKAGES.items():
        parts.append(f"## {package}\n\n{purpose}\n")
        for name in chosen or list_public(package):
            node = find_definition(package, name)
            if node is None:
                continue
            parts.append(f"### {package}.{name}\n")
            parts += describe_class(node) if isinstance(node, ast.ClassDef) else [
                write_code(write_signature(node)), write_prose(node)
            ]  # fmt: skip
    return "\n".join(parts).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(make_page(), encoding="utf-8")
