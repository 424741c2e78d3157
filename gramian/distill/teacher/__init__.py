"""Teachers: how a language model is read, checked and run, and the signal it gives."""
