"""What happens beside training: logs, the live line, curves, an orderly stop."""
