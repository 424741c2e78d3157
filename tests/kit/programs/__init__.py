"""Random root modules from a grammar: what users do between layers, right and wrong.

Usage::

    from tests.kit.programs import Program, outcome
    print(outcome(17))                       # the program of seed 17: exact, refused or wrong

A program is a chain of productions. A production draws what it needs from a `Draft` and returns a step ``step(h, run)``
from h [N, T, D] to [N, T, D]; N is the number of samples, or a multiple of it inside windows. A step must run for any N,
because the single-sample loop runs it on a batch of one. To add a production, write the function and decorate it:
``@ordinary`` if every layer in it sees one row per sample, k rows per sample next to each other, or one row of no sample
that is broadcast over the samples in their order; ``@unusual`` for everything else. Whether samples are independent is not
declared but measured (`truth`). Ordinary and independent: a capture must be exact. Else it must be exact or refuse.
"""

from tests.kit.programs.outcome import Outcome, merged, outcome, private_outcome, table, tally
from tests.kit.programs.program import Program

__all__ = ["Outcome", "Program", "merged", "outcome", "private_outcome", "table", "tally"]
