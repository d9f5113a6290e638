"""Errors: three lines, standard types, and nearest names only if they are near."""

import pickle

import pytest
import timm

from segue import errors
from segue.errors import CheckpointError, PlanError, SegueError, nearest

KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, SegueError)]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_an_error_has_three_lines_and_a_standard_type(kind):
    error = kind("total_steps must be positive, got 0.", "A run has steps.", "give a number.")
    assert str(error) == "total_steps must be positive, got 0.\n  A run has steps.\n  Hint: give a number."
    assert kind is SegueError or any(base.__module__ == "builtins" for base in kind.__bases__)


def test_an_error_survives_pickling():
    error = PlanError("a", "b", "c")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert isinstance(CheckpointError("a", "b", "c"), OSError)


TIMM = timm.list_models()


@pytest.mark.parametrize(
    ("asked", "offered"),
    [
        ("vit_tiny", "vit_tiny_patch16_224, vit_tiny_patch16_384, vit_tiny_r_s16_p8_224"),  # not davit_tiny
        ("ViT_Tiny", "vit_tiny_patch16_224, vit_tiny_patch16_384, vit_tiny_r_s16_p8_224"),
        ("vit_tiny_patch16_244", "vit_tiny_patch16_224, vit_tiny_patch16_384, deit_tiny_patch16_224"),
        ("resnet5", "resnet50, resnet50c, resnet50d"),
    ],
)
def test_timms_names_that_begin_with_it_come_first(asked, offered):
    assert "davit_tiny" in TIMM
    assert nearest(asked, TIMM) == f"Nearest names: {offered}."


@pytest.mark.parametrize("asked", ["zzzzqqq", "qwertyuiop", "banana", "no-such-model", ""])
def test_nonsense_gets_no_suggestion(asked):
    assert nearest(asked, TIMM) == f"None of the {len(TIMM)} names is similar."


def test_a_part_of_a_name_comes_before_its_spelling():
    names = ["attend", "blocks.0.attn", "blocks.1.attn", "head"]
    assert nearest("attn", names) == "Nearest names: blocks.0.attn, blocks.1.attn."
    assert nearest("atten", names, most=1) == "Nearest names: attend."
    assert nearest("at", ["flat", "hat"]) == "Nearest names: hat, flat."  # two letters are too few to look for inside names


def test_a_few_names_are_listed_even_if_none_is_near():
    assert nearest("label", ["sentence", "target"]) == "The only names are: sentence, target."
    settings = ["budget", "back", "divergence", "every", "fastest", "memory", "spike", "until"]  # a dataclass's fit on a line
    assert nearest("tolerance", settings) == f"The only names are: {', '.join(settings)}."
    assert nearest("x", []) == "There are no names to choose from."
