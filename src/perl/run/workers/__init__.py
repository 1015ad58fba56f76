"""Processes that compare answers and can be killed."""
