"""Scores of policies beside each other: differences with intervals, and p values corrected for their number."""
