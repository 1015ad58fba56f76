"""An optimizer step: the log-probs that it needs, the loss's passes, the critic's, the update."""
