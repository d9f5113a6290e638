"""Load a converted model where nothing but torch, transformers and Segue is installed: run by the tests as a process."""

from __future__ import annotations

import json
import re
import sys
from importlib import metadata


def needed(*names: str) -> set[str]:
    """Return these distributions and all that they require, extras left out."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if name in found:
            continue
        try:
            required = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        found.add(name)
        waiting += [re.split(r"[^\w.-]", line)[0] for line in required if "extra ==" not in line]
    return found


class Absent:
    """Hide packages, as if they were not installed."""

    def __init__(self, finder, hidden: set[str]) -> None:
        self.finder = finder
        self.hidden = hidden

    def __getattr__(self, name: str):
        return getattr(self.finder, name)

    def find_spec(self, name: str, path=None, target=None):
        return None if name.split(".")[0] in self.hidden else self.finder.find_spec(name, path, target)


def main(folder: str) -> None:
    there = needed("torch", "transformers", "safetensors")
    top = metadata.packages_distributions()
    hidden = {module for module, names in top.items() if not there & {re.sub(r"[-_.]+", "-", n).lower() for n in names}}
    hidden -= {"segue"}
    assert {"accelerate", "matplotlib", "datasets", "sklearn", "pyarrow", "PIL", "gguf", "torchvision", "peft"} <= hidden
    hidden |= {"typer", "rich"}  # which transformers brings for its own command
    sys.meta_path[:] = [Absent(finder, hidden) for finder in sys.meta_path]

    import torch

    import segue

    torch.set_num_threads(1)
    model = segue.from_pretrained(folder)
    ids = torch.arange(40).reshape(2, 20) * 7 % 290 + 4
    with torch.no_grad():
        logits = model(ids).logits
        tokens = [model.generate(ids, max_new_tokens=12, do_sample=False, use_cache=use).tolist() for use in (True, False)]
    assert not hidden & {name.split(".")[0] for name in sys.modules}
    said = {"logits": logits.flatten().view(torch.int32).tolist(), "tokens": tokens, "kind": type(model).__name__}
    print(json.dumps(said | {"training": model.training, "module": type(model).__module__}))


if __name__ == "__main__":
    main(sys.argv[1])
