"""What the tests of mixers share: inputs, padding, and the comparison with a naive reference, outputs and gradients."""

import copy
from functools import partial

import torch
from torch import Tensor, nn

from segue.students import AttentionSpec, Projection, Softmax
from segue.students.attention.mixer import Mixer
from segue.students.attention.module import Operator

HEADS, KEY_HEADS, SIZE = 6, 2, 7

# The largest difference relative to the largest value; inputs are numbers that bf16 can hold, so all precisions see the same.
TOLERANCE = {
    torch.float64: 1e-11,  # sums in another order
    torch.float32: 5e-5,  # the same, with a unit of 1e-7 and a few hundred terms that may cancel
    torch.bfloat16: 1.05 * 2**-8,  # computed in float32 and rounded once, by half a unit of 2**-7
}


def attention_spec(heads: int = HEADS, key_heads: int = KEY_HEADS, size: int = SIZE, tokens: int = 1000, **others):
    projections = {part: Projection(torch.zeros(n * size, 1)) for part, n in (("query", heads), ("key", key_heads))}
    return AttentionSpec(heads=heads, head_size=size, value=projections["key"], tokens=tokens, **projections, **others)


def mixer_of(operator: Operator, spec: AttentionSpec) -> Mixer:
    """Build the operator's mixer, with weights that differ between heads and that bf16 can hold."""
    torch.manual_seed(0)
    mixer = operator.mixer(spec)
    for parameter in mixer.parameters():
        parameter.data += 0.3 * torch.randn(parameter.shape)
    return mixer.bfloat16().float()


def inputs(batch: int, spec: AttentionSpec, tokens: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draw queries, keys, values and an output gradient that bf16 can hold; shifted, so that few products of relus vanish."""
    generator = torch.Generator().manual_seed(seed)
    heads = (spec.heads, spec.key_heads, spec.key_heads, spec.heads)
    draws = (torch.randn(batch, h, tokens, spec.head_size, generator=generator) for h in heads)
    q, k, v, g = ((x + 1).bfloat16().float() for x in draws)
    return q, k, v, g


def padding(tokens: int) -> Tensor:
    """Return the token masks of four sequences: padded on the left, on the right, in between, and everywhere."""
    position, third = torch.arange(tokens), tokens // 3
    scattered = torch.rand(tokens, generator=torch.Generator().manual_seed(1)) < 0.6
    scattered[tokens // 2] = True
    return torch.stack([position >= third, position < tokens - third, scattered, position < 0])


def run(call, mixer: nn.Module, q, k, v, token_mask, causal: bool, g: Tensor, dtype: torch.dtype = torch.float32):
    """Return the output and the gradients by q, k, v and the mixer's parameters, by name; padding has no output gradient."""
    if token_mask is not None:
        g = g.masked_fill(~token_mask[:, None, :, None], 0.0)
    leaves = {n: x.detach().to(dtype).requires_grad_() for n, x in (("q", q), ("k", k), ("v", v))}
    y = call(leaves["q"], leaves["k"], leaves["v"], token_mask, causal)
    assert y.dtype == dtype
    assert y.shape == q.shape
    leaves |= dict(mixer.named_parameters())
    found = torch.autograd.grad(y, list(leaves.values()), g.to(dtype), allow_unused=True, materialize_grads=True)
    output = y.detach() if token_mask is None else y.detach().masked_fill(~token_mask[:, None, :, None], 0.0)
    return {"output": output} | dict(zip(leaves, found, strict=True))


def assert_near(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for part, value in expected.items():
        largest = max(value.abs().max().item(), 0.5)  # terms that cancel leave the noise of their sum
        difference = (found[part].double() - value).abs().max().item() / largest
        assert difference <= tolerance, f"{part} differs by {difference:.2g} of its largest value"


def assert_naive(naive, operator, spec, q, k, v, token_mask, causal, g, dtypes=tuple(TOLERANCE), slack: float = 1) -> None:
    """Compare a mixer in several precisions with a naive reference in float64."""
    mixer = mixer_of(operator, spec)
    double = copy.deepcopy(mixer).double()
    right = run(partial(naive, operator, spec, double), double, q, k, v, token_mask, causal, g, torch.float64)
    for dtype in dtypes:
        ours = copy.deepcopy(mixer).to(dtype)
        found = run(ours, ours, q, k, v, token_mask, causal, g, dtype)
        assert_near(found, right, TOLERANCE[dtype] * (slack if dtype != torch.bfloat16 else 1))


def assert_naive_for_large_logits(naive, operator: Operator, causal: bool) -> None:
    spec = attention_spec(heads=2, key_heads=1)
    q, k, v, g = inputs(1, spec, 100)
    slack = 100  # errors of k count this much more
    assert_naive(naive, operator, spec, 100 * q, k, v, None, causal, g, [torch.float64], slack)


def assert_softmax(operator: Operator, tokens: int, causal: bool) -> None:
    """Compare with softmax attention itself."""
    spec, token_mask = attention_spec(), padding(tokens)
    q, k, v, g = inputs(4, spec, tokens)
    mixer, softmax = mixer_of(operator, spec).double(), Softmax().mixer(spec)
    right = run(softmax, softmax, q, k, v, token_mask, causal, g, torch.float64)
    found = run(mixer, mixer, q, k, v, token_mask, causal, g, torch.float64)
    assert_near({part: found[part] for part in right}, right, TOLERANCE[torch.float64])
