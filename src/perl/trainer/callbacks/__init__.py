"""What the trainer itself does beside its steps."""
