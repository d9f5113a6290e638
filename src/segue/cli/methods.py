"""`segue methods`: what each method is made of."""

from __future__ import annotations

from rich.table import Column, Table

from segue.cli.terminal import console, print_json, say
from segue.lab import variants

PARTS = ("gate", "schedule", "guidance", "distill")


def show(*, everything: bool, as_json: bool) -> None:
    """Print the methods, or with `everything` the lab's variants of them too."""
    shown = (
        list(variants.ALL.values()) if everything else [one for one in variants.ALL.values() if one.name in variants.METHODS]
    )
    plans = {one: one.plan(sites="*") for one in shown}
    if as_json:
        print_json([{"name": one.name, "label": one.label, "plan": plan.to_dict()} for one, plan in plans.items()])
        return
    table = Table(Column("name", no_wrap=True), *PARTS, "in figures", title="Methods")
    for one, plan in plans.items():
        parts = [getattr(plan, name) for name in PARTS]
        table.add_row(one.name, *("-" if part is None else type(part).__name__ for part in parts), one.label)
    console.print(table)
    if not everything:
        say(f"`segue methods --all` lists {len(variants.ALL) - len(shown)} variants too.")
    say("'paper' stands for the first seven, 'all' for every one.")
    say("Next: segue run --method NAME, or segue convert --help.")
