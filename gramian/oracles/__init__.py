"""Reference implementations in plain float64 torch; they import no other room of the package."""
