"""K-FAC against the dense oracle: small float64 models times policies, damping modes, powers and the clip.

The oracle knows one layer, the linear one. So it sees a twin of every model, with the same numbers, in which an embedding
is a linear layer on one-hot rows and a convolution one on patches; nothing of the library takes part in the twin.

Legend: B samples, T tokens, I inputs (M with the bias), O outputs, V classes, N loss terms.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gramian.curvature import Block, KFACNaturalGradient
from gramian.models import GPT, GPTConfig
from gramian.oracles import dense_kfac, single_sample
from gramian.verify.checks import Comparison, VerifyCheck, relative_error

TOLERANCE = 1e-10
"""Of everything in float64 on one device."""
DEVICES_FLOAT64 = 1e-8
DEVICES_FLOAT32 = 1e-5
STANDARD_ERRORS = 5.0
"""By how many of them label frequencies may be off; labels of a neighbouring position are off by about 20."""

POLICIES = ("all", "auto", "hybrid", "small_only")
DAMPING_MODES = ("pi", "factored", "joint")
POWERS = {-1.0: "-1", -0.5: "-1/2", 0.5: "1/2", 1.0: "1"}
DAMPING, DAMPING_A, DAMPING_G = 1e-2, 2e-2, 5e-3
KAPPA = 10.0
"""Of the clip: so low that it acts on most layers."""
DRAWS, CONTRAST = 32, 4.0
"""Draws of labels for their frequencies, and what the head is multiplied by, so that positions differ more."""
IGNORE = -100


@dataclass(frozen=True)
class KFACCase:
    """Options under which a natural gradient is computed."""

    policy: str
    mode: str
    clip: bool
    power: float

    @property
    def label(self) -> str:
        """For a table."""
        return f"{self.policy}, power {POWERS.get(self.power, self.power)}{', clip' if self.clip else ''}"


CASES = tuple(KFACCase(*which) for which in itertools.product(POLICIES, DAMPING_MODES, (False, True), POWERS))


# ---- models ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class KFACSubject:
    """A model and one batch for it; the loss is a cross entropy with one term per label."""

    name: str
    build: Callable[[], nn.Module]
    draw: Callable[[torch.Generator, int], tuple[Tensor, Tensor]]
    """Inputs and labels of so many samples."""
    samples: int
    head: str
    """The layer that returns the logits."""
    causal: bool = False
    """Whether position t predicts the label of t+1 in a Hugging Face style batch."""

    def model(self, device: torch.device, dtype: torch.dtype = torch.float64) -> nn.Module:
        """The same weights every time; noise on them, since zero biases and unit scales hide errors."""
        generator = torch.Generator().manual_seed(1)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            model = self.build().double()
            for p in model.parameters():
                p.add_(torch.randn(p.shape, generator=generator, dtype=p.dtype), alpha=0.3)
        return model.to(device, dtype)

    def batch(self, device: torch.device, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
        """The same numbers every time."""
        x, y = self.draw(torch.Generator().manual_seed(2), self.samples)
        return x.to(device, dtype) if x.is_floating_point() else x.to(device), y.to(device)


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 12), nn.Tanh(), nn.Linear(12, 10), nn.Tanh(), nn.Linear(10, 5))


def _convnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, stride=2, padding=1),
        nn.Tanh(),
        nn.Conv2d(6, 5, 2),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(20, 4),
    )


def _deep_linear() -> nn.Module:
    widths = (6, 9, 9, 9, 4)
    return nn.Sequential(*(nn.Linear(i, o, bias=False) for i, o in itertools.pairwise(widths)))


def _gpt(tied: bool) -> nn.Module:
    return GPT(GPTConfig(vocabulary=24, context=6, layers=1, width=8, heads=2, tied=tied))


def _real(*shape: int, classes: int) -> Callable[[torch.Generator, int], tuple[Tensor, Tensor]]:
    def draw(generator: torch.Generator, samples: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(samples, *shape, generator=generator, dtype=torch.float64)
        return x, torch.randint(classes, (samples,), generator=generator)

    return draw


def _text(generator: torch.Generator, samples: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(24, (2, samples, 5), generator=generator)
    return ids[0], ids[1]


SUBJECTS = {
    subject.name: subject
    for subject in (
        KFACSubject("mlp", _mlp, _real(7, classes=5), samples=6, head="4"),
        KFACSubject("gpt", lambda: _gpt(False), _text, samples=3, head="head", causal=True),
        KFACSubject("tied gpt", lambda: _gpt(True), _text, samples=3, head="head", causal=True),
        KFACSubject("conv net", _convnet, _real(3, 5, 5, classes=4), samples=3, head="5"),
        KFACSubject("deep linear", _deep_linear, _real(6, classes=4), samples=5, head="3"),
    )
}


def cross_entropy(model: nn.Module, x: Tensor, y: Tensor, reduction: str = "mean") -> Tensor:
    """The loss of all subjects; labels that are `IGNORE` have no term."""
    return F.cross_entropy(model(x).flatten(0, -2), y.flatten(), ignore_index=IGNORE, reduction=reduction)


# ---- the reference ---------------------------------------------------------------------------------------------------


class _Lookup(nn.Module):
    """An embedding as a linear layer on one-hot rows; one row of ids stands for the whole batch."""

    def __init__(self, table: nn.Embedding, batch: int) -> None:
        super().__init__()
        self.classes, self.batch = table.num_embeddings, batch
        self.linear = _linear_with(table.weight.detach().mT, None)

    def forward(self, ids_BT: Tensor) -> Tensor:
        ids_BT = ids_BT.expand(self.batch, -1)
        out: Tensor = self.linear(F.one_hot(ids_BT, self.classes).to(self.linear.weight))
        return out


class _Patches(nn.Module):
    """A convolution as a linear layer on patches."""

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        self.geometry: dict[str, Any] = {
            name: getattr(conv, name) for name in ("kernel_size", "stride", "padding", "dilation")
        }
        self.linear = _linear_with(conv.weight.detach().flatten(1), conv.bias)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        g = self.geometry
        sizes = zip(x_BCHW.shape[2:], g["kernel_size"], g["stride"], g["padding"], g["dilation"], strict=True)
        places = [(side + 2 * pad - hop * (size - 1) - 1) // step + 1 for side, size, step, pad, hop in sizes]
        y_BOHW: Tensor = self.linear(F.unfold(x_BCHW, **g).mT).mT.unflatten(2, places)
        return y_BOHW


def _linear_with(weight_OI: Tensor, bias_O: Tensor | None) -> nn.Linear:
    outputs, inputs = weight_OI.shape
    linear = nn.Linear(inputs, outputs, bias=bias_O is not None, dtype=weight_OI.dtype)
    with torch.no_grad():
        linear.weight.copy_(weight_OI)
        if bias_O is not None:
            linear.bias.copy_(bias_O)
    return linear


@dataclass(frozen=True)
class _Expected:
    """One block as the oracle has it: A and G, and the gradient in their shape."""

    G: Tensor
    Y_OM: Tensor
    A: Tensor | None = None
    """None: no Kronecker product; Y is then a column."""

    def natural(self, mode: str, power: float, clip: bool, damping: float = DAMPING) -> Tensor:
        """(F + damping)^power Y."""
        kappa = KAPPA if clip else None
        if self.A is None:
            value = DAMPING_G if mode == "factored" else damping
            return dense_kfac.matrix_power(self.G, power, value, kappa) @ self.Y_OM
        return dense_kfac.natural(self.A, self.G, self.Y_OM, power, mode, damping, DAMPING_A, DAMPING_G, kappa)


class KFACReference:
    """What the oracle says of a model on a batch, on the CPU in float64.

    Blocks have the library's names: that of the first layer that uses the weight, or of the parameter itself.
    """

    def __init__(self, subject: KFACSubject, labels: Tensor | None = None, exact_head: bool = False) -> None:
        """Remember what is asked; it is computed when it is first used.

        Args:
            subject: model and batch.
            labels: in place of the batch's own; positions that are `IGNORE` count for nothing.
            exact_head: the head's G from its softmax instead of its gradients.
        """
        self.model = subject.model(torch.device("cpu"))
        self.x, own = subject.batch(torch.device("cpu"))
        self.y = own if labels is None else labels
        self.head, self.exact_head = subject.head, exact_head
        self.terms = int((self.y != IGNORE).sum())
        self._known: dict[tuple[str, str, float, bool, float], Tensor] = {}

    def natural(self, block: str, mode: str, power: float, clip: bool, damping: float = DAMPING) -> Tensor:
        """(F + damping)^power Y of one block; computed once."""
        key = (block, mode, power, clip, damping)
        if key not in self._known:
            self._known[key] = self.blocks[block].natural(mode, power, clip, damping)
        return self._known[key]

    @cached_property
    def blocks(self) -> dict[str, _Expected]:
        """Every block."""
        layers = {n: m for n, m in self.model.named_modules() if isinstance(m, nn.Linear | nn.Embedding | nn.Conv2d)}
        of_twin = self._layers_of_twin(layers)
        users: dict[int, list[str]] = {}
        for name, module in layers.items():
            users.setdefault(id(module.weight), []).append(name)
        found = {
            names[0]: _tied(*(of_twin[n] for n in names)) if names[1:] else of_twin[names[0]]
            for names in users.values()
        }
        in_layers = {id(p) for module in layers.values() for p in module.parameters()}
        others = [name for name, p in self.model.named_parameters() if id(p) not in in_layers]
        return {**found, **self._single_parameters(others)} if others else found

    def _layers_of_twin(self, layers: Mapping[str, nn.Module]) -> dict[str, _Expected]:
        twin, inner = deepcopy(self.model), {}
        for name, module in layers.items():
            inner[name] = name if isinstance(module, nn.Linear) else f"{name}.linear"
            if isinstance(module, nn.Embedding):
                twin.set_submodule(name, _Lookup(module, len(self.x)))
            elif isinstance(module, nn.Conv2d):
                twin.set_submodule(name, _Patches(module))
        twin.zero_grad()
        tokens = dense_kfac.layer_tokens(
            twin, lambda: cross_entropy(twin, self.x, self.y).backward(), list(inner.values())
        )
        found = {}
        for name, within in inner.items():
            linear = twin.get_submodule(within)
            assert isinstance(linear, nn.Linear) and linear.weight.grad is not None
            weights_T = self._weights(len(tokens[within].inputs_TI))
            has_bias = linear.bias is not None
            A, G = dense_kfac.factors(tokens[within], self.terms, 1 / self.terms, has_bias, weights_T)
            if self.exact_head and name == self.head:
                with torch.no_grad():
                    logits_TV = twin(self.x).flatten(0, -2)
                G = dense_kfac.softmax_fisher(logits_TV, self.terms, weights_T)
            parts = [linear.weight.grad]
            if has_bias:
                assert linear.bias.grad is not None
                parts.append(linear.bias.grad[:, None])
            found[name] = _Expected(G, torch.cat(parts, dim=1), A)
        return found

    def _weights(self, tokens: int) -> Tensor:
        """1 for tokens with a loss term, 0 for others; all tokens of a sample share its one label if it has but one."""
        counted = (self.y != IGNORE).double()
        return counted.flatten().repeat_interleave(tokens // counted.numel())

    def _single_parameters(self, names: Sequence[str]) -> dict[str, _Expected]:
        """Parameters outside K-FAC: Σ_i g_i g_iᵀ / N from one backward per sample."""

        def summed(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            return cross_entropy(model, x, y, "sum")

        per_sample = single_sample.per_sample_gradients(self.model, summed, (self.x, self.y), names)
        found = {}
        for name, gradients in per_sample.items():
            g_BP = gradients.flatten(1)
            found[name] = _Expected(g_BP.mT @ g_BP / self.terms, g_BP.sum(0)[:, None] / self.terms)
        return found


def _tied(table: _Expected, head: _Expected) -> _Expected:
    """A weight that is table and head: means of both uses' sides, of trace 1 and weighted by the traces of their blocks.

    The table's sides change places, since it is the head's weight transposed.
    """
    assert table.A is not None and head.A is not None
    of_head = head.A.trace() * head.G.trace()
    of_table = table.A.trace() * table.G.trace()
    share = of_head / (of_head + of_table)
    A = share * head.A / head.A.trace() + (1 - share) * table.G / table.G.trace()
    G = share * head.G / head.G.trace() + (1 - share) * table.A / table.A.trace()
    return _Expected(G * (of_head + of_table) / head.A.trace(), head.Y_OM + table.Y_OM.mT, A * head.A.trace())


# ---- the library -----------------------------------------------------------------------------------------------------


def make_kfac(mode: str = "pi", policy: str = "all", clip: bool = False, **options: Any) -> KFACNaturalGradient:
    """The options of a case; thresholds are such that policies differ on widths this small."""
    if mode == "factored":
        options |= {"damping_A": DAMPING_A, "damping_G": DAMPING_G}
    return KFACNaturalGradient(
        damping=DAMPING,
        damping_mode=mode,
        kfac_policy=policy,
        kfac_big_threshold=30,
        kfac_auto_rho=0.5,
        use_eigenvalue_correction=clip,
        max_condition_number=KAPPA,
        update_freq=1,
        **options,
    )


def _capture(
    kfac: KFACNaturalGradient,
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    reduction: str = "mean",
    scale: float = 1.0,
    **told: Any,
) -> None:
    """One backward inside a capture."""
    model.zero_grad()
    told = {"loss_reduction": reduction, **told}
    with kfac.capture(model, num_terms=y.numel(), **told):
        (scale * cross_entropy(model, x, y, reduction)).backward()


def as_matrix(block: Block, tensors: Mapping[str, Tensor]) -> Tensor:
    """The parameters of a block as Y [O, M], bias last."""
    weight, *bias = (tensors[name] for name in block.spec.parameters)
    if block.A is None:
        return weight.reshape(-1, 1)
    weight = weight.mT if block.spec.layout == "table" else weight.flatten(1)
    return torch.cat([weight, bias[0][:, None]], dim=1) if bias else weight


def compare_factors(kfac: KFACNaturalGradient, expected: Mapping[str, _Expected], case: str) -> Iterator[Comparison]:
    """Both sides of every block; a block that is missing on either side is an error."""
    if set(kfac.kfac_factors) != set(expected):
        raise ValueError(f"blocks {sorted(kfac.kfac_factors)}, expected {sorted(expected)}")
    for name, block in kfac.kfac_factors.items():
        wanted = expected[name]
        if block.A is not None and wanted.A is not None:
            yield Comparison(f"{name} A", case, relative_error(block.A.to_dense(), wanted.A))
        yield Comparison(f"{name} G", case, relative_error(block.G.to_dense(), wanted.G))


def raised_damping(block: Block, mode: str) -> float | None:
    """The damping with which the block's record says that it stands in for the clip; None: the clip is exact."""
    joint = block.clips.get("joint")
    if mode != "joint" or joint is None or not block.G.work.clip_note.startswith("damping raised"):
        return None
    return joint.floor


