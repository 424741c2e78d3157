"""The demo: a teacher, its cache and curvature, and three students on the embedded corpus: alone, distilled and private."""
