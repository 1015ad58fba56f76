"""The public door to trainer callbacks: what a recipe's run does beside its steps, for scripts too."""
