"""Writes _C.pyi, the types of the compiled module tensorferry._C, beside the module: write_stub.py FOLDER

pybind11-stubgen takes the types from the signatures in the module's docstrings. Added here is what mypy --strict wants
beside them: parameters of generic types, and a type for every argument. FOLDER is that of the package, tensorferry,
whose Python files are not imported.
"""

import importlib
import sys
import types
from contextvars import ContextVar
from pathlib import Path

try:
    from pybind11_stubgen import CLIArgs, arg_parser, stub_parser_from_args
except ImportError:
    print(f"pybind11-stubgen is not installed for {sys.executable}: no {sys.argv[1]}/_C.pyi for type checkers")
    sys.exit()
from pybind11_stubgen.printer import Printer
from pybind11_stubgen.structs import (
    Argument,
    Docstring,
    Function,
    Identifier,
    Property,
    QualifiedName,
    ResolvedType,
    TypeVar_,
)

MODULE = "tensorferry._C"
TYPE_VARIABLES = ["_S", "_T"]  # that the docstrings use
LEFT_OUT = ["__getattribute__", "__reduce_ex__"]  # methods that only confuse type checkers
PARAMETERS = {  # of generic types that stand without
    "list": "typing.Any",
    "dict": "typing.Any, typing.Any",
    "tuple": "typing.Any, ...",
    "collections.abc.Callable": "..., typing.Any",
    "tensorferry._C.Future": "typing.Any",
    "tensorferry._C.RRef": "typing.Any",
}


class Parser(type(stub_parser_from_args(arg_parser().parse_args([MODULE], namespace=CLIArgs())))):
    def handle_module(self, path, module):
        made = self.call_with_local_types(TYPE_VARIABLES, lambda: super(Parser, self).handle_module(path, module))
        made.type_vars += [TypeVar_(Identifier(name)) for name in TYPE_VARIABLES]
        made.sub_modules.clear()  # _testing
        made.attributes = [each for each in made.attributes if each.name != "__all__"]  # the module has none
        return made

    def handle_class(self, path, class_):
        made = super().handle_class(path, class_)
        made.methods = [each for each in made.methods if each.function.name not in LEFT_OUT]
        if hasattr(class_, "__class_getitem__"):
            if made.bases:  # that of Future is torch's Future, which is generic too
                made.bases = [QualifiedName.from_str("torch._C.Future[typing.Any]")]
            made.bases.append(QualifiedName.from_str("typing.Generic[_T]"))
        return made

    def handle_property(self, path, prop):
        if not isinstance(prop, types.GetSetDescriptorType):
            return super().handle_property(path, prop)
        # Of a class made without pybind11. Its docstring is "type: text".
        returns, _, text = prop.__doc__.partition(": ")
        getter = Function(path[-1], [Argument(Identifier("self"))], self.parse_annotation_str(returns), Docstring(text))
        return Property(path[-1], None, getter=getter)

    def handle_function(self, path, function):
        made = super().handle_function(path, function)
        for each in made:
            for argument in each.args:
                if argument.annotation is None and argument.name not in ("self", "cls"):
                    argument.annotation = self.parse_annotation_str("typing.Any")
            each.returns = each.returns or self.parse_annotation_str("typing.Any")
        return made

    def handle_attribute(self, path, value):
        made = super().handle_attribute(path, value)
        if made and isinstance(value, ContextVar):
            made.annotation = self.parse_annotation_str("contextvars.ContextVar[typing.Any]")
        return made

    def parse_type_str(self, annotation_str):
        made = super().parse_type_str(annotation_str)
        parameters = PARAMETERS.get(str(made.name)) if isinstance(made, ResolvedType) and not made.parameters else None
        return super().parse_type_str(f"{made.name}[{parameters}]") if parameters else made

    def _get_value_parent_module_name(self, value):
        """Takes Shared and Published for the module's own: they carry the names of the modules that publish them."""
        name = super()._get_value_parent_module_name(value)
        return MODULE if name and name.startswith("tensorferry") else name


def main(folder: Path) -> None:
    import torch  # noqa: F401  # loads the libraries that _C links against

    package = types.ModuleType("tensorferry")
    package.__path__ = [str(folder)]
    sys.modules["tensorferry"] = package
    module = importlib.import_module(MODULE)
    parser = Parser()
    parsed = parser.handle_module(QualifiedName.from_str(MODULE), module)
    parser.finalize()
    lines = Printer(invalid_expr_as_ellipses=False).print_module(parsed)
    stub = folder / "_C.pyi"
    stub.unlink(missing_ok=True)
    stub.write_text("\n".join(lines) + "\n")


main(Path(sys.argv[1]))
