"""The demo: a teacher, its cache, a student distilled from it and a twin without a teacher, on the embedded corpus."""
