"""The demo: a teacher, its cache, and two equal students on the embedded corpus, one distilled and one without a teacher; a private student; the teacher's curvature."""
