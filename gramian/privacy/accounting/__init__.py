"""Privacy accounting: ε of a history of releases, and the ledger that records it."""
