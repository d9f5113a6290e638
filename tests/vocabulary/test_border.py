"""The border: arguments are compared with the type hints."""

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
import math
import os
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import pytest
import torch
from torch import nn

from segue.border import Count, Fraction, NotNegative, PositiveFloat, PositiveInt, Rule, Seed, Unit, at_least, checked
from segue.errors import PlanError


@checked
@dataclass(frozen=True, kw_only=True)
class Settings:
    number: float = 1.0
    steps: PositiveInt | None = None
    flag: bool = False
    choice: Literal["front", "back"] = "front"
    order: Literal["front", "back"] | tuple[int, ...] = "front"
    place: str | os.PathLike[str] | None = None
    path: Path = Path()
    rate: PositiveFloat = 1.0
    left: NotNegative = 0.0
    share: Unit = 0.5
    part: Fraction = 0.5
    first: Count = 0
    seed: Seed = 0
    several: Annotated[int, at_least(4)] = 4
    function: Callable[[float], float] = abs
    maker: Callable[[], nn.Module] = nn.Identity
    kind: type[nn.Module] = nn.Linear
    module: nn.Module | None = None
    names: Sequence[str] = ()
    batches: Iterable[object] = ()
    pair: tuple[float, float] = (0.0, 1.0)
    table: Mapping[str, int] = dataclasses.field(default_factory=dict)
    own: Annotated[int | str, Rule("a thing of mine", lambda value: value != 3, hint="take another one.")] = 0
    perhaps: Annotated[int, Rule("a thing of mine", lambda value: value != 3, hint="take another one.")] | None = None
    counts: Sequence[Count] = ()


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("number", "1", "a finite number"),
        ("number", True, "a finite number"),
        ("number", math.nan, "a finite number"),
        ("number", -math.inf, "a finite number"),
        ("number", None, "a finite number"),
        ("steps", 0, "a positive integer"),
        ("steps", 1.0, "a positive integer"),
        ("flag", "no", "True or False"),
        ("flag", 1, "True or False"),
        ("flag", None, "True or False"),
        ("choice", "left", "'front' or 'back'"),
        ("order", "left", "'front', 'back' or a sequence of integers"),
        ("order", (0, True), "'front', 'back' or a sequence of integers"),
        ("place", b"x", "a path"),
        ("path", 3, "a path"),
        ("rate", math.inf, "a positive finite number"),
        ("rate", 1e300, "a positive finite number"),
        ("left", -1, "a finite number of at least 0"),
        ("share", 1.5, "a number from 0 to 1"),
        ("part", 0, "a number above 0 and at most 1"),
        ("first", -1, "an integer of at least 0"),
        ("seed", 10**30, "an integer of 64 bits"),
        ("several", 3, "an integer of at least 4"),
        ("function", 3, "callable"),
        ("function", int, "callable"),
        ("maker", int, "callable"),
        ("kind", 3, "a subclass of nn.Module"),
        ("kind", int, "a subclass of nn.Module"),
        ("module", nn.Linear, "an nn.Module"),
        ("names", "abc", "a sequence of strings"),
        ("names", {"a", "b"}, "a sequence of strings"),
        ("names", [3], "a sequence of strings"),
        ("batches", 3, "a sequence of objects of type object"),
        ("batches", {}, "a sequence of objects of type object"),
        ("pair", (1.0,), "2 items (a finite number, a finite number)"),
        ("table", {"a": "b"}, "a mapping from strings to integers"),
        ("table", {3: 3}, "a mapping from strings to integers"),
        ("own", 3, "a thing of mine"),
        ("counts", [-1], "a sequence of items, each an integer of at least 0"),
    ],
)
def test_what_a_hint_does_not_allow_is_refused(name, value, wanted):
    with pytest.raises(PlanError) as error:
        Settings(**{name: value})
    first, _, hint = str(error.value).splitlines()
    shown = "<class" if isinstance(value, type) else f"{value!r}."
    assert first.startswith(f"Settings({name}=...) must be {wanted}, got {shown}")
    assert hint.startswith("  Hint: ")


@pytest.mark.parametrize(
    ("name", "value", "lines"),
    [
        ("choice", "bakc", "  The choices are 'front' and 'back'.\n  Hint: write 'back'."),
        ("choice", "left", "  The choices are 'front' and 'back'.\n  Hint: leave it out for 'front'."),
        ("flag", "no", "  It is of type str.\n  Hint: leave it out for False."),
        ("function", int, "  It is a class.\n  Hint: call the class to make one: int()."),
        ("names", ["a", 3], "  In it, item 1 is 3, of type int.\n  Hint: give a sequence of strings."),
        ("table", {"a": None}, "  In it, the value at 'a' is None, of type NoneType.\n  Hint: give a mapping from strings to"),
        ("own", 3, "  It is of type int.\n  Hint: take another one."),
        ("perhaps", 3, "  It is of type int.\n  Hint: take another one."),
        ("function", 3, "  It is of type int.\n  Hint: give something callable."),
    ],
)
def test_the_second_line_says_what_it_is_and_the_third_what_to_do(name, value, lines):
    with pytest.raises(PlanError) as error:
        Settings(**{name: value})
    assert lines in str(error.value)


