"""Every collective of gramian lives here."""
