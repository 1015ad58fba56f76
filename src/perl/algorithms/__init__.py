"""What is minimised: advantages, the objective of each token, corrections, metrics; pure functions of tensors."""
