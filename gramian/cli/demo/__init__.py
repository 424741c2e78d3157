"""The demo: a teacher, its cache, a student taught by it and its twin without a teacher, on the embedded corpus."""
