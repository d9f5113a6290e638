"""Wrong calls of every public callable, listed and generated from the signatures, and wrong commands."""

from __future__ import annotations

import random
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.torture import campaign, wrong_calls
from tests.torture.campaign import Attempt, Bench, Outcome
from tests.torture.public_names import parameters
from tests.torture.valid_calls import AT_THE_BORDER_ONLY, VALID_AND_LONG
from tests.torture.wrong_calls import Thing, WrongCall, allows, hints

VERDICTS = {
    wrong_calls.REFUSED: campaign.RIGHT,
    wrong_calls.ACCEPTED: campaign.RIGHT,
    wrong_calls.NONSENSE: campaign.ACCEPTED,
    wrong_calls.FOREIGN: campaign.FOREIGN,
    wrong_calls.CHANGED: campaign.CHANGED,
    wrong_calls.HUNG: campaign.HUNG,
}
GENERATED = 8  # values of one attempt
WHOLE = st.integers(-3, 6) | st.sampled_from([2**63, 10**30, -(10**30)])  # between them are valid numbers that take long
PLAIN = st.none() | st.booleans() | WHOLE | st.floats() | st.text(max_size=6) | st.binary(max_size=3)
NESTED = st.recursive(
    PLAIN, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
)
OTHERS = st.sampled_from([Thing(), int, torch.nn.Linear, torch.zeros(0), torch.full((2,), torch.nan), 1j, range(3), print, ...])


def near(hint: Any) -> st.SearchStrategy[Any]:
    """Return values that look like those a type hint asks for: of its type, of the types in it, or of a similar one."""
    inside = [near(one) for one in typing.get_args(hint) if isinstance(one, type) or typing.get_args(one)]
    found = [PLAIN, *inside]
    if hint in (int, float, bool, str):
        found += [st.text(max_size=3) if hint is str else WHOLE if hint is int else st.floats(-1, 2)]
    if typing.get_origin(hint) in (list, tuple) or inside:
        found += [st.lists(st.one_of(*inside, PLAIN), max_size=3), st.tuples(*inside)]
    if typing.get_origin(hint) is typing.Literal:
        found += [st.sampled_from([str(one).upper() for one in typing.get_args(hint)])]
    return st.one_of(*found)


def generate(hint: Any, chance: random.Random) -> list[Any]:
    """Generate values for a parameter, the same ones for the same seed."""
    found: list[Any] = []

    @seed(chance.getrandbits(32))
    @settings(
        max_examples=GENERATED, database=None, deadline=None, phases=[Phase.generate], suppress_health_check=[*HealthCheck]
    )
    @given(near(hint) | NESTED | OTHERS)
    def collect(value: Any) -> None:
        found.append(value)

    collect()
    return found


def call(wrong: WrongCall, place: Path) -> Outcome:
    verdict = wrong_calls.run(wrong, place / "call")
    return Outcome(str(verdict.call), VERDICTS[verdict.kind], verdict.detail)


def generated(name: str, parameter: str, place: Path, chance: random.Random) -> Iterator[Outcome]:
    """Call with generated values for one parameter."""
    hint = hints(wrong_calls.targets_once()[name]).get(parameter, Any)
    for value in generate(hint, chance):
        if name not in AT_THE_BORDER_ONLY or not allows(hint, value):
            wrong = WrongCall(name, parameter, ascii(value)[:60], lambda value=value: value)
            if str(wrong) not in VALID_AND_LONG:
                yield call(wrong, place)


def calls(bench: Bench) -> Iterator[Attempt]:
    """Take three listed calls, in an order that the seed chooses, then one parameter with generated values."""
    listed = list(wrong_calls.calls())
    random.Random(bench.seed).shuffle(listed)
    places = [(name, parameter) for name, target in wrong_calls.targets_once().items() for parameter in parameters(target)]
    for index, chance in enumerate(bench.chances(), bench.begin):
        turn, number = divmod(index, 4)
        if number < 3 and 3 * turn + number < len(listed):
            wrong = listed[3 * turn + number]
            yield Attempt(str(wrong), lambda place, w=wrong: call(w, place))
        else:
            name, parameter = chance.choice(places)
            yield Attempt(f"{name}({parameter}=...)", lambda place, n=name, p=parameter, c=chance: generated(n, p, place, c))


def commands(bench: Bench) -> Iterator[Attempt]:
    """Take wrong command lines and damaged files, in an order that the seed chooses."""
    try:
        from tests.torture import wrong_commands
    except ImportError:
        return
    prepared = bench.kept / "prepared"
    if not prepared.exists():
        wrong_commands.prepare(prepared)
    listed = list(wrong_commands.cases())
    random.Random(bench.seed).shuffle(listed)

    def run(case: Any, place: Path) -> Outcome:
        verdict = wrong_commands.run(case, prepared, place / "command")
        return Outcome(f"segue {verdict.call}", VERDICTS[verdict.kind], verdict.detail)

    for case in listed[bench.begin :]:
        yield Attempt(f"segue {case}", lambda place, c=case: run(c, place))
