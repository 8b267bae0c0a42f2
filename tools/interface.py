"""The public interface of a kernel, read from its sources without importing them, and what breaks its callers.

An interface maps dotted names such as `linear_cross_entropy`, `Plan.workspace` or `reference.linear_cross_entropy` to
signatures. It holds what `__all__` exports: functions, public methods and attributes of classes, and the same of
submodules.
"""

import ast
from dataclasses import dataclass
from pathlib import Path

ATTRIBUTE = None  # the signature of what is no function


@dataclass(frozen=True)
class Parameter:
    name: str
    positional: bool
    keyword: bool
    default: str | None = None
    variadic: bool = False


Signature = tuple[Parameter, ...] | None
Interface = dict[str, Signature]


def is_public(name: str) -> bool:
    return not name.startswith("_") or name in ("__init__", "__call__")


def signature(function: ast.FunctionDef, bound: bool) -> tuple[Parameter, ...]:
    """The parameters of `function`, without `self` when it is `bound`."""
    arguments = function.args
    plain = [(item, False) for item in arguments.posonlyargs] + [(item, True) for item in arguments.args]
    defaults = [None] * (len(plain) - len(arguments.defaults)) + [ast.unparse(item) for item in arguments.defaults]
    found = [
        Parameter(item.arg, True, keyword, default) for (item, keyword), default in zip(plain, defaults, strict=True)
    ]
    if arguments.vararg:
        found.append(Parameter(arguments.vararg.arg, True, False, variadic=True))
    for item, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        found.append(Parameter(item.arg, False, True, None if default is None else ast.unparse(default)))
    if arguments.kwarg:
        found.append(Parameter(arguments.kwarg.arg, False, True, variadic=True))
    static = any(ast.unparse(item) == "staticmethod" for item in function.decorator_list)
    return tuple(found[1:] if bound and not static else found)


def module_file(folder: Path, name: str) -> Path | None:
    """The file of submodule `name` of the package in `folder`."""
    for path in (folder / f"{name}.py", folder / name / "__init__.py"):
        if path.is_file():
            return path
    return None


def definition(path: Path, name: str) -> tuple[Path, ast.stmt] | Path | None:
    """What `name` means in the module at `path`: a definition and its file, a submodule's file, or nothing known."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == name:
            return path, node
        if isinstance(node, ast.ImportFrom) and node.level:
            for alias in node.names:
                if (alias.asname or alias.name) != name:
                    continue
                folder = path.parents[node.level - 1]
                if node.module is None:
                    return module_file(folder, alias.name)
                source = module_file(folder, node.module.replace(".", "/"))
                return definition(source, alias.name) if source else None
    return None


def exported(package: Path) -> list[str]:
    """The literal `__all__` of the package in folder `package`."""
    for node in ast.parse((package / "__init__.py").read_text()).body:
        if isinstance(node, ast.Assign) and any(getattr(target, "id", "") == "__all__" for target in node.targets):
            return ast.literal_eval(node.value)
    raise ValueError(f"{package / '__init__.py'} has no literal __all__")


def describe(name: str, node: ast.stmt) -> Interface:
    if isinstance(node, ast.FunctionDef):
        return {name: signature(node, bound=False)}
    found: Interface = {name: ATTRIBUTE}
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and is_public(item.target.id):
            found[f"{name}.{item.target.id}"] = ATTRIBUTE
        elif isinstance(item, ast.Assign):
            found |= {f"{name}.{target.id}": ATTRIBUTE for target in item.targets if is_public(target.id)}
        elif isinstance(item, ast.FunctionDef) and is_public(item.name):
            is_property = any(ast.unparse(mark).endswith("property") for mark in item.decorator_list)
            found[f"{name}.{item.name}"] = ATTRIBUTE if is_property else signature(item, bound=True)
    return found


def read_interface(package: Path) -> Interface:
    """The interface of the kernel whose sources lie in the folder `package`."""
    interface: Interface = {}
    for name in exported(package):
        match definition(package / "__init__.py", name):
            case None:
                interface[name] = ATTRIBUTE
            case (_, node):
                interface |= describe(name, node)
            case path:
                interface[name] = ATTRIBUTE
                for node in ast.parse(path.read_text()).body:
                    if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and is_public(node.name):
                        interface |= describe(f"{name}.{node.name}", node)
    return interface


def functions_and_layers(package: Path) -> tuple[list[str], list[str]]:
    """What a card lists: exported names that are no submodules, and the classes of `layers` where it is exported."""
    names = exported(package)
    path = module_file(package, "layers") if "layers" in names else None
    layers = [node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)] if path else []
    return [name for name in names if module_file(package, name) is None], layers


def breaking_signature(name: str, old: tuple[Parameter, ...], new: tuple[Parameter, ...]) -> list[str]:
    found = []
    now = {parameter.name: parameter for parameter in new}
    before = [parameter.name for parameter in old if parameter.positional]
    after = [parameter.name for parameter in new if parameter.positional]
    if after[: len(before)] != before:
        found.append(f"{name}: the positional parameters were ({', '.join(before)}), are ({', '.join(after)})")
    swallowed = any(parameter.variadic and parameter.keyword for parameter in new)
    for parameter in old:
        present = now.get(parameter.name)
        if present is None:
            if parameter.keyword and not parameter.positional and (parameter.variadic or not swallowed):
                found.append(f"{name}: the parameter {parameter.name} is gone")
        elif parameter.keyword and not present.keyword:
            found.append(f"{name}: the parameter {parameter.name} is no longer accepted by keyword")
        elif parameter.default is not None and present.default != parameter.default:
            now_is = "required" if present.default is None else present.default
            found.append(f"{name}: the default of {parameter.name} was {parameter.default}, is {now_is}")
    known = {parameter.name for parameter in old}
    for parameter in new:
        if parameter.name not in known and parameter.default is None and not parameter.variadic:
            found.append(f"{name}: the new parameter {parameter.name} is required")
    return found


def breaking_changes(old: Interface, new: Interface) -> list[str]:
    """What callers of `old` would meet in `new`, one line each; empty if `new` serves them all."""
    found = []
    for name, before in old.items():
        if name not in new:
            found.append(f"{name} is gone")
        elif (before is ATTRIBUTE) != (new[name] is ATTRIBUTE):
            found.append(f"{name} changed between function and attribute")
        elif before is not ATTRIBUTE:
            found += breaking_signature(name, before, new[name])
    return found


def additions(old: Interface, new: Interface) -> list[str]:
    """Names and parameters that `new` has beyond `old`."""
    found = [name for name in new if name not in old]
    for name in new:
        if old.get(name) and new[name]:
            known = {parameter.name for parameter in old[name]}
            found += [f"{name}({parameter.name}=)" for parameter in new[name] if parameter.name not in known]
    return found
