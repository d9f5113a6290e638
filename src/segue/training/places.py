"""Places of a running handover, as errors name them: the student, the teacher or the backbone."""

from __future__ import annotations

from segue.core.handover import Handover
from segue.core.shortening import finished_name


def split_name(name: str, handover: Handover | None) -> tuple[str, str, str]:
    """Return the site, the side (student, teacher) and the name inside it; two empty strings and the name elsewhere."""
    for site in () if handover is None else handover.sites:
        for alias in site.names:
            if name == alias:
                return site.name, "", ""
            for side in ("student", "teacher"):
                if name == f"{alias}.{side}" or name.startswith(f"{alias}.{side}."):
                    return site.name, side, name[len(f"{alias}.{side}.") :]
    return "", "", name


def plain_name(name: str, handover: Handover | None) -> str:
    """Return the name that a module or weight has in the finished model, or in the original if it is a teacher's."""
    site, _, inside = split_name(name, handover)
    whole = ".".join(part for part in (site, inside) if part)
    return whole if handover is None else finished_name(whole, handover.sites)


def owner(name: str, handover: Handover | None) -> str:
    """Say whose a module or weight is; nothing where there is no plan."""
    if handover is None:
        return ""
    site, side, _ = split_name(name, handover)
    return f" of the {side or 'seam'} at site {site!r}" if site else " of the backbone"
