"""Ground floor: the error type, byte amounts, keyed random numbers and durable files; imports no other room."""
