"""`distill_loss`: the public distillation loss from hidden states, and the checks of its arguments.

Legend: N tokens, D width (of student or teacher), V vocabulary, K ids of a token. u = 1/T.
"""

import torch
from torch import Tensor

from gramian.core.dtypes import wide_dtype
from gramian.core.errors import GramianError
from gramian.distill.loss.chunked_loss import ChunkedLoss, LossCall, TeacherRows, chunk_tokens, loss_of, run_chunks
from gramian.distill.loss.head import Head
from gramian.distill.loss.loss_metrics import DistillOutput, sums_of
from gramian.distill.loss.projection import check_sides, projection_of
from gramian.distill.loss.sparse_tail import tail_at
from gramian.distill.loss.teacher_rows import DenseTeacher, NoTeacher, SampledTeacher, SparseTeacher
from gramian.distill.teacher.signal import Tail
from gramian.kernels.distillation.distill_rows import RowObjective
from gramian.kernels.distillation.divergence import DIRECTIONS, EMPTY
from gramian.kernels.launch import takes_kernel

TORCH_ROWS = 10
"""Number of temporary float32 vectors of V entries per token that the plain torch path needs beside the logits."""


def distill_loss(
    student_hidden: Tensor,
    student_weight: Tensor | Head,
    targets: Tensor,
    teacher_hidden: Tensor | None = None,
    teacher_weight: Tensor | Head | None = None,
    *,
    temperature: float | Tensor = 2.0,
    kd_weight: float = 1.0,
    ce_weight: float = 0.5,
    direction: str = "forward",
    beta: float = 0.5,
    ignore_index: int = -100,
    num_terms: float | Tensor | None = None,
    teacher_topk: tuple[Tensor, Tensor, Tail | None] | None = None,
    teacher_sampled: tuple[Tensor, Tensor] | None = None,
) -> DistillOutput:
    """The distillation loss (kd_weight · T² · Σ D(p, q) + ce_weight · Σ CE) / num_terms over the tokens with a target.

    With teacher logits t, student logits s, p = softmax(t/T), q = softmax(s/T) and m = βp + (1−β)q:

        "forward"  D = KL(p‖q)
        "reverse"  D = KL(q‖p)
        "jsd"      D = β KL(p‖m) + (1−β) KL(q‖m) for 0 < β < 1. It vanishes like β KL(p‖q) for β → 0 and like (1−β) KL(q‖p) for
                   β → 1; at β = 0 and β = 1 themselves D is, as in TRL and Liger, KL(p‖q) and KL(q‖p).

    Gradients are computed in the forward pass; backward scales them and can run once. The gradient of the student's weight is
    summed in float32 (float64 for float64 inputs) and rounded once. T may be a tensor that requires grad: its gradient is
    exact. No gradient reaches the teacher. The call does not wait for the device.

    If the vocabularies differ in length, p and q are over the ids of both, each normalised over them, and the cross entropy is
    over all ids of the student. Hidden states of tokens that do not count may have any finite value.

    The teacher is exactly one of: hidden states with a weight, `teacher_topk`, `teacher_sampled`; with kd_weight = 0 it may be
    left out (cross entropy alone).

    Cost: 2·N·V·(3·Ds + Dt) FLOPs, with the widths Ds of the student and Dt of the teacher; memory for the gradient of the
    student's weight in float32 and for a chunk of logits, see `chunk_tokens`.

    Args:
        student_hidden: the student's final hidden states, [N, Ds].
        student_weight: [V, Ds], or a head with bias, scale or softcap. It may be tied to the embedding.
        targets: [N], integers; tokens whose target is `ignore_index` do not count.
        teacher_hidden: the teacher's final hidden states, [N, Dt].
        teacher_weight: [V, Dt], or a head.
        temperature: a number above 0, or a 0-dim tensor on the student's device, whose value is not read on the host.
        kd_weight: factor of the divergence.
        ce_weight: factor of the cross entropy.
        direction: "forward", "reverse" or "jsd".
        beta: for "jsd", from 0 to 1.
        ignore_index: the target of tokens that do not count.
        num_terms: divisor of the sums, such as the number of tokens of a step of several micro-batches. A number above 0, or a
            0-dim tensor; None: the counted tokens of this call, at least 1.
        teacher_topk: (ids [N, K], logits [N, K], tail) in place of hidden states and weight: distinct ids (a logit of −∞
            has no mass), and the tail curve of all other ids with tensors [N, Q]. D is then over K + 1 outcomes, the last for
            all other ids. Without a tail the K ids have all mass, and "reverse" raises unless they are the whole vocabulary,
            since it would be infinite. A number T outside the curve's knots raises; for a tensor T the curve continues along
            its tangent.
        teacher_sampled: (ids [N, K], weights [N, K]) drawn from the teacher at this temperature, with weights that sum to 1 (in
            expectation): D becomes −Σ w log q, "forward" only, and T may not require grad.

    Returns:
        The loss, and sums for metrics (`metrics_of`). Metrics are means over the counted tokens of this call.

    Raises:
        GramianError: naming the argument that does not fit.

    Example:
        >>> hidden, weight = torch.randn(6, 8, requires_grad=True), torch.randn(50, 8, requires_grad=True)
        >>> out = distill_loss(hidden, weight, torch.randint(50, (6,)), torch.randn(6, 16), torch.randn(50, 16))
        >>> out.loss.backward()
        >>> out.agreement.shape
        torch.Size([])
    """
    head = _as_head(student_weight)
    if targets.dim() != 1 or targets.dtype.is_floating_point or targets.dtype == torch.bool:
        raise GramianError(f"targets: {targets.dtype} {list(targets.shape)}; expected integers [N]")
    check_sides(student_hidden, head, len(targets), "student")
    _check_options(temperature, direction, beta, num_terms, student_hidden.device)
    if direction == "jsd" and beta in (0, 1):
        direction = DIRECTIONS[int(beta)]
    _check_ids(targets, len(head.weight_VD), "targets", ignore_index)
    learns = isinstance(temperature, Tensor) and temperature.requires_grad and torch.is_grad_enabled()
    _check_teacher(teacher_hidden, teacher_weight, teacher_topk, teacher_sampled, learns, needed=kd_weight != 0)

    student = projection_of(student_hidden, head)
    wide = wide_dtype(student.hidden_ND)
    at = _on_device(temperature, student_hidden.device, wide)
    teacher: TeacherRows
    if teacher_hidden is not None and teacher_weight is not None:
        check_sides(teacher_hidden, _as_head(teacher_weight), len(targets), "teacher")
        side = projection_of(teacher_hidden, _as_head(teacher_weight))
        wide = wide_dtype(student.hidden_ND, side.hidden_ND)
        logits = student.vocabulary * student.hidden_ND.element_size() + side.vocabulary * side.hidden_ND.element_size()
        if not takes_kernel(student.hidden_ND, side.hidden_ND):
            logits += TORCH_ROWS * 4 * student.vocabulary
        chunk = max(1, min(chunk_tokens(logits), len(targets)))
        teacher = DenseTeacher(side, side.buffer(chunk))
    else:
        rows = student.hidden_ND.element_size() + (0 if takes_kernel(student.hidden_ND) else TORCH_ROWS * 4)
        chunk = chunk_tokens(rows * student.vocabulary)
        if teacher_topk is not None:
            u = 1 / at if isinstance(temperature, Tensor) else 1 / temperature
            teacher = _sparse_teacher(teacher_topk, u, len(targets), student.vocabulary, direction)
        elif teacher_sampled is not None:
            teacher = _sampled_teacher(teacher_sampled, len(targets), student.vocabulary, direction, learns)
        else:
            teacher = NoTeacher()
    objective = RowObjective(direction, float(beta), float(kd_weight), float(ce_weight), ignore_index)
    call = LossCall(student, teacher, targets.to(torch.int64), at.to(wide), objective, num_terms, chunk, wide)
    if torch.is_grad_enabled():
        loss, sums = ChunkedLoss.apply(  # type: ignore[no-untyped-call]
            student_hidden, head.weight_VD, head.bias_V, temperature if learns else None, call
        )
        return DistillOutput(loss, sums)
    rows_RN, terms, _ = run_chunks(call, hidden=False, weight=False, bias=False)
    sums = sums_of(rows_RN)
    return DistillOutput(loss_of(call, sums, terms), sums)


