"""The distillation loss written out on whole logits in float64, for autograd to differentiate: the oracle.

Nothing here imports the code that it judges.
"""

import math

import torch
from torch.nn import functional as F


def logits(hidden, weight, bias=None, scale=1.0, softcap=None):
    z = hidden @ weight.T
    if bias is not None:
        z = z + bias
    z = z * scale
    return z if softcap is None else softcap * torch.tanh(z / softcap)


def between(log_p, log_q, direction, beta):
    """The divergence of teacher p and student q, summed over outcomes; 0 log 0 = 0."""

    def kl(log_a, log_b):
        term = log_a.exp() * (log_a - log_b)
        return torch.where(log_a == -torch.inf, torch.zeros_like(term), term).sum(-1)

    if direction == "forward" or (direction == "jsd" and beta == 0):
        return kl(log_p, log_q)
    if direction == "reverse" or (direction == "jsd" and beta == 1):
        return kl(log_q, log_p)
    log_m = torch.logsumexp(torch.stack([log_p + math.log(beta), log_q + math.log(1 - beta)]), 0)
    return beta * kl(log_p, log_m) + (1 - beta) * kl(log_q, log_m)


def lumped(z, ids, T):
    """Log-probabilities at T of the kept ids and of all others together, [N, k+1]."""
    log_probs = F.log_softmax(z / T, -1)
    kept = torch.zeros_like(z, dtype=torch.bool).scatter(1, ids, True)
    rest = torch.logsumexp(log_probs.masked_fill(kept, -torch.inf), -1, keepdim=True)
    return torch.cat([log_probs.gather(1, ids), rest], 1)


def loss(
    s, targets, t, T, kd_weight=1.0, ce_weight=0.5, direction="forward", beta=0.5, ignore_index=-100, num_terms=None,
    ids=None,
):  # fmt: skip
    """From logits of student and teacher; `ids` keeps only some of the teacher's, the others count together.

    Returns:
        loss and a dict of metrics.
    """
    valid = targets != ignore_index
    count = int(valid.sum())
    terms = max(1, count) if num_terms is None else num_terms
    s, t, y = s[valid], t[valid], targets[valid]
    ids = None if ids is None else ids[valid]
    common = min(s.shape[1], t.shape[1])
    if ids is None:
        log_q, log_p = F.log_softmax(s[:, :common] / T, -1), F.log_softmax(t[:, :common] / T, -1)
    else:
        log_q, log_p = lumped(s, ids, T), lumped(t, ids, T)
    kl = between(log_p, log_q, direction, beta)
    ce = F.cross_entropy(s, y, reduction="none")
    total = (kd_weight * T**2 * kl.sum() + ce_weight * ce.sum()) / terms
    own = torch.where(y < common, y, 0)
    x = F.log_softmax(t[:, :common], -1).gather(1, own[:, None])[:, 0][y < common]
    with torch.no_grad():
        metrics = {
            "kl": kl.mean(),
            "ce": ce.mean(),
            "agreement": (s[:, :common].argmax(1) == t[:, :common].argmax(1)).double().mean(),
            "teacher_entropy": -(log_p.exp() * log_p.clamp(min=-1e300)).sum(1).mean(),
            "student_entropy": -(log_q.exp() * log_q.clamp(min=-1e300)).sum(1).mean(),
        }
        if ids is not None:
            kept = (ids == y[:, None]).any(1)
            x, ce = x[kept], ce[kept]
        else:
            ce = ce[y < common]
        if len(x) > 1:
            metrics["correlation"] = torch.corrcoef(torch.stack([x, -ce]))[0, 1]
    return total, metrics
