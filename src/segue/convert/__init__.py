"""Conversion: a pretrained model in, a folder with the converted one out; what `segue convert` and `segue eval` do.

After `import segue.convert` a converted folder also loads with transformers' Auto classes.
"""

from typing import TYPE_CHECKING, Any

from segue.convert.auto import register

if TYPE_CHECKING:
    from segue.convert.hub import push_to_hub
    from segue.convert.pretrained import from_pretrained

__all__ = ["from_pretrained", "push_to_hub"]

register()


def __getattr__(name: str) -> Any:
    if name in __all__:
        from segue.convert import hub, pretrained  # late: the command reads its options without torch

        return getattr(hub if name == "push_to_hub" else pretrained, name)
    raise AttributeError(f"module 'segue.convert' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
