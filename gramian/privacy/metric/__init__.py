"""Clipping and noise in the metric of K-FAC factors from public data.

| module | what is in it |
|---|---|
| `metric_block` | the metric of one layer: (F + damping)^(∓1/2) of its two sides, norms and noise in it |
| `public_metric` | the metric of a model: its blocks, what they rest on, and when they may change |
"""
