"""What a task is, how a completion is judged, and how verdicts become scores with intervals."""
