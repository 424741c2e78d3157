"""Teachers: how a language model's hidden states and head are read, checked and run, and the types of its signal."""
