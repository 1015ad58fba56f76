"""What may leave this machine."""
