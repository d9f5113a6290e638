"""`segue sites`: the modules of a model, by pattern or one by one."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.table import Column, Table
from torch import nn

from segue.cli.terminal import command_line, console, print_json, say
from segue.lab.models import build, kinds
from segue.sites import Site, select


def show(model: str, pattern: str | None, *, as_json: bool) -> None:
    """Print the sites that a pattern matches; without one, the patterns of a model."""
    built = build(model)
    size = sum(parameter.numel() for parameter in built.parameters())
    if pattern is None:
        found = kinds(built)
        if as_json:
            print_json({"model": model, "parameters": size, "patterns": [asdict(kind) for kind in found]})
            return
        title = f"{model}: modules that can be replaced"
        table = Table(Column("pattern", no_wrap=True), "modules", "parameters", "module", title=title)
        for kind in found:
            table.add_row(kind.pattern, str(kind.count), f"{kind.parameters:,}", kind.module)
        console.print(table)
        say(f"Next: {command_line('sites', model, 'PATTERN')} shows the sites of one pattern.")
        return
    rows = [_described(built, site) for site in select(built, pattern)]
    replaced = sum(row["parameters"] for row in rows)
    if as_json:
        print_json({"model": model, "parameters": size, "replaced": replaced, "pattern": pattern, "sites": rows})
        return
    table = Table("#", Column("site", no_wrap=True), "parameters", "module", "shapes")
    table.title = f"{len(rows)} sites match {pattern!r}"
    for row in rows:
        shapes = ", ".join(f"{name} {'x'.join(map(str, shape))}" for name, shape in row["shapes"].items() if len(shape) > 1)
        table.add_row(str(row["index"]), ", ".join(row["names"]), f"{row['parameters']:,}", row["module"], shapes)
    console.print(table)
    say(f"{replaced:,} of {size:,} parameters ({replaced / max(1, size):.1%}) would be replaced.")
    say(f"Next: {command_line('cost', model, 'METHOD', '--sites', pattern)} counts what a replacement costs.")


def _described(model: nn.Module, site: Site) -> dict[str, Any]:
    module = model.get_submodule(site.name)
    return {
        "index": site.index,
        "names": list(site.names),
        "module": type(module).__name__,
        "parameters": sum(parameter.numel() for parameter in module.parameters()),
        "shapes": {name: list(parameter.shape) for name, parameter in module.named_parameters()},
    }
