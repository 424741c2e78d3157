"""The commands `gramian profile clipping | kfac | train`."""
