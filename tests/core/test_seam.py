import copy
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from segue.core.modes import Mode, SeamState, View, Watch, mode_of
from segue.core.seam import Seam
from segue.core.withheld import Withheld
from segue.errors import HandoverError, StudentError
from segue.sites import Site

Pair = namedtuple("Pair", "first second")
INF, NAN = float("inf"), float("nan")


@dataclass(frozen=True)
class Record:
    hidden: torch.Tensor
    note: str = "x"
    extra: Any = None


class Returns(nn.Module):
    """Return scale * x in some structure."""

    def __init__(self, scale: float, wrap=lambda y: y) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(scale))
        self.wrap = wrap

    def forward(self, x, *args, **kwargs):
        return self.wrap(self.scale * x)


class Fixed(nn.Module):
    """Return the same values whatever comes in, with a gradient."""

    def __init__(self, values: torch.Tensor) -> None:
        super().__init__()
        self.values = nn.Parameter(values)

    def forward(self, x):
        return self.values * 1


def seam(teacher: nn.Module, student: nn.Module, weight: float = 0.25, **settings) -> Seam:
    made = Seam(teacher, student, Site("here"), **settings)
    made.set_weight(weight, weight)
    made.train()
    teacher.requires_grad_(False)
    return made


FORWARDS = [(learning, compared) for learning in (True, False) for compared in (True, False)]


@pytest.mark.parametrize(
    ("state", "weight", "expected"),  # expected: learning and compared, learning, compared, neither
    [
        ({}, 0.3, "blend blend blend blend"),
        ({}, None, "blend blend blend blend"),
        ({}, 0.0, "skip blend skip blend"),
        ({}, 1.0, "student blend student blend"),
        ({"watch": Watch.PAIR}, 0.0, "blend blend skip blend"),
        ({"watch": Watch.PAIR}, 1.0, "blend blend student blend"),
        ({"watch": Watch.STUDENT}, 0.0, "blend blend skip blend"),
        ({"watch": Watch.STUDENT}, 1.0, "student blend student blend"),
        ({"watch": Watch.PAIR, "measuring": True}, 1.0, "blend blend blend blend"),
        ({"hold": True}, 0.0, "skip hold skip skip"),
        ({"hold": True}, None, "skip hold skip skip"),
        ({"hold": True, "watch": Watch.PAIR}, 0.0, "hold hold skip skip"),
        ({"view": View.TEACHER, "hold": True, "watch": Watch.PAIR}, 1.0, "teacher teacher teacher teacher"),
        ({"view": View.STUDENT, "hold": True}, 0.0, "student student student student"),
        ({"view": View.STUDENT, "watch": Watch.PAIR, "measuring": True}, 0.0, "compare compare compare compare"),
        ({"view": View.STUDENT, "watch": Watch.STUDENT}, 0.3, "student student student student"),
    ],
)
def test_the_mode_follows_from_state_and_weight(state, weight, expected):
    found = [mode_of(SeamState(**state), weight, learning=learning, compared=compared) for learning, compared in FORWARDS]
    assert [mode.value.removesuffix(" student") for mode, _ in found] == expected.split()
    for (mode, watch), (learning, _) in zip(found, FORWARDS, strict=True):
        records = mode is not Mode.TEACHER and (learning or state.get("measuring", False))
        assert watch is (state.get("watch", Watch.NOTHING) if records else Watch.NOTHING)


def test_compiled_code_has_the_same_modes_while_the_weight_moves():
    here = seam(Returns(5.0), Returns(3.0), weight=0.0)
    here.configure(compared=True)
    in_graph, eager = [], []
    for weight in (0.0, 0.3, 1.0):
        here.set_weight(weight, weight)
        in_graph.append(here.modes_in_graph)
        eager.append(here.modes[True, True][0])
    assert in_graph[0] == in_graph[1] == in_graph[2]
    assert eager == [Mode.SKIP_STUDENT, Mode.BLEND, Mode.STUDENT]
    here.configure(closed_in_graph=True)
    assert here.modes_in_graph != in_graph[0]


