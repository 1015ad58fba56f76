"""The only place that knows lighteval."""
