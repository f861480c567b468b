"""meshwright models [NAME]"""

from __future__ import annotations

import re
from typing import Any

import click

from meshwright.base.units import count, size
from meshwright.cli.common import as_json, complete_models, console, print_json
from meshwright.models import Layer, Model, Slice, find_preset, presets
from meshwright.plans.job import LARGEST_SEQUENCE

EPILOG = """
\b
Examples:
  meshwright models                          every preset
  meshwright models llama3-70b               one model, layer by layer
  meshwright models llama3-70b --seq 32768   ... at another sequence length
  meshwright models path/to/config.json      any Hugging Face config of a known family
  meshwright models deepseek-v3 --json       exact numbers for programs
"""


@click.command("models", epilog=EPILOG)
@click.argument("name", required=False, shell_complete=complete_models)
@click.option("--seq", type=click.IntRange(1, LARGEST_SEQUENCE), help="Tokens per sample for FLOPs and bytes.")
@as_json
def command(name: str | None, seq: int | None, json_: bool) -> None:
    """List the models known by name, or show what one of them is made of.

    NAME is a preset (spelling is forgiving: Llama-3-70B works too), or the path of a Hugging Face
    config.json. Counts are exact; FLOPs are those of the forward pass, a multiply-add being two.
    """
    if name is None:
        _list(json_)
        return
    model = Model.load(name)
    if seq:
        model.check_seq_len(seq)
    cut = Slice(micro_batch=1, seq_len=seq or model.default_seq_len())
    if json_:
        print_json(_facts(model, cut))
    else:
        _show(model, cut)


def _list(json_: bool) -> None:
    rows = [(preset, Model.preset(preset.name)) for preset in presets().values()]
    if json_:
        keys = ("name", "title", "family", "parameters", "active_parameters", "blocks", "max_seq_len")
        print_json([dict(zip(keys, _row(p.name, p.title, m), strict=True)) for p, m in rows])
        return
    from rich.table import Table

    out = console()
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("name", no_wrap=True)
    table.add_column("model", no_wrap=True, max_width=max(out.width - 76, 6))  # titles are shortened, numbers are not
    table.add_column("family", no_wrap=True)
    for heading in ("parameters", "active", "blocks", "tokens"):
        table.add_column(heading, justify="right", no_wrap=True)
    for preset, model in rows:
        name, title, family, parameters, active, blocks, tokens = _row(preset.name, preset.title, model)
        share = count(active) if active != parameters else ""
        table.add_row(name, title, family, f"{parameters:,}", share, str(blocks), str(tokens))
    out.print(table)


def _row(name: str, title: str, model: Model) -> tuple[str, str, str, int, int, int, int]:
    return name, title, model.family, model.parameters, model.active_parameters, len(model.blocks), model.max_seq_len


def _facts(model: Model, cut: Slice) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "parameters": model.parameters,
        "active_parameters": model.active_parameters,
        "name": model.name,
        "family": model.family,
        "blocks": len(model.blocks),
        "max_seq_len": model.max_seq_len,
        "seq_len": cut.seq_len,
        "micro_batch": cut.micro_batch,
        "precision": cut.precision,
        "forward_flops": round(model.forward_flops(cut)),
        "kept_bytes": {level: round(model.kept_bytes(cut, level)) for level in ("none", "selective", "full")},
    }
    if isinstance(model.reference, str):
        preset = find_preset(model.reference)
        facts |= {"title": preset.title, "aliases": list(preset.aliases), "source": preset.source}
    facts["layers"] = [_layer_facts(layer, cut) for layer in model.layers]
    return facts


def _layer_facts(layer: Layer, cut: Slice) -> dict[str, Any]:
    return {
        "name": layer.name,
        "kind": layer.kind,
        "parameters": layer.parameters,
        "forward_flops": round(layer.forward_flops(cut)),
        "kept_bytes": {level: round(layer.kept_bytes(cut, level)) for level in ("none", "selective", "full")},
        "output_bytes": round(layer.output_bytes(cut)),
        **({"tied_to": layer.tied_to} if layer.tied_to else {}),
    }


def _show(model: Model, cut: Slice) -> None:
    from rich.table import Table
    from rich.text import Text

    out = console()
    title = find_preset(model.reference).title if isinstance(model.reference, str) else model.name
    out.print(Text(f"{title} ({model.family})", style="bold"))
    active = f", {model.active_parameters:,} active per token" if model.active_parameters != model.parameters else ""
    out.print(f"{model.parameters:,} parameters{active}, {len(model.blocks)} blocks")
    out.print(f"one sample of {cut.seq_len} tokens: {count(model.forward_flops(cut))}FLOP forward, {cut.precision}\n")
    table = Table(box=None, pad_edge=False, header_style="bold")
    columns = ["layers", "kind", "", "parameters", "FLOP", "kept: none", "selective", "full", "passed on"]
    narrow = {"kind", "passed on"} if out.width < 112 else set()
    for heading in columns:
        if heading not in narrow:
            table.add_column(heading, no_wrap=True, justify="left" if heading in {"layers", "kind"} else "right")
    for names, layer, repeats in _alike(model):
        kept = [size(layer.kept_bytes(cut, level)) for level in ("none", "selective", "full")]
        flops, passed = count(layer.forward_flops(cut)), size(layer.output_bytes(cut))
        cells = [names, layer.kind, f"x{repeats}" if repeats > 1 else "", f"{layer.parameters:,}", flops, *kept, passed]
        table.add_row(*(cell for heading, cell in zip(columns, cells, strict=True) if heading not in narrow))
    out.print(table)
    if isinstance(model.reference, str):
        out.print(Text(f"\nSource: {find_preset(model.reference).source}", style="dim"), soft_wrap=True)


def _alike(model: Model) -> list[tuple[str, Layer, int]]:
    """Return (name, layer, count): equal layers in one row, in order of first appearance."""
    rows: dict[object, list[Layer]] = {}
    for layer in model.layers:
        rows.setdefault(layer.signature, []).append(layer)
    found = []
    for layers in rows.values():
        patterns = {re.sub(r"(?<=\.)\d+", "*", layer.name) for layer in layers}
        first, last = layers[0].name, layers[-1].name
        several = patterns.pop() if len(patterns) == 1 else f"{first} .. {last}"
        found.append((first if first == last else several, layers[0], len(layers)))
    return found
