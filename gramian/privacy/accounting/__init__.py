"""Privacy accounting: ε of a history of releases (noised sums), and the ledger that records them."""
