"""Read a user's torchtitan input as one table of dotted names: a module, flags, TOML or JSON. Nothing is run."""

from __future__ import annotations

import ast
import re
import shlex
from typing import Any

from meshwright.base.files import parse_json, parse_toml
from meshwright.errors import InputError
from meshwright.frameworks.shared.config_fields import flat
from meshwright.frameworks.torchtitan.known import CONFIGS

_CHECKPOINTING = {"FullAC": "full", "SelectiveAC": "selective", "MemoryBudgetAC": "memory-budget"}


def table_of(text: str, file: str) -> dict[str, Any]:
    """Return dotted names and values, those of the base configuration included."""
    if text.lstrip().startswith("{"):
        return _written_out(parse_json(text, file))
    if re.search(r"(?m)^\s*(def|from|import) ", text):
        return _module(text, file)
    if re.search(r"(?m)^\s*\[[\w.]+\]\s*$", text):
        return _written_out(parse_toml(text, file))
    return _flags(text, file)


def _written_out(table: Any) -> dict[str, Any]:
    """Return the names of a saved configuration (`debug.save_config_file`), or TOML of versions before 0.2."""
    found = flat(table)
    if "activation_checkpoint.mode" in found:
        found["activation_checkpoint"] = found.pop("activation_checkpoint.mode")
    if "model_spec.name" in found:
        found["model_spec"] = (found.pop("model_spec.name"), found.pop("model_spec.flavor", ""))
        found = {name: value for name, value in found.items() if not name.startswith("model_spec.")}
    return found


def _flags(text: str, file: str) -> dict[str, Any]:
    """Return the values of flags, in a script or alone.

    An example is `--module llama3 --config llama3_8b --parallelism.tensor_parallel_degree 8`.
    """
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise InputError(f"is no command: {error}", file=file) from None
    found: dict[str, Any] = {}
    i = 0
    while i < len(words):
        name, equals, value = words[i].partition("=")
        i += 1
        if name == "CONFIG":  # CONFIG=llama3_8b ./run_train.sh, torchtitan's own script
            found["config"] = value
        if name.startswith(("activation-checkpoint:", "activation_checkpoint:")):
            found["activation_checkpoint"] = name.partition(":")[2]
        if not name.startswith("--"):
            continue
        name = name[2:].replace("-", "_")
        if not equals and i < len(words) and not words[i].startswith("--"):
            value, equals = words[i], "="
            i += 1
        if not equals:
            head, _, last = name.rpartition(".")
            on = not last.startswith("no_")
            name, value = f"{head}.{last.removeprefix('no_')}" if head else last, str(on)
        found[name] = _literal(value)
    if not any("." in name for name in found) and "config" not in found:
        raise InputError(
            "holds nothing of torchtitan's", file=file, valid="a module, or flags such as --config llama3_8b"
        )
    known = {
        "nproc_per_node",
        "nnodes",
        "rdzv_backend",
        "rdzv_endpoint",
        "rdzv_id",
        "local_ranks_filter",
        "role",
        "tee",
    }
    found = {name: value for name, value in found.items() if name not in known}
    return _started_from(str(found.pop("config", "")), file) | found


def _literal(text: str) -> Any:
    if text.lower() in {"true", "false"}:
        return text.lower() == "true"
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text


def _started_from(name: str, file: str) -> dict[str, Any]:
    """Return the values that one of torchtitan's own configurations sets."""
    if not name:
        return {}
    if name not in CONFIGS:
        raise InputError(f"the configuration {name} is not known here", file=file, field="--config",
                         valid=", ".join(CONFIGS))  # fmt: skip
    return dict(CONFIGS[name])


def _module(text: str, file: str) -> dict[str, Any]:
    """Return the values of the one function that makes a `Trainer.Config`, without running it."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = getattr(error, "lineno", 0) or 0
        raise InputError(
            f"is no Python: {error}", file=file, line=line, column=getattr(error, "offset", 0) or 0
        ) from None
    modules = {
        alias.asname or alias.name: (node.module or "").rpartition(".")[2]
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and _makes_config(node)]
    if len(functions) != 1:
        names = ", ".join(function.name for function in functions) or "none"
        raise InputError(f"functions that return a Trainer.Config: {names}", file=file, valid="one in the file")
    found: dict[str, Any] = {}
    for node in ast.walk(functions[0]):
        if isinstance(node, ast.Call) and _name(node.func) == "model_registry" and node.args:
            found["model_spec"] = (modules.get("model_registry", ""), _value(node.args[0]))
            for keyword in node.keywords:
                found |= {"converters": _converter(keyword.value)} if keyword.arg == "converters" else {}
    for statement in functions[0].body:
        found |= _statement(statement, file)
    return found


def _makes_config(function: ast.FunctionDef) -> bool:
    names = {_name(node.func) for node in ast.walk(function) if isinstance(node, ast.Call)}
    return "Trainer.Config" in names or bool(names & set(CONFIGS))


def _statement(statement: ast.stmt, file: str) -> dict[str, Any]:
    """Return the values of one statement of the function.

    Known are `config = Trainer.Config(...)`, `config = llama3_8b()`, `config.training.seq_len = 8192`, and `return` of
    a call.
    """
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target, value = _name(statement.targets[0]), statement.value
        if "." in target:
            return _argument(target.partition(".")[2], value)
    elif isinstance(statement, ast.Return) and statement.value is not None:
        value = statement.value
    else:
        return {}
    if isinstance(value, ast.Call) and _name(value.func) == "Trainer.Config":
        found: dict[str, Any] = {}
        for keyword in value.keywords:
            found |= _argument(keyword.arg or "**", keyword.value)
        return found
    if isinstance(value, ast.Call) and not value.args and _name(value.func) in CONFIGS:
        return _started_from(_name(value.func), file)
    return {}


def _argument(name: str, value: ast.expr) -> dict[str, Any]:
    """Return one argument: a section as its own names, anything else as its value."""
    if name in {"model_spec", "loss", "dataloader", "optimizer"}:
        return {}
    if name == "activation_checkpoint":
        chosen = _name(value.func).partition(".")[0] if isinstance(value, ast.Call) else "none"
        return {name: _CHECKPOINTING.get(chosen, chosen)}
    if isinstance(value, ast.Call):
        return {f"{name}.{keyword.arg}": _value(keyword.value) for keyword in value.keywords}
    return {name: _value(value)}


def _converter(value: ast.expr) -> str:
    names = [_name(node.func) for node in ast.walk(value) if isinstance(node, ast.Call)]
    return names[0].partition(".")[0] if names else ""


def _value(node: ast.expr) -> Any:
    """Return a literal, or the text of an expression."""
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, MemoryError, RecursionError):
        return ast.unparse(node)


def _name(node: ast.expr) -> str:
    """Return a dotted name, or ""."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{_name(node.value)}.{node.attr}"
    return ""
