"""Shortening: take layers out of a list, and let the configuration of the model describe what is left.

Which setting of a configuration counts the layers of a list, and which have an entry for each of them, is found by trying: the
model is built again, without weights, from the changed configuration, and compared with what is left.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from segue.core.rebuilding import Recipe, entries, recipe_for
from segue.errors import SegueWarning, SiteError, StudentError
from segue.sites import Site

COUNTS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer", "depth")  # where no configuration can be tried
INDICES = "idx|index|layer_id|layer_number"  # what attributes are called that hold the position of their layer
MISSING = object()


@dataclass
class Shortened:
    """A list of layers, and what is left of it."""

    name: str
    before: int
    kept: list[tuple[int, nn.Module]]  # the old position of each layer that stays
    origins: list[int] = field(default_factory=list)  # the old positions of the layers that they were built as


def shorten_(model: nn.Module, sites: list[Site]) -> list[str]:
    """Take the layers that spans no longer need out of their lists, with new numbers and counts.

    Returns what would differ in a model that is rebuilt from its configuration; nothing if it has none.
    """
    lists = _shortened(model, sites, {})
    described = _describe(model, lists)
    for one in lists:
        container = model.get_submodule(one.name)
        gone = _gone(sites)[one.name]
        left = {renumbered(key, gone): module for key, module in container._modules.items() if key not in gone}
        container._modules.clear()
        container._modules.update(left)
    described.write_(model)
    return described.differences


def unrebuilt(model: nn.Module, sites: list[Site], students: dict[str, nn.Module]) -> list[str]:
    """Return what would differ in a model that is shortened and then rebuilt from its configuration; nothing changes yet."""
    described = _describe(model, _shortened(model, sites, students))
    for one in described.lists:
        other = next(
            (text for text in described.differences if re.match(rf"{re.escape(one.name)}\.\d+\.\(class\) ", text)), None
        )
        if other is not None:
            raise SiteError(
                f"{type(model).__name__} decides by their positions which of the layers of {one.name!r} is of which class.",
                f"In the shorter model {other}.",
                "choose spans that leave the classes in the order that its configuration describes. Nothing was changed.",
            )
    return described.differences


def warn_of(model: nn.Module, differences: list[str], stacklevel: int = 3) -> None:
    """Warn of what a shortened model does not have in common with one that is built from its configuration."""
    if differences:
        more = f" ({len(differences)} differences in all)" if len(differences) > 3 else ""
        warnings.warn(
            f"the shorter {type(model).__name__} cannot be rebuilt from its configuration: {'; '.join(differences[:3])}{more}. "
            "Save it with segue.save and load it with segue.load_; what is built from the configuration is another model.",
            SegueWarning,
            stacklevel=stacklevel,
        )


def renumbered(key: str, gone: set[str]) -> str:
    """Return the new name of a layer in its list.

    >>> renumbered("encoder_layer_3", {"encoder_layer_1"})
    'encoder_layer_2'
    """
    split = re.fullmatch(r"(.*?)(\d+)", key)
    if split is None:
        return key
    others = [re.fullmatch(r"(.*?)(\d+)", name) for name in gone]
    earlier = sum(other is not None and other[1] == split[1] and int(other[2]) < int(split[2]) for other in others)
    return f"{split[1]}{int(split[2]) - earlier}"


def finished_name(name: str, sites: list[Site]) -> str:
    """Return the name that a parameter has when the layers that spans no longer need are gone.

    >>> span = Site("layers.0", members=("layers.0", "layers.1"))
    >>> finished_name("layers.2.weight", [span])
    'layers.1.weight'
    """
    for layers, gone in _gone(sites).items():
        if name.startswith(f"{layers}."):
            key, dot, rest = name.removeprefix(f"{layers}.").partition(".")
            return f"{layers}.{renumbered(key, gone)}{dot}{rest}"
    return name


def _gone(sites: list[Site]) -> dict[str, set[str]]:
    gone: dict[str, set[str]] = {}
    for site in sites:
        for name in site.members[1:]:
            layers, _, key = name.rpartition(".")
            gone.setdefault(layers, set()).add(key)
    return gone


def _shortened(model: nn.Module, sites: list[Site], students: dict[str, nn.Module]) -> list[Shortened]:
    found = []
    for name, gone in _gone(sites).items():
        layers: Any = model.get_submodule(name)._modules
        kept = [(i, students.get(f"{name}.{key}", module)) for i, (key, module) in enumerate(layers.items()) if key not in gone]
        found.append(Shortened(name, len(layers), kept, [i for i, _ in kept]))
    return found


@dataclass
class Description:
    """What has to be written so that a shortened model describes itself, and what cannot be."""

    lists: list[Shortened]
    recipe: Recipe | None = None
    twins: tuple[nn.Module, nn.Module] | None = None  # as the model was built, and as it would be built now
    settings: list[tuple[nn.Module, str, Any]] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)

    def write_(self, model: nn.Module) -> None:
        """Write counts, lists and numbers."""
        if self.recipe is None or self.twins is None:
            for one in self.lists:
                _write_by_names(model, one)
        else:
            self.recipe.write_(*self.twins)
        for module, name, value in self.settings:
            setattr(module, name, value)
        features = getattr(model, "feature_info", None)  # timm's list of what each block returns
        for one in self.lists:
            if isinstance(features, list) and len(features) == one.before:
                model.feature_info = features[: len(one.kept)]  # type: ignore[assignment]


def _describe(model: nn.Module, lists: list[Shortened]) -> Description:
    """Find the configuration from which the shortened model can be built again: that of the outermost module that has one."""
    differences: list[str] = []
    for place in _around([one.name for one in lists]):
        recipe = recipe_for(model.get_submodule(place))
        original = None if recipe is None else recipe.twin(recipe.data)
        if recipe is None or original is None:
            continue
        inside = [replace(one, name=one.name[len(place) + bool(place) :]) for one in lists]
        if any(len(original.get_submodule(one.name)._modules) != one.before for one in inside):
            continue  # it does not describe the model even now
        search = Search(recipe, original, inside)
        if search.finds_counts():
            return search.refined()
        names = ", ".join(repr(one.name) for one in lists)
        differences = [f"no setting of {type(recipe.model).__name__}'s configuration counts the layers of {names} alone"]
    return Description(lists, differences=differences)


def _around(names: list[str]) -> list[str]:
    """Return the names of the modules that contain all of the lists, from the outside in."""
    parts = [name.split(".")[:-1] for name in names]
    common = [column[0] for column in zip(*parts, strict=False) if len(set(column)) == 1] if names else []
    return [".".join(common[:cut]) for cut in range(len(common) + 1)] if names else []


class Search:
    """Try changes of a configuration until the twin that it describes is the shortened model."""

    def __init__(self, recipe: Recipe, original: nn.Module, lists: list[Shortened]) -> None:
        self.recipe, self.original, self.lists = recipe, original, lists
        self.data, self.twin = recipe.data, original
        self.places: list[tuple[Shortened, SettingPath]] = []  # where the layers of each list are counted
        names = [one.name for one in lists]
        self.around = _outside(recipe.model, names), _outside(original, names)
        self.built = {name: _entries_in(original, name) for name in names}
        for one in lists:
            one.origins = _origins(one, self.built[one.name])
            _refuse_other_kinds(one, recipe.data)

    def finds_counts(self) -> bool:
        """Find the setting that counts the layers of each list, and no other list."""
        for one in self.lists:
            paths = sorted(_paths(self.data, one.before), key=lambda path: _unlikeliness(path, one.name))
            trials = ((path, _changed(self.data, path, one, lists)) for path in paths for lists in (True, False))
            for path, data in trials:
                twin = self.recipe.twin(data)
                if twin is not None and _lengths(twin) == {**_lengths(self.twin, one.name), **_lengths_in(twin, one)}:
                    self.data, self.twin = data, twin
                    self.places.append((one, path))
                    break
            else:
                return False
        return True

    def refined(self) -> Description:
        """Change what else depends on the numbers of layers, as long as the twin becomes more alike."""
        best = self._compared(self.twin)
        for one, path in self.places:
            for key in list(_dict_at(self.data, path)):
                for value in _alternatives(key, path, self.data, self.recipe.data, one):
                    data = copy.deepcopy(self.data)
                    _dict_at(data, path)[key] = value
                    twin = self.recipe.twin(data) if best.differences else None
                    found = None if twin is None or _lengths(twin) != _lengths(self.twin) else self._compared(twin)
                    if twin is not None and found is not None and len(found.differences) < len(best.differences):
                        self.data, self.twin, best = data, twin, found
        return best

    def _compared(self, twin: nn.Module) -> Description:
        """Compare the model as it is left with a twin: what has to be set in it, and what differs."""
        result = Description(self.lists, self.recipe, (self.original, twin))
        model, names = self.recipe.model, [one.name for one in self.lists]
        here, built = self.around
        _compare(model, "", here, built, _outside(twin, names), result)
        for one in self.lists:
            layers = _entries_in(twin, one.name)
            for new, ((_, module), old) in enumerate(zip(one.kept, one.origins, strict=True)):
                now, before = entries(module or nn.Identity()), self.built[one.name][old]
                if now["(class)"] == before["(class)"]:  # other students are in no configuration
                    _compare(module, f"{one.name}.{new}.", now, before, layers[new], result, (old, new))
        return result


def _compare(
    module: nn.Module, place: str, now: Any, before: Any, after: Any, into: Description, numbers: tuple[int, int] | None = None
) -> None:
    """Note where a module is as its constructor made it before, and would be made otherwise now."""
    for key in dict.fromkeys((*before, *after)):
        mine, old, new = (entry.get(key, MISSING) for entry in (now, before, after))
        if mine == new or mine != old:
            continue
        inner, _, name = key.rpartition(".")
        if numbers is None and mine is not MISSING and name in vars(module.get_submodule(inner)):
            if new is not MISSING:  # else a leftover, such as the rotation of a kind of layer that is gone
                into.settings.append((module.get_submodule(inner), name, new))
        elif (old, new) == numbers and re.search(INDICES, name):
            into.settings.append((module.get_submodule(inner), name, new))
        else:
            shown = ["missing" if value is MISSING else repr(value) for value in (mine, new)]
            into.differences.append(f"{place}{key} is {shown[0]}, and rebuilt {shown[1]}")


def _entries_in(module: nn.Module, layers: str) -> list[dict[str, Any]]:
    return [entries(layer or nn.Identity()) for layer in module.get_submodule(layers)._modules.values()]


def _outside(module: nn.Module, lists: list[str]) -> dict[str, Any]:
    inside = tuple(f"{name}." for name in lists)
    return {key: value for key, value in entries(module).items() if not key.startswith(inside)}


def _origins(one: Shortened, built: list[dict[str, Any]]) -> list[int]:
    """Return as which of the original layers each one was built: a student may be a copy of any layer of its span."""
    starts = [old for old, _ in one.kept]
    origins = []
    for (old, module), end in zip(one.kept, [*starts[1:], one.before], strict=True):
        now = entries(module or nn.Identity())
        alike = {i: sum(now.get(key, MISSING) == value for key, value in built[i].items()) for i in range(old, end)}
        origins.append(max(alike, key=lambda i: alike[i]))
    return origins


def _refuse_other_kinds(one: Shortened, data: Any) -> None:
    """Refuse a copy of another kind of layer than the first of its span: the model calls each kind in its own way."""
    for key, value in data.items() if isinstance(data, dict) else ():
        _refuse_other_kinds(one, value)
        if not (isinstance(value, list) and len(value) == one.before and all(isinstance(kind, str) for kind in value)):
            continue
        left = {value[origin] for origin in one.origins}
        if _attends(set(value)) and not _attends(left):
            raise SiteError(
                f"the span leaves no layer with attention in {one.name!r}.",
                f"By {key!r} only {', '.join(sorted(left))} is left; models of such layers and of attention need one of each.",
                "let spans begin with a layer that has attention (first=, every=). Nothing was changed.",
            )
        for (old, _), origin in zip(one.kept, one.origins, strict=True):
            if value[old] != value[origin]:
                raise StudentError(
                    f"the student for layer {old} of {one.name!r} copies another kind of layer than the first of its span.",
                    f"In {key!r} it is {value[origin]}, not {value[old]}, and the student is called as the first layer is.",
                    "copy a layer of the same kind (which=0), or let spans begin with such a layer (first=).",
                )


def _attends(kinds: set[str]) -> bool:
    return any(kind.endswith("attention") and not kind.startswith("linear") for kind in kinds)


def _lengths(module: nn.Module, without: str = "") -> dict[str, int]:
    lists = [(name, part) for name, part in module.named_modules() if isinstance(part, nn.ModuleList | nn.Sequential)]
    return {name: len(part) for name, part in lists if not without or not (name == without or name.startswith(f"{without}."))}


def _lengths_in(twin: nn.Module, one: Shortened) -> dict[str, int]:
    inside = {name: size for name, size in _lengths(twin).items() if name.startswith(f"{one.name}.")}
    return {**inside, one.name: len(one.kept)}


SettingPath = tuple[str | int, ...]


def _paths(data: Any, value: int, path: SettingPath = ()) -> Iterator[SettingPath]:
    """Find the whole numbers in a configuration that equal a value."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list | tuple) else ()
    for key, found in items:
        if type(found) is int and found == value:
            yield (*path, key)
        yield from _paths(found, value, (*path, key))