def test_only_a_new_weight_writes_to_the_buffers():
    here = seam(Returns(5.0), Returns(3.0), weight=0.5)
    before = here.student_weight._version
    here.configure(view=View.STUDENT, watch=Watch.PAIR, hold=True)
    assert here.student_weight._version == before
    here.set_weight(0.6, 0.6)
    assert here.student_weight._version > before
    with pytest.raises(TypeError):
        here.configure(views=View.STUDENT)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda y: (y, None),
        lambda y: [y, y + 1],
        lambda y: Pair(y, (y, {"deep": y})),
        lambda y: OrderedDict(a=y, b="text"),
        lambda y: Record(y),
        lambda y: (y, 3, "text", None, torch.tensor(True)),
    ],
)
def test_structures_come_back_as_they_were(wrap):
    x = torch.randn(4)
    here = seam(Returns(1.0, wrap), Returns(3.0, wrap), weight=0.5)
    output = here(x, 1, key="word")
    expected = wrap(2 * x)
    assert type(output) is type(expected)
    if isinstance(output, Record):
        torch.testing.assert_close(output.hidden, expected.hidden)
        assert (output.note, output.extra) == ("x", None)
    else:
        first = next(iter(output.values() if isinstance(output, dict) else output))
        torch.testing.assert_close(first, 2 * x)


def test_where_one_side_returns_none_so_does_the_seam():
    here = seam(Returns(1.0, lambda y: (y, y)), Returns(3.0, lambda y: (y, None)))
    assert here(torch.ones(2))[1] is None


@pytest.mark.parametrize(
    ("wrap", "says"),
    [
        (lambda y: y[:, :1], r"shape \(2, 3\), the student shape \(2, 1\)"),
        (lambda y: y.double(), "torch.float32, the student torch.float64"),
        (lambda y: (y,), "Tensor, the student tuple"),
        (lambda y: {"a": y}, "Tensor, the student dict"),
    ],
)
def test_a_student_that_returns_something_else_is_refused(wrap, says):
    with pytest.raises(StudentError, match=says):
        seam(Returns(1.0), Returns(1.0, wrap))(torch.ones(2, 3))


def test_tuples_of_other_length_and_other_keys_are_refused():
    with pytest.raises(StudentError, match="the number of values 2, the student the number of values 1"):
        seam(Returns(1.0, lambda y: (y, y)), Returns(1.0, lambda y: (y,)))(torch.ones(2))
    with pytest.raises(StudentError, match=r"At output the teacher gives the keys \['a'\]"):
        seam(Returns(1.0, lambda y: {"a": y}), Returns(1.0, lambda y: {"b": y}))(torch.ones(2))


def test_no_gradient_passes_the_teacher_unless_asked():
    for passes, expected in ((False, 0.25 * 3.0), (True, 0.25 * 3.0 + 0.75 * 5.0)):
        here = seam(Returns(5.0), Returns(3.0), teacher_gradient=passes)
        x = torch.ones(1, requires_grad=True)
        here(x).backward()
        assert x.grad.item() == pytest.approx(expected)
        assert here.teacher.scale.grad is None
        assert here.student.scale.grad.item() == pytest.approx(0.25)


def test_at_weight_zero_the_student_has_a_zero_gradient():
    for skips in (False, True):
        here = seam(Returns(5.0), Returns(NAN), weight=0.0)
        here.configure(compared=skips)
        output = here(torch.ones(2))
        assert output.tolist() == [5.0, 5.0]
        output.sum().backward()
        assert here.student.scale.grad.item() == 0.0
    here = seam(Returns(5.0), Fixed(torch.tensor([INF, NAN])), weight=0.0)
    here(torch.ones(2)).sum().backward()
    assert here.student.values.grad.tolist() == [0.0, 0.0]


def test_one_side_is_left_out_only_after_both_were_compared():
    calls = []
    here = seam(Returns(5.0), Returns(3.0), weight=0.0)
    here.student.register_forward_hook(lambda *_: calls.append("student"))
    here(torch.ones(2))
    here(torch.ones(2))
    assert calls == ["student"] * 2
    here.configure(compared=True)
    here(torch.ones(2))
    assert calls == ["student"] * 2


def test_the_views_show_one_side_and_compute_no_other():
    for view, alone in ((View.TEACHER, 5.0), (View.STUDENT, 3.0)):
        here = seam(Returns(5.0), Returns(3.0))
        here.configure(view=view)
        other = here.student if view is View.TEACHER else here.teacher
        other.register_forward_pre_hook(lambda *_: pytest.fail("the other side was computed"))
        assert here(torch.ones(1)).item() == alone


def test_the_teacher_stays_in_evaluation():
    here = seam(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.9)), nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.9)))
    here.train()
    assert not any(m.training for m in here.teacher.modules())
    assert all(m.training for m in here.student.modules())


