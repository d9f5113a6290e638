"""What the processes of the distributed tests run; `one` is the single process that they are compared with."""

from __future__ import annotations

import contextlib
import gc
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import segue
from tests.helpers.tiny import SITES, Net, batch
from tests.students.attention import tiny_attention  # noqa: F401  registers the attention of tiny.Net

WORLD = 2
TOTAL = 20  # aggr20 takes over at step 4
STEPS = 7
ENGINES = ("ddp", "fsdp2")


def jobs(folder: Path) -> dict[str, Callable[[], Any]]:
    """Return every job under every engine, by name."""
    found = {}
    for engine in ENGINES:
        found |= {f"{job.__name__} {engine}": partial(job, engine, folder) for job in JOBS}
    return found


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


class Run:
    """A handover and the model as its engine calls it."""

    def __init__(self, engine: str, plan: segue.Plan, optimizer: type = torch.optim.SGD, dropout: float = 0.0) -> None:
        self.engine = engine
        self.model = Net(dropout=dropout).train()
        self.handover = segue.replace_(self.model, plan, total_steps=TOTAL)
        self.call: nn.Module = self.model
        if engine == "ddp":
            self.call = DistributedDataParallel(self.model)
        elif engine == "fsdp2":
            mesh = init_device_mesh("cpu", (WORLD,))
            for unit in self.handover.units():
                fully_shard(unit, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
            assert all(isinstance(p, DTensor) for p in self.model.parameters())
        self.optimizer = optimizer(self.handover.parameters(), lr=0.01)

    def train(self, steps: int) -> list[float]:
        """Take steps on this rank's part of the global batch and return the global losses."""
        return [self.step() for _ in range(steps)]

    def step(self) -> float:
        x, y = (mine(part) for part in batch(self.handover.steps_done))
        loss = F.cross_entropy(self.call(x), y) + self.handover.aux_loss()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.handover.step()
        return mean(loss.detach())

    @torch.no_grad()
    def evaluate(self) -> float:
        self.call.eval()
        x, y = (mine(part) for part in batch(100))
        loss = mean(F.cross_entropy(self.call(x), y))
        self.call.train()
        return loss

    def weights(self) -> dict[str, Tensor]:
        """Return what was trained, whole."""
        return {name: whole(p).clone() for name, p in self.handover.named_parameters()}


def mine(part: Tensor) -> Tensor:
    return part.chunk(WORLD)[rank()] if dist.is_initialized() else part


def mean(loss: Tensor) -> float:
    if dist.is_initialized():
        dist.all_reduce(loss)
        loss /= WORLD
    return loss.item()


def whole(x: Tensor) -> Tensor:
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach()


def coins(seed: int, step: int) -> list[float]:
    alpha = segue.schedules.aggr20()(step / TOTAL, segue.Site("any"))
    gate = segue.gates.Bernoulli()
    return [gate(alpha, segue.gates.Noise(seed, step, f"blocks.{i}.attn")) for i in range(3)]


def unlucky_seed() -> int:
    """Return a seed with a step on the way that has every coin on the teacher, one all on the student, and a mixed one."""
    wanted = {0.0, 3.0}
    return next(s for s in range(1000) if wanted < {sum(coins(s, step)) for step in (1, 2, 3)})


def plans() -> dict[str, segue.Plan]:
    gates = {
        "blend": segue.gates.Blend(),
        "bernoulli": segue.gates.Bernoulli(),
        "gumbel": segue.gates.GumbelSoftmax(),
    }
    extras: dict[str, dict[str, Any]] = {
        "plain": {},
        "relative guidance": {"guidance": segue.losses.FeatureGuidance(scale="relative")},
        "guidance at the paper's scale": {"guidance": segue.losses.FeatureGuidance(scale="paper")},
        "distillation": {"distill": segue.losses.LogitDistillation()},
    }
    seed = unlucky_seed()
    found = {
        f"{gate}, {extra}": segue.Plan(sites=SITES, gate=gates[gate], seed=seed, **extras[extra])
        for gate in gates
        for extra in extras
    }
    local = segue.schedules.Hold(fraction=0.1, then=segue.schedules.Linear(until=0.1))
    always = segue.losses.FeatureGuidance(schedule=segue.schedules.Constant(alpha=1.0))
    return found | {
        "all trains": segue.Plan(sites=SITES, train="all", distill=segue.losses.LogitDistillation()),
        "gradient through the teacher": segue.Plan(sites=SITES, teacher_gradient=True, guidance=always),
        "teacher's stream": segue.methods.fitnets(sites=SITES),
        "hold": segue.Plan(sites=SITES, schedule=local),
        "adaptive": segue.Plan(
            sites=SITES,
            schedule=segue.schedules.Adaptive(until=0.3, budget=2.0, every=1),
            guidance=segue.losses.FeatureGuidance(),
            distill=segue.losses.LogitDistillation(),
        ),
        "performer": segue.Plan(sites=SITES, student=segue.students.Performer(features=8), guidance=always),
        "windowed linear": segue.Plan(sites=SITES, student=segue.students.WindowedLinear(window=2), guidance=always),
        "a span": segue.Plan(sites=segue.Span("blocks", every=3), gate=gates["bernoulli"], seed=seed, guidance=always),
        "hold with guidance": segue.Plan(sites=SITES, schedule=local, guidance=always),
    }


def train(engine: str, folder: Path) -> dict[str, Any]:
    return {name: _train(engine, plan) for name, plan in plans().items()}


def _train(engine: str, plan: segue.Plan) -> dict[str, Any]:
    """Train a plan through takeover, with an evaluation on the way; return losses and final weights."""
    run = Run(engine, plan)
    losses = run.train(2)
    losses.append(run.evaluate())
    losses += run.train(STEPS - 2)
    assert set(run.handover.alphas.values()) == {0.0}
    return {"losses": losses, "weights": run.weights(), "loop": run.handover.closed_loop.state_dict()}


def release(engine: str, folder: Path) -> dict[str, Any]:
    """Train through a takeover that releases the teachers, then resume; return the losses and the bytes left of them."""
    plan = segue.Plan(sites=SITES, guidance=segue.losses.FeatureGuidance(), release=True)
    run = Run(engine, plan)
    teachers = [seam.teacher for seam in run.handover.seams.values()]
    references = [weakref.ref(p) for teacher in teachers for p in teacher.parameters()]
    gathered = [p for teacher in teachers for p in _gathered(teacher)] if engine == "fsdp2" else []
    yours = teachers[0].proj.bias.detach()  # as in a state_dict that a user keeps
    del teachers
    bytes_held, losses = [], []
    for _ in range(STEPS - 1):
        bytes_held.append(_held(references) + sum(x.untyped_storage().nbytes() for x in _outputs(gathered)))
        losses += run.train(1)
    written = segue.save(run.handover, folder / f"released {engine}")
    again = Run(engine, plan)
    segue.load_(again.handover, written)
    return {
        "losses": losses + run.train(1),
        "resumed": again.train(1),
        "bytes": bytes_held,
        "yours": yours.untyped_storage().nbytes() if engine != "fsdp2" else None,
    }


def _held(references: list[weakref.ref[nn.Parameter]]) -> int:
    gc.collect()
    alive = [p for reference in references if (p := reference()) is not None]
    return sum((p.to_local() if isinstance(p, DTensor) else p).untyped_storage().nbytes() for p in alive)


def _gathered(unit: nn.Module) -> list[Any]:
    """Return FSDP2's own records of a unit's parameters, which also hold them whole while they are in use."""
    return unit._get_fsdp_state()._fsdp_param_group.fsdp_params  # type: ignore[operator]


def _outputs(records: list[Any]) -> list[Tensor]:
    return [x for record in records for x in record.all_gather_outputs]


def resume(engine: str, folder: Path) -> dict[str, Any]:
    """Stop a run in the middle of the anneal and continue it in a new handover."""
    with _own_randomness():
        run = resumable(engine)
        run.train(2)
        if rank() == 0:
            time.sleep(0.5)  # ranks are never in step
        written = segue.save(run.handover, folder / engine, optimizer=run.optimizer)
        saved = {"weights": run.weights(), "evaluation": run.evaluate()}
        losses = run.train(STEPS - 2)
    again = resumable(engine)
    segue.load_(again.handover, written, optimizer=again.optimizer)
    resumed = again.train(STEPS - 2)
    return {
        "losses": losses,
        "resumed": resumed,
        "weights": run.weights(),
        "resumed weights": again.weights(),
        "saved": saved,
        "folder": str(written),
    }


def resumable(engine: str) -> Run:
    plan = segue.Plan(sites=SITES, gate=segue.gates.GumbelSoftmax(), guidance=segue.losses.FeatureGuidance(), train="all")
    return Run(engine, plan, torch.optim.AdamW, dropout=0.2)


def verify(engine: str, folder: Path) -> dict[str, Any]:
    """Prove a wrapped model in the middle of its run, and show that nothing was disturbed by it."""
    run, undisturbed = (Run(engine, segue.Plan(sites=SITES)) for _ in range(2))
    run.train(1)
    undisturbed.train(1)
    x = mine(batch()[0])
    passed = run.handover.verify(x, optimizer=run.optimizer).passed
    cosines = [measured.cosine for measured in run.handover.similarity(x).values()]
    return {"passed": passed, "cosines": cosines, "losses": run.train(2), "undisturbed": undisturbed.train(2)}


def calibrate(engine: str, folder: Path) -> dict[str, Any]:
    """Fit students on this rank's part of the batch."""
    run = Run(engine, segue.Plan(sites=SITES, student=segue.students.LinearAttention()))
    fitted = run.handover.calibrate([mine(batch()[0])])
    return {"after": [fit.after for fit in fitted.values()], "weights": run.weights()}


JOBS = (train, release, resume, verify, calibrate)


@contextlib.contextmanager
def _own_randomness() -> Iterator[None]:
    """Give each rank its own dropout, and leave the generator disturbed afterwards."""
    torch.manual_seed(100 + rank())
    yield
    torch.manual_seed(7)