def _unlikeliness(path: SettingPath, layers: str) -> tuple[bool, bool]:
    """Order the settings that are tried: first those whose names are those of the list and of what is around it."""
    name = "_".join(map(str, path))
    return re.search("layer|depth|block", name) is None, not set(layers.split(".")) & set(name.split("_"))


def _dict_at(data: dict[str, Any], path: SettingPath) -> dict[str, Any]:
    """Return the innermost dictionary on a path."""
    found: Any = data
    for key in path[:-1]:
        if not isinstance(found[key], dict):
            break
        found = found[key]
    return found  # type: ignore[no-any-return]


def _changed(data: dict[str, Any], path: SettingPath, one: Shortened, with_lists: bool) -> dict[str, Any]:
    """Change a count, and the lists beside it that have an entry for each layer."""
    data = copy.deepcopy(data)
    beside = _dict_at(data, path)
    if with_lists:
        for key, value in beside.items():
            if isinstance(value, list | tuple) and len(value) == one.before and key not in path:
                beside[key] = type(value)(value[old] for old in one.origins)
    if isinstance(beside.get("stage_names"), list):  # a backbone of transformers: made of the other two
        del beside["stage_names"]
        beside.pop("out_features", None)
        stages = [sum(old < stage for old, _ in one.kept) for stage in beside.get("out_indices") or ()]
        beside["out_indices"] = sorted(set(stages)) or None
    place: Any = data
    for part in path[:-1]:
        if isinstance(place[part], tuple):
            place[part] = list(place[part])
        place = place[part]
    place[path[-1]] = len(one.kept)
    return data


