"""Hugging Face's `Trainer` with curvature, gradient norms and private training.

```python
from gramian.integrations.transformers import PrivateTrainer

trainer = PrivateTrainer(
    model=model, args=args, train_dataset=data,
    privacy=dict(target_epsilon=8, target_delta=1e-5, max_grad_norm=1.0))
trainer.train()
trainer.epsilon()
```
"""

from gramian.integrations.trainer_callbacks import CurvatureCallback, NormsCallback  # first: names a missing library

from transformers import Trainer  # isort: skip

from gramian.integrations.private_trainer import private_trainer  # isort: skip

PrivateTrainer = private_trainer(Trainer)
"""Trainer with one more argument, `privacy`: a dict with the fields of `TrainerPrivacy`."""

__all__ = ["CurvatureCallback", "NormsCallback", "PrivateTrainer", "private_trainer"]
