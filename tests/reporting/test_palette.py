"""The colours, dashes and markers of methods, measured as readers see them."""

from __future__ import annotations

import math
from collections import Counter
from itertools import combinations

import pytest
from experiments.recipes.runs import runs as recipes

from segue.reporting.palette import COLOURS, OWN, in_order, line_styles


def test_styles_depend_on_the_name_alone():
    assert line_styles(["dcr"])["dcr"] == line_styles([*OWN, "zeta"])["dcr"]
    assert line_styles(["zeta"])["zeta"] == line_styles([*OWN, "zeta"])["zeta"]
    assert in_order(["b", "dcr", "a", "student_only"]) == ["student_only", "dcr", "a", "b"]


def test_the_methods_of_the_paper_differ_in_colour_dash_and_marker():
    assert len({style.light for style in OWN.values()}) == len(OWN)
    assert len({style.dark for style in OWN.values()}) == len(OWN)
    assert len({style.dash for style in OWN.values()}) == len(OWN)
    assert len({style.marker for style in OWN.values()}) == len(OWN)


# Machado, Oliveira and Fernandes 2009, full strength, for linear RGB
SHADES = ["light", "dark"]
BLINDNESS = {
    "protan": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deutan": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "none": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
}


@pytest.mark.parametrize("shade", SHADES)
@pytest.mark.parametrize("kind", list(BLINDNESS))
def test_colours_stay_apart_for_colour_blind_readers(kind: str, shade: str):
    seen = {colours[SHADES.index(shade)]: BLINDNESS[kind] for colours in COLOURS}
    for a, b in combinations(seen, 2):
        assert math.dist(_lab(a, seen[a]), _lab(b, seen[b])) > 20, f"{a} and {b} look alike to {kind}"


@pytest.mark.parametrize(("shade", "background"), [("light", "#ffffff"), ("dark", "#181c23")])
def test_colours_contrast_with_the_background(shade: str, background: str):
    for colours in COLOURS:
        colour = colours[SHADES.index(shade)]
        bright, dim = sorted((_luminance(colour), _luminance(background)), reverse=True)
        assert (bright + 0.05) / (dim + 0.05) >= 3, colour


def test_eight_methods_have_eight_colours():
    for shade in SHADES:
        assert len({getattr(style, shade) for style in line_styles([*OWN, "zeta"]).values()}) == 8


ARMS = [arm.method for arm in recipes(seeds=1)]


@pytest.mark.parametrize(
    "methods", [ARMS, [f"method_{i}" for i in range(14)], [*OWN, *"abcdefg"], [f"{name}_{name}" for name in OWN]]
)
def test_fourteen_methods_have_as_many_dashes_and_markers_and_no_three_a_colour(methods):
    styles = line_styles(methods).values()
    assert max(Counter(style.light for style in styles).values()) <= 2
    assert len({style.dash for style in styles}) == len({style.marker for style in styles}) == len(set(methods))


def test_thirty_methods_have_thirty_styles():
    assert len(set(line_styles(f"method_{i}" for i in range(30)).values())) == 30


def _linear(colour: str) -> list[float]:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]


def _luminance(colour: str) -> float:
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), _linear(colour), strict=True))


def _lab(colour: str, blindness) -> tuple[float, float, float]:
    rgb = _linear(colour)
    seen = [min(1.0, max(0.0, sum(w * c for w, c in zip(row, rgb, strict=True)))) for row in blindness]
    to_xyz = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
    xyz = [
        sum(w * c for w, c in zip(row, seen, strict=True)) / white
        for row, white in zip(to_xyz, (0.9505, 1, 1.089), strict=True)
    ]
    f = [value ** (1 / 3) if value > 0.008856 else 7.787 * value + 16 / 116 for value in xyz]
    return 116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])
