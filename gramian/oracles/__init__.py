"""Reference implementations in plain float64 torch; they import no other part of the package."""