def test_what_a_hint_allows_arrives_as_it_is():
    class Own:
        def __call__(self, x):
            return x

    def read_once():
        yield from (1, 2)

    own, generator, points = Own(), read_once(), [0, 1.5]
    made = Settings(number=3, function=own, maker=nn.ReLU, batches=generator, pair=points, place=Path("a"), steps=None)
    assert (made.number, made.function, made.maker, made.batches, made.pair) == (3, own, nn.ReLU, generator, points)
    assert type(made.number) is int  # an int where a float is hinted stays one: version 0.1.0 hashed it
    assert list(made.batches) == [1, 2]


def test_numbers_of_numpy_become_pythons_own_and_strings_paths():
    made = Settings(steps=np.int64(3), number=np.float32(0.5), flag=np.True_, order=(np.int64(1),), path="a/b")
    assert (made.steps, made.number, made.flag, made.order, made.path) == (3, 0.5, True, (1,), Path("a/b"))
    assert [type(x) for x in (made.steps, made.number, made.flag, made.order[0])] == [int, float, bool, int]


def test_scalars_of_torch_and_strings_of_other_classes_are_taken_too():
    class Side(str, enum.Enum):
        BACK = "back"

    made = Settings(
        steps=torch.tensor(3), number=np.array(0.5), rate=np.float64(2), flag=torch.tensor(True), pair=torch.ones(2)
    )
    assert (made.steps, made.number, made.rate, made.flag, made.pair) == (3, 0.5, 2.0, True, (1.0, 1.0))
    assert [type(x) for x in (made.steps, made.number, made.rate, made.flag)] == [int, float, float, bool]
    assert [type(Settings(choice=one).choice) for one in (Side.BACK, np.str_("back"))] == [str, str]
    assert Settings(names=np.array(["a", "b"])).names == ("a", "b")


@pytest.mark.parametrize("value", [nn.Parameter(torch.ones(())), torch.ones((), device="meta"), torch.tensor(1j)])
def test_a_scalar_is_refused_where_its_gradient_or_a_part_of_it_would_be_lost(value):
    with pytest.raises(PlanError, match="must be a finite number"):
        Settings(number=value)


@pytest.mark.parametrize("value", [torch.tensor(1.0), np.array(1.0)])
def test_a_scalar_is_no_sequence(value):
    with pytest.raises(PlanError, match="must be 2 items"):
        Settings(pair=value)


def test_a_decorator_may_give_arguments_of_its_own():
    def with_scale(function):
        @functools.wraps(function)
        def one_argument(x):
            return function(2.0, x)

        return one_argument

    @with_scale
    def scaled(scale, x):
        return scale * x

    @checked
    def two(x: float, y: float) -> float:
        return x + y

    assert Settings(function=scaled).function is scaled
    with pytest.raises(PlanError, match="It does not take 1 argument"):
        Settings(function=two)


def test_a_value_that_cannot_be_shown_is_named_by_its_type():
    class Silent:
        def __repr__(self):
            raise RuntimeError

    with pytest.raises(PlanError, match=r"must be a finite number, got a Silent\."):
        Settings(number=Silent())


def test_copies_are_made_and_changed_as_before():
    made = Settings(steps=3)
    assert copy.deepcopy(made) == made
    assert pickle.loads(pickle.dumps(made)) == made
    assert dataclasses.replace(made, steps=4).steps == 4
    with pytest.raises(PlanError, match=r"Settings\(steps=...\) must be a positive integer, got 'x'."):
        dataclasses.replace(made, steps="x")


def test_methods_are_checked_and_missing_arguments_are_named_by_python():
    class Owner:
        @checked
        def double(self, x: int, *rest: int, **named: int) -> int:
            return 2 * x

    assert Owner().double(2, "rest", named="belongs to someone else") == 4
    with pytest.raises(PlanError, match=r"Owner.double\(x=...\) must be an integer, got '2'."):
        Owner().double("2")
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'x'"):
        Owner().double()


def test_a_long_value_is_named_by_its_type():
    with pytest.raises(PlanError, match=r"got a Sequential\."):
        Settings(number=nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