@pytest.mark.parametrize("cast", ["bfloat16", "half", "double", "float"])
def test_the_weight_stays_float32_and_exact(cast):
    here = seam(nn.Linear(2, 2), nn.Linear(2, 2), weight=0.9371)
    getattr(here, cast)()
    assert here.student_weight.dtype == torch.float32
    assert here.student_weight.item() == torch.tensor(0.9371).item()
    assert here.student.weight.dtype != torch.float32 or cast == "float"


def test_plain_settings_are_answered_weights_are_withheld():
    here = seam(nn.MultiheadAttention(4, 2, batch_first=False), nn.MultiheadAttention(4, 2, batch_first=True))
    assert here.num_heads == 2
    assert here.batch_first is True
    with pytest.raises(HandoverError, match=r"uses the weights 'here.out_proj.weight' inside it"):
        torch.nn.functional.linear(torch.ones(4), here.out_proj.weight)
    for missing in ("nothing", "merge_masks", "_reset_parameters"):
        with pytest.raises(AttributeError):
            getattr(here, missing)
    assert not isinstance(getattr(seam(nn.Linear(2, 2), nn.Linear(2, 2)), "weight", None), torch.Tensor)


def test_a_setting_that_only_the_teacher_has_is_named():
    with pytest.raises(AttributeError, match="reads 'num_heads', which the teacher has and the student lacks"):
        seam(nn.MultiheadAttention(4, 2), nn.Linear(4, 4)).num_heads  # noqa: B018


def test_a_teacher_that_changes_its_input_in_place_is_refused():
    with pytest.raises(HandoverError, match="inplace=False"):
        seam(nn.ReLU(inplace=True), nn.ReLU())(torch.randn(4))


def test_autocast_may_give_two_dtypes_and_the_teachers_wins():
    here = seam(nn.Linear(4, 4), Returns(1.0), weight=0.5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert here(torch.ones(2, 4)).dtype == torch.bfloat16


class Cache:
    """The shape of a Hugging Face cache."""

    def __init__(self) -> None:
        self.keys: list[torch.Tensor] = []

    def update(self, key):
        self.keys.append(key)

    def get_seq_length(self):
        return len(self.keys)


class Remembers(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(scale))

    def forward(self, x, past_key_values=None):
        if past_key_values is not None:
            past_key_values.update(self.scale * x)
            return sum(past_key_values.keys)
        return self.scale * x


def test_a_cache_is_never_written_by_both_sides():
    here = seam(Remembers(1.0), Remembers(10.0), weight=0.5)
    cache, x = Cache(), torch.ones(1)
    first = here(x, past_key_values=cache)
    second = here(x, past_key_values=cache)
    assert [key.item() for key in cache.keys] == [10.0, 10.0]
    assert (first.item(), second.item()) == (5.5, 11.0)


def test_a_cache_given_by_position_and_holding_a_graph_is_forked_too():
    here = seam(Remembers(1.0), Remembers(10.0), weight=0.5)
    cache = Cache()
    cache.update(torch.ones(1, requires_grad=True) * 2)
    assert here(torch.ones(1), cache).item() == pytest.approx(0.5 * 3 + 0.5 * 12)
    assert len(cache.keys) == 2


def test_a_seam_can_be_copied():
    here = seam(Returns(5.0), Returns(3.0), weight=0.5)
    twin = copy.deepcopy(here)
    twin.set_weight(1.0, 1.0)
    assert here(torch.ones(1)).item() == 4.0
    assert twin(torch.ones(1)).item() == 3.0


def test_a_withheld_weight_has_parts_but_no_protocols():
    weight = Withheld("blocks.0.attn", "weight", torch.ones(1))
    assert weight.ndim == 1
    assert weight.data.name == "blocks.0.attn.weight.data"
    assert not hasattr(weight, "__array__")
    with pytest.raises(HandoverError, match=r"uses the weights 'blocks\.0\.attn\.weight\.data' inside it"):
        torch.add(torch.ones(1), weight.data)
    with pytest.raises(HandoverError, match=r"calls div_\(\) of the weights 'blocks\.0\.attn\.weight' inside it"):
        weight.div_(2)  # as RWKV rescales its layers


def test_a_new_seam_is_its_teacher_in_training_and_in_evaluation():
    made, x = Seam(Returns(2.0), Returns(3.0), Site("here")), torch.ones(2)
    for mode in (True, False):
        assert made.train(mode)(x).tolist() == [2.0, 2.0]
