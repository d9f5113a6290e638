"""The model card: what was replaced, by what, with which data and budget, and what came of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from segue.convert.data import Data
from segue.reporting.formatting import duration, memory, significant


def text(record: dict[str, Any], data: Data) -> str:
    """Write the card as Markdown, with the front matter of the Hugging Face Hub."""
    conversion, base, budget = record["conversion"], record["base"], record["budget"]
    name, source = _short(base["name"]), _short(conversion["data"])
    sites = record["segue"]["teachers"]
    kept = f" Kept as they were: `{conversion['keep']}`." if conversion["keep"] else ""
    seen = f"{budget['tokens']:,} tokens" if budget["tokens"] else f"{budget['examples']:,} examples"
    batch = conversion["batch"] * conversion["accumulate"]
    return f"""---
library_name: segue
base_model: {name}
tags: [segue, module-replacement]
---

# {name.split("/")[-1]}, converted

{len(sites)} modules of `{name}` were replaced by `{conversion["student"]}` with [Segue](https://pypi.org/project/segue).

```python
import segue

model = segue.from_pretrained("THIS_FOLDER")  # a plain transformers model, in evaluation mode
```

Load it with Segue: transformers alone would build the original's modules and leave them random.

## What came of it

{_quality(record, data)}
{_speed(record)}
![The curve of the conversion](curve.png)

## What was done

- **Replaced**: `{conversion["sites"]}` ({len(sites)} sites), each by `{conversion["student"]}`.{kept}
- **Method**: `{conversion["method"]}`; trained: {conversion["train"]}; seed {conversion["seed"]}.
- **Data**: `{source}`: {data.train_size}; judged by {data.held_size}, never trained on.
- **Budget**: {budget["steps"]:,} steps of {batch}, {seen}, {duration(budget["seconds"])}.
- **Original**: `{name}`, sha256 of its weights in float32 `{base["hash"][:16]}…`
- **Versions**: {", ".join(f"{name} {version}" for name, version in record["versions"].items())}

The whole plan is in `segue.json`, every look at the model in `curve.json`. Measured once, with one seed, on the data above:
other data, longer texts and other seeds give other numbers. `segue eval` compares the two models further.
"""


def _short(name: str) -> str:
    """Leave out where a folder or file lay on the machine of the conversion; ids of the hub stay whole."""
    return Path(name).name if Path(name).is_absolute() else name


def _quality(record: dict[str, Any], data: Data) -> str:
    quality, task = record["quality"], data.task
    rows = ["| | original | converted |", "|---|---|---|"]
    rows.append(f"| {quality['name']} | {_of(task, quality, 'original')} | {_of(task, quality, 'converted')} |")
    for name in quality["original"]:
        if name != quality["name"]:
            rows.append(f"| {name} | {quality['original'][name]:.4f} | {quality['converted'][name]:.4f} |")
    return "\n".join(rows) + "\n"


def _of(task: Any, quality: dict[str, Any], which: str) -> str:
    return f"{task.of(quality[which]):.4g}{task.unit}"


def _speed(record: dict[str, Any]) -> str:
    speed = record["speed"]
    lines = ["| speed | original | converted |", "|---|---|---|"]
    for context in sorted({row["context"] for row in speed["rows"]}):
        by = {row["model"]: row for row in speed["rows"] if row["context"] == context}
        cells = [_cell(by[name], speed["unit"]) for name in ("original", "converted")]
        lines.append(f"| {context:,} {speed['of']} | {cells[0]} | {cells[1]} |")
    return "\n".join(lines) + "\n\nMeasured side by side on the machine of the conversion.\n"


def _cell(row: dict[str, Any], unit: str) -> str:
    cache = f", cache {memory(row['cache_bytes'])}" if "cache_bytes" in row else ""
    return f"{significant(row['tokens_per_second'])} {unit}/s{cache}"
