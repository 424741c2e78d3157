"""What ε is for: the data sets whose outcomes it compares differ in one record, or in one unit of several records."""

from gramian.privacy.accounting.ledger import Ledger

ADJACENCY = "add or remove one record"
"""What two data sets differ in whose outcomes ε compares."""
ADJACENCY_OF_UNITS = "add or remove one unit"
"""The same where `make_private` has unit_of: all records of a user or document."""


def adjacencies(ledger: Ledger) -> set[str]:
    """What ε of the releases in a ledger is for; several texts if they are for different units."""
    return {str(facts.get("adjacency", ADJACENCY)) for facts, _ in ledger.chain.runs}
