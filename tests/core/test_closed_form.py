"""The closed form: gates and scales against what the original model itself reports of its heads."""

import math

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import segue
from segue.errors import DataError, StudentError
from segue.students import ClosedForm, FarFactor, GatedDeltaNet, GatedLinear, LinearAttention, WindowedLinear
from segue.students.attention.mixers.gated import GatedMixer
from segue.students.closed_form import MixerCall, attention_sums, biases, value_scale
from tests.helpers.models import CASES
from tests.students.attention.mixers.checks import attention_spec, inputs

SITES = "model.layers.*.self_attn"


def llama(seed: int = 0) -> LlamaForCausalLM:
    """A small decoder whose heads look at few tokens."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=50, num_key_value_heads=2, initializer_range=0.3, **sizes)
    config._attn_implementation = "eager"
    return LlamaForCausalLM(config).eval()


def batch(tokens: int = 40) -> dict[str, torch.Tensor]:
    ids = torch.randint(1, 50, (3, tokens), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :10] = 0
    return {"input_ids": ids, "attention_mask": mask}


def begin(student, model=None) -> segue.Handover:
    return segue.replace_(model or llama(), segue.Plan(sites=SITES, student=student), total_steps=2)


def reported(model: LlamaForCausalLM, data: dict[str, torch.Tensor]) -> list[tuple[list[float], list[float]]]:
    """Return by layer the mean look-back distance and concentration of each head, from the weights that the model returns."""
    with torch.no_grad():
        layers = model(**data, output_attentions=True).attentions
    found = []
    for weights in layers:
        far: list[list[float]] = [[] for _ in range(4)]
        sharp: list[list[float]] = [[] for _ in range(4)]
        for row, mask in enumerate(data["attention_mask"]):
            first = int(mask.argmax())
            for head in range(4):
                for t in range(first + 1, len(mask)):
                    p = weights[row, head, t, first : t + 1].double()
                    far[head].append(sum(float(p[s]) * (t - first - s) for s in range(len(p))))
                    entropy = -sum(float(x) * math.log(float(x)) for x in p if x > 0)
                    sharp[head].append(1 - entropy / math.log(len(p)))
        found.append(tuple([sum(x) / len(x) for x in part] for part in (far, sharp)))
    return found


@pytest.mark.parametrize("student", [GatedLinear(), GatedDeltaNet()], ids=["linear", "delta"])
def test_gates_are_those_of_the_attention_that_the_original_reports(student):
    data = batch()
    expected = reported(llama(), data)
    handover = begin(student)
    handover.calibrate([{name: x[:2] for name, x in data.items()}, {name: x[2:] for name, x in data.items()}], ClosedForm())
    for seam, (far, sharp) in zip(handover.seams.values(), expected, strict=True):
        gates = seam.student.mixer.gates
        logs, write, output = gates(torch.randn(1, 2, 1, 8), None)
        for head in range(2):  # each is shared by two heads of the original
            half_life = (far[2 * head] + far[2 * head + 1]) / 2
            assert math.log(0.5) / logs[0, head].item() == pytest.approx(half_life, rel=1e-4)
            assert write[0, head].item() == pytest.approx(0.3 + 0.2 * (sharp[2 * head] + sharp[2 * head + 1]), rel=1e-4)
        assert output.unique().tolist() == [1.0]
        assert gates.weight.count_nonzero() == 0


def test_values_are_scaled_by_least_squares_for_each_head():
    handover, data, calls = begin(GatedDeltaNet()), {"input_ids": batch()["input_ids"]}, []
    handover.calibrate([data], ClosedForm())
    mixer = next(iter(handover.seams.values())).student.mixer  # its input is that of its teacher
    mixer.register_forward_hook(lambda _mixer, args, y: calls.append((*args[:3], y / mixer.value_scale)))
    with torch.no_grad(), handover.as_student():
        handover.model(**data, use_cache=False)
    q, k, v, unscaled = calls[0]
    theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    for head, scale in enumerate(mixer.value_scale.flatten().tolist()):
        x, y = (part[:, head].double().reshape(-1, 1) for part in (unscaled, theirs))
        assert 0.1 < scale < 10
        assert scale == pytest.approx(torch.linalg.lstsq(x, y).solution.item(), rel=1e-4)


def test_a_scale_stays_between_a_tenth_and_ten():
    summed = torch.tensor([[-1.0, 3.0, 500.0, 0.0], [1.0, 2.0, 1.0, 0.0]], dtype=torch.float64)
    assert value_scale(summed).flatten().tolist() == [0.1, 1.5, 10.0, 0.1]


def test_heads_that_look_at_one_token_and_at_all_alike():
    spec = attention_spec(heads=2, key_heads=2, size=8)
    mixer = GatedLinear().mixer(spec)
    q, k, v, _ = inputs(1, spec, 9)
    q[:, 0], k[:, 0] = 1e3 * torch.eye(9)[:, :8], 1e3 * torch.eye(9)[:, :8]  # the last one looks at nothing in particular
    q[:, 1] = 0.0
    summed = attention_sums(MixerCall(q[:, :, :8], k[:, :, :8], v[:, :, :8], None, True, v), mixer)
    distance, sharp = (summed[:2] / summed[2]).tolist()
    assert distance == pytest.approx([0, sum(range(1, 8)) / 2 / 7])
    assert sharp == pytest.approx([1, 0], abs=1e-6)
    stays, write, _ = biases(summed, mixer).sigmoid().split(2)
    assert stays[0].item() == pytest.approx(0.5)  # a half-life of one token, not of none
    assert write.tolist() == pytest.approx([0.7, 0.3])


def test_without_a_decay_only_the_others_are_set():
    handover = begin(GatedDeltaNet(decay=False))
    handover.calibrate([batch()], ClosedForm())
    for seam in handover.seams.values():
        write = seam.student.mixer.gates.bias[:2].sigmoid()
        assert ((write > 0.3) & (write < 0.7)).all()


def test_the_errors_are_those_of_the_outputs():
    handover = begin(GatedLinear())
    fitted = handover.calibrate([batch()], ClosedForm())
    teachers, students = {}, {}

    def ask(name, seam):
        def hook(_teacher, args, kwargs, output):
            kwargs = {**kwargs, "past_key_values": None}
            teachers[name], students[name] = output[0], seam.student(*args, **kwargs)[0]

        return hook

    for name, seam in handover.seams.items():
        seam.teacher.register_forward_hook(ask(name, seam), with_kwargs=True)
    with torch.no_grad(), handover.as_teacher():
        handover.model(**batch(), use_cache=False)
    real = batch()["attention_mask"].bool()
    for name, fit in fitted.items():
        right = ((students[name] - teachers[name])[real].norm() / teachers[name][real].norm()).item()
        assert fit.after == pytest.approx(right, rel=1e-4)
        assert fit.before != fit.after


def test_students_that_are_not_causal_are_started_too():
    case = next(case for case in CASES if case.name == "HF ViT")
    handover = segue.replace_(case.build().eval(), segue.Plan(sites=case.sites, student=GatedLinear()), total_steps=2)
    handover.calibrate([case.batch().kwargs], ClosedForm())
    for seam in handover.seams.values():
        mixer = seam.student.mixer
        assert isinstance(mixer, GatedMixer)
        assert mixer.value_scale.unique().numel() > 1


def test_other_students_are_refused_and_nothing_changes():
    handover = begin(LinearAttention())
    with pytest.raises(StudentError) as error:
        handover.calibrate([batch()], ClosedForm())
    assert str(error.value) == (
        "ClosedForm() cannot start the student at site 'model.layers.0.self_attn'.\n"
        "  LinearAttention has no gates.\n"
        "  Hint: use it with GatedLinear or GatedDeltaNet; LeastSquares() fits other students. Nothing was changed."
    )
    gated = begin(GatedLinear())
    with pytest.raises(DataError, match="there are no batches"):
        gated.calibrate([], ClosedForm())


@pytest.mark.parametrize(
    ("student", "method", "passes"),
    [(GatedLinear(), ClosedForm(), 1), (GatedLinear(), ClosedForm(), 2), (WindowedLinear(window=8), FarFactor(), 1)],
    ids=["gates", "scales", "far"],
)
def test_what_is_interrupted_leaves_the_students_as_they_were(student, method, passes):
    """Ctrl-C in a later pass, after some parameters were set."""
    handover, calls = begin(student), []
    before = {name: parameter.detach().clone() for name, parameter in handover.named_parameters()}

    def interrupts(*_):
        calls.append(None)
        if len(calls) > passes:
            raise KeyboardInterrupt

    handle = handover.model.lm_head.register_forward_hook(interrupts)  # once in each pass
    with pytest.raises(KeyboardInterrupt):
        handover.calibrate([batch()], method)
    handle.remove()
    for name, parameter in handover.named_parameters():
        assert torch.equal(parameter, before[name]), name
    handover.calibrate([batch()], method)
    assert any(not torch.equal(parameter, before[name]) for name, parameter in handover.named_parameters())
