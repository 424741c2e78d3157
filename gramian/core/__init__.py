"""The lowest package: the error type, byte amounts, keyed random numbers and durable files; imports nothing else of gramian."""
