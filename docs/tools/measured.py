"""Write into every operator's card what stands about it in docs/performance.md and docs/results.md.

python docs/tools/measured.py    # after those pages have changed; a test compares
"""

from __future__ import annotations

from pathlib import Path

DOCS = Path(__file__).parents[1]
CARDS = DOCS / "cards"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
SPEED = "| mixer | exponent, forward |"
RECOVERED = "| operator | Student only | KL distillation | DCR | DCR + DFG | LoLCATs corner |"
NAMES = {  # an operator: its lines in the table of mixers, its line in the table of recovered accuracy
    "Softmax": ("softmax", None),
    "LinearAttention": ("linear", "Linear attention (elu)"),
    "Performer": ("Performer", "Performer"),
    "Linformer": ("Linformer", "Linformer"),
    "SlidingWindow": ("window", "Sliding window"),
    "WindowedLinear": ("window + linear", "Windowed linear"),
    "Nystrom": ("Nystrom", "Nystrom"),
    "Fourier": ("Fourier", "Fourier"),
}


def measured(name: str) -> str:
    """Return the paragraphs of one operator."""
    mixer, operator = NAMES[name]
    headings, *lines = _table(DOCS / "performance.md", SPEED)
    rows = [line for line in lines if line[0].split(", ")[0] == mixer]
    text = "Time against tokens, beside torch's fused softmax ([performance](../performance.md#mixers) says how):\n\n"
    text += _written([headings, *rows]) + "\n"
    if operator is not None:
        headings, *lines = _table(DOCS / "results.md", RECOVERED)
        text += "Share of the teacher's accuracy that the students alone recover, on digits in 200 steps, two seeds "
        text += "([results](../results.md#seven-operators-in-place-of-attention)):\n\n"
        text += _written([headings, *(line for line in lines if line[0] == operator)]) + "\n"
    return text


def up_to_date(name: str) -> str:
    """Return an operator's card with what is measured now."""
    before, _, rest = (CARDS / f"{name}.md").read_text(encoding="utf-8").partition(BEGIN)
    return f"{before}{BEGIN}\n{measured(name)}{END}{rest.partition(END)[2]}"


def _table(page: Path, first: str) -> list[list[str]]:
    """Return the cells of the table that begins with these headings."""
    text = page.read_text(encoding="utf-8")
    lines = text[text.index(first) :].partition("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if not line.startswith("|---")]


def _written(rows: list[list[str]]) -> str:
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


if __name__ == "__main__":
    for each in NAMES:
        (CARDS / f"{each}.md").write_text(up_to_date(each), encoding="utf-8")
