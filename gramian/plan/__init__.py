"""Plans: bytes and FLOPs that follow from shapes alone, with the tables and memory budgets that all planners share."""
