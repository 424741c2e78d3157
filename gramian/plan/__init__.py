"""Plans: bytes and FLOPs that follow from shapes alone, with the rows, tables and budgets that all planners share."""