def _alternatives(key: str, path: SettingPath, data: dict[str, Any], original: dict[str, Any], one: Shortened) -> Iterator[Any]:
    """Suggest other values for a setting: positions of layers, the number of the first layers, a list as it was."""
    if key in path:
        return
    now, before = _dict_at(data, path).get(key), _dict_at(original, path).get(key)
    if type(before) is int and 0 < before <= one.before:
        yield sum(old < before for old in one.origins)
    if isinstance(before, list | tuple):
        if all(type(value) is int and 0 <= value < one.before for value in before):
            yield [one.origins.index(value) for value in before if value in one.origins]
        if now != before:
            yield before


def _write_by_names(model: nn.Module, one: Shortened) -> None:
    """Write counts, lists and numbers under their usual names, where no configuration can be tried."""
    ends = [*(old for old, _ in one.kept[1:]), one.before]
    for new, ((old, module), end) in enumerate(zip(one.kept, ends, strict=True)):
        for part in module.modules() if module is not None else ():
            for name, value in list(vars(part).items()):
                if type(value) is int and re.search(INDICES, name) and old <= value < end:
                    setattr(part, name, new)
    parts = one.name.split(".")
    around = [model.get_submodule(".".join(parts[:cut])) for cut in range(len(parts) + 1)]
    inside = model.get_submodule(one.name).modules()
    found = [m.config for m in (*around, *inside) if hasattr(m, "config") and not isinstance(m.config, nn.Module)]
    for owner in (around[-2], *{id(config): config for config in found}.values()):
        counts = [name for name in COUNTS if getattr(owner, name, None) == one.before]
        settings = {} if not counts or not hasattr(owner, "__dict__") else dict(vars(owner))
        for name, value in settings.items():
            if isinstance(value, list) and len(value) == one.before:
                setattr(owner, name, [value[old] for old in one.origins])
        for name in counts:
            setattr(owner, name, len(one.kept))
