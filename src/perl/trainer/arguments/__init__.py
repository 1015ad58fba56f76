"""What a training is told: every argument with its type, its bounds and what it contradicts."""
