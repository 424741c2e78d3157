"""The process grid and every collective: no other package of gramian calls `torch.distributed` collectives itself."""