def _as_head(weight: Tensor | Head) -> Head:
    return weight if isinstance(weight, Head) else Head(weight)


def _on_device(temperature: float | Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    if isinstance(temperature, Tensor):
        return temperature.detach().to(device=device, dtype=dtype, non_blocking=True)
    return torch.full((), temperature, device=device, dtype=dtype)


def _check_options(
    temperature: float | Tensor, direction: str, beta: float, num_terms: float | Tensor | None, device: torch.device
) -> None:
    if isinstance(temperature, Tensor):
        if temperature.dim() or not temperature.dtype.is_floating_point:
            raise GramianError(
                f"temperature: {temperature.dtype} {list(temperature.shape)}; expected a 0-dim float tensor"
            )
        if temperature.requires_grad and temperature.device != device:
            raise GramianError(f"temperature: on {temperature.device}; expected on {device}, beside student_hidden")
    elif not 0 < temperature < float("inf"):
        raise GramianError(f"temperature: {temperature}; expected a number above 0")
    if direction not in DIRECTIONS:
        raise GramianError(f"direction: {direction!r}; expected one of {', '.join(DIRECTIONS)}")
    if not 0 <= beta <= 1:
        raise GramianError(f"beta: {beta}; expected 0 to 1")
    if isinstance(num_terms, Tensor):
        if num_terms.dim():
            raise GramianError(f"num_terms: {list(num_terms.shape)}; expected a number or a 0-dim tensor")
    elif num_terms is not None and not 0 < num_terms < float("inf"):
        raise GramianError(f"num_terms: {num_terms}; expected a number above 0")


def _check_teacher(
    hidden: Tensor | None,
    weight: Tensor | Head | None,
    topk: tuple[Tensor, Tensor, Tail | None] | None,
    sampled: tuple[Tensor, Tensor] | None,
    learns: bool,
    needed: bool,
) -> None:
    dense = hidden is not None and weight is not None
    given = [dense, topk is not None, sampled is not None].count(True)
    if given > 1 or given < needed or (hidden is None) != (weight is None):
        raise GramianError(
            "teacher: expected teacher_hidden with teacher_weight, or teacher_topk, or teacher_sampled, or kd_weight=0 and none"
        )
    parts = [hidden, *(topk or ())[:2], *(sampled or ())]
    if learns and any(isinstance(part, Tensor) and part.is_inference() for part in parts):
        raise GramianError(
            "teacher: made in inference mode, which a learnable temperature cannot use; expected torch.no_grad() around it"
        )


def _check_ids(ids: Tensor, vocabulary: int, name: str, ignore_index: int | None = None) -> None:
    """Raise a GramianError if an id is neither in 0 … vocabulary - 1 nor `ignore_index`; `name` is the argument in the message.

    Only ids on the CPU are checked, since reading others would wait for a device.
    """
    if ids.device.type != "cpu" or not ids.numel():
        return
    outside = (ids < 0) | (ids >= vocabulary)
    if ignore_index is not None:
        outside &= ids != ignore_index
    if outside.any():
        raise GramianError(f"{name}: {int(ids[outside][0])}; expected ids of the student, 0 to {vocabulary - 1}")


def _check_id_lists(ids: Tensor, values: Tensor, tokens: int, vocabulary: int, name: str) -> None:
    if ids.dim() != 2 or ids.shape[0] != tokens or ids.shape != values.shape or not ids.shape[1]:
        raise GramianError(
            f"{name}: ids {list(ids.shape)} and values {list(values.shape)}; expected both [{tokens}, K] with K at least 1"
        )
    _check_ids(ids, vocabulary, name)


def _sparse_teacher(
    topk: tuple[Tensor, Tensor, Tail | None], u: float | Tensor, tokens: int, vocabulary: int, direction: str
) -> SparseTeacher:
    ids, logits, tail = topk
    _check_id_lists(ids, logits, tokens, vocabulary, "teacher_topk")
    if tail is None:
        if direction == "reverse" and ids.shape[1] < vocabulary:
            raise GramianError(
                'direction: "reverse" is infinite for a teacher_topk without tail; expected "forward" or "jsd", or a tail'
            )
        rest = rest_at_one = torch.full(ids.shape[:1], EMPTY, device=ids.device)
        slope = torch.zeros_like(rest)
    else:
        if tail.values_BTQ.shape != (tokens, len(tail.knots_Q)) or tail.slopes_BTQ.shape != tail.values_BTQ.shape:
            raise GramianError(
                f"teacher_topk: tail {list(tail.values_BTQ.shape)}; expected [{tokens}, {len(tail.knots_Q)}], tokens by knots"
            )
        rest, slope = tail_at(tail, u)
        # As a tensor: the curve may not reach T = 1, and a metric should not raise.
        rest_at_one, _ = tail_at(tail, torch.ones((), device=ids.device))
    # An id may have no mass, logit −∞: 0 · log 0 is 0.
    values = logits.detach().to(torch.promote_types(logits.dtype, torch.float32)).clamp(min=EMPTY)
    return SparseTeacher(ids.detach().to(torch.int64), values, rest, slope, rest_at_one)


def _sampled_teacher(
    sampled: tuple[Tensor, Tensor], tokens: int, vocabulary: int, direction: str, learns: bool
) -> SampledTeacher:
    ids, weights = sampled
    _check_id_lists(ids, weights, tokens, vocabulary, "teacher_sampled")
    if direction != "forward":
        raise GramianError(
            f'direction: "{direction}" cannot be computed from samples of the teacher; expected "forward"'
        )
    if learns:
        raise GramianError(
            "temperature: a sampled teacher is valid only at the one it was drawn at; expected no gradient"
        )
    return SampledTeacher(ids.detach().to(torch.int64), weights.detach())
