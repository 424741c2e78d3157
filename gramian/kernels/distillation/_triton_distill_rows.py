"""The Triton kernel of distill_rows.py: distillation loss and gradient per token. Importing this imports triton."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl


@triton.jit
def _expm1(x):
    """exp(x) − 1 for any x, relative error about 1e-6."""
    near = x * (1 + x * (0.5 + x * (1 / 6 + x * (1 / 24 + x * (1 / 120 + x * (1 / 720 + x * (1 / 5040)))))))
    return tl.where(tl.abs(x) < 0.5, near, tl.exp(x) - 1)


@triton.jit
def _log1p(x):
    """log(1 + x) for −1 < x <= 0, corrected for the digits that rounding 1 + x loses."""
    plus = 1.0 + x
    lost = plus - 1.0
    return tl.where(lost == 0.0, x, tl.log(plus) * (x / tl.where(lost == 0.0, 1.0, lost)))


@triton.jit
def _excess(p, q, x):
    """p x − p + q for probabilities p, q and x = log(p/q), a term of KL(p‖q), never negative; by a series for small x."""
    near = (
        x * x * (1 / 2 - x * (1 / 6 - x * (1 / 24 - x * (1 / 120 - x * (1 / 720 - x * (1 / 5040 - x * (1 / 40320)))))))
    )
    return tl.where(tl.abs(x) < 0.5, p * near, p * x - p + q)


@triton.jit
def _to_mixture(x, beta):
    """log(p/m) and log(q/m) of the mixture m = βp + (1−β)q, from x = log(p/q) and β = `beta`."""
    small = _expm1(-tl.abs(x))
    of_p = -_log1p((1 - beta) * small)
    of_q = -_log1p(beta * small)
    return tl.where(x >= 0, of_p, of_q + x), tl.where(x >= 0, of_p - x, of_q)


@triton.jit
def squash(x, scale, cap, CAP: tl.constexpr):
    """Logits from head products x: cap · tanh(scale · x / cap) if CAP, else scale · x."""
    z = x * scale
    if CAP:
        # tanh y = 1 − 2 / (exp(2y) + 1), which has the right limits at both ends.
        z = cap * (1 - 2 / (tl.exp(2 * (z / cap)) + 1))
    return z


@triton.jit
def squash_derivative(dz, z, scale, cap, CAP: tl.constexpr):
    """The gradient of head products x from the gradient `dz` of their logits z = cap · tanh(scale · x / cap), or scale · x."""
    if CAP:
        dz *= 1 - (z / cap) * (z / cap)
    return dz * scale


@triton.jit
def _logits(pointer, inside, scale, cap, CAP: tl.constexpr):
    """Load head products and return their logits in float32; where `inside` is false, the logit of a product of 0."""
    return squash(tl.load(pointer, mask=inside, other=0.0).to(tl.float32), scale, cap, CAP)


@triton.jit
def _store(pointer, inside, dz, z, scale, cap, CAP: tl.constexpr):
    """Write the gradient of the head products, computed from the gradient `dz` of the logits z, over the products."""
    dx = squash_derivative(dz, z, scale, cap, CAP)
    tl.store(pointer, dx.to(pointer.dtype.element_ty), mask=inside)


@triton.jit
def _add_to_sum(total, z, inside, factor, old, new):
    """Add a block of logits z to the running sum Σ exp(factor · (z − largest)), rescaled from the `old` largest to `new`."""
    return total * tl.exp(factor * (old - new)) + tl.where(inside, tl.exp(factor * (z - new)), 0.0)


@triton.jit
def _normalise(s, t, inside, u, s_max, t_max, q_sum, q1_sum, p_sum, p1_sum):
    """First pass, one block of ids: update the largest logits of student and teacher, and the sums for their softmax.

    `q_sum` and `q1_sum` are Σ exp(u s) and Σ exp(s) of the student's logits s, `p_sum` and `p1_sum` those of the teacher's t,
    all relative to the largest logit; u = 1/T.
    """
    s_new = tl.maximum(s_max, tl.max(tl.where(inside, s, -float("inf")), 0))
    t_new = tl.maximum(t_max, tl.max(tl.where(inside, t, -float("inf")), 0))
    q_sum = _add_to_sum(q_sum, s, inside, u, s_max, s_new)
    q1_sum = _add_to_sum(q1_sum, s, inside, 1.0, s_max, s_new)
    p_sum = _add_to_sum(p_sum, t, inside, u, t_max, t_new)
    p1_sum = _add_to_sum(p1_sum, t, inside, 1.0, t_max, t_new)
    return s_new, t_new, q_sum, q1_sum, p_sum, p1_sum


@triton.jit
def _compare(
    s, t, inside, u, q_log, p_log, beta, qs, pt, value, other, left, left_mean, right, right_mean, agree,
    DIRECTION: tl.constexpr,
):  # fmt: skip
    """Second pass, one block of ids: add it to the running sums of the divergence D, its slope in u = 1/T, and the agreement.

    s and t are student and teacher logits minus their largest, q and p their softmax at u; `q_log`, `p_log` are log Σ exp(u s)
    and log Σ exp(u t). of_s and of_t are ∂D/∂(u s) and ∂D/∂(u t) before centring. Running sums: `qs`, `pt`: Σ q s, Σ p t;
    `value`, `other`: Σ of D's terms (for "jsd" those of p and of q); `left`, `right`: Σ of_s · s, Σ of_t · t; `left_mean`,
    `right_mean`: Σ of_s, Σ of_t. Returns these sums, the agreement, and of_s.
    """
    log_q = u * s - q_log
    log_p = u * t - p_log
    x = log_p - log_q
    q = tl.where(inside, tl.exp(log_q), 0.0)
    p = tl.where(inside, tl.exp(log_p), 0.0)
    if DIRECTION == 0:
        value += _excess(p, q, x)
        of_s = q - p
        of_t = p * x
    elif DIRECTION == 1:
        value += _excess(q, p, -x)
        of_s = -q * x
        of_t = p - q
    else:
        log_pm, log_qm = _to_mixture(x, beta)
        m = beta * p + (1 - beta) * q
        value += _excess(p, m, log_pm)
        other += _excess(q, m, log_qm)
        of_s = (1 - beta) * q * log_qm
        of_t = beta * p * log_pm
    agree = tl.where(inside & (s == 0.0) & (t == 0.0), 1, agree)
    qs += q * s
    pt += p * t
    left += of_s * s
    left_mean += of_s
    right += of_t * t
    right_mean += of_t
    return qs, pt, value, other, left, left_mean, right, right_mean, agree, of_s


@triton.jit
def _kd_gradient(s, t, u, q_log, p_log, beta, kl, of_q, DIRECTION: tl.constexpr):
    """∂D/∂(u s) of the reverse or Jensen-Shannon divergence D; s, t: logits of student, teacher minus their largest; u = 1/T.

    `kl` is D and `of_q` is KL(q‖m), which the second pass has summed; `q_log`, `p_log` are log Σ exp(u s), log Σ exp(u t).
    """
    log_q = u * s - q_log
    x = u * t - p_log - log_q
    if DIRECTION == 1:
        inner = -x - kl
    else:
        _, log_qm = _to_mixture(x, beta)
        inner = (1 - beta) * (log_qm - of_q)
    return tl.exp(log_q) * inner


@triton.jit
def _ce_gradient(z, ids, target, ce_weight, q1_lse):
    return ce_weight * tl.exp(z - q1_lse) - tl.where(ids == target, ce_weight, 0.0)


@triton.jit
def distill_rows(
    rows, student, teacher, targets, temperature, kd_weight, ce_weight, beta,
    student_scale, student_cap, teacher_scale, teacher_cap, vocabulary, common, aligned, ignore_index,
    row_stride, student_stride, teacher_stride, target_stride,
    DIRECTION: tl.constexpr, GRADIENT: tl.constexpr, STUDENT_CAP: tl.constexpr, TEACHER_CAP: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One token: normalisers in a first pass over the token ids, the divergence in a second, the gradient in it or in a third.

    DIRECTION: 0 forward, 1 reverse, 2 Jensen-Shannon. The gradient of the last two needs the divergence, hence the third pass.
    `common` is the number of ids that student and teacher share, and `aligned` the largest multiple of 16 up to it. The ids
    between them are a block of their own: with a mask that may end anywhere, loads would not be vectorised.
    """
    token = tl.program_id(0).to(tl.int64)
    student += token * student_stride
    teacher += token * teacher_stride
    rows += token
    target = tl.load(targets + token * target_stride).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    if target == ignore_index:
        for row in tl.static_range(9):
            tl.store(rows + row * row_stride, 0.0)
        if GRADIENT:
            zeros = tl.zeros((BLOCK,), tl.float32).to(student.dtype.element_ty)
            for start in range(0, aligned, BLOCK):
                tl.store(student + start + lanes, zeros, mask=start + lanes < aligned)
            for start in range(aligned, vocabulary, BLOCK):
                tl.store(student + start + lanes, zeros, mask=start + lanes < vocabulary)
    else:
        # Read before anything is written: the second pass puts gradients in the student's place.
        has_target = (target >= 0) & (target < vocabulary)
        known = (target >= 0) & (target < common)
        gold = _logits(student + target, has_target, student_scale, student_cap, STUDENT_CAP)
        teacher_gold = _logits(teacher + target, known, teacher_scale, teacher_cap, TEACHER_CAP)
        T = tl.load(temperature)
        u = 1 / T
        left_over = aligned + lanes
        is_left_over = left_over < common

        s_max = -float("inf")
        t_max = -float("inf")
        q_sum = tl.zeros((BLOCK,), tl.float32)
        q1_sum = tl.zeros((BLOCK,), tl.float32)
        p_sum = tl.zeros((BLOCK,), tl.float32)
        p1_sum = tl.zeros((BLOCK,), tl.float32)
        for start in tl.range(0, aligned, BLOCK, num_stages=STAGES):
            ids = start + lanes
            inside = ids < aligned
            s = _logits(student + ids, inside, student_scale, student_cap, STUDENT_CAP)
            t = _logits(teacher + ids, inside, teacher_scale, teacher_cap, TEACHER_CAP)
            s_max, t_max, q_sum, q1_sum, p_sum, p1_sum = _normalise(
                s, t, inside, u, s_max, t_max, q_sum, q1_sum, p_sum, p1_sum
            )
        if aligned < common:
            s = _logits(student + left_over, is_left_over, student_scale, student_cap, STUDENT_CAP)
            t = _logits(teacher + left_over, is_left_over, teacher_scale, teacher_cap, TEACHER_CAP)
            s_max, t_max, q_sum, q1_sum, p_sum, p1_sum = _normalise(
                s, t, is_left_over, u, s_max, t_max, q_sum, q1_sum, p_sum, p1_sum
            )
        # The student's own ids beyond those of the teacher count in the cross entropy alone.
        all_max = s_max
        for start in range(common, vocabulary, BLOCK):
            ids = start + lanes
            inside = ids < vocabulary
            s = _logits(student + ids, inside, student_scale, student_cap, STUDENT_CAP)
            all_new = tl.maximum(all_max, tl.max(tl.where(inside, s, -float("inf")), 0))
            q1_sum = _add_to_sum(q1_sum, s, inside, 1.0, all_max, all_new)
            all_max = all_new
        q_log = tl.log(tl.sum(q_sum, 0))
        p_log = tl.log(tl.sum(p_sum, 0))
        q1_lse = all_max + tl.log(tl.sum(q1_sum, 0))
        p1_lse = t_max + tl.log(tl.sum(p1_sum, 0))

        qs = tl.zeros((BLOCK,), tl.float32)
        pt = tl.zeros((BLOCK,), tl.float32)
        value = tl.zeros((BLOCK,), tl.float32)
        other = tl.zeros((BLOCK,), tl.float32)
        left = tl.zeros((BLOCK,), tl.float32)
        left_mean = tl.zeros((BLOCK,), tl.float32)
        right = tl.zeros((BLOCK,), tl.float32)
        right_mean = tl.zeros((BLOCK,), tl.float32)
        agree = tl.zeros((BLOCK,), tl.int32)
        for start in tl.range(0, aligned, BLOCK, num_stages=STAGES):
            ids = start + lanes
            inside = ids < aligned
            z = _logits(student + ids, inside, student_scale, student_cap, STUDENT_CAP)
            t = _logits(teacher + ids, inside, teacher_scale, teacher_cap, TEACHER_CAP) - t_max
            qs, pt, value, other, left, left_mean, right, right_mean, agree, of_s = _compare(
                z - s_max, t, inside, u, q_log, p_log, beta,
                qs, pt, value, other, left, left_mean, right, right_mean, agree, DIRECTION,
            )  # fmt: skip
            if GRADIENT and DIRECTION == 0:
                dz = kd_weight * T * of_s + _ce_gradient(z, ids, target, ce_weight, q1_lse)
                _store(student + ids, inside, dz, z, student_scale, student_cap, STUDENT_CAP)
        if aligned < common:
            z = _logits(student + left_over, is_left_over, student_scale, student_cap, STUDENT_CAP)
            t = _logits(teacher + left_over, is_left_over, teacher_scale, teacher_cap, TEACHER_CAP) - t_max
            qs, pt, value, other, left, left_mean, right, right_mean, agree, of_s = _compare(
                z - s_max, t, is_left_over, u, q_log, p_log, beta,
                qs, pt, value, other, left, left_mean, right, right_mean, agree, DIRECTION,
            )  # fmt: skip
            if GRADIENT and DIRECTION == 0:
                dz = kd_weight * T * of_s + _ce_gradient(z, left_over, target, ce_weight, q1_lse)
                _store(student + left_over, is_left_over, dz, z, student_scale, student_cap, STUDENT_CAP)
        s_mean = tl.sum(qs, 0)
        t_mean = tl.sum(pt, 0)
        slope = tl.sum(left, 0) - s_mean * tl.sum(left_mean, 0) + tl.sum(right, 0) - t_mean * tl.sum(right_mean, 0)
        kl = tl.sum(value, 0)
        of_q = tl.sum(other, 0)
        if DIRECTION == 2:
            kl = beta * kl + (1 - beta) * of_q
        tl.store(rows + 0 * row_stride, 1.0)
        tl.store(rows + 1 * row_stride, kl)
        tl.store(rows + 2 * row_stride, tl.where(has_target, q1_lse - gold, float("nan")))
        tl.store(rows + 3 * row_stride, tl.max(agree, 0).to(tl.float32))
        tl.store(rows + 4 * row_stride, p_log - u * t_mean)
        tl.store(rows + 5 * row_stride, q_log - u * s_mean)
        tl.store(rows + 6 * row_stride, known.to(tl.float32))
        tl.store(rows + 7 * row_stride, tl.where(known, teacher_gold - p1_lse, 0.0))
        tl.store(rows + 8 * row_stride, 2 * T * kl - slope)

        if GRADIENT and DIRECTION != 0:
            for start in tl.range(0, aligned, BLOCK, num_stages=STAGES):
                ids = start + lanes
                inside = ids < aligned
                z = _logits(student + ids, inside, student_scale, student_cap, STUDENT_CAP)
                t = _logits(teacher + ids, inside, teacher_scale, teacher_cap, TEACHER_CAP)
                dz = kd_weight * T * _kd_gradient(z - s_max, t - t_max, u, q_log, p_log, beta, kl, of_q, DIRECTION)
                dz += _ce_gradient(z, ids, target, ce_weight, q1_lse)
                _store(student + ids, inside, dz, z, student_scale, student_cap, STUDENT_CAP)
            if aligned < common:
                z = _logits(student + left_over, is_left_over, student_scale, student_cap, STUDENT_CAP)
                t = _logits(teacher + left_over, is_left_over, teacher_scale, teacher_cap, TEACHER_CAP)
                dz = kd_weight * T * _kd_gradient(z - s_max, t - t_max, u, q_log, p_log, beta, kl, of_q, DIRECTION)
                dz += _ce_gradient(z, left_over, target, ce_weight, q1_lse)
                _store(student + left_over, is_left_over, dz, z, student_scale, student_cap, STUDENT_CAP)
        if GRADIENT:
            for start in range(common, vocabulary, BLOCK):
                ids = start + lanes
                inside = ids < vocabulary
                z = _logits(student + ids, inside, student_scale, student_cap, STUDENT_CAP)
                dz = _ce_gradient(z, ids, target, ce_weight, q1_lse)
                _store(student + ids, inside, dz, z, student_scale, student_cap, STUDENT_CAP)
