"""Use gramian inside other training libraries; each file imports its library only when it is imported itself.

`transformers`: callbacks for Hugging Face's Trainer, and private training in its own loop. `lightning`: the same as callbacks
of Lightning. `trackers`: TensorBoard and Weights & Biases behind one small interface.
"""
