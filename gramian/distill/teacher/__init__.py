"""Teachers: how a language model is read, checked and run, and the types of its signal."""
