"""The process grid and every collective: no other room calls `torch.distributed` collectives itself."""