# ---- checks ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Bench:
    """The checks of one model on one device."""

    subject: KFACSubject
    device: torch.device
    cases: tuple[KFACCase, ...]

    @cached_property
    def reference(self) -> KFACReference:
        """The oracle's word, shared by all checks."""
        return KFACReference(self.subject)

    @property
    def policies(self) -> list[str]:
        """Those of the cases."""
        return list(dict.fromkeys(case.policy for case in self.cases))

    @property
    def extremes(self) -> list[KFACCase]:
        """Cases with the most low-rank factors, and with none."""
        return [case for case in self.cases if case.policy in ("all", "small_only")]

    def library(
        self, device: torch.device | None = None, dtype: torch.dtype = torch.float64
    ) -> tuple[nn.Module, Tensor, Tensor]:
        """Model, inputs and labels."""
        where = device or self.device
        return self.subject.model(where, dtype), *self.subject.batch(where, dtype)

    def factors(self) -> Iterator[Comparison]:
        """A and G under every policy."""
        model, x, y = self.library()
        for policy in self.policies:
            kfac = make_kfac(policy=policy)
            _capture(kfac, model, x, y)
            yield from compare_factors(kfac, self.reference.blocks, policy)

    def natural(self, mode: str) -> Iterator[Comparison]:
        """(F + damping)^p ∇ under every policy and power, with the clip and without."""
        yield from self._natural([case for case in self.cases if case.mode == mode], self.reference)

    def exact_head(self) -> Iterator[Comparison]:
        """The head's G from the softmax, and what is made of it."""
        model, x, y = self.library()
        reference = KFACReference(self.subject, exact_head=True)
        for policy in self.policies:
            kfac = make_kfac(policy=policy, kfac_true_fisher_head=True)
            _capture(kfac, model, x, y)
            yield from compare_factors(kfac, reference.blocks, policy)
        for comparison in self._natural(self.extremes, reference, kfac_true_fisher_head=True):
            if comparison.layer in (self.subject.head, "token_embedding"):
                yield comparison

    def _natural(self, cases: Sequence[KFACCase], reference: KFACReference, **options: Any) -> Iterator[Comparison]:
        model, x, y = self.library()
        for (policy, mode, clip), group in itertools.groupby(cases, lambda c: (c.policy, c.mode, c.clip)):
            kfac = make_kfac(mode, policy, clip, **options)
            _capture(kfac, model, x, y)
            for case in group:
                natural = kfac.compute_natural_gradient(model, case.power)
                for name, block in kfac.kfac_factors.items():
                    damping = raised_damping(block, mode)
                    exact = damping is None
                    wanted = reference.natural(name, mode, case.power, clip and exact, damping or DAMPING)
                    error = relative_error(as_matrix(block, natural), wanted)
                    yield Comparison(name, case.label, error, "" if exact else "clip by a larger damping")

    # ---- Monte Carlo labels ----

    def mc_labels(self) -> Iterator[Comparison]:
        """Factors from drawn labels are those of these labels, and they stand where the batch has labels."""
        _, gradients, counted, kfac = self._drawn(1)
        labels = gradients[0].argmin(-1).masked_fill(~gradients[0].any(-1), IGNORE)
        wrong = int((labels != IGNORE).ne(counted).sum())
        yield Comparison("labelled positions", "mc", float(wrong))
        yield from compare_factors(kfac, KFACReference(self.subject, labels).blocks, "mc")

    def mc_frequencies(self) -> Iterator[Comparison]:
        """Σ log p(label) over draws and positions against its mean, in standard errors: p is that of the own position."""
        logits, gradients, counted, _ = self._drawn(DRAWS, CONTRAST)
        log_p = logits.log_softmax(-1)
        mean = (log_p.exp() * log_p).sum(-1)
        variance = (log_p.exp() * (log_p - mean[..., None]).square()).sum(-1)
        drawn = torch.stack([log_p.gather(-1, g.argmin(-1)[..., None])[..., 0] - mean for g in gradients])
        spread = float((len(gradients) * variance[counted].sum()).sqrt())
        yield Comparison("all positions", f"{len(gradients)} draws", abs(float(drawn[:, counted].sum())) / spread)

    def _drawn(self, draws: int, contrast: float = 1.0) -> tuple[Tensor, list[Tensor], Tensor, KFACNaturalGradient]:
        """Logits, the gradient p − e of every draw at them, and which positions should count, on the CPU.

        A hook of plain torch on the head sees the gradients, and thereby the labels; those of the row proof come before them.
        """
        model, x, y = self.library()
        head = model.get_submodule(self.subject.head)
        assert isinstance(head, nn.Linear)
        with torch.no_grad():
            head.weight.mul_(contrast)
        labels = y.clone()
        if self.subject.causal:
            labels[0, :2] = IGNORE
            labels[-1, -2:] = IGNORE
            last = torch.full_like(labels[:, :1], IGNORE)
            counted = torch.cat([labels[:, 1:], last], dim=1) != IGNORE
            batch: Any = {"input_ids": x, "labels": labels, "attention_mask": torch.ones_like(x)}
        else:
            labels[1] = IGNORE
            counted, batch = labels != IGNORE, (x, labels)
        seen: list[Tensor] = []
        logits: list[Tensor] = []

        def note(module: nn.Module, args: Any, output: Tensor) -> None:
            logits.append(output.detach().cpu())
            if output.requires_grad:
                output.register_hook(lambda gradient: seen.append(gradient.detach().cpu()))

        handle = head.register_forward_hook(note)
        kfac = make_kfac()
        try:
            kfac.collect_kfac_factors(model, batch, "mc", n_samples=draws, causal_shift=self.subject.causal)
        finally:
            handle.remove()
        return logits[-1], seen[-draws:], counted.cpu(), kfac

    # ---- invariances ----

    def twice(self) -> Iterator[Comparison]:
        """The same batch twice is the same Fisher and the same mean gradient."""
        model, x, y = self.library()
        for mode in DAMPING_MODES:
            yield from self._same(model, mode, "batch twice", (torch.cat([x, x]), torch.cat([y, y])))

    def reductions(self) -> Iterator[Comparison]:
        """The Fisher is of loss terms, however the loss adds them up; the natural gradient scales as the gradient does."""
        model, x, y = self.library()
        terms = y.numel()
        for mode in DAMPING_MODES:
            yield from self._same(model, mode, "sum", (x, y), terms, reduction="sum")
            yield from self._same(model, mode, "coefficient", (x, y), 3.0, scale=3.0, loss_reduction=3.0 / terms)
            yield from self._same(model, mode, "loss scale", (x, y), 1024.0, scale=1024.0, loss_scale=1024.0)

    def _same(
        self, model: nn.Module, mode: str, what: str, batch: tuple[Tensor, Tensor], factor: float = 1.0, **how: Any
    ) -> Iterator[Comparison]:
        """Factors and natural gradient of `batch` against those of the plain batch; the gradient is `factor` times its."""
        plain, other = make_kfac(mode), make_kfac(mode)
        _capture(plain, model, *self.subject.batch(self.device))
        natural = plain.compute_natural_gradient(model)
        _capture(other, model, *batch, **how)
        changed = other.compute_natural_gradient(model)
        for name, block in other.kfac_factors.items():
            for side, matrix in block.factors.items():
                wanted = plain.kfac_factors[name].factors[side].to_dense()
                yield Comparison(f"{name} {side}", f"{what}, {mode}", relative_error(matrix.to_dense(), wanted))
        for name, value in changed.items():
            yield Comparison(name, f"{what}, {mode}", relative_error(value / factor, natural[name]))

    # ---- two devices ----

    def devices_float64(self) -> Iterator[Comparison]:
        """Natural gradients in float64, here and on the CPU."""
        for (policy, mode, clip), group in itertools.groupby(self.extremes, lambda c: (c.policy, c.mode, c.clip)):
            sides = []
            for device in (self.device, torch.device("cpu")):
                model, x, y = self.library(device)
                kfac = make_kfac(mode, policy, clip)
                _capture(kfac, model, x, y)
                sides.append((kfac, model))
            for case in group:
                here, there = (kfac.compute_natural_gradient(model, case.power) for kfac, model in sides)
                for name, value in here.items():
                    yield Comparison(name, f"{mode}, {case.label}", relative_error(value, there[name]))

    def devices_float32(self) -> Iterator[Comparison]:
        """Factors of a float32 model stored in float32, here and on the CPU."""
        with _no_tf32():
            for policy in self.policies:
                sides = []
                for device in (self.device, torch.device("cpu")):
                    kfac = make_kfac(policy=policy, woodbury_dtype="fp32")
                    _capture(kfac, *self.library(device, torch.float32))
                    sides.append(kfac.kfac_factors)
                for name, block in sides[0].items():
                    for side, matrix in block.factors.items():
                        wanted = sides[1][name].factors[side].to_dense()
                        yield Comparison(f"{name} {side}", policy, relative_error(matrix.to_dense(), wanted))


