"""What a run of a recipe does beside its steps."""
