"""Runs beside each other: one table, sorted by score, with what differs and how sure the differences are."""