@contextmanager
def _no_tf32() -> Iterator[None]:
    """Models compute in float32 proper, so that they can be held to it."""
    before = torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()
    torch.backends.cudnn.allow_tf32 = False
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before[0]
        torch.set_float32_matmul_precision(before[1])


def plan(
    device: torch.device | None = None, models: Sequence[str] = tuple(SUBJECTS), cases: Sequence[KFACCase] = CASES
) -> list[VerifyCheck]:
    """Every check of K-FAC, model by model; nothing is computed yet.

    Args:
        device: where the library runs; None: the GPU if there is one. The oracle runs on the CPU.
        models: names in `SUBJECTS`.
        cases: a sample of them makes the run shorter.

    Returns:
        Checks, to be run by `run_checks`.
    """
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = []
    for name in models:
        bench = _Bench(SUBJECTS[name], device, tuple(cases))
        found += [VerifyCheck(name, "factors A and G", TOLERANCE, bench.factors)]
        for mode in dict.fromkeys(case.mode for case in cases):
            found += [VerifyCheck(name, f"natural gradient, {mode} damping", TOLERANCE, partial(bench.natural, mode))]
        found += [
            VerifyCheck(name, "exact softmax head", TOLERANCE, bench.exact_head),
            VerifyCheck(name, "Monte Carlo labels", TOLERANCE, bench.mc_labels),
            VerifyCheck(name, "Monte Carlo frequencies", STANDARD_ERRORS, bench.mc_frequencies, unit="s.e."),
            VerifyCheck(name, "the batch twice", TOLERANCE, bench.twice),
            VerifyCheck(name, "mean, sum, coefficient, loss scale", TOLERANCE, bench.reductions),
        ]
        if device.type != "cpu":
            found += [
                VerifyCheck(
                    name, f"CPU and {device.type.upper()}, natural gradient", DEVICES_FLOAT64, bench.devices_float64
                ),
                VerifyCheck(
                    name, f"CPU and {device.type.upper()}, fp32 factors", DEVICES_FLOAT32, bench.devices_float32
                ),
            ]
    return found
