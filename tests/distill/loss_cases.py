"""Small students and teachers for the loss, and the comparison with the eager oracle."""

from dataclasses import dataclass, field

import torch

from gramian.distill import Head, distill_loss
from gramian.distill.teacher.signal import Tail
from tests.distill import eager

BARS = {torch.float64: (1e-10, 1e-10), torch.float32: (1e-5, 1e-4)}
"""Relative: of the loss, and of its gradients."""


@dataclass
class Case:
    tokens: int = 9
    vocabulary: int = 37
    teacher_vocabulary: int | None = None
    dtype: torch.dtype = torch.float64
    seed: int = 0
    masked: tuple[int, ...] = (2, 5)
    bias: bool = False
    scale: float = 1.0
    softcap: float | None = None
    device: str = "cpu"
    widths: tuple[int, int] = (6, 8)
    tensors: dict = field(init=False)

    def __post_init__(self):
        source = torch.Generator().manual_seed(self.seed)

        def draw(*shape, scale=1.0):
            return (scale * torch.randn(*shape, generator=source, dtype=torch.float64)).to(self.device, self.dtype)

        V, U = self.vocabulary, self.teacher_vocabulary or self.vocabulary
        student, teacher = self.widths
        self.tensors = {
            "student_hidden": draw(self.tokens, student),
            "student_weight": draw(V, student, scale=2 / student**0.5),
            "teacher_hidden": draw(self.tokens, teacher),
            "teacher_weight": draw(U, teacher, scale=3 / teacher**0.5),
        }
        self.student_bias = draw(V) if self.bias else None
        self.teacher_bias = draw(U) if self.bias else None
        self.targets = torch.randint(V, (self.tokens,), generator=source).to(self.device)
        self.targets[[i for i in self.masked if i < self.tokens]] = -100

    def heads(self, student_weight, student_bias):
        plain = not self.bias and self.scale == 1.0 and self.softcap is None
        if plain:
            return student_weight, self.tensors["teacher_weight"]
        options = (self.scale, self.softcap)
        return Head(student_weight, student_bias, *options), Head(
            self.tensors["teacher_weight"], self.teacher_bias, *options
        )


def ours(case, T, outer=1.0, **options):
    """The output, and the gradients by name, of `outer` · loss."""
    leaves = {
        "hidden": case.tensors["student_hidden"].clone().requires_grad_(),
        "weight": case.tensors["student_weight"].clone().requires_grad_(),
    }
    if case.bias:
        leaves["bias"] = case.student_bias.clone().requires_grad_()
    if not isinstance(T, float):
        leaves["T"] = T = T.clone().requires_grad_()
    student, teacher = case.heads(leaves["weight"], leaves.get("bias"))
    if not {"teacher_topk", "teacher_sampled"} & set(options):
        options |= {"teacher_hidden": case.tensors["teacher_hidden"], "teacher_weight": teacher}
    out = distill_loss(leaves["hidden"], student, case.targets, temperature=T, **options)
    gradients = torch.autograd.grad(outer * out.loss, tuple(leaves.values()))
    return out, dict(zip(leaves, gradients, strict=True))


def oracle(case, T, outer=1.0, **options):
    """The same by autograd through whole logits in float64, on the inputs as they are."""
    leaves = {
        "hidden": case.tensors["student_hidden"].double().cpu().requires_grad_(),
        "weight": case.tensors["student_weight"].double().cpu().requires_grad_(),
    }
    if case.bias:
        leaves["bias"] = case.student_bias.double().cpu().requires_grad_()
    leaves["T"] = torch.tensor(float(T), dtype=torch.float64, requires_grad=True)
    squash = (case.scale, case.softcap)
    teacher_bias = case.teacher_bias.double().cpu() if case.bias else None
    s = eager.logits(leaves["hidden"], leaves["weight"], leaves.get("bias"), *squash)
    t = teacher_logits(case, teacher_bias, squash)
    loss, metrics = eager.loss(s, case.targets.cpu(), t, leaves["T"], **options)
    gradients = torch.autograd.grad(outer * loss, tuple(leaves.values()), materialize_grads=True)
    return loss.detach(), metrics, dict(zip(leaves, gradients, strict=True))


def teacher_logits(case, bias=None, squash=(1.0, None)):
    hidden, weight = (case.tensors[name].double().cpu() for name in ("teacher_hidden", "teacher_weight"))
    return eager.logits(hidden, weight, bias, *squash)


def relative(got, want):
    """|got − want| / |want|, and of zero nothing but zero is close."""
    want = want.detach()
    error, size = float((got.detach().double().cpu() - want).norm()), float(want.norm())
    return error / size if size else (0.0 if error == 0 else torch.inf)


def check(case, T, bars=None, metrics=True, oracle_options=None, **options):
    """Ours against the oracle within the bars of the dtype."""
    loss_bar, gradient_bar = bars or BARS[case.dtype]
    outer = 1.7
    temperature = torch.tensor(T, dtype=case.dtype, device=case.device)
    out, gradients = ours(case, temperature, outer, **options)
    ours_only = ("teacher_topk",)
    same = {name: value for name, value in options.items() if name not in ours_only} | (oracle_options or {})
    loss, want_metrics, want = oracle(case, T, outer, **same)
    assert abs(float(out.loss.detach()) - float(loss)) <= loss_bar * float(loss) + 1e-13  # the oracle's own rounding
    for name in gradients.keys() - {"T"}:
        assert relative(gradients[name], want[name]) <= gradient_bar, name
    room = 1e-13
    if case.dtype == torch.float32:
        terms = options.get("num_terms") or int((case.targets != -100).sum())
        kl = float(want_metrics["kl"]) * int((case.targets != -100).sum()) / terms
        room += outer * 1e-5 * options.get("kd_weight", 1.0) * 2 * T * kl
    assert abs(float(gradients["T"]) - float(want["T"])) <= gradient_bar * abs(float(want["T"])) + room, "T"
    if metrics:
        for name, value in want_metrics.items():
            got = float(getattr(out, name))
            assert abs(got - float(value)) < 10 * loss_bar * (abs(float(value)) + 1e-2), name
    return out


def topk_of(case, k, knots=None):
    """(ids, logits, tail) of the teacher, the curve computed here from whole logits."""
    t = teacher_logits(case)
    logits, ids = t.topk(k, 1)
    tail = None
    if knots is not None:
        rest = t.scatter(1, ids, -torch.inf)
        values = torch.stack([(u * rest).logsumexp(1) for u in knots.double()], 1)
        slopes = torch.stack([((u * rest).softmax(1) * t).sum(1) for u in knots.double()], 1)
        tail = Tail(values, slopes, knots)
    return ids.to(case.device), logits.to(case.device), tail
