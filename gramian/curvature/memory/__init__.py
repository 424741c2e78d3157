"""Memory plans of K-FAC: bytes on every device, computed from shapes before anything is allocated."""
